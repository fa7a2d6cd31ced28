"""Scores of a model, and what tells that it has collapsed."""
