"""The contract of :mod:`asyncddp.transport.base`, on every transport of the registry."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from asyncddp.errors import PeerError, WaitTimeoutError
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.transport import TRANSPORTS
from tests.support import DELAY, OF_SEVERAL, WORLDS, FileEvent, on
from tests.support.pairwise import by_transport

SECONDS = 60.0
EVERY = on(*WORLDS, always=True)
SEVERAL = on(*(name for name, (_, size) in WORLDS.items() if size > 1), always=True)
TRANSPORT_DTYPES = [row.dtype for row in DTYPES.values() if row.dtype == row.accumulate]
"""The dtypes in which sums are formed; halves and short integers are summed in wider ones."""


def others(transport):
    return [peer for peer in range(transport.size) if peer != transport.rank]


def noise(length, seed, dtype=torch.float32):
    """The same numbers on all ranks that ask with the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, generator=generator, dtype=dtype)
    if dtype == torch.bool:
        return torch.rand(length, generator=generator) < 0.3
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (length,), generator=generator, dtype=dtype)


def finish_all(transport, transfers):
    for transfer in transfers:
        transport.finish(transfer, SECONDS, "transfer")


_pieces = threading.Lock(), {}  # by module: ranks that cut smaller pieces, and its own size


@contextmanager
def pieces_of(transport, size):
    """Where a transport cuts bulk transfers, cut them at ``size`` bytes; ranks may be threads."""
    modules = {sys.modules[kind.__module__] for kind in type(transport).__mro__}
    modules = [module for module in modules if hasattr(module, "_PIECE")]
    lock, used = _pieces
    with lock:
        for module in modules:
            users, before = used.get(module, (0, module._PIECE))
            used[module], module._PIECE = (users + 1, before), size
    try:
        yield
    finally:
        with lock:
            for module in modules:
                users, before = used.pop(module)
                if users == 1:
                    module._PIECE = before
                else:
                    used[module] = users - 1, before


def test_every_transport_of_the_registry_is_tested():
    """A new transport is picked up without a change here."""
    assert {transport for transport, _ in WORLDS.values()} == set(TRANSPORTS)


# messages


def messages_in_order(transport):
    sizes = [0, 1, 100, 5_000, 70_000]
    sent = [bytes([k % 251]) * sizes[k % len(sizes)] for k in range(100)]
    for message in sent:
        for peer in others(transport):
            transport.post(peer, message)
    came = {peer: [] for peer in others(transport)}
    deadline = time.monotonic() + SECONDS
    while any(len(messages) < len(sent) for messages in came.values()):
        assert time.monotonic() < deadline, {peer: len(found) for peer, found in came.items()}
        for peer, message in transport.poll():
            came[peer].append(message)
    transport.barrier(SECONDS)
    assert list(transport.poll()) == []
    return all(found == sent for found in came.values())


@EVERY
def test_messages_arrive_whole_once_and_in_the_order_of_their_sender(world):
    """Messages of 0 to 70,000 bytes are never lost, cut, repeated or reordered."""
    assert world.run_bare(messages_in_order) == [True] * world.size


def post_without_reader(transport):
    started = time.monotonic()
    for peer in others(transport):
        transport.post(peer, bytes(3_000_000))
    seconds = time.monotonic() - started
    transport.barrier(SECONDS)  # nobody has polled yet, and all have posted
    came = []
    while len(came) < transport.size - 1:
        came += [(peer, len(message)) for peer, message in transport.poll()]
    transport.barrier(SECONDS)
    return seconds, sorted(came) == [(peer, 3_000_000) for peer in others(transport)]


@EVERY
def test_posting_never_waits_for_the_reader(world):
    """post() of 3 MB returns although no peer polls before all ranks have posted."""
    for seconds, complete in world.run_bare(post_without_reader):
        assert seconds < SECONDS / 2
        assert complete


# bulk bytes


def by_tag_backwards(transport):
    ahead, behind = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    given = [noise(1000 + tag, seed=100 * transport.rank + tag) for tag in range(5)]
    sends = [transport.isend(data, ahead, tag) for tag, data in enumerate(given)]
    taken = {}
    for tag in reversed(range(5)):
        taken[tag] = torch.empty(1000 + tag)
        transport.receive(taken[tag], behind, tag, SECONDS)
    finish_all(transport, sends)
    return all(torch.equal(taken[t], noise(1000 + t, seed=100 * behind + t)) for t in range(5))


