"""Which tests stay together when several workers of pytest-xdist share the suite, and who is first.

A worker takes a *group* whole, so that the ranks of a world are started once in a run, the files
that make something for all their tests make it once, and what there is once on a machine, the hosts
in network namespaces, has one user. Groups whose ranks are many processes at work at once are kept
from running side by side as long as there is something else to do; long groups are begun first, so
that no worker is left alone with one in the end.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

from tests.support.worlds import WORLDS

if TYPE_CHECKING:
    import pytest
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

__all__ = ["HOSTS", "LIGHTNING", "RANKS", "Groups", "group_of", "handle_of_block"]

HOSTS = "hosts"
"""The group of all tests that make hosts."""

LIGHTNING = "tests/lightning/"
"""The group of the tests on ranks that have Lightning."""

RANKS = tuple(name for name, (transport, _) in WORLDS.items() if transport != "loopback")
"""The groups of tests on ranks that are processes, one of each world."""

_MAKE_HOSTS = (
    "tests/hosts/",
    "tests/examples/test_bench_methods.py",
    "tests/examples/test_bench_network.py",
    "tests/examples/test_bench_one_to_n.py",
)
_WORLD = re.compile(rf"[\[-]({'|'.join(RANKS)})(?=[]-])")
_LONG = (
    *RANKS[::-1],
    HOSTS,
    "tests/slurm/",
    "tests/docs/",
    LIGHTNING,
    "tests/examples/",
    "tests/notebook/",
    "tests/mpi/",
    "tests/launch/",
    "tests/support/",
)
"""How groups begin that take longer than others, the longest first, or wait for the network."""

_AHEAD = 2  # tests that a worker needs to know of: it runs one when it knows the one after it
_PORTION = 4  # tests that a worker is told of at once


def group_of(nodeid: str) -> str:
    """The group of a test: the hosts', Lightning's, its world's, or its file's.

    Example:
        >>> group_of("tests/mpi/test_soak.py::test_random_verbs[ring-mpi-4]")
        'mpi-4'
        >>> group_of("tests/unit/test_config.py::test_defaults[mpi-4000]")
        'tests/unit/test_config.py'
        >>> group_of("tests/lightning/test_fabric.py::test_fabric_trains_as_the_wrapper[mpi-2]")
        'tests/lightning/'
    """
    file, _, test = nodeid.partition("::")
    if file.startswith(_MAKE_HOSTS):
        return HOSTS
    if file.startswith(LIGHTNING):
        return LIGHTNING
    world = _WORLD.search(test)
    return world[1] if world else file


def handle_of_block(group: str) -> int:
    """Where a group stands in the order in which groups begin."""
    return next((place for place, head in enumerate(_LONG) if group.startswith(head)), len(_LONG))


class Groups(LoadScopeScheduling):
    """Gives each worker one group after the other, a few tests at a time.

    A few, so that ``-x`` and Ctrl-C need not wait for the rest of a group.

    Args:
        config: The configuration of the process that hands the tests out.
        log: As pytest-xdist gives it.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._owners: dict[str, WorkerController] = {}

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        """Let a worker know of its next tests, or that none will come; one that collects waits."""
        if node not in self.registered_collections:
            return  # it has come for one that died
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= _AHEAD:
            if self._group_for(node) is None:
                node.shutdown()
            else:
                self._assign_work_unit(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Send a worker the next few tests of its group."""
        group = self._group_for(node)
        assert group is not None
        self._owners[group] = node
        waiting = self.workqueue[group]
        tests = list(waiting)[:_PORTION]
        for test in tests:
            self.assigned_work[node].setdefault(group, {})[test] = waiting.pop(test)
        if not waiting:
            del self.workqueue[group]
        known = self.registered_collections[node]
        node.send_runtest_some([known.index(test) for test in tests])

    def _group_for(self, node: WorkerController) -> str | None:
        """The group that a worker is at, or the one that it had best begin; None: no more."""
        for group in self.workqueue:
            if self._owners.get(group) is node:
                return group
        free = sorted(
            (one for one in self.workqueue if one not in self._owners), key=handle_of_block
        )
        crowds = len(self._at_work_beside(node) & set(RANKS))
        room = crowds < max(1, (os.cpu_count() or 1) // 4)
        fitting = [group for group in free if (group in RANKS) is room]
        return next(iter([*fitting, *free]), None)

    def _at_work_beside(self, node: WorkerController) -> set[str]:
        """The groups that other workers have begun and not ended."""
        return {
            group
            for other, groups in self.assigned_work.items()
            for group, tests in groups.items()
            if other is not node and (group in self.workqueue or not all(tests.values()))
        }

    def remove_node(self, node: WorkerController) -> str | None:
        """Take back the tests of a worker that has ended; gives the one that ended it, if any."""
        left = self.assigned_work.pop(node)
        self._owners = {group: owner for group, owner in self._owners.items() if owner is not node}
        undone = [test for tests in left.values() for test, done in tests.items() if not done]
        for test in undone[1:]:
            self.workqueue.setdefault(group_of(test), {})[test] = False
        for other in self.assigned_work:
            self._reschedule(other)
        return undone[0] if undone else None
