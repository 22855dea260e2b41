"""Verbs on lists: the results of one call for each tensor, as the list was, and without copies."""

from __future__ import annotations

import re
from collections import namedtuple

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.testing.oracle import oracle
from tests.conformance.test_mismatches import caught, raised_at_the_latest_afterwards
from tests.support import on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import held
from tests.support.pairwise import pairwise

WORLDS = ["loopback-4", "shared_memory-4"]
SOME = on(*WORLDS)
SETTINGS = {"ranks_per_machine": 2}
ARGUMENTS = {
    "pair_gossip": lambda: (bf.rank() ^ 1,),
    "broadcast": lambda: (bf.size() - 1,),
    "reduce": lambda: (bf.size() - 1,),
}
VERBS = [
    "allreduce",
    "broadcast",
    "hierarchical_allreduce",
    "hierarchical_neighbor_allreduce",
    "local_allreduce",
    "neighbor_allreduce",
    "pair_gossip",
    "reduce",
]
"""Verbs that treat all elements alike, and may be called on a list as on their concatenation."""
FORMS = ("", "_", "_nonblocking", "_nonblocking_")
SHAPES = ((3, 2), (5,), (), (0, 4), (2, 1, 3))
DTYPES = (torch.float32, torch.float64, torch.float32, torch.float32, torch.bfloat16)
Pair = namedtuple("Pair", ["weight", "bias"])
USES = 4
"""Of a name: by message, then by the rings of its persistent channel, then by the fast path."""


def tensors_of(rank, seed=0):
    """Tensors of several shapes and dtypes, apart from each other, one of them transposed."""
    mixed = [
        held(rank, shape, dtype, seed=seed * 100 + i)
        for i, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]
    return [mixed[0].t().contiguous().t(), *mixed[1:]]


def prepare():
    bf.set_topology(topology.one_peer_exponential(bf.size()))
    bf.set_machine_topology(topology.ring(bf.machine_size()))


def called(verb, form, given, **more):
    found = getattr(bf, f"{verb}{form}")(given, *ARGUMENTS.get(verb, tuple)(), **more)
    return found.wait() if "nonblocking" in form else found


@pairwise(verb=VERBS, form=FORMS, world=WORLDS)
@on_each_rank(settings=SETTINGS)
def test_a_list_gives_what_a_call_for_each_tensor_gives(verb, form):
    """Whatever the shapes, dtypes and strides, in each use of the name, and for each variant."""
    prepare()
    for use in range(USES):
        singles = [
            called(verb, "", tensor, name=f"alone{i}")
            for i, tensor in enumerate(tensors_of(bf.rank(), use))
        ]
        given = tensors_of(bf.rank(), use)
        kept = [tensor.clone() for tensor in given]
        got = called(verb, form, given, name="list")
        assert type(got) is list
        if form.endswith("_"):
            assert got is given
            singles = [k if s is None else s for k, s in zip(kept, singles, strict=True)]
        else:
            assert all(map(torch.equal, given, kept)), "the input was changed"
        for one, single in zip(got, singles, strict=True):
            if single is None:
                assert one is None
                continue
            assert (one.shape, one.dtype) == (single.shape, single.dtype)
            torch.testing.assert_close(one, single)
            assert not one.requires_grad


@SOME
@on_each_rank
def test_rounds_of_a_schedule_on_a_dict():
    """A dict gives a dict of the same keys, and each use of its name is one round."""
    schedule = topology.one_peer_exponential(bf.size())
    bf.set_topology(schedule)
    for k in range(USES):
        given = {
            "w": held(bf.rank(), (4, 3), torch.float64, 1),
            7: held(bf.rank(), (2,), torch.float64, 2),
        }
        got = bf.neighbor_allreduce(given, name="dict")
        assert type(got) is dict
        assert list(got) == ["w", 7]
        for seed, (key, shape) in enumerate((("w", (4, 3)), (7, (2,))), start=1):
            expected = oracle(
                schedule, bf.rank(), lambda r, s=shape, n=seed: held(r, s, torch.float64, n), k
            )
            torch.testing.assert_close(got[key], expected)


