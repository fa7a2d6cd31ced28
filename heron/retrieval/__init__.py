"""Search by what a model has learnt: a run and a data set come in, samples with scores go out.

A run with shards goes into `embed`, which writes `embeddings`; these go into `build`, which writes
an `index` by an `index_plan` that fits the memory. A `query` by a key, files, words or a vector
comes in, and an `answer` goes out: keys, scores and labels, which `sheet` draws. Nothing here
trains, and `serve` and `negatives` read what is written here.
"""
