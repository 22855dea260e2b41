"""A simulation gives what ranks give: every method, optimizer and compressor, to 1e-12."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import asyncddp as bf
from asyncddp import simulate, topology
from asyncddp.algorithms import ALGORITHMS, CommunicationPattern
from asyncddp.algorithms.method_traits import JoinedRanks
from asyncddp.compression import COMPRESSORS
from asyncddp.simulate.problem import StackedBatches
from asyncddp.simulate.stacked_model import StackedModel
from asyncddp.simulate.stacked_optimizer import StackedOptimizer
from asyncddp.topology import Link, Links
from tests.support import RanksFailedError
from tests.support.methods import one_of_each_kind
from tests.unit.simulate.loopback import train_on_loopback

pytestmark = pytest.mark.training

RANKS, STEPS = 5, 12
SHORT = 7
"""Steps that are enough for a warm-up to end, and to average twice where every third step does."""
TOLERANCE = 1e-12


def problem(ranks=RANKS, start=0.3):
    """A small network in float64 whose parameters need padding; ranks start apart."""
    generator = torch.Generator().manual_seed(3)
    models = []
    for rank in range(ranks):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=False)
        ).double()
        for parameter in model.parameters():
            parameter.data += start * rank / ranks
        models.append(model)
    data = [
        (
            torch.randn(7 + rank, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (7 + rank,), generator=generator),
        )
        for rank in range(ranks)
    ]
    return simulate.Problem(models, F.cross_entropy, data, batch_size=4)


def sgd(parameters):
    """Momentum and weight decay, so that the optimizer has a state."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.8, weight_decay=0.01)


def plain_sgd(parameters):
    """For the methods that keep momentum themselves."""
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)


def qadam(parameters):
    """For the method that needs its momentum; the warm-up ends on the way."""
    return bf.QAdamOptimizer(parameters, lr=0.05, warmup_steps=5)


def optimizer_of(name):
    """An optimizer with which the method works."""
    if name == "qadam":
        return qadam
    return plain_sgd if ALGORITHMS[name].owns_momentum else sgd


def is_global(name):
    """Whether the method can average over all ranks."""
    return CommunicationPattern.GLOBAL in ALGORITHMS[name]().how


def same(simulated, real, ranks=slice(None)):
    """Whether all parameters are equal to 1e-12, relative to the largest of each."""
    assert list(simulated) == list(real)
    for name, one in real.items():
        scale = max(1.0, float(one.abs().max()))
        apart = (simulated[name] - one)[ranks].abs().max()
        assert float(apart) <= TOLERANCE * scale, name


def graph_for(method, ranks=RANKS):
    """A graph that the method can live with; one that changes where it may."""
    return next(
        graph
        for graph in (topology.base_k(ranks, 1), *static_graphs(ranks))
        if not any(method.needs.problems(graph))
    )


def static_graphs(ranks):
    """Graphs that do not change."""
    return topology.ring(ranks), topology.tree(ranks), topology.complete(ranks)


def short(name):
    """Options by which a method averages often enough, and warms up, in a few steps."""
    wanted = {"communication_interval": 3, "warmup_steps": 4}
    parameters = inspect.signature(ALGORITHMS[name]).parameters
    return {key: value for key, value in wanted.items() if key in parameters}


def settings_of(name):
    """The settings with which a method is compared: neighbours, on a graph that fits."""
    method = ALGORITHMS[name]()
    if method.how == (CommunicationPattern.GLOBAL,):
        return short(name)
    settings = {"topology": graph_for(method), **short(name)}
    if CommunicationPattern.NEIGHBORS in method.how:
        settings["communication"] = "neighbor_allreduce"
    return settings


