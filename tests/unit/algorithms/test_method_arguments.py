"""Options of methods: what is out of range is named with what is expected."""

from __future__ import annotations

import math
import re

import pytest

from asyncddp.algorithms import ALGORITHMS
from asyncddp.errors import ArgumentError

ABOVE_0 = "expected a number above 0"
BELOW_1 = "expected a number from 0 to below 1"
WHOLE = "expected a whole number of at least 1"
LOCAL = ("diloco", "noloco", "sparse_loco", "slowmo", "local_sgd", "post_local_sgd")
WITH_MOMENTUM = ("slowmo", "demo", "decentlam", "edm", "momentum_tracking")
TABLE = [
    (LOCAL[:3], "outer_lr", (0, -1.0, "0.7", True, math.inf, math.nan), ABOVE_0),
    (("slowmo",), "alpha", (0, "1", math.nan), ABOVE_0),
    (LOCAL[:2], "outer_momentum", (1.0,), BELOW_1),
    (WITH_MOMENTUM, "beta", (1, -0.1, "0.9"), BELOW_1),
    (LOCAL, "communication_interval", (0, 1.5, None), WHOLE),
]
CASES = [
    (method, argument, value, words)
    for methods, argument, values, words in TABLE
    for method in methods
    for value in values
]


@pytest.mark.parametrize(("method", "argument", "value", "words"), CASES)
def test_an_option_out_of_range_is_named(method, argument, value, words):
    """The error says which argument, what is expected and what was given."""
    told = re.escape(f"argument {argument}: {words}") + f".*got {re.escape(repr(value))}"
    with pytest.raises(ArgumentError, match=told):
        ALGORITHMS[method](**{argument: value})
