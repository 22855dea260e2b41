"""``send`` and ``recv``: one tensor from one rank to another, matched by name and order."""

from __future__ import annotations

import re
import time

import pytest
import torch

import asyncddp as bf
from asyncddp.tensors.dtypes import DTYPES
from tests.support import BEFORE_DEADLINE, FileEvent, on, until
from tests.support.loops import each, on_each_rank
from tests.support.oracle import LAYOUTS, SHAPES, held

SEVERAL = on("loopback-2", "loopback-4", "shared_memory-2", "mpi-2")
PAIR = on("loopback-2", "mpi-2")


def round_trip(dtype):
    """Around a ring, where each rank sends behind what it has received; of one rank, nothing."""
    if bf.size() == 1:
        return
    rank, n = bf.rank(), bf.size()
    after, before = (rank + 1) % n, (rank - 1) % n
    for seed, shape in enumerate(SHAPES):
        x = held(rank, shape, dtype, seed)
        handle = bf.send_nonblocking(x, after)
        into = torch.ones(shape, dtype=dtype)
        assert bf.recv(into, before) is into
        assert handle.wait() is None
        assert torch.equal(into, held(before, shape, dtype, seed))
        unknown = bf.recv_nonblocking(None, before, name="of any form")
        bf.send(x, after, name="of any form")
        got = unknown.wait()
        assert (got.dtype, got.shape) == (dtype, torch.Size(shape))
        assert torch.equal(got, held(before, shape, dtype, seed))


@each("dtype", list(DTYPES))
def test_every_dtype_and_shape_arrives(world, dtype):
    """In a tensor of the receiver's, or in a new one of what was sent."""
    world.run(round_trip, dtype)


def in_order():
    if bf.rank() > 1:
        return None
    if bf.rank() == 0:
        handles = [bf.send_nonblocking(torch.tensor([k]), 1) for k in range(10)]
        bf.send(torch.tensor([100]), 1, name="other")
        return [handle.wait() for handle in handles]
    other = bf.recv(None, 0, name="other").item()
    handles = [bf.recv_nonblocking(torch.empty(1, dtype=torch.int64), 0) for _ in range(10)]
    return [handle.wait().item() for handle in reversed(handles)], other


@SEVERAL
def test_tensors_of_one_name_arrive_in_the_order_in_which_they_were_sent(world):
    """Beside those of another name, whichever is waited for first."""
    assert world.run(in_order)[1] == (list(reversed(range(10))), 100)


@SEVERAL
@on_each_rank
def test_two_ranks_send_to_each_other():
    """Each direction is matched by itself."""
    if bf.rank() > 1:
        return
    peer = 1 - bf.rank()
    for length in (1, 50_000):
        sent = bf.send_nonblocking(torch.full((length,), float(bf.rank())), peer)
        got = bf.recv(torch.empty(length), peer)
        sent.wait()
        assert (got == peer).all()


@PAIR
@on_each_rank
def test_values_travel_not_memory():
    """Strides, offsets and negative views on either side change no value."""
    for layout in LAYOUTS.values():
        x = held(0, (4, 6), torch.float32)
        if bf.rank() == 0:
            bf.send(layout(x), 1)
        else:
            into = layout(torch.zeros(4, 6))
            if into.is_neg():
                into = torch.zeros(4, 6)
            assert bf.recv(into, 0) is into
            assert torch.equal(into.detach(), x)


def in_groups():
    first, second = bf.new_group([0, 1]), bf.new_group([0, 1])
    if bf.rank() == 0:
        groups = {1: None, 2: first, 3: second}
        handles = [
            bf.send_nonblocking(torch.tensor([number]), 1, group=group)
            for number, group in groups.items()
        ]
        return [handle.wait() for handle in handles]
    return [bf.recv(None, 0, group=group).item() for group in (second, first, None)]


@PAIR
def test_messages_of_a_group_match_within_it(world):
    """In any order with those of another group of the same ranks, and of none."""
    assert world.run(in_groups)[1] == [3, 2, 1]


@PAIR
@on_each_rank
def test_the_tensor_may_be_changed_once_it_is_sent():
    """Writing into it after send changes nothing that arrives."""
    big = torch.full((50_000,), 1.0)
    if bf.rank() == 0:
        for _ in range(3):
            bf.send(big, 1)
            big.fill_(float("nan"))
            big = torch.full((50_000,), 1.0)
    else:
        for _ in range(3):
            assert (bf.recv(torch.empty(50_000), 0) == 1.0).all()