@SEVERAL
def test_a_tag_chooses_the_transfer_whatever_the_order(world):
    """A receive gets the transfer of its tag, although others were sent before."""
    assert world.run_bare(by_tag_backwards) == [True] * world.size


def same_tag_in_order(transport):
    ahead, behind = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sends = [transport.isend(torch.tensor([k]), ahead, 7) for k in range(20)]
    came = []
    for _ in range(20):
        out = torch.empty(1, dtype=torch.int64)
        transport.receive(out, behind, 7, SECONDS)
        came.append(int(out))
    finish_all(transport, sends)
    return came


@SEVERAL
def test_transfers_of_one_tag_keep_their_order(world):
    """Transfers from one sender under one tag are received in the order of their sends."""
    assert world.run_bare(same_tag_in_order) == [list(range(20))] * world.size


def around_pieces(transport, sizes):
    ahead, behind = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    with pieces_of(transport, 1000):
        for size in sizes:
            given = noise(size, seed=size + transport.rank, dtype=torch.uint8)
            sending = transport.isend(given, ahead, 3)
            out = torch.full((size + 2,), 255, dtype=torch.uint8)
            transport.receive(out[1:-1], behind, 3, SECONDS)
            transport.finish(sending, SECONDS, "send")
            assert sending.done(), "a transfer that has ended stays ended"
            torch.testing.assert_close(out[1:-1], noise(size, size + behind, torch.uint8))
            assert out[0] == out[-1] == 255, "bytes beyond the buffer were written"


@SEVERAL
def test_bulk_bytes_arrive_exactly_at_all_sizes_around_a_piece(world):
    """Transfers of sizes around a piece change no byte, and write none beyond the buffer."""
    world.run_bare(around_pieces, [0, 1, 999, 1000, 1001, 1999, 2000, 2001, 65_536, 1_000_001])


def collectives_around_pieces(transport, lengths):
    with pieces_of(transport, 1000):
        for length, dtype in [(n, dtype) for n in lengths for dtype in TRANSPORT_DTYPES]:
            parts = [noise(length, seed=rank, dtype=dtype) for rank in range(transport.size)]
            total = parts[transport.rank].clone()
            transport.allreduce(total, SECONDS)
            expected = (
                sum(parts[1:], parts[0]) if dtype != torch.bool else torch.stack(parts).any(0)
            )
            torch.testing.assert_close(total, expected)
            given = parts[transport.rank].clone()
            transport.broadcast(given, transport.size - 1, SECONDS)
            torch.testing.assert_close(given, parts[-1], rtol=0, atol=0)
            whole = [part.repeat(transport.size) for part in parts]
            mine = transport.reduce_scatter(whole[transport.rank], SECONDS)
            torch.testing.assert_close(mine, expected)


@SEVERAL
def test_collectives_are_exact_at_all_sizes_around_a_piece(world):
    """Lengths around multiples of a piece give right sums, broadcasts and parts."""
    world.run_bare(collectives_around_pieces, [0, 1, 124, 125, 126, 251, 1003])


def every_dtype_in_bulk(transport):
    ahead, behind = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for tag, dtype in enumerate(DTYPES):
        sending = transport.isend(noise(33, transport.rank, dtype), ahead, tag)
        out = torch.empty(33, dtype=dtype)
        transport.receive(out, behind, tag, SECONDS)
        transport.finish(sending, SECONDS, "send")
        torch.testing.assert_close(out, noise(33, behind, dtype))


@SEVERAL
def test_bulk_carries_every_dtype(world):
    """isend and receive transfer tensors of every dtype of the table."""
    world.run_bare(every_dtype_in_bulk)


def a_quarter_gigabyte(transport):
    data = torch.arange(1 << 25, dtype=torch.float64) + transport.rank
    out = torch.empty_like(data)
    sending = transport.isend(data, 1 - transport.rank, 0)
    transport.receive(out, 1 - transport.rank, 0, SECONDS)
    transport.finish(sending, SECONDS, "send")
    return data.nbytes, bool(torch.equal(out, data + 1 - 2 * transport.rank))


@on("loopback-2", "mpi-2")
def test_256_megabytes_arrive(world):
    """Two ranks can send each other 256 MiB at the same time, and all of it arrives."""
    assert world.run_bare(a_quarter_gigabyte) == [(1 << 28, True)] * 2


# deadlines


