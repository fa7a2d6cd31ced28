"""What is wrong in a data set, by its embeddings: labels, pairs of views, duplicates, outliers.

In come embeddings and the labels of their shards; out come tables of findings, the most suspicious
first, and a page that says how many of planted faults the same method would have found.
"""
