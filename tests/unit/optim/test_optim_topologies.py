"""Who averages with whom: topologies, weights by hand, machines, kinds of communication, bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import asyncddp as bf
from asyncddp import topology
from asyncddp.integrations.bluefog.bluefog_optimizer import BluefogOptimizer
from tests.support import BEFORE_DEADLINE, LoopbackWorld
from tests.unit.optim.optim_reference import (
    METHODS,
    PARAMETER_METHODS,
    batch,
    mlp,
    square_loss,
    train_here,
    vector,
)

pytestmark = pytest.mark.training

RANKS = 4
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
parameter_methods = pytest.mark.parametrize("method", PARAMETER_METHODS)
PADDED = (24 + 8 + 24 + 8) * 8  # the same with each parameter at a multiple of 64 bytes


def scalar(value=None):
    """A model of one number, the rank."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, bf.rank() if value is None else value)
    return model


def one_round(optimizer, model):
    optimizer.zero_grad()
    model(torch.zeros(1, 1, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return model.weight.item()


@parameter_methods
def test_the_contexts_topology_is_read_in_every_round(method):
    """``set_topology`` between steps takes effect with the next round; the rounds count on."""

    def case():
        bf.set_topology(topology.ring(4))
        model = scalar()
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model, method, broadcast=False
        )
        values = [one_round(optimizer, model)]
        bf.set_topology(topology.one_peer_exponential(4))
        values.append(one_round(optimizer, model))
        return values

    x = torch.arange(4.0, dtype=torch.float64)
    first = torch.from_numpy(topology.mixing_matrix(topology.ring(4))) @ x
    later = torch.from_numpy(topology.mixing_matrix(topology.one_peer_exponential(4), 1)) @ first
    got = torch.tensor(LoopbackWorld(RANKS).run(case), dtype=torch.float64)
    torch.testing.assert_close(got, torch.stack([first, later], dim=1))


@parameter_methods
def test_neighbours_set_by_hand_every_step(method):
    """The three weights win each round, as in BlueFog; in its API under older names, too."""
    names = ("self_weight", "src_weights", "dst_weights")
    older = ("self_weight", "neighbor_weights", "send_neighbors")

    def case(wrapper, names):
        model = scalar()
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        bf.set_topology(topology.ring(4))
        optimizer = wrapper(plain, model, method)
        own, sources, targets = names
        values = []
        for step in range(2):
            shift = 1 << step
            setattr(optimizer, own, 0.5)
            setattr(optimizer, sources, {(bf.rank() - shift) % 4: 0.5})
            setattr(optimizer, targets, [(bf.rank() + shift) % 4])
            values.append(one_round(optimizer, model))
        for name in names:
            setattr(optimizer, name, None)
        values.append(one_round(optimizer, model))
        return values

    ours = partial(bf.DistributedOptimizer, broadcast=False)
    for wrapper, called in ((ours, names), (BluefogOptimizer, older)):
        values = LoopbackWorld(RANKS).run(case, wrapper, called)
        assert [after[1:] for after in values] == [[1.5, 1.5]] * RANKS
        assert values[0][0] == 1.5  # rank 0 of 0 and 3


@parameter_methods
def test_weights_by_hand_on_the_topologys_neighbours(method):
    """Own and source weights alone; and a sender that scales what it sends."""

    def case():
        model = scalar()
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = bf.DistributedOptimizer(
            plain, model, method, topology=topology.ring(4), broadcast=False
        )
        optimizer.self_weight, optimizer.src_weights = 0.25, {(bf.rank() - 1) % 4: 0.75}
        first = one_round(optimizer, model)
        nn.init.constant_(model.weight, bf.rank())
        optimizer.dst_weights = {(bf.rank() + 1) % 4: 2.0}
        return first, one_round(optimizer, model)

    values = LoopbackWorld(RANKS).run(case)
    assert [one for one, _ in values] == [0.25 * r + 0.75 * ((r - 1) % 4) for r in range(RANKS)]
    assert [two for _, two in values] == [0.25 * r + 1.5 * ((r - 1) % 4) for r in range(RANKS)]


def test_incomplete_and_contradicting_weights_are_refused():
    """Half of the weights, a stranger as source: words, on every rank that asks for it."""

    def case():
        model = scalar()
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = bf.DistributedOptimizer(
            plain, model, "adapt_then_combine", topology=topology.ring(4, style="right")
        )
        optimizer.self_weight = 0.5
        with pytest.raises(bf.ArgumentError, match="expected none, the first two, or all three"):
            optimizer.step()
        optimizer.src_weights = {(bf.rank() + 1) % 4: 0.5}
        with pytest.raises(bf.ArgumentError, match="expected in-neighbours"):
            optimizer.step()

    LoopbackWorld(RANKS).run(case)


def test_neighbours_that_disagree_fail_on_both_sides():
    """Rank 0 sends to 1, which expects nothing: an error at once, not at the deadline."""

    def case():
        model = scalar()
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = bf.DistributedOptimizer(plain, model, "adapt_then_combine")
        optimizer.self_weight, optimizer.src_weights = 1.0, {}
        optimizer.dst_weights = [1] if bf.rank() == 0 else []
        optimizer.step()
        bf.barrier()  # rank 1 was done before rank 0 sent

    outcomes = LoopbackWorld(2).outcomes(case)
    errors = {outcome.error for outcome in outcomes}
    assert "MismatchError" in errors
    assert errors <= {"MismatchError", "PeerLeftError"}  # the other may hear first who has left
    for outcome in outcomes:
        assert outcome.seconds < BEFORE_DEADLINE
        assert "expected nothing from rank 0" in outcome.message
        assert "DistributedOptimizer0.bucket0" in outcome.message


@parameter_methods
def test_machines(method):
    """The mean of each machine, then the machine graph: W ⊗ J of ranks."""

    def case():
        graph = topology.ring(3, style="right")
        model = scalar()
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        make = partial(
            bf.DistributedOptimizer,
            plain,
            model,
            method,
            "hierarchical_neighbor_allreduce",
            broadcast=False,
        )
        with pytest.raises(bf.ArgumentError, match="set_machine_topology"):
            one_round(make(), model)
        with pytest.raises(
            topology.TopologyError, match=r"ring\(6\) has 6 nodes.* among 3 machines here"
        ):
            make(topology.ring(6))
        given = one_round(make(graph), model)
        nn.init.constant_(model.weight, bf.rank())
        bf.set_machine_topology(graph)
        inherited = one_round(make(), model)
        nn.init.constant_(model.weight, bf.rank())
        optimizer = make()
        machine = bf.machine_rank()
        optimizer.self_weight, optimizer.src_machine_weights = 0.0, {(machine + 1) % 3: 1.0}
        optimizer.dst_machine_weights = [(machine - 1) % 3]
        return given, inherited, one_round(optimizer, model)

    values = LoopbackWorld(6).run(case, settings={"ranks_per_machine": 2})
    means = [0.5, 2.5, 4.5]
    for rank, (given, inherited, by_hand) in enumerate(values):
        machine = rank // 2
        assert given == inherited == (means[machine] + means[(machine - 1) % 3]) / 2
        assert by_hand == means[(machine + 1) % 3]


CONSTRUCTORS = {
    bf.DistributedNeighborAllreduceOptimizer: ("adapt_with_combine", "neighbor_allreduce"),
    bf.DistributedAdaptWithCombineOptimizer: ("adapt_with_combine", "neighbor_allreduce"),
    bf.DistributedAdaptThenCombineOptimizer: ("adapt_then_combine", "neighbor_allreduce"),
    bf.DistributedGradientAllreduceOptimizer: ("gradient_allreduce", "allreduce"),
    bf.DistributedAllreduceOptimizer: ("adapt_with_combine", "allreduce"),
    bf.DistributedHierarchicalNeighborAllreduceOptimizer: (
        "adapt_with_combine",
        "hierarchical_neighbor_allreduce",
    ),
}


@pytest.mark.filterwarnings("ignore:DistributedAllreduceOptimizer averages parameters")
@pytest.mark.parametrize("kind", CONSTRUCTORS, ids=lambda kind: kind.__name__)
def test_the_fields_names(kind):
    """Each thin constructor is the general one with two arguments filled in."""

    def case():
        bf.set_machine_topology(topology.ring(2))
        model = mlp(bf.rank())
        plain = sgd(model.parameters())
        optimizer = kind(plain, model=model)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(optimizer, bf.DistributedOptimizer)
        assert optimizer.wrapped is plain
        assert optimizer.param_groups is plain.param_groups
        assert optimizer.state is plain.state
        assert optimizer.defaults is plain.defaults
        square_loss(model, batch(bf.rank(), 0)).backward()
        optimizer.step()
        assert repr(optimizer).startswith(f"{kind.__name__}({optimizer.algorithm}, ")
        return optimizer.algorithm, optimizer.communication, optimizer.round

    expected = [(*CONSTRUCTORS[kind], 1)] * RANKS
    assert LoopbackWorld(RANKS).run(case, settings={"ranks_per_machine": 2}) == expected


def test_the_default_is_adapt_then_combine():
    """Wherever ranks run: a method that followed the machines would change results with them."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(sgd(model.parameters()), model)
        return optimizer.algorithm, optimizer.communication

    for machines in (4, 1):
        got = LoopbackWorld(RANKS).run(case, settings={"ranks_per_machine": RANKS // machines})
        assert got == [("adapt_then_combine", "neighbor_allreduce")] * RANKS


def test_allreduce_of_parameters_warns_those_who_mean_gradients():
    """Once, on rank 0; it names both methods in words that do not warn."""

    def case(make):
        model = mlp(bf.rank())
        optimizer = make(sgd(model.parameters()), model)
        return optimizer.algorithm, optimizer.communication

    with pytest.warns(UserWarning, match="averages parameters over all ranks") as caught:
        expected = LoopbackWorld(RANKS).run(case, bf.DistributedAllreduceOptimizer)
    (said,) = [str(one.message) for one in caught]
    assert "DistributedGradientAllreduceOptimizer" in said
    assert caught[0].filename == __file__
    given = "algorithm='adapt_with_combine', communication='allreduce'"
    assert given in said
    meant = eval(f"partial(bf.DistributedOptimizer, {given})")
    assert LoopbackWorld(RANKS).run(case, meant) == expected


def test_a_global_average_now_and_then():
    """BlueFog's MNIST example: neighbours mostly, allreduce in some rounds."""

    def case():
        model = scalar()
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = bf.DistributedAdaptThenCombineOptimizer(
            plain, model, topology=topology.ring(4), broadcast=False
        )
        near = one_round(optimizer, model)
        optimizer.communication = "allreduce"
        everybody = one_round(optimizer, model)
        optimizer.communication = "empty"
        nn.init.constant_(model.weight, bf.rank())
        alone = one_round(optimizer, model)
        optimizer.communication = "neighbor_allreduce"
        return near, everybody, alone, one_round(optimizer, model)

    values = LoopbackWorld(RANKS).run(case)
    ring = [4 / 3, 1.0, 2.0, 5 / 3]
    assert [v[0] for v in values] == pytest.approx(ring)
    assert [v[1] for v in values] == pytest.approx([1.5] * RANKS)
    assert [v[2] for v in values] == [0.0, 1.0, 2.0, 3.0]
    assert [v[3] for v in values] == pytest.approx(ring)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("adapt_with_combine", {"topology": topology.ring(4)}, 2 * PADDED),
        ("adapt_then_combine", {"topology": topology.one_peer_exponential(4)}, PADDED),
        ("adapt_with_combine", {"communication": "allreduce"}, 2 * 3 / 4 * PADDED),
        ("gradient_allreduce", {}, 2 * 3 / 4 * (PADDED + 4 * 8)),  # and who has a gradient
        ("adapt_then_combine", {"communication": "empty"}, 0),
        (
            "adapt_then_combine",
            {"communication": "hierarchical_neighbor_allreduce", "topology": topology.ring(2)},
            (2 * 1 / 2 + 1 / 2 + 1 / 2) * PADDED,
        ),
    ],
)
def test_bytes_sent_are_counted(method, options, expected):
    """Per step: size times neighbours; what a ring sends for an allreduce."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(sgd(model.parameters()), model, method, **options)
        for step in range(3):
            optimizer.zero_grad()
            square_loss(model, batch(bf.rank(), step)).backward()
            optimizer.step()
        return optimizer.bytes_sent

    sent = LoopbackWorld(RANKS).run(case, settings={"ranks_per_machine": 2})
    assert sent == [3 * expected] * RANKS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"num_steps_per_communication": 3}])
def test_one_rank_is_plain_torch(method, options):
    """At n = 1 everything works, sends nothing, and gives bit by bit what torch gives."""

    def plain():
        model = mlp(0)
        optimizer = sgd(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            square_loss(model, batch(0, step)).backward()
            optimizer.step()
        return vector(model)

    for closure in (False, True):
        got = LoopbackWorld(1).run(train_here, method, None, sgd, 4, closure=closure, **options)
        assert torch.equal(got[0], plain())

    def leaves_the_model_alone():
        model = mlp(0)
        addresses = [p.data_ptr() for p in model.parameters()]
        optimizer = bf.DistributedOptimizer(sgd(model.parameters()), model, method)
        square_loss(model, batch(0, 0)).backward()
        optimizer.step()
        assert not model._forward_pre_hooks
        assert optimizer.bytes_sent == 0
        assert addresses == [p.data_ptr() for p in model.parameters()]

    LoopbackWorld(1).run(leaves_the_model_alone)


def test_wrong_arguments_are_refused_in_words():
    """Argument, what was expected, what was got."""

    def case():
        model = mlp(0)
        plain = sgd(model.parameters())
        stranger = mlp(1)
        for arguments, words in (
            ((model, plain), "argument optimizer: expected .* got Sequential; the order is"),
            ((bf.DistributedOptimizer(plain, model), model), "distributed already"),
            ((plain, "model"), "argument model: expected .* got str"),
            ((plain, []), "argument model: expected"),
            ((plain, stranger), r"parameter 0 of group 0, of shape \(6, 4\), belongs to none"),
        ):
            with pytest.raises(bf.ArgumentError, match=words):
                bf.DistributedOptimizer(*arguments)
        for options, words in (
            ({"num_steps_per_communication": 0}, "num_steps_per_communication: expected .* got 0"),
            ({"num_steps_per_communication": 1.5}, "num_steps_per_communication: .* got 1.5"),
            ({"bucket_size_in_mb": 0}, "bucket_size_in_mb: expected a number above 0"),
            ({"algorithm": 3}, "argument algorithm: expected one of a2cid2, ad_psgd, adapt"),
        ):
            with pytest.raises(bf.ArgumentError, match=words):
                bf.DistributedOptimizer(plain, model, **options)
        with pytest.raises(topology.TopologyError, match=r"ring\(5\) has 5 nodes, .*build it with"):
            bf.DistributedOptimizer(plain, model, topology=topology.ring(5))
        with torch.device("meta"):
            unmade = nn.Linear(2, 2)
        with pytest.raises(bf.ArgumentError, match="parameter weight is on the meta device"):
            bf.DistributedOptimizer(sgd(unmade.parameters()), unmade)

    LoopbackWorld(2).run(case)


def test_no_wrapper_before_init():
    """The error says what to call."""
    model = mlp(0)
    with pytest.raises(bf.NotInitializedError, match=r"call asyncddp.init\("):
        bf.DistributedOptimizer(sgd(model.parameters()), model)


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ("shape", r"rank 0 has parameter 0.weight of shape \(2, 3\).*rank 1 has .*\(3, 3\)"),
        ("number", "rank 1 has parameter 1.weight"),
        ("settings", "num_steps_per_communication=1, and rank 1 has num_steps_per_communication=2"),
        ("frozen", "rank 0 has parameter 0.weight .*rank 1 has parameter 0.bias"),
    ],
)
def test_ranks_that_differ_are_told_so_before_training(difference, words):
    """All ranks fail when the wrapper is made, and see the first difference."""

    def case():
        other = bf.rank() == 1
        model = nn.Sequential(nn.Linear(3, 3 if other and difference == "shape" else 2))
        if other and difference == "number":
            model.append(nn.Linear(2, 2))
        if other and difference == "frozen":
            model[0].weight.requires_grad_(False)
        steps = 2 if other and difference == "settings" else 1
        with pytest.raises(bf.MismatchError, match=words):
            bf.DistributedOptimizer(
                sgd(model.parameters()), model, num_steps_per_communication=steps, broadcast=False
            )

    LoopbackWorld(2).run(case)
