"""Benchmark ``network``: training steps on several hosts over slow links."""
