"""The table of transports between GPUs, row by row."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from asyncddp.cli.doctor import mpi_probe as probe
from asyncddp.cli.doctor.machine_checks import check_mixed_devices
from asyncddp.errors import MismatchError
from asyncddp.transport import DEVICE_TRANSPORTS, selection
from asyncddp.transport.base import Scope
from asyncddp.transport.cuda import negotiation
from asyncddp.transport.cuda.capabilities import (
    DeviceCapabilities,
    default_device_index,
    detect_device,
)
from asyncddp.transport.cuda.device_transport_selection import (
    parse_transport_names,
    select_for_group,
)
from asyncddp.transport.cuda.negotiation import negotiate_transport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport, device_transport_for
from asyncddp.transport.loopback import LoopbackTransport
from asyncddp.transport.selection import list_device_transports, select_route
from tests.support.simulated_streams import SimulatedStreams

GOOD = DeviceCapabilities(0, device="cuda", gpu="GPU-a", mpi_cuda=True, cupy="13.6.0", nccl=22703)
OTHER = replace(GOOD, rank=1, gpu="GPU-b")
ALL = ["nccl", "mpi_cuda", "cuda_ipc", "cuda_staged"]


def test_the_first_transport_of_the_list_whose_conditions_hold_is_taken():
    """Of transports that all can be used, the first on the list is taken."""
    for wanted in itertools.permutations(ALL):
        routing = select_for_group([GOOD, OTHER], wanted)
        assert routing.transport_between(GOOD, OTHER) == wanted[0]
        assert not routing.refused


def test_nothing_but_the_transport_that_needs_nothing_is_taken_unasked():
    """With no list, ``cuda_staged`` is taken and nothing is refused."""
    routing = select_for_group([GOOD, OTHER])
    assert (routing.transport_between(GOOD, OTHER), routing.refused) == ("cuda_staged", {})


@pytest.mark.parametrize(
    ("transport", "changed", "reason"),
    [
        ("mpi_cuda", {"mpi_cuda": False}, "the MPI library of rank 1 does not say that"),
        ("mpi_cuda", {"mpi_cuda": None}, "the MPI library of rank 1 does not say that"),
        ("cuda_ipc", {"gpu": ""}, "it is not known which GPU rank 1 uses"),
        ("cuda_ipc", {"machine": 1}, "rank 0 and rank 1 do not read each other's GPU memory"),
        (
            "cuda_ipc",
            {"out_of_reach": ("GPU-a",)},
            "rank 0 and rank 1 do not read each other's GPU memory",
        ),
        ("nccl", {"cupy": None}, "rank 1 cannot import cupy: pip install 'cupy-cuda12x>=13.6'"),
        ("nccl", {"nccl": None}, "cupy finds no NCCL of at least 2.7 at rank 1"),
        ("nccl", {"nccl": 20604}, "cupy finds no NCCL of at least 2.7 at rank 1"),
        ("nccl", {"nccl": 22000}, "rank 0 has NCCL 22703, rank 1 has 22000"),
        ("nccl", {"gpu": ""}, "it is not known which GPU rank 1 uses"),
        ("nccl", {"gpu": "GPU-a"}, "rank 0 and rank 1 share one GPU, which NCCL refuses"),
    ],
)
def test_each_condition_that_fails_is_the_reason_why_a_transport_is_not_taken(
    transport, changed, reason
):
    """A transport whose condition fails is refused with that reason, and ranks stage."""
    other = replace(OTHER, **changed)
    routing = select_for_group([GOOD, other], [transport])
    assert (routing.usable, routing.collectives) == ((), "cuda_staged")
    assert routing.transport_between(GOOD, other) == "cuda_staged"
    assert routing.refused[transport].startswith(reason)
    assert routing.used_transports([GOOD, other]) == ()


def test_ranks_that_each_see_their_own_gpu_alone_do_not_share_it(monkeypatch):
    """With Slurm's --gpus-per-task each rank has cuda:0: by UUID they are two, and are tried."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    ranks = []
    for rank in range(2):
        own = SimpleNamespace(uuid=f"GPU-{rank}")
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index, own=own: own)
        ranks.append(replace(detect_device(rank, 0, rank), cupy="13.6.0", nccl=22703))
    routing = select_for_group(ranks, ["cuda_ipc", "nccl"])
    assert routing.transport_between(*ranks) == "cuda_ipc"
    assert routing.collectives == "nccl"


