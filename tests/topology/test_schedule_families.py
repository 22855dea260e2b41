"""Time-varying graphs against definitions and golden values."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest

from asyncddp import topology
from asyncddp.topology.schedules.equi_dynamic import pair_up
from tests.topology.graph_cases import oracle, product


def sends(schedule: topology.Schedule, k: int, ranks: int | None = None) -> list[int | None]:
    """To whom the first ranks send in round k, None where they send nothing."""
    views = [schedule.neighbors(rank, k) for rank in range(ranks or schedule.n)]
    assert all(len(view.dst_ranks) <= 1 for view in views)
    return [next(iter(view.dst_ranks), None) for view in views]


@pytest.mark.parametrize("n", [2, 4, 8, 32])
def test_one_peer_exponential_is_exact_in_any_order_of_its_rounds(n):
    """For n a power of two the rounds of one period multiply to J in any order."""
    schedule = topology.one_peer_exponential(n)
    rounds = [oracle(schedule.graph(k)) for k in range(schedule.period)]
    for order in itertools.islice(itertools.permutations(rounds), 12):
        done = np.linalg.multi_dot([*order, np.eye(n)])
        np.testing.assert_allclose(done, 1 / n, atol=1e-15)


def test_one_peer_exponential_round_is_half_identity_half_shift():
    """Round k is (I + shift by 2^(k mod 3)) / 2 on six ranks, with period 3."""
    schedule = topology.one_peer_exponential(6)
    assert schedule.period == 3
    for k in range(5):
        shift = np.roll(np.eye(6), 2 ** (k % 3), axis=0)
        np.testing.assert_array_equal(oracle(schedule.graph(k)), (np.eye(6) + shift) / 2)


@pytest.mark.parametrize("n", [3, 5, 6, 12])
def test_one_peer_exponential_only_approaches_the_average_for_other_n(n):
    """For n no power of two there is no finite-time length; the rate is between 0 and 1."""
    schedule = topology.one_peer_exponential(n)
    assert topology.finite_time_length(schedule) is None
    assert 0 < topology.consensus_rate(schedule) < 1


@pytest.mark.parametrize("n", [2, 4, 16])
def test_one_peer_hypercube_is_symmetric_and_exact(n):
    """In round 1 rank r sends to r XOR 2 (XOR 1 of two ranks); a period multiplies to J."""
    schedule = topology.one_peer_hypercube(n)
    assert sends(schedule, 1 % schedule.period) == [r ^ (2 % n or 1) for r in range(n)]
    np.testing.assert_allclose(product(schedule, schedule.period), 1 / n, atol=1e-15)


def test_shift_one_is_the_golden_schedule():
    """The partners of four and of six ranks in every round; it repeats after n / 2."""
    schedule = topology.shift_one(4)
    assert [sends(schedule, k) for k in range(3)] == [[2, 3, 0, 1], [3, 2, 1, 0], [2, 3, 0, 1]]
    golden = [[3, 4, 5, 0, 1, 2], [4, 5, 3, 2, 0, 1], [5, 3, 4, 1, 2, 0]]
    assert [sends(topology.shift_one(6), k) for k in range(3)] == golden
    assert [topology.shift_one(n).period for n in (1, 2, 4, 6)] == [1, 1, 2, 3]


@pytest.mark.parametrize("n", range(2, 40, 2))
def test_shift_one_matches_every_rank_with_all_of_the_other_half(n):
    """A round is a perfect matching between halves, and a period has each pair once."""
    schedule, half = topology.shift_one(n), n // 2
    met = set()
    for k in range(schedule.period):
        partner = sends(schedule, k)
        assert all(partner[partner[rank]] == rank for rank in range(n))
        assert all((partner[rank] < half) != (rank < half) for rank in range(n))
        met |= set(enumerate(partner))
    assert len(met) == n * half


@pytest.mark.parametrize("n", [3, 5, 7, 101])
def test_shift_one_refuses_odd_n_and_names_what_works(n):
    """The message has the count, and each schedule that it offers can be built."""
    with pytest.raises(topology.TopologyError, match=f"even n, .* got n={n}; nearest") as caught:
        topology.shift_one(n)
    assert f"or use one_peer_exponential({n}) or base_k({n}, 1)" in str(caught.value)
    assert topology.one_peer_exponential(n).n == topology.base_k(n, 1).n == n
    assert topology.shift_one(n - 1).n + 2 == topology.shift_one(n + 1).n


def test_one_peer_of_takes_neighbours_clockwise_in_turn():
    """``one_peer_of`` sends to the out-neighbours one per round, by distance ahead."""
    exp2 = topology.one_peer_of(topology.exponential_two(8))
    assert [exp2.neighbors(0, k).dst_ranks for k in range(4)] == [(1,), (2,), (4,), (1,)]
    ring = topology.one_peer_of(topology.ring(4))
    assert (sends(ring, 0), sends(ring, 1)) == ([1, 2, 3, 0], [3, 0, 1, 2])
    assert ring.period == 2


def test_one_peer_of_a_star_receives_from_all_leaves_at_once():
    """A star's center sends to one leaf a round, receives from all; only rows sum to one."""
    star = topology.one_peer_of(topology.star(4))
    assert star.period == 3
    assert [star.neighbors(0, k).dst_ranks for k in range(4)] == [(1,), (2,), (3,), (1,)]
    assert star.neighbors(0, 1).src_weights == {1: 0.25, 2: 0.25, 3: 0.25}
    assert star.neighbors(2, 1) == topology.Neighbors(0.5, {0: 0.5}, (0,))
    assert star.neighbors(2, 0) == topology.Neighbors(1.0, {}, (0,))
    assert not topology.is_doubly_stochastic(star)
    assert topology.is_row_stochastic(star)


