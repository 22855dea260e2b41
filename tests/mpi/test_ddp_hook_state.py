"""States of the hooks are saved and restored, in mid-training, with the same trajectory."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import asyncddp as bf
from asyncddp import hooks, topology
from asyncddp.errors import ArgumentError
from tests.support import on
from tests.support.ddp_training import BACKENDS, Replica, grouped, make_ddp

HALF, END = 3, 6
STATES = {
    "neighbor_allreduce": lambda ddp: hooks.NeighborAllreduceState(
        ddp, topology.one_peer_exponential(bf.size()), compression="sign"
    ),
    "gossip_parameters": lambda ddp: hooks.GossipParametersState(
        ddp, topology.one_peer_exponential(bf.size())
    ),
    "bytegrad": hooks.ByteGradState,
    "compressed_allreduce": lambda ddp: hooks.CompressedAllreduceState(ddp, "power_sgd"),
    "random": lambda ddp: hooks.CompressedAllreduceState(ddp, hooks.error_feedback("qsgd_int8")),
}
HOOKS = {
    "neighbor_allreduce": hooks.neighbor_allreduce_hook,
    "gossip_parameters": hooks.gossip_parameters_hook,
    "bytegrad": hooks.bytegrad_hook,
    "compressed_allreduce": hooks.compressed_allreduce_hook,
    "random": hooks.compressed_allreduce_hook,
}
backends = pytest.mark.parametrize("backend", BACKENDS)


def begin(name):
    ddp = make_ddp()
    state = STATES[name](ddp)
    return Replica(ddp), state


@grouped
def resumes(name, way):
    replica, state = begin(name)
    replica.ddp.register_comm_hook(state, HOOKS[name])
    replica.train(0, HALF)
    file = io.BytesIO()
    saved = state.state_dict() if way == "state_dict" else pickle.dumps(state)
    parts = [replica.ddp.module.state_dict(), replica.optimizer.state_dict(), saved]
    torch.save(parts, file)
    expected = replica.train(HALF, END)

    file.seek(0)
    model, optimizer, saved = torch.load(file, weights_only=True)
    again, state = begin(name)
    if way == "state_dict":
        state.load_state_dict(saved)
    else:
        state = pickle.loads(saved)
        with pytest.raises(ArgumentError, match=r"call state\.bind\(ddp\) on all ranks"):
            _ = state.group
        state.bind(again.ddp)
    again.ddp.register_comm_hook(state, HOOKS[name])
    again.ddp.module.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    found = again.train(HALF, END)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(expected[-1], expected[-2])


@on("mpi-2")
@backends
@pytest.mark.parametrize("way", ["state_dict", "pickle"])
@pytest.mark.parametrize("name", STATES)
def test_a_restored_state_trains_on_alike(world, backend, tmp_path, name, way):
    """Bit for bit, by ``state_dict()`` or by pickle; without the state it would be another way."""
    world.run(resumes, backend, str(tmp_path), name, way)


@grouped
def saved_state_is_used():
    replica, state = begin("neighbor_allreduce")
    replica.ddp.register_comm_hook(state, hooks.neighbor_allreduce_hook)
    replica.train(0, HALF)
    saved = copy.deepcopy(state.state_dict())
    residual = saved["codecs"][0]["state"]["error_feedback.residual"].clone()
    assert residual.abs().max() > 0
    parts = [part["parameters"] for part in saved["codecs"]]
    assert len(parts) > 1
    assert sorted(place for part in parts for place in part) == list(range(6))
    assert saved["step"] == HALF
    replica.train(HALF, END)
    assert torch.equal(residual, saved["codecs"][0]["state"]["error_feedback.residual"])


@on("mpi-2")
@backends
def test_the_state_has_what_is_owed(world, backend, tmp_path):
    """What a rank owes, and the round of the schedule."""
    world.run(saved_state_is_used, backend, str(tmp_path))
