"""What ranks tell each other is typed when it is read, and never executed."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import asyncddp as bf
from asyncddp.errors import PeerError
from asyncddp.ops.object_collectives import gather_records
from asyncddp.serialization import pack, unpack
from asyncddp.shm.arena import SharedMemoryHandle
from asyncddp.transport.cuda.capabilities import DeviceCapabilities
from asyncddp.transport.cuda.ipc import ipc_messages as cuda_ipc_notes
from asyncddp.transport.cuda.nccl import coordination_messages as nccl_notes
from tests.support.simulated_streams import SimulatedStreams

ROOM = Path(bf.__file__).parent
USERS_OBJECTS = {
    "checkpoint/elastic_state.py",  # the error of torch.load alone
    "checkpoint/files.py",  # the error of torch.load alone
    "ops/joint_action.py",  # the errors of torch.load alone
    "ops/object_collectives.py",
    "testing/pool_worker.py",
    "testing/process_pool.py",
}
"""Objects that verbs take from users, and cases of their tests."""


class Bomb:
    """What pickle would run."""

    def __reduce__(self):
        return pytest.fail, ("a message was executed",)


BOMBS = [pickle.dumps(Bomb()), pickle.dumps(Bomb(), protocol=0)]


def imported(path):
    """All modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_pickle_is_for_users_objects_alone():
    """Only the modules that carry users' objects import pickle or a similar library."""
    found = {
        str(path.relative_to(ROOM))
        for path in ROOM.rglob("*.py")
        if {"pickle", "dill", "cloudpickle", "marshal", "shelve"} & set(imported(path))
    }
    assert found == USERS_OBJECTS


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3, int),
        (["a", "b"], list[str]),
        ((1, 2, SharedMemoryHandle(1, 2, 3)), tuple[int, int, SharedMemoryHandle]),
        (
            DeviceCapabilities(0, 1, "cuda", "GPU-1", nccl=22703, out_of_reach=("GPU-2",)),
            DeviceCapabilities,
        ),
    ],
)
def test_a_value_is_what_it_was(value, kind):
    """A value that is packed and unpacked by its type is equal and of the same type."""
    back = unpack(pack(value), kind, "it")
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("data", [*BOMBS, b"", pack("text"), pack([1, "a"]), pack({"a": 1})])
@pytest.mark.parametrize("kind", [int, list[int], SharedMemoryHandle, DeviceCapabilities])
def test_anything_else_is_an_error_that_says_whose_it_is(data, kind):
    """Data of another type, or pickled, raises PeerError and is never executed."""
    with pytest.raises(PeerError, match=r"what rank 7 says cannot be read \(.*same version"):
        unpack(data, kind, "what rank 7 says")


@pytest.mark.parametrize(
    "note",
    [
        nccl_notes.OpenCommunicatorMessage(True),
        nccl_notes.UniqueIdMessage(b"id"),
        nccl_notes.OpenRefusedMessage(),
        nccl_notes.TransferPostedMessage(1, True, 2, 3),
        nccl_notes.GroupLaunchMessage((1, 2)),
        nccl_notes.SizeMismatchMessage(1, 2),
        nccl_notes.CancelMessage(nccl_notes.TransferPostedMessage(1, False, 2, 3)),
        nccl_notes.CommunicatorFailedMessage("why"),
    ],
)
def test_notes_of_nccl_are_what_they_were(note):
    """Every coordination message of NCCL is decoded to an equal one of its own type."""
    back = nccl_notes.decode_message(pack(note), peer=1)
    assert back == note
    assert type(back) is type(note)


@pytest.mark.parametrize("data", [*BOMBS, b"", pack([99, []]), pack([3, [1]]), pack([4, ["a"]])])
def test_what_is_no_note_is_an_error_that_names_the_peer(data):
    """Bytes that are no coordination message raise PeerError that names the peer."""
    with pytest.raises(PeerError, match="what rank 1 says of its messages by NCCL cannot be read"):
        nccl_notes.decode_message(data, peer=1)


@pytest.mark.parametrize("data", [*BOMBS, b"", b"\xff" * 8, pack([9, 1]), pack([0, 1])])
def test_what_is_no_message_of_cuda_ipc_is_an_error_that_names_the_peer(data):
    """Other bytes in place of a message of CUDA IPC raise PeerError that names the peer."""
    with pytest.raises(PeerError, match="what rank 1 says of its memory cannot be read"):
        cuda_ipc_notes.decode_message(data, peer=1)


@pytest.mark.parametrize("token", BOMBS)
def test_places_of_memory_and_events_are_not_executed(token):
    """Pickled data in place of a memory or event handle raises PeerError, unexecuted."""
    streams = SimulatedStreams()
    for read in (streams.import_memory, streams.import_event):
        with pytest.raises(PeerError, match="cannot be read"):
            read(token)


def test_facts_of_another_kind_are_an_error_on_every_rank():
    """One rank's record of a wrong type raises PeerError on all; the next gather works."""

    def odd():
        mine = "text" if bf.rank() == 1 else 3
        with pytest.raises(PeerError, match="a test: what rank 1 says cannot be read"):
            gather_records(mine, int, "a test")
        return gather_records(bf.rank(), int, "a test")

    with bf.local_world(2) as world:
        assert world.run(odd) == [[0, 1], [0, 1]]
