"""Ranks that do not fit together: every rank concerned raises at once, and says what and who."""

from __future__ import annotations

import re
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import BEFORE_DEADLINE, DELAY, OF_SEVERAL, FileEvent, deadline_of, on, until
from tests.support.loops import on_each_rank
from tests.support.pairwise import pairwise

SEVERAL = on(*OF_SEVERAL)
ODD = 1
"""The rank that differs."""

FORMS = ["blocking", "nonblocking"]
CHECKS = {"plain": False, "checked": True}


def caught(call):
    """The error of a verb that must fail without waiting for its deadline, as (class, message)."""
    started = time.monotonic()
    with pytest.raises(bf.MismatchError) as info:
        call()
    seconds = time.monotonic() - started
    assert seconds < BEFORE_DEADLINE, f"it took {seconds:.2f} s to find out"
    return type(info.value).__name__, str(info.value)


def until_told():
    """Wait until this rank has heard that something which had ended well here was refused."""
    until(
        lambda: bf.current().engine.matcher.channels.late_error is not None,
        "the word of the other side",
    )


def raised_at_the_latest_afterwards(call):
    """Make a call that fails on some rank: one whose part had ended raises in its next verb."""
    call()
    until_told()
    bf.barrier()


def works_on():
    """Neighbour verbs go on after a mismatch that was caught."""
    x = bf.neighbor_allreduce(torch.full((3,), float(bf.rank())), name="afterwards")
    assert x.tolist() == pytest.approx([(bf.size() - 1) / 2] * 3)


# neighbour verbs


def neighbour_mismatch(kind, form):
    bf.set_topology(topology.complete(bf.size()))
    odd = bf.rank() == ODD
    shape, dtype, verb = (2,), torch.float32, "neighbor_allreduce"
    if odd and kind == "shape":
        shape = (3, 1)
    if odd and kind == "dtype":
        dtype = torch.float64
    if odd and kind == "verb":
        verb = "neighbor_allgather"
    x = torch.ones(shape, dtype=dtype)

    def call():
        if form == "blocking":
            return getattr(bf, verb)(x, name="w")
        return getattr(bf, f"{verb}_nonblocking")(x, name="w").wait()

    told = caught(call)
    works_on()
    return told


EXPECTED = {
    "shape": ("shape (2,)", "shape (3, 1)"),
    "dtype": ("dtype float32", "dtype float64"),
    "verb": ("verb neighbor_allreduce", "verb neighbor_allgather"),
}


def differs(expected, got):
    """The two ways in which a mismatch is told, whoever noticed it first."""
    word = expected.split()[0]
    first, second = re.escape(expected), re.escape(got.removeprefix(f"{word} "))
    back, forth = re.escape(got), re.escape(expected.removeprefix(f"{word} "))
    return rf"(expected {first}, got {second}|expected {back}, got {forth})"


@pairwise(kind=EXPECTED.keys(), check=CHECKS, form=FORMS, world=OF_SEVERAL)
def test_a_neighbour_with_another(world, kind, check, form):
    """Shape, dtype or verb: all ranks name the name, two ranks, expected and got, and go on."""
    expected = differs(*EXPECTED[kind])
    told = world.run(neighbour_mismatch, kind, form, settings={"check": check})
    for rank, (error, message) in enumerate(told):
        verb = r"neighbor_all\w+"
        assert error == "MismatchError"
        assert re.fullmatch(
            rf"rank {rank}, {verb} 'w' \(use 0\), "
            rf"(peer rank \d: {expected}|refused by rank \d: rank \d {expected} from rank \d)",
            message,
        ), message
        assert f"rank {ODD}" in message, message


def name_mismatch(form):
    bf.set_topology(topology.complete(bf.size()))
    name = "mine" if bf.rank() == ODD else "w"
    verb = bf.neighbor_allreduce
    if form == "nonblocking":
        return caught(lambda: bf.neighbor_allreduce_nonblocking(torch.ones(2), name=name).wait())
    return caught(lambda: verb(torch.ones(2), name=name))


