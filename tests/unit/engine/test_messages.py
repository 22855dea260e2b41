"""Messages survive their bytes, other bytes are refused, and keys read well."""

from __future__ import annotations

import pickle
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncddp.engine.messages import (
    COLLECTIVE,
    MACHINE_COLLECTIVE,
    SIGNATURE_ONLY,
    Ack,
    ActiveMessage,
    DeadlockCycle,
    DeadlockProbe,
    ExitAnnouncement,
    MatchKey,
    Message,
    Nack,
    TensorMessage,
    WaitForEdge,
    decode,
    encode,
)
from asyncddp.membership import View
from asyncddp.membership.messages import (
    NO_BALLOT,
    Accept,
    Accepted,
    Ballot,
    Commit,
    JoinRequest,
    LeaveRequest,
    Prepare,
    Promise,
    Suspicion,
    ViewRequest,
)
from asyncddp.shm.arena import SharedMemoryHandle

KEY = MatchKey("a/b", 3)
VIEW = View(1, (0, 1, 3), {"x": 5}, (), (2,), (0, 1, 3))
CHAIN = (WaitForEdge(0, "barrier", KEY), WaitForEdge(2, "allreduce", MatchKey("c", 0)))
MESSAGES = [
    TensorMessage(KEY, "neighbor_allreduce", "float32", (2, 1), b"8 bytes.", 7, True, False),
    TensorMessage(KEY, "neighbor_allreduce", "float32", (), None, 7, False, True),
    Ack(KEY),
    Nack(KEY, "no"),
    Nack(KEY, "it did not come", "WaitTimeoutError", 3),
    DeadlockProbe(CHAIN),
    DeadlockCycle(CHAIN),
    ExitAnnouncement("done", {COLLECTIVE: 4}),
    ActiveMessage("windows", (1, "put", 0.5, None), "", (), None, -1),
    Suspicion(0, 2, True, "it has ended"),
    Prepare(0, Ballot(1, 0), (2,)),
    Promise(0, Ballot(1, 0), {"x": 5}, NO_BALLOT, None),
    Accept(0, Ballot(1, 0), (2,), VIEW),
    Accepted(0, Ballot(1, 0)),
    Commit(VIEW),
    ViewRequest(0),
    JoinRequest(1, 2),
    LeaveRequest(1, 2),
]
TEXT = st.text(st.characters(codec="utf-8"))
NUMBER = st.integers(-(2**63), 2**63 - 1)
SIZE = st.integers(0, 2**20)
KEYS = st.builds(MatchKey, TEXT, NUMBER)
CHAINS = st.lists(st.builds(WaitForEdge, NUMBER, TEXT, KEYS), min_size=1).map(tuple)
FACTS = st.lists(st.none() | st.booleans() | NUMBER | st.floats(allow_nan=False) | TEXT).map(tuple)
PLACES = st.builds(SharedMemoryHandle, NUMBER, NUMBER, NUMBER)
INLINE = st.binary(max_size=64).map(lambda data: ("uint8", (len(data),), data))
BULK = st.tuples(st.sampled_from(["float32", "bfloat16"]), st.tuples(SIZE, SIZE), st.none())
ANY = st.one_of(
    st.builds(
        lambda form, key, verb, tag, flags, ring, device: TensorMessage(
            key, verb, *form, tag, *flags, ring, device
        ),
        *(INLINE | BULK, KEYS, TEXT, SIZE, st.tuples(st.booleans(), st.booleans())),
        *(st.none() | PLACES, TEXT),
    ),
    st.builds(Ack, KEYS),
    st.builds(Nack, KEYS, TEXT),
    st.builds(DeadlockProbe, CHAINS),
    st.builds(DeadlockCycle, CHAINS),
    st.builds(ExitAnnouncement, TEXT, st.dictionaries(TEXT, NUMBER)),
    st.builds(
        lambda form, service, content, tag: ActiveMessage(service, content, *form, tag),
        *(INLINE | BULK | st.just(("", (), None)), TEXT, FACTS, NUMBER),
    ),
)


class Bomb:
    """What pickle would run."""

    def __reduce__(self):
        return pytest.fail, ("a message was executed",)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_what_it_was(message):
    """Each kind of message is equal and of the same type after encoding and decoding."""
    (back,) = decode(encode([message]))
    assert back == message
    assert type(back) is type(message)


