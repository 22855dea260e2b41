"""The test house: how a test gets its ranks. What users' tests need too is in ``asyncddp.testing``.

A *case* is a function that runs on every rank. A test hands it to a world::

    def averages(shape):  # at the top of the module, so that processes can import it
        x = torch.full(shape, float(bf.rank()))
        torch.testing.assert_close(bf.allreduce(x), torch.full(shape, (bf.size() - 1) / 2))


    def test_allreduce_averages(world):  # on loopback-1, -4, mpi-2, shared_memory-2
        world.run(averages, (3, 2))

``world.run`` gives the list of what the ranks returned, and fails the test with the tracebacks of
all ranks that raised. ``world.outcomes`` gives an :class:`~asyncddp.testing.Outcome` for every
rank instead, for tests of failures. ``world.run_bare`` hands each rank a bare transport. Settings
of the library go with the call: ``world.run(case, settings={"ranks_per_machine": 2})``.

Each call is a fresh world (``init`` … ``shutdown``), with timeouts of :data:`DEFAULT_SETTINGS`.
Under ``mpirun`` the ranks are a pool of processes that stays up over the tests of the session; a
case that hangs or kills a rank fails with the stacks of the ranks, and the next case gets a new
pool.

A test that needs no more than that is one function, with ``@on_each_rank`` above it, and takes many
cases in a loop (:mod:`tests.support.loops`).

Which worlds: the fixture ``world`` runs a test on two numbers of threads and on one world of each
transport between processes, ``@on("loopback-4", "mpi-4")`` on those of :data:`WORLDS` that are
named; of these the default run takes ``DEFAULT_WORLDS``, else the first if it has two ranks, and
``scripts/test all`` every one. For
other numbers of ranks, and functions defined inside a test, there are threads alone:
``LoopbackWorld(3).run(…)``. Whole scripts, to their bitter end, are run by
:func:`~tests.support.processes.run_on_mpirun`, which tells what outlived them and leaves no process
behind.

The machine may be busy with other work. So a rank that is to be late waits for a
:class:`~tests.support.events.FileEvent`, which the others set when they have done what was not to
wait for it; what is to end at once is compared with the deadline that it did not wait for
(:data:`BEFORE_DEADLINE`); what is to end at its deadline may be late by :data:`DELAY`.
"""

from __future__ import annotations

from asyncddp.testing.outcome import Outcome, RanksFailedError
from asyncddp.testing.process_pool import ProcessPoolError
from asyncddp.testing.rank_function_call import DEFAULT_SETTINGS
from tests.support.events import BEFORE_DEADLINE, DELAY, PATIENCE, FileEvent, deadline_of, until
from tests.support.marks import on
from tests.support.processes import RUN_LIMIT, Finished, run_on_mpirun, run_to_end
from tests.support.worlds import OF_SEVERAL, WORLDS, LoopbackWorld, PoolWorld, World, open_transport

__all__ = [
    "BEFORE_DEADLINE",
    "DEFAULT_SETTINGS",
    "DELAY",
    "OF_SEVERAL",
    "PATIENCE",
    "RUN_LIMIT",
    "WORLDS",
    "FileEvent",
    "Finished",
    "LoopbackWorld",
    "Outcome",
    "PoolWorld",
    "ProcessPoolError",
    "RanksFailedError",
    "World",
    "deadline_of",
    "on",
    "open_transport",
    "run_on_mpirun",
    "run_to_end",
    "until",
]