def test_one_peer_of_a_grid_is_the_golden_round():
    """Round 0 of a grid is the reference's; a rank to which none sends has no sources."""
    grid = topology.one_peer_of(topology.grid_2d(6))
    assert sends(grid, 0) == [1, 2, 5, 4, 5, 2]
    assert list(grid.neighbors(2, 0).src_weights) == [1, 5]
    assert list(grid.neighbors(5, 0).src_weights) == [2, 4]
    assert grid.neighbors(0, 0).src_weights == grid.neighbors(3, 0).src_weights == {}


def test_inner_outer_ring_is_the_golden_schedule():
    """``inner_outer_ring(8, 4)`` has the reference's destinations in its four rounds."""
    schedule = topology.inner_outer_ring(8, 4)
    golden = [[4, 2, 3, 1], [2, 5, 3, 0], [1, 3, 6, 0], [1, 2, 0, 7]]
    assert [sends(schedule, k, 4) for k in range(4)] == golden
    assert schedule.period == 4


def test_inner_outer_exponential_is_the_golden_schedule():
    """``inner_outer_exponential(8, 4)`` has the reference's destinations in its four rounds."""
    schedule = topology.inner_outer_exponential(8, 4)
    golden = [[4, 2, 3, 1], [3, 5, 0, 2], [1, 3, 6, 0], [2, 0, 1, 7]]
    assert [sends(schedule, k, 4) for k in range(4)] == golden
    assert schedule.period == 4


@pytest.mark.parametrize("family", [topology.inner_outer_ring, topology.inner_outer_exponential])
def test_inner_outer_sends_and_receives_are_inverse_permutations(family):
    """In every round 2W − I is a permutation: each rank sends to one and receives from one."""
    for size, machines in itertools.product((3, 4, 5, 8), (1, 2, 3, 6)):
        schedule = family(size * machines, size)
        for k in range(12):
            w = oracle(schedule.graph(k))
            step = 2 * w - np.eye(schedule.n)
            assert set(np.unique(step)) <= {0.0, 1.0}
            np.testing.assert_array_equal(step.sum(axis=0), 1)
            np.testing.assert_array_equal(step.sum(axis=1), 1)


@pytest.mark.parametrize(
    ("n", "size", "rounds", "distance"),
    [
        (16, 4, 8, 0.32),
        (16, 4, 16, 0.096),
        (16, 4, 32, 8.7e-3),
        (16, 4, 60, 1.3e-4),
        (32, 8, 16, 0.37),
        (32, 8, 32, 0.13),
        (32, 8, 60, 0.020),
    ],
)
def test_inner_outer_exponential_reaches_the_golden_distance(n, size, rounds, distance):
    """‖product − J‖₂ after the listed numbers of rounds is the golden distance within 6 %."""
    done = product(topology.inner_outer_exponential(n, size), rounds)
    assert np.linalg.norm(done - 1 / n, 2) == pytest.approx(distance, rel=0.06)


