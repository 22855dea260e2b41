"""BlueFog's names: all there, with its arguments, defaults, variables and errors."""

from __future__ import annotations

import inspect
import logging
import os

import pytest
import torch

import asyncddp
import asyncddp.integrations.bluefog as bf
from asyncddp.context.user_activities import warn_timeline_off_once
from asyncddp.integrations.bluefog import bluefog_environment, bluefog_optimizer, mpi_ops
from asyncddp.integrations.bluefog.bluefog_state import HandleTable
from asyncddp.integrations.bluefog.util import env
from tests.support import LoopbackWorld

CONTEXT = """init shutdown size rank local_size local_rank machine_size machine_rank load_topology
    set_topology load_machine_topology set_machine_topology in_neighbor_ranks out_neighbor_ranks
    in_neighbor_machine_ranks out_neighbor_machine_ranks mpi_threads_supported
    unified_mpi_window_model_supported nccl_built is_homogeneous suspend resume
    set_skip_negotiate_stage get_skip_negotiate_stage"""
VERBS = """allreduce broadcast allgather neighbor_allreduce neighbor_allgather
    hierarchical_neighbor_allreduce"""
OTHER_VERBS = """allreduce_ allreduce_nonblocking_ broadcast_ broadcast_nonblocking_ poll
    synchronize wait barrier"""
WINDOWS = """win_create win_free win_update win_update_then_collect win_wait win_poll win_mutex
    get_win_version get_current_created_window_names win_associated_p
    turn_on_win_ops_with_associated_p turn_off_win_ops_with_associated_p win_read_neighbor"""
HELPERS = """timeline_start_activity timeline_end_activity timeline_context broadcast_parameters
    allreduce_parameters broadcast_optimizer_state broadcast_object broadcast_object_list
    CommunicationType"""
OPTIMIZERS = """GradientAllreduce AdaptWithCombine AdaptThenCombine WinPut Allreduce
    NeighborAllreduce HierarchicalNeighborAllreduce PullGet PushSum Bluefog"""
GRAPHS = """ExponentialTwoGraph ExponentialGraph SymmetricExponentialGraph RingGraph StarGraph
    FullyConnectedGraph MeshGrid2DGraph GetRecvWeights GetSendWeights IsTopologyEquivalent
    IsRegularGraph isPowerOf GetDynamicOnePeerSendRecvRanks GetExp2DynamicSendRecvMachineRanks
    GetInnerOuterRingDynamicSendRecvRanks GetInnerOuterExpo2DynamicSendRecvRanks
    InferSourceFromDestinationRanks InferDestinationFromSourceRanks"""
MPI_OPS = """is_topo_weighted is_machine_topo_weighted pair_gossip pair_gossip_nonblocking win_lock
    is_initialized is_available win_cancel"""


def bluefog_names():
    yield from f"{CONTEXT} {VERBS} {OTHER_VERBS} {WINDOWS} {HELPERS} {GRAPHS}".split()
    yield from (f"{verb}_nonblocking" for verb in VERBS.split())
    yield from (f"Distributed{name}Optimizer" for name in OPTIMIZERS.split())
    for verb in ("win_put", "win_get", "win_accumulate"):
        for prefix in ("", "neighbor_"):
            yield from (f"{prefix}{verb}", f"{prefix}{verb}_nonblocking")


def test_every_name_is_exported():
    """Each public name of ``bluefog.torch`` is one of ours, with words that say what it is."""
    missing = set(bluefog_names()) - set(bf.__all__)
    assert not missing
    assert [name for name in bf.__all__ if not inspect.getdoc(getattr(bf, name))] == []


def test_mpi_ops_has_the_verbs_and_the_names_that_are_not_exported():
    """What is imported from ``bluefog.torch.mpi_ops``."""
    names = f"{CONTEXT} {VERBS} {OTHER_VERBS} {MPI_OPS} win_put neighbor_win_get".split()
    assert [name for name in names if not hasattr(mpi_ops, name)] == []


