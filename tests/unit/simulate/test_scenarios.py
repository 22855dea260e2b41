"""Scenarios: what slow ranks, links, lost messages and departures do to time and models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncddp import simulate, topology
from asyncddp.errors import ArgumentError
from asyncddp.simulate.mixing_round import MixingRound
from asyncddp.topology import Link, Links, TopologyError

RANKS = 4
PROBLEM = simulate.least_squares(RANKS)
NBYTES = 16 * 8  # of 10 parameters in float64, padded to 64 bytes


def sgd(parameters):
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def train(algorithm="adapt_then_combine", steps=10, ranks=RANKS, **settings):
    """Train LS(4)."""
    problem = PROBLEM if ranks == RANKS else simulate.least_squares(ranks)
    return simulate.train(problem, sgd, algorithm, steps=steps, **settings)


RING = topology.ring(RANKS)
LINKS = Links(Link(latency=0.02, bandwidth=1000.0))


def test_a_step_takes_its_time_and_that_of_the_messages():
    """c + α + 2 B / β: both messages of a rank on the ring share its link."""
    run = train(topology=RING, scenario=simulate.Scenario(step_seconds=0.5, links=LINKS))
    step = 0.5 + 0.02 + 2 * NBYTES / 1000
    np.testing.assert_allclose(run.seconds, step * np.arange(11))


def test_hidden_messages_cost_what_is_longer_than_a_step():
    """max(c, α + 2 B / β) with adapt_with_combine."""
    message = 0.02 + 2 * NBYTES / 1000
    for seconds in (0.001, 5.0):
        scenario = simulate.Scenario(step_seconds=seconds, links=LINKS)
        run = train("adapt_with_combine", topology=RING, scenario=scenario)
        assert run.seconds[-1] == pytest.approx(10 * max(seconds, message))


def test_an_average_over_all_takes_the_fastest_allreduce():
    """Of those in the cost model."""
    run = train("gradient_allreduce", scenario=simulate.Scenario(step_seconds=0.5, links=LINKS))
    nbytes = 16 * 8 + 8  # and a flag for the parameter
    ways = topology.communication_cost(RING, nbytes, LINKS).allreduces.values()
    assert run.seconds[-1] == pytest.approx(10 * (0.5 + min(cost.seconds for cost in ways)))


def test_a_slow_rank_holds_up_all_that_wait_for_it():
    """On the ring all go at its pace in the end; ranks that train alone do not."""
    slow = simulate.Scenario(step_seconds=0.1, slowdown={2: 10.0}, links=Link(0.0, 1e15))
    run = train(topology=RING, steps=50, scenario=slow)
    assert run.seconds[-1] == pytest.approx(50.0)
    assert np.diff(run.seconds)[-1] == pytest.approx(1.0)


def test_late_messages_hold_up_their_receivers():
    """A delay adds to the time of each message of that rank."""
    late = simulate.Scenario(step_seconds=0.1, delay={0: 0.7}, links=Link(0.0, 1e15))
    run = train(topology=RING, steps=10, scenario=late)
    assert run.seconds[1] == pytest.approx(0.8)


@pytest.mark.parametrize("name", ["adapt_then_combine", "push_sum", "choco_sgd", "beer"])
def test_what_is_sent_again_takes_time_and_bytes_alone(name):
    """1 / (1 - p) messages for one, and the same parameters, also where ranks keep copies."""
    plain, lossy = (
        train(name, steps=60, topology=RING, scenario=simulate.Scenario(
            loss=loss, retransmit_after=0.2, step_seconds=0.1, links=Link(0.0, 1e15)
        ))
        for loss in (0.0, 0.25)
    )  # fmt: skip
    torch.testing.assert_close(plain.parameters, lossy.parameters, rtol=0, atol=0)
    assert lossy.bytes_sent[-1] / plain.bytes_sent[-1] == pytest.approx(1 / 0.75, rel=0.1)
    assert plain.seconds[-1] == pytest.approx(6.0)
    waits = np.diff(lossy.seconds) - 0.1  # of the last rank, which is behind no other
    assert lossy.seconds[-1] > 6.0 + 60 * 0.25 * 0.2
    np.testing.assert_allclose(waits / 0.2, np.round(waits / 0.2), atol=1e-6)


def test_nothing_is_lost_inside_of_machines():
    """Ranks of one share its memory: of two ranks a machine, only what leaves it is sent again."""
    graph, links = topology.ring(2), Links(Link(0.0, 1e15), 2)
    plain, lossy = (
        train(
            steps=100,
            topology=graph,
            communication="hierarchical_neighbor_allreduce",
            scenario=simulate.Scenario(loss=loss, retransmit_after=0.2, links=links),
        )
        for loss in (0.0, 0.5)
    )
    torch.testing.assert_close(plain.parameters, lossy.parameters, rtol=0, atol=0)
    # of four messages of a step, three go to the other rank of the machine
    assert lossy.bytes_sent[-1] / plain.bytes_sent[-1] == pytest.approx(5 / 4, rel=0.05)


def test_speeds_and_links_change_no_parameter_where_ranks_wait():
    """A rank that waits gets the same messages, only later."""
    plain = train(topology=RING)
    late = train(
        topology=RING, scenario=simulate.Scenario(slowdown={1: 5.0}, delay={3: 1.0}, links=LINKS)
    )
    torch.testing.assert_close(plain.parameters, late.parameters, rtol=0, atol=0)


def test_lost_messages_keep_rows_summing_to_one():
    """Ranks that agree go on agreeing: the receiver's own tensor stands in for what is lost."""
    problem = simulate.Problem(
        torch.nn.Linear(2, 1), lambda out: 0 * out.sum(), [(torch.ones(1, 2),)] * 6
    )
    scenario = simulate.Scenario(loss=0.4)
    run = simulate.train(problem, sgd, steps=5, topology=topology.ring(6), scenario=scenario)
    assert run.consensus_distance[-1] < 1e-6


