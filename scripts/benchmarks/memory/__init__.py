"""Benchmark ``memory``: peak memory of a training step by every method."""
