"""``compression=`` of all verbs: variants, layouts, equal bits, and states of tensors."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.compression import COMPRESSORS, ErrorFeedback, compressor_for
from asyncddp.compression.tensor_compressor import TensorCompressor
from tests.conformance.compressed_verbs import BY_TWO, VERBS, graphs, held
from tests.support import LoopbackWorld, on
from tests.support.loops import on_each_rank
from tests.support.oracle import LAYOUTS

every_verb = pytest.mark.parametrize("verb", VERBS)


@every_verb
@on_each_rank(ranks=4, settings=BY_TWO)
def test_all_variants_give_the_same(verb):
    """Non-blocking, in place and into another tensor: the bits of the blocking form."""
    graphs()
    peer = (bf.rank() ^ 1,) if verb == "pair_gossip" else ()
    x, found = held(bf.rank(), (3, 5)), []
    for name in ("minmax_uint8", "qsgd_int4"):
        options = {"compression": name}
        plain, started = getattr(bf, verb), getattr(bf, f"{verb}_nonblocking")
        wanted = plain(x, *peer, name=f"{verb}{name}", **options)
        for number in range(2):
            own = {"name": f"{verb}{name}{number}", **options}
            handle = started(x, *peer, **own)
            first = handle.wait()
            y = x.clone()
            assert getattr(bf, f"{verb}_")(y, *peer, name=own["name"] + "_", **options) is y
            z = x.clone()
            assert (
                getattr(bf, f"{verb}_nonblocking_")(
                    z, *peer, name="n" + own["name"], **options
                ).wait()
                is z
            )
            out = torch.empty_like(x)
            assert plain(x, *peer, name="o" + own["name"], out=out, **options) is out
            if name == "minmax_uint8":
                for one in (first, y, z, out):
                    assert torch.equal(one, wanted)
        found.append(wanted)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@on_each_rank(ranks=4, settings=BY_TWO)
def test_values_are_read_not_memory(layout):
    """Strides and offsets change no result, also where it replaces the tensor."""
    graphs()
    x = held(bf.rank(), (4, 6))
    for verb in VERBS.values():
        given = LAYOUTS[layout](x.clone())
        got = verb(given, compression="minmax_uint8")
        assert got.shape == given.shape
        assert torch.equal(got, verb(x, compression="minmax_uint8"))


def same_bits(name):
    graphs()
    for verb in ("allreduce", "hierarchical_allreduce"):
        for compression in (name, TensorCompressor(ErrorFeedback(compressor_for("test", name)))):
            for _ in range(3):
                got = VERBS[verb](held(bf.rank(), (3, 67)), compression=compression)
                every = bf.allgather(got[None])
                assert (every == every[:1]).all(), (verb, compression)


@on("loopback-4", "mpi-2", "shared_memory-2")
@pytest.mark.parametrize("name", COMPRESSORS)
def test_all_ranks_get_equal_bits(world, name):
    """allreduce, among machines too, by every compressor, with and without a state."""
    world.run(same_bits, name, settings={"ranks_per_machine": 2} if world.size > 2 else {})


@every_verb
def test_a_single_rank_compresses_nothing(verb):
    """At n = 1 there is nobody to send to."""
    if verb == "pair_gossip":
        return

    def case():
        graphs()
        x = held(0)
        assert torch.equal(VERBS[verb](x, compression="sign"), x)

    LoopbackWorld(1).run(case)


# states


COARSE = [
    COMPRESSORS["sign"](),
    COMPRESSORS["top_k"](ratio=0.1),
    COMPRESSORS["random_k"](ratio=0.2),
    COMPRESSORS["power_sgd"](rank=1),
]


@pytest.mark.parametrize(
    ("verb", "coarse"),
    [(verb, COARSE[k % 4]) for k, verb in enumerate(VERBS)]
    + [("allreduce", coarse) for coarse in COARSE[1:]],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_tensor_compressor_remembers(verb, coarse):
    """With error feedback all that was sent, and what is owed, make up for all inputs."""

    def case():
        graphs()
        codec = TensorCompressor(ErrorFeedback(coarse))
        x, total, steps = held(bf.rank(), (200,)), torch.zeros(200), 50
        for _ in range(steps):
            total += VERBS[verb](x, compression=codec)
        exact = VERBS[verb](x)
        once = (VERBS[verb](x, compression=coarse) - exact).norm()
        assert codec.uses == steps or (bf.local_rank() and verb == "hierarchical_allreduce")
        return float((total / steps - exact).norm() / once)

    assert max(LoopbackWorld(4).run(case, settings=BY_TWO)) < 0.3


@every_verb
@on_each_rank(ranks=4, settings=BY_TWO)
def test_error_feedback_needs_a_state(verb):
    """A verb cannot know which tensor it had before: it says what to give."""
    graphs()
    for compression in (ErrorFeedback(compressor_for("test", "sign")),):
        words = rf"{verb}: argument compression: .*remembers.*give a TensorCompressor"
        with pytest.raises(bf.ArgumentError, match=words):
            VERBS[verb](held(bf.rank()), compression=compression)
    VERBS[verb](held(bf.rank()), compression="sign")
