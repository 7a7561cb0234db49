"""One pod: its settings, its start and end, and what its jobs share."""
