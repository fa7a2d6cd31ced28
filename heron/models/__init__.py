"""Encoders, heads and the normalisation that keeps P processes equal to one."""
