"""A search over options of an experiment, on its validation rows, and what methods reach by it."""
