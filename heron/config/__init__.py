"""The experiment as typed sections of a YAML file."""
