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
    from xdist.workermanage import WorkerController

__all__ = ["HOSTS", "RANKS", "Groups", "group_of", "place_of"]

HOSTS = "hosts"
"""The group of all tests that make hosts."""

RANKS = tuple(name for name, (wire, _) in WORLDS.items() if wire != "loopback")
"""The groups of tests on ranks that are processes, one of each world."""

_MAKE_HOSTS = ("tests/hosts/", "tests/examples/test_bench_network.py")
_WORLD = re.compile(rf"[\[-]({'|'.join(RANKS)})(?=[]-])")
_LONG = (*RANKS[::-1], HOSTS, "tests/docs/", "tests/examples/", "tests/mpi/", "tests/notebook/")
"""How groups begin that take longer than others, the longest first."""


def group_of(nodeid: str) -> str:
    """The group of a test: the hosts', its world's, or its file's.

    Example:
        >>> group_of("tests/mpi/test_soak.py::test_random_verbs[ring-mpi-4]")
        'mpi-4'
        >>> group_of("tests/unit/test_config.py::test_defaults[mpi-4000]")
        'tests/unit/test_config.py'
    """
    file, _, test = nodeid.partition("::")
    if file.startswith(_MAKE_HOSTS):
        return HOSTS
    world = _WORLD.search(test)
    return world[1] if world else file


def place_of(group: str) -> int:
    """Where a group stands in the order in which groups begin."""
    return next((place for place, head in enumerate(_LONG) if group.startswith(head)), len(_LONG))


class Groups(LoadScopeScheduling):
    """Gives each worker one group after the other.

    Args:
        config: The configuration of the process that hands the tests out.
        log: As pytest-xdist gives it.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        crowds = sum(
            group in RANKS and not all(tests.values())
            for other, groups in self.assigned_work.items()
            for group, tests in groups.items()
            if other is not node
        )
        room = crowds < max(1, (os.cpu_count() or 1) // 4)
        waiting = sorted(self.workqueue, key=place_of)
        chosen = next((group for group in waiting if (group in RANKS) is room), waiting[0])
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)