def test_a_bundle_keeps_its_order():
    """Messages encoded together are decoded in the same order."""
    assert decode(encode(MESSAGES)) == MESSAGES


def test_the_examples_are_of_all_kinds():
    """The examples of these tests have every type of ``Message``."""
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


@given(st.lists(ANY))
def test_all_that_fields_can_hold_survives(messages):
    """Messages with any values in their fields are equal after encoding and decoding."""
    back = decode(encode(messages))
    assert back == messages
    assert [type(m) for m in back] == [type(m) for m in messages]


@given(st.lists(ANY, min_size=1), st.data())
def test_a_part_of_a_bundle_is_refused(messages, data):
    """A truncated bundle raises ``ValueError``, wherever it is cut."""
    whole = encode(messages)
    with pytest.raises(ValueError, match=r"truncated|malformed|Expected|unknown|bytes for"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.lists(ANY, min_size=1), st.data())
def test_garbled_bytes_are_refused_or_are_messages(messages, data):
    """Whatever they hold, nothing else is raised, and nothing else comes out."""
    garbled = bytearray(encode(messages))
    for _ in range(data.draw(st.integers(1, 4))):
        garbled[data.draw(st.integers(0, len(garbled) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(garbled))
    except ValueError:
        return
    assert {type(message) for message in found} <= set(get_args(Message))


@given(st.binary())
def test_any_bytes_are_refused_or_are_messages(data):
    """Decoding any bytes raises ``ValueError`` or gives messages, nothing else."""
    try:
        found = decode(data)
    except ValueError:
        return
    assert {type(message) for message in found} <= set(get_args(Message))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (pickle.dumps([Bomb()]), "Expected `array`|malformed|truncated"),
        (pickle.dumps(Bomb(), protocol=0), "Expected `array`|malformed|truncated"),
        (msgspec.msgpack.encode([[99, "x"]]), "Invalid value 99"),
        (msgspec.msgpack.encode([[1, ["x", "y"]]]), "Expected `int`, got `str`"),
        (msgspec.msgpack.encode([[1]]), "at least length 2|Expected `array` of"),
        (encode([TensorMessage(KEY, "v", "load", (), None, 7)]), "unknown dtype 'load'"),
        (
            encode([TensorMessage(KEY, "v", "float32", (2,), b"1234", 7)]),
            r"4 bytes for 8 of float32 in",
        ),
        (encode([TensorMessage(KEY, "v", "float32", (-1,), None, 7)]), "Expected `int` >= 0"),
        (
            encode([TensorMessage(KEY, "v", "uint8", (3,), b"1", SIGNATURE_ONLY)]),
            "1 bytes for 3 of uint8",
        ),
        (encode([ActiveMessage("s", (), "", (), b"1", -1)]), "unknown dtype ''"),
        (msgspec.msgpack.encode([[6, "s", [{"a": 1}], "", [], None, -1]]), "Expected"),
        (encode([DeadlockProbe(())]), "Probe of an empty chain"),
    ],
)
def test_what_is_no_message_is_refused(data, problem):
    """Pickles, unknown kinds, wrong types and sizes that do not fit raise ``ValueError``."""
    with pytest.raises(ValueError, match=problem):
        decode(data)


def test_reasons_that_utf8_cannot_encode_travel_with_escapes():
    """As where an error quotes the name of a file."""
    (back,) = decode(encode([Nack(KEY, "no file \udcff")]))
    assert back == Nack(KEY, "no file \\udcff")


def test_kinds_with_equal_fields_stay_apart():
    """A probe and a circle differ in their kind alone."""
    assert [type(m) for m in decode(encode([DeadlockProbe(CHAIN), DeadlockCycle(CHAIN)]))] == [
        DeadlockProbe,
        DeadlockCycle,
    ]


@pytest.mark.parametrize(
    ("key", "text", "collective"),
    [
        (MatchKey("layer", 2), "'layer' (use 2)", False),
        (MatchKey("collective", 2), "'collective' (use 2)", False),
        (MatchKey(COLLECTIVE, 2), "(collective, number 2)", True),
        (MatchKey(f"{COLLECTIVE}/1", 2), "(collective, number 2)", True),
        (MatchKey(MACHINE_COLLECTIVE, 0), "(collective of the machine, number 0)", True),
    ],
)
def test_keys_say_what_they_are(key, text, collective):
    """A key reads as name and use, or as a collective's number, which ``collective`` tells."""
    assert str(key) == text
    assert key.collective is collective