def past_deadline(transport, what, folder):
    """Rank 0 waits for something that does not come; the others stay away."""
    given_up = FileEvent(folder / "given up")
    message = None
    if transport.rank == 0:
        call = {
            "receive": lambda: transport.receive(torch.empty(3), 1, 9, 0.2),
            "barrier": lambda: transport.barrier(0.2),
            "allreduce": lambda: transport.allreduce(torch.ones(2), 0.2),
            "broadcast": lambda: transport.broadcast(torch.ones(2), 1, 0.2),
            "reduce_scatter": lambda: transport.reduce_scatter(torch.ones(transport.size), 0.2),
            "allgather": lambda: transport.allgather(torch.ones(1), [1] * transport.size, 0.2),
        }[what]
        started = time.monotonic()
        with pytest.raises(WaitTimeoutError) as caught:
            call()
        message, seconds = str(caught.value), time.monotonic() - started
        assert 0.2 <= seconds < 0.2 + DELAY
        given_up.set()
    else:
        given_up.wait()
    return message


WAITS = {
    "receive": "receive from rank 1, tag 9,",
    "barrier": "barrier",
    "allreduce": "allreduce",
    "broadcast": "broadcast from rank 1",
    "reduce_scatter": "reduce_scatter",
    "allgather": "allgather",
}


@by_transport(OF_SEVERAL, what=WAITS)
def test_a_wait_past_its_deadline_says_who_waited_for_what(world, tmp_path, what):
    """Blocking calls raise WaitTimeoutError with rank, operation and limit."""
    message, *_ = world.run_bare(past_deadline, what, tmp_path)
    assert message == f"rank 0: {WAITS[what]} was not done in 0.2 s"


def given_up_receive(transport):
    if transport.rank == 0:
        forgotten = torch.zeros(3)
        with pytest.raises(WaitTimeoutError):
            transport.receive(forgotten, 1, 5, 0.1)
        transport.barrier(SECONDS)
        out = torch.zeros(3)
        transport.receive(out, 1, 5, SECONDS)
        return forgotten.tolist(), out.tolist()
    transport.barrier(SECONDS)
    if transport.rank == 1:
        transport.send(torch.ones(3), 0, 5, SECONDS)
    return None


@SEVERAL
def test_a_receive_that_was_given_up_takes_nothing_any_more(world):
    """Its buffer stays as it is, and the next receive of that tag gets what comes."""
    assert world.run_bare(given_up_receive)[0] == ([0.0] * 3, [1.0] * 3)


def given_up_send(transport):
    data = torch.ones(4_000_000)
    if transport.rank == 0:
        with pytest.raises(
            WaitTimeoutError, match=r"send to rank 1, tag 5, was not done in 0\.1 s"
        ):
            transport.send(data, 1, 5, 0.1)
        del data
    transport.barrier(SECONDS)
    ahead, behind = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sending = transport.isend(torch.full((8,), float(transport.rank)), ahead, 6)
    out = torch.empty(8)
    transport.receive(out, behind, 6, SECONDS)
    transport.finish(sending, SECONDS, "send")
    return out[0].item() == behind


@SEVERAL
def test_a_send_that_nobody_takes_meets_its_deadline_and_holds_nothing_up(world):
    """Without a receive, send raises WaitTimeoutError, and other tags' transfers arrive."""
    assert world.run_bare(given_up_send) == [True] * world.size


def after_abandoned_collective(transport, folder):
    """Rank 0 gives a barrier up, the others come too late; then all meet in a sum."""
    given_up = FileEvent(folder / "given up")
    if transport.rank == 0:
        with pytest.raises(WaitTimeoutError):
            transport.barrier(0.1)
        given_up.set()
    else:
        given_up.wait()
    x = torch.full((4,), float(transport.rank))
    try:
        if transport.rank > 0:
            transport.barrier(1.5)
        transport.allreduce(x, 1.5)
    except PeerError as error:
        return str(error)
    return x.tolist()


@SEVERAL
def test_a_collective_that_was_given_up_never_makes_the_next_one_wrong(world, tmp_path):
    """The next one is right where the transport can, else it fails with words on all ranks."""
    right = [world.size * (world.size - 1) / 2] * 4
    first, *rest = world.run_bare(after_abandoned_collective, tmp_path)
    if first == right:
        assert rest == [right] * (world.size - 1)
        return
    assert first == (
        "collectives cannot go on: an earlier collective was given up while some ranks had not "
        "joined it. End and restart the run."
    )
    for rank, told in enumerate(rest, start=1):
        assert re.fullmatch(f"rank {rank}: (barrier|allreduce) was not done in 1.5 s", told)


