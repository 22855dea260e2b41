"""Benchmarks of asyncddp beside MPI, gloo and DDP in one run; started by ``scripts/bench``."""
