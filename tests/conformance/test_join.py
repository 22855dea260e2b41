"""``join``: unequal numbers of batches, by a reference in which weights of those done move.

The reference keeps all ranks' parameters in one matrix; what the ranks compute must equal its rows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import asyncddp as bf
import topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.ops.joining import narrowed
from asyncddp.ops.mixing import Mixing
from tests.support import LoopbackWorld, RanksFailedError, on

LR, MOMENTUM = 0.05, 0.9
BATCHES = (3, 5, 8, 13)
FAMILIES = {
    "ring": topology.ring,
    "exponential_two": topology.exponential_two,
    "one_peer": topology.one_peer_exponential,
}
MIXING = ("adapt_with_combine", "adapt_then_combine")
ONE_SIDED = tuple(name for name in ALGORITHMS if ALGORITHMS[name].how[0].one_sided)
four_ranks = on("loopback-4", "mpi-4", "shared_memory-4")


# the reference


def batch(rank, step):
    """Inputs and targets, other ones for every rank and step."""
    random = np.random.default_rng([rank, step])
    return random.standard_normal((5, 6)), random.standard_normal(5) + rank


def starts(n, alike):
    """Row r: the parameters from which rank r starts."""
    ranks = [0] * n if alike else range(n)
    return np.stack([np.random.default_rng([77, rank]).standard_normal(6) for rank in ranks])


def moved(w, training):
    """W', in which those who train keep what they would give to the others."""
    result = np.eye(len(w))
    for i in training:
        result[i] = 0.0
        for j in range(len(w)):
            result[i, j if j in training else i] += w[i, j]
    return result


def mean_of(n, training):
    """The matrix that averages over those who train."""
    result = np.eye(n)
    for i in training:
        result[i] = [float(j in training) / len(training) for j in range(n)]
    return result


class Reference:
    """SGD with momentum of all ranks, one after the other."""

    def __init__(self, method, graph, n, every=1):
        self.method, self.n, self.every = method, n, every
        self.schedule = None if graph is None else topology.as_schedule(graph)
        self.x = starts(n, method == "gradient_allreduce")
        self.momentum = np.zeros_like(self.x)
        self.rounds = self.carried = 0

    def matrix(self, training):
        if self.schedule is None:
            return mean_of(self.n, training)
        return moved(topology.mixing_matrix(self.schedule, self.rounds), training)

    def epoch(self, batches):
        for step in range(max(batches)):
            training = [rank for rank in range(self.n) if step < batches[rank]]
            gradients = np.zeros_like(self.x)
            for rank in training:
                a, y = batch(rank, step)
                gradients[rank] = 2 / len(y) * a.T @ (a @ self.x[rank] - y)
            averages = (self.carried + step + 1) % self.every == 0
            self.step(training, gradients, averages)
        self.carried = (self.carried + max(batches)) % self.every
        if self.method == "gradient_allreduce" and max(batches):
            last = int(np.argmax(batches))
            self.x[:], self.momentum[:] = self.x[last], self.momentum[last]
        return self

    def step(self, training, gradients, averages):
        w = self.matrix(training) if averages else np.eye(self.n)
        self.rounds += averages
        if self.method == "gradient_allreduce":
            gradients = w @ gradients
        self.momentum[training] = MOMENTUM * self.momentum[training] + gradients[training]
        if self.method == "adapt_with_combine":
            self.x = w @ self.x
        self.x[training] -= LR * self.momentum[training]
        if self.method == "adapt_then_combine":
            self.x = w @ self.x


# the same with the library


class Two(torch.nn.Module):
    """A linear function with its weights in two parameters, so that there can be two buckets."""

    def __init__(self, values):
        super().__init__()
        self.first = torch.nn.Parameter(torch.from_numpy(values[:2].copy()))
        self.second = torch.nn.Parameter(torch.from_numpy(values[2:].copy()))

    def forward(self, a):
        return a[:, :2] @ self.first + a[:, 2:] @ self.second

    def vector(self):
        return torch.cat([self.first.detach(), self.second.detach()]).numpy().copy()


def made(method, **options):
    """This rank's model and its distributed optimizer, with one bucket for each parameter."""
    model = Two(starts(bf.size(), method == "gradient_allreduce")[bf.rank()])
    plain = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    return model, bf.DistributedOptimizer(plain, model, method, bucket_size_in_mb=1e-6, **options)


def loss_of(model, step):
    a, y = map(torch.from_numpy, batch(bf.rank(), step))
    return (model(a) - y).square().mean()


