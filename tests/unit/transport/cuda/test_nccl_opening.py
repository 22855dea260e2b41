"""Opening ``nccl`` where some ranks cannot: all ranks stage in bounded time, and are told why."""

from __future__ import annotations

import threading

import pytest
import torch

import asyncddp as bf
from asyncddp.errors import EnvironmentProblem
from asyncddp.transport.cuda.capabilities import DeviceCapabilities
from asyncddp.transport.cuda.device_transport_selection import parse_transport_names
from asyncddp.transport.cuda.nccl import nccl_transport as nccl
from asyncddp.transport.cuda.nccl.nccl_transport import NCCLTransport
from asyncddp.transport.cuda.negotiation import close_device_transports, negotiate_transport
from asyncddp.transport.cuda.staged_transport import device_transport_for
from asyncddp.transport.loopback import LoopbackTransport
from tests.support import DEFAULT_SETTINGS
from tests.support import nccl as stand_in
from tests.support.late_device import LateDevice
from tests.support.nccl import FakeNccl, NcclError

SECONDS = 60.0
RANKS = 4
UNHANDLED = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"


def refuse(*_):
    raise NcclError(UNHANDLED)


class Ranks:
    """Four ranks on two machines that ask for NCCL, and what each does instead of opening it."""

    def __init__(self, monkeypatch):
        self.nccl, self.ends = FakeNccl(LateDevice()), LoopbackTransport.group(RANKS)
        self.modules = {}
        self.library_of = {}  # what a rank does in place of importing cupy
        monkeypatch.setattr(nccl, "limit_channels", lambda: None)
        monkeypatch.setattr(nccl, "library", self._library)
        for rank in range(RANKS):
            self.modules[rank] = self.nccl.library(rank)

    def _library(self):
        if bf.rank() in self.library_of:
            self.library_of[bf.rank()]()
        return self.modules[bf.rank()]

    def module(self, rank):
        return self.modules[rank].nccl

    def _agreed(self, wanted, timeout):
        rank = bf.rank()
        base = self.ends[rank]
        part = base.split(rank // 2, rank)
        mine = DeviceCapabilities(
            rank,
            rank // 2,
            "cuda",
            f"GPU-{rank}",
            cupy="13",
            nccl=22703,
            out_of_reach=tuple(f"GPU-{other}" for other in range(4) if other != rank),
        )
        choice = negotiate_transport(base, wanted, mine, self.nccl.device, timeout, part)
        found = [device_transport_for(end, self.nccl.device) for end in (base, part)]
        sums = []
        for end, device_transport in zip((base, part), found, strict=True):
            for transport in (end, device_transport):  # the host's collectives still match
                x = torch.ones(3)
                transport.allreduce(x, SECONDS)
                sums.append(x[0].item())
        base.barrier(SECONDS)
        close_device_transports(part, base)
        return choice, [transport.name for transport in found], sums

    def ask(self, wanted="nccl", timeout=0.5):
        """What ranks agree on; sums over all and over a machine, of the host and of the device."""
        with bf.local_world(RANKS, **DEFAULT_SETTINGS) as world:
            told = world.run(self._agreed, parse_transport_names(wanted), timeout)
        assert all(sums == [4.0, 4.0, 2.0, 2.0] for *_, sums in told)
        assert len({(choice.transport, choice.failed) for choice, *_ in told}) == 1
        return told[0][0], [names for _, names, _ in told]

    def ended(self):
        """How the communicators of all ranks ended, once no thread waits in NCCL any more."""
        for thread in threading.enumerate():
            if thread.name == "asyncddp-nccl-opening":
                thread.join(SECONDS)
        return [comm.ended for rank in range(RANKS) for comm in self.module(rank).made]


BUSY = 3.0
"""Seconds in which ranks connect on a busy machine, fewer than the stand-in waits for others."""


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(stand_in, "SECONDS", 1.2)
    return Ranks(monkeypatch)


ASKED = pytest.mark.parametrize("wanted", ["nccl", "auto"])


@ASKED
def test_a_rank_that_fails_before_all_meet_has_all_stage(ranks, wanted, caplog):
    """A rank without NCCL takes part in the host's collectives; the others wait till the deadline.

    Rank 0 warns with that rank's words, though its own wait ended as well.
    """

    def missing():
        raise EnvironmentProblem("cupy has found no NCCL")

    ranks.library_of[2] = missing
    choice, names = ranks.ask(wanted)
    assert names == [["cuda_staged"] * 2] * RANKS
    assert (choice.failed, choice.refused["nccl"]) == (("nccl",), "rank 2: cupy has found no NCCL")
    assert [r.getMessage() for r in caplog.records if " nccl:" in r.getMessage()] == [
        "tensors on GPUs do not go by nccl: rank 2: cupy has found no NCCL; they go by cuda_staged"
    ]
    assert ranks.ended() == [], "nobody has opened one"


def test_errors_that_are_no_runtime_error_have_all_stage(ranks):
    """A rank tells the others of any exception, such as one of a broken installation."""

    def broken():
        raise AttributeError("module 'nccl' has no attribute 'available'")

    ranks.library_of[3] = broken
    choice, names = ranks.ask()
    assert names == [["cuda_staged"] * 2] * RANKS
    assert choice.refused["nccl"] == "rank 3: module 'nccl' has no attribute 'available'"


def test_a_first_rank_that_makes_no_unique_id_has_nobody_wait_for_nccl(ranks):
    """Where rank 0 has no unique id, no rank calls NCCL."""
    ranks.module(0).get_unique_id = refuse
    called = []
    for rank in range(RANKS):
        ranks.module(rank).NcclCommunicator = lambda *_: called.append(1)
    choice, names = ranks.ask(timeout=SECONDS)
    assert (names, called) == ([["cuda_staged"] * 2] * RANKS, [])
    assert choice.refused["nccl"] == f"rank 0: {UNHANDLED}"


@ASKED
def test_a_rank_that_nccl_refuses_has_all_stage(ranks, wanted):
    """A rank whose communicator does not open is named with NCCL's words on all ranks."""
    ranks.module(1).NcclCommunicator = refuse
    choice, names = ranks.ask(wanted)
    assert names == [["cuda_staged"] * 2] * RANKS
    assert choice.refused["nccl"] == (
        f"rank 1: NCCL makes no communicator of 4 ranks ({UNHANDLED}); NCCL_DEBUG=WARN has it say "
        "more"
    )


@ASKED
def test_a_rank_that_never_comes_has_all_stage_by_the_deadline(ranks, wanted, monkeypatch):
    """A rank that hangs in NCCL leaves all ranks staged; what opens later is aborted."""
    monkeypatch.setattr(stand_in, "SECONDS", SECONDS)
    comes, join = threading.Event(), ranks.module(3).NcclCommunicator

    def late(*arguments):
        assert comes.wait(SECONDS)
        return join(*arguments)

    ranks.module(3).NcclCommunicator = late
    choice, names = ranks.ask(wanted)
    assert names == [["cuda_staged"] * 2] * RANKS
    words = "rank 0: NCCL's communicator of 4 ranks was not open in time: not all of them have come"
    assert choice.refused["nccl"] == words
    comes.set()
    ranks.ended()
    assert ranks.ended() == ["abort"] * RANKS


def test_a_rank_that_fails_in_the_first_collectives_has_all_stage(ranks, monkeypatch):
    """Where the ranks of a communicator do not connect, all of them abort it and stage."""
    monkeypatch.setattr(stand_in, "SECONDS", 1.2 * BUSY)
    join = ranks.module(2).NcclCommunicator

    def breaks(*arguments):
        made = join(*arguments)
        made.allReduce = refuse
        return made

    ranks.module(2).NcclCommunicator = breaks
    choice, names = ranks.ask(timeout=BUSY)
    assert names == [["cuda_staged"] * 2] * RANKS
    assert f"allreduce could not be started: {UNHANDLED}" in choice.refused["nccl"]
    assert choice.refused["nccl"].startswith("rank 2: NCCL makes no communicator of 4 ranks")
    assert ranks.ended() == ["abort"] * RANKS


def test_a_machine_where_one_rank_fails_stages_alone(ranks, monkeypatch, caplog):
    """A rank that fails in its machine's communicator has that machine stage, no other."""
    monkeypatch.setattr(stand_in, "SECONDS", 1.2 * BUSY)
    for_subgroup = NCCLTransport.for_subgroup

    def fails(transport, base, timeout):
        if transport.rank == 3:
            ranks.module(3).NcclCommunicator = refuse
        return for_subgroup(transport, base, timeout)

    monkeypatch.setattr(NCCLTransport, "for_subgroup", fails)
    choice, names = ranks.ask(timeout=BUSY)
    assert (choice.transport, choice.failed) == ("nccl", ())
    assert names == [["nccl"] * 2] * 2 + [["nccl", "cuda_staged"]] * 2
    (words,) = [record.getMessage() for record in caplog.records]
    assert words.startswith("sums inside a machine go by cuda_staged, not by nccl: rank 3: NCCL ma")