# collectives


def sums(transport, dtype):
    """Integers wrap as torch's do, bools are joined by or, floats agree bit by bit over ranks."""
    for length in (0, 1, 7, 10_000):
        x = noise(length, transport.rank, dtype)
        transport.allreduce(x, SECONDS)
        parts = [noise(length, rank, dtype) for rank in range(transport.size)]
        if dtype == torch.bool:
            expected = torch.stack(parts).any(dim=0)
        else:
            expected = torch.stack(parts).sum(dim=0, dtype=dtype)
        torch.testing.assert_close(x, expected)
        given = transport.allgather(x, [length] * transport.size, SECONDS)
        assert torch.equal(given, x.repeat(transport.size)), "ranks got different sums"


def scattered_sums(transport, dtype):
    """Each rank gets its part of the sum, below and above what travels through shared memory."""
    for length in (0, 1, 7, 40_000):
        parts = [noise(length * transport.size, rank, dtype) for rank in range(transport.size)]
        given = parts[transport.rank].clone()
        got = transport.reduce_scatter(given, SECONDS)
        assert torch.equal(given, parts[transport.rank]), "what was given has changed"
        if dtype == torch.bool:
            expected = torch.stack(parts).any(dim=0)
        else:
            expected = torch.stack(parts).sum(dim=0, dtype=dtype)
        torch.testing.assert_close(got, expected.view(transport.size, length)[transport.rank])
        if dtype.is_floating_point or dtype.is_complex:
            transport.finish(
                transport.ireduce_scatter(given, got, divisor=transport.size), SECONDS, "average"
            )
            mean = torch.stack(parts).mean(dim=0).view(transport.size, length)[transport.rank]
            torch.testing.assert_close(got, mean)


