"""Has NCCL take every rank for a machine of its own, so that it serves ranks that share a GPU."""

import os

for _name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"):
    if _name in os.environ:
        os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ[_name]}")