def train_epoch(model, optimizer, batches):
    for step in range(batches):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def joined(method, epochs, broadcast_last=False, **options):
    """Epochs of unequal numbers of batches, each in a block of its own."""
    model, optimizer = made(method, **options)
    for batches in epochs:
        with bf.join(optimizer, broadcast_last=broadcast_last):
            train_epoch(model, optimizer, batches[bf.rank()])
    return model.vector(), optimizer.counters


def check(got, reference):
    """Parameters of all ranks, and the counters, which are equal everywhere."""
    np.testing.assert_allclose(np.stack([x for x, _ in got]), reference.x, rtol=1e-12, atol=1e-12)
    expected = {"round": reference.rounds, "passes": reference.carried}
    assert [counters for _, counters in got] == [expected] * len(got)


@four_ranks
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", MIXING)
def test_neighbours_take_over_the_weights_of_those_who_are_done(world, method, family):
    """X+ = W' X − U, or W' (X − U); two epochs, in which ranks are done in opposite orders."""
    graph = FAMILIES[family](4)
    epochs = [BATCHES, BATCHES[::-1]]
    got = world.run(joined, method, epochs, topology=graph)
    reference = Reference(method, graph, 4)
    for batches in epochs:
        reference.epoch(batches)
    check(got, reference)


@four_ranks
@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
def test_global_averages_are_over_those_who_train(world, method):
    """Divided by their number; with gradients, the model of the last is everybody's at the end."""
    options = {} if method == "gradient_allreduce" else {"communication": "allreduce"}
    epochs = [BATCHES, BATCHES[::-1]]
    got = world.run(joined, method, epochs, **options)
    reference = Reference(method, None, 4)
    for batches in epochs:
        reference.epoch(batches)
    check(got, reference)
    if method == "gradient_allreduce":
        assert all(np.array_equal(got[0][0], x) for x, _ in got)


@four_ranks
@pytest.mark.parametrize("method", MIXING)
def test_local_steps_between_averagings(world, method):
    """Averaging in every third step; the count of passes goes on as on the ranks that were last."""
    graph = topology.one_peer_exponential(4)
    epochs = [(2, 7, 4, 8), (5, 1, 9, 0)]
    got = world.run(joined, method, epochs, topology=graph, num_steps_per_communication=3)
    reference = Reference(method, graph, 4, every=3)
    for batches in epochs:
        reference.epoch(batches)
    check(got, reference)


def without(method, batches, **options):
    model, optimizer = made(method, **options)
    train_epoch(model, optimizer, batches)
    return model.vector(), optimizer.counters


@four_ranks
@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
def test_where_all_are_done_at_once_nothing_changes(world, method):
    """Equal numbers of batches: bit for bit what training without the block gives."""
    options = {} if method == "gradient_allreduce" else {"num_steps_per_communication": 2}
    got = world.run(joined, method, [(5,) * 4], **options)
    plain = world.run(without, method, 5, **options)
    assert all(np.array_equal(one, other) for (one, _), (other, _) in zip(got, plain, strict=True))
    assert [c for _, c in got] == [c for _, c in plain]


@four_ranks
@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
@pytest.mark.parametrize("batches", [(0, 4, 4, 2), (0, 0, 6, 0), (0, 0, 0, 0)])
def test_ranks_without_a_single_batch(world, method, batches):
    """None, all but one, all: whoever has batches trains on them."""
    graph = None if method == "gradient_allreduce" else topology.ring(4)
    got = world.run(joined, method, [batches], topology=graph)
    check(got, Reference(method, graph, 4).epoch(batches))


def with_large_buckets(method):
    """No gradient, a value for each rank: 1.5 MB that travel in pieces; two epochs."""
    model = torch.nn.Linear(400, 500, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 2.0 ** bf.rank())
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    graph = topology.one_peer_exponential(bf.size())
    optimizer = bf.DistributedOptimizer(plain, model, method, topology=graph)
    for batches in ((4, 6, 1, 5), (5, 1, 6, 4)):
        with bf.join(optimizer):
            for _ in range(batches[bf.rank()]):
                model(torch.ones(1, 400, dtype=torch.float64)).sum().backward()
                optimizer.step()
    return sorted(set(model.weight.detach().view(-1).tolist()))


@four_ranks
@pytest.mark.parametrize("method", MIXING)
def test_large_buckets(world, method):
    """The recursion X+ = W' X, exactly: the weights are halves."""
    x = 2.0 ** np.arange(4)
    rounds = 0
    for batches in ((4, 6, 1, 5), (5, 1, 6, 4)):
        for step in range(max(batches)):
            w = topology.mixing_matrix(topology.one_peer_exponential(4), rounds)
            x = moved(w, [rank for rank in range(4) if step < batches[rank]]) @ x
            rounds += 1
    assert world.run(with_large_buckets, method) == [[value] for value in x]