SIGNATURES = {
    "init": "topology_fn=None, is_weighted=False",
    "set_topology": "topology=None, is_weighted=False",
    "set_machine_topology": "topology=None, is_weighted=False",
    "allreduce": "tensor, average=True, is_hierarchical_local=False, name=None",
    "allreduce_": "tensor, average=True, is_hierarchical_local=False, name=None",
    "broadcast": "tensor, root_rank, name=None",
    "broadcast_nonblocking_": "tensor, root_rank, name=None",
    "allgather": "tensor, name=None",
    "neighbor_allgather": "tensor, *, src_ranks=None, dst_ranks=None, enable_topo_check=True, "
    "name=None",
    "neighbor_allreduce_nonblocking": "tensor, *, self_weight=None, src_weights=None, "
    "dst_weights=None, enable_topo_check=True, name=None, **renamed",
    "hierarchical_neighbor_allreduce": "tensor, *, self_weight=None, src_machine_weights=None, "
    "dst_machine_weights=None, enable_topo_check=False, name=None",
    "pair_gossip": "tensor, target_rank, self_weight=None, pair_weight=None, name=None",
    "win_create": "tensor, name, zero_init=False",
    "win_free": "name=None",
    "win_put": "tensor, name, self_weight=None, dst_weights=None, require_mutex=False",
    "win_accumulate_nonblocking": "tensor, name, self_weight=None, dst_weights=None, "
    "require_mutex=False",
    "neighbor_win_get": "name, src_weights=None, require_mutex=False",
    "win_update": "name, self_weight=None, neighbor_weights=None, reset=False, clone=False, "
    "require_mutex=False",
    "win_update_then_collect": "name, require_mutex=True",
    "win_read_neighbor": "name, rank_, require_mutex=True",
    "win_mutex": "name, for_self=False, ranks=None",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank",
    "broadcast_object": "obj, src=0, device=None, name=None",
    "broadcast_object_list": "object_list, src=None, device=None, name=None",
    "timeline_context": "tensor_name, activity_name",
    "DistributedAdaptThenCombineOptimizer": "optimizer, model, communication_type="
    "<CommunicationType.neighbor_allreduce: 'neighbor.allreduce'>, num_steps_per_communication=1",
    "DistributedWinPutOptimizer": "optimizer, model, num_steps_per_communication=1, "
    "window_prefix=None",
    "DistributedGradientAllreduceOptimizer": "optimizer, model, num_steps_per_communication=1",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults(name):
    """As BlueFog has them, by name and by place."""
    parameters = inspect.signature(getattr(bf, name)).parameters.values()
    bare = [item.replace(annotation=inspect.Parameter.empty) for item in parameters]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


def test_values_of_communication_type():
    """Scripts name them by their values too."""
    assert {kind.name: kind.value for kind in bf.CommunicationType} == {
        "neighbor_allreduce": "neighbor.allreduce",
        "hierarchical_neighbor_allreduce": "hierarchical.neighbor.allreduce",
        "allreduce": "allreduce",
        "empty": "empty",
    }


@pytest.mark.parametrize(
    "call",
    [
        bf.rank,
        bf.load_topology,
        bf.in_neighbor_ranks,
        bf.barrier,
        lambda: bf.allreduce(torch.ones(1)),
        lambda: bf.neighbor_allreduce_nonblocking(torch.ones(1)),
        lambda: bf.win_create(torch.ones(1), "x"),
        lambda: bf.win_mutex("x").__enter__(),
        lambda: bf.synchronize(1),
        lambda: bf.win_poll(1),
        lambda: bf.InferSourceFromDestinationRanks([]),
        lambda: bf.broadcast_object(1),
    ],
)
def test_before_init(call):
    """A ``ValueError`` as in BlueFog, which says what to call."""
    with pytest.raises(ValueError, match=r"call bf\.init\(\) first") as caught:
        call()
    assert isinstance(caught.value, asyncddp.NotInitializedError)


# handles


class Verb:
    """Something under way."""

    done = False

    def poll(self):
        return self.done


def test_handles_are_counted_from_one_and_kept_until_somebody_waits():
    """Numbers are never given twice."""
    handles = HandleTable("verb")
    first, second = Verb(), Verb()
    assert (handles.add(first), handles.add(second)) == (1, 2)
    assert handles.find("poll", 2) is second
    assert handles.pop("wait", 1) is first
    assert handles.add(first) == 3
    with pytest.raises(ValueError, match=r"wait: argument handle: .* nobody has waited .* got 1"):
        handles.pop("wait", 1)


def test_a_name_is_free_again_when_its_verb_has_ended():
    """BlueFog's rule: one verb of a name at a time."""
    handles, verb = HandleTable("verb"), Verb()
    handles.add(verb, "x")
    with pytest.raises(ValueError, match="'x' is under way already, as handle 1"):
        handles.require_free_name("x")
    handles.require_free_name("y")
    verb.done = True
    handles.require_free_name("x")


# variables


def test_variables_that_have_a_meaning():
    """Machines may be simulated, and the log be louder."""
    assert bluefog_environment.read_ranks_per_machine({}) is None
    assert bluefog_environment.read_ranks_per_machine({"BLUEFOG_NODES_PER_MACHINE": "4"}) == 4
    with pytest.raises(ValueError, match=r"BLUEFOG_NODES_PER_MACHINE: expected .* got '0'"):
        bluefog_environment.read_ranks_per_machine({"BLUEFOG_NODES_PER_MACHINE": "0"})
    logger = logging.getLogger("asyncddp")
    before = logger.level
    try:
        bluefog_environment.read_log_level({"BLUEFOG_LOG_LEVEL": "debug"})
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)
    with pytest.raises(ValueError, match=r"BLUEFOG_LOG_LEVEL: expected one of .* got 'loud'"):
        bluefog_environment.read_log_level({"BLUEFOG_LOG_LEVEL": "loud"})