@on("loopback-4", "mpi-2")
@on_each_rank
def test_tuples_named_tuples_and_empty_lists():
    """Results are in a collection like the one given; an empty one gives an empty one."""
    prepare()
    x = torch.full((3,), float(bf.rank()))
    mean = (bf.size() - 1) / 2
    pair = bf.allreduce(Pair(x, x + 1))
    assert type(pair) is Pair
    assert pair.bias.tolist() == [mean + 1] * 3
    assert type(bf.allreduce((x,))) is tuple
    for empty in ([], (), {}):
        assert bf.allreduce(empty) == empty
        assert bf.neighbor_allreduce(empty, name="none") == empty
    assert bf.allreduce_(mine := []) is mine
    assert bf.allreduce_nonblocking([]).wait() == []
    assert bf.allreduce(tensor=[x])[0].tolist() == [mean] * 3


def side_by_side(rank, padding=0):
    flat = held(rank, (11 + padding,), torch.float32)
    return flat, [flat[:6].view(2, 3), flat[6:7].view(()), flat[7 + padding : 11 + padding]]


def seen_by(verb, monkeypatched, given, **more):
    """The addresses of the flat tensors that the verb itself was called on."""
    from asyncddp.ops.tensor_list_call import TensorListCall

    seen = []
    plain = TensorListCall.finish

    def finish(call, result):
        seen.extend(flat.data_ptr() for flat in call.about)
        return plain(call, result)

    monkeypatched.setattr(TensorListCall, "finish", finish)
    found = verb(given, **more)
    monkeypatched.undo()
    return found, seen


@on("shared_memory-2", "mpi-2")
@on_each_rank
def test_tensors_side_by_side_in_one_storage_are_not_copied():
    """Nor are the results, if they are to be new: views of one tensor, for the next call."""
    prepare()
    with pytest.MonkeyPatch.context() as patch:
        for use in range(USES):
            flat, given = side_by_side(bf.rank())
            expected = bf.neighbor_allreduce(flat, name="flat")
            found, seen = seen_by(bf.neighbor_allreduce_, patch, given, name="near")
            assert seen == [flat.data_ptr()], "it was copied"
            assert found is given
            torch.testing.assert_close(flat, expected)
            new, seen = seen_by(bf.neighbor_allreduce, patch, given, name="new")
            assert seen == [flat.data_ptr()]
            _, again = seen_by(bf.neighbor_allreduce, patch, new, name="again")
            assert again == [new[0].data_ptr()], "results lie side by side"
            out = side_by_side(bf.rank())[1]
            bf.neighbor_allreduce(given, name="out", out=out)
            bf.neighbor_allreduce(flat, name="flat out", out=flat)
            torch.testing.assert_close(out[0], flat[:6].view(2, 3))
            for apart in (side_by_side(bf.rank(), padding=1)[1], list(reversed(given))):
                assert seen_by(bf.neighbor_allreduce, patch, apart, name=f"apart{len(apart)}")[
                    1
                ] != [apart[0].data_ptr()]
            assert use < USES


@on("loopback-4", "mpi-2")
@on_each_rank
def test_lists_stand_outside_autograd():
    """As single tensors do: results need no gradient, and in-place changes are counted."""
    prepare()
    for flat, given in (side_by_side(bf.rank()), side_by_side(bf.rank(), padding=1)):
        parameters = [torch.nn.Parameter(one) for one in given]
        versions = [one._version for one in parameters]
        for one in bf.allreduce(parameters):
            assert not one.requires_grad
        assert bf.allreduce_(parameters) is parameters
        assert all(one.requires_grad and one.is_leaf for one in parameters)
        assert all(one._version > v for one, v in zip(parameters, versions, strict=True))
        assert not flat.requires_grad
    x = torch.ones(2, requires_grad=True)
    y = x * 1.0
    saved = y.square()
    bf.allreduce_([y.detach()])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    with torch.inference_mode():
        assert bf.allreduce([torch.ones(2)])[0].tolist() == [1.0, 1.0]
        assert bf.allreduce_([torch.ones(2)])[0].tolist() == [1.0, 1.0]
        bf.allreduce_([torch.ones(2), torch.ones(3)])
    later = bf.allreduce([torch.ones(2), torch.ones(3)])
    with torch.inference_mode():
        later += bf.allreduce([torch.ones(2), torch.ones(3)])
    near = torch.ones(5)
    later += bf.allreduce(list(near.split([2, 3])))
    assert not any(one.is_inference() for one in later)
    for one, other in zip(later[::2], later[1::2], strict=True):
        before = other._version
        one.add_(torch.ones(2, requires_grad=True)).sum().backward()
        assert not other.requires_grad
        assert other._version == before, "versions are counted apart"


