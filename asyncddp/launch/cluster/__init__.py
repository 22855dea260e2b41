"""Clusters for notebooks: an ipyparallel controller, and engines that are the ranks of one run.

::

    keeper          one process that holds the rest; when it ends, or its owner does, all ends
    ├── controller      ipyparallel's, where notebooks and engines meet
    └── asyncddp run    our launcher, and under it one engine for each rank
"""

from __future__ import annotations

from asyncddp.launch.cluster.folder import Folder, Record
from asyncddp.launch.cluster.plan import Plan, plan_for
from asyncddp.launch.cluster.running import Running, await_engines, start, stop

__all__ = ["Folder", "Plan", "Record", "Running", "await_engines", "plan_for", "start", "stop"]
