"""From a checkpoint to embeddings, an index of them, its neighbours, and what they show."""
