"""Time-varying graphs, one family one file; known by name as graphs are."""
