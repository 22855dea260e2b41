"""Messages survive their bytes, and keys read well."""

from __future__ import annotations

import pytest

from asyncddp.engine.messages import (
    COLLECTIVE,
    MACHINE_COLLECTIVE,
    Circle,
    Confirm,
    Data,
    Key,
    Leave,
    Probe,
    Refuse,
    Waiting,
    decode,
    encode,
)

KEY = Key("a/b", 3)
CHAIN = (Waiting(0, "barrier", KEY), Waiting(2, "allreduce", Key("c", 0)))
MESSAGES = [
    Data(KEY, "neighbor_allreduce", "float32", (2, 0), b"bytes", 7, True, False),
    Data(KEY, "neighbor_allreduce", "float32", (), None, 7, False, True),
    Confirm(KEY),
    Refuse(KEY, "no"),
    Probe(CHAIN),
    Circle(CHAIN),
    Leave("done", {COLLECTIVE: 4}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_what_it_was(message):
    (back,) = decode(encode([message]))
    assert back == message
    assert type(back) is type(message)


def test_a_bundle_keeps_its_order():
    assert decode(encode(MESSAGES)) == MESSAGES


def test_kinds_with_equal_fields_stay_apart():
    """A probe and a circle differ in their kind alone."""
    assert [type(m) for m in decode(encode([Probe(CHAIN), Circle(CHAIN)]))] == [Probe, Circle]


@pytest.mark.parametrize(
    ("key", "text", "collective"),
    [
        (Key("layer", 2), "'layer' (use 2)", False),
        (Key("collective", 2), "'collective' (use 2)", False),
        (Key(COLLECTIVE, 2), "(collective, number 2)", True),
        (Key(f"{COLLECTIVE}/1", 2), "(collective, number 2)", True),
        (Key(MACHINE_COLLECTIVE, 0), "(collective of the machine, number 0)", True),
    ],
)
def test_keys_say_what_they_are(key, text, collective):
    assert str(key) == text
    assert key.collective is collective
