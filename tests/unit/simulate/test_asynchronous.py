"""Ranks at their own pace in one process: event loops by hand, stragglers, delays, departures."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch

from asyncddp import simulate, topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.errors import ArgumentError
from asyncddp.topology import Link
from tests.support.least_squares import LeastSquares

pytestmark = pytest.mark.training

RANKS, LR = 4, 0.1
RING = topology.ring(RANKS)
PROBLEM = simulate.least_squares(RANKS)
ONE_SIDED = [name for name in ALGORITHMS if ALGORITHMS[name].how[0].one_sided]
OPTIONS = {
    "decoupled_diloco": {
        "communication_interval": 1,
        "fragments": 1,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
    }
}
"""Options with which a method averages in each step, as the others do."""
NBYTES = 16 * 8  # of 10 parameters in float64, padded to 64 bytes
AT_ONCE = Link(0.0, 1e300)
EQUAL = {"asynchronous": True, "links": AT_ONCE, "step_seconds": 1.0}


def sgd(parameters):
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=LR)


def train(algorithm, steps=12, topology=RING, **settings):
    """Train LS(4) asynchronously."""
    scenario = simulate.Scenario(**{**EQUAL, **settings.pop("scenario", {})})
    settings = {
        "topology": topology,
        "scenario": scenario,
        **OPTIONS.get(algorithm, {}),
        **settings,
    }
    return simulate.train(PROBLEM, sgd, algorithm, steps=steps, **settings)


def weights(run):
    """The models in the end, ``(n, 10)``."""
    return run.parameters["weight"][:, 0].numpy()


class Events:
    """An event loop by hand: steps end at multiples of each rank's seconds, ties in any order."""

    start = 0.0

    def __init__(self, seconds, total):
        self.x = np.zeros((RANKS, 10))
        self.heap, self.count, self.total = [], 0, total
        self.seconds, self.steps = seconds, [0] * RANKS
        self.gradients = LeastSquares(RANKS).gradients

    def at(self, time, event, *arguments):
        heapq.heappush(self.heap, (time, self.count, event, arguments))
        self.count += 1

    def run(self):
        for rank in range(RANKS):
            self.at(self.start, self.begin, rank)
        while sum(self.steps) < self.total:
            self.now, _, event, arguments = heapq.heappop(self.heap)
            event(*arguments)
        return self.x

    def begin(self, rank):
        self.publish(rank)
        self.at(self.now + self.seconds[rank], self.end, rank)

    def end(self, rank):
        gradient = self.gradients(self.x)[rank]  # of what the rank has had since the beginning
        self.mix_and_update(rank, LR * gradient)
        self.steps[rank] += 1
        self.begin(rank)


class Puts(Events):
    """win_put and async_model_average: the newest of each neighbour; the own one at first."""

    delay = 0.0

    def __init__(self, *how):
        super().__init__(*how)
        self.heard, self.own = {}, {}

    def publish(self, rank):
        self.own[rank] = self.x[rank].copy()
        for peer in RING[rank]:
            if peer != rank:
                self.at(self.now + self.delay, self.arrive, rank, peer, self.x[rank].copy())

    def arrive(self, source, target, x):
        self.heard[source, target] = x

    def mix_and_update(self, rank, update):
        peers = [peer for peer in RING[rank] if peer != rank]
        near = [self.heard.get((peer, rank), self.own[rank]) for peer in peers]
        self.x[rank] = (self.own[rank] + sum(near)) / 3 - update


PACES = {"equal": [1.0] * 4, "straggler": [1.0, 1.0, 1.0, 5.0], "all differ": [1.0, 1.3, 0.7, 2.1]}
every_pace = pytest.mark.parametrize("pace", PACES)


def slowdown(pace):
    return {"slowdown": dict(enumerate(PACES[pace]))}


class PutsSentAgain(Puts):
    """Puts that are sent again until they arrive, in order; draws are those of the scenario."""

    def __init__(self, *how, loss, again):
        super().__init__(*how)
        self.random, self.loss, self.again = np.random.default_rng([0, RANKS]), loss, again
        self.last, self.sent = {}, 0

    def publish(self, rank):
        self.own[rank] = self.x[rank].copy()
        for peer in sorted(set(RING[rank]) - {rank}):
            arrival = self.now + self.delay
            self.sent += 1
            while self.random.random() < self.loss:
                arrival += self.again
                self.sent += 1
            self.last[rank, peer] = arrival = max(arrival, self.last.get((rank, peer), 0.0))
            self.at(arrival, self.arrive, rank, peer, self.x[rank].copy())


