"""Scores of a model, and what tells that it has collapsed.

In come features or probabilities of rows, and their labels; out come scores by name: of the
classifier, of probes and neighbours on frozen features, of baselines. `negatives` defines what a
hard and a false negative is.
"""
