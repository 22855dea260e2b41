"""ipyparallel clusters for notebooks: a controller, and engines that are the MPI ranks of one run.

::

    daemon          one process that starts the others; when it ends, or its owner does, all end
    ├── controller      ipyparallel's, to which notebooks and engines connect
    └── asyncddp run    our launcher, and under it one engine for each rank
"""

from __future__ import annotations

from asyncddp.launch.cluster.control import (
    ClusterProcess,
    start_cluster,
    stop_cluster,
    wait_for_engines,
)
from asyncddp.launch.cluster.profile_directory import ClusterRecord, ProfileDirectory
from asyncddp.launch.cluster.spec import ClusterSpec, build_cluster_spec

__all__ = [
    "ClusterProcess",
    "ClusterRecord",
    "ClusterSpec",
    "ProfileDirectory",
    "build_cluster_spec",
    "start_cluster",
    "stop_cluster",
    "wait_for_engines",
]
