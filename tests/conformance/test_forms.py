"""What holds for every verb: its forms agree, inputs stay, results belong to the caller."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import LAYOUTS, held

STUB = Path(bf.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
NAMES = set(re.findall(r"import (\w+) as \1", STUB)) | set(re.findall(r"(\w+) as \1,", STUB))
VERBS = sorted(name.replace("_nonblocking", "") for name in NAMES if "_nonblocking" in name)
"""Every verb that has a non-blocking form; those that work in place end with ``_``."""

ARGUMENTS = {
    "pair_gossip": lambda: (bf.rank() ^ 1,),
    **dict.fromkeys(("broadcast", "gather", "reduce", "scatter"), lambda: (bf.size() - 1,)),
}
"""What a verb needs beside its tensor."""

OTHERWISE = {"barrier", "broadcast_object", "allgather_object", "send", "recv"}
"""Verbs that do not make a tensor out of one."""
TENSOR_VERBS = [
    verb
    for verb in VERBS
    if not verb.endswith("_") and verb not in OTHERWISE and not verb.startswith("win_")
]
PLACES = [v for v in VERBS if v.endswith("_")]
SETTINGS = {"ranks_per_machine": 2}
SOME = on("loopback-4", "mpi-2")


def test_the_table_has_the_verbs_of_the_issue():
    """So that a verb which the stub lost is missed here."""
    assert TENSOR_VERBS == [
        "allgather",
        "allreduce",
        "alltoall",
        "broadcast",
        "gather",
        "hierarchical_allreduce",
        "hierarchical_neighbor_allreduce",
        "local_allreduce",
        "neighbor_allgather",
        "neighbor_allreduce",
        "pair_gossip",
        "reduce",
        "reduce_scatter",
        "scatter",
    ]
    other_shape = ("gather", "scatter")
    writable = [verb for verb in TENSOR_VERBS if not verb.endswith(other_shape)]
    assert [f"{verb}_" for verb in writable] == PLACES


def form(verb, *, nonblocking=False):
    """A verb of a name of the table, with the arguments that it needs."""
    place = verb.endswith("_")
    bare = verb.removesuffix("_")
    if nonblocking:
        bare += "_nonblocking"
    function = getattr(bf, bare + ("_" if place else ""))
    arguments = ARGUMENTS.get(verb.removesuffix("_"), tuple)()

    def call(tensor, **more):
        found = function(tensor, *arguments, **more)
        return found if found is not None else kept(tensor)

    def start(tensor, **more):
        handle = function(tensor, *arguments, **more)
        return Waited(lambda: found if (found := handle.wait()) is not None else kept(tensor))

    return start if nonblocking else call


class Waited(NamedTuple):
    """What is left of a handle here."""

    wait: Callable[[], torch.Tensor]


def kept(tensor):
    """What stands for the result of a rank that gets none, as reduce and gather have."""
    return tensor.detach().clone()


def prepared():
    bf.set_topology(topology.ring(bf.size(), style="right"))
    bf.set_machine_topology(topology.ring(bf.machine_size()))
    return held(bf.rank(), (4, 3), torch.float64)


def shares_memory(one, other):
    return bool(one.numel()) and (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def forms_agree(verb):
    x = prepared()
    kept = x.clone()
    first = form(verb)(x)
    second = form(verb, nonblocking=True)(x).wait()
    assert torch.equal(first, second)
    assert torch.equal(x, kept), "the input was changed"
    assert not shares_memory(first, x)
    assert not shares_memory(first, second)
    if f"{verb}_" in PLACES:
        for nonblocking in (False, True):
            y = x.clone()
            got = form(f"{verb}_", nonblocking=nonblocking)(y)
            got = got.wait() if nonblocking else got
            assert got is y, "in place gives its argument back"
            assert torch.equal(y, first)


@SOME
@pytest.mark.parametrize("verb", TENSOR_VERBS)
def test_all_forms_of_a_verb_give_the_same_bits_and_leave_the_input(world, verb):
    """Only the in-place forms write into their argument, which they return."""
    world.run(forms_agree, verb, settings=SETTINGS)


@on("loopback-1")
@pytest.mark.parametrize("verb", [v for v in TENSOR_VERBS if v != "pair_gossip"])
def test_one_rank_alone_has_all_forms_of_verbs_without_a_partner(world, verb):
    """On one rank, too, all forms of a verb give the same bits and keep their input."""
    world.run(forms_agree, verb)


def alone(verb):
    x = prepared()
    return torch.equal(form(verb)(x), x)


@on("loopback-1")
@pytest.mark.parametrize(
    "verb", [v for v in TENSOR_VERBS if v not in ("pair_gossip", "neighbor_allgather")]
)
def test_one_rank_alone_keeps_its_values(world, verb):
    """On one rank every verb whose result has the input's shape returns its values."""
    assert world.run(alone, verb) == [True]


@on("loopback-4")
@on_each_rank(settings=SETTINGS)
@each("verb", TENSOR_VERBS)
def test_ranks_that_share_a_process_share_no_results(verb):
    """Writing into a result changes no other rank's result and no input."""
    x = prepared()
    result = form(verb)(x)
    bf.barrier()
    result.fill_(bf.rank())
    bf.barrier()
    assert (result == bf.rank()).all(), "another rank wrote into this result"
    assert torch.equal(x, held(bf.rank(), (4, 3), torch.float64))