@SOME
@on_each_rank
def test_out_is_a_list_as_well():
    """Side by side or apart; a call that was polled has written it."""
    x = [torch.full((2,), float(bf.rank())), torch.full((1, 2), 1.0 + bf.rank())]
    mean = (bf.size() - 1) / 2
    for out in ([torch.empty(2), torch.empty(1, 2)], list(torch.empty(4).split(2))):
        out[1] = out[1].view(1, 2)
        assert bf.allreduce(x, out=out) is out
        assert [one.flatten().tolist() for one in out] == [[mean] * 2, [mean + 1] * 2]
    handle = bf.allreduce_nonblocking(x, out=out)
    while not handle.poll():
        pass
    assert out[1].tolist() == [[mean + 1] * 2], "what is polled is written"
    assert handle.wait() is out


MISTAKES = {
    "no tensor": (lambda x: [x, 3], r"allreduce: argument tensor\[1\]: .*got int"),
    "nested": (lambda x: {"a": [x]}, r"allreduce: argument tensor\['a'\]: .*got list"),
    "sparse": (lambda x: [x, x.to_sparse()], r"argument tensor\[1\]: expected a dense tensor"),
    "dtype": (lambda x: [x, x.int(), x], r"average of int32 values .* this is tensor\[1\]$"),
    "quantised": (lambda x: (x.to(torch.float8_e4m3fn),), r"argument tensor\[0\] has dtype"),
    "generator": (lambda x: (one for one in [x]), "expected a torch.Tensor, got generator"),
}


@on("loopback-4")
@on_each_rank
@each("kind", MISTAKES)
def test_an_error_names_the_tensor_at_fault(kind):
    """By its index or key; nothing has been sent then."""
    make, pattern = MISTAKES[kind]
    with pytest.raises((bf.ArgumentError, bf.DtypeError), match=pattern):
        bf.allreduce(make(torch.ones(2)))
    assert bf.allreduce([torch.ones(1)])[0].tolist() == [1.0]


OUTS = {
    "fewer": (lambda x: [x], r"argument out: expected \[1\] float32 \(2,\) .*got nothing more"),
    "tensor": (lambda x: x, "argument out: expected a list of tensors .*got Tensor"),
    "shape": (lambda x: [x, x[:1]], r"argument out: expected \[1\] float32 \(2,\).*got .*\(1,\)"),
}


@on("loopback-4")
@on_each_rank
@each("kind", OUTS)
def test_out_must_be_like_the_list(kind):
    """In number, shapes and dtypes; and no list for a single tensor."""
    x = torch.ones(2)
    make, pattern = OUTS[kind]
    with pytest.raises(bf.ArgumentError, match=pattern):
        bf.allreduce([x, x], out=make(x))
    with pytest.raises(bf.ArgumentError, match=r"argument out: expected a torch.Tensor"):
        bf.allreduce(x, out=[x])


