"""Tests of decentralised code: pytest tests on several ranks, expected results, assertions.

A test that runs on several ranks::

    import asyncddp as bf
    from asyncddp import topology
    from asyncddp.testing import ranks
    from asyncddp.testing import assert_result, held, oracle


    @ranks(4)  # four threads of pytest's process; transports=("loopback", "mpi"): processes as well
    def test_my_mixing():
        x = held(bf.rank(), (3, 2), torch.float32)
        bf.set_topology(topology.ring(bf.size()))
        expected = oracle(topology.ring(bf.size()), bf.rank(), lambda r: held(r, (3, 2), x.dtype))
        assert_result(my_mixing(x), x, expected)

For several calls in one test, and for failures, there are worlds: ``LoopbackWorld(3).run(case)``
gives what each rank returned and fails with the tracebacks of all ranks that raised;
``.outcomes(case)`` gives an :class:`Outcome` for each rank instead.

It needs psutil and pytest: in a clone, ``pip install '.[testing]'``.
"""

from asyncddp.testing.oracle import (
    assert_alike,
    assert_consensus,
    assert_result,
    held,
    mixed,
    oracle,
    summed,
)
from asyncddp.testing.outcome import Outcome, RanksFailedError
from asyncddp.testing.ranks_decorator import ranks
from asyncddp.testing.worlds import LoopbackWorld, PoolWorld, World
from asyncddp.thread_world import local_world

__all__ = [
    "LoopbackWorld", "Outcome", "PoolWorld", "RanksFailedError", "World", "assert_alike",
    "assert_consensus", "assert_result", "held", "local_world", "mixed", "oracle", "ranks",
    "summed",
]  # fmt: skip
