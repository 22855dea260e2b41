"""Bagua's old API: ``bagua_init``, switching, and the reducer behind it."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

import asyncddp as bf
import asyncddp.integrations.bagua.torch_api as bagua
from asyncddp.integrations.bagua.torch_api.distributed import (
    BucketType,
    Compressor,
    DistributedAlgorithm,
    DistributedModule,
    ModelSwitchWrapper,
    OverlappingWrapper,
    ReduceOp,
    Reducer,
    allreduce_parameters,
    bagua_init,
)
from asyncddp.topology import mixing_matrix, shift_one
from tests.conformance import bagua_reference as reference
from tests.conformance.bagua_reference import LR, batches, flat, gradient_step, net, train
from tests.support import LoopbackWorld, gradient_pieces
from tests.support.gradient_pieces import InPieces

SIX = 6  # steps


def begun(algorithm, seed=0, momentum=0.0, **options):
    """A model of this rank, wrapped as the old documents do, and its optimizer."""
    if not bagua.is_initialized():
        bagua.init_process_group()
    model = net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    return bagua_init(model, optimizer, algorithm, **options)


def trained(algorithm, **options):
    model, optimizer = begun(algorithm, **options)
    train(model, optimizer, bagua.get_rank(), SIX)
    return flat(model)


def after_the_first(mix, interval=1):
    """Mixing of the old API: none in the first iteration, then in each ``interval``-th."""

    def mixed(step, vectors):
        executions, rest = divmod(step - 1, interval)
        return mix(executions, vectors) if step and not rest else vectors

    return mixed


def all_mean(step, vectors):
    return [torch.stack(vectors).mean(0)] * len(vectors)


def by_peers(step, vectors):
    matrix = torch.from_numpy(mixing_matrix(shift_one(len(vectors)).graph(step))).float()
    return list(matrix @ torch.stack(vectors))


@pytest.mark.parametrize(
    "name", ["allreduce", "sg-allreduce", DistributedAlgorithm.QuantizeAllReduce]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay_reduce": True, "fusion": False, "message_size": 300},
        {"message_size": 300, "align_bytes": 64, "hierarchical_reduce": False},
        {"reduce_op": ReduceOp.Sum, "hierarchical_reduce": True},
    ],
)
def test_gradients(name, options):
    """Ranks are equal bit for bit, and what the average or the sum of gradients gives."""
    found = LoopbackWorld(3).run(trained, name, settings={"ranks_per_machine": 2}, **options)
    assert all(torch.equal(one, found[0]) for one in found)
    average = options.get("reduce_op") is not ReduceOp.Sum
    expected = reference.simulate(3, None, SIX, average=average)[0]
    exact = name is not DistributedAlgorithm.QuantizeAllReduce
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-6 if exact else 3e-3)
    assert torch.allclose(found[0], expected, rtol=0, atol=1e-6) is exact


def test_delay_makes_no_difference():
    """Whether buckets go during the backward pass or after it, results are the same."""

    def case(algorithm):
        return [trained(algorithm, delay_reduce=flag, message_size=300) for flag in (False, True)]

    for algorithm in ("allreduce", "quantize", "decentralize"):
        for during, after in LoopbackWorld(2).run(case, algorithm):
            assert torch.equal(during, after)


@pytest.mark.parametrize(
    ("mode", "mix", "interval"),
    [("all", all_mean, 1), ("all", all_mean, 2), ("shift_one", by_peers, 2)],
)
def test_decentralize(mode, mix, interval):
    """The first iteration exchanges nothing; gradients are those before the average."""
    options = {"peer_selection_mode": mode, "communication_interval": interval}
    found = LoopbackWorld(4).run(trained, "decentralize", hierarchical_reduce=False, **options)
    expected = reference.simulate(4, after_the_first(mix, interval), SIX)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_switching_averages():
    """After each switch models are the mean of those before; momentum stays each rank's own."""

    def case():
        model, optimizer = begun("allreduce", seed=bagua.get_rank(), momentum=0.9)
        assert torch.equal(flat(model), flat(net(0)))
        rows = iter(batches(bagua.get_rank(), 12))
        for name in ("decentralize", "quantize", "decentralize", "allreduce"):
            for _ in range(3):
                gradient_step(model, optimizer, *next(rows))
            mean = bf.allreduce(flat(model))
            before = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
            assert model.switch_to(name) is model
            torch.testing.assert_close(flat(model), mean, rtol=0, atol=1e-6)
            assert bf.consensus_distance(model) < 1e-6
            after = [state["momentum_buffer"] for state in optimizer.state.values()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return model.stage, model.step_counter

    assert LoopbackWorld(3).run(case) == [(5, 12)] * 3


def normalised(broadcast_buffers=True):
    bagua.init_process_group()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model[1].running_mean.fill_(bagua.get_rank())
    model[1].num_batches_tracked.fill_(10 * bagua.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer = bagua_init(model, optimizer, broadcast_buffers=broadcast_buffers)
    return model, optimizer


def test_batch_normalisation_survives_a_switch():
    """Running statistics become their means, the counter the first rank's; training goes on."""

    def case():
        model, optimizer = normalised()
        norm = model.module[1]
        for x, _ in batches(bagua.get_rank(), 2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        mean, variance = bf.allreduce(norm.running_mean), bf.allreduce(norm.running_var)
        norm.num_batches_tracked.add_(bagua.get_rank())
        model.switch_to(DistributedAlgorithm.Decentralize)
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close(norm.running_var, variance)
        model(batches(0)[0][0]).square().sum().backward()
        return norm.num_batches_tracked.item()

    assert LoopbackWorld(2).run(case) == [3, 3]


def test_buffers_may_stay():
    """``broadcast_buffers=False`` leaves each rank its own at the start, and no parameter."""

    def case(flag):
        model, _ = normalised(flag)
        return model.module[1].running_mean[0].item(), bf.consensus_distance(model)

    assert LoopbackWorld(2).run(case, True) == [(0.0, 0.0), (0.0, 0.0)]
    assert LoopbackWorld(2).run(case, False) == [(0.0, 0.0), (1.0, 0.0)]


def test_names_of_the_state_are_the_models():
    """No prefix, in states and in names of parameters."""

    def case():
        model, _ = begun("allreduce")
        plain = net(1)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in model.named_parameters()] == list(plain.state_dict())
        model.load_state_dict(plain.state_dict())
        assert torch.equal(flat(model), flat(plain))

    LoopbackWorld(1).run(case)


# the reducer


class Halved(DistributedModule):
    """Averages gradients, and halves them."""

    def set_communication_op(self, bucket, *, hierarchical_reduce):
        bucket.append_centralized_synchronous_op(hierarchical_reduce)

        def halve(name):
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().div_(2)

        bucket.append_python_op(halve)


def test_a_module_with_operations_of_ones_own():
    """A subclass says what is done with each bucket; buckets can be given by name."""

    def case():
        bagua.init_process_group()
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        wrapper = OverlappingWrapper(Halved(model), [optimizer])
        found = []
        for step in range(4):
            if step == 2:
                wrapper.reset_reducer(True, [["bias"], [{"name": "weight"}]])
            optimizer.zero_grad()
            wrapper(torch.full((1, 1), float(bagua.get_rank()))).sum().backward()
            optimizer.step()
            found.append([len(wrapper.reducer.param_buckets), model.weight.grad.item()])
        return found, wrapper.reducer.step_counter, wrapper.reducer.buckets

    for found, steps, names in LoopbackWorld(3).run(case, settings={"ranks_per_machine": 2}):
        assert found == [[1, 0.5], [1, 0.5], [2, 0.5], [2, 0.5]]
        assert steps == 2
        assert names == [["bias"], ["weight"]]


def test_the_order_of_buckets_is_that_of_gradients():
    """The first rank's order, closed at ``message_size``; weights lie beside gradients."""

    def case():
        model, optimizer = begun("allreduce", message_size=300)
        reducer = model.bagua_module.reducer
        assert not reducer.bucket_initialized
        train(model, optimizer, bagua.get_rank(), 2)
        second = reducer.param_buckets[1]
        assert all(
            a.data_ptr() - b.data_ptr() == a.grad.data_ptr() - b.grad.data_ptr()
            for a, b in itertools.pairwise(second)
        )
        return reducer.buckets

    expected = [["fc3.weight"], ["fc2.bias", "fc2.weight"], ["fc1.weight"]]
    assert LoopbackWorld(2).run(case) == [expected] * 2


def test_what_slots_hold():
    """Gradient, weight or parameter, as the type of the buckets says."""

    def case():
        bagua.init_process_group()
        model = Halved(torch.nn.Linear(1, 1))
        weight = model.module.weight
        made = {kind: Reducer(model, [], kind, False, 8, False, True) for kind in BucketType}
        with pytest.raises(bf.UsageError, match="parameter weight has no gradient"):
            made[BucketType.Gradient].fill_slot(weight)
        weight.grad = torch.ones(1, 1)
        assert made[BucketType.Gradient].fill_slot(weight).item() == 1.0
        assert made[BucketType.Weight].fill_slot(weight).data_ptr() == weight.data_ptr()
        assert made[BucketType.Param].fill_slot(weight) is weight

    LoopbackWorld(1).run(case)


@pytest.mark.parametrize("chunking", [False, True])
def test_alignment(chunking):
    """Buckets are rounded up to ``align_bytes``, or to 32 bytes for each part."""

    def case():
        bagua.init_process_group()
        model = Halved(torch.nn.Linear(1, 1))
        reducer = Reducer(model, [], BucketType.Weight, False, 16, chunking, True, True)
        reducer.initialize_buckets()
        return reducer.align_bytes, reducer.backend._waiting[0].bytes()

    assert LoopbackWorld(3).run(case) == [(96, 96) if chunking else (16, 16)] * 3


class Halves(torch.nn.Module):
    """Uses the layers whose numbers it is given."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])

    def forward(self, x, *which):
        return sum(self.layers[number](x) for number in which)


def two_passes(first, second):
    if not bagua.is_initialized():
        bagua.init_process_group()
    model, _ = bagua_init(Halves(), [])
    for which in (first, second):
        model(torch.ones(1, 1), *which).sum().backward()


def test_parameters_that_come_and_go_are_named():
    """In place of waiting for ever, the error says which parameter it is."""

    def case():
        with pytest.raises(bf.UsageError, match=r"layers\.1\.weight have got no gradient in this"):
            two_passes((0, 1), (0,))
        with pytest.raises(bf.UsageError, match=r"layers\.1\.weight has got a gradient, and had"):
            two_passes((0,), (0, 1))
        with pytest.raises(bf.MismatchError, match="gradients of the same parameters"):
            two_passes((bagua.get_rank(),), ())

    LoopbackWorld(2).run(case)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distributed_algorithm": "allreduces"}, "Did you mean 'allreduce'"),
        ({"intra_comm_root_rank": 1}, "expected 0, got 1"),
        ({"align_bytes": 24}, "a power of two, got 24"),
        ({"align_bytes": 4}, "at least 8, got 4"),
        ({"reduce_op": "sum"}, r"expected ReduceOp\.Sum or"),
        ({"distributed_algorithm": "decentralize", "reduce_op": ReduceOp.Sum}, "as they are"),
        ({"alignbytes": 8}, "Did you mean 'align_bytes'"),
    ],
)
def test_arguments_that_cannot_be(options, words):
    """Each is refused in words, also those that Bagua ignores."""

    def case():
        bagua.init_process_group()
        model = net(0)
        with pytest.raises(bf.ArgumentError, match=words):
            bagua_init(model, torch.optim.SGD(model.parameters(), lr=LR), **options)

    LoopbackWorld(1).run(case)


def test_the_group_comes_first():
    """``bagua_init`` before ``init_process_group`` says so; no module is no module."""

    def case():
        with pytest.raises(RuntimeError, match=r"call bagua\.init_process_group\(\) first"):
            bagua_init(net(0), [])
        with pytest.raises(bf.ArgumentError, match="argument module: expected a torch"):
            ModelSwitchWrapper()

    LoopbackWorld(1).run(case)


def test_compressors_and_helpers():
    """Bagua's name of its compressor, the library's, and the public average of a model."""

    def case():
        found = [
            trained("allreduce", compressor=one)
            for one in (Compressor.NoneCompressor, Compressor.Uint8Compressor, "bf16")
        ]
        model = net(bagua.get_rank())
        mean = bf.allreduce(flat(model))
        allreduce_parameters(model)
        torch.testing.assert_close(flat(model), mean, rtol=0, atol=1e-6)
        return found

    exact = reference.simulate(2, None, SIX)[0]
    for found in LoopbackWorld(2).run(case):
        distances = [(one - exact).abs().max().item() for one in found]
        assert distances[0] < 1e-6 < distances[1] < 3e-3
        assert 1e-6 < distances[2] < 3e-3


def test_speed_is_reported(caplog, monkeypatch):
    """Every 100 iterations, where it is asked for; nothing is tuned."""
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")

    def case():
        bagua.init_process_group()
        model, _ = bagua_init(torch.nn.Linear(1, 1), [])
        for _ in range(201):
            model(torch.ones(1, 1))
        model.eval()(torch.ones(1, 1))
        assert not model.ask_and_update_hyperparameters()
        return model.step_counter

    with caplog.at_level(logging.INFO, logger="asyncddp"):
        assert LoopbackWorld(1).run(case) == [201]
    lines = [record.message for record in caplog.records if "iterations/s" in record.message]
    assert [line.split(":")[0] for line in lines] == [
        "training iteration 100",
        "training iteration 200",
    ]


def test_gradients_in_pieces():
    """Where a parameter gets its gradient in pieces, their sum is averaged, once."""

    def case():
        bagua.init_process_group()
        model = InPieces("mixed", nested=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model, optimizer = bagua_init(model, optimizer, DistributedAlgorithm.GradientAllReduce)
        for step in range(4):
            optimizer.zero_grad()
            gradient_pieces.loss_of(model, bagua.get_rank(), step).backward()
            optimizer.step()
        return flat(model)

    want = gradient_pieces.train_in_one_process("mixed", 3, 4, LR)
    for got in LoopbackWorld(3).run(case):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
