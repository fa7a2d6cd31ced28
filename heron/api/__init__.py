"""What a user calls from Python: an experiment goes in, a trained model and its answers come out.

`run` has `load_config` and `pretrain`, `job` the same from a command line, for every process of a
launch; `model` has `from_pretrained` and raw rows to embeddings, `export` one file for other
programs. `import heron` hands the public names on.
"""
