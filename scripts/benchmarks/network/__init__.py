"""Benchmarks ``network``: training on several hosts with slow links between them."""
