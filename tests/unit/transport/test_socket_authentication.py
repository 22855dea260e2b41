"""Who is no rank of the run is turned away, and costs the ranks next to nothing."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, closing

import pytest

from asyncddp.errors import EnvironmentProblem, PeerError
from asyncddp.printable_text import printable
from asyncddp.transport.sockets import authentication
from asyncddp.transport.sockets.addresses import connect_to
from asyncddp.transport.sockets.authentication import StoreAuthenticator, code_of
from asyncddp.transport.sockets.frames import FrameHeader, FrameKind
from tests.conformance import test_transports as transports
from tests.unit.transport.test_socket_mesh import SECONDS, Threads

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's id")


@pytest.fixture
def world():
    """Two ranks on a machine each; the first is attacked before the second says anything."""
    opened = Threads(2, machines=int)
    yield opened
    opened.close()


def hello(mesh, rank, to=0):
    """The first frame of a rank that knows the run's key."""
    code = code_of(mesh.world.key, rank, to)
    return FrameHeader(FrameKind.HELLO, 0, 0, rank, len(code)).pack() + code


def is_closed(world, connection):
    """Poll on rank 0 until it answers; tell whether it has closed the connection."""
    connection.settimeout(0.02)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        world.ends[0].poll()
        try:
            return connection.recv(100) == b""
        except TimeoutError:
            continue
        except ConnectionResetError:
            return True
    pytest.fail("no answer")


def address_of(world):
    record = world.meshes[0].world.records[0]
    return record.host, record.port


@pytest.mark.parametrize("rank", [0, 2, 1 << 40])
def test_a_rank_that_cannot_be_is_turned_away(world, rank):
    """This one, one beyond the size: also where the code is right."""
    with socket.create_connection(address_of(world)) as stranger:
        stranger.sendall(hello(world.meshes[0], rank))
        assert is_closed(world, stranger)
    assert world.run_bare(transports.by_tag_backwards) == [True, True]


def test_a_rank_comes_once(world):
    """A second connection of the same rank is turned away, the first one goes on."""
    world.run_bare(lambda transport: transport.barrier(SECONDS))
    with socket.create_connection(address_of(world)) as stranger:
        stranger.sendall(hello(world.meshes[0], 1))
        assert is_closed(world, stranger)
    assert world.run_bare(transports.by_tag_backwards) == [True, True]
    assert world.ends[0].failed_peers() == {}


def test_who_listens_in_a_ranks_place_says_nothing(world):
    """What comes from the address of a rank is not taken before its code has come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        me = world.meshes[1].world
        taken = me.records[0]._replace(port=listener.getsockname()[1])
        world.meshes[1].world = me._replace(records=(taken, *me.records[1:]))
        world.meshes[1]._routes.clear()
        world.ends[1].post(0, b"for rank 0")
        with closing(listener.accept()[0]) as impostor:
            impostor.sendall(FrameHeader(FrameKind.MESSAGE, 0, 0, 0, 4).pack() + b"evil")
            deadline = time.monotonic() + SECONDS
            while not world.ends[1].failed_peers() and time.monotonic() < deadline:
                assert list(world.ends[1].poll()) == []
    assert "none of this run" in world.ends[1].failed_peers()[0]


CHILD = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
end, address = socket.socket(socket.AF_UNIX), "\\0" + sys.argv[2]
if sys.argv[1] == "listen":
    end.bind(address), end.listen()
    print("ready", flush=True)
    sys.stdin.read()
else:
    end.settimeout(20)
    end.connect(address)
    try:
        end.sendall(bytes.fromhex(sys.argv[3]))
        print(end.recv(100))
    except (BrokenPipeError, ConnectionResetError):
        print(b"")
"""


def other_user(*words):
    """A process of another user."""
    code = [sys.executable, "-I", "-c", textwrap.dedent(CHILD), *words]
    return subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@as_root
def test_another_user_of_the_machine_is_turned_away(world):
    """The abstract socket lets everybody in: the kernel says whose process it is."""
    mesh = world.meshes[1]  # with which rank 0 has not connected yet
    first = hello(mesh, 0, to=1)
    with other_user("connect", mesh.world.records[1].unix_name, first.hex()) as child:
        while child.poll() is None:
            world.ends[1].poll()
        assert child.stdout.read() == "b''\n"
    assert world.run_bare(transports.by_tag_backwards) == [True, True]
    assert world.ends[0].failed_peers() == {}


@as_root
def test_no_rank_connects_with_another_user(world):
    """Who has taken a name in the store, or a rank's address, gets nothing."""
    record = world.meshes[0].world.records[0]
    with other_user("listen", f"{record.unix_name}-other") as child:
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(PermissionError, match="another user listens"):
            connect_to(record, record._replace(unix_name=f"{record.unix_name}-other"), 30.0)
        child.stdin.close()


def test_many_that_say_nothing_cost_little(world, monkeypatch):
    """Of 960 half-open connections few are kept, without memory, and not for long."""
    mesh = world.meshes[0]
    family, address = socket.AF_UNIX, mesh.world.records[0].unix_address()
    with ExitStack() as opened:
        for number in range(960):
            stranger = opened.enter_context(
                socket.socket(family) if number % 2 else socket.socket(socket.AF_INET)
            )
            stranger.connect(address if number % 2 else address_of(world))
            if number % 3 == 0:
                stranger.sendall(b"\0")
            world.ends[0].poll()
        unknown = [one for one in mesh._connections.values() if not one.proven]
        assert 0 < len(unknown) <= authentication._MAX_UNKNOWN
        assert max(len(one._buffer) for one in unknown) < 1024
        assert world.run_bare(transports.by_tag_backwards) == [True, True]
        monkeypatch.setattr(authentication, "_HELLO_TIMEOUT", 0.0)
        world.ends[0].poll()
        assert all(one.proven for one in mesh._connections.values())
    assert world.ends[0].failed_peers() == {}


# the store


def test_a_seal_shows_who_wrote_what_and_where():
    """Another secret, another key or other bytes are an error that says what to do."""
    ours, theirs = StoreAuthenticator(b"secret", "h:1"), StoreAuthenticator(b"", "h:1")
    sealed = ours.close("rank-1", b"record")
    assert ours.open("rank-1", sealed) == b"record"
    for seal, key, data in (
        (theirs, "rank-1", sealed),
        (ours, "rank-2", sealed),
        (ours, "rank-1", sealed + b"!"),
        (ours, "rank-1", b"short"),
    ):
        with pytest.raises(EnvironmentProblem, match=f"store at h:1 has as {key}.*set it alike"):
            seal.open(key, data)


# what is shown


def test_texts_of_other_ranks_do_not_steer_a_terminal(world, caplog):
    """Neither in errors nor in the log; line ends, tabs and other scripts stay."""
    world.meshes[0].mark_failed(1, "\x1b]0;owned\x07\x9b2J gone")
    assert "(\\x1b]0;owned\\x07\\x9b2J gone)" in str(world.meshes[0].error_of(1))
    assert "\x1b" not in str(PeerError("\x1b[31m"))
    text = "größer\n\t多"
    assert printable(text) == str(PeerError(text)) == text
    with caplog.at_level(logging.WARNING, "asyncddp"):
        logging.getLogger("asyncddp").warning("rank %d: %s", 1, "\x1b[2J")
    assert "rank 1: \\x1b[2J" in caplog.text
