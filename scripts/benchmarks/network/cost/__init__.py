"""Benchmark ``network-cost``: averages between hosts beside what the cost model predicts."""
