"""Parts of the torch.distributed backend that need one process: works, reductions, arguments."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import asyncddp as bf
from asyncddp.errors import ArgumentError, MismatchError, PeerError, WaitTimeoutError
from asyncddp.integrations.torch_distributed.arguments import as_lists, check_rows, verb_options
from asyncddp.integrations.torch_distributed.monitored_barrier import monitored_barrier
from asyncddp.integrations.torch_distributed.process_group import AsyncDDPProcessGroup
from asyncddp.integrations.torch_distributed.reductions import reduction_for
from asyncddp.integrations.torch_distributed.store_meeting import meet_in_store
from asyncddp.integrations.torch_distributed.world import TorchWorld


@contextmanager
def group(timeout=20.0):
    """A process group of all ranks of a local world."""
    context = bf.current()
    ranks = TorchWorld(context.transport, context.config).default_group(bf.rank(), bf.size())
    made = AsyncDDPProcessGroup(ranks, dist.HashStore(), timeout, "the group")
    try:
        yield made
    finally:
        made.shutdown()


def on_ranks(case, ranks=2):
    with bf.local_world(ranks) as world:
        return world.run(case)


def blocking():
    given = dist.AllreduceOptions()
    given.asyncOp = False
    return given


def test_works_run_in_the_order_of_their_submission():
    """Also one that is blocking, where others are under way."""

    def case():
        with group() as made:
            x = torch.ones(40_000)
            works = [made.allreduce([x]) for _ in range(5)]
            made.allreduce([x], blocking())
            assert all(work.is_success() for work in works)
            return x[0].item()

    assert on_ranks(case) == [2.0**6] * 2


def test_a_blocking_work_runs_on_the_callers_thread():
    """Nothing is left under way."""

    def case():
        with group() as made:
            work = made.allreduce([torch.ones(3)], blocking())
            assert work.is_completed()
            assert work.handle is None

    on_ranks(case)


def test_a_callback_may_submit_a_verb_and_wait_for_it():
    """On whatever thread it runs, also where others are under way."""

    def case():
        with group() as made:
            x, y = torch.ones(3), torch.ones(3)
            future = made.allreduce([x]).get_future()
            chained = future.then(lambda _: made.allreduce([y]).wait())
            chained.wait()
            return x[0].item(), y[0].item()

    assert on_ranks(case) == [(2.0, 2.0)] * 2


def test_the_error_of_a_work_is_raised_by_wait_and_value_but_not_set_in_the_future():
    """Torch's reducer crashes on futures that have exceptions; the ranks' shapes differ here."""

    def case():
        with group() as made:
            x = torch.ones(3 + bf.rank())
            work = made.allreduce([x])
            future = work.get_future()
            with pytest.raises(MismatchError, match=r"expected shape \(\d,\), got \(\d,\)"):
                work.wait()
            with pytest.raises(MismatchError):
                future.wait()
            with pytest.raises(MismatchError):
                future.value()
            assert torch.futures.Future.wait(future)[0] is x
            assert isinstance(work.exception(), MismatchError)
            assert not work.is_success()
            with pytest.raises(PeerError, match="the group cannot go on after MismatchError"):
                made.barrier()

    on_ranks(case)


def test_wait_with_a_timeout_names_verb_and_rank():
    """The work goes on, and may be waited for again."""

    def case():
        with group() as made:
            x = torch.ones(1)
            if bf.rank() == 0:
                work = made.allreduce([x])
                with pytest.raises(WaitTimeoutError, match=r"allreduce .* in 0\.05 s; .*rank 1"):
                    work.wait(timedelta(seconds=0.05))
            bf.barrier()
            if bf.rank() == 1:
                work = made.allreduce([x])
            assert work.wait()
            return x.item()

    assert on_ranks(case) == [2.0] * 2


def test_a_verb_has_the_timeout_of_its_group():
    """Later verbs, and those under way, are refused."""

    def case():
        with group(timeout=0.3) as made:
            if bf.rank() == 0:
                first, second = made.allreduce([torch.ones(1)]), made.barrier()
                with pytest.raises(WaitTimeoutError, match=r"in 0\.3 s; missing: rank 1"):
                    first.wait()
                with pytest.raises(PeerError, match="cannot go on after WaitTimeoutError"):
                    second.wait()
            bf.barrier()

    on_ranks(case)


@pytest.mark.parametrize(
    ("op", "dtype", "terms", "expected"),
    [
        ("SUM", torch.int8, [100, 100], -56),
        ("AVG", torch.int64, [-3, 0], -2),
        ("AVG", torch.float16, [1.0, 2.0], 1.5),
        ("AVG", torch.float16, [-65504.0, -65504.0], -65504.0),
        ("AVG", torch.float32, [-(2.0**127)] * 4, -(2.0**127)),
        ("SUM", torch.bool, [True, False], True),
        ("PRODUCT", torch.bool, [True, False], False),
        ("MAX", torch.uint8, [3, 250], 250),
        ("BXOR", torch.int32, [5, 3], 6),
        ("SUM", torch.complex64, [1 + 1j, 2j], 1 + 3j),
    ],
)
def test_reductions_follow_torchs_rules(op, dtype, terms, expected):
    """Narrow sums wrap, averages of integers are rounded down, halves are summed in float32."""
    tensors = [torch.tensor([term], dtype=dtype) for term in terms]
    reduction = reduction_for("all_reduce", getattr(dist.ReduceOp, op), tensors[0])
    total = reduction.reduction.of([reduction.prepare(tensor) for tensor in tensors])
    assert reduction.finish(total, len(terms)).to(dtype).item() == expected


def test_premultiplied_sums_scale_each_term_and_leave_it_unchanged():
    """PREMUL_SUM multiplies what is sent, not the caller's tensor."""
    x = torch.tensor([3.0])
    reduction = reduction_for("all_reduce", dist._make_nccl_premul_sum(0.5), x)
    assert reduction.prepare(x).item() == 1.5
    assert x.item() == 3.0