@SEVERAL
@pytest.mark.parametrize("form", FORMS)
def test_a_neighbour_with_another_name(world, form):
    """Both names are told, and who is in which."""
    told = world.run(name_mismatch, form)
    for rank, (_, message) in enumerate(told):
        name = "mine" if rank == ODD else "w"
        assert message.startswith(f"rank {rank}"), message
        assert f"neighbor_allreduce {name!r} (use 0)" in message, message
        assert f"rank {ODD} is in neighbor_allreduce and expects 'mine' (use 0) of" in message
        assert re.search(r"rank [023] is in neighbor_allreduce and expects 'w' \(use 0\)", message)
        assert "Call the same verbs with the same names and neighbours" in message
    assert told[ODD][0] == "DeadlockError"


def seconds_to_find_out(kind):
    odd = bf.rank() == ODD
    x = torch.ones(2 + (kind == "shape" and odd))
    x = x.double() if kind == "dtype" and odd else x
    started = time.monotonic()
    with pytest.raises(bf.MismatchError):
        bf.neighbor_allreduce(x, name="odd" if kind == "name" and odd else "w")
    return time.monotonic() - started


@on("loopback-2", "mpi-2")
@pytest.mark.parametrize("kind", ["shape", "dtype", "name"])
def test_both_sides_find_out_within_a_second(world, kind):
    """In one of many attempts; what else this machine does shall not count."""
    attempts = (max(world.run(seconds_to_find_out, kind)) for _ in range(30))
    assert any(seconds < 1.0 for seconds in attempts)


# collectives


def collective_mismatch(kind, form):
    odd = bf.rank() == ODD
    suffix = "_nonblocking" if form == "nonblocking" else ""
    calls = {
        "shape": lambda: getattr(bf, f"allreduce{suffix}")(torch.ones(3 if odd else 2)),
        "dtype": lambda: getattr(bf, f"allreduce{suffix}")(
            torch.ones(2, dtype=torch.float64 if odd else torch.float32)
        ),
        "verb": lambda: getattr(bf, ("barrier" if odd else "allreduce") + suffix)(
            *(() if odd else (torch.ones(2),))
        ),
        "operation": lambda: getattr(bf, f"allreduce{suffix}")(torch.ones(2), average=not odd),
        "root": lambda: getattr(bf, f"broadcast{suffix}")(torch.ones(2), 1 if odd else 0),
        "name": lambda: getattr(bf, f"allreduce{suffix}")(
            torch.ones(2), name="mine" if odd else "w"
        ),
        "trailing dimensions": lambda: getattr(bf, f"allgather{suffix}")(
            torch.ones(2, 3 if odd else 2)
        ),
        "parts": lambda: getattr(bf, f"reduce_scatter{suffix}")(torch.ones(8 if odd else 4)),
    }

    def call():
        result = calls[kind]()
        return result.wait() if form == "nonblocking" else result

    if bf.rank() in (ODD - 1, ODD, ODD + 1):
        return caught(call)
    return not_concerned(call)


def not_concerned(call):
    """No neighbour in the ring in which forms are compared: a result, if any, must be right."""
    try:
        return ("right" if call().tolist() in ([1.0], [1.0, 1.0], [4.0, 4.0]) else "wrong"), ""
    except bf.PeerError as error:
        return type(error).__name__, str(error)
    finally:
        time.sleep(0.2)  # what its neighbours still have to tell is tested elsewhere
        bf.current().engine.matcher.channels.late_error = None


COLLECTIVES = {
    "shape": ("shape (2,)", "shape (3,)"),
    "dtype": ("dtype float32", "dtype float64"),
    "verb": ("verb allreduce(average)", "verb barrier"),
    "operation": ("verb allreduce(average)", "verb allreduce(sum)"),
    "root": ("verb broadcast(root_rank=0)", "verb broadcast(root_rank=1)"),
    "name": ("verb allreduce(average) 'w'", "verb allreduce(average) 'mine'"),
    "trailing dimensions": ("shape (any, 2)", "shape (any, 3)"),
    "parts": ("shape (4,)", "shape (8,)"),
}


