"""Hard and false negatives, measured and reported.

In come the embeddings of a labelled data set; out come an HTML page, its numbers as JSON and the
pairs as Parquet: how often the nearest others have an anchor's labels, and how hard the losses push
them away.
"""
