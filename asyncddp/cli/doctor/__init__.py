"""Checks of ``asyncddp doctor``: machine, MPI, packages and transports."""
