"""How processes meet, exchange and share the work of a step."""