def test_env_sets_variables_for_a_block_and_puts_them_back(monkeypatch):
    """Also where the block raises; None changes nothing."""
    monkeypatch.setenv("BLUEFOG_A", "before")
    monkeypatch.delenv("BLUEFOG_B", raising=False)
    before = dict(os.environ)
    with env(BLUEFOG_A="1", BLUEFOG_B="2", PATH=None):
        assert dict(os.environ) == {**before, "BLUEFOG_A": "1", "BLUEFOG_B": "2"}
    assert dict(os.environ) == before
    with pytest.raises(KeyError, match="HERE"), env(BLUEFOG_A="1"):
        raise KeyError("HERE")
    assert dict(os.environ) == before


def test_other_variables_are_named_in_one_warning(caplog):
    """With what there is instead."""
    bluefog_environment.warn_of_others({"PATH": "x"})
    assert not caplog.records
    bluefog_environment.warn_of_others({"BLUEFOG_WIN_TIMEOUT_S": "3", "BLUEFOG_CYCLE_TIME": "1"})
    assert len(caplog.records) == 1
    assert "BLUEFOG_WIN_TIMEOUT_S: ASYNCDDP_TIMEOUT" in caplog.text
    assert "BLUEFOG_CYCLE_TIME: nothing" in caplog.text


# the timeline


def test_the_timeline_says_once_that_it_is_off(caplog):
    """False, as in BlueFog."""
    warn_timeline_off_once.cache_clear()
    assert bf.timeline_start_activity("x", "A") is False
    with bf.timeline_context("x", activity_name="A"):
        assert bf.timeline_end_activity("x") is False
    assert [record.getMessage()[:19] for record in caplog.records] == ["the timeline is off"]
    assert caplog.records[0].levelno == logging.ERROR


def test_the_prefix_of_timelines():
    """Every prefix is one, whatever it looks like."""
    assert (
        bluefog_environment.timeline({})
        is bluefog_environment.timeline({"BLUEFOG_TIMELINE": ""})
        is None
    )
    assert bluefog_environment.timeline({"BLUEFOG_TIMELINE": "out/"}) == "out/{rank}.json"


# optimizers


def wrapped(make=bf.DistributedAdaptWithCombineOptimizer, base=torch.optim.SGD, **options):
    model = torch.nn.Linear(2, 1)
    return model, make(base(model.parameters(), lr=0.1), model, **options)