@pairwise(kind=COLLECTIVES.keys(), check=CHECKS, form=FORMS, world=OF_SEVERAL)
def test_ranks_that_meet_in_collectives_with_another(world, kind, check, form):
    """The rank and its neighbours in the ring raise at once; nobody gets a wrong result."""
    expected, got = COLLECTIVES[kind]
    if kind == "trailing dimensions":
        got = got.replace("any", "0")  # what travels has no size where any will do
        pair = r"expected shape \(any, [23]\), got \(0, [23]\)"
    else:
        pair = differs(expected, got)
    told = world.run(collective_mismatch, kind, form, settings={"check": check})
    for rank, (error, message) in enumerate(told[:3]):
        assert error == "MismatchError"
        assert message.startswith(f"rank {rank}, "), message
        assert "(collective, number 0)" in message, message
        assert re.search(pair, message), message
        assert f"rank {ODD}" in message, message
    assert "wrong" not in [error for error, _ in told]


ROWS = r"expected (1 rows from rank 1, got 2|2 rows from rank \d, got 1); let its splits"
SHAPES = r"expected shape \(any, [23]\), got \(1, [23]\)"
DTYPES = differs("dtype float32", "dtype float64")
ROOTS = r"verb {0}\(root_rank=[01]\), got {0}\(root_rank=[01]\)"
DIFFERENT = {
    "alltoall: rows": (lambda odd, n: bf.alltoall(torch.ones(2 * n if odd else n)), ROWS),
    "alltoall: receive_splits": (
        lambda odd, n: bf.alltoall(torch.ones(n), None, [5] + [1] * (n - 1) if odd else None),
        r"expected 5 rows from rank 0, got 1; let its splits",
    ),
    "alltoall: dtype": (lambda odd, n: bf.alltoall(ones(n, odd)), DTYPES),
    "alltoall: dimensions": (lambda odd, n: bf.alltoall(torch.ones(n, 3 if odd else 2)), SHAPES),
    "alltoall: verb": (
        lambda odd, n: (bf.allgather if odd else bf.alltoall)(torch.ones(n), group=bf.new_group()),
        differs("verb alltoall", "verb allgather"),
    ),
    "gather: root": (lambda odd, n: bf.gather(torch.ones(1), int(odd)), ROOTS.format("gather")),
    "gather: dtype": (lambda odd, n: bf.gather(ones(1, odd)), DTYPES),
    "gather: dimensions": (lambda odd, n: bf.gather(torch.ones(1, 3 if odd else 2)), SHAPES),
    "gather: verb": (
        lambda odd, n: (bf.scatter if odd else bf.gather)(torch.ones(n)),
        r"verb (scatter\(root_rank=0\), got gather|gather\(root_rank=0\), got scatter)",
    ),
    "scatter: root": (lambda odd, n: bf.scatter(torch.ones(n), int(odd)), ROOTS.format("scatter")),
    "scatter: out": (
        lambda odd, n: bf.scatter(torch.ones(n), out=torch.ones(2) if odd else None),
        r"expected shape \(2,\), got \(1,\)",
    ),
    "scatter: dtype of out": (
        lambda odd, n: bf.scatter(torch.ones(n), out=ones(1, True) if odd else None),
        r"expected dtype float64, got float32",
    ),
    "reduce: root": (
        lambda odd, n: bf.reduce(torch.ones(3), int(odd), "max"),
        differs("verb reduce(max, root_rank=0)", "verb reduce(max, root_rank=1)"),
    ),
    "allreduce: operator": (
        lambda odd, n: bf.allreduce(torch.ones(3), op="min" if odd else "max"),
        differs("verb allreduce(max)", "verb allreduce(min)"),
    ),
    "allreduce: a sum": (
        lambda odd, n: bf.allreduce(torch.ones(3), op="sum" if odd else "max"),
        differs("verb allreduce(max)", "verb allreduce(sum)"),
    ),
    "allreduce: shape": (
        lambda odd, n: bf.allreduce(torch.ones(4 if odd else 3), op="max"),
        differs("shape (3,)", "shape (4,)"),
    ),
    "allreduce: large shape": (  # which goes whole to one other rank, and in parts to several
        lambda odd, n: bf.allreduce(torch.ones((50_000, 2) if odd else (2, 50_000)), op="max"),
        differs("shape (2, 50000)", "shape (50000, 2)")
        + "|"
        + differs(
            "verb allreduce(max) of shape (2, 50000)", "verb allreduce(max) of shape (50000, 2)"
        ),
    ),
    "allreduce: dtype": (lambda odd, n: bf.allreduce(ones(3, odd), op="max"), DTYPES),
    "allreduce: name": (
        lambda odd, n: bf.allreduce(torch.ones(3), op="max", name="mine" if odd else "w"),
        differs("verb allreduce(max) 'w'", "verb allreduce(max) 'mine'"),
    ),
    "reduce_scatter: operation": (
        lambda odd, n: bf.reduce_scatter(torch.ones(4), average=not odd),
        differs("verb reduce_scatter(average)", "verb reduce_scatter(sum)"),
    ),
    "reduce_scatter: verb": (
        lambda odd, n: (bf.allreduce if odd else bf.reduce_scatter)(torch.ones(4)),
        differs("verb reduce_scatter(average)", "verb allreduce(average)"),
    ),
}
"""The call of a rank, which may be the odd one, and what it is told."""