ODD = 1
OTHERS = {
    "length": (lambda x: [x, x], r"\[2\] float32 \(2,\) in a list of 3", "a list of 2 tensors"),
    "shape": (lambda x: [x, x.view(2, 1), x], r"\[1\] float32 \(2,\)", r"\[1\] float32 \(2, 1\)"),
    "dtype": (lambda x: [x, x, x.double()], r"\[2\] float32 \(2,\)", r"\[2\] float64 \(2,\)"),
    "split": (lambda x: [torch.cat((x, x[:1])), x[:1], x], r"\[0\] float32 \(2,\)", r"\(3,\)"),
    "keys": (lambda x: {"a": x, "b": x, "c": x}, "a list of 3 tensors", "a dict of 3 tensors"),
    "single": (lambda x: torch.cat([x, x, x]), "a list of 3 tensors", "a single tensor"),
    "empty": (lambda x: [], "a list of 3 tensors", "a list of 0 tensors"),
}  # fmt: skip


def mismatched(verb, kind):
    bf.set_topology(topology.complete(bf.size()))
    make, one, other = OTHERS[kind]
    x = torch.ones(2)
    given = make(x) if bf.rank() == ODD else [x, x, x]
    name = "odd" if verb == "neighbor_allreduce" else None

    def call():
        getattr(bf, verb)(given, name=name)

    kind_of_error, text = caught(lambda: raised_at_the_latest_afterwards(call))
    return kind_of_error, text, one, other


@pairwise(
    verb=["allreduce", "neighbor_allreduce", "hierarchical_allreduce"],
    kind=list(OTHERS),
    world=WORLDS,
)
def test_another_list_on_one_rank_is_an_error_on_all(world, verb, kind):
    """At once, on all ranks concerned, even if the numbers of elements agree; with both lists."""
    found = world.run(mismatched, verb, kind)
    for name, text, one, other in found:
        assert name == "MismatchError"
        assert re.search(one, text), text
        assert re.search(other, text), text
        assert re.search(r"rank \d", text), text


def long_lists_differ_at_the_end():
    bf.set_topology(topology.complete(bf.size()))
    given = [torch.ones(2)] * 300
    if bf.rank() == ODD:
        given[250] = torch.ones(1, 2)
    return caught(lambda: raised_at_the_latest_afterwards(lambda: bf.allreduce(given)))


@on("loopback-4", "mpi-2")
def test_long_lists_are_compared_whole(world):
    """Descriptions name the first hundred tensors, and a digest covers the others."""
    for _, text in world.run(long_lists_differ_at_the_end):
        assert text.count("200 more, of digest") >= 2


@SOME
@on_each_rank
def test_lists_in_a_group_of_ranks():
    """Members only, with any operator."""
    members = [0, 1, 3]
    group = bf.new_group(members)
    if bf.rank() not in group:
        with pytest.raises(bf.ArgumentError, match="call it only where"):
            bf.allreduce([torch.ones(1)], group=group)
        return
    x = [torch.full((2,), float(bf.rank())), torch.tensor([bf.rank()])]
    assert [one.tolist() for one in bf.allreduce(x, op="sum", group=group)] == [[4.0, 4.0], [4]]
    assert [one.tolist() for one in bf.broadcast(x, 3, group=group)] == [[3.0, 3.0], [3]]
    highest = bf.reduce(x, 1, op="max", group=group)
    expected = [[3.0, 3.0], [3]] if bf.rank() == 1 else [None, None]
    assert [one if one is None else one.tolist() for one in highest] == expected


@SOME
@on_each_rank
def test_each_rank_gets_its_share_of_every_tensor_of_a_list():
    """As single calls of reduce_scatter give them, into ``out`` as well."""
    n = bf.size()
    given = {
        "w": held(bf.rank(), (2 * n, 3), torch.float64),
        "i": held(bf.rank(), (n,), torch.int32, 1),
        "none": held(bf.rank(), (0, 2), torch.float64, 2),
        "v": held(bf.rank(), (n, 1, 2), torch.float64, 3).transpose(1, 2),
    }
    for op in ("sum", "max"):
        singles = {key: bf.reduce_scatter(one, op=op) for key, one in given.items()}
        got = bf.reduce_scatter(given, op=op)
        out = {key: torch.empty_like(one) for key, one in singles.items()}
        assert bf.reduce_scatter_nonblocking(given, op=op, out=out).wait() is out
        for key, single in singles.items():
            assert got[key].shape == single.shape
            torch.testing.assert_close(got[key], single)
            torch.testing.assert_close(out[key], single)
    odd = [torch.ones(n), torch.ones(n + 1)]
    with pytest.raises(bf.ArgumentError, match=r"argument tensor\[1\]: expected a first dimension"):
        bf.reduce_scatter(odd)
    with pytest.raises(bf.ArgumentError, match=r"argument out: expected \[0\] float32 \(1,\) in"):
        bf.reduce_scatter([torch.ones(n)], out=[torch.ones(n)])
    assert bf.reduce_scatter([]) == []


