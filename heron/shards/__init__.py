"""Data sets on disk: WebDataset tars, one index a shard, and a manifest."""
