"""One-sided methods whose ranks meet in each round: matrix recursions, whatever users do."""

from __future__ import annotations

from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld
from tests.support.pairwise import pairwise
from tests.unit.optim.optim_reference import (
    Late,
    assign,
    batch,
    mlp,
    square_loss,
    train_by_matrix,
    vector,
)
from tests.unit.optim.test_optim_every_optimizer import OPTIMIZERS, OPTIONS, SPARSE_ONLY
from tests.unit.optim.test_optim_parameters import channels_last, leaf, odd, tied
from tests.unit.optim.test_optim_training import rowwise_loss

pytestmark = pytest.mark.training

RANKS = 4
GRAPH = topology.one_peer_exponential(RANKS)
METHODS = ("win_put", "pull_get", "async_model_average", "push_sum")
MIXED_BY_ROWS = METHODS[:3]
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = partial(torch.optim.AdamW, lr=0.01)
every_method = pytest.mark.parametrize("method", METHODS)


def unbalanced(n=RANKS):
    """A strongly connected digraph with unequal degrees, and without weights."""
    edges = [(i, (i + 1) % n) for i in range(n)] + [(i, (i + 3) % n) for i in range(0, n, 2)]
    edges += [(i, (i + 2) % n) for i in range(0, n, 4)]
    return nx.DiGraph([*((i, i) for i in range(n)), *edges], name=f"unbalanced({n})")


def graph_of(method):
    """A time-varying graph; for push-sum one on which p is not 1."""
    return unbalanced() if method == "push_sum" else GRAPH


def shares(schedule, k):
    """What push-sum multiplies with: equal shares for each rank's targets and itself."""
    a = torch.zeros(schedule.n, schedule.n, dtype=torch.float64)
    for source in range(schedule.n):
        targets = schedule.neighbors(source, k).dst_ranks
        a[[source, *targets], source] = 1 / (len(targets) + 1)
    return a


def push_by_matrix(
    graph,
    make,
    steps,
    *,
    model_of=mlp,
    loss_of=square_loss,
    averages=lambda step: True,
    travels=None,
):
    """SGP by the book: gradients at z, steps on x = z p, (x, p) times A; gives z of all ranks."""
    schedule = topology.as_schedule(graph)
    models = [model_of(rank) for rank in range(schedule.n)]
    optimizers = [make(model.parameters()) for model in models]
    p, rounds = torch.ones(schedule.n, 1, dtype=torch.float64), 0
    for step in range(steps):
        before = torch.stack([vector(model) for model in models])
        moves = torch.ones(len(before[0]), dtype=bool) if travels is None else travels(step)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            assign(model, torch.where(moves, before[rank] * p[rank], before[rank]))
            optimizer.step()
        x = torch.stack([vector(model) for model in models])
        if averages(step):
            a = shares(schedule, rounds)
            x, p, rounds = torch.where(moves, a @ x, x), a @ p, rounds + 1
        for model, row, own in zip(models, x, p, strict=True):
            assign(model, torch.where(moves, row / own, row))
    return [vector(model) for model in models]


def average_by_matrix(
    graph, make, steps, *, model_of=mlp, loss_of=square_loss, every=1, travels=None
):
    """x+ = y + (W − I) s, where y is what J local steps make of s."""
    schedule = topology.as_schedule(graph)
    models = [model_of(rank) for rank in range(schedule.n)]
    optimizers = [make(model.parameters()) for model in models]
    sent, rounds = torch.stack([vector(model) for model in models]), 0
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        if step % every == every - 1:
            w = torch.from_numpy(topology.mixing_matrix(schedule, rounds))
            y = torch.stack([vector(model) for model in models])
            moves = torch.ones(len(y[0]), dtype=bool) if travels is None else travels(step)
            sent, rounds = torch.where(moves, y + w @ sent - sent, y), rounds + 1
            for model, row in zip(models, sent, strict=True):
                assign(model, row)
    return [vector(model) for model in models]


def by_matrix(method, graph, make, steps, **options):
    """What all ranks must have after some steps."""
    if method == "push_sum":
        return push_by_matrix(graph, make, steps, **options)
    if method == "async_model_average":
        return average_by_matrix(graph, make, steps, **options)
    return train_by_matrix("adapt_with_combine", graph, make, steps, **options)


def wrapped(method, model, make=sgd, **options):
    """The wrapper of a rank that meets the others in each round."""
    optimizer = bf.DistributedOptimizer(
        make(model.parameters()),
        model,
        method,
        **{"topology": graph_of(method), **options},
        broadcast=False,
    )
    optimizer.force_barrier = True
    return optimizer