# what else users do


@pytest.mark.parametrize("method", MIXING)
def test_the_average_of_the_last(method):
    """broadcast_last: the mean over the ranks that trained last, on all ranks, bit for bit."""
    batches = (2, 5, 5, 3)
    got = LoopbackWorld(4).run(
        joined, method, [batches], broadcast_last=True, topology=topology.ring(4)
    )
    reference = Reference(method, topology.ring(4), 4).epoch(batches)
    reference.x[:] = reference.x[1:3].mean(axis=0)
    check(got, reference)
    assert all(np.array_equal(got[0][0], x) for x, _ in got)


def by_hand(batches):
    """The ring's weights, given by hand in each round."""
    model, optimizer = made("adapt_then_combine", topology=topology.complete(bf.size()))
    near = [(bf.rank() + 1) % 4, (bf.rank() - 1) % 4]
    optimizer.self_weight, optimizer.src_weights = 0.5, dict.fromkeys(near, 0.25)
    optimizer.dst_weights = near
    with bf.join(optimizer):
        train_epoch(model, optimizer, batches[bf.rank()])
    return model.vector(), optimizer.counters


def test_weights_set_by_hand_move_too():
    """The rule is the same, whoever gave the weights."""
    ring = topology.ring(4)
    for i, j, edge in ring.edges(data=True):
        edge["weight"] = 0.5 if i == j else 0.25
    reference = Reference("adapt_then_combine", ring, 4).epoch(BATCHES)
    check(LoopbackWorld(4).run(by_hand, BATCHES), reference)


def test_tensors_scaled_by_their_senders_are_refused():
    """Nobody knows which share of a rank that is done to take over."""

    def case():
        model, optimizer = made("adapt_then_combine")
        other = 1 - bf.rank()
        optimizer.self_weight, optimizer.src_weights = 0.5, {other: 1.0}
        optimizer.dst_weights = {other: 0.5}
        with bf.join(optimizer):
            train_epoch(model, optimizer, 2 * bf.rank())

    words = r"join: dst_weights set by hand: expected a factor of 1 .* got \{0: 0.5\}"
    with pytest.raises(RanksFailedError, match=words):
        LoopbackWorld(2).run(case)


def test_an_update_in_backward():
    """Buckets that leave while the backward pass goes on."""
    graph = topology.one_peer_exponential(4)
    options = {"topology": graph, "update_in_backward": True}
    got = LoopbackWorld(4).run(joined, "adapt_then_combine", [BATCHES], **options)
    check(got, Reference("adapt_then_combine", graph, 4).epoch(BATCHES))


@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
def test_closures(method):
    """step(closure), whose loss is averaged over those who train where gradients are."""

    def case():
        model, optimizer = made(method)
        losses = []
        with bf.join(optimizer):
            for step in range(BATCHES[bf.rank()]):

                def closure(step=step):
                    optimizer.zero_grad()
                    loss = loss_of(model, step)
                    loss.backward()
                    return loss

                losses.append(float(optimizer.step(closure).detach()))
        return (model.vector(), optimizer.counters), losses

    graph = None if method == "gradient_allreduce" else topology.exponential_two(4)
    got = LoopbackWorld(4).run(case)
    check([one for one, _ in got], Reference(method, graph, 4).epoch(BATCHES))
    if graph is None:
        for rank, (_, losses) in enumerate(got):
            assert losses == got[3][1][: BATCHES[rank]]


def test_a_forward_pass_that_no_step_follows():
    """A last look in training mode begins a round, which is taken at the end of the block."""

    def case():
        model, optimizer = made("adapt_with_combine", topology=topology.ring(4))
        with bf.join(optimizer):
            train_epoch(model, optimizer, 1 + bf.rank())
            loss_of(model, 0)
        with bf.join(optimizer):
            train_epoch(model, optimizer, 4 - bf.rank())
        return optimizer.counters

    assert LoopbackWorld(4).run(case) == [{"round": 9, "passes": 0}] * 4


def test_a_backward_pass_that_no_step_follows():
    """The same where the update is made in backward."""

    def case():
        model, optimizer = made(
            "adapt_then_combine", topology=topology.ring(4), update_in_backward=True
        )
        for batches in (1 + bf.rank(), 4 - bf.rank()):
            with bf.join(optimizer):
                train_epoch(model, optimizer, batches)
                optimizer.zero_grad()
                loss_of(model, 0).backward()
        return optimizer.counters

    assert LoopbackWorld(4).run(case) == [{"round": 10, "passes": 0}] * 4


