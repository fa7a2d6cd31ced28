"""Hard and false negatives: measured, mined, reported."""