def ones(count, odd):
    return torch.ones(count, dtype=torch.float64 if odd else torch.float32)


def different(kind):
    call, _ = DIFFERENT[kind]
    return caught(
        lambda: raised_at_the_latest_afterwards(lambda: call(bf.rank() == ODD, bf.size()))
    )


@pytest.mark.parametrize("kind", DIFFERENT)
@on("loopback-2", "loopback-4", "mpi-4")
def test_each_rank_is_told_of_one_with_another(world, kind):
    """Splits, operator, root, out or form: each rank names both sides, and the odd rank."""
    for rank, (error, message) in enumerate(world.run(different, kind)):
        assert error == "MismatchError"
        assert message.startswith(f"rank {rank}"), message
        assert re.search(DIFFERENT[kind][1], message), message
        assert f"rank {ODD}" in message or kind.startswith("alltoall"), message


def collective_meets_neighbour():
    if bf.rank() == ODD:
        return caught(lambda: bf.neighbor_allreduce(torch.ones(2), name="w"))
    return caught(lambda: bf.allreduce(torch.ones(2)))


@SEVERAL
def test_a_collective_that_meets_a_neighbour_verb(world):
    """The ranks find that they wait for each other, and say in which verbs they are."""
    for _, message in world.run(collective_meets_neighbour):
        assert f"rank {ODD} is in neighbor_allreduce and expects 'w' (use 0)" in message, message
        assert "is in allreduce and expects (collective, number 0)" in message, message


def as_many_elements_in_another_shape(again):
    """A form that was used before, and then on one rank another of as many bytes."""
    for _ in range(3):
        bf.allreduce(torch.ones(2, 10))
    shape = (10, 2) if bf.rank() == ODD else (2, 10)
    told = ""
    try:
        bf.allreduce(torch.ones(shape))
        if again:
            until_told()
            bf.barrier()
    except bf.MismatchError as error:
        told = str(error)
    return told


@SEVERAL
def test_in_check_mode_no_rank_returns_before_all_forms_agree(world):
    """In check mode one rank's other shape raises on every rank in that very call."""
    told = world.run(as_many_elements_in_another_shape, False, settings={"check": True})
    for rank, message in enumerate(told):
        assert message.startswith(f"rank {rank}, allreduce(average) (collective, number 3), ")
        assert re.search(differs("shape (2, 10)", "shape (10, 2)"), message), message


@SEVERAL
def test_a_form_that_differs_is_told_to_every_rank(world):
    """Also to those that are no neighbours of the odd one: at the latest in their next verb."""
    for rank, message in enumerate(world.run(as_many_elements_in_another_shape, True)):
        assert message.startswith(f"rank {rank}, "), message
        assert "(collective, number 3)" in message, message
        assert re.search(differs("shape (2, 10)", "shape (10, 2)"), message), message


def check_on_one_rank():
    return caught(lambda: bf.allreduce(torch.ones(2), check=bf.rank() == ODD))[1]


@on("loopback-4", "mpi-4")
def test_a_check_that_only_one_rank_asks_for_is_told(world):
    """check=True on one rank raises MismatchError on all, which says to give it alike."""
    told = world.run(check_on_one_rank)
    remedy = "give check=, or ASYNCDDP_CHECK, alike on all ranks"
    assert all(remedy in message for message in told), told


