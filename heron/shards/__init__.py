"""Data sets on disk: WebDataset tars, one index a shard, and a manifest.

In come the rows of a `Source`, or tars that others have packed; out comes a folder or URL whose
every byte is named by a checksum, read here by member and cached. Publishers' formats are in
`heron.sources`.
"""