PRIMES = [1.0, 1.3137, 0.7071, 2.1713]  # paces without ties, at which draws would change places


@pytest.mark.parametrize("loss", [0.0, 0.3, 0.7])
def test_what_is_lost_is_sent_again(loss):
    """Parameters, and each attempt's bytes, as by hand: a loss is time, and nothing else."""
    by_hand = PutsSentAgain(PRIMES, 48, loss=loss, again=0.6)
    by_hand.delay = 0.4
    scenario = {"slowdown": dict(enumerate(PRIMES)), "delay": dict.fromkeys(range(RANKS), 0.4)}
    run = train("win_put", scenario={**scenario, "loss": loss, "retransmit_after": 0.6})
    np.testing.assert_allclose(weights(run), by_hand.run(), rtol=0, atol=1e-12)
    assert run.bytes_sent[-1] == pytest.approx(by_hand.sent * NBYTES / RANKS)


class Gets(Events):
    """pull_get with a bound: late neighbours are asked again each millisecond, as they answer."""

    def __init__(self, *how, bound, delay):
        super().__init__(*how)
        self.bound, self.delay = bound, delay
        self.own, self.clock = self.x.copy(), [0] * RANKS
        self.heard, self.heard_clock, self.pending = {}, {}, set()
        self.waiting = set()

    def publish(self, rank):
        self.own[rank], self.clock[rank] = self.x[rank], self.clock[rank] + 1
        self.ask(rank, [peer for peer in RING[rank] if peer != rank])

    def ask(self, rank, peers):
        for peer in set(peers) - {p for r, p in self.pending if r == rank}:
            self.pending.add((rank, peer))
            self.at(self.now + self.delay, self.reply, rank, peer)

    def reply(self, rank, peer):
        self.at(self.now + self.delay, self.arrive, rank, peer, self.own[peer].copy(),
                self.clock[peer])  # fmt: skip

    def arrive(self, rank, peer, x, clock):
        self.pending.remove((rank, peer))
        self.heard[rank, peer] = x
        self.heard_clock[rank, peer] = max(clock, self.heard_clock.get((rank, peer), 0))
        if rank in self.waiting:
            self.end(rank)

    def end(self, rank):
        self.waiting.discard(rank)
        peers = [peer for peer in RING[rank] if peer != rank]
        wanted = self.steps[rank] + 1 - self.bound
        late = [peer for peer in peers if self.heard_clock.get((rank, peer), 0) < wanted]
        if late and self.steps[rank] >= self.bound:
            self.waiting.add(rank)
            self.at(self.now + 0.001, self.ask, rank, late)
            return
        near = [self.heard.get((rank, peer), self.own[rank]) for peer in peers]
        mixed = (self.own[rank] + sum(near)) / 3
        self.x[rank] = mixed - LR * self.gradients(self.x)[rank]
        self.steps[rank] += 1
        self.begin(rank)


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize("delay", [0.01, 0.4])
def test_gets_that_wait_for_late_neighbours_as_by_hand(bound, delay):
    """The bound holds beside a straggler, whatever the way there and back takes."""
    pace = PACES["straggler"]
    by_hand = Gets(pace, 48, bound=bound, delay=delay)
    scenario = {**slowdown("straggler"), "delay": dict.fromkeys(range(RANKS), delay)}
    run = train("pull_get", scenario=scenario, max_staleness=bound)
    np.testing.assert_allclose(weights(run), by_hand.run(), rtol=0, atol=1e-12)
    assert run.rank_steps[-1].tolist() == by_hand.steps
    ahead = run.rank_steps[:, [0, 2]].max(axis=1) - run.rank_steps[:, 3]
    assert ahead.max() <= bound + 1  # the step that a neighbour has begun counts


