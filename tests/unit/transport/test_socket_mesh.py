"""The socket mesh between ranks that are threads here, as if on machines of their own."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from contextlib import ExitStack

import pytest
import torch

import asyncddp as bf
from asyncddp.errors import MismatchError, PeerLeftError
from asyncddp.transport import collective_algorithms
from asyncddp.transport.sockets.addresses import open_listeners
from asyncddp.transport.sockets.frames import CREDIT_BYTES, EAGER_BYTES, FrameHeader, FrameKind
from asyncddp.transport.sockets.socket_mesh import SocketMesh
from asyncddp.transport.sockets.socket_transport import MeshGroup, SocketTransport
from asyncddp.transport.sockets.world_records import WorldRecord, make_record
from tests.conformance import test_transports as transports

pytestmark = pytest.mark.training

SECONDS = 10.0
ENDED = "its process has ended without shutdown()"


def open_meshes(size, *, machines):
    """Meshes of ranks, rank r on machine ``machines(r)``: TCP between them, Unix sockets inside."""
    every = [open_listeners("localhost", 1) for _ in range(size)]
    records = tuple(
        make_record({}, one.host, one.port, one.unix_name)._replace(machine=str(machines(rank)))
        for rank, one in enumerate(every)
    )
    key = secrets.token_bytes(16)
    return [
        SocketMesh(WorldRecord(rank, "world", key, records), [one.unix, one.tcp])
        for rank, one in enumerate(every)
    ]


class Threads:
    """Ranks that are threads, each with a transport of its own over sockets."""

    transport = "c10d"

    def __init__(self, size, *, machines):
        self.size = size
        self.meshes = open_meshes(size, machines=machines)
        self.ends = [SocketTransport(MeshGroup(one, "world", range(size))) for one in self.meshes]

    def run_bare(self, case, *args):
        """What ``case(transport, *args)`` returned, by rank."""
        with bf.local_world(self.size, timeout=60) as world:
            return world.run(lambda: case(self.ends[bf.rank()], *args))

    def close(self):
        """Close all at once, as ranks do."""
        closing = [threading.Thread(target=mesh.close) for mesh in self.meshes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


@pytest.fixture(
    params=[(2, "tcp"), (3, "tcp"), (3, "ring"), (4, "pairs"), (5, "ring")],
    ids=lambda one: f"{one[1]}-{one[0]}",
)
def world(request, monkeypatch):
    """Ranks on a machine each, or two on each machine; or sums around a ring, as among many."""
    size, how = request.param
    if how == "ring":
        monkeypatch.setattr(collective_algorithms, "FEW_RANKS", 2)
    opened = Threads(size, machines=(lambda rank: rank // 2) if how == "pairs" else int)
    yield opened
    opened.close()


CASES = {
    "messages_in_order": (),
    "post_without_reader": (),
    "by_tag_backwards": (),
    "same_tag_in_order": (),
    "around_pieces": ([0, 1, 999, 65_536, 65_537, 300_001, 3_000_001],),
    "given_up_receive": (),
    "given_up_send": (),
    "sums": (torch.float32,),
    "scattered_sums": (torch.float64,),
    "means_of_huge": (torch.float32,),
    "means_of_integers": (torch.uint8,),
    "splits": (),
}


@pytest.mark.parametrize("case", CASES)
def test_the_contract_holds_between_machines(world, case):
    """Without shared memory all goes over sockets: large tensors are announced, sums in parts."""
    told = world.run_bare(getattr(transports, case), *CASES[case])
    if case == "given_up_receive":
        assert told[0] == ([0.0] * 3, [1.0] * 3)
    else:
        assert all(one is None or one is True or one for one in told)


@pytest.mark.parametrize(
    "world",
    [(4, "pairs"), (5, "ring"), (5, "tcp")],
    indirect=True,
    ids=["pairs-4", "ring-5", "tcp-5"],
)
def test_several_large_sums_may_be_under_way(world):
    """Sums of many pieces each, finished in another order than they were started in."""
    world.run_bare(transports.several_large_at_once)


def exchange(transport, length):
    ahead, behind = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sending = transport.isend(torch.ones(length), ahead, 4)
    out = torch.zeros(length + 1)
    try:
        transport.receive(out, behind, 4, SECONDS)
    except MismatchError as error:
        received = str(error)
    told = None
    try:
        transport.finish(sending, SECONDS, "send")
    except MismatchError as error:
        told = str(error)
    transport.barrier(SECONDS)  # who has heard all still has to tell its neighbour
    return received, told


@pytest.mark.parametrize("length", [5, EAGER_BYTES, CREDIT_BYTES])
def test_a_receive_of_another_size_is_an_error_where_it_is_known(world, length):
    """The receiver always knows; a sender that has to wait for it is told."""
    size = 4 * length
    for rank, (received, sent) in enumerate(world.run_bare(exchange, length)):
        ahead, behind = (rank + 1) % world.size, (rank - 1) % world.size
        words = "rank {} sent {} bytes to rank {}, which expected {}".format
        assert received == words(behind, size, rank, size + 4)
        near = ahead in world.meshes[rank].world.machine_ranks()
        waits = size > (EAGER_BYTES if near else CREDIT_BYTES)
        told = words(rank, size, ahead, size + 4)
        assert sent == told or (sent is None and not waits)  # or its credit is not back yet
    world.run_bare(transports.around_pieces, [65_537])  # over the same connections


LATE = [EAGER_BYTES // 4 + 1, 1 << 18, 700_001, CREDIT_BYTES // 4, CREDIT_BYTES // 4 + 1, 3 << 20]


def late_receives(transport, seconds):
    """Send tensors around, and ask for them in the reverse order some time later."""
    ahead, behind = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sent = [torch.arange(length, dtype=torch.int32) * (transport.rank + 1) for length in LATE]
    sending = [transport.isend(one, ahead, tag) for tag, one in enumerate(sent)]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        transport.poll()
    for tag in reversed(range(len(LATE))):
        out = torch.empty(LATE[tag], dtype=torch.int32)
        transport.receive(out, behind, tag, SECONDS)
        torch.testing.assert_close(out, torch.arange(len(out), dtype=torch.int32) * (behind + 1))
    for request in sending:
        transport.finish(request, SECONDS, "send")
    return True


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.3])
def test_what_comes_before_it_is_asked_for_is_kept(world, seconds):
    """Whether nothing, a part or all that may come unasked is there; three times the credit."""
    assert all(world.run_bare(late_receives, seconds))


def send_to_late_rank(transport, length):
    """Rank 0 sends; rank 1 looks at its sockets only, and asks for it after a barrier."""
    out = torch.zeros(length)
    done = []
    if transport.rank == 0:
        request = transport.isend(torch.ones(length), 1, 7)
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not request.done():
            pass
        done.append(request.completed)
    else:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            transport.poll()
    transport.barrier(SECONDS)
    if transport.rank == 0:
        transport.finish(request, SECONDS, "send")
    else:
        transport.receive(out, 0, 7, SECONDS)
        assert out.sum() == length
    return done


@pytest.mark.parametrize(
    ("machines", "length", "unasked"),
    [
        (int, CREDIT_BYTES // 4, True),
        (int, CREDIT_BYTES // 4 + 1, False),
        (lambda rank: 0, EAGER_BYTES // 4 + 1, False),
    ],
    ids=["far", "far and larger", "near"],
)
def test_only_so_much_goes_unasked_and_only_to_other_machines(machines, length, unasked):
    """The receiver of more would have to keep it all; near by, asking takes no time."""
    world = Threads(2, machines=machines)
    told = world.run_bare(send_to_late_rank, length)
    world.close()
    assert told[0] == [unasked]


def await_failure(transport, wait):
    if transport.rank == 1:
        return None
    started = time.monotonic()
    request = {
        "receive": lambda: transport.irecv(torch.ones(2), 1, 0),
        "large send": lambda: transport.isend(torch.ones(CREDIT_BYTES), 1, 0),
        "barrier": transport.ibarrier,
        "allreduce": lambda: transport.iallreduce(torch.ones(50_000)),
    }[wait]()
    with pytest.raises(PeerLeftError) as caught:
        transport.finish(request, SECONDS, wait)
    assert time.monotonic() - started < SECONDS / 2
    return str(caught.value)


def kill(mesh):
    """Do to a rank's sockets what the system does when its process dies."""
    mesh.closed = True
    for listener in mesh._listeners.values():
        listener.close()
    for connection in mesh._connections.values():
        connection.socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("wait", ["receive", "large send", "barrier", "allreduce"])
