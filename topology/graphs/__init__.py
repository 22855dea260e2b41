"""Static graphs, one file per family; public functions are registered by name."""
