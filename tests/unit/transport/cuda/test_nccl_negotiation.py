"""``nccl``: its negotiation, for all ranks and for groups."""

from __future__ import annotations

import logging

import pytest
import torch

import asyncddp as bf
from asyncddp.errors import PeerError
from asyncddp.transport.cuda import negotiation
from asyncddp.transport.cuda.capabilities import DeviceCapabilities
from asyncddp.transport.cuda.nccl import nccl_transport as nccl
from asyncddp.transport.cuda.nccl.nccl_transport import NCCLTransport
from asyncddp.transport.cuda.negotiation import close_device_transports, negotiate_transport
from asyncddp.transport.cuda.staged_transport import device_transport_for
from asyncddp.transport.loopback import LoopbackTransport
from asyncddp.transport.selection import list_device_transports
from tests.support import DEFAULT_SETTINGS
from tests.support.late_device import LateDevice
from tests.support.nccl import FakeNccl

SECONDS = 60.0


def agreed(wanted, fake, ends, doubt=""):
    """Agree on a transport for all ranks and for machines of two; sum over both, and end."""
    rank = bf.rank()
    base = ends[rank]
    part = base.split(rank // 2, rank)
    mine = DeviceCapabilities(
        rank, rank // 2, "cuda", f"GPU-{rank}", cupy="13", nccl=22703, doubt=doubt if rank else ""
    )
    choice = negotiate_transport(base, wanted, mine, fake.device, SECONDS, part)
    found = [device_transport_for(end, fake.device) for end in (base, part)]
    ones = [torch.ones(3) for _ in found]
    for transport, x in zip(found, ones, strict=True):
        transport.allreduce(x, SECONDS)
    base.barrier(SECONDS)
    close_device_transports(part, base)
    return choice.transport, [transport.name for transport in found], [x[0].item() for x in ones]


def ask(monkeypatch, size, *, wanted=("nccl",), doubt=""):
    fake, ends = FakeNccl(LateDevice()), LoopbackTransport.group(size)
    monkeypatch.setattr(nccl, "library", lambda: fake.library(bf.rank()))
    monkeypatch.setattr(nccl, "limit_channels", lambda: None)
    with bf.local_world(size, **DEFAULT_SETTINGS) as world:
        told = world.run(agreed, wanted, fake, ends, doubt)
    return told, [module.made for _, module in sorted(fake.modules.items())]


def test_a_machine_s_ranks_get_a_communicator_of_their_own_and_a_rank_alone_stages(monkeypatch):
    """Ranks of one machine sum by their own communicator; a lone rank stages there."""
    told, made = ask(monkeypatch, 3)
    assert told[:2] == [("nccl", ["nccl", "nccl"], [3.0, 2.0])] * 2
    assert told[2] == ("nccl", ["nccl", "cuda_staged"], [3.0, 1.0])
    every = [comm for comms in made for comm in comms]
    assert all(comm.ended == "destroy" for comm in every), "all are given back in the end"


def test_a_part_in_which_the_trial_fails_is_staged(monkeypatch, caplog):
    """Where only a machine's trial fails, its sums are staged with a warning."""
    true = negotiation.run_trial

    def fails(transport, timeout, peers):
        true(transport, timeout, peers)
        if not peers and transport.rank == 1:
            raise PeerError("a trial did not arrive")

    monkeypatch.setattr(negotiation, "run_trial", fails)
    told, made = ask(monkeypatch, 4)
    assert told == [("nccl", ["nccl", "cuda_staged"], [4.0, 2.0])] * 4
    assert {comm.ended for comms in made for comm in comms} == {"destroy"}
    words = "sums inside a machine go by cuda_staged, not by nccl: rank {}: a trial did not arrive"
    told = sorted(record.getMessage() for record in caplog.records)
    assert told == [words.format(1), words.format(3)], "each machine's first rank tells"


def test_a_transport_whose_trial_fails_is_given_back(monkeypatch, caplog):
    """Where the trial fails, NCCL's communicators are destroyed and ranks stage."""

    def fails(transport, *_):
        raise PeerError(f"rank {transport.rank}: a trial did not arrive")

    monkeypatch.setattr(negotiation, "run_trial", fails)
    told, made = ask(monkeypatch, 2)
    assert told == [("cuda_staged", ["cuda_staged", "cuda_staged"], [2.0, 2.0])] * 2
    assert [[comm.ended for comm in comms] for comms in made] == [["destroy"], ["destroy"]]
    assert "tensors on GPUs do not go by nccl: rank 0: a trial did not arrive; " in caplog.text


@pytest.mark.parametrize("wanted", ["nccl", "cuda_staged"])
def test_two_libraries_of_nccl_are_warned_of_by_the_rank_that_has_them(monkeypatch, caplog, wanted):
    """A rank's doubt about its NCCL is logged by that rank once, if NCCL is asked for."""
    with caplog.at_level(logging.WARNING, "asyncddp"):
        ask(monkeypatch, 2, wanted=(wanted,), doubt="this process has loaded several")
    words = ["rank 1: this process has loaded several"] if wanted == "nccl" else []
    assert [record.getMessage() for record in caplog.records] == words


def test_the_doctor_tells_a_doubt_about_nccl_in_its_row_alone():
    """A doubt about NCCL ends the row of NCCL, whether or not that is asked for, and no other."""
    strange = DeviceCapabilities(
        0, device="cuda", gpu="a", cupy="13", nccl=22703, doubt="two are loaded"
    )
    for wanted in (["nccl"], []):
        rows = {row.transport: row.why for row in list_device_transports(strange, wanted)}
        assert rows["nccl"].endswith("; but two are loaded")
        assert "two are loaded" not in rows["cuda_ipc"]


def opened(fake, ends, reachable):
    """Open NCCL with messages on rank 0, or on no rank, and close it."""
    base = ends[bf.rank()]
    transport = NCCLTransport.open(base, fake.device, reachable if bf.rank() == 0 else (), SECONDS)
    base.barrier(SECONDS)
    transport.close()


@pytest.mark.parametrize(("reachable", "limits"), [((1,), [8, 8]), ((), [])])
def test_channels_are_limited_where_messages_go_by_nccl(monkeypatch, reachable, limits):
    """On all ranks or on none: torch's own NCCL in the process has the limit as well."""
    fake, ends, found = FakeNccl(LateDevice()), LoopbackTransport.group(2), []
    monkeypatch.setattr(nccl, "library", lambda: fake.library(bf.rank()))
    monkeypatch.setattr(nccl, "limit_channels", lambda: found.append(8))
    with bf.local_world(2, **DEFAULT_SETTINGS) as world:
        world.run(opened, fake, ends, reachable)
    assert found == limits
