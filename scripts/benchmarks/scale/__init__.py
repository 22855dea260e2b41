"""Benchmark ``scale``: messages and bytes per rank at 2 to 64 ranks, and by a model beyond."""
