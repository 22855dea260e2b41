"""Options of methods: what is out of range is named with what is expected."""

from __future__ import annotations

import math
import re

import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from asyncddp.errors import ArgumentError
from tests.support import LoopbackWorld

ABOVE_0 = "expected a number above 0"
BELOW_1 = "expected a number from 0 to below 1"
WHOLE = "expected a whole number of at least 1"
NESTEROV = (
    *("diloco", "noloco", "gasloc", "factored_gossip_diloco", "muloco"),
    "streaming_diloco",
)
OUTER = (*NESTEROV, "sparse_loco")
LOCAL = (*OUTER, "slowmo", "local_sgd", "post_local_sgd", "des_loc")
WITH_MOMENTUM = ("slowmo", "demo", "decentlam", "edm", "momentum_tracking")
TABLE = [
    (OUTER, "outer_lr", (0, -1.0, "0.7", True, math.inf, math.nan), ABOVE_0),
    (("slowmo",), "alpha", (0, "1", math.nan), ABOVE_0),
    (NESTEROV, "outer_momentum", (1.0,), BELOW_1),
    (
        ("slowmo",),
        "base",
        ("choco_sgd", None),
        "expected 'local_sgd', 'adapt_then_combine' or 'push_sum'",
    ),
    (("gasloc",), "consensus_rate", (0, -1.0, "1", math.inf), ABOVE_0),
    (("moniqua",), "theta", (0, -1.0, math.inf, "2"), ABOVE_0),
    (NESTEROV[-1:], "mixing", (1.0, -0.1), BELOW_1),
    (NESTEROV[-1:], "fragments", (0, 1.5), WHOLE),
    (NESTEROV[-1:], "delay", (-1, 0.5), "expected a whole number of at least 0"),
    (NESTEROV[-1:], "delay", (25, 30), "expected less than communication_interval=25, so that"),
    (WITH_MOMENTUM, "beta", (1, -0.1, "0.9"), BELOW_1),
    (("a2cid2",), "rate", (-0.1, "1", math.nan), "expected a number of at least 0"),
    (("a2cid2",), "pair_step", (-0.1, True), "expected a number of at least 0"),
    (("overlap_sgp",), "staleness", (-1, 1.5), "expected a whole number of at least 0"),
    (("des_loc",), "state_intervals", (3, ["exp_avg"]), "expected a mapping such as"),
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


@pytest.mark.parametrize("fragments", [3, 99])
def test_more_fragments_than_parameters_are_refused(fragments):
    """With the number of parameters; as many as there are is the most that is taken."""

    def train(count):
        model = torch.nn.Linear(3, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        bf.DistributedOptimizer(sgd, model, "streaming_diloco", fragments=count)

    world = LoopbackWorld(2)
    world.run(train, 2)
    with pytest.raises(Exception, match=rf"fragments: expected at most 2, .* got {fragments}"):
        world.run(train, fragments)


def test_states_that_cannot_be_averaged_are_named():
    """An interval has at least a step; Adafactor keeps sums over rows, which are no moments."""
    with pytest.raises(ArgumentError, match="state_intervals: 'exp_avg': expected a whole number"):
        ALGORITHMS["des_loc"](state_intervals={"exp_avg": 0})

    def case():
        model = torch.nn.Linear(3, 2)
        plain = torch.optim.Adafactor(model.parameters())
        options = {"communication_interval": 1, "state_intervals": {"row_var": 1}}
        optimizer = bf.DistributedOptimizer(plain, model, "des_loc", **options)
        model(torch.ones(1, 3)).sum().backward()
        words = r"what it keeps of weight as 'row_var' .*expected a tensor of shape \(2, 3\)"
        with pytest.raises(ArgumentError, match=words):
            optimizer.step()

    LoopbackWorld(2).run(case)
