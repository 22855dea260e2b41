"""Bagua's DistributedDataParallel: torch's arguments, accumulation, unused parameters."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import asyncddp as bf
import asyncddp.integrations.bagua.torch_api as bagua
from asyncddp.integrations.bagua.torch_api.algorithms import (
    Algorithm,
    AlgorithmImpl,
    async_model_average,
    decentralized,
)
from asyncddp.integrations.bagua.torch_api.data_parallel import DistributedDataParallel
from tests.conformance import bagua_reference as reference
from tests.conformance.bagua_reference import LR, batches, flat, gradient_step, net
from tests.support import LoopbackWorld, gradient_pieces
from tests.support.gradient_pieces import InPieces


class AverageOfHooks(Algorithm):
    """Averages gradients by a user's own hooks."""

    class Impl(AlgorithmImpl):
        """One operation for each bucket."""

        def init_operations(self, bagua_ddp, bucket):
            bucket.append_centralized_synchronous_op()

    def reify(self, process_group):
        return self.Impl(process_group)


ALGORITHMS = pytest.mark.parametrize("algorithm", [None, AverageOfHooks()], ids=["method", "hooks"])


def pairs(rank):
    """Batches of a rank, two for each step."""
    rows = batches(rank, 6)
    return list(zip(rows[::2], rows[1::2], strict=True))


@ALGORITHMS
def test_accumulation_equals_a_larger_batch(algorithm):
    """Backward passes in ``no_sync`` communicate nothing; the next one averages all."""

    def case():
        bagua.init_process_group()
        model = net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        ddp = DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)
        assert next(iter(ddp.state_dict())) == "module.fc1.weight"
        own = []
        for (x, goal), (more, other) in pairs(bagua.get_rank()):
            optimizer.zero_grad()
            with ddp.no_sync():
                torch.nn.functional.mse_loss(ddp(x), goal).div(2).backward()
            own.append(model.fc2.bias.grad.clone())
            torch.nn.functional.mse_loss(ddp(more), other).div(2).backward()
            optimizer.step()
        return flat(model), own

    found = LoopbackWorld(2).run(case)
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1][0], found[1][1][0])
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for rows in zip(pairs(0), pairs(1), strict=True):
        every = [row for pair in rows for row in pair]
        gradient_step(model, optimizer, *(torch.cat(parts) for parts in zip(*every, strict=True)))
    torch.testing.assert_close(found[0][0], flat(model), rtol=0, atol=1e-6)


def test_accumulation_counts_no_interval():
    """A step with accumulation counts once where models are averaged every other step."""

    def case():
        bagua.init_process_group()
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        algorithm = decentralized.DecentralizedAlgorithm(False, communication_interval=2)
        ddp = DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)
        found = []
        for step in range(4):
            torch.nn.init.constant_(model.weight, bagua.get_rank() + step)
            with ddp.no_sync():
                ddp(torch.ones(1, 1)).sum().backward()
            ddp(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            found.append(model.weight.item())
        return found

    assert LoopbackWorld(2).run(case) == [[0.5, 1.0, 2.5, 3.0], [0.5, 2.0, 2.5, 4.0]]


class Halves(torch.nn.Module):
    """Uses the layer whose number it is given."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])

    def forward(self, x, which):
        return self.layers[which](x)


@ALGORITHMS
def test_unused_parameters(algorithm):
    """Each rank uses another layer, whose gradient counts as zero on the other rank."""

    def case():
        bagua.init_process_group()
        model = Halves()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ddp = DistributedDataParallel(
            model, find_unused_parameters=True, optimizers=[optimizer], algorithm=algorithm
        )
        for layer in model.layers:
            torch.nn.init.zeros_(layer.weight)
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.ones(1, 1), bagua.get_rank()).sum().backward()
            optimizer.step()
        return [layer.weight.item() for layer in model.layers]

    assert LoopbackWorld(2).run(case) == [[-1.0, -1.0]] * 2


def test_without_optimizers_gradients_are_averaged():
    """As with torch's, the optimizer is the user's own business; here one comes later."""

    def case():
        bagua.init_process_group()
        ddp = DistributedDataParallel(net(bagua.get_rank()), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
        for x, goal in batches(bagua.get_rank()):
            gradient_step(ddp, optimizer, x, goal)
        return flat(ddp)

    found = LoopbackWorld(3).run(case)
    torch.testing.assert_close(found[1], reference.simulate(3, None)[0], rtol=0, atol=1e-6)


def test_what_belongs_to_no_optimizer():
    """Names to ignore are left alone, and all other gradients are averaged."""

    def case():
        bagua.init_process_group()
        model = net(bagua.get_rank())
        model._ddp_params_and_buffers_to_ignore = ["fc2.bias"]
        before = model.fc2.bias.detach().clone()
        optimizer = torch.optim.SGD([*model.fc1.parameters(), model.fc2.bias], lr=0.0)
        DistributedDataParallel(model, optimizers=[optimizer])
        assert torch.equal(model.fc2.bias, before)
        gradient_step(model, optimizer, *batches(bagua.get_rank())[0])
        return [parameter.grad for parameter in model.parameters()]

    first, second = LoopbackWorld(2).run(case)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [
        True,
        True,
        False,
        True,
    ]


def test_buffers_may_stay():
    """``broadcast_buffers=False`` leaves each rank its own at the start."""

    def case(flag):
        bagua.init_process_group()
        model = torch.nn.BatchNorm1d(1)
        model.running_mean.fill_(bagua.get_rank())
        DistributedDataParallel(model, broadcast_buffers=flag)
        return model.running_mean.item()

    assert LoopbackWorld(2).run(case, True) == [0.0, 0.0]
    assert LoopbackWorld(2).run(case, False) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dim": 1}, "expected dim=0"),
        ({"device_ids": [0]}, "the device on which the module is"),
        ({"device_ids": [torch.device("cpu")] * 2}, "at most "),
        ({"algorithm": decentralized.DecentralizedAlgorithm()}, "in the steps of optimizers"),
    ],
)
def test_arguments_that_cannot_be(arguments, words):
    """Each is refused in words, where Bagua takes torch's module with a warning."""

    def case():
        bagua.init_process_group()
        with pytest.raises(bf.ArgumentError, match=words):
            DistributedDataParallel(net(0), **arguments)

    LoopbackWorld(1).run(case)


def test_sparse_gradients_are_refused():
    """They cannot be averaged in buckets; the error is the one that Bagua raises."""

    def case():
        bagua.init_process_group()
        with pytest.raises(NotImplementedError, match="has sparse gradients"):
            DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(2, 2, sparse=True)))

    LoopbackWorld(1).run(case)


