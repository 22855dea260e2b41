"""Seconds of a local world, whose ranks are threads of one process, beside bare threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch

import asyncddp as bf
from asyncddp import topology
from benchmarks.tables import FigureRow, time_text

_NUMEL = 1024  # of float32
_AVERAGES = 10
_MOST_SECONDS = {256: 1.0, 1024: 10.0}
_MOST_PER_CALL, _LEAST_RANKS = 100e-6, 16


class LocalWorldSeconds(NamedTuple):
    """Seconds of local worlds of one size, of each repeat.

    Attributes:
        ranks: How many there are.
        collectives: From the start of a world to its end, with a barrier and an allreduce in it.
        averages: Of ten one-peer averages, in a world that runs.
        threads: The same by bare threads, which hand each other their tensors.
    """

    ranks: int
    collectives: Sequence[float]
    averages: Sequence[float]
    threads: Sequence[float]


def measure_local_world(ranks: int, repeats: int) -> LocalWorldSeconds:
    """Start and end local worlds, and time what they do."""
    collectives, averages, threads = [], [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        with bf.local_world(ranks) as world:
            sums = world.run(_sum_of_all)
        collectives.append(time.perf_counter() - begun)
        if sums != [ranks * (ranks - 1) / 2] * ranks:
            raise ValueError(f"{ranks} ranks: wrong sums {sorted(set(sums))}")
        with bf.local_world(ranks) as world:
            averages.append(_seconds_of(world.run(_average_often)))
        threads.append(_average_by_threads(ranks))
    return LocalWorldSeconds(ranks, collectives, averages, threads)


def _own() -> torch.Tensor:
    return torch.full((_NUMEL,), float(bf.rank()))


def _sum_of_all() -> float:
    bf.barrier()
    return bf.allreduce(_own(), average=False)[0].item()


def _average_often() -> tuple[float, float]:
    bf.set_topology(topology.one_peer_exponential(bf.size()))
    value = _own()
    bf.barrier()
    begun = time.perf_counter()
    for _ in range(_AVERAGES):
        value = bf.neighbor_allreduce(value)
    return begun, time.perf_counter()


def _seconds_of(spans: Sequence[tuple[float, float]]) -> float:
    return max(end for _, end in spans) - min(begun for begun, _ in spans)


def _average_by_threads(ranks: int) -> float:
    """Average as often by threads that know nothing but each other's tensors."""
    schedule = topology.one_peer_exponential(ranks)
    here = threading.Barrier(ranks)
    boxes: list[dict[int, torch.Tensor]] = [{} for _ in range(ranks)]
    arrived = [threading.Semaphore(0) for _ in range(ranks)]
    spans = [(0.0, 0.0)] * ranks

    def body(rank: int) -> None:
        value = torch.full((_NUMEL,), float(rank))
        here.wait()
        begun = time.perf_counter()
        for number in range(_AVERAGES):
            near = schedule.neighbors(rank, number)
            for peer in near.dst_ranks:
                boxes[peer][number] = value
                arrived[peer].release()
            while number not in boxes[rank]:
                arrived[rank].acquire()
            value = torch.lerp(value, boxes[rank].pop(number), 1.0 - near.self_weight)
        spans[rank] = begun, time.perf_counter()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _seconds_of(spans)


def local_world_lines(found: Sequence[LocalWorldSeconds]) -> Iterator[FigureRow]:
    """Two lines for every size: collectives, and averages beside those of bare threads."""
    for one in found:
        most = _MOST_SECONDS.get(one.ranks)
        taken = median(one.collectives)
        yield FigureRow(
            (f"{one.ranks} threads", "world, barrier, allreduce", *_times(one.collectives), "", ""),
            None if most is None else f"≤ {time_text(most)}",
            None if most is None else taken <= most,
        )
    for one in found:
        judged, share = one.ranks >= _LEAST_RANKS, 1e6 / (one.ranks * _AVERAGES)
        own, bare = median(one.averages) * share, median(one.threads) * share
        yield FigureRow(
            (f"{one.ranks} threads", "10 one-peer averages", *_times(one.averages), own, bare),
            f"≤ {time_text(_MOST_PER_CALL)} per rank and call" if judged else None,
            own <= _MOST_PER_CALL * 1e6 if judged else None,
        )


def _times(seconds: Sequence[float]) -> Iterator[str]:
    every: tuple[Callable[[Sequence[float]], float], ...] = (median, min, max)
    return (time_text(of(seconds)) for of in every)
