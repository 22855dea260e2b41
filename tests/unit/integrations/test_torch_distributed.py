"""Parts of the torch.distributed backend that need one process: queue, works, reductions, names."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from asyncddp.errors import ArgumentError, WaitTimeoutError
from asyncddp.integrations.torch_distributed.arguments import as_lists, verb_options
from asyncddp.integrations.torch_distributed.collective_verbs import check_rows
from asyncddp.integrations.torch_distributed.monitored_barrier import monitored_barrier
from asyncddp.integrations.torch_distributed.output_buffers import OutputBuffer
from asyncddp.integrations.torch_distributed.reductions import reduction_for
from asyncddp.integrations.torch_distributed.store_meeting import WaitAnnouncements, meet_in_store
from asyncddp.integrations.torch_distributed.work_queue import QueuedWork, WorkQueue


@pytest.fixture
def queue():
    made = WorkQueue("a group")
    yield made
    made.close()


def submit(queue, program, *, blocking=False, outputs=()):
    work = QueuedWork("verb", list(outputs))
    queue.submit(work, program, blocking=blocking)
    return work


def test_works_run_in_the_order_of_their_submission_on_another_thread(queue):
    """Also one that is blocking, where others wait before it."""
    gate, order = threading.Event(), []
    first = submit(queue, gate.wait)
    rest = [submit(queue, lambda n=n: order.append(n)) for n in range(20)]
    blocking = submit(queue, lambda: order.append("blocking"), blocking=True)
    assert not first.is_completed()
    gate.set()
    assert blocking.wait()
    assert order == [*range(20), "blocking"]
    assert all(work.is_success() for work in rest)


def test_a_blocking_work_runs_on_the_callers_thread_if_nothing_is_under_way(queue):
    """No other thread is woken for it."""
    threads = []
    work = submit(queue, lambda: threads.append(threading.current_thread()), blocking=True)
    assert work.is_completed()
    assert threads == [threading.current_thread()]


def test_a_work_that_a_callback_submits_runs_at_once(queue):
    """Else it would wait behind works that wait for the same thread."""
    gate, order = threading.Event(), []
    first = submit(queue, gate.wait)
    first.get_future().then(lambda _: submit(queue, lambda: order.append("nested")).wait())
    last = submit(queue, lambda: order.append("last"))
    gate.set()
    last.wait()
    assert order == ["nested", "last"]


def test_the_error_of_a_work_is_raised_by_wait_and_value_but_not_set_in_the_future(queue):
    """Torch's reducer crashes on futures that have exceptions."""

    def fails():
        raise ValueError("no")

    x = torch.ones(1)
    work = submit(queue, fails, outputs=[x])
    with pytest.raises(ValueError, match="no"):
        work.wait()
    future = work.get_future()
    assert future.done()
    with pytest.raises(ValueError, match="no"):
        future.value()
    assert torch.futures.Future.value(future)[0] is x
    assert isinstance(work.exception(), ValueError)
    assert not work.is_success()


def test_wait_with_a_timeout_names_the_verb(queue):
    """The work goes on, and may be waited for again."""
    gate = threading.Event()
    work = submit(queue, gate.wait)
    with pytest.raises(WaitTimeoutError, match=r"wait: verb was not done in 0\.05 s"):
        work.wait(timedelta(seconds=0.05))
    gate.set()
    assert work.wait()


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
    total = reduction.of([reduction.prepare(tensor) for tensor in tensors]).to(dtype)
    assert total.item() == expected


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


def test_strided_tensors_pass_through_contiguous_memory():
    """Contiguous ones are used in place."""
    x = torch.arange(6.0).view(2, 3).t()
    buffer = OutputBuffer(x, read=True)
    assert buffer.data.is_contiguous()
    buffer.data.add_(1)
    buffer.store()
    assert torch.equal(x, torch.arange(1.0, 7.0).view(2, 3).t())
    plain = torch.zeros(3)
    assert OutputBuffer(plain).data.data_ptr() == plain.data_ptr()


def test_a_meeting_in_the_store_names_who_does_not_come():
    """By their numbers in the world."""
    store = dist.HashStore()
    with pytest.raises(WaitTimeoutError, match=r"rank 4: a thing was not .* missing: ranks 6, 8"):
        meet_in_store(store, "a thing", [4, 6, 8], 0, 0.05)


def test_announcements_tell_missing_ranks_from_those_in_another_verb():
    """Missing ranks go first."""
    store = dist.HashStore()
    first, second, third = (WaitAnnouncements(store, [0, 1, 2], place) for place in range(3))
    first.announce(3, "allreduce")
    second.announce(3, "broadcast")
    assert first.explain(3, "allreduce") == "missing: rank 2"
    third.announce(3, "allreduce")
    assert first.explain(3, "allreduce") == "rank 1 is in broadcast"


def test_monitored_barrier_refuses_groups_of_other_backends():
    """The message names the backend that the group has."""

    class Other:
        def name(self) -> str:
            return "gloo"

    with pytest.raises(ArgumentError, match="backend asyncddp, got one of gloo"):
        monitored_barrier(Other())