def input_may_change_after(verb):
    """A blocking verb, or wait, gives the tensor free, however late the peers are."""
    x = prepared()
    expected = form(verb)(x)
    for _ in range(3):
        y = x.clone()
        result = form(verb)(y)
        y.fill_(float("nan"))
        assert torch.equal(result, expected)
    big = torch.full((50_000,), float(bf.rank()))
    handle = form(verb, nonblocking=True)(big)
    whole = handle.wait()
    big.fill_(float("nan"))
    bf.barrier()
    assert not torch.isnan(whole).any()


@SOME
@pytest.mark.parametrize("verb", TENSOR_VERBS)
def test_the_input_may_be_changed_once_the_verb_is_over(world, verb):
    """Writing into the input after a blocking verb or wait() changes no result."""
    world.run(input_may_change_after, verb, settings=SETTINGS)


@on("loopback-4", "mpi-2")
@on_each_rank(settings=SETTINGS)
@each("verb", TENSOR_VERBS)
def test_verbs_stand_outside_autograd(verb):
    """Inputs may require gradients, results do not; leaf parameters are changed in place."""
    x = prepared().requires_grad_()
    result = form(verb)(x * 1.0)
    assert not result.requires_grad
    assert not form(verb)(x).requires_grad
    if f"{verb}_" in PLACES:
        parameter = torch.nn.Parameter(held(bf.rank(), (4, 3), torch.float64))
        got = form(f"{verb}_")(parameter)
        assert got is parameter
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert torch.equal(parameter.detach(), result)


@SOME
@on_each_rank(settings=SETTINGS)
@each("verb", TENSOR_VERBS)
def test_checking_changes_no_result(verb):
    """With check=True, blocking or not, a verb gives the same bits as without it."""
    x = prepared()
    plain = form(verb)(x)
    assert torch.equal(form(verb)(x, check=True), plain)
    assert torch.equal(form(verb, nonblocking=True)(x, check=True, name="n").wait(), plain)


@on("loopback-4", "mpi-2")
@on_each_rank(settings=SETTINGS)
@each("dtype", [torch.float32, torch.complex128])
@each("verb", TENSOR_VERBS)
def test_values_are_read_not_how_they_lie_in_memory(verb, dtype):
    """Strides, offsets, and conjugate or negative views of a tensor change no result."""
    prepared()
    plain = held(bf.rank(), (4, 6), dtype)
    expected = form(verb)(plain)
    for name, layout in LAYOUTS.items():
        torch.testing.assert_close(form(verb)(layout(plain)), expected, msg=name)


@SOME
@on_each_rank(settings=SETTINGS)
@each("verb", TENSOR_VERBS)
def test_many_are_under_way_beside_other_collectives(verb):
    """Twenty calls, beside an allreduce, may be waited for in reverse order."""
    x = prepared()
    given = [x + number for number in range(20)]
    expected = [form(verb)(one) for one in given]
    handles = [form(verb, nonblocking=True)(one) for one in given]
    assert bf.allreduce(torch.tensor([1.0]), average=False).item() == bf.size()
    for handle, one in zip(reversed(handles), reversed(expected), strict=True):
        torch.testing.assert_close(handle.wait(), one)


@on("loopback-4", "mpi-4")
def test_the_check_mode_changes_no_result(world):
    """``ASYNCDDP_CHECK=1`` for everything."""
    for verb in TENSOR_VERBS:
        world.run(forms_agree, verb, settings={**SETTINGS, "check": True})


@on("loopback-2")
@on_each_rank
def test_results_can_be_written_into_a_tensor_of_the_caller():
    """neighbor_allreduce returns out=, strided too; the in-place form has no such argument."""
    x = prepared()
    out = torch.empty(3, 4, dtype=torch.float64).t()
    assert bf.neighbor_allreduce(x, out=out) is out
    assert torch.equal(out, bf.neighbor_allreduce(x))
    with pytest.raises(TypeError, match="out"):
        bf.neighbor_allreduce_(x, out=out)


@on("loopback-2", "shared_memory-2")
@on_each_rank
def test_an_argument_that_does_not_exist_is_an_error_of_the_verb():
    """An unknown argument raises a TypeError of the verb, in first and repeated calls.

    Long way first, then the short one, which must not answer with a name of its own.
    """
    x = prepared()
    for _ in range(3):
        for form in (bf.neighbor_allreduce, bf.neighbor_allreduce_nonblocking):
            with pytest.raises(TypeError, match=r"^neighbor_allreduce.*unexpected keyword.*'nmae'"):
                form(x, nmae="x")
        bf.neighbor_allreduce(x)


def test_the_forms_have_names_documents_and_signatures():
    """What ``help()`` shows of a form is that form, not the plan behind it."""
    for verb in VERBS:
        place = "_" if verb.endswith("_") else ""
        for name in (verb, verb.removesuffix("_") + "_nonblocking" + place):
            function = getattr(bf, name)
            assert function.__name__ == name
            assert function.__doc__
            assert "Program" not in str(inspect.signature(function))
            assert ("out" in inspect.signature(function).parameters) <= (not place)


@SOME
@on_each_rank(settings=SETTINGS)
@each("verb", PLACES)
def test_variants_in_place_take_no_tensor_for_the_result(verb):
    """They refuse it as a mistake, in the first call and in repeated ones, and write into none."""
    x = prepared()
    for nonblocking in (False, True):
        call = form(verb, nonblocking=nonblocking)
        for out in (x, torch.zeros_like(x), [x]):
            with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
                call(x, out=out)
            with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
                call([x], out=[out])
        for _ in range(4):
            form(verb)(x)
