"""Names of the averaging methods and of their communication in the tables."""

from __future__ import annotations

__all__ = [
    "ALONE",
    "ATC",
    "ATC_BACKWARD",
    "AWC",
    "CENTRAL",
    "DDP",
    "GLOO_SUM",
    "LOCAL",
    "MPI_AFTER",
    "MPI_SUM",
    "ONE_PEER",
    "OUR_MIX",
    "OUR_SUM",
]

LOCAL = "local step"
DDP, MPI_AFTER, CENTRAL = "DDP gloo", "MPI Allreduce after backward", "gradient_allreduce"
AWC, ATC, ATC_BACKWARD = "one-peer AWC", "one-peer ATC", "one-peer ATC in backward"
ONE_PEER = (AWC, ATC, ATC_BACKWARD)
GLOO_SUM, MPI_SUM = "gloo all_reduce", "MPI Allreduce"
OUR_SUM, OUR_MIX = "asyncddp allreduce", "asyncddp neighbor_allreduce, one peer"
ALONE = {
    DDP: GLOO_SUM,
    MPI_AFTER: MPI_SUM,
    CENTRAL: OUR_SUM,
    AWC: OUR_MIX,
    ATC: OUR_MIX,
    ATC_BACKWARD: OUR_MIX,
}
"""The communication of each method by itself."""