def train(model, optimizer, steps, loss_of=square_loss, closure=False):
    """Ordinary training."""
    for step in steps:
        data = batch(bf.rank(), step)

        def evaluate(data=data):
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    return vector(model)


def run(method, graph, make, steps, *, model_of=mlp, loss_of=square_loss, closure=False, **options):
    """The same with the library, on this rank."""
    model = model_of(bf.rank())
    optimizer = wrapped(method, model, make, topology=graph, **options)
    return train(model, optimizer, range(steps), loss_of, closure)


def assert_all_close(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


# the recursions


@pairwise(
    method=METHODS,
    make={"SGD": sgd, "AdamW": adam},
    options={
        "one bucket": {},
        "many buckets": {"bucket_size_in_mb": 1e-5},
        "closure": {"closure": True},
    },
)
def test_where_ranks_meet_rounds_are_synchronous(method, make, options):
    """X+ = W X − U for those that average rows; SGP, with its p, for push-sum.

    Asynchronous model averaging steps on X where the others step on W X, to which an optimizer's
    decay is proportional.
    """
    graph = graph_of(method)
    got = LoopbackWorld(RANKS).run(run, method, graph, make, 5, **options)
    assert_all_close(got, by_matrix(method, graph, make, 5))


@pytest.mark.parametrize("method", ["async_model_average", "push_sum"])
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - SPARSE_ONLY - {"LBFGS"}))
def test_every_optimizer_of_torch(method, name):
    """Steps on x = z p, or beside an average under way, are the plain optimizer's."""
    make = partial(OPTIMIZERS[name], **OPTIONS.get(name, {"lr": 0.01}))
    model_of = partial(mlp, bias=name != "Muon")  # Muon takes matrices only
    graph = graph_of(method)
    got = LoopbackWorld(RANKS).run(run, method, graph, make, 3, model_of=model_of)
    for one, other in zip(got, by_matrix(method, graph, make, 3, model_of=model_of), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_push_sum_on_a_schedule_of_unbalanced_graphs():
    """Two digraphs in turn, neither of them strongly connected, which are so together."""
    there = topology.as_schedule(nx.DiGraph([(0, 1), (0, 2), (2, 3)], name="there"))
    back = topology.as_schedule(nx.DiGraph([(1, 0), (3, 1), (3, 2)], name="back"))
    graph = topology.Schedule(
        "to and fro", 4, 2, lambda rank, k: (there, back)[k].neighbors(rank, 0)
    )
    got = LoopbackWorld(RANKS).run(run, "push_sum", graph, sgd, 6)
    assert_all_close(got, push_by_matrix(graph, sgd, 6))


def test_push_sum_ignores_the_weights_of_the_graph():
    """Its shares are equal, also where rows or columns sum to one in another way."""
    weighted = topology.push_weights(unbalanced())
    for _, _, data in weighted.out_edges(0, data=True):
        data["weight"] = 0.1
    weighted[0][0]["weight"] = 1.0 - 0.1 * (weighted.out_degree(0) - 1)
    got = LoopbackWorld(RANKS).run(run, "push_sum", weighted, sgd, 4)
    assert_all_close(got, push_by_matrix(unbalanced(), sgd, 4))


@every_method
@pytest.mark.parametrize("every", [2, 3])
def test_local_steps_between_averagings(method, every):
    """J times backward and step: the J-th step averages, the others are local.

    In asynchronous model averaging the parameters of the first forward pass travel.
    """
    graph = graph_of(method)
    if method == "async_model_average":
        expected = average_by_matrix(graph, sgd, 7, every=every)
    else:
        due = {"averages": lambda step: step % every == every - 1}
        expected = by_matrix(method, graph, sgd, 7, **due)
    got = LoopbackWorld(RANKS).run(run, method, graph, sgd, 7, num_steps_per_communication=every)
    assert_all_close(got, expected)


@every_method
@pytest.mark.parametrize("model_of", [odd, leaf, tied, channels_last])
def test_models_of_all_kinds(method, model_of):
    """Trainable parameters mix; the others stay as they are."""
    flags = [p.requires_grad for p in model_of(0).parameters() for _ in range(p.numel())]
    graph = graph_of(method)
    got = LoopbackWorld(RANKS).run(run, method, graph, sgd, 4, model_of=model_of)
    expected = by_matrix(
        method, graph, sgd, 4, model_of=model_of, travels=lambda step: torch.tensor(flags)
    )
    assert_all_close(got, expected)


# what users do around step()


@every_method
@pytest.mark.parametrize("every", [1, 5])
def test_accumulation_is_one_step_of_the_summed_gradient(method, every):
    """J backward passes with one step average in that step, told J or not."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped(method, model, num_steps_per_communication=every)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(5):
                (square_loss(model, batch(bf.rank(), step)[part : part + 1]) / 5).backward()
            optimizer.step()
        return vector(model), optimizer.round

    expected = by_matrix(method, graph_of(method), sgd, 4, loss_of=rowwise_loss)
    got = LoopbackWorld(RANKS).run(case)
    assert_all_close([v for v, _ in got], expected)
    assert [count for _, count in got] == [4] * RANKS


@every_method
def test_gradients_set_by_hand(method):
    """Where no forward and no backward was seen, step() does all of it."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped(method, model)
        for step in range(4):
            weights = dict(model.named_parameters())
            out = torch.func.functional_call(model.eval(), weights, (batch(bf.rank(), step),))
            loss = (out - 1.0).square().mean()
            gradients = torch.autograd.grad(loss, weights.values())
            for parameter, gradient in zip(weights.values(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        return vector(model)

    got = LoopbackWorld(RANKS).run(case)
    assert_all_close(got, by_matrix(method, graph_of(method), sgd, 4))


@every_method
def test_evaluation_between_steps_publishes_nothing(method):
    """Neither eval mode, nor no_grad, nor inference_mode starts a round."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped(method, model)
        for step in range(4):
            data, sent = batch(bf.rank(), step), optimizer.bytes_sent
            if bf.rank() % 2:
                model.eval()(data)
                with torch.no_grad():
                    model.train()(data)
                with torch.inference_mode():
                    model(data)
            assert optimizer.bytes_sent == sent
            train(model.train(), optimizer, [step])
        return vector(model)

    got = LoopbackWorld(RANKS).run(case)
    assert_all_close(got, by_matrix(method, graph_of(method), sgd, 4))


@pytest.mark.parametrize("method", MIXED_BY_ROWS)
@pytest.mark.parametrize("every", [1, 2])
def test_a_skipped_step_ends_its_round(method, every):
    """A rank that skips a step after the forward pass stays in time with those that meet it."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped(method, model, num_steps_per_communication=every)
        for step in range(4):
            optimizer.zero_grad()
            loss = square_loss(model, batch(bf.rank(), step))
            if bf.rank() == 2 and step == 1:
                continue
            loss.backward()
            optimizer.step()
        return optimizer.round

    assert LoopbackWorld(RANKS).run(case) == [4 // every] * RANKS


@every_method
def test_clipping_before_the_step(method):
    """Gradients are clipped before they are applied."""
    limit = 0.05

    class Clipped(torch.optim.SGD):
        def step(self, closure=None):
            parameters = [p for group in self.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, limit)
            return super().step(closure)

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped(method, model)
        for step in range(4):
            optimizer.zero_grad()
            square_loss(model, batch(bf.rank(), step)).backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), limit) > limit
            optimizer.step()
        return vector(model)

    make = partial(Clipped, lr=0.1, momentum=0.9)
    assert_all_close(LoopbackWorld(RANKS).run(case), by_matrix(method, graph_of(method), make, 4))


def test_closures_of_push_sum_are_evaluated_at_the_model():
    """A line search looks at z, however often, though the optimizer moves x."""

    def case():
        model = mlp(bf.rank())
        make = partial(torch.optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe")
        optimizer = wrapped("push_sum", model, make)
        seen = []

        def closure():
            optimizer.zero_grad()
            seen.append(vector(model))
            loss = square_loss(model, batch(bf.rank(), 0))
            loss.backward()
            return loss

        for _ in range(2):
            before = vector(model)
            start = len(seen)
            optimizer.step(closure)
            torch.testing.assert_close(seen[start], before, rtol=1e-14, atol=0)
        biases = optimizer._averager.windows.push_sum_weights()
        return len(seen), biases[0]

    got = LoopbackWorld(RANKS).run(case)
    assert min(count for count, _ in got) > 2
    assert {p for _, p in got} != {1.0}, "p is 1 everywhere: the test shows nothing"


def test_push_sum_gives_the_model_back_when_the_update_fails():
    """An exception in a closure, or in the optimizer, leaves z in the parameters."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped("push_sum", model)
        train(model, optimizer, range(3))
        before = vector(model)

        def closure():
            raise RuntimeError("the data is gone")

        with pytest.raises(RuntimeError, match="the data is gone"):
            optimizer.step(closure)
        torch.testing.assert_close(vector(model), before, rtol=1e-14, atol=0)

    LoopbackWorld(RANKS).run(case)


# groups, freezing, copies


@every_method
@pytest.mark.parametrize("through", ["wrapper", "plain"])
def test_parameter_groups_may_be_added(method, through):
    """New buckets, new windows; push-sum goes on from z with p = 1."""

    def case():
        model = mlp(bf.rank())
        plain = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.05}], lr=0.1)
        optimizer = bf.DistributedOptimizer(plain, model, method, topology=GRAPH, broadcast=False)
        optimizer.force_barrier = True
        train(model, optimizer, range(2))
        {"wrapper": optimizer, "plain": plain}[through].add_param_group(
            {"params": model[2].parameters(), "weight_decay": 0.1}
        )
        for parameter in model.parameters():
            parameter.grad = None
        return train(model, optimizer, range(2, 4))

    early = vector(mlp(0)[0]).numel()

    def in_a_group(step):
        return torch.arange(vector(mlp(0)).numel()) < (early if step < 2 else 1000)

    got = LoopbackWorld(RANKS).run(case)
    assert_all_close(got, by_matrix(method, GRAPH, Late, 4, travels=in_a_group))


@every_method
def test_freezing_replacing_and_casting(method):
    """What users do to parameters between steps is followed on all ranks alike."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped(method, model)
        train(model, optimizer, range(2))
        model[0].requires_grad_(False)
        for parameter in model[0].parameters():
            parameter.grad = None
        kept = vector(model[0])
        train(model, optimizer, range(2, 4))
        assert torch.equal(kept, vector(model[0]))
        model[0].requires_grad_(True)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        train(model, optimizer, range(4, 6))
        model.float()
        optimizer.state.clear()
        for parameter in model.parameters():
            parameter.grad = None
        optimizer.zero_grad()
        square_loss(model, batch(bf.rank(), 0).float()).backward()
        optimizer.step()
        return optimizer.round, bool(vector(model).isfinite().all())

    assert LoopbackWorld(RANKS).run(case) == [(7, True)] * RANKS


@every_method
def test_wrapping_anew_takes_over(method):
    """A second wrapper has windows of its own; the first goes on without hooks."""

    def case():
        model = mlp(bf.rank())
        old = wrapped(method, model)
        optimizer = wrapped(method, model)
        result = train(model, optimizer, range(4))
        assert (old.round, optimizer.round) == (0, 4)
        train(model, old, [0])
        assert old.round == 1
        return result

    got = LoopbackWorld(RANKS).run(case)
    assert_all_close(got, by_matrix(method, graph_of(method), sgd, 4))


@every_method
@pytest.mark.parametrize("options", [{}, {"num_steps_per_communication": 3}])
def test_one_rank_is_plain_torch(method, options):
    """At n = 1 there are no windows, and the steps are torch's, bit by bit."""

    def plain():
        model = mlp(0)
        optimizer = sgd(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            square_loss(model, batch(0, step)).backward()
            optimizer.step()
        return vector(model)

    def case():
        model = mlp(0)
        optimizer = wrapped(method, model, topology=None, max_staleness=0, **options)
        train(model, optimizer, range(4))
        assert optimizer.staleness() == {}
        assert bf.get_current_created_window_names() == []
        assert not model._forward_pre_hooks
        optimizer.unregister_windows()
        return vector(model)

    assert torch.equal(LoopbackWorld(1).run(case)[0], plain())


# weights by hand


def scalar():
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, bf.rank())
    return model


def one_round(optimizer, model):
    optimizer.zero_grad()
    model(torch.zeros(1, 1, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return model.weight.item()


def by_hand(method, fields):
    """Two rounds with weights by hand on the ring, and one with the topology's again."""
    model = scalar()
    still = partial(torch.optim.SGD, lr=0.0)
    optimizer = wrapped(method, model, still, topology=topology.ring(4))
    values = []
    for name, value in fields(bf.rank()).items():
        setattr(optimizer, name, value)
    values.append(one_round(optimizer, model))
    for name in fields(bf.rank()):
        setattr(optimizer, name, None)
    nn.init.constant_(model.weight, bf.rank())
    values.append(one_round(optimizer, model))
    return values


@pytest.mark.parametrize(
    ("method", "fields", "row"),
    [
        ("win_put", lambda r: {"dst_weights": {(r + 1) % 4: 2.0}}, [1 / 3, 2 / 3, 1 / 3]),
        ("win_put", lambda r: {"dst_weights": [(r + 1) % 4]}, [1 / 3, 1 / 3, 1 / 3]),
        (
            "win_put",
            lambda r: {"self_weight": 0.25, "src_weights": {(r - 1) % 4: 0.75}},
            [0.25, 0.75, 0.0],
        ),
        ("pull_get", lambda r: {"src_weights": {(r - 1) % 4: 0.75}}, [0.25, 0.75, 0.0]),
        (
            "pull_get",
            lambda r: {"self_weight": 0.5, "src_weights": {(r - 1) % 4: 0.25}},
            [0.5, 0.25, 0.0],
        ),
        ("push_sum", lambda r: {"dst_weights": [(r + 1) % 4]}, [0.5, 0.5, 0.0]),
        ("push_sum", lambda r: {"dst_weights": {(r + 1) % 4: 0.25}}, [0.75, 0.25, 0.0]),
        (
            "push_sum",
            lambda r: {"self_weight": 0.25, "dst_weights": [(r + 1) % 4]},
            [0.25, 0.75, 0.0],
        ),
        ("push_sum", lambda r: {"self_weight": 0.5}, [0.5, 0.25, 0.25]),
    ],
)
def test_weights_set_by_hand(method, fields, row):
    """Own weight, weight of the rank before, weight of the one after; then the ring's thirds.

    A put that was not made this time leaves what was put before, or at first nothing: then its
    weight is the own tensor's.
    """
    values = LoopbackWorld(RANKS).run(by_hand, method, fields)
    own, before, after = row
    for rank, (first, later) in enumerate(values):
        heard = method != "win_put" or "dst_weights" not in fields(0)
        x = [rank, (rank - 1) % 4, (rank + 1) % 4 if heard else rank]
        assert first == pytest.approx(own * x[0] + before * x[1] + after * x[2])
        assert later == pytest.approx((rank + (rank - 1) % 4 + (rank + 1) % 4) / 3)


@pytest.mark.parametrize(
    ("method", "fields", "words"),
    [
        ("win_put", {"self_weight": 0.5}, "expected none, the second, or both; got self_weight"),
        ("win_put", {"dst_weights": [2]}, "argument dst_weights: rank 2 is not an out-neighbour"),
        ("pull_get", {"src_weights": {2: 1.0}}, "src_weights: rank 2 is not an in-neighbour"),
        ("push_sum", {"dst_weights": {1: 0.7, 3: 0.7}}, "expected a share above 0 to keep, .*-0.4"),
        ("push_sum", {"self_weight": 0.5, "dst_weights": {1: 0.7}}, "which sum to 1 with it"),
        ("push_sum", {"self_weight": 0.0}, "expected a share above 0 to keep"),
        ("win_put", {"dst_weights": {1: float("nan")}}, r"dst_weights\[1\]: expected a finite num"),
    ],
)
def test_weights_that_cannot_be_are_refused(method, fields, words):
    """On the rank that has set them, before anything is sent."""

    def case():
        model = scalar()
        optimizer = bf.DistributedOptimizer(
            sgd(model.parameters()), model, method, topology=topology.ring(4)
        )
        if bf.rank() == 0:
            for name, value in fields.items():
                setattr(optimizer, name, value)
            with pytest.raises(bf.ArgumentError, match=words):
                optimizer.step()
            assert optimizer.bytes_sent == 0

    LoopbackWorld(RANKS).run(case)


SHARE = (24 + 8 + 24 + 8) * 8  # bytes of the model, each parameter at a multiple of 64 bytes


@pytest.mark.parametrize(
    ("method", "graph", "expected"),
    [
        ("win_put", topology.ring(4), 2 * SHARE),
        ("pull_get", topology.ring(4), 2 * SHARE),
        ("push_sum", topology.exponential_two(4), 2 * SHARE),
        ("async_model_average", topology.one_peer_exponential(4), SHARE),
    ],
)
def test_bytes_are_counted(method, graph, expected):
    """A bucket counts once for each neighbour it is published to, or got from."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped(method, model, topology=graph)
        train(model, optimizer, range(3))
        return optimizer.bytes_sent

    assert LoopbackWorld(RANKS).run(case) == [3 * expected] * RANKS


def test_numpy_agrees_with_the_reference():
    """The reference above, with plain numbers: two rounds of SGP on three ranks, by hand."""
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    a = shares(topology.as_schedule(graph), 0).numpy()
    np.testing.assert_allclose(a, [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]])
    assert np.allclose(a.sum(axis=0), 1)