@every_pace
def test_each_goes_at_its_own_pace_after_the_warm_up(pace):
    """Steps of the mean gradient at the pace of the slowest, then puts as by hand from there."""
    by_hand = Puts(PACES[pace], 48 - 5 * RANKS)
    by_hand.start = sum([max(PACES[pace])] * 5)
    for _ in range(5):
        by_hand.x -= LR * by_hand.gradients(by_hand.x).mean(axis=0)
    run = train("async_model_average", scenario=slowdown(pace), warmup_steps=5)
    np.testing.assert_allclose(weights(run), by_hand.run(), rtol=0, atol=1e-12)
    assert run.rank_steps[5].tolist() == [5] * RANKS
    assert run.seconds[5] == pytest.approx(5 * max(PACES[pace]))
    assert run.rank_steps[-1].tolist() == [5 + made for made in by_hand.steps]
    assert run.steps.tolist() == list(range(13))
    assert (np.diff(run.bytes_sent) > 0).all()


def test_a_warm_up_that_never_ends():
    """It is the warm-up's method."""
    run = train("async_model_average", warmup_steps=50)
    other = train("gradient_allreduce", topology=None)
    np.testing.assert_allclose(weights(run), weights(other), rtol=0, atol=1e-12)


class Shares(Events):
    """Push-sum: equal shares, none to who has not collected the last one."""

    def __init__(self, *how, delay=0.0):
        super().__init__(*how)
        self.p, self.delay = np.ones(RANKS), delay
        self.inbox, self.unread = {rank: [] for rank in range(RANKS)}, set()

    def publish(self, rank):
        pass

    def arrive(self, source, target, x, p):
        self.inbox[target].append((source, x, p))

    def mix_and_update(self, rank, update):
        x, p = self.x[rank] * self.p[rank] - self.scale(rank) * update, self.p[rank]
        kept = 1.0
        for peer in RING[rank]:
            if peer != rank and (rank, peer) not in self.unread:
                self.unread.add((rank, peer))
                self.at(self.now + self.delay, self.arrive, rank, peer, x / 3, p / 3)
                kept -= 1 / 3
        x, p = x * kept, p * kept
        for source, more, weight in self.inbox[rank]:
            x, p = x + more, p + weight
            self.unread.discard((source, rank))
        self.inbox[rank] = []
        self.x[rank], self.p[rank] = x / p, p

    def scale(self, rank):
        rates = [self.seconds[rank] / other for other in self.seconds]
        return min(sum(rates) / RANKS, 4 * min(rates))


@every_pace
@pytest.mark.parametrize("delay", [0.0, 0.4, 2.5])
def test_puts_as_by_hand(pace, delay):
    """The newest that has arrived by the end of a step, at whatever pace and delay."""
    by_hand = Puts(PACES[pace], 48)
    by_hand.delay = delay
    scenario = {**slowdown(pace), "delay": dict.fromkeys(range(RANKS), delay)}
    run = train("win_put", scenario=scenario)
    np.testing.assert_allclose(weights(run), by_hand.run(), rtol=0, atol=1e-12)
    assert run.rank_steps[-1].tolist() == by_hand.steps
    other = train("async_model_average", scenario=scenario)  # the same with plain SGD
    np.testing.assert_allclose(weights(other), weights(run), rtol=0, atol=1e-12)


@every_pace
@pytest.mark.parametrize("delay", [0.0, 1.7])
def test_push_sum_as_by_hand(pace, delay):
    """Shares and weights, whichever are under way, and steps scaled by the ranks' speed."""
    by_hand = Shares(PACES[pace], 48, delay=delay)
    scenario = {**slowdown(pace), "delay": dict.fromkeys(range(RANKS), delay)}
    run = train("push_sum", scenario=scenario)
    np.testing.assert_allclose(weights(run), by_hand.run(), rtol=0, atol=1e-12)
    assert run.rank_steps[-1].tolist() == by_hand.steps


