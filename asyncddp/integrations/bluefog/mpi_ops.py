"""Replacement of BlueFog's ``mpi_ops``: all its operations, also those it does not export."""

from asyncddp.integrations.bluefog import *  # noqa: F403
