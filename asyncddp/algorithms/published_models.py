"""Model replicas that ranks publish through windows, fetched while their owners keep training."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.rounds.bucket_windows import as_real
from asyncddp.context import Context
from asyncddp.errors import PeerLeftError
from asyncddp.kernels.cpu_weighted_sum import weighted_sum
from asyncddp.rank_list_text import list_ranks
from asyncddp.tensors.allocation import empty_like
from asyncddp.tensors.local_parts import local
from asyncddp.windows.departure_detector import CONCLUDED
from asyncddp.windows.edge import PublishedSnapshot
from asyncddp.windows.nonblocking_handle import PendingGet

logger = logging.getLogger("asyncddp")

_WHAT = "fetching published replicas"


class ReplicaAge(NamedTuple):
    """Age of a published replica, given by its oldest tensor.

    Attributes:
        lag: Number of averagings by which its rank was behind this rank; negative if ahead.
        seconds: Time since publication; 0 for this rank's own model.
    """

    lag: int
    seconds: float


class PublishedReplica(NamedTuple):
    """Published replica of a rank's model: the tensors of its buckets in order, and its age."""

    tensors: Sequence[PublishedSnapshot]
    age: ReplicaAge


@contextmanager
def published_models(
    context: Context, averagers: Sequence[ModelAverager], timeout: float | None
) -> Iterator[Mapping[int, PublishedReplica]]:
    """Fetch other ranks' published replicas, which stay unchanged inside a ``with`` block.

    Ranks that have died or departed, or do not answer in time, are left out.

    Args:
        context: The world.
        averagers: One-sided averagers of this rank's model.
        timeout: Seconds for all answers; None for ``ASYNCDDP_NETWORK_TIMEOUT``.
    """
    engine, requests = context.engine, dict[int, list[PendingGet]]()
    try:
        for peer in range(context.size if any(one.buckets for one in averagers) else 0):
            if peer != context.rank and not engine.lost_peers.is_lost(peer):
                sent = [averager.windows.look(peer) for averager in averagers]
                requests[peer] = [one for of_each in sent for one in of_each]
        _wait_for_replies(context, requests, timeout or engine.config.network_timeout)
        yield dict(_whole_replicas(context, averagers, requests))
    finally:
        with engine.lock:
            for of_rank in () if engine.closed else requests.values():
                for request in of_rank:
                    request.end()


def _wait_for_replies(
    context: Context, requests: Mapping[int, Sequence[PendingGet]], timeout: float
) -> None:
    """Make progress until all living ranks have replied, for at most ``timeout`` seconds."""
    engine, deadline, attempt = context.engine, time.monotonic() + timeout, 0
    while late := [
        peer
        for peer, of_rank in requests.items()
        if not engine.lost_peers.is_lost(peer) and not all(one.is_over() for one in of_rank)
    ]:
        if time.monotonic() > deadline:
            text = "rank %d: %s: %s left out, without an answer in %g s; a larger timeout may help"
            logger.warning(text, context.rank, _WHAT, list_ranks(late), timeout)
            return
        engine.ensure_open(_WHAT)
        moved = False
        with suppress(PeerLeftError):  # of MPI, about any rank
            moved = engine.progress()
        attempt = 0 if moved else attempt + 1
        engine.transport.backoff(attempt)


def _whole_replicas(
    context: Context,
    averagers: Sequence[ModelAverager],
    requests: Mapping[int, Sequence[PendingGet]],
) -> Iterator[tuple[int, PublishedReplica]]:
    """Yield the complete replicas of ranks that have neither died nor departed."""
    now = time.monotonic()
    own = [one.windows.published_steps % CONCLUDED for one in averagers for _ in one.buckets]
    for peer, of_rank in requests.items():
        tensors = [one.reply for one in of_rank if one.reply is not None]
        if len(tensors) < len(own) or context.engine.lost_peers.is_lost(peer):
            continue
        clocks = [divmod(tensor.clock, CONCLUDED) for tensor in tensors]
        lag = max(mine - steps for mine, (_, steps) in zip(own, clocks, strict=True))
        if lag <= 0 or not any(concluded for concluded, _ in clocks):
            age = ReplicaAge(lag, now - min(tensor.time for tensor in tensors))
            yield peer, PublishedReplica(tensors, age)


def write_average(averagers: Sequence[ModelAverager], replicas: Sequence[PublishedReplica]) -> None:
    """Replace parameters by the mean of their current values and other ranks' replicas."""
    buckets = [bucket for averager in averagers for bucket in averager.buckets]
    by_bucket = zip(*(replica.tensors for replica in replicas), strict=True)
    for bucket, others in zip(buckets if replicas else (), by_bucket, strict=True):
        flat, share = empty_like(bucket.flat), 1.0 / (len(others) + 1)
        for view, parameter in zip(bucket.views_of(flat), bucket.parameters, strict=True):
            view.copy_(local(parameter))
        mean = as_real(flat).to("cpu")
        terms = [(other.tensor, other.weight * share) for other in others]
        weighted_sum(mean, [(mean, share), *terms], shares=len(others) + 1)
        as_real(flat).copy_(mean)
        for view, parameter in zip(bucket.views_of(flat), bucket.parameters, strict=True):
            local(parameter).copy_(view)
