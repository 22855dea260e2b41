"""Laws of ranks that die and arrive: mean, sums, optimum and state, by hand in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import simulate, topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.algorithms.tracking import TRACKED, TRACKER
from asyncddp.simulate.averaging import PushSumAveraging
from asyncddp.topology.builders import topology_for
from tests.support.methods import every_step, sgd_for

RANKS = 6
CRASHES, ARRIVALS = {1: 4, 4: 9}, {1: 14}


def still(parameters):
    """Nothing but averages changes the models."""
    return torch.optim.SGD(parameters, lr=0.0)


def quiet(ranks=RANKS):
    """Ranks that start at random values of one parameter each."""
    generator = torch.Generator().manual_seed(5)
    models = []
    for _ in range(ranks):
        model = torch.nn.Linear(3, 1, bias=False).double()
        torch.nn.init.normal_(model.weight, generator=generator)
        models.append(model)
    one = torch.ones(1, 3, dtype=torch.float64)
    return simulate.Problem(models, lambda out: 0 * out.sum(), [(one,)] * ranks)


def values_of(problem):
    """The start, a row a rank."""
    return np.stack([one.weight.detach().numpy()[0] for one in problem.model])


def watched(name, seen):
    """The method, which tells the state of all ranks at the end of each step."""
    kind = ALGORITHMS[name]

    class Watched(kind):
        def after_step(self, bucket):
            super().after_step(bucket)
            copies = {key: one.clone() for key, one in bucket.state.items()}
            seen.append({"flat": bucket.flat.clone(), "gradient": bucket.gradient(), **copies})

    return Watched


def matrix(graph, number, n, members=None, dead=()):
    """W of a round on the members, with the weights of the dead on the others' diagonal."""
    members = list(range(n)) if members is None else members
    whole, mixing = np.eye(n), topology.mixing_matrix(topology_for(graph, len(members)), number)
    whole[np.ix_(members, members)] = mixing
    for d in dead:
        there = [rank for rank in range(n) if rank != d]
        whole[there, there] += whole[there, d]
        whole[there, d] = 0.0
        whole[d] = np.eye(n)[d]
    return whole


@pytest.mark.parametrize("redraw", [True, False])
@pytest.mark.parametrize("graph", ["ring", "exponential_two", "one_peer_exponential"])
def test_the_old_graph_is_renormalised_until_the_new_one(graph, redraw):
    """T2: X after each round is that of W by hand, with the sponsor's row for who arrives."""
    problem, seen = quiet(), []
    scenario = simulate.Scenario(crashes=CRASHES, arrivals=ARRIVALS, redraw=redraw)
    method = watched("adapt_then_combine", seen)
    simulate.train(problem, still, method, steps=20, topology=graph, scenario=scenario)
    x = values_of(problem)
    for step in range(20):
        if step == ARRIVALS[1]:
            x[1] = x[0]
        dead = [r for r, c in CRASHES.items() if c <= step and not step >= ARRIVALS.get(r, 99)]
        old = [r for r in dead if CRASHES[r] < step]  # of which the view knows
        if redraw:
            members = [rank for rank in range(RANKS) if rank not in old]
            w = matrix(graph, step, RANKS, members, [r for r in dead if r not in old])
        else:
            w = matrix(graph, step, RANKS, None, dead)
        there = [rank for rank in range(RANKS) if rank not in dead]
        x[there] = (w @ x)[there]
        mixed = seen[step]["flat"].numpy()[there, :3]
        np.testing.assert_allclose(mixed, x[there], rtol=0, atol=1e-12)


@pytest.mark.parametrize("graph", ["exponential_two", "one_peer_exponential"])
def test_rounds_of_a_new_view_keep_the_mean_of_the_survivors(graph):
    """T3: with graphs drawn anew it does not move; along what is left of directed ones it does."""
    moved = {}
    for redraw in (True, False):
        seen = []
        scenario = simulate.Scenario(crashes={1: 1, 2: 2}, redraw=redraw)
        method = watched("adapt_then_combine", seen)
        simulate.train(quiet(), still, method, steps=40, topology=graph, scenario=scenario)
        means = torch.stack([one["flat"][[0, 3, 4, 5]].mean(dim=0) for one in seen])
        moved[redraw] = float((means[2:] - means[2]).abs().max())  # since the last one renormalised
    assert moved[True] < 1e-15
    assert moved[False] > 1e-3


def train(name, seen, steps, arrivals=(), lr=0.03, ranks=RANKS, **settings):
    """Least squares of ranks that die, and perhaps come back."""
    scenario = simulate.Scenario(crashes=CRASHES, arrivals=dict(arrivals))
    problem = simulate.least_squares(ranks)
    method = watched(name, seen)
    options = {**every_step(name), **settings}
    optimizer = sgd_for(name, lr, 0.0)
    given = {"record_every": steps, "scenario": scenario, **options}
    return problem, simulate.train(problem, optimizer, method, steps=steps, **given)


