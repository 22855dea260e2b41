"""``compression=`` of verbs: mistakes, of which all ranks concerned hear in words."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.compression import COMPRESSORS, compressor_for
from asyncddp.compression.tensor_compressor import TensorCompressor
from tests.conformance.compressed_verbs import BY_TWO, VERBS, graphs, held
from tests.support import on
from tests.support.loops import on_each_rank

every_verb = pytest.mark.parametrize("verb", VERBS)


@every_verb
@pytest.mark.parametrize(
    ("compression", "kind", "words"),
    [
        (
            "minmax",
            bf.UnknownNameError,
            "bf16, dct_top_k, fp16, lloyd_max_int2, minmax_uint8, .*top_k",
        ),
        (7, bf.ArgumentError, "expected None, a compressor such as .* got 7"),
        (COMPRESSORS["sign"], bf.ArgumentError, "expected None, a compressor such as"),
    ],
    ids=["unknown name", "number", "class"],
)
@on_each_rank(ranks=4, settings=BY_TWO)
def test_compressors_that_are_none(verb, compression, kind, words):
    """The message lists the known ones."""
    graphs()
    with pytest.raises(kind, match=words):
        VERBS[verb](held(bf.rank()), compression=compression)
    VERBS[verb](held(bf.rank()))


@every_verb
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64])
@on_each_rank(ranks=4, settings=BY_TWO)
def test_only_floats_are_compressed(verb, dtype):
    """Integers, bools and complex numbers: a DtypeError that names the dtype and the verb."""
    graphs()
    x = held(bf.rank(), dtype=dtype)
    with pytest.raises(bf.DtypeError, match=rf"{verb}: compression expects one of .*{dtype}"):
        VERBS[verb](x, compression="fp16")


@on("loopback-4", "mpi-4")
@on_each_rank(settings=BY_TWO)
def test_more_elements_to_keep_than_there_are():
    """All ranks raise at once, before anything is sent, and can go on."""
    graphs()
    many = COMPRESSORS["top_k"](k=90)
    for name, verb in VERBS.items():
        words = rf"{name}: argument compression: top_k: argument k: .* got 90"
        for compression in (many, TensorCompressor(many)):
            with pytest.raises(bf.ArgumentError, match=words):
                verb(held(bf.rank()), compression=compression)
        verb(held(bf.rank()))


LONGEST = {"allreduce": 3, "local_allreduce": 5, "hierarchical_allreduce": 5}
"""Of 9 elements on 4 ranks, by two on a machine: those of a part that travels."""


@every_verb
@on_each_rank(ranks=4, settings=BY_TWO)
def test_as_many_elements_to_keep_as_there_are(verb):
    """The limit is that of the shortest part that travels; at it nothing is lost."""
    graphs()
    x = held(bf.rank(), (8,) if verb == "hierarchical_neighbor_allreduce" else (9,))
    k = 4 if len(x) == 8 else LONGEST.get(verb, 9)
    exact, top_k = VERBS[verb](x), COMPRESSORS["top_k"]
    torch.testing.assert_close(VERBS[verb](x, compression=top_k(k=k)), exact)
    with pytest.raises(bf.ArgumentError, match=f"expected at most the {k} elements"):
        VERBS[verb](x, compression=top_k(k=k + 1))


CONCERNED = {
    "neighbor_allreduce": (1, {0, 1, 2}),
    "hierarchical_neighbor_allreduce": (1, {0, 1, 2, 3}),
    "pair_gossip": (1, {0, 1}),
    "allreduce": (1, {0, 1, 2, 3}),
    "local_allreduce": (1, {0, 1}),
    "hierarchical_allreduce": (2, {0, 1, 2, 3}),
}
"""Of 4 ranks on 2 machines: who has another compressor, and who cannot but hear of it."""
UNLIKE = [("minmax_uint8", "sign"), (None, "sign"), ("sign", None)]


def call_unlike(verb, odd, first, second, **options):
    graphs()
    bf.barrier()
    compression = second if bf.rank() == odd else first
    return VERBS[verb](held(bf.rank()), name="one", compression=compression, **options)


@on("loopback-4", "shared_memory-4")
@every_verb
def test_ranks_with_other_compressors(world, verb):
    """Whoever exchanges with the rank that differs hears of it; messages name both compressors."""
    odd, concerned = CONCERNED[verb]
    for first, second in UNLIKE:
        outcomes = world.outcomes(call_unlike, verb, odd, first, second, settings=BY_TWO)
        failed = {outcome.rank for outcome in outcomes if outcome.error is not None}
        assert failed >= concerned
        for outcome in outcomes:
            assert outcome.error in (None, "MismatchError"), outcome.message
            if outcome.error and "give check=" not in outcome.message:
                for name in filter(None, (first, second)):
                    shown = type(compressor_for("test", name)).__name__
                    assert shown in outcome.message, outcome.message


def compresses_later():
    graphs()
    for _ in range(4):  # until the fast path takes the name
        bf.neighbor_allreduce(held(bf.rank(), (5000,)), name="one")
    compression = "sign" if bf.rank() else None
    bf.neighbor_allreduce(held(bf.rank(), (5000,)), name="one", compression=compression)


@on("loopback-2", "mpi-2")
def test_a_rank_that_begins_to_compress(world):
    """A name that has had a fast path is no reason to hang."""
    for outcome in world.outcomes(compresses_later):
        assert outcome.error == "MismatchError"
        assert "Sign()" in outcome.message


@on("loopback-2", "mpi-2")
@on_each_rank
def test_a_name_with_and_without_compression():
    """All ranks may compress in some rounds of a name, and not in others."""
    graphs()
    for step in range(6):
        compression = "bf16" if step % 2 else None
        got = bf.neighbor_allreduce(held(bf.rank(), (5000,)), name="one", compression=compression)
        exact = bf.neighbor_allreduce(held(bf.rank(), (5000,)))
        torch.testing.assert_close(got, exact, rtol=0.0, atol=0.02 if compression else 0.0)