def test_a_wrapper_counts_as_what_it_wraps():
    """``isinstance`` holds for the base optimizer's class; groups and state are shared."""

    def case():
        for base in (torch.optim.SGD, torch.optim.AdamW):
            model, optimizer = wrapped(base=base)
            assert isinstance(optimizer, base)
            assert isinstance(optimizer, asyncddp.DistributedOptimizer)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
            assert optimizer.wrapped.param_groups[0]["lr"] == pytest.approx(0.01)

    LoopbackWorld(2).run(case)


def test_communication_type_may_be_set_at_any_time():
    """By the enumeration alone."""

    def case():
        _, optimizer = wrapped(communication_type=bf.CommunicationType.allreduce)
        assert optimizer.communication_type is bf.CommunicationType.allreduce
        optimizer.communication_type = bf.CommunicationType.empty
        assert optimizer.communication_type is bf.CommunicationType.empty
        with pytest.raises(ValueError, match=r"communication_type: expected one of .* got 'empty'"):
            optimizer.communication_type = "empty"
        _, optimizer = wrapped(bf.DistributedWinPutOptimizer)
        with pytest.raises(ValueError, match="win_put works through windows"):
            _ = optimizer.communication_type

    LoopbackWorld(2).run(case)


@pytest.mark.parametrize(
    "name", ["Allreduce", "NeighborAllreduce", "HierarchicalNeighborAllreduce"]
)
def test_older_names_say_what_they_are_called_now(name):
    """A ``PendingDeprecationWarning`` that names the new call."""

    def case():
        with pytest.warns(PendingDeprecationWarning, match=r"communication_type=bf\.Communication"):
            wrapped(getattr(bf, f"Distributed{name}Optimizer"))

    LoopbackWorld(1).run(case)


def test_the_oldest_name_is_that_of_puts():
    """``DistributedBluefogOptimizer`` of BlueFog's first versions."""

    def case():
        with pytest.warns(PendingDeprecationWarning, match="use DistributedWinPutOptimizer"):
            _, optimizer = wrapped(bf.DistributedBluefogOptimizer)
        assert optimizer.algorithm == "win_put"

    LoopbackWorld(1).run(case)


def test_more_passes_than_announced_are_warned_of_once():
    """Three backward passes in place of two; a layer that is used twice is one pass."""

    def passes(*counts):
        model, optimizer = wrapped(num_steps_per_communication=2)
        for count in counts:
            for _ in range(count):
                model(model(torch.ones(1, 2)).expand(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    LoopbackWorld(2).run(passes, 2, 1, 2)
    with pytest.warns(UserWarning, match=r"^Unexpected behavior: parameter .* FAQ") as caught:
        LoopbackWorld(2).run(passes, 2, 3, 3)
    assert len(caught) == 2, "once on each rank"


def test_a_graph_that_biases_a_method_is_warned_of(caplog):
    """Where our own optimizers refuse it: BlueFog takes any graph."""

    def case():
        bf.set_topology(bf.StarGraph(bf.size()))
        model, optimizer = wrapped()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with caplog.at_level(logging.WARNING):
        LoopbackWorld(4).run(case)
    assert "adapt_with_combine cannot run on star(4)" in caplog.text
    assert "It runs all the same" in caplog.text


def test_names_that_mean_nothing_here_do_nothing():
    """Gradients are averaged when ``backward()`` returns, whatever is called afterwards."""

    def case():
        model, optimizer = wrapped(bf.DistributedGradientAllreduceOptimizer)
        model(torch.full((1, 2), float(bf.rank()))).sum().backward()
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert all(map(torch.equal, before, (p.grad for p in model.parameters())))
        assert before[0].tolist() == [[0.5, 0.5]]
        optimizer.register_step_function(lambda *args: None)
        assert optimizer.enable_topo_check is False

    LoopbackWorld(2).run(case)


def test_a_method_is_made_tolerant_once():
    """One class for each method, so that ranks compare equal ones."""
    assert bluefog_optimizer.tolerant_algorithm("win_put") is bluefog_optimizer.tolerant_algorithm(
        "win_put"
    )
    assert bluefog_optimizer.tolerant_algorithm("win_put").name == "win_put"
