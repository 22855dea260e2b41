"""A method that averages rarely says in the end that it has not, or hardly, averaged."""

from __future__ import annotations

import logging

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from tests.support import LoopbackWorld
from tests.support.processes import run_on_mpirun

RARE = [name for name in ALGORITHMS if not ALGORITHMS[name].averages_first_step]
NEVER = "has not averaged the whole model once in"
FEW = "times in"


def train(algorithm, steps, *, ends, **options):
    """Steps of a layer, and how they end: ``conclude``, ``close``, or the end of the world."""
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = bf.DistributedOptimizer(plain, model, algorithm, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    for end in ends:
        getattr(optimizer, end)()


def told(caplog, algorithm, steps, *, ranks=2, ends=(), **options):
    """What the library has logged, of all ranks together."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "asyncddp"):
        world = LoopbackWorld(ranks)
        world.run(train, algorithm, steps, ends=ends, **options)
    return [one.getMessage() for one in caplog.records if one.name == "asyncddp"]


@pytest.mark.parametrize("algorithm", RARE)
@pytest.mark.parametrize("ends", [(), ("conclude", "close"), ("close",)])
def test_no_round_is_told_once(caplog, algorithm, ends):
    """By rank 0, where it concludes, closes, or the world ends: the interval is named."""
    (message,) = told(caplog, algorithm, 3, ends=ends, communication_interval=500)
    assert message.startswith(f"DistributedOptimizer0: {algorithm} {NEVER} 3 steps, with")
    assert "communication_interval=500" in message


def test_the_defaults_of_the_paper_are_told_of(caplog):
    """DiLoCo's H is 500."""
    (message,) = told(caplog, "diloco", 3)
    assert NEVER in message
    assert "communication_interval=500" in message


def test_passes_between_averagings_count_alike(caplog):
    """``num_steps_per_communication`` beyond the end of training, with any method."""
    for algorithm in ("adapt_then_combine", "adapt_with_combine", "win_put"):
        (message,) = told(caplog, algorithm, 3, num_steps_per_communication=4)
        assert f"{algorithm} {NEVER} 3 steps, with num_steps_per_communication=4" in message
    assert not told(caplog, "gradient_allreduce", 3, num_steps_per_communication=4)


def test_a_part_of_the_model_is_not_all(caplog):
    """Of two fragments one was averaged; after the second there is nothing to tell."""
    options = {"communication_interval": 2, "fragments": 2, "delay": 0, "outer_momentum": 0.5}
    (message,) = told(caplog, "streaming_diloco", 3, **options)
    assert f"{NEVER} 3 steps, with communication_interval=2, fragments=2" in message
    assert not told(caplog, "streaming_diloco", 4, **options)


STRONG = {
    "diloco": ("outer_momentum", {}),
    "streaming_diloco": ("outer_momentum", {"fragments": 1, "delay": 0}),
    "noloco": ("outer_momentum", {"topology": topology.complete(2)}),
    "gasloc": ("outer_momentum", {"topology": topology.complete(2)}),
    "muloco": ("outer_momentum", {"outer_momentum": 0.9}),
    "factored_gossip_diloco": ("outer_momentum", {}),
    "slowmo": ("beta", {"beta": 0.9}),
}


@pytest.mark.parametrize("algorithm", STRONG)
def test_strong_momentum_needs_ten_rounds(caplog, algorithm):
    """Fewer with momentum of 0.9 are told with both options; not ten, and not with 0.5."""
    option, options = STRONG[algorithm]
    options = {"communication_interval": 2, **options}
    (message,) = told(caplog, algorithm, 19, **options)
    assert f"{algorithm} has averaged 9 {FEW} 19 steps, with communication_interval=2" in message
    assert f"{option}=0.9" in message
    assert f"{option}=0.5" in message
    assert not told(caplog, algorithm, 20, **options)
    assert not told(caplog, algorithm, 19, **{**options, option: 0.5})


def test_where_there_is_nothing_to_tell(caplog):
    """One rank, a communication of nobody, no step at all, an average; a warm-up has averaged."""
    rarely = {"communication_interval": 500}
    assert not told(caplog, "diloco", 3, ranks=1, **rarely)
    assert not told(caplog, "local_sgd", 3, communication="empty", **rarely)
    assert not told(caplog, "local_sgd", 0, **rarely)
    assert not told(caplog, "local_sgd", 2, communication_interval=2)
    assert not told(caplog, "post_local_sgd", 3, warmup_steps=4, **rarely)
    (message,) = told(caplog, "post_local_sgd", 5, warmup_steps=2, **rarely)
    assert f"{NEVER} 3 steps" in message


def by_module():
    sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.01)  # noqa: E731
    ddp = bf.DecentralizedDataParallel(torch.nn.Linear(2, 1), sgd, algorithm="diloco")
    ddp(torch.ones(1, 2)).sum().backward()
    ddp.conclude()


def test_a_module_wrapper_tells_it_too(caplog):
    """Its ``conclude`` is its optimizer's."""
    with caplog.at_level(logging.WARNING, "asyncddp"):
        LoopbackWorld(2).run(by_module)
    (message,) = caplog.messages
    assert f"diloco {NEVER} 1 steps" in message


SCRIPT = """
import torch
import asyncddp as bf

def train():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = bf.DistributedOptimizer(optimizer, model, "diloco")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

bf.init()
train()  # the optimizer is gone when the script ends
"""


@pytest.mark.launches
def test_a_script_that_ends_is_told(tmp_path):
    """Once, though two ranks ran it."""
    done = run_on_mpirun(2, SCRIPT, tmp_path)
    assert done.code == 0, done.stderr
    assert (done.stdout + done.stderr).count(f"diloco {NEVER} 3 steps") == 1
