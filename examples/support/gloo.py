"""A process group of torch.distributed, for what asyncddp is compared with."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

import asyncddp as bf

__all__ = ["start_gloo"]


def start_gloo() -> None:
    """Start gloo on all ranks, which meet in a store that rank 0 opens."""
    one_machine = bf.local_size() == bf.size()
    if one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where: tuple[str, int] | None = None
    if bf.rank() == 0:
        host = "127.0.0.1" if one_machine else socket.getfqdn()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        where = host, store.port
    where = bf.broadcast_object(where, root_rank=0)
    if bf.rank() > 0:
        store = dist.TCPStore(*where)
    dist.init_process_group("gloo", store=store, rank=bf.rank(), world_size=bf.size())