@pytest.mark.parametrize("size", [3, 20])
def test_every_wait_for_a_rank_that_died_ends_with_its_name(wait, size):
    """Also on ranks that have no connection to it: those that have pass the news on."""
    world = Threads(size, machines=lambda rank: 0 if rank else 1)
    world.run_bare(lambda transport: transport.barrier(SECONDS))
    kill(world.meshes[1])
    told = world.run_bare(await_failure, wait)
    for rank in set(range(size)) - {1}:
        assert told[rank] == f"rank {rank}: rank 1 has left ({ENDED}), but is needed"
        assert world.ends[rank].failed_peers() == {1: ENDED}
    world.meshes[1].closed = False
    world.close()


@pytest.mark.parametrize("machines", [int, lambda rank: 0], ids=["tcp", "unix"])
@pytest.mark.parametrize("size", [4, 19])
def test_one_that_cannot_reach_a_peer_removes_it_for_nobody_else(machines, size):
    """The others look for themselves, also those that have no connection to it yet."""
    world, last = Threads(size, machines=machines), size - 1
    world.run_bare(lambda transport: transport.barrier(SECONDS))
    world.meshes[0].mark_failed(last, "it cannot be reached: Too many open files")
    world.meshes[0].mark_failed(last - 1, "what it sent cannot be read: a frame")
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        for end in world.ends:
            end.poll()
    assert set(world.ends[0].failed_peers()) == {last, last - 1}
    assert [end.failed_peers() for end in world.ends[1:]] == [{}] * last
    sent = world.ends[last].isend(torch.ones(3), last - 1, 5)
    taken = torch.zeros(3)
    world.ends[last - 1].receive(taken, last, 5, SECONDS)
    assert sent.done()
    assert taken.sum() == 3
    world.close()


