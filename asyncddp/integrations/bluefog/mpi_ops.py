"""BlueFog's module ``mpi_ops``: all of its operations, also those that it does not export."""

from asyncddp.integrations.bluefog import *  # noqa: F403
