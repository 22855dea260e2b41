"""BlueFog's module ``mpi_ops``: all of its operations, also those that it does not export."""

from __future__ import annotations

from asyncddp.integrations.bluefog import *  # noqa: F403