class Pairs(Events):
    """AD-PSGD on edges in turn without delays: an average at the lower rank's begin of a step."""

    def __init__(self, *how):
        super().__init__(*how)
        self.shared = np.zeros((RANKS, 10))
        self.open, self.asked, self.questions = set(), {}, {rank: [] for rank in range(RANKS)}
        self.pairs = topology.matching_decomposition(RING)

    def publish(self, rank):
        self.shared[rank] = self.x[rank]
        self.open.add(rank)
        for source, x in self.questions[rank]:
            self.answer(source, rank, x)
        self.questions[rank] = []
        (peer,) = self.pairs.neighbors(rank, self.steps[rank]).dst_ranks
        if peer > rank and rank not in self.asked:
            self.asked[rank] = peer
            self.at(self.now, self.arrive, rank, peer, self.shared[rank].copy())

    def arrive(self, source, target, x):
        if target in self.asked:
            self.at(self.now, self.asked.pop, source)
        elif target in self.open:
            self.answer(source, target, x)
        else:
            self.questions[target].append((source, x))

    def answer(self, source, target, x):
        change = (x - self.shared[target]) / 2
        self.shared[target] += change
        self.at(self.now, self.answered, source, change)

    def answered(self, rank, change):
        del self.asked[rank]
        self.shared[rank] -= change

    def mix_and_update(self, rank, update):
        self.x[rank] = self.shared[rank] - update