def other_weights():
    """The same edges on all ranks, and on one of them other weights."""
    graph = topology.ring(bf.size())
    if bf.rank() == ODD:
        for u, v, edge in graph.edges(data=True):
            edge["weight"] = 1 - 0.1 * graph.in_degree(v) + 0.1 if u == v else 0.1
    bf.set_topology(graph)
    net = torch.nn.Linear(2, 2)
    told = ""
    try:
        bf.neighbor_allreduce(torch.ones(2), name="w")
    except bf.MismatchError as error:
        told = str(error)
    if not told:  # a neighbour's neighbour hears that there was an error, in its next verb
        until_told()
        bf.current().engine.matcher.channels.late_error = None
    with pytest.raises(bf.MismatchError, match="with the weights"):
        bf.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
    return told


@SEVERAL
def test_weights_that_differ_are_told_in_check_mode(world):
    """What a sender's topology says of its receiver is compared with what the receiver's says."""
    told = world.run(other_weights, settings={"check": True})
    concerned = {(ODD - 1) % world.size, ODD, (ODD + 1) % world.size}
    for rank in concerned:
        assert told[rank].startswith(f"rank {rank}, neighbor_allreduce 'w' (use 0), "), told
        assert "expected mixing weights (own " in told[rank], told
        assert "by the sender's topology; set the same topology" in told[rank], told


def weights_by_hand(everywhere, check):
    """Weights given in the call, on all ranks or on one: values, and no error."""
    rank, size = bf.rank(), bf.size()
    by_hand = everywhere or rank == ODD
    before, after = (rank - 1) % size, (rank + 1) % size
    near = [*bf.in_neighbor_ranks()]
    given = {"self_weight": 0.8, "src_weights": dict.fromkeys(near, 0.2 / len(near))}
    freely = {"self_weight": 0.5, "src_weights": {before: 0.5}, "dst_weights": {after: 1.0}}
    mean, own = sum(near) / len(near), 0.8 if by_hand else bf.load_topology()[rank][rank]["weight"]
    x, expected = torch.full((3,), float(rank)), own * rank + (1 - own) * mean
    for _ in range(2):
        got = bf.neighbor_allreduce(x, check=check, **(given if by_hand else {}))
        torch.testing.assert_close(got, torch.full_like(x, expected))
    both = bf.neighbor_allreduce([x, x[:1]], check=check, **(given if by_hand else {}))
    torch.testing.assert_close(both[1].item(), expected)
    got = bf.neighbor_allreduce(x, check=check, **freely)
    torch.testing.assert_close(got, torch.full_like(x, (rank + before) / 2))
    handle = bf.neighbor_allreduce_nonblocking(x, check=check, **(given if by_hand else {}))
    torch.testing.assert_close(handle.wait(), torch.full_like(x, expected))


@SEVERAL
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("setting", [True, False])
def test_weights_by_hand_are_no_mismatch_in_check_mode(world, everywhere, setting):
    """They are one rank's own: no other rank's topology says anything of them."""
    settings = {"check": True} if setting else None
    world.run(weights_by_hand, everywhere, not setting, settings=settings)


@on("loopback-4", "mpi-4")
@on_each_rank(settings={"check": True, "ranks_per_machine": 2})
def test_weights_of_machines_by_hand_are_no_mismatch_in_check_mode():
    """Those between machines alike."""
    bf.set_machine_topology(topology.ring(2))
    other = 1 - bf.machine_rank()
    given = {"self_weight": 0.8, "src_machine_weights": {other: 0.2}}
    mean, there = 2 * bf.machine_rank() + 0.5, 2 * other + 0.5
    got = bf.hierarchical_neighbor_allreduce(torch.full((4,), float(bf.rank())), **given)
    torch.testing.assert_close(got, torch.full((4,), 0.8 * mean + 0.2 * there))


def wrapped_with_other_weights(sync):
    """A module over a ring whose weights are others on the odd rank."""
    graph = topology.ring(bf.size())
    if bf.rank() == ODD:
        for u, v, edge in graph.edges(data=True):
            edge["weight"] = 0.9 if u == v else 0.1 / (graph.in_degree(v) - 1)
    model = torch.nn.Linear(2, 1)

    def wrap():
        bf.DecentralizedDataParallel(
            model, lambda params: torch.optim.SGD(params, lr=0.1), topology=graph, sync=sync
        )

    return caught(wrap)[1]


