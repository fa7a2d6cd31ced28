"""Studies: many runs of one experiment."""