@pytest.mark.parametrize(
    ("op", "dtype"), [("BAND", torch.float32), ("MAX", torch.complex64), ("AVG", torch.bool)]
)
def test_an_operator_without_meaning_for_a_dtype_is_named(op, dtype):
    """The message has verb, operator and dtype."""
    with pytest.raises(ArgumentError, match=rf"reduce: there is no {op} of {str(dtype)[6:]}"):
        reduction_for("reduce", getattr(dist.ReduceOp, op), torch.zeros(1, dtype=dtype))


def test_options_are_read_from_all_forms_of_calls():
    """Torch's option classes, an operator, a root or a timeout."""
    given = dist.AllreduceOptions()
    given.reduceOp, given.asyncOp = dist.ReduceOp.MAX, False
    assert verb_options(given).op == dist.ReduceOp.MAX
    assert verb_options(given).blocking
    assert verb_options(given).timeout is None
    assert verb_options(dist.ReduceOp.MIN).op == dist.ReduceOp.MIN
    assert verb_options(2).root == 2
    assert verb_options(timedelta(seconds=3)).timeout == 3.0
    assert not verb_options().blocking
    x = torch.ones(1)
    assert as_lists([x, x]) == [[x, x]]


def test_split_sizes_that_do_not_add_up_are_refused():
    """So are tensors that the ranks cannot share equally."""
    x = torch.zeros(5, 2)
    check_rows("all_to_all_single", x, [2, 3], 2)
    with pytest.raises(ArgumentError, match=r"\[2, 2\] add up to 4, but the tensor has shape"):
        check_rows("all_to_all_single", x, [2, 2], 2)
    with pytest.raises(ArgumentError, match="that 4 ranks can share equally"):
        check_rows("all_to_all_single", x, [], 4)


def test_a_meeting_in_the_store_names_who_does_not_come():
    """By their numbers in the world."""
    store = dist.HashStore()
    with pytest.raises(WaitTimeoutError, match=r"rank 4: a thing was not .* missing: ranks 6, 8"):
        meet_in_store(store, "a thing", [4, 6, 8], 0, 0.05)


def test_monitored_barrier_refuses_groups_of_other_backends():
    """The message names the backend that the group has."""

    class Other:
        def name(self) -> str:
            return "gloo"

    with pytest.raises(ArgumentError, match="backend asyncddp, got one of gloo"):
        monitored_barrier(Other())