def test_losses_are_drawn_anew_in_each_round_by_the_seed():
    """The same seed loses the same messages; the share of those lost is as asked for."""
    rounds = MixingRound.of(topology.as_schedule(topology.complete(50)), 0)
    scenario = simulate.Scenario(loss=0.3, seed=4)
    lost = [scenario.lost_messages(k, rounds.sources) for k in (0, 1, 0)]
    assert np.array_equal(lost[0], lost[2])
    assert not np.array_equal(lost[0], lost[1])
    assert np.mean(lost[:2]) == pytest.approx(0.3, abs=0.03)
    runs = [train(topology=RING, scenario=simulate.Scenario(loss=0.3, seed=s)) for s in (1, 1, 2)]
    torch.testing.assert_close(runs[0].parameters, runs[1].parameters, rtol=0, atol=0)
    assert (runs[0].parameters["weight"] != runs[2].parameters["weight"]).any()


def test_a_round_without_messages_moves_their_weights_to_the_receiver():
    """w'_ii = w_ii + Σ of the lost w_ij; no other entry changes."""
    whole = MixingRound.of(topology.as_schedule(topology.ring(5)), 0)
    lost = np.zeros(len(whole.sources), dtype=bool)
    lost[[0, 3]] = True
    dense, before = whole.without(lost).matrix.dense(), whole.matrix.dense()
    for source, target in zip(whole.sources[lost], whole.targets[lost], strict=True):
        before[target, target] += before[target, source]
        before[target, source] = 0.0
    np.testing.assert_allclose(dense, before, atol=0)


@pytest.mark.parametrize("ranks", [8, 200])
def test_sparse_and_dense_products_are_those_of_w(ranks):
    """(W @ X) for few ranks and for many, in float64 and float32."""
    schedule = topology.base_k(ranks, 1)
    x = torch.randn(ranks, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for number in range(3):
        wanted = topology.mixing_matrix(schedule, number) @ x.numpy()
        mixed = MixingRound.of(schedule, number).mix(x)
        np.testing.assert_allclose(mixed.numpy(), wanted, atol=1e-14)
        single = MixingRound.of(schedule, number).mix(x.float())
        np.testing.assert_allclose(single.numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["adapt_then_combine", "push_sum", "gradient_allreduce"])
def test_who_leaves_stays_behind(algorithm):
    """Its parameters stay as they were, and the others find the optimum of their own data."""
    scenario = simulate.Scenario(departures={1: 3})
    settings = {} if algorithm == "gradient_allreduce" else {"topology": topology.complete(RANKS)}
    short = train(algorithm, steps=3, **settings)
    run = train(algorithm, steps=400, scenario=scenario, **settings)
    torch.testing.assert_close(run.parameters["weight"][1], short.parameters["weight"][1])
    others = [PROBLEM.data[rank] for rank in (0, 2, 3)]
    a, b = (torch.cat([part[k] for part in others]) for k in (0, 1))
    optimum = torch.linalg.lstsq(a, b[:, None]).solution[:, 0]
    found = run.parameters["weight"][[0, 2, 3], 0].mean(dim=0)
    tolerance = 1e-6 if algorithm == "gradient_allreduce" else 0.1
    assert float((found - optimum).norm()) < tolerance * float(optimum.norm())


def test_who_leaves_push_sum_takes_its_share_along():
    """Its neighbours keep what they would give it, round by round, by hand."""
    graph, departures, rounds = topology.star(RANKS), {1: 2, 3: 5}, 9
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(RANKS, dtype=torch.float64, generator=generator).numpy()
    models = []
    for value in z:
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, float(value))
        models.append(model)
    one = torch.ones(1, 1, dtype=torch.float64)
    problem = simulate.Problem(models, lambda out: 0 * out.sum(), [(one,)] * RANKS)
    scenario = simulate.Scenario(departures=departures)
    run = simulate.train(problem, sgd, "push_sum", steps=rounds, topology=graph, scenario=scenario)
    p, held = np.ones(RANKS), z.copy()
    for number in range(rounds):
        there = [r for r in range(RANKS) if number < departures.get(r, rounds)]
        before, weights = z.copy(), p.copy()
        for giver in there:
            targets = list(graph.successors(giver))
            share = 1 / (len([t for t in targets if t != giver]) + 1)
            for target in targets:
                if target != giver and target in there:
                    for values, old in ((z, before), (p, weights)):
                        values[target] += share * old[giver]
                        values[giver] -= share * old[giver]
        held[there] = (z / p)[there]
    np.testing.assert_allclose(run.parameters["weight"].flatten(), held, rtol=0, atol=1e-12)