def test_gpus_that_cuda_keeps_apart_are_told_apart(monkeypatch):
    """Of the visible GPUs a rank names those that it cannot access."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(
        "torch.cuda.can_device_access_peer", lambda one, other: {one, other} != {0, 2}
    )
    named = lambda index: SimpleNamespace(uuid=f"GPU-{index}")  # noqa: E731
    monkeypatch.setattr("torch.cuda.get_device_properties", named)
    ranks = [detect_device(rank, 0, rank) for rank in range(3)]
    assert [facts.out_of_reach for facts in ranks] == [("GPU-2",), (), ("GPU-0",)]
    assert select_for_group(ranks, ["cuda_ipc"]).transport_between(ranks[0], ranks[1]) == "cuda_ipc"
    assert select_for_group(ranks, ["cuda_ipc"]).transport_between(ranks[2], ranks[0]) != "cuda_ipc"


def test_both_ranks_come_to_the_same_transport_whatever_their_facts():
    """Over all combinations of what a rank can say, the table is symmetric and always ends."""
    options = itertools.product([True, False, None], ["13", None], ["a", "b", ""])
    facts = [
        DeviceCapabilities(0, 0, "cuda", gpu, aware, cupy, 22703 if cupy else None)
        for aware, cupy, gpu in options
    ]
    for one, other in itertools.product(facts, repeat=2):
        peer = replace(other, rank=1)
        there, back = select_for_group([one, peer], ALL), select_for_group([peer, one], ALL)
        assert there.transport_between(one, peer) == back.transport_between(peer, one)
        assert list(there.refused) == list(back.refused)
        usable = {transport.name for transport in there.usable}
        assert usable | set(there.refused) == set(ALL) - {"cuda_staged"}


def test_one_pair_that_a_transport_does_not_serve_keeps_a_group_from_it():
    """A transport that one pair of a group cannot use is refused for the whole group."""
    group = [replace(GOOD, rank=rank, gpu=f"GPU-{rank}") for rank in range(3)]
    wanted = [name for name in ALL if name != "cuda_ipc"]
    assert select_for_group(group, wanted).used_transports(group) == ("nccl",)
    shared = [*group, replace(GOOD, rank=3, gpu="GPU-1")]
    routing = select_for_group(shared, wanted)
    assert routing.used_transports(shared) == ("mpi_cuda",)
    assert routing.refused == {"nccl": "rank 1 and rank 3 share one GPU, which NCCL refuses"}


def cluster(machines=2, gpus=2, ranks=1, reach=True, **changed):
    """Ranks on machines whose GPUs read each other's memory or not."""
    group = []
    for machine, gpu, _ in itertools.product(range(machines), range(gpus), range(ranks)):
        others = tuple(f"{machine}-{other}" for other in range(gpus) if other != gpu)
        facts = replace(GOOD, rank=len(group), machine=machine, gpu=f"{machine}-{gpu}", **changed)
        group.append(replace(facts, out_of_reach=() if reach else others))
    return group


@pytest.mark.parametrize(
    ("wanted", "options", "same_gpu", "inside", "between", "sums"),
    [
        ("auto", {}, None, "cuda_ipc", "mpi_cuda", "nccl"),
        ("auto", {"reach": False}, None, "nccl", "mpi_cuda", "nccl"),
        ("auto", {"ranks": 2}, "cuda_ipc", "cuda_ipc", "mpi_cuda", "cuda_staged"),
        ("auto", {"ranks": 2, "reach": False}, "cuda_ipc", "mpi_cuda", "mpi_cuda", "cuda_staged"),
        ("auto", {"mpi_cuda": False}, None, "cuda_ipc", "nccl", "nccl"),
        ("auto", {"mpi_cuda": False, "cupy": None}, None, "cuda_ipc", "cuda_staged", "cuda_staged"),
        ("nccl,mpi_cuda", {}, None, "nccl", "mpi_cuda", "nccl"),
        ("mpi_cuda,nccl", {}, None, "mpi_cuda", "mpi_cuda", "nccl"),
        ("nccl", {}, None, "nccl", "nccl", "nccl"),
        ("cuda_ipc", {}, None, "cuda_ipc", "cuda_staged", "cuda_staged"),
        ("mpi_cuda,cuda_ipc", {}, None, "mpi_cuda", "mpi_cuda", "cuda_staged"),
        ("cuda_ipc,cuda_staged,nccl", {}, None, "cuda_ipc", "cuda_staged", "cuda_staged"),
    ],
)
def test_the_transport_of_a_message_depends_on_where_the_peer_is(
    wanted, options, same_gpu, inside, between, sums
):
    """Inside a machine the best of the list; between machines MPI, if it takes GPU memory."""
    group = cluster(**options)
    routing = select_for_group(group, parse_transport_names(wanted))
    for one, other in itertools.permutations(group, 2):
        expected = inside if one.machine == other.machine else between
        expected = same_gpu if one.gpu == other.gpu else expected
        assert routing.transport_between(one, other) == expected
    assert routing.collectives == sums
    there = {same_gpu, inside, between, sums} - {None, "cuda_staged"}
    assert set(routing.used_transports(group)) == there


