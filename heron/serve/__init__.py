"""The web page over an index."""