def means_of_huge(transport, dtype):
    """The mean of equal huge values is that value: a transport divides where nothing overflows."""
    n, value = transport.size, -(2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - 1))
    for length in (4, 6_000, 300_000):
        x = torch.full((n * length,), value, dtype=dtype)
        own, out, part = x.clone(), torch.empty_like(x), torch.empty_like(x[:length])
        for request in (
            transport.iallreduce(x, out, n),
            transport.iallreduce(own, None, n),
            transport.ireduce_scatter(x, part, n),
        ):
            transport.finish(request, SECONDS, "average")
        for mean in (own, out, part):
            assert torch.equal(mean, x[: len(mean)])


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def means_of_integers(transport, dtype):
    """Means of integers are rounded half to even in float64, of narrow ones as of wide ones."""
    n = transport.size
    for length in (4, 6_000, 300_000):
        few = 4 if dtype != torch.int64 else 1 << 14  # bits that float64 has not
        every = [noise(n * length, rank, dtype) // few for rank in range(n)]
        expected = torch.stack(every).double().mean(dim=0).round().to(dtype)
        x = every[transport.rank]
        own, out, part = x.clone(), torch.empty_like(x), torch.empty_like(x[:length])
        for request in (
            transport.iallreduce(x, out, n),
            transport.iallreduce(own, None, n),
            transport.ireduce_scatter(x, part, n),
        ):
            transport.finish(request, SECONDS, "average")
        assert torch.equal(x, every[transport.rank]), "what was given has changed"
        assert torch.equal(own, out)
        assert torch.equal(out, expected)
        assert torch.equal(part, out.view(n, length)[transport.rank])


def broadcasts(transport, dtype):
    """After broadcast each tensor holds the root's values, for lengths of 0, 1 and 1000."""
    for root in range(transport.size):
        for length in (0, 1, 1000):
            x = noise(length, transport.rank + 10, dtype)
            transport.broadcast(x, root, SECONDS)
            assert torch.equal(x, noise(length, root + 10, dtype))


def gathers(transport, dtype):
    """allgather joins parts of any length, also none, in the order of ranks."""
    for counts in ([3] * transport.size, list(range(transport.size)), [0] * transport.size):
        parts = [noise(count, rank, dtype) for rank, count in enumerate(counts)]
        got = transport.allgather(parts[transport.rank], counts, SECONDS)
        assert got.dtype == dtype
        assert torch.equal(got, torch.cat(parts))


COLLECTIVES = {
    sums: TRANSPORT_DTYPES,
    scattered_sums: TRANSPORT_DTYPES,
    means_of_huge: [torch.float32, torch.float64, torch.complex64],
    means_of_integers: INTEGERS,
    broadcasts: list(DTYPES),
    gathers: list(DTYPES),
}
"""The laws of collectives, and the dtypes for which they hold."""


def every_collective(transport):
    failed = []
    for law, dtypes in COLLECTIVES.items():
        for dtype in dtypes:
            try:
                law(transport, dtype)
            except AssertionError as error:
                failed.append(f"{law.__doc__} Not so for {dtype}: {error}")
    assert not failed, "\n".join(failed)


@EVERY
def test_collectives_of_every_dtype(world):
    """The table of collectives holds on every transport; what fails is listed by law and dtype."""
    world.run_bare(every_collective)


def meets(transport):
    time.sleep(0.1 * transport.rank)
    entered = time.monotonic()
    transport.barrier(SECONDS)
    return entered, time.monotonic()


@EVERY
def test_nobody_leaves_a_barrier_before_all_have_entered(world):
    """barrier() returns on no rank before the last rank has called it."""
    entered, left = zip(*world.run_bare(meets), strict=True)
    assert max(entered) <= min(left)


def several_at_once(transport):
    x, y = torch.full((5,), float(transport.rank)), torch.tensor([transport.rank])
    whole = torch.empty(transport.size, dtype=torch.int64)
    under_way = [
        transport.iallreduce(x),
        transport.ibarrier(),
        transport.iallgather(torch.tensor([transport.rank * 2]), whole, [1] * transport.size),
        transport.ibroadcast(y, transport.size - 1),
    ]
    finish_all(transport, reversed(under_way))
    return x.tolist(), whole.tolist(), y.item()


@EVERY
def test_several_collectives_may_be_under_way(world):
    """Four different collectives under way at once may be finished in reverse order."""
    n = world.size
    total = n * (n - 1) / 2
    expected = ([total] * 5, [2 * rank for rank in range(n)], n - 1)
    assert world.run_bare(several_at_once) == [expected] * n


def several_large_at_once(transport):
    """Sums of many pieces, of which the last is waited for first."""
    parts = [torch.arange(1_600_000.0) + rank for rank in range(transport.size)]
    total = torch.stack(parts).sum(dim=0)
    for number in range(3):
        whole = torch.empty(1_600_000)
        part = torch.empty(1_600_000 // transport.size)
        under_way = [
            transport.iallreduce(parts[transport.rank], whole),
            transport.ireduce_scatter(parts[transport.rank], part),
            transport.iallreduce(parts[transport.rank] * number),
        ]
        finish_all(transport, reversed(under_way))
        torch.testing.assert_close(whole, total)
        torch.testing.assert_close(part, total.view(transport.size, -1)[transport.rank])


@EVERY
def test_several_large_sums_may_be_under_way(world):
    """Sums of many pieces under way at once may be finished in reverse order."""
    world.run_bare(several_large_at_once)


# groups


def splits(transport):
    part = transport.split(transport.rank % 2, -transport.rank)
    members = [rank for rank in reversed(range(transport.size)) if rank % 2 == transport.rank % 2]
    assert (part.rank, part.size) == (members.index(transport.rank), len(members))
    x = torch.tensor([transport.rank])
    part.allreduce(x, SECONDS)
    assert int(x) == sum(members)
    for peer in others(part):
        part.post(peer, bytes([transport.rank]))
    came = []
    while len(came) < part.size - 1:
        came += list(part.poll())
    assert sorted(came) == sorted((p, bytes([members[p]])) for p in others(part))
    assert list(transport.poll()) == [], "a part's messages reached the whole"
    part.close()
    transport.barrier(SECONDS)


@EVERY
def test_split_makes_groups_ordered_by_key_with_messages_of_their_own(world):
    """Sums and messages of a group from split() reach its members only."""
    world.run_bare(splits)


def tells_machine(transport):
    number = transport.machine_id()
    part = transport.split(number, transport.rank)
    return number, part.size


@EVERY
def test_ranks_of_this_test_share_one_machine(world):
    """machine_id() is 0 on all ranks, so that a split by it keeps them together."""
    assert world.run_bare(tells_machine) == [(0, world.size)] * world.size


def closes_twice(transport):
    transport.barrier(SECONDS)
    transport.close()
    transport.close()
    return type(transport).name


@EVERY
def test_close_may_be_called_twice(world):
    """A second close() of a transport raises nothing."""
    assert world.run_bare(closes_twice) == [world.transport] * world.size
