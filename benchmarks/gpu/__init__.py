"""Everything that needs a GPU, in one command: right, then fast, then a step, then what is left."""
