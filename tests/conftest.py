"""Fixtures of all tests: the worlds that cases run in, and what a test must not leave behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from asyncddp.testing.process_pool import ProcessPool
from tests.support.distribution import Groups, group_of
from tests.support.leaks import Traces
from tests.support.marks import WHOLE_PROGRAMS, parameters
from tests.support.processes import warm_server
from tests.support.warm_ranks import freeze
from tests.support.worlds import EVERYWHERE, World, open_transport

# A shared machine is slow now and then, which is no fault of the code under test.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of an operation that wait for each other spin, and workers and ranks share the processors:
# ranks under a launcher have one thread, too.
torch.set_num_threads(1)

# A killed mpirun leaves files that keep a later one, with the same process id, from starting.
_SESSIONS = tempfile.TemporaryDirectory(prefix="mpirun-", ignore_cleanup_errors=True)
os.environ["PRTE_MCA_prte_tmpdir_base"] = _SESSIONS.name  # noqa: SIM112 - its name

# The ranks of pools are forked of a process that has imported torch, in place of a Python each.
ProcessPool.python = staticmethod(lambda: warm_server().command())


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--seed``, with which a soak that failed is run again."""
    parser.addoption("--seed", type=int, help="the seed of the soaks, instead of a random one")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector leave out torch and the collected tests.

    They stay until the end, and looking at all of them takes a quarter of a second of a processor
    in every fourth test, and while they are collected more than a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave whole programs to ``scripts/test all``."""
    if item.nodeid.startswith(WHOLE_PROGRAMS):
        item.add_marker(pytest.mark.exhaustive)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let all tests on a world of processes follow the first of them, so that it starts once.

    Pytest's own order of a parameter's values is by their places in each test's list of rows.
    """
    places: dict[str, int] = {}
    for item in items:
        places.setdefault(group_of(item.nodeid), len(places))
    items.sort(key=lambda item: places[group_of(item.nodeid)])


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of a soak: that of ``--seed``, else a random one. It is printed."""
    given = request.config.getoption("--seed")
    found = random.SystemRandom().randrange(2**31) if given is None else given
    sys.stdout.write(f"\n{request.node.nodeid}: --seed {found}\n")
    return int(found)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where there are to be several workers (``-n 2``), each takes whole groups of tests."""
    if config.getoption("dist") != "load":
        return None  # another way was asked for
    return Groups(config, log)


@pytest.fixture(scope="session", params=parameters(EVERYWHERE))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks to run cases on: a test that takes it runs on each transport (:mod:`tests.support`)."""
    with open_transport(request.param) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = Traces.now()
    yield
    left = before.left()
    if left:
        pytest.fail(f"the test has left behind: {', '.join(left)}", pytrace=False)