@pytest.mark.parametrize(("machines", "size"), [(2, 4), (4, 4), (8, 4), (4, 1), (1, 3), (2, 1)])
def test_alternating_exponential_ring_is_exact_after_two_rounds_per_stage(machines, size):
    """It is exact after 2·log₂(machines) rounds (at least one) and not a round earlier."""
    n = machines * size
    schedule = topology.alternating_exponential_ring(n, size)
    stages = machines.bit_length() - 1
    assert schedule.period == max(1, 2 * stages)
    np.testing.assert_allclose(product(schedule, schedule.period), 1 / n, atol=1e-15)
    if stages:
        assert abs(product(schedule, schedule.period - 1) - 1 / n).max() > 0.1 / n


def test_alternating_exponential_ring_uses_the_network_by_half_of_the_pairs():
    """In each round half of the ranks have 7 destinations, the other half 3."""
    schedule = topology.alternating_exponential_ring(32, 4)
    for k in range(schedule.period):
        degrees = [len(schedule.neighbors(rank, k).dst_ranks) for rank in range(32)]
        assert sorted(set(degrees)) == [3, 7]
        assert degrees.count(7) == 16


def contraction(rounds: list[np.ndarray]) -> float:
    """The factor of the mean squared distance: the greatest eigenvalue of E[WᵀW] beside one's."""
    n = len(rounds[0])
    second = np.mean([w.T @ w for w in rounds], axis=0)
    return float(np.linalg.eigvalsh(second - 1 / n)[-1])


def _directed(n: int, shift: int, eta: float) -> np.ndarray:
    return (1 - eta) * np.eye(n) + eta * (
        np.eye(n) / n + (n - 1) / n * np.roll(np.eye(n), shift, axis=1)
    )


def _one_round_of_each_shift(n: int, eta: float) -> list[np.ndarray]:
    """The first round of the schedule in which rank 0 receives from 1, from 2, and so on."""
    schedule, rounds, k = topology.equi_dynamic(n, seed=0, eta=eta), {}, 0
    while len(rounds) < n - 1:
        (shift,) = schedule.neighbors(0, k).src_weights
        if shift not in rounds:
            rounds[shift] = oracle(schedule.graph(k))
        k += 1
    return list(rounds.values())


@pytest.mark.parametrize(("n", "factor"), [(8, 0.4375), (16, 0.46875), (64, 0.49219)])
def test_equi_dynamic_directed_contracts_by_the_theorem(n, factor):
    """A round of each shift, averaged over all shifts, contracts by the factor of the theorem."""
    found = {}
    for eta in (0.5, 1.0, 0.3):
        a = eta * (n - 1) / n
        theorem = (1 - a) ** 2 + a**2 - 2 * a * (1 - a) / (n - 1)
        found[eta] = contraction(_one_round_of_each_shift(n, eta))
        assert found[eta] == pytest.approx(theorem, abs=1e-12)
    assert found[0.5] == pytest.approx(factor, abs=1e-5)
    assert found[1.0] == pytest.approx(1 - 2 / n)


def test_equi_dynamic_rounds_are_the_definition_with_every_shift():
    """Each directed round is the definition's matrix for one shift, and all shifts occur."""
    n = 6
    schedule = topology.equi_dynamic(n, seed=1)
    seen = set()
    for k in range(40):
        w = oracle(schedule.graph(k))
        shift = next(iter(schedule.neighbors(0, k).src_weights))
        np.testing.assert_allclose(w, _directed(n, shift, 0.5), atol=1e-15)
        seen.add(shift)
    assert seen == set(range(1, n))
    assert schedule.period is None


@pytest.mark.parametrize(
    ("n", "factor"), [(8, 0.50781), (16, 0.54114), (25, 0.55840), (31, 0.56034)]
)
def test_equi_dynamic_undirected_contracts_by_the_enumerated_factor(n, factor):
    """Matchings by ``pair_up`` over all shifts and starts contract by the enumerated factor."""
    rounds = []
    for shift, start in itertools.product(range(1, n), range(n)):
        matching = np.eye(n)[list(pair_up(n, shift, start))]
        rounds.append(0.5 * np.eye(n) + 0.5 * (np.eye(n) / n + (n - 1) / n * matching))
    assert contraction(rounds) == pytest.approx(factor, abs=1e-5)