def test_push_sum_keeps_the_ratio_where_shares_are_lost():
    """A share goes with its weight: without gradients the ratios stay averages of the values."""
    models = []
    for rank in range(RANKS):
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, float(rank))
        models.append(model)
    one = torch.ones(1, 1, dtype=torch.float64)
    problem = simulate.Problem(models, lambda out: 0 * out.sum(), [(one,)] * RANKS)
    scenario = simulate.Scenario(loss=0.2)
    run = simulate.train(problem, sgd, "push_sum", steps=60, topology=RING, scenario=scenario)
    weights = run.parameters["weight"].flatten()
    assert float(weights.max() - weights.min()) < 1e-3
    assert 0.0 <= float(weights.mean()) <= RANKS - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": -0.1}, "argument loss: expected a probability"),
        ({"loss": 1.0}, "argument loss: expected a probability"),
        ({"delay": {0: -1.0}}, "delay of rank 0: expected seconds of at least 0, got -1.0"),
        ({"slowdown": {2: 0.0}}, "slowdown of rank 2: expected a factor above 0"),
        ({"step_seconds": -1.0}, "step_seconds: expected seconds above 0"),
        ({"step_seconds": float("nan")}, "step_seconds: expected seconds above 0"),
        ({"retransmit_after": 0.0}, "retransmit_after: expected seconds above 0, or None"),
        ({"departures": {1: -3}}, "departures of rank 1"),
    ],
)
def test_scenarios_that_cannot_be(arguments, message):
    """Negative delays and others are named with what was expected."""
    with pytest.raises(ArgumentError, match=message):
        simulate.Scenario(**arguments)


def test_a_link_that_cannot_be_read():
    """The error of the topology package says what a link looks like."""
    with pytest.raises(TopologyError, match="100Mbit,20ms"):
        simulate.Scenario(links="fast")


@pytest.mark.parametrize("argument", ["slowdown", "delay", "departures"])
def test_ranks_that_are_not_there(argument):
    """A scenario of another number of ranks is refused before the first step."""
    with pytest.raises(ArgumentError, match=f"argument {argument}: there is no rank 4 among 4"):
        train(scenario=simulate.Scenario(**{argument: {4: 1}}))


def test_somebody_stays():
    """Where all leave there is nothing to record."""
    with pytest.raises(ArgumentError, match="all 4 ranks leave; expected one to stay"):
        train(scenario=simulate.Scenario(departures=dict.fromkeys(range(4), 2)))


def test_methods_that_cannot_miss_a_message_say_so():
    """Copies of neighbours' models go wrong; an average over all fails as a whole."""
    scenario = simulate.Scenario(loss=0.1)
    with pytest.raises(ArgumentError, match="choco_sgd has sent counts as known to its neigh"):
        train("choco_sgd", topology=RING, scenario=scenario)
    with pytest.raises(ArgumentError, match="bytegrad averages over all ranks by compressed parts"):
        train("bytegrad", scenario=scenario)


def test_an_average_over_all_waits_for_the_last_message_of_each_round():
    """Of the fastest allreduce's rounds, each with a message between all; draws by hand."""
    ranks, loss = 8, 0.3
    plain, lossy = (
        train(
            "gradient_allreduce",
            ranks=ranks,
            scenario=simulate.Scenario(loss=p, retransmit_after=0.2, links=Link(0.01, 1e15)),
        )
        for p in (0.0, loss)
    )
    torch.testing.assert_close(plain.parameters, lossy.parameters, rtol=0, atol=0)
    rounds, messages = 2, ranks * (ranks - 1)  # each to all, with the fewest latencies
    for step, seconds in enumerate(np.diff(lossy.seconds) - np.diff(plain.seconds)):
        drawn = np.random.default_rng([0, step]).geometric(1 - loss, (rounds, messages)) - 1
        assert seconds == pytest.approx(0.2 * drawn.max(axis=1).sum())
    assert lossy.bytes_sent[-1] == pytest.approx(plain.bytes_sent[-1] / (1 - loss))


def test_an_average_over_all_ranks_loses_nothing_for_good():
    """Its messages are not to neighbours."""
    words = "expected a method that averages with neighbours, or retransmit_after=0.2"
    with pytest.raises(ArgumentError, match=words):
        train("gradient_allreduce", scenario=simulate.Scenario(loss=0.1))
