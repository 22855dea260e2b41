"""What a method costs in memory and bytes is what it declares."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS, AveragedQuantity, CommunicationPattern
from asyncddp.compression import COMPRESSORS
from asyncddp.engine.send_queue import SendQueue
from tests.support import LoopbackWorld
from tests.support.methods import every_step, fitting_graph, sgd_for

N, STEPS = 4, 6
NUMEL = 64 * 64
METHODS = [name for name in ALGORITHMS if ALGORITHMS[name].what is AveragedQuantity.PARAMETER]
NEIGHBORLY = [
    name
    for name in METHODS
    if CommunicationPattern.NEIGHBORS in ALGORITHMS[name].how
    and ALGORITHMS[name].default_compression is None
]
COMPRESSED = [
    name
    for name in METHODS
    if CommunicationPattern.NEIGHBORS in ALGORITHMS[name].how and name not in NEIGHBORLY
]


def options_of(name):
    """One round in each step."""
    options = {"topology": fitting_graph(name, N), **every_step(name)}
    if CommunicationPattern.NEIGHBORS in ALGORITHMS[name].how:
        options["communication"] = "neighbor_allreduce"
    return options


def train(name, dtype):
    """Bytes of the state's tensors, bytes counted, and neighbours."""
    model = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
    graph = fitting_graph(name, N)
    plain = sgd_for(name, 0.01)(model.parameters())
    optimizer = bf.DistributedOptimizer(plain, model, name, **options_of(name))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, 64, dtype=dtype)).square().mean().backward()
        optimizer.step()
    buckets = optimizer._averager.buckets
    kept = sum(one.nbytes for bucket in buckets for one in bucket.state.values() if one.dim())
    return kept, optimizer.bytes_sent, len([one for one in graph[bf.rank()] if one != bf.rank()])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_as_declared(name, dtype):
    """So many tensors of the model's size, in float32 also where parameters are halves."""
    method = ALGORITHMS[name]
    if dtype != torch.float32 and method.default_compression is not None:
        return  # replicas are what the compressor decodes, of the parameters' dtype
    for kept, _, neighbors in LoopbackWorld(N).run(train, name, dtype):
        copies = method.state_copies + method.state_copies_per_neighbor * neighbors
        assert kept == 4 * NUMEL * copies


def train_by_des_loc(dtype):
    """Bytes that travel in six rounds, of models and of Adam's moments, in the dtype of sums."""
    model = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
    plain = torch.optim.AdamW(model.parameters())
    optimizer = bf.DistributedOptimizer(plain, model, "des_loc", communication_interval=2)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.ones(1, 64, dtype=dtype)).square().mean().backward()
        optimizer.step()
    assert not optimizer._averager.buckets[0].state
    return optimizer.bytes_sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moments_travel_as_rarely_as_declared(dtype):
    """One and a half models a round: six models, two first moments, a second one."""
    sent = LoopbackWorld(N).run(train_by_des_loc, dtype)
    assert sent == [(6 + 2 + 1) * 4 * NUMEL * 2 * (N - 1) // N] * N


def train_fragments():
    """Bytes after each step, of a model whose four layers are as many fragments."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(4)))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bf.DistributedOptimizer(plain, model, "streaming_diloco", communication_interval=3)
    sent = []
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.ones(1, 32)).square().mean().backward()
        optimizer.step()
        sent.append(optimizer.bytes_sent)
    return sent


def test_a_fragment_travels_in_each_round():
    """A quarter of the model in every third step."""
    quarter = 4 * 32 * 32 * 2 * (N - 1) // N
    rounds = (0, 0, 1, 1, 1, 2, 2, 2, 3)
    assert LoopbackWorld(N).run(train_fragments) == [[quarter * k for k in rounds]] * N


@pytest.fixture
def bytes_of_buckets(monkeypatch):
    """Bytes that travel of the first bucket, by rank; a single number may travel uncounted."""
    sent = Counter()
    announce = SendQueue._announce_tensor

    def counted(queue, exchange, peer, tensor, **how):
        name = exchange.key.name
        if ".bucket0" in name and not name.endswith(".state"):
            sent[queue._transport.rank] += tensor.nbytes
        return announce(queue, exchange, peer, tensor, **how)

    monkeypatch.setattr(SendQueue, "_announce_tensor", counted)
    return sent


@pytest.mark.parametrize("name", NEIGHBORLY)
def test_bytes_are_as_declared_counted_and_sent(name, bytes_of_buckets):
    """So many tensors to each neighbour in each round, and at most a number with each."""
    found = LoopbackWorld(N).run(train, name, torch.float64)
    for rank, (_, counted, neighbors) in enumerate(found):
        declared = ALGORITHMS[name]().messages_of((64, 64)) * 8 * NUMEL * neighbors * STEPS
        sent = bytes_of_buckets[rank]
        assert declared <= sent <= counted <= declared + 8 * neighbors * STEPS


@pytest.mark.parametrize("name", COMPRESSED)
def test_encoded_bytes_are_as_declared_counted_and_sent(name, bytes_of_buckets):
    """So many encoded tensors to each neighbour in each round, and nothing else."""
    size = COMPRESSORS[ALGORITHMS[name].default_compression]().encoded_size(NUMEL, torch.float32)
    found = LoopbackWorld(N).run(train, name, torch.float32)
    for rank, (_, counted, neighbors) in enumerate(found):
        declared = ALGORITHMS[name].messages * size * neighbors * STEPS
        assert declared == counted == bytes_of_buckets[rank]