def test_equi_dynamic_undirected_is_a_matching_and_mixes_as_enumerated():
    """Undirected rounds are symmetric matchings with one weight, and mix as enumerated."""
    n = 8
    schedule = topology.equi_dynamic(n, seed=0, directed=False)
    rounds = [oracle(schedule.graph(k)) for k in range(600)]
    for w in rounds[:50]:
        np.testing.assert_array_equal(w, w.T)
        assert ((w > 0).sum(axis=1) <= 2).all()
        used = w[~np.eye(n, dtype=bool) & (w > 0)]
        np.testing.assert_allclose(used, 0.5 * (n - 1) / n)
    squared = (np.mean([np.sum(w**2) for w in rounds]) - 1) / (n - 1)
    assert squared == pytest.approx(0.47768, abs=0.015)  # tr(E[WᵀW] - J) / (n - 1), enumerated


def test_equi_dynamic_eta_sets_how_much_a_round_mixes():
    """With ``eta=1`` the self weight is 1/n."""
    schedule = topology.equi_dynamic(8, seed=0, eta=1.0)
    assert schedule.neighbors(0, 0).self_weight == pytest.approx(1 / 8)


def test_seeds_give_different_schedules():
    """Two seeds of ``equi_dynamic`` and of ``matcha`` give different neighbours in 20 rounds."""
    for family in (
        topology.equi_dynamic,
        lambda n, seed: topology.matcha(topology.ring(n), 0.5, seed),
    ):
        a, b = (
            [family(16, seed).neighbors(3, k) for k in range(20)] for seed in (0, 1)
        )  # fmt: skip
        assert a != b


def test_own_schedule_needs_one_function_only():
    """A ``Schedule`` made of one look-up function gives graphs, figures and a ``repr``."""

    def look_up(rank: int, k: int) -> topology.Neighbors:
        peer = (k - rank) % 5
        return (
            topology.Neighbors(0.5, {peer: 0.5}, (peer,))
            if peer != rank
            else topology.Neighbors(1.0, {}, ())
        )

    schedule = topology.Schedule("mirror", 5, 5, look_up)
    assert topology.is_symmetric(schedule)
    assert nx.is_strongly_connected(nx.compose(schedule.graph(0), schedule.graph(1)))
    assert repr(schedule) == "Schedule(name='mirror', n=5, period=5)"


@pytest.mark.parametrize("n", [2, 5, 8])
def test_random_matching_pairs_ranks_up(n):
    """Who is i's partner has i for a partner; of an odd number one stays alone; rounds differ."""
    schedule = topology.random_matching(n, seed=3)
    rounds = [tuple(sends(schedule, k)) for k in range(20)]
    for partners in rounds:
        assert sum(partner is None for partner in partners) == n % 2
        assert all(partners[p] == i for i, p in enumerate(partners) if p is not None)
    assert n == 2 or len(set(rounds)) > 3
    assert n == 2 or rounds != [tuple(sends(topology.random_matching(n), k)) for k in range(20)]


@pytest.mark.parametrize(("branching", "longest"), [(1, 6), (2, 4), (6, 2)])
def test_tree_has_one_way_between_any_two(branching, longest):
    """n - 1 edges, and the longest way of a chain, a binary tree, a star of seven ranks."""
    graph = topology.tree(7, branching)
    assert sum(i < j for i, j in graph.edges) == 6
    assert nx.diameter(graph) == longest


@pytest.mark.parametrize(
    ("graph", "period"),
    [
        (topology.ring(8), 2),
        (topology.ring(5), 3),
        (topology.star(5), 4),
        (topology.complete(8), 7),
        (topology.hypercube(8), 3),
    ],
    ids=str,
)
def test_a_matching_decomposition_has_each_edge_once_in_a_period(graph, period):
    """Every round is a matching, and all rounds together are the graph."""
    schedule, n = topology.matching_decomposition(graph), graph.number_of_nodes()
    assert schedule.period == period
    edges = [
        (rank, peer)
        for k in range(period)
        for rank in range(n)
        for peer in schedule.neighbors(rank, k).dst_ranks
    ]
    assert sorted(edges) == sorted((i, j) for i, j in graph.edges if i != j)
    assert all(
        len(schedule.neighbors(rank, k).dst_ranks) <= 1 for k in range(period) for rank in range(n)
    )


def test_a_matching_decomposition_needs_both_directions():
    """An edge that goes one way is no pair: the error names it."""
    with pytest.raises(topology.TopologyError, match=r"has 0 -> 1 only; use graph\.to_un"):
        topology.matching_decomposition(topology.ring(4, "right"))
