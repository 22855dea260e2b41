"""Benchmark ``scale``: messages and bytes per rank, a model, and seconds of ranks as threads."""
