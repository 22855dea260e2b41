"""Work of ``sharded`` on every rank: ``examples/sharded_gpt.py``, and torchft's DiLoCo in it."""

from __future__ import annotations

import argparse
import importlib
import os
import site
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not said to be exported
from torch.distributed.device_mesh import DeviceMesh

import asyncddp as bf
from benchmarks.network.hosts import transmitted
from benchmarks.one_to_n.gpt_rank import load_example, slowed
from benchmarks.sharded import ALONE, TORCHFT

_OUTER = {"outer_lr": 0.5, "outer_momentum": 0.5}  # for tens of rounds

Optimizer = torch.optim.Optimizer


def _torchft_diloco(
    options: argparse.Namespace, model: torch.nn.Module, mesh: DeviceMesh, after: ExitStack
) -> Optimizer:
    """Return an optimizer whose steps torchft's DiLoCo follows, on the shards of FSDP2."""
    torchft = importlib.import_module("torchft")  # which is in an environment of its own
    coordination = importlib.import_module("torchft.coordination")
    local_sgd = importlib.import_module("torchft.local_sgd")
    replica, shard = mesh.get_coordinate() or (0, 0)
    here = "127.0.0.1" if bf.local_size() == bf.size() else socket.gethostname()
    place = None
    if bf.rank() == 0:
        lighthouse = coordination.LighthouseServer(bind="0.0.0.0:0", min_replicas=mesh.size(0))
        after.callback(lighthouse.shutdown)
        place = f"http://{here}:{lighthouse.address().rpartition(':')[2]}"
    store = TCPStore(here, 0, is_master=True, wait_for_workers=False) if shard == 0 else None
    told = bf.allgather_object((place, store and store.port))
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=mesh.size(0),
        use_async_quorum=False,
        init_sync=False,  # by their seed replicas begin alike
        rank=shard,
        world_size=mesh.size(1),
        store_addr=here,
        store_port=told[bf.rank() - shard][1],
        lighthouse_addr=told[0][0],
        replica_id=str(replica),
        hostname=here,
    )
    after.callback(bf.barrier)
    after.callback(manager.shutdown)
    inner = torch.optim.AdamW(model.parameters(), lr=options.lr)
    rate, momentum = _OUTER.values()
    outer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=True)
    diloco = local_sgd.DiLoCo(manager, [model], inner, outer, options.every, use_bucketization=True)
    after.enter_context(diloco)
    after.callback(lambda: store)  # which the manager needs as long
    return inner


def _watched(draw: Callable[..., Iterator[Any]], every: int, interface: str) -> Any:
    """Return the example's batches, and a mark for each pause between rounds of steps.

    It has when the pause began and ended, and what this host had sent by then.
    """
    marks: list[tuple[float, float, int]] = []

    def mark() -> None:
        begun = time.monotonic()
        bf.barrier()
        marks.append((begun, time.monotonic(), transmitted(interface)))

    def watch(*given: Any) -> Iterator[Any]:
        for number, batch in enumerate(draw(*given)):
            if number % every == 0:
                mark()
            yield batch
        mark()

    return watch, marks


def train(
    trainings: list[list[str]],
    accelerator: float = 0.0,
    interface: str = "lo",
    torchft: str | None = None,
) -> dict[str, Any]:
    """Train one after another; return each one's record of rank 0.

    Args:
        trainings: Options of the example, of each.
        accelerator: Seconds of a step in which the processor is free.
        interface: Of gloo, whose bytes are counted.
        torchft: Where torchft's packages are.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if torchft:
        site.addsitedir(torchft)
    torch.set_num_threads(1)
    example = load_example("sharded_gpt")
    example.METHODS["diloco"] |= _OUTER
    example.METHODS["noloco"] |= _OUTER
    example.METHODS[ALONE] = {"algorithm": "local_sgd", "communication_interval": 1 << 30}
    example.METHODS[TORCHFT] = {}
    example.GPT = slowed(example.GPT, accelerator)
    ours, batches, found = example.optimizer_of, example.batches, []
    for words in trainings:
        options = example.parse_options([*words, "--log-every", "1000000"])
        with ExitStack() as after:
            theirs = partial(_torchft_diloco, after=after)
            example.optimizer_of = theirs if options.method == TORCHFT else ours
            example.batches, marks = _watched(batches, options.every, interface)
            found.append({**example.train(options), "marks": marks})
        torch.distributed.destroy_process_group()
    return {"records": found}