def test_what_a_rank_says_of_its_own_end_is_believed():
    """Without a look, in its words."""
    world = Threads(3, machines=int)
    world.run_bare(lambda transport: transport.barrier(SECONDS))
    world.meshes[1].tell_of_failure(1, "it has ended with exit code 3")
    deadline = time.monotonic() + SECONDS
    told = {1: "it has ended with exit code 3"}
    while world.ends[0].failed_peers() != told or world.ends[2].failed_peers() != told:
        assert time.monotonic() < deadline
        for rank in (0, 2):
            world.ends[rank].poll()
    world.close()


def test_a_rank_that_leaves_in_an_orderly_way_has_not_failed():
    """What it sent before still arrives, and nobody takes it for dead."""
    world = Threads(2, machines=int)
    one, other = world.ends
    one.post(1, b"last words")
    leaving = threading.Thread(target=world.meshes[0].close)
    leaving.start()
    came, deadline = [], time.monotonic() + SECONDS
    while not came and time.monotonic() < deadline:
        came += other.poll()
    leaving.join()
    for _ in range(5):
        other.poll()
    assert came == [(0, b"last words")]
    assert other.failed_peers() == {}
    other.post(0, b"nobody listens")
    world.meshes[1].close()


@pytest.mark.parametrize(
    "first",
    [b"GET / HTTP/1.1\r\n" + bytes(100), None, b"\x03" + bytes(60)],
    ids=["HTTP", "another token", "no HELLO"],
)
def test_strangers_are_turned_away(first):
    """A connection that does not show the run's token is closed, and ranks are none the wiser."""
    world = Threads(2, machines=int)
    record = world.meshes[0].world.records[0]
    if first is None:
        wrong = b"0" * 32
        first = FrameHeader(FrameKind.HELLO, 0, 0, 1, len(wrong)).pack() + wrong
    with ExitStack() as opened:
        for family, address in (
            (socket.AF_INET, (record.host, record.port)),
            (socket.AF_UNIX, record.unix_address()),
        ):
            stranger = opened.enter_context(socket.socket(family))
            stranger.connect(address)
            stranger.sendall(first)
            stranger.settimeout(0.02)
            deadline = time.monotonic() + SECONDS
            while True:
                world.ends[0].poll()
                try:
                    assert stranger.recv(10) == b""
                    break
                except TimeoutError:
                    assert time.monotonic() < deadline
                except ConnectionResetError:
                    break
    assert world.run_bare(transports.by_tag_backwards) == [True, True]
    assert world.ends[0].failed_peers() == {}
    world.close()
