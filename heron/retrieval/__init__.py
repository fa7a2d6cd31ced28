"""From a checkpoint to embeddings, an index of them, its neighbours, and what they show.

In come a run and a data set, or files of a user; out come folders of embeddings and of an index,
each with a manifest, and the neighbours of a query with labels and filters.
"""