def compare(name, optimizer, given=None, steps=STEPS, **settings):
    """Train both ways, and hold the simulation to what the ranks got."""
    start = 0.0 if ALGORITHMS[name]().replicates_model else 0.3
    given = problem(start=start) if given is None else given
    run = simulate.train(given, optimizer, name, steps=steps, record_every=steps, **settings)
    real, sent = train_on_loopback(given, optimizer, name, steps, **settings)
    same(run.parameters, real)
    assert abs(run.bytes_sent[-1] - sum(sent) / len(sent)) <= steps  # they are rounded on ranks
    assert run.seconds[-1] > 0


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_method_gives_what_ranks_give(name):
    """Parameters and bytes of every method of the registry, with its default compressor."""
    compare(name, optimizer_of(name), **settings_of(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", one_of_each_kind(n for n in ALGORITHMS if "NEIGHBORS" in str(ALGORITHMS[n]().how))
)
def test_static_graphs_and_local_steps(name):
    """A static graph, and three steps to one averaging."""
    needs = ALGORITHMS[name]().needs
    graph = next(one for one in static_graphs(RANKS) if not any(needs.problems(one)))
    settings = {**settings_of(name), "topology": graph}
    if ALGORITHMS[name]().communication_interval is None:
        settings["num_steps_per_communication"] = 3
    compare(name, optimizer_of(name), steps=SHORT, **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", one_of_each_kind(filter(is_global, ALGORITHMS)))
def test_averages_over_all(name):
    """Whatever a method averages, over all ranks."""
    compare(name, optimizer_of(name), steps=SHORT, communication="allreduce", **short(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", one_of_each_kind(ALGORITHMS))
def test_ranks_that_train_alone(name):
    """No averages at all."""
    compare(name, optimizer_of(name), steps=SHORT, communication="empty", **short(name))


DEPARTURES = {1: 6, 3: 8}
"""After the end of each warm-up, which ranks make together."""
WAITING = [n for n in ALGORITHMS if not all(how.one_sided for how in ALGORITHMS[n].how)]
KINDS = one_of_each_kind(ALGORITHMS)


def compare_departures(name, optimizer, given=None, **settings):
    """Let two ranks leave, which are done within ``join``; they keep models that are their own."""
    replicates = ALGORITHMS[name]().replicates_model
    given = problem(start=0.0 if replicates else 0.3) if given is None else given
    scenario = simulate.Scenario(departures=DEPARTURES)
    run = simulate.train(given, optimizer, name, steps=STEPS, scenario=scenario, **settings)
    real, sent = train_on_loopback(given, optimizer, name, STEPS, departures=DEPARTURES, **settings)
    there = [rank for rank in range(given.ranks) if rank not in DEPARTURES]
    leave = ALGORITHMS[name].joined_ranks is JoinedRanks.LEAVE and not replicates
    same(run.parameters, real, slice(None) if leave else there)
    assert abs(run.bytes_sent[-1] - np.mean([sent[rank] for rank in there])) <= STEPS


def often(name):
    """Options by which a method averages in each second step, with the last of a warm-up."""
    options = short(name)
    return (
        {**options, "communication_interval": 2} if "communication_interval" in options else options
    )


@pytest.mark.parametrize("name", one_of_each_kind(WAITING))
def test_ranks_that_leave(name):
    """Every method goes on without them as within ``join``, with what it asks neighbours anew."""
    compare_departures(name, optimizer_of(name), **{**settings_of(name), **often(name)})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [n for n in KINDS if n in WAITING and is_global(n)])
def test_ranks_that_leave_averages_over_all(name):
    """They give zeros, encoded too, and the others divide by their own number."""
    compare_departures(name, optimizer_of(name), communication="allreduce", **often(name))


ROUNDED = {(name, how) for name in ("bytegrad",) for how in ("lloyd_max_int2", "top_k_int2")}
"""Of what a rank owes, an element that was sent exactly lies on the border of two bins, up to the
last place: ranks that sum in another order take the other one."""
OWING = ("bytegrad", "choco_sgd", "deepsqueeze")
LEAVING = [(OWING[k % 3], how) for k, how in enumerate(COMPRESSORS)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "compression"), [p for p in LEAVING if p not in ROUNDED])
def test_ranks_that_leave_with_every_compressor(name, compression):
    """What a rank owes by error feedback arrives after it has left, as its zeros are encoded."""
    compare_departures(name, sgd, compression=compression)


@pytest.mark.parametrize("name", ["choco_sgd", "low_precision_decentralized", "power_gossip"])
def test_ranks_that_leave_with_several_buckets(name):
    """Each is asked for by itself."""
    compare_departures(name, sgd, bucket_size_in_mb=1e-5)


@pytest.mark.parametrize("name", ["beer", "gradient_tracking"])
def test_ranks_that_leave_those_that_train_alone(name):
    """Trackers go on, as nobody asks neighbours."""
    compare_departures(name, sgd, communication="empty")


def test_ranks_that_leave_keep_what_they_would_give():
    """Where columns of W sum to one, the senders' weights grow, not the receivers'."""
    graph = topology.push_weights(topology.exponential_two(RANKS))
    compare_departures("push_diging", sgd, topology=graph)
    directed = topology.push_weights(topology.star(RANKS))
    compare_departures("push_diging", sgd, topology=directed)


def test_ranks_that_leave_a_schedule():
    """Rounds with other neighbours each, of which some have left."""
    compare_departures("adapt_then_combine", sgd, topology=topology.base_k(RANKS, 1))
    options = {"communication_interval": 2, "base": "adapt_then_combine"}
    compare_departures("slowmo", sgd, topology=topology.base_k(RANKS, 1), **options)


MACHINES = one_of_each_kind(
    n for n in ALGORITHMS if CommunicationPattern.MACHINES in ALGORITHMS[n]().how
)


def compare_machines(name, given, local, steps=6, **settings):
    """Train on machines of so many ranks both ways; parameters and bytes are to be the same."""
    scenario, optimizer = simulate.Scenario(links=Links(Link(), local)), optimizer_of(name)
    run = simulate.train(given, optimizer, name, steps=steps, scenario=scenario, **settings)
    real, sent = train_on_loopback(given, optimizer, name, steps, local=local, **settings)
    same(run.parameters, real)
    assert abs(run.bytes_sent[-1] - sum(sent) / len(sent)) <= steps  # they are rounded on ranks
    assert run.seconds[-1] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "local"), [(name, 1 + k % 3) for k, name in enumerate(MACHINES)])
