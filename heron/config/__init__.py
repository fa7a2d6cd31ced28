"""The experiment as typed sections of a YAML file.

In come a file of `configs/`, a method and `key=value` words; out comes a frozen `Config` in which
every key was checked, or one error that lists all faults. Nothing here loads torch.
"""
