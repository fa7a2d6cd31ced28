"""What every room may import, and what imports no other room.

Errors that say what to do (`errors`), files that are whole or absent (`atomic`, `artefact`), names
and classes by their dotted path (`dotted`), sections of options (`sections`), packages that may be
missing (`extras`), worker processes and cores (`workers`, `cores`), and the terminal.
"""