@on("loopback-2", "loopback-4")
@pytest.mark.parametrize("sync", [True, False])
def test_a_module_over_other_weights_is_refused_in_check_mode(world, sync):
    """In check mode one rank's other mixing weights raise MismatchError on all ranks."""
    told = world.run(wrapped_with_other_weights, sync, settings={"check": True})
    for message in told:
        assert "DecentralizedDataParallel needs the same model and settings on all ranks" in message
        assert "with the weights " in message


def other_machine_weights():
    """A ring of two machines, whose weights are others on the ranks of machine 1."""
    graph = topology.ring(2)
    if bf.machine_rank() == 1:
        for u, v, edge in graph.edges(data=True):
            edge["weight"] = 0.9 if u == v else 0.1
    bf.set_machine_topology(graph)
    return caught(lambda: bf.hierarchical_neighbor_allreduce(torch.ones(4)))[1]


@on("loopback-4", "mpi-4")
def test_weights_of_machines_that_differ_are_told_in_check_mode(world):
    """Each rank compares its machine's row with what the other machine's topology says of it."""
    told = world.run(other_machine_weights, settings={"check": True, "ranks_per_machine": 2})
    for message in told:
        assert "expected mixing weights (own " in message, told
        assert "by the sender's topology; set the same topology" in message, told


def refused_before_start():
    """How many collectives this rank has begun when it was refused, and when all forms agreed."""
    transport, begun = bf.current().transport, []
    start = transport.iallreduce

    def noted(*given):
        begun.append(1)
        return start(*given)

    transport.iallreduce = noted
    try:
        caught(lambda: bf.allreduce(torch.ones(3 if bf.rank() == 1 else 2), check=True))
        refused = len(begun)
        assert bf.allreduce(torch.ones(2), average=False, check=True).tolist() == [bf.size()] * 2
    finally:
        del transport.iallreduce
    return refused, len(begun)


@on("loopback-2", "loopback-4", "mpi-4")
def test_a_checked_collective_is_refused_before_it_starts(world):
    """With check=True another shape on one rank raises on all before any begins the collective."""
    assert world.run(refused_before_start) == [(0, 1)] * world.size


def two_ranks_go_on():
    caught(lambda: bf.allreduce(torch.ones(2 + bf.rank()), check=True))
    return bf.allreduce(torch.tensor([float(bf.rank())]), average=False).item()


@on("loopback-2", "mpi-2")
def test_after_a_checked_mismatch_collectives_go_on(world):
    """After a MismatchError with check=True the next collective gives the right sum."""
    assert world.run(two_ranks_go_on) == [1.0, 1.0]


# neighbours that do not name each other


def send_only(targets):
    return bf.neighbor_allreduce(
        torch.ones(2), self_weight=1.0, src_weights={}, dst_weights=targets, name="d"
    )


def receive_only(sources):
    return bf.neighbor_allreduce(
        torch.ones(2),
        self_weight=1.0,
        src_weights=dict.fromkeys(sources, 1.0),
        dst_weights=[],
        name="d",
    )


REMEDY = "let the sender's dst_weights and the receiver's src_weights name each other"


def unexpected():
    """Rank 0 sends to rank 1, which computes, and then comes to the verb without expecting it."""
    told = None
    if bf.rank() == 1:
        early = bf.current().engine.matcher._unexpected
        until(lambda: any(0 in tensors for tensors in early.values()), "rank 0's tensor")
    if bf.rank() < 2:
        told = caught(lambda: send_only([1] if bf.rank() == 0 else []))
    else:
        send_only([])
    works_on_default()
    return told


def works_on_default():
    bf.set_topology(topology.complete(bf.size()))
    works_on()


@SEVERAL
def test_a_tensor_that_nobody_expects(world):
    """Sender and receiver raise; the others, and all afterwards, go on."""
    told = world.run(unexpected)
    problem = "expected nothing from rank 0, got a tensor: it receives from [] and sends to []; "
    assert told[0][1] == (
        f"rank 0, neighbor_allreduce 'd' (use 0), refused by rank 1: rank 1 {problem}{REMEDY}"
    )
    assert told[1][1] == (f"rank 1, neighbor_allreduce 'd' (use 0), peer rank 0: {problem}{REMEDY}")
    assert told[2:] == [None] * (world.size - 2)


