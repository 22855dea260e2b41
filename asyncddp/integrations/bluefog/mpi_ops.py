"""Replacement of BlueFog's ``mpi_ops``: all its operations, including unexported ones."""

from asyncddp.integrations.bluefog import *  # noqa: F403