def members_at(step, arrivals):
    """The members of the view to which the round of a step belongs."""
    died, came = CRASHES.get, dict(arrivals).get
    never = float("inf")
    return [r for r in range(RANKS) if step <= died(r, never) or step >= came(r, never)]


@pytest.mark.parametrize("arrivals", [(), tuple(ARRIVALS.items())], ids=["deaths", "arrivals"])
@pytest.mark.parametrize("name", ["gradient_tracking", "push_diging", "beer"])
def test_trackers_sum_to_the_gradients(name, arrivals):
    """T4: sum y = sum g at every round of a view, from its first one on."""
    seen = []
    train(name, seen, 24, arrivals)
    g = TRACKED if TRACKED in seen[0] else "gradient"
    for step, state in enumerate(seen):
        there = members_at(step, arrivals)
        if step in CRASHES.values():
            continue  # the round in which somebody dies
        apart = state[TRACKER][there].sum(dim=0) - state[g][there].sum(dim=0)
        assert float(apart.abs().max()) < 1e-11, step


@pytest.mark.parametrize("name", ["exact_diffusion", "edm", "extra"])
def test_corrections_sum_to_zero(name):
    """T4: sum c = 0 at every round of a view."""
    seen = []
    train(name, seen, 24, ARRIVALS.items())
    key = next(key for key in seen[0] if key in ("correction", "dual"))
    for step, state in enumerate(seen):
        if step not in CRASHES.values():
            there = members_at(step, ARRIVALS.items())
            assert float(state[key][there].sum(dim=0).abs().max()) < 1e-11, step


def test_replicas_of_neighbours_are_those_of_a_view():
    """What a rank of choco_sgd knows is W of the public copies, at every round of a view."""
    seen = []
    train("choco_sgd", seen, 24, ARRIVALS.items(), topology="ring")
    own, mixed = (next(key for key in seen[0] if key.startswith(k)) for k in ("public", "mixed"))
    for step, state in enumerate(seen):
        there = members_at(step, ARRIVALS.items())
        if step not in CRASHES.values():
            known = matrix("ring", 0, RANKS, there) @ state[own].numpy()
            np.testing.assert_allclose(state[mixed].numpy()[there], known[there], atol=1e-12)


@pytest.mark.parametrize("graph", ["exponential_two", "star"])
def test_push_sum_weights_sum_to_the_number_of_members(graph, monkeypatch):
    """T4: sum p = n' at every round of a view, and z is still a mean of all."""
    weights, end = [], PushSumAveraging.end

    def ends(averaging):
        end(averaging)
        weights.append(averaging.biases.flatten().clone())

    monkeypatch.setattr(PushSumAveraging, "end", ends)
    seen = []
    train("push_sum", seen, 24, ARRIVALS.items(), topology=graph)
    for step, p in enumerate(weights):
        if step not in CRASHES.values():
            there = members_at(step, ARRIVALS.items())
            assert float(p[there].sum()) == pytest.approx(len(there), abs=1e-12)
            assert float(p.min()) > 0


def optimum_of(problem, ranks):
    """The optimum of the data of some ranks."""
    a, b = (torch.cat([problem.data[rank][k] for rank in ranks]) for k in (0, 1))
    return torch.linalg.lstsq(a, b.reshape(-1, 1)).solution.flatten()


LONG = {"beer": pytest.mark.exhaustive}
EXACT = [pytest.param(n, marks=LONG.get(n, ())) for n in ALGORITHMS if ALGORITHMS[n].exact]