def test_machines(name, local):
    """Means per machine, and averages between machines; the first rank encodes differences."""
    graph = topology.lazy_weights(topology.ring(3))
    settings = {"topology": graph, "communication": "hierarchical_neighbor_allreduce"}
    compare_machines(name, problem(3 * local), local, **settings)


@pytest.mark.parametrize("compression", ["qsgd_int8", "fp16"])
def test_compressed_parameters_between_machines(compression):
    """Each rank encodes its share of the mean of its machine."""
    settings = {"topology": topology.base_k(3, 1), "compression": compression}
    given, communication = problem(6), "hierarchical_neighbor_allreduce"
    plain = {"plain_compression": True, "communication": communication}
    compare_machines("adapt_then_combine", given, 2, **settings, **plain)


@pytest.mark.parametrize("local", [2, 3])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gradient_allreduce", {"hierarchical": True}),
        ("gradient_allreduce", {"hierarchical": True, "average": False}),
        ("gradient_allreduce", {"hierarchical": True, "compression": "qsgd_int8"}),
        ("bytegrad", {"hierarchical": True}),
        ("adapt_then_combine", {"communication": "hierarchical_allreduce"}),
        ("des_loc", {"communication": "hierarchical_allreduce", "communication_interval": 2}),
    ],
)
def test_averages_over_all_by_one_rank_of_each_machine(name, settings, local):
    """Sums inside machines, which their first ranks average, encoded where there is a codec."""
    start = 0.0 if ALGORITHMS[name]().replicates_model else 0.3
    compare_machines(name, problem(6, start=start), local, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 5}, "5 ranks are no whole number of machines with ranks_per_machine=2"),
        ({"loss": 0.1}, "loss: averages inside machines need all .*, or retransmit_after=0.2"),
        ({"departures": {1: 2}}, "averages inside machines need all their ranks, within join on"),
        ({"graph": topology.ring(4)}, "has data of 4 ranks on 2 machines; build it with n=2"),
    ],
)
def test_machines_that_cannot_be(settings, message):
    """The argument, and what to do."""
    settings = dict(settings)
    given = problem(settings.pop("ranks", 4))
    graph = settings.pop("graph", None)
    scenario = simulate.Scenario(links=Links(Link(), 2), **settings)
    communication = "hierarchical_neighbor_allreduce"
    with pytest.raises((bf.ArgumentError, topology.TopologyError), match=message):
        simulate.train(
            given, sgd, steps=1, topology=graph, scenario=scenario, communication=communication
        )


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_who_leaves_a_machine_whose_ranks_average_for_each_other(algorithm):
    """Real ranks refuse it too; the remedy is an average over all ranks without machines."""
    scenario = simulate.Scenario(links=Links(Link(), 2), departures={1: 2})
    given, settings = problem(4, start=0.0), {"hierarchical": True}
    with pytest.raises(bf.ArgumentError, match="hierarchical_allreduce needs all ranks of each"):
        simulate.train(given, sgd, algorithm, steps=1, scenario=scenario, **settings)
    with pytest.raises(RanksFailedError, match="hierarchical_allreduce needs all ranks in every"):
        train_on_loopback(given, sgd, algorithm, 3, local=2, departures={1: 2}, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "nodes"),
    [
        ("adapt_then_combine", {}, 6),
        ("choco_sgd", {"hierarchical": True}, 3),
        ("adapt_then_combine", {"communication": "hierarchical_neighbor_allreduce"}, 3),
        ("win_put", {}, 6),
        ("gradient_allreduce", {}, None),
        ("adapt_then_combine", {"communication": "empty"}, None),
    ],
)
def test_a_function_builds_the_topology_of_ranks_or_machines(name, settings, nodes):
    """It is asked for as many nodes as the method has, and not where it has none."""
    asked = []

    def build(n):
        asked.append(n)
        return topology.ring(n)

    given, scenario = problem(6, start=0.0), simulate.Scenario(links=Links(Link(), 2))
    run = simulate.train(given, sgd, name, steps=3, topology=build, scenario=scenario, **settings)
    assert asked == ([] if nodes is None else [nodes])
    graph = None if nodes is None else topology.ring(nodes)
    same_run = simulate.train(
        given, sgd, name, steps=3, topology=graph, scenario=scenario, **settings
    )
    same(run.parameters, same_run.parameters)


