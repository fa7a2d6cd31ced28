"""The experiment: the sections of every room put together, read from YAML and `key=value`.

Each section is defined beside what it configures: `data`, `negatives`, `model`, `objective`,
`evaluate`. `config` puts them together, `overrides` reads files and changes, `describe` explains a
key, `fingerprint` names what a run's numbers depend on, and `open_data` opens the data of a whole
experiment. Only rooms above this one know all sections.
"""
