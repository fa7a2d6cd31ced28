"""Heron's trainer: streams, model, objectives and the loop that joins them."""