def unexpected_and_nobody_comes(folder):
    """Rank 1 comes to the verb after rank 0's deadline, and raises as well."""
    given_up = FileEvent(folder / "given up")
    if bf.rank() == 0:
        started = time.monotonic()
        with deadline_of(0.5), pytest.raises(bf.WaitTimeoutError) as info:
            send_only([1])
        assert 0.5 <= time.monotonic() - started < 0.5 + DELAY
        given_up.set()
        return str(info.value)
    if bf.rank() == 1:
        given_up.wait()
        until(lambda: bf.current().engine.matcher.refused, "what rank 0 tells of it")
        with pytest.raises(bf.WaitTimeoutError) as info:  # what rank 0 has met, and nothing else
            send_only([])
        assert info.value.origin == 0
        return str(info.value)
    return None


@SEVERAL
def test_a_tensor_for_a_rank_that_never_comes(world, tmp_path):
    """The sender times out, and a receiver that comes later raises the same error."""
    told = world.run(unexpected_and_nobody_comes, tmp_path)
    first = (
        r"rank 0: neighbor_allreduce 'd' \(use 0\) was not done in [\d.]+ s "
        r"\(ASYNCDDP_TIMEOUT=0\.5\); missing: rank 1"
    )
    assert re.fullmatch(first, told[0])
    assert told[1].startswith("rank 1, neighbor_allreduce 'd' (use 0), ")
    assert "rank 0" in told[1]


def unexpected_and_over():
    """Rank 1's verb is over when the tensor comes: rank 0 raises, rank 1 in its next verb."""
    told = None
    if bf.rank() == 1:
        send_only([])
    bf.barrier()
    if bf.rank() == 0:
        told = caught(lambda: send_only([1]))[1]
    if bf.rank() == 1:
        until_told()
        told = caught(lambda: bf.barrier(name="next"))[1]
    bf.barrier(name="next")
    return told


@SEVERAL
def test_a_tensor_for_a_verb_that_is_over(world):
    """A sender whose receiver has ended the verb raises; the receiver does in its next one."""
    told = world.run(unexpected_and_over)
    problem = (
        "rank 1 expected nothing from rank 0 in neighbor_allreduce 'd' (use 0), got a tensor: it "
        f"receives from [] and sends to []; {REMEDY}"
    )
    assert told[0] == f"rank 0, neighbor_allreduce 'd' (use 0), refused by rank 1: {problem}"
    assert told[1] == problem


def unexpected_after_confirmation(folder):
    """Once a form is agreed a sender does not wait: it learns of the mismatch in its next verb."""
    over = FileEvent(folder / "over")
    if bf.rank() == 0:
        send_only([1])
        send_only([1])
        over.wait()
        send_only([1])
        until_told()
        return caught(lambda: send_only([]))[1]
    if bf.rank() == 1:
        receive_only([0])
        receive_only([0])
        send_only([])
        over.set()
        until_told()
        return caught(lambda: send_only([]))[1]
    return None


@SEVERAL
def test_a_mismatch_that_is_found_late_is_raised_by_the_next_verb(world, tmp_path):
    """If a call has returned before its mismatch is found, both ranks' next calls raise."""
    told = world.run(unexpected_after_confirmation, tmp_path)
    assert "'d' (use 2), refused by rank 1: rank 1 expected nothing from rank 0" in told[0]
    assert "expected nothing from rank 0" in told[1]


def late_at_shutdown(folder):
    """The same, with no next verb: leaving the world raises."""
    over = FileEvent(folder / "over")
    if bf.rank() == 0:
        send_only([1])
        send_only([1])
        over.wait()
        send_only([1])
        until_told()
    if bf.rank() == 1:
        receive_only([0])
        receive_only([0])
        send_only([])
        over.set()
        until_told()
        caught(lambda: send_only([]))


@on("mpi-2", "shared_memory-2")
def test_a_mismatch_found_late_is_raised_by_shutdown(world, tmp_path):
    """Where no verb follows, shutdown() raises the MismatchError that was found late."""
    first, second = world.outcomes(late_at_shutdown, tmp_path)
    assert (first.error, second.error) == ("MismatchError", None)
    assert "'d' (use 2), refused by rank 1: rank 1 expected nothing from rank 0" in first.message


