"""Whatever shape, dtype, graph and weights hypothesis finds: the verb gives ``(W @ X)[r]``."""

from __future__ import annotations

import networkx as nx
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncddp as bf
from asyncddp import topology
from asyncddp.tensors.dtypes import DTYPES
from tests.support import LoopbackWorld
from tests.support.oracle import AVERAGING, check, held, mixed, options, summed

EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
sizes = st.integers(1, 5)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
weights = st.floats(-3, 3, allow_nan=False).map(lambda w: round(w, 3))


@st.composite
def exchanges(draw):
    """Who sends what to whom with which factor, and how each receiver weighs it."""
    n = draw(sizes)
    pairs = [(j, i) for j in range(n) for i in range(n) if i != j]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return {
        "n": n,
        "own": draw(st.lists(weights, min_size=n, max_size=n)),
        "received": {edge: draw(weights) for edge in edges},
        "sent": {edge: draw(weights) for edge in edges},
    }


@given(exchanges(), shapes, st.sampled_from([d for d in AVERAGING if not options(d)]))
@EXAMPLES
def test_dynamic_weights(exchange, shape, dtype):
    """neighbor_allreduce with any weights, factors and edges gives their weighted sum."""
    received, sent = exchange["received"], exchange["sent"]

    def case():
        me = bf.rank()
        x = held(me, shape, dtype)
        sources = {j: w for (j, i), w in received.items() if i == me}
        got = bf.neighbor_allreduce(
            x,
            self_weight=exchange["own"][me],
            src_weights=sources,
            dst_weights={i: w for (j, i), w in sent.items() if j == me},
        )
        want = mixed(
            me,
            exchange["own"][me],
            sources,
            lambda r: held(r, shape, dtype),
            lambda j, i: sent[j, i],
        )
        if dtype in (torch.float16, torch.bfloat16):  # what is scaled on sending is rounded there
            room = 64 * torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), want.double(), rtol=room, atol=room)
        else:
            check(got, x, want)

    LoopbackWorld(exchange["n"]).run(case)


@st.composite
def graphs(draw):
    """A weighted graph whose rows sum to one; edges anywhere."""
    n = draw(sizes)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    for i in range(n):
        sources = draw(st.sets(st.integers(0, n - 1))) | {i}
        parts = {j: draw(st.integers(1, 9)) for j in sorted(sources)}
        total = sum(parts.values())
        graph.add_weighted_edges_from((j, i, part / total) for j, part in parts.items())
    return graph


@given(graphs(), shapes, st.sampled_from(AVERAGING))
@EXAMPLES
def test_weighted_graphs(graph, shape, dtype):
    """On any graph whose rows sum to 1, neighbor_allreduce gives each rank its row of W X."""

    def case():
        bf.set_topology(graph)
        x = held(bf.rank(), shape, dtype)
        near = topology.neighbors_of(graph, bf.rank())
        want = mixed(bf.rank(), near.self_weight, near.src_weights, lambda r: held(r, shape, dtype))
        check(bf.neighbor_allreduce(x, **options(dtype)), x, want)

    LoopbackWorld(graph.number_of_nodes()).run(case)


@given(sizes, shapes, st.sampled_from(list(DTYPES)), st.data())
@EXAMPLES
def test_collectives(n, shape, dtype, data):
    """allreduce, broadcast and allgather are right for any world size, shape and dtype."""
    root = data.draw(st.integers(0, n - 1))
    rows = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))

    def case():
        def of(rank):
            return held(rank, shape, dtype)

        x = of(bf.rank())
        check(bf.allreduce(x, average=False), x, summed(range(n), of))
        check(bf.broadcast(x, root), x, of(root))
        ragged = [held(r, (rows[r], *shape), dtype) for r in range(n)]
        assert torch.equal(bf.allgather(ragged[bf.rank()]), torch.cat(ragged))

    LoopbackWorld(n).run(case)