@SOME
@on_each_rank
@each("verb", ["allgather", "gather", "neighbor_allgather"])
def test_lists_are_gathered_tensor_by_tensor(verb):
    """With first dimensions that differ between ranks, and any dtypes, in one message."""
    prepare()
    rank, arguments = bf.rank(), {"gather": (1,)}.get(verb, ())
    single = getattr(bf, verb)
    given = [
        held(rank, (rank, 3), torch.float64),
        held(rank, (2,), torch.bool, 1),
        held(rank, (3 - rank % 2, 1), torch.bfloat16, 2),
        held(rank, (4, 2), torch.float32, 3).t(),
        held(rank, (1,), torch.complex128, 4),
        torch.empty(0, 0),
    ]
    for use in range(3):
        alone = [single(one, *arguments, name=f"{i}") for i, one in enumerate(given)]
        got = single(given, *arguments, name="list")
        again = getattr(bf, f"{verb}_nonblocking")(
            dict(enumerate(given)), *arguments, name="d"
        ).wait()
        assert list(again) == list(range(6))
        for one, two, expected in zip(got, again.values(), alone, strict=True):
            if expected is None:
                assert one is two is None
            else:
                assert one.dtype == expected.dtype
                assert torch.equal(one, expected), use
                assert torch.equal(two, expected)
    assert single([], *arguments) == []
    with pytest.raises(bf.ArgumentError, match=r"argument tensor\[1\]: expected at least 1 dim"):
        single([torch.ones(1), torch.ones(())], *arguments)


def gathered_of_other_rows():
    given = [torch.ones(2, 3), torch.ones(2, 3 + (bf.rank() == ODD))]
    return caught(lambda: raised_at_the_latest_afterwards(lambda: bf.allgather(given)))


@SOME
def test_gathered_lists_agree_but_for_first_dimensions(world):
    """Another trailing dimension on one rank is an error on all."""
    for _, text in world.run(gathered_of_other_rows):
        assert "[1] float32 (any, 3)" in text
        assert "[1] float32 (any, 4)" in text


@on("loopback-4", "mpi-2")
@on_each_rank
def test_a_list_is_compressed_as_one_tensor():
    """What travels encoded is the concatenation."""
    bf.set_topology(topology.complete(bf.size()))
    x = [held(bf.rank(), (40,), torch.float32), held(bf.rank(), (8, 8), torch.float32, 1)]
    whole = torch.cat([one.view(-1) for one in x])
    for verb in ("neighbor_allreduce", "allreduce"):
        flat = called(verb, "", whole, compression="fp16")
        got = called(verb, "", x, compression="fp16")
        torch.testing.assert_close(torch.cat([one.view(-1) for one in got]), flat)


@SOME
@on_each_rank
def test_calls_in_flight_share_no_memory():
    """Twenty at a time, whose results belong to the caller.

    Copies of a list are used again once its call is over, and never before.
    """
    given = [torch.full((3,), float(bf.rank())), torch.full((2, 2), 1.0)]
    results, handles = [], []
    for _ in range(20):
        handles.append(bf.allreduce_nonblocking(given))
    for handle in handles:
        results.append(handle.wait())
    mean = (bf.size() - 1) / 2
    for first, second in results:
        assert first.tolist() == [mean] * 3
        first.fill_(7.0)
        assert second.tolist() == [[1.0, 1.0]] * 2
    assert bf.allreduce(given)[0].tolist() == [mean] * 3
