"""Notebook interface: cells that begin with ``%%px`` run on all ranks.

::

    cluster = asyncddp.notebook.Cluster(4)      # or Cluster.connect(), to a running one

    %%px
    import asyncddp as bf, torch
    bf.init()
    bf.allreduce(torch.tensor([float(bf.rank())]))

Where no MPI is installed, ``asyncddp.local_world(4).activate()`` gives the same cells on threads.
"""

from asyncddp.notebook.cluster import Cluster
from asyncddp.notebook.local_view import LocalView, activate

__all__ = ["Cluster", "LocalView", "activate"]