def test_column_stochastic_weights():
    """Push-DIGing's weight differs between ranks, and travels along."""
    graph = topology.push_weights(topology.star(RANKS))
    compare("push_diging", sgd, topology=graph)


@pytest.mark.parametrize("name", ["gradient_tracking", "momentum_tracking"])
@pytest.mark.parametrize("form", ["atc", "diging"])
def test_both_forms_of_tracking(name, form):
    """Combination after the update, and during forward and backward pass."""
    compare(name, optimizer_of(name), topology=topology.base_k(RANKS, 1), form=form)


def adam(parameters):
    """Its moments travel with ``des_loc``."""
    return torch.optim.Adam(parameters, lr=0.05)


def adam_by_rank(parameters):
    """A class of the user's own, of which nobody knows whether it treats each element by itself."""
    return type("Mine", (torch.optim.Adam,), {})(parameters, 0.05)


def test_moments_that_travel():
    """An optimizer for all ranks keeps them stacked; those of one for each rank are stacked."""
    intervals = {"exp_avg": 3, "exp_avg_sq": 4}
    settings = {"communication_interval": 2, "state_intervals": intervals}
    for optimizer in (adam, adam_by_rank):
        compare("des_loc", optimizer, **settings)
        compare_departures("des_loc", optimizer, **settings)
    compare("des_loc", RANK_BY_RANK["a subclass"], communication_interval=2)


def test_state_of_an_optimizer_that_cannot_be_averaged():
    """Row and column sums are of another shape than the parameter, as real ranks say too."""
    factored, settings = RANK_BY_RANK["Adafactor"], {"state_intervals": {"row_var": 2}}
    words = "what it keeps of 0.weight as 'row_var' cannot be averaged with the parameters"
    with pytest.raises(bf.ArgumentError, match=words):
        simulate.train(problem(), factored, "des_loc", steps=4, **settings)
    with pytest.raises(RanksFailedError, match=words):
        train_on_loopback(problem(), factored, "des_loc", 4, **settings)


def test_neighbours_and_all_by_turns():
    """SlowMo over gossip: two rounds with neighbours, one with all ranks."""
    options = {"communication_interval": 3, "base": "adapt_then_combine"}
    compare("slowmo", sgd, topology=topology.base_k(RANKS, 1), **options)
    compare("slowmo", sgd, communication="empty", **options)


@pytest.mark.parametrize("compression", [None, "qsgd_int4"])
def test_fragments_that_arrive_later(compression):
    """Each has its turn; outer gradients are encoded as on real ranks."""
    options = {"communication_interval": 2, "fragments": 3, "compression": compression}
    compare("streaming_diloco", sgd, problem(start=0.0), **options)


def test_force_overrules_the_check_of_the_topology():
    """D² on a graph that it is refused on, which both ways compute alike."""
    graph = topology.ring(RANKS, style="right")
    compare("d2", sgd, topology=graph, force=True, steps=4)