def two_optimizers(batches):
    """Two models in one loop, one of which averages in every second step."""
    first, one = made("adapt_with_combine", topology=topology.ring(bf.size()))
    second, other = made("gradient_allreduce")
    with bf.join(one, other):
        for step in range(batches[bf.rank()]):
            for model, optimizer in ((first, one), (second, other)):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
    return (first.vector(), one.counters), (second.vector(), other.counters)


@four_ranks
def test_several_optimizers(world):
    """A rank that is done knows whose round it is."""
    got = world.run(two_optimizers, BATCHES)
    ring = topology.ring(4)
    check([one for one, _ in got], Reference("adapt_with_combine", ring, 4).epoch(BATCHES))
    check([other for _, other in got], Reference("gradient_allreduce", None, 4).epoch(BATCHES))


@pytest.mark.parametrize(
    ("method", "options"),
    [("adapt_then_combine", {"communication": "empty"}), *((name, {}) for name in ONE_SIDED)],
    ids=["empty", *ONE_SIDED],
)
def test_where_nobody_waits_they_only_end_together(method, options):
    """``empty``, and methods on windows: none is held up, and none leaves before the last."""
    ends = []

    def case():
        model, optimizer = made(method, **options)
        with bf.join(optimizer):
            train_epoch(model, optimizer, 3 * bf.rank())
            ends.append("last step")
        ends.append("out")
        with bf.join(optimizer, broadcast_last=True):
            train_epoch(model, optimizer, 4 - bf.rank())
        return optimizer.round, model.vector()

    got = LoopbackWorld(3).run(case)
    assert ends == ["last step"] * 3 + ["out"] * 3
    assert [count for count, _ in got] == ([0] * 3 if options else [4, 6, 8])
    assert all(np.array_equal(got[0][1], x) for _, x in got)


@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
def test_one_rank(method):
    """n = 1: what plain training gives; no message, no hook."""

    def case():
        model, optimizer = made(method)
        with bf.join(optimizer, broadcast_last=True):
            assert not optimizer._optimizer_step_post_hooks
            train_epoch(model, optimizer, 4)
        plain = Two(starts(1, alike=True)[0])
        train_epoch(plain, torch.optim.SGD(plain.parameters(), lr=LR, momentum=MOMENTUM), 4)
        return np.array_equal(model.vector(), plain.vector())

    assert LoopbackWorld(1).run(case) == [True]


def test_outside_of_the_block_nothing_is_left_of_it():
    """Neither hook nor roll, after its end or an exception, so that another can follow."""

    def case():
        model, optimizer = made("adapt_then_combine")

        def broken_off():
            with bf.join(optimizer):
                train_epoch(model, optimizer, 2)
                raise KeyError("the data is gone")

        with pytest.raises(KeyError, match="the data is gone"):
            broken_off()
        seen = [optimizer._mixer.attendance, dict(optimizer._optimizer_step_post_hooks)]
        with bf.join(optimizer):
            train_epoch(model, optimizer, 1 + bf.rank())
        seen += [optimizer._mixer.attendance, dict(optimizer._optimizer_step_post_hooks)]
        return seen, optimizer.round

    assert LoopbackWorld(3).run(case) == [([None, {}, None, {}], 5)] * 3


# mistakes


def test_a_rank_that_raises_holds_nobody_up():
    """The others are told by name that it is gone; its own error is the first."""

    def case():
        model, optimizer = made("adapt_with_combine")
        with bf.join(optimizer):
            train_epoch(model, optimizer, 1 + bf.rank())
            if bf.rank() == 1:
                raise ValueError("the data is gone")

    outcomes = LoopbackWorld(3).outcomes(case)
    assert outcomes[1].error == "ValueError"
    for rank in (0, 2):
        assert "PeerError" in outcomes[rank].bases
        told = outcomes[rank].message
        assert "rank 1 has left (it raised ValueError: the data is gone)" in told


def test_optimizers_used_in_another_order():
    """All ranks say which two ranks are about to do what."""

    def case():
        pairs = [made("adapt_then_combine"), made("adapt_then_combine")]
        with bf.join(*(optimizer for _, optimizer in pairs)):
            for model, optimizer in pairs[:: 1 - 2 * (bf.rank() == 2)]:
                train_epoch(model, optimizer, 1)

    words = (
        "rank 0 is about to begin a round of DistributedOptimizer0, but rank 2 to begin a round of "
        "DistributedOptimizer1; use the optimizers in the same order"
    )
    for outcome in LoopbackWorld(3).outcomes(case):
        assert outcome.error == "MismatchError"
        assert words in outcome.message