@every_pace
def test_pairs_as_by_hand(pace):
    """Averages at any time, gradients at what the step began with."""
    by_hand = Pairs(PACES[pace], 48)
    run = train("ad_psgd", scenario=slowdown(pace))
    np.testing.assert_allclose(weights(run), by_hand.run(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ONE_SIDED)
def test_the_same_numbers_each_time(name):
    """Nothing depends on anything but the arguments."""
    scenario = {"slowdown": {1: 2.3}, "links": "100Mbit,20ms", "delay": {0: 0.03}}
    one, other = (train(name, scenario=scenario, topology=None) for _ in range(2))
    assert np.array_equal(weights(one), weights(other))
    assert np.array_equal(one.seconds, other.seconds)


@pytest.mark.parametrize("name", [name for name in ONE_SIDED if name != "overlap_sgp"])
def test_a_straggler_leaves_the_others_their_pace(name):
    """Steps per second of the others are what they are alone; those who wait have a tenth."""
    scenario = {"slowdown": {3: 10.0}, "step_seconds": 0.01, "links": "10Gbit,50us"}
    run = train(name, steps=60, scenario=scenario)
    made, seconds = run.rank_steps[-1], run.seconds[-1]
    np.testing.assert_allclose(made[:3] / seconds, 100.0, rtol=0.02)
    assert made[3] / seconds == pytest.approx(10.0, rel=0.15)
    waiting = train("adapt_then_combine", steps=60, scenario=scenario)
    assert 60 / waiting.seconds[-1] == pytest.approx(10.0, rel=0.1)
    assert waiting.rank_steps[-1].tolist() == [60] * RANKS
    if not ALGORITHMS[name].counts_puts:  # else the straggler's data count a tenth
        assert run.error[-1] < 0.6


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_where_puts_are_counted_data_count_as_often_as_they_were_drawn(momentum):
    """The optimum is that of all losses, weighted by the ranks' steps, also with fragments."""
    options = {"communication_interval": 2, "fragments": 1, "outer_momentum": momentum}
    scenario = {"slowdown": {3: 4.0}}
    graph = topology.complete(RANKS)
    run = simulate.train(
        PROBLEM,
        lambda parameters: torch.optim.SGD(parameters, lr=0.004),
        "decoupled_diloco",
        steps=3000,
        topology=graph,
        scenario=simulate.Scenario(**EQUAL, **scenario),
        record_every=3000,
        **options,
    )
    made = run.rank_steps[-1]
    assert made[0] == pytest.approx(4 * made[3], rel=0.01)

    def optimum(shares):
        parts = [(s * a.T @ a, s * a.T @ b) for s, (a, b) in zip(shares, PROBLEM.data, strict=True)]
        return torch.linalg.solve(
            sum(one for one, _ in parts), sum(one for _, one in parts)
        ).numpy()

    mean, weighted, even = weights(run).mean(axis=0), optimum(made), optimum([1] * RANKS)
    apart = np.linalg.norm(weighted - even)
    assert np.linalg.norm(mean - weighted) < 0.1 * apart


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_bounded_staleness_waits(staleness):
    """overlap_sgp is ahead of a straggler by so many steps and what it makes meanwhile."""
    scenario = {"slowdown": {3: 10.0}, "links": AT_ONCE}
    run = train("overlap_sgp", steps=20, scenario=scenario, staleness=staleness)
    ahead = run.rank_steps[:, [0, 2]].max(axis=1) - run.rank_steps[:, 3]
    assert ahead.max() == staleness
    assert run.seconds[-1] == pytest.approx(10 * 20, rel=0.2)


@pytest.mark.parametrize("name", ["win_put", "pull_get", "overlap_sgp"])
def test_a_bound_where_messages_are_lost(name):
    """Nobody waits for ever for what is sent again, and the bound holds."""
    again = {"loss": 0.3, "retransmit_after": 0.5}
    run = train(name, steps=40, scenario={**again, "slowdown": {3: 2.0}}, max_staleness=2)
    ahead = run.rank_steps[:, [0, 2]].max(axis=1) - run.rank_steps[:, 3]
    assert 0 < ahead.max() <= 3  # the step that a neighbour has begun counts
    assert run.rank_steps[-1].min() > 35


def test_a_bound_hides_messages_behind_steps():
    """A message that takes as long as a step costs nothing with s = 1, and a step with s = 0."""
    scenario = {"delay": dict.fromkeys(range(RANKS), 0.9)}
    seconds = [
        train("overlap_sgp", steps=20, scenario=scenario, staleness=s).seconds[-1] for s in (0, 1)
    ]
    assert seconds == pytest.approx([1.9 * 20, 20.0], rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("name", ["ad_psgd", "a2cid2", "push_sum"])
def test_what_is_under_way_is_not_lost(name, loss):
    """Without gradients ranks of any speed come to the mean of the values, exactly.

    So they do where messages are lost, and sent again.
    """
    models = []
    for rank in range(RANKS):
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, float(rank))
        models.append(model)
    one = torch.ones(1, 1, dtype=torch.float64)
    problem = simulate.Problem(models, lambda out: 0 * out.sum(), [(one,)] * RANKS)
    late = {"loss": loss, "retransmit_after": 0.03}
    scenario = simulate.Scenario(asynchronous=True, slowdown={2: 3.3}, links="1Gbit,1ms", **late)
    run = simulate.train(
        problem, sgd, name, steps=300, topology=RING, scenario=scenario, record_every=300
    )
    found = run.parameters["weight"].flatten()
    torch.testing.assert_close(found, torch.full_like(found, 1.5), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ONE_SIDED)
def test_who_leaves_holds_nobody_up(name):
    """Its parameters stay as they were; the others go on, and find an optimum of their own."""
    run = train(name, steps=200, scenario={"departures": {1: 3}}, record_every=50)
    assert run.rank_steps[-1][1] == 3
    assert all(made > 150 for made in run.rank_steps[-1][[0, 2, 3]])
    others = [PROBLEM.data[rank] for rank in (0, 2, 3)]
    a, b = (torch.cat([part[k] for part in others]) for k in (0, 1))
    optimum = torch.linalg.lstsq(a, b[:, None]).solution[:, 0].numpy()
    mean = weights(run)[[0, 2, 3]].mean(axis=0)
    assert np.linalg.norm(mean - optimum) < 0.12 * np.linalg.norm(optimum)


def test_methods_that_wait_do_not_change():
    """The scenario is one of those who do not."""
    runs = [
        simulate.train(
            PROBLEM,
            sgd,
            steps=5,
            topology=RING,
            scenario=simulate.Scenario(asynchronous=asynchronous),
        )
        for asynchronous in (False, True)
    ]
    assert np.array_equal(weights(runs[0]), weights(runs[1]))


@pytest.mark.parametrize(
    ("name", "settings", "scenario", "message"),
    [
        ("win_put", {"max_staleness": 1}, {"loss": 0.1}, "loss: win_put waits for what is lost"),
        ("ad_psgd", {}, {"loss": 0.1}, "loss: ad_psgd waits .* expected retransmit_after=0.2"),
        ("win_put", {"window_prefix": "w"}, {}, "window_prefix: it changes when real ranks send"),
    ],
)
def test_what_cannot_be_is_refused_in_words(name, settings, scenario, message):
    """The argument, and what to do."""
    with pytest.raises(ArgumentError, match=message):
        train(name, scenario=scenario, **settings)