@pytest.mark.parametrize(
    "name", ["adapt_then_combine", "gradient_allreduce", "choco_sgd", "bytegrad"]
)
def test_several_buckets(name):
    """Buckets of one parameter each have compressors and seeds of their own."""
    compare(name, sgd, bucket_size_in_mb=1e-5)


@pytest.mark.parametrize(
    ("name", "compression"),
    [(("gradient_allreduce", "choco_sgd")[k % 2], how) for k, how in enumerate(COMPRESSORS)],
)
def test_every_compressor(name, compression):
    """Each rank encodes by its own state and seeds, in both messages of an average over all."""
    compare(name, sgd, compression=compression, steps=6)


def test_compressed_parameters():
    """A rank averages what neighbours decode with its own parameters as they are."""
    compare("adapt_then_combine", sgd, compression="qsgd_int8", plain_compression=True)


def test_push_sum_on_a_digraph_whose_degrees_differ():
    """Shares are 1 / (out-degree + 1), and models hold the ratio."""
    compare("push_sum", sgd, topology=topology.star(RANKS))


FEW = [(name, 1 + k % 3) for k, name in enumerate(one_of_each_kind(ALGORITHMS))]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "ranks"), FEW)
def test_few_ranks(name, ranks):
    """One rank alone trains as plain torch does; two or three as on real ranks."""
    compare(name, optimizer_of(name), problem(ranks, start=0.0), steps=SHORT, **short(name))


ELEMENTWISE = {
    "SGD nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.05, t0=3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "AccumAdamW": lambda p: bf.AccumAdamW(p, 0.01, accum_iter=3),
    "two groups": (
        lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.01)
    ),
}
RANK_BY_RANK = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "a subclass": lambda p: type("Mine", (torch.optim.SGD,), {})(p, 0.05, momentum=0.9),
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *RANK_BY_RANK])
def test_every_optimizer(name):
    """Those that treat each element by itself run once for all ranks, others rank by rank."""
    compare("adapt_then_combine", {**ELEMENTWISE, **RANK_BY_RANK}[name], steps=SHORT)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *RANK_BY_RANK])
def test_optimizers_run_once_where_they_can(name):
    """One optimizer for all ranks is what makes thousands of ranks fast."""
    model = StackedModel(problem(), 1 << 20)
    create = {**ELEMENTWISE, **RANK_BY_RANK}[name]
    assert StackedOptimizer(model, create).elementwise is (name in ELEMENTWISE)


@pytest.mark.parametrize("optimizer", [sgd, RANK_BY_RANK["Adafactor"]])
def test_schedules_of_the_learning_rate(optimizer):
    """A scheduler goes on after each step, also where each rank has its own."""

    def halving(one):
        return torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5)

    given = problem()
    run = simulate.train(given, optimizer, steps=6, schedule=halving)
    flat = simulate.train(given, optimizer, steps=6)
    real, _ = train_on_loopback(given, optimizer, "adapt_then_combine", 6, schedule=halving)
    same(run.parameters, real)
    assert any((run.parameters[name] != flat.parameters[name]).any() for name in real)


@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_batch_normalisation_keeps_running_means_for_each_rank(chunk):
    """Buffers are stacked too: the means are those that each rank's module would have."""
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator))
        for _ in range(3)
    ]
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    given = simulate.Problem(net, F.mse_loss, data)
    model = StackedModel(given, 1 << 20, chunk)
    for _ in range(2):
        model.gradients(StackedBatches(given, 0).of(range(3), [0] * 3))
    for rank, (inputs, _) in enumerate(data):
        alone = torch.nn.BatchNorm1d(3)
        alone(inputs)
        alone(inputs)
        torch.testing.assert_close(model.average_model([rank])[0].running_var, alone.running_var)
        assert int(model.average_model([rank])[0].num_batches_tracked) == 2


def test_chunks_change_nothing():
    """Gradients of two ranks at a time, or one, are the same as those of all at once."""
    given = problem()
    whole, *parts = (simulate.train(given, sgd, steps=5, chunk_size=size) for size in (None, 1, 2))
    for one in parts:
        same(one.parameters, whole.parameters)
        np.testing.assert_allclose(one.loss, whole.loss, rtol=1e-12)
