"""Static graphs, one family one file; those that ``topology`` imports are known by name."""
