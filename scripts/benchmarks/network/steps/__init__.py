"""Benchmark ``network-steps``: a training step on several hosts, and its bytes, over slow links."""