def test_one_rank_alone_has_a_transport():
    """A group of one rank has a transport for collectives, ``cuda_staged`` at the least."""
    assert select_for_group([GOOD], ALL).used_transports([GOOD]) == ("nccl",)
    assert select_for_group([GOOD], ["cuda_ipc"]).used_transports([GOOD]) == ()
    assert select_for_group([DeviceCapabilities(0)]).collectives == "cuda_staged"


def test_ranks_on_cpus_and_ranks_on_gpus_do_not_go_together():
    """Ranks on CPUs beside ranks on GPUs raise MismatchError that lists both groups."""
    group = [
        replace(GOOD, rank=0),
        DeviceCapabilities(1),
        DeviceCapabilities(2),
        replace(GOOD, rank=3),
    ]
    with pytest.raises(MismatchError) as caught:
        select_for_group(group)
    assert str(caught.value) == (
        "ranks 1, 2 have tensors on cpu and ranks 0, 3 have tensors on cuda: expected all "
        "ranks of a run on one kind of device. Start it only where there are GPUs, or hide them "
        "with CUDA_VISIBLE_DEVICES= on all ranks"
    )
    with pytest.raises(MismatchError, match="rank 1 has tensors on cpu"):
        select_for_group(group[:2])


def test_ranks_go_around_the_visible_gpus(monkeypatch):
    """Local ranks take the visible GPUs round robin; without GPUs there is none."""
    for count, ranks, expected in [(3, range(5), [0, 1, 2, 0, 1]), (1, [7], [0]), (0, [0], [None])]:
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert [default_device_index(rank) for rank in ranks] == expected


def test_a_rank_takes_the_gpu_that_the_user_has_made_current(monkeypatch):
    """Unless it is the first one, which is current where nobody has chosen any."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    for current, expected in [(3, 3), (0, 1)]:
        monkeypatch.setattr("torch.cuda.current_device", lambda current=current: current)
        assert default_device_index(1) == expected


# what the doctor shows


def test_the_doctor_says_of_each_transport_whether_it_serves_and_why():
    """Each transport's row says in use, can be asked for or cannot be used, and why."""
    aware = GOOD
    rows = {row.transport: row for row in list_device_transports(aware)}
    assert (rows["cuda_staged"].state, rows["mpi_cuda"].state) == ("in use", "can be asked for")
    assert rows["mpi_cuda"].why == "ASYNCDDP_DEVICE_TRANSPORTS=mpi_cuda"
    rows = {row.transport: row for row in list_device_transports(aware, ["mpi_cuda"])}
    assert rows["mpi_cuda"].state == "in use"
    assert rows["cuda_staged"].state == "can be asked for"
    rows = {row.transport: row for row in list_device_transports(replace(aware, mpi_cuda=False))}
    assert rows["mpi_cuda"].state == "cannot be used"
    assert "does not say that it takes GPU memory" in rows["mpi_cuda"].why


def test_every_transport_of_the_registry_has_a_row_in_the_table():
    """A new transport is shown by the doctor; one without conditions would be taken blindly."""
    assert {row.transport for row in list_device_transports(GOOD)} == set(DEVICE_TRANSPORTS)
    for transport in DEVICE_TRANSPORTS:
        routing = select_for_group([GOOD, OTHER], [transport])
        assert routing.transport_between(GOOD, OTHER) == transport
        assert DEVICE_TRANSPORTS[transport].name == transport