def test_another_collective_in_the_block():
    """A rank that is done cannot know of it: told to both, with the names."""

    def case():
        model, optimizer = made("adapt_then_combine")
        with bf.join(optimizer):
            train_epoch(model, optimizer, 1 + bf.rank())
            if bf.rank() == 1:
                bf.consensus_distance(model)

    for outcome in LoopbackWorld(2).outcomes(case):
        assert outcome.error == "MismatchError"
        assert "'join of DistributedOptimizer0'" in outcome.message
        assert "allreduce(average)" in outcome.message


def test_a_loss_that_is_no_number():
    """Ranks that are done can only stand in for one number."""

    def case():
        model, optimizer = made("gradient_allreduce")

        def closure():
            loss_of(model, 0).backward()
            return torch.zeros(2)

        words = r"join: expected a closure that gives one number as its loss, .* shape \(2,\)"
        with bf.join(optimizer), pytest.raises(bf.ArgumentError, match=words):
            optimizer.step(closure)

    LoopbackWorld(2).run(case)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ("nothing", bf.ArgumentError, "join: expected the distributed optimizers .* got none"),
        ("plain", bf.ArgumentError, "join: expected a DistributedOptimizer, got SGD; wrap"),
        ("twice", bf.UsageError, "join: DistributedOptimizer0 is in a join block already"),
        ("nested", bf.UsageError, "join: DistributedOptimizer0 is in a join block already"),
        (
            "hierarchical",
            bf.ArgumentError,
            "join: hierarchical_neighbor_allreduce needs all ranks in every round; .* such as "
            "neighbor_allreduce or allreduce",
        ),
        (
            "in backward",
            bf.ArgumentError,
            "join: with update_in_backward=True and a global communication, .* expected "
            "update_in_backward=False or communication='neighbor_allreduce'",
        ),
        (
            "barrier",
            bf.ArgumentError,
            "join: with force_barrier or max_staleness DistributedOptimizer0 waits for neighbours, "
            "and so for one that is done; expected force_barrier=False and max_staleness=None",
        ),
        ("staleness", bf.ArgumentError, "join: with force_barrier or max_staleness"),
    ],
)
def test_what_cannot_be_joined(wrong, error, words):
    """At the door, on every rank, before anything is sent."""

    def given(optimizer):
        if wrong == "plain":
            return [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)]
        return {"nothing": [], "twice": [optimizer, optimizer]}.get(wrong, [optimizer])

    def case():
        options = {}
        if wrong == "hierarchical":
            bf.set_machine_topology(topology.complete(1))
            options = {"communication": "hierarchical_neighbor_allreduce"}
        if wrong == "in backward":
            options = {"communication": "allreduce", "update_in_backward": True}
        if wrong == "staleness":
            options = {"max_staleness": 3}
        windows = wrong in ("barrier", "staleness")
        _, optimizer = made("win_put" if windows else "adapt_then_combine", **options)
        if wrong == "barrier":
            optimizer.force_barrier = True
        if wrong == "nested":
            with bf.join(optimizer), pytest.raises(error, match=words), bf.join(optimizer):
                pass
        else:
            with pytest.raises(error, match=words), bf.join(*given(optimizer)):
                pass

    LoopbackWorld(2).run(case)


# weights that move


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [2, 5, 8])
def test_rows_stay_stochastic(family, n):
    """Rows of W' sum to one for every set of ranks; columns do where W is symmetric."""
    schedule = topology.as_schedule(FAMILIES[family](n))
    random = np.random.default_rng(n)
    for number in range(3):
        training = sorted(random.choice(n, size=1 + number % n, replace=False).tolist())
        w = topology.mixing_matrix(schedule, number)
        found = np.eye(n)
        for i in training:
            near = schedule.neighbors(i, number)
            row = narrowed(
                Mixing(near.self_weight, near.src_weights, dict.fromkeys(near.dst_ranks, 1.0)),
                training,
            )
            assert set(row.sources) | set(row.targets) <= set(training)
            found[i] = 0.0
            found[i, [i, *row.sources]] = [row.self_weight, *map(row.src_weights.get, row.sources)]
        np.testing.assert_allclose(found, moved(w, training), rtol=0, atol=1e-15)
        np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=0, atol=1e-14)
        if np.array_equal(w, w.T):
            np.testing.assert_allclose(found.sum(axis=0), 1.0, rtol=0, atol=1e-14)
