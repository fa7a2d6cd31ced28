"""The command `heron`, one file a group of verbs.

In come the words of a command line, checked against the verb's signature; out come the status, what
the verb prints, and the command that follows it.
"""