def expected_in_vain():
    """Rank 1 expects a tensor of rank 0, which is in the same verb and sends none."""
    told = None
    if bf.rank() == 1:
        told = caught(lambda: receive_only([0]))[1]
    elif bf.rank() == 0:
        send_only([])
        until_told()
        told = caught(lambda: bf.neighbor_allreduce(torch.ones(1), name="next"))[1]
    return told


@SEVERAL
def test_a_tensor_that_is_expected_and_never_sent(world):
    """Both raise: the receiver at once, the sender, whose verb was over, in its next one."""
    told = world.run(expected_in_vain)
    problem = f"rank 0 sends nothing to rank 1: it receives from [] and sends to []; {REMEDY}"
    refused = f"rank 1, neighbor_allreduce 'd' (use 0), refused by rank 0: {problem}"
    assert told[1] == refused
    assert told[0].startswith("rank 0, 'd' (use 0), refused by rank 1: ")
    assert problem in told[0]


def shifted():
    """Everybody sends two ahead and expects one behind."""
    n, me = bf.size(), bf.rank()
    return caught(
        lambda: bf.neighbor_allreduce(
            torch.ones(2),
            self_weight=0.5,
            src_weights={(me - 1) % n: 0.5},
            dst_weights=[(me + 2) % n],
        )
    )[1]


@on("loopback-4", "mpi-4")
def test_dynamic_neighbours_that_fit_nowhere_are_an_error_on_all_ranks(world):
    """Sending two ahead and expecting one behind raises MismatchError on each rank."""
    for rank, message in enumerate(world.run(shifted)):
        assert message.startswith(f"rank {rank}, neighbor_allreduce ")
        assert "got a tensor: it receives from [" in message
        assert message.endswith(REMEDY)


def other_partner():
    """Rank 0 gossips with 1, which gossips with 2 under that name and never with 0."""
    partner = {0: 1, 1: 2, 2: 1}.get(bf.rank())
    if partner is None:
        return None
    if bf.rank() > 0:
        return bf.pair_gossip(torch.full((2,), 1.0 * bf.rank()), partner, name="g").tolist()
    with pytest.raises(bf.PeerLeftError) as info:
        bf.pair_gossip(torch.ones(2), partner, name="g")
    return str(info.value)


@on("loopback-4", "mpi-4")
def test_gossip_with_a_rank_that_gossips_with_another(world):
    """Each pair counts by itself: the two average, and the third is told that nobody comes."""
    told = world.run(other_partner)
    assert told[0].startswith("rank 0: pair_gossip 'g.0-1' (use 0): rank 1 has left (")
    assert told[1:3] == [[1.5, 1.5]] * 2


def sizes_in_bulk():
    """Tensors that travel in bulk: the bytes of a refused one hold nobody up."""
    bf.set_topology(topology.complete(bf.size()))
    x = torch.ones(100_000 + (bf.rank() == ODD))
    told = caught(lambda: bf.neighbor_allreduce(x, name="w"))[1]
    good = bf.neighbor_allreduce(torch.full((200_000,), float(bf.rank())), name="big")
    assert good[-1].item() == pytest.approx((bf.size() - 1) / 2)
    return told


@SEVERAL
def test_large_tensors_of_unequal_size(world):
    """A refused bulk tensor raises with both shapes, and the next bulk average is right."""
    for message in world.run(sizes_in_bulk):
        assert re.search(differs("shape (100000,)", "shape (100001,)"), message)


def odd_one_of_three():
    """What became of three sums under way at once, of which the second is longer on one rank."""
    bf.set_topology(topology.complete(bf.size()))
    lengths = (40_000, 40_001 if bf.rank() == ODD else 40_000, 40_000)
    handles = [bf.allreduce_nonblocking(torch.ones(n), average=False) for n in lengths]
    told = []
    for handle in handles:
        started = time.monotonic()
        try:
            told.append(set(handle.wait().tolist()))
        except bf.PeerError as error:
            told.append(type(error))
        assert time.monotonic() - started < BEFORE_DEADLINE
    works_on()
    return told


@SEVERAL
def test_a_mismatch_among_sums_under_way_leaves_the_one_before_it_right(world):
    """The second raises on every rank; the third is right, or raises where the sums have broken."""
    for first, second, third in world.run(odd_one_of_three):
        assert first == {float(world.size)}
        assert second is bf.MismatchError
        assert third in ({float(world.size)}, bf.MismatchError, bf.PeerError)
