"""MPI transport: mpi4py loading and startup, communicators, requests and collectives."""
