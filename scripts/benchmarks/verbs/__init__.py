"""Benchmark tables of single verbs beside MPI and gloo."""