def test_buckets_are_tuned_where_the_launcher_says_so(monkeypatch):
    """``BAGUA_AUTOTUNE=1`` measures steps by other buckets, and keeps the fastest."""
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")

    def case():
        bagua.init_process_group()
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        DistributedDataParallel(model, optimizers=[optimizer])
        for step in range(1000):
            gradient_step(model, optimizer, torch.ones(1, 64), torch.ones(1, 64))
            if vars(model)["_bagua_ddp"]._driver._distributed[0].autotune.done:
                return step
        return None

    first, second = LoopbackWorld(2).run(case)
    assert first == second is not None


# by the clock


def asynchronous(model, lr, **options):
    algorithm = async_model_average.AsyncModelAverageAlgorithm(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model.with_bagua([optimizer], algorithm), optimizer, algorithm


def test_by_the_clock_models_agree():
    """With a step size of 0, other models on each rank become their mean; abort ends it."""

    def case():
        bagua.init_process_group()
        model, optimizer, algorithm = asynchronous(net(0), 0.0, sync_interval_ms=1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(bagua.get_rank())
        mean = bf.allreduce(flat(model))
        rows = itertools.cycle(batches(bagua.get_rank()))
        for _ in range(20 + 10 * bagua.get_rank()):
            gradient_step(model, optimizer, *next(rows))
        algorithm.abort(model)
        first = flat(model)
        torch.testing.assert_close(first, mean, rtol=0, atol=1e-5)
        gradient_step(model, optimizer, *next(rows))
        assert torch.equal(flat(model), first)
        for call in (algorithm.abort, algorithm.resume, algorithm.resume):
            call(model)
        gradient_step(model, optimizer, *next(rows))
        algorithm.abort(model)
        return threading.active_count()

    before = threading.active_count()
    LoopbackWorld(3).run(case)
    assert threading.active_count() == before


def test_the_warmup_of_averaging_by_the_clock():
    """Ranks are equal bit for bit in as many steps, and differ afterwards."""

    def case():
        bagua.init_process_group()
        options = {"sync_interval_ms": 10000, "warmup_steps": 4}
        model, optimizer, algorithm = asynchronous(net(0), LR, **options)
        distances = []
        for x, goal in batches(bagua.get_rank(), 6):
            gradient_step(model, optimizer, x, goal)
            distances.append(bf.consensus_distance(model))
        algorithm.abort(model)
        return [one > 0 for one in distances]

    assert LoopbackWorld(2).run(case) == [[False] * 4 + [True] * 2] * 2


def test_who_is_not_wrapped_cannot_abort():
    """The error says what was expected."""
    with pytest.raises(bf.ArgumentError, match="a model that with_bagua has wrapped, got Net"):
        async_model_average.AsyncModelAverageAlgorithm().abort(net(0))


@ALGORITHMS
@pytest.mark.parametrize("kind", ["shared", "mixed", "reversible"])
def test_gradients_in_pieces(algorithm, kind):
    """Where a parameter gets its gradient in pieces, their sum is averaged, once."""

    def case():
        bagua.init_process_group()
        model = InPieces(kind, nested=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        ddp = DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)
        for step in range(4):
            optimizer.zero_grad()
            gradient_pieces.loss_of(ddp, bagua.get_rank(), step).backward()
            optimizer.step()
        return flat(model)

    want = gradient_pieces.train_in_one_process(kind, 3, 4, LR)
    for got in LoopbackWorld(3).run(case):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_more_pieces_than_ever_before():
    """A gradient that changes after a user's hook was told that it is ready is an error."""

    def case():
        bagua.init_process_group()
        model = InPieces("varying", nested=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        ddp = DistributedDataParallel(model, optimizers=[optimizer], algorithm=AverageOfHooks())
        x = torch.ones(1, gradient_pieces.WIDTH, dtype=torch.float64)
        ddp(x, 1).sum().backward()
        with pytest.raises(bf.UsageError, match=r"block.* got another gradient.*use_reentrant"):
            ddp(x, 2).sum().backward()

    LoopbackWorld(2).run(case)