class OneMore(CudaStagedTransport):
    """A transport of one class, for ranks on one machine."""

    name = "one_more"
    scope = Scope.MACHINE
    serves_collectives = True

    @staticmethod
    def obstacle(one, other):
        return None if one.machine == other.machine else "they are apart"


def test_a_new_transport_is_one_class_and_one_line_of_the_registry(monkeypatch):
    """A registered class is chosen, listed and opened by its name without other changes."""
    monkeypatch.setitem(DEVICE_TRANSPORTS._entries, "one_more", f"{__name__}:OneMore")
    group = [GOOD, OTHER, replace(OTHER, rank=2, machine=1)]
    routing = select_for_group(group, parse_transport_names("one_more"))
    assert routing.transport_between(*group[:2]) == routing.collectives == "one_more"
    assert routing.transport_between(*group[1:]) == "cuda_staged"
    rows = {row.transport: row.why for row in list_device_transports(GOOD)}
    assert rows["one_more"] == "ASYNCDDP_DEVICE_TRANSPORTS=one_more"
    (alone,) = LoopbackTransport.group(1)
    streams = SimulatedStreams()
    choice = negotiate_transport(alone, ["one_more"], GOOD, streams, 10.0)
    assert choice.transport == device_transport_for(alone, streams).name == "one_more"


def test_routes_of_gpu_tensors_are_staged_over_the_transport_of_their_host():
    """CUDA tensors are staged over the transport that carries host messages."""
    assert [select_route("cuda", same).transport for same in (True, False)] == [
        "cuda_staged over mpi"
    ] * 2
    assert select_route("cuda", True, "loopback").transport == "cuda_staged over loopback"
    assert select_route("mps", True, "mpi").how == "copied to host memory, sent, copied back"


def test_the_doctor_warns_of_ranks_without_gpus_beside_others():
    """One finding names the ranks without GPUs, only where other ranks have some."""
    ranks = [{"rank": 0, "devices": ["cpu", "cuda"]}, {"rank": 1, "devices": ["cpu"]}]
    (finding,) = check_mixed_devices(ranks)
    assert finding.value == "none for rank 1, some for the others"
    assert "CUDA_VISIBLE_DEVICES=" in finding.advice
    assert check_mixed_devices(ranks[:1]) == check_mixed_devices(ranks[1:]) == []


def test_the_doctor_says_which_gpu_a_rank_takes(monkeypatch):
    """The doctor tells a rank's default GPU and how many there are, or that it has none."""
    monkeypatch.setattr(probe, "list_gpus", lambda: ["NVIDIA H200"] * 4)
    assert probe._describe_gpu(1) == "1 of 4 by local_rank"
    assert probe._describe_gpu(None) == "none"


@pytest.mark.parametrize("aware", [False, True])
def test_the_probe_of_a_machine_with_gpus_tells_of_its_transports(monkeypatch, aware):
    """The probe lists every GPU transport; where the one asked for cannot be used, it stages."""
    found = DeviceCapabilities(0, device="cuda", gpu="a", mpi_cuda=aware)
    monkeypatch.setattr(negotiation, "detect_capabilities", lambda *_: found)
    monkeypatch.setenv("ASYNCDDP_DEVICE_TRANSPORTS", "mpi_cuda")
    rows = {row["transport"]: row["state"] for row in probe._list_device_transports()}
    assert set(rows) == set(DEVICE_TRANSPORTS)
    used = {name for name, state in rows.items() if state == "in use"}
    assert rows["mpi_cuda"] == ("in use" if aware else "cannot be used")
    assert aware or used == {"cuda_staged"}


@pytest.mark.parametrize(
    ("cuda", "used", "sets"), [("13.0", False, True), ("13.0", True, False), (None, False, False)]
)
def test_queues_of_cuda_are_asked_for_before_the_host_transport_opens(
    monkeypatch, cuda, used, sets
):
    """Not by a torch without CUDA, and not where CUDA has read its variables already."""
    seen = []

    class Stops:
        @staticmethod
        def join(startup, *, required):
            seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))

    monkeypatch.setattr(selection, "TRANSPORTS", {"stops": Stops})
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    selection.open_transport("stops")
    assert seen == ["32" if sets else None]