def after_the_receiver(folder):
    received = FileEvent(folder / "received")
    if bf.rank() == 0:
        bf.send(torch.ones(1), 1, check=True)
        return received.is_set()
    time.sleep(0.2)
    received.set()
    bf.recv(torch.empty(1), 0)
    return None


@PAIR
def test_a_checked_send_returns_after_the_receiver_has_come(world, tmp_path):
    """With check=True it is confirmed."""
    assert world.run(after_the_receiver, tmp_path)[0]


# mistakes


def told_by(call, kind=bf.ArgumentError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@PAIR
@on_each_rank
def test_wrong_arguments_are_refused_in_a_sentence():
    """On the rank that gives them, before anything is sent."""
    n, rank = bf.size(), bf.rank()
    for verb, argument in ((bf.send, "dst_rank"), (bf.recv, "src_rank")):
        assert told_by(lambda verb=verb: verb(torch.ones(1), n)) == (
            f"{verb.__name__}: argument {argument}: expected a rank in 0..{n - 1} other than "
            f"{rank}, this rank itself, got {n}"
        )
        assert f"other than {rank}, this rank itself" in told_by(
            lambda verb=verb: verb(torch.ones(1), rank)
        )
        assert "argument tensor: expected a torch.Tensor, got list" in told_by(
            lambda verb=verb: verb([1.0], 1 - rank)
        )
    assert "got NoneType" in told_by(lambda: bf.send(None, 1 - rank))


FORMS = {
    "shape": (lambda: torch.ones(2), lambda: torch.ones(3), "expected shape (3,), got (2,)"),
    "dimensions": (
        lambda: torch.ones(2),
        lambda: torch.ones(2, 1),
        "expected shape (2, 1), got (2,",
    ),
    "dtype": (
        lambda: torch.ones(2),
        lambda: torch.ones(2, dtype=torch.int64),
        "expected dtype int64, got float32",
    ),
}


def differing(kind):
    sent, into, _ = FORMS[kind]
    if bf.rank() > 1:
        return None
    started = time.monotonic()
    if bf.rank() == 0:
        told = told_by(lambda: bf.send(sent(), 1, name="w"), bf.MismatchError)
    else:
        told = told_by(lambda: bf.recv(into(), 0, name="w"), bf.MismatchError)
    assert time.monotonic() - started < BEFORE_DEADLINE
    after = bf.send(torch.ones(1), 1) if bf.rank() == 0 else bf.recv(torch.zeros(1), 0).item()
    return told, after


@pytest.mark.parametrize("kind", FORMS)
@SEVERAL
def test_what_does_not_fit_is_told_to_both(world, kind):
    """Expected and got, with both ranks; the next message arrives."""
    (sender, _), (receiver, after), *_ = world.run(differing, kind)
    expected = FORMS[kind][2]
    assert receiver.startswith("rank 1, send 'w.0-1' (use 0), peer rank 0: " + expected), receiver
    assert sender.startswith("rank 0, send 'w.0-1' (use 0), refused by rank 1: "), sender
    assert expected in sender
    assert after == 1.0


def both_send_first():
    peer = 1 - bf.rank()

    def exchange():
        bf.send(torch.ones(50_000), peer)
        bf.recv(torch.ones(50_000), peer)

    return told_by(exchange, bf.DeadlockError)


@PAIR
def test_two_ranks_that_both_send_first_are_told(world):
    """As the first use of a name waits for its receiver, which never comes."""
    for rank, message in enumerate(world.run(both_send_first)):
        assert message.startswith(f"rank {rank}: send 'send.{rank}-{1 - rank}' (use 0) can never")


def sender_has_left():
    if bf.rank() == 0:
        return None
    return told_by(lambda: bf.recv(torch.ones(1), 0), bf.PeerLeftError)


@PAIR
def test_a_sender_that_has_left_is_told_of(world):
    """The receiver raises PeerLeftError."""
    message = world.run(sender_has_left)[1]
    assert re.match(r"rank 1: recv 'send\.0-1' \(use 0\): rank 0 has left \(", message), message


# later messages of a name, whose form the receiver has acknowledged


def acquainted(make, name="w"):
    """Send one tensor of a form under a name from rank 0 to rank 1, which expects it."""
    if bf.rank() == 0:
        bf.send(make(), 1, name=name)
    elif bf.rank() == 1:
        bf.recv(torch.zeros_like(make()), 0, name=name)


def goes_on():
    bf.recv(torch.ones(1), 1, name="told")
    bf.send(torch.ones(1), 1, name="after it was told")


@SEVERAL
@on_each_rank
@each("kind", FORMS)
def test_what_no_longer_fits_is_told_to_both(kind):
    """The receiver raises at once, and the sender, who has gone on, in a later call."""
    sent, into, expected = FORMS[kind]
    acquainted(sent)
    if bf.rank() == 0:
        bf.send(sent(), 1, name="w")
        assert expected in told_by(goes_on, bf.MismatchError)
    elif bf.rank() == 1:
        assert expected in told_by(lambda: bf.recv(into(), 0, name="w"), bf.MismatchError)
        bf.send(torch.ones(1), 0, name="told")
    bf.barrier()
    assert bf.allreduce(torch.ones(1), name=f"after {kind}").item() == 1.0


@SEVERAL
@on_each_rank
@each("layout", list(LAYOUTS))
def test_tensors_of_every_layout_arrive_again(layout):
    """Values are sent and received whatever their layout, later as at first."""
    make, into = LAYOUTS[layout], LAYOUTS[layout](torch.zeros(2, 3))
    for step in range(4):
        x = torch.arange(6.0).view(2, 3) + step
        if bf.rank() == 0:
            bf.send(make(x), 1)
        elif bf.rank() == 1:
            assert torch.equal(bf.recv(into, 0), make(x)), step
    bf.barrier()


@SEVERAL
@on_each_rank
def test_many_are_sent_before_any_is_waited_for():
    """In any order of the receiver's, with some that it only polls, and some of any form."""
    if bf.rank() == 0:
        for number in range(150):
            bf.send(torch.tensor([number]), 1)
    elif bf.rank() == 1:
        given = [None if k % 3 == 0 else torch.empty(1, dtype=torch.int64) for k in range(150)]
        handles = [bf.recv_nonblocking(tensor, 0) for tensor in given]
        until(handles[-1].poll, "the last message")
        assert [handle.wait().item() for handle in reversed(handles)] == list(range(149, -1, -1))
        assert "done" in repr(handles[7])
    bf.barrier()


def sends_to_a_busy_rank(folder):
    """Rank 1 expects messages, and calls nothing more until rank 0 has sent them all."""
    sent = FileEvent(folder / "sent")
    acquainted(lambda: torch.ones(1))
    if bf.rank() == 0:
        for _ in range(130):  # of which two are acknowledged
            bf.send(torch.ones(1), 1, name="w")
        sent.set()
    else:
        handles = [bf.recv_nonblocking(torch.zeros(1), 0, name="w") for _ in range(130)]
        sent.wait()
        assert [handle.wait().item() for handle in handles] == [1.0] * 130


@PAIR
def test_a_receiver_that_computes_holds_up_no_sender(world, tmp_path):
    """Its progress thread acknowledges what the sender has to know."""
    world.run(sends_to_a_busy_rank, tmp_path)


@PAIR
@on_each_rank
def test_a_short_wait_ends_and_the_message_arrives_all_the_same():
    """wait(timeout) raises WaitTimeoutError; a later wait returns the tensor."""
    acquainted(lambda: torch.ones(1))
    if bf.rank() == 1:
        handle = bf.recv_nonblocking(torch.zeros(1), 0, name="w")
        assert not handle.poll()
        assert "under way" in repr(handle)
        told_by(lambda: handle.wait(0.05), bf.WaitTimeoutError)
        bf.send(torch.ones(1), 0, name="go")
        assert handle.wait().item() == 1.0
    else:
        bf.recv(torch.ones(1), 1, name="go")
        bf.send(torch.ones(1), 1, name="w")
    bf.barrier()


@PAIR
@on_each_rank
def test_tensors_made_in_inference_mode_arrive_in_it():
    """They are written in that mode alone, also by another thread."""
    with torch.inference_mode():
        for _ in range(3):
            if bf.rank() == 0:
                bf.send(torch.ones(2), 1, name="w")
            else:
                assert bf.recv(torch.zeros(2), 0, name="w").tolist() == [1.0, 1.0]
    bf.barrier()


def sender_leaves_later():
    acquainted(lambda: torch.ones(1))
    if bf.rank() == 0:
        return None
    return told_by(lambda: bf.recv(torch.ones(1), 0, name="w"), bf.PeerLeftError)


@PAIR
def test_a_sender_that_has_left_after_some_messages_is_told_of(world):
    """The receiver raises PeerLeftError."""
    message = world.run(sender_leaves_later)[1]
    assert re.match(r"rank 1: recv 'w\.0-1' \(use 1\): rank 0 has left \(", message), message
