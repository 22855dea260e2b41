"""Shared-memory transport: memory mapped by all ranks of a machine, and MPI between machines."""