@pytest.mark.parametrize("name", EXACT)
def test_exact_methods_reach_the_optimum_of_those_that_are_left(name):
    """Whatever trackers, corrections, duals, sums and replicas knew of the dead is gone."""
    lazy = {"topology": lambda n: topology.lazy_weights(topology.ring(n))} if name == "d2" else {}
    problem, run = train(name, [], 1200, ARRIVALS.items(), lr=0.05, **lazy)
    there = members_at(1200, ARRIVALS.items())
    assert there == [0, 1, 2, 3, 5]
    found = run.parameters["weight"][there].reshape(len(there), -1)
    best = optimum_of(problem, there)
    assert float((found - best).norm(dim=1).max() / best.norm()) < 1e-8


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adafactor"])
def test_who_arrives_has_what_its_sponsor_has(optimizer):
    """Model, buffers and the optimizer's state: two ranks with the same data stay equal."""
    given = simulate.least_squares(4)
    data = [given.data[k] for k in (0, 1, 1, 3)]
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(given.data[0][0].shape[1]), given.model).double()
    problem = simulate.Problem(net, given.loss, data)
    scenario = simulate.Scenario(crashes={2: 3}, arrivals={2: 10})
    create = simulate.optimizer_named(optimizer, lr=0.01, **options)
    settings = {"steps": 20, "communication": "empty", "scenario": scenario}
    run = simulate.train(problem, create, "adapt_then_combine", **settings)
    for stacked in run.parameters.values():
        torch.testing.assert_close(stacked[2], stacked[1], rtol=0, atol=0)
        assert not torch.equal(stacked[3], stacked[1])
    assert run.rank_steps[-1].tolist() == [20, 20, 13, 20]


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "noloco", "slowmo", "sparse_loco"])
def test_who_arrives_has_the_outer_state_of_its_sponsor(name):
    """DiLoCo's outer parameters are equal on all members after each round, as without churn."""
    seen, every = [], 4
    train(name, seen, 40, {1: 17}.items(), communication_interval=every)
    key = next(key for key in seen[0] if "outer" in key and "momentum" not in key)
    there = members_at(40, {1: 17}.items())
    values = seen[-1][key][there]
    assert (float((values - values[0]).abs().max()) < 1e-12) is (name != "noloco")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"crashes": {7: 3}}, "argument crashes: there is no rank 7 among 6; expected 0 to 5"),
        ({"crashes": {1: 30}}, "argument crashes: the run has 20 steps, and rank 1 would die af"),
        ({"crashes": {1: 3}, "arrivals": {1: 20}}, "arrivals: the run has 20 steps, and rank 1 wo"),
        ({"arrivals": {1: 5}}, "arrivals: rank 1 comes after 5 steps, but lives; expected a rank"),
        ({"crashes": {1: 5}, "arrivals": {1: 5}}, "rank 1 comes after 5 steps, but dies after 5;"),
        ({"crashes": dict.fromkeys(range(6), 4)}, "all 6 ranks leave; .* after 4 steps none is"),
        (
            {"crashes": dict.fromkeys(range(6), 4), "arrivals": {0: 9}},
            "all 6 ranks leave; expected one to stay, but after 4 steps none is left",
        ),
        ({"crashes": {1: -1}}, "crashes of rank 1: expected a number of steps of at least 0"),
        ({"crashes": {1: 4}, "departures": {1: 2}}, "departures, crashes: rank 1 is in both"),
        (
            {"crashes": {1: 4}, "arrivals": {1: 8}, "asynchronous": True},
            "argument arrivals: expected none with asynchronous=True",
        ),
    ],
)
def test_lives_that_cannot_be(arguments, message):
    """Unknown ranks, steps beyond the run, arrivals of the living, and runs without anybody."""

    def run():
        scenario = simulate.Scenario(**arguments)
        simulate.train(quiet(), still, "win_put", steps=20, scenario=scenario)

    with pytest.raises(bf.ArgumentError, match=message):
        run()


def test_averages_inside_machines_need_all_their_ranks():
    """As on real ranks, which raise PeerLeftError there."""
    links = topology.Links(topology.Link(), 2)
    scenario = simulate.Scenario(links=links, crashes={1: 4})
    words = "argument crashes: averages inside machines need all their ranks"
    settings = {"communication": "hierarchical_neighbor_allreduce", "topology": "ring"}
    with pytest.raises(bf.ArgumentError, match=words):
        simulate.train(quiet(), still, steps=20, scenario=scenario, **settings)


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n != "qadam"])
def test_every_method_lives_through_churn(name):
    """Half of the ranks die and come back; all numbers stay finite, and errors small."""
    ranks = 8
    scenario = simulate.Scenario(
        crashes={k: 5 + 3 * k for k in range(0, ranks, 2)},
        arrivals={k: 12 + 3 * k for k in range(0, ranks, 2)},
    )
    problem = simulate.least_squares(ranks)
    options = {"communication_interval": 2} if every_step(name) else {}
    run = simulate.train(
        problem, sgd_for(name, 0.03, 0.0), name, steps=50, scenario=scenario, **options
    )
    assert np.isfinite(run.error).all()
    assert run.error[-1] < 0.7 * run.error[0]


@pytest.mark.parametrize("name", ["gradient_tracking", "relay_sgd", "ad_psgd", "bytegrad"])
def test_all_but_one_may_die(name):
    """The last one goes on alone, by its own data, until others come."""
    problem, sgd = simulate.least_squares(4), sgd_for(name, 0.05, 0.0)
    scenario = simulate.Scenario(crashes={0: 2, 1: 3, 3: 5})
    run = simulate.train(problem, sgd, name, steps=400, scenario=scenario)
    best = optimum_of(problem, [2])
    assert float((run.parameters["weight"][2].flatten() - best).norm() / best.norm()) < 1e-3
    back = simulate.Scenario(crashes={0: 2, 1: 3, 3: 5}, arrivals={0: 6, 1: 60, 3: 61})
    run = simulate.train(problem, sgd, name, steps=80, scenario=back)
    assert run.consensus_distance[-1] < 0.5


@pytest.mark.parametrize("name", ["win_put", "push_sum", "pull_get", "ad_psgd"])
def test_ranks_at_their_own_pace_go_on_without_the_dead(name):
    """What it has given last is left out at once, as where it departs."""
    runs = [
        simulate.train(
            simulate.least_squares(RANKS),
            sgd_for(name, 0.03, 0.0),
            name,
            steps=20,
            scenario=simulate.Scenario(asynchronous=True, **{how: CRASHES}),
        )
        for how in ("crashes", "departures")
    ]
    np.testing.assert_array_equal(runs[0].error, runs[1].error)
    assert runs[0].rank_steps[-1][1] == CRASHES[1]
