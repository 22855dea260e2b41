"""Algorithms that users write with Bagua's hooks: tensors, buckets, operations, and their order."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import asyncddp as bf
import asyncddp.integrations.bagua.torch_api as bagua
from asyncddp.integrations.bagua.torch_api.algorithms import (
    Algorithm,
    AlgorithmImpl,
    GlobalAlgorithmRegistry,
    gradient_allreduce,
)
from asyncddp.integrations.bagua.torch_api.bucket import BaguaBucket
from tests.conformance import bagua_reference as reference
from tests.conformance.bagua_reference import LR, batches, flat, net, train
from tests.support import LoopbackWorld


class Declared(Algorithm):
    """Declares an implementation, with arguments for it."""

    def __init__(self, kind, **options):
        self.kind, self.options = kind, options

    def reify(self, process_group):
        return self.kind(process_group, **self.options)


class Averaged(AlgorithmImpl):
    """Averages gradients by one operation, of any options."""

    def __init__(self, process_group, **options):
        super().__init__(process_group)
        self.options = options

    def init_operations(self, bagua_ddp, bucket):
        bucket.clear_ops().append_centralized_synchronous_op(
            group=self.process_group, **self.options
        )


class SignSGD(AlgorithmImpl):
    """Averages the signs of gradients: a Python function, and then an average."""

    def init_operations(self, bagua_ddp, bucket):
        def take_signs(name):
            assert name == bucket.name
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().sign_()

        bucket.append_python_op(take_signs)
        bucket.append_centralized_synchronous_op(average=True)


class Peers(AlgorithmImpl):
    """Bagua's decentralised algorithm by its own hooks: weights, into a peer buffer."""

    def __init__(self, process_group, hierarchical, mode):
        super().__init__(process_group)
        self.hierarchical, self.mode = hierarchical, mode

    def init_tensors(self, bagua_ddp):
        self.tensors = [
            parameter.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, parameter in bagua_ddp.bagua_build_params()
        ]
        return self.tensors

    def tensors_to_buckets(self, tensors, do_flatten):
        every = [tensor for group in tensors for tensor in group]
        return [BaguaBucket(every, name="weights", flatten=do_flatten)]

    def init_operations(self, bagua_ddp, bucket):
        self.bucket, self.peer = bucket, bucket.flattened_tensor()
        self.operation = bucket.append_decentralized_synchronous_op(
            self.peer, self.hierarchical, self.mode
        )

    def init_forward_pre_hook(self, bagua_ddp):
        def hook(inputs):
            for tensor in self.tensors:
                tensor.bagua_mark_communication_ready()

        return hook

    def init_backward_hook(self, bagua_ddp):
        return lambda name, parameter: None

    def init_post_backward_hook(self, bagua_ddp):
        def hook():
            bagua_ddp._bagua_backend.wait_pending_comm_ops()
            self.operation.copy_back_peer_weight(self.bucket)

        return hook


class LowPrecision(AlgorithmImpl):
    """Bagua's compressed differences on a ring by its own hooks, after the step."""

    def __init__(self, process_group, hierarchical=False):
        super().__init__(process_group)
        self.hierarchical = hierarchical

    def init_tensors(self, bagua_ddp):
        return [
            parameter.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]

    def init_operations(self, bagua_ddp, bucket):
        bucket.copies = [bucket.flattened_tensor() for _ in range(3)]
        bucket.append_low_precision_decentralized_synchronous_op(*bucket.copies, self.hierarchical)

    def init_backward_hook(self, bagua_ddp):
        return lambda name, parameter: None

    def init_post_backward_hook(self, bagua_ddp):
        return lambda: None

    def init_post_optimizer_step_hook(self, bagua_ddp):
        def hook(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.bagua_mark_communication_ready()
            bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return hook


def trained(kind, *, do_flatten=True, settings=None, **options):
    bagua.init_process_group()
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.with_bagua([optimizer], Declared(kind, **options), do_flatten=do_flatten)
    train(model, optimizer, bagua.get_rank())
    return flat(model), model


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Several buckets, also of so small a model."""
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "400")


@pytest.mark.parametrize(
    ("hierarchical", "average", "scattergather", "do_flatten"),
    [
        (False, True, False, True),
        (False, False, False, False),
        (False, True, True, False),
        (False, False, True, True),
        (True, True, False, False),
        (True, False, True, True),
    ],
)
def test_an_average_of_gradients(hierarchical, average, scattergather, do_flatten):
    """The centralised operation gives the library's gradients, however it is carried out."""

    def case():
        vector, model = trained(
            Averaged,
            do_flatten=do_flatten,
            hierarchical=hierarchical,
            average=average,
            scattergather=scattergather,
        )
        names = [tensor.bagua_tensor_name for b in model.bagua_buckets for tensor in b.tensors]
        return vector, names, [bucket.check_flatten() for bucket in model.bagua_buckets]

    found = LoopbackWorld(3).run(case, settings={"ranks_per_machine": 2})
    expected = reference.simulate(3, None, average=average)[0]
    for vector, names, flattened in found:
        torch.testing.assert_close(vector, expected, rtol=0, atol=1e-6)
        assert torch.equal(vector, found[0][0])
        assert names == ["fc3.weight", "fc2.bias", "fc2.weight", "fc1.weight"]
        assert len(flattened) == 3
        assert all(flattened) or not do_flatten


def test_compression_of_an_operation():
    """In 8 bits ranks stay equal bit for bit, near to the average."""
    found = LoopbackWorld(3).run(
        lambda: trained(Averaged, scattergather=True, compression="MinMaxUInt8")[0]
    )
    assert all(torch.equal(one, found[0]) for one in found)
    expected = reference.simulate(3, None)[0]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-3)


def test_sign_sgd():
    """Twenty lines of a user's: operations of a bucket run in order, on all its tensors."""
    found = LoopbackWorld(2).run(lambda: trained(SignSGD)[0])
    models = [net(0), net(0)]
    for step in range(10):
        signs = []
        for rank, model in enumerate(models):
            model.zero_grad()
            x, goal = batches(rank)[step]
            torch.nn.functional.mse_loss(model(x), goal).backward()
            signs.append([parameter.grad.sign() for parameter in model.parameters()])
        for model in models:
            with torch.no_grad():
                for parameter, *both in zip(model.parameters(), *signs, strict=True):
                    parameter.sub_(LR * sum(both) / 2)
    for vector in found:
        torch.testing.assert_close(vector, flat(models[0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("do_flatten", [False, True])
@pytest.mark.parametrize(("hierarchical", "mode"), [(False, "all"), (False, "shift_one")])
def test_peers_by_hooks_are_those_of_the_library(hierarchical, mode, do_flatten):
    """The operation and four hooks give what the built-in algorithm gives, bit for bit."""
    from asyncddp.integrations.bagua.torch_api.algorithms import decentralized

    def case():
        theirs, _ = trained(Peers, do_flatten=do_flatten, hierarchical=hierarchical, mode=mode)
        model = net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        algorithm = decentralized.DecentralizedAlgorithm(hierarchical, mode)
        train(model.with_bagua([optimizer], algorithm), optimizer, bagua.get_rank())
        return flat(model), theirs

    for ours, theirs in LoopbackWorld(4).run(case):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_hierarchical_peers(mode):
    """With nodes as peers, the ranks of one get the same average."""

    def case():
        _, model = trained(Peers, hierarchical=True, mode=mode)
        driver = model.bagua_buckets[0]
        driver.clear_ops()
        values = torch.full((driver.numel,), float(bagua.get_rank()))
        operation = driver.append_decentralized_synchronous_op(values.clone(), True, mode)
        driver.scatter(values)
        for _ in driver.execute():
            pass
        operation.copy_back_peer_weight(driver.backend_bucket)
        return flat(model).unique().tolist()

    settings = {"ranks_per_machine": 2}
    assert LoopbackWorld(4).run(case, settings=settings) == [[1.5]] * 4


@pytest.mark.parametrize(("ranks", "hierarchical"), [(1, False), (2, False), (3, False), (4, True)])
def test_compressed_differences(ranks, hierarchical):
    """This rank's copy is its neighbours' copy of it, bit for bit, and its parameters."""

    def case():
        vector, model = trained(LowPrecision, hierarchical=hierarchical)
        parts = zip(*(bucket.copies for bucket in model.bagua_buckets), strict=True)
        copies = [torch.cat(part) for part in parts]
        now = torch.cat([bucket.flattened_tensor() for bucket in model.bagua_buckets])
        assert torch.equal(copies[0], now)
        every = bf.allgather(torch.stack(copies)[None])
        step = 2 if hierarchical else 1
        before, after = (bf.rank() - step) % ranks, (bf.rank() + step) % ranks
        assert torch.equal(every[before][0], copies[1])
        assert torch.equal(every[after][0], copies[2])
        return vector, bf.consensus_distance(model)

    found = LoopbackWorld(ranks).run(case, settings={"ranks_per_machine": 2})
    assert 0 <= found[0][1] < 0.02
    if hierarchical:
        assert torch.equal(found[0][0], found[1][0])


# when hooks run


class Recorded(AlgorithmImpl):
    """Notes which hooks run, and is built anew before the third pass."""

    def __init__(self, process_group, log):
        super().__init__(process_group)
        self.log = log
        self.passes = 0

    def need_reset(self):
        self.passes += 1
        return self.passes == 3

    def init_tensors(self, bagua_ddp):
        self.log.append(f"tensors at {bagua_ddp.bagua_train_step_counter}")
        return super().init_tensors(bagua_ddp)

    def init_forward_pre_hook(self, bagua_ddp):
        return lambda inputs: self.log.append(f"forward of {len(inputs)}")

    def init_backward_hook(self, bagua_ddp):
        return lambda name, parameter: self.log.append(name)

    def init_post_backward_hook(self, bagua_ddp):
        return lambda: self.log.append("backward")

    def init_post_optimizer_step_hook(self, bagua_ddp):
        return lambda optimizer: self.log.append(type(optimizer).__name__)


def test_the_order_of_hooks():
    """Before forward, each gradient, after backward, after the step; nothing in evaluation."""

    def case():
        bagua.init_process_group()
        log = []
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.with_bagua([optimizer], Declared(Recorded, log=log))
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            model.eval()
            model(torch.ones(1, 1))
            model.train()
        with bagua_ddp(model).no_sync():
            model(torch.ones(1, 1)).sum().backward()
        return log, model.bagua_train_step_counter

    log, counter = LoopbackWorld(2).run(case)[0]
    step = ["forward of 1", "bias", "weight", "backward", "SGD"]
    assert sorted(log[2:4]) == ["bias", "weight"]
    log[2:4] = log[7:9] = log[13:15] = ["bias", "weight"]
    assert log == ["tensors at 0", *step, *step, "tensors at 3", *step]
    assert counter == 4


def bagua_ddp(model):
    return vars(model)["_bagua_ddp"]


def test_gradients_that_were_set_to_none_find_their_bucket():
    """``zero_grad`` drops gradients, as torch does by default; the next ones move there again."""

    def case():
        _, model = trained(Averaged)
        return [bucket.check_flatten() for bucket in model.bagua_buckets], [
            parameter.grad.data_ptr() == bucket.records[0].home.data_ptr()
            for bucket in model.bagua_buckets
            for parameter in bucket.tensors[:1]
        ]

    for flattened, homes in LoopbackWorld(2).run(case):
        assert all(flattened + homes)


class Halves(torch.nn.Module):
    """Uses one of two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.first(x)


def test_an_unused_parameter_is_named():
    """It would keep the bucket, and the other ranks, waiting; the error says which it is."""

    def case():
        bagua.init_process_group()
        model = Halves()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.with_bagua([optimizer], Declared(Averaged))
        with pytest.raises(bf.UsageError, match=r"second\.weight.* have got no gradient"):
            model(torch.ones(1, 1)).sum().backward()

    LoopbackWorld(2).run(case)


def test_a_wrapped_model_can_be_copied_and_saved():
    """The copy is not wrapped, and has no hooks that would train the original."""

    def case():
        _, model = trained(Averaged)
        twin = copy.deepcopy(model)
        assert not hasattr(twin, "bagua_buckets")
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        assert torch.equal(flat(read), flat(model))
        train(twin, torch.optim.SGD(twin.parameters(), lr=LR), 0, 1)
        optimizer = pickle.loads(pickle.dumps(model.bagua_optimizers[0]))
        assert "step" not in vars(optimizer)
        return model.bagua_train_step_counter

    assert LoopbackWorld(2).run(case) == [10, 10]


# tensors and buckets


def communicated(*shapes, names=None, module="model"):
    names = names or [f"t{place}" for place in range(len(shapes))]
    return [
        torch.ones(shape).ensure_bagua_tensor(name, module)
        for shape, name in zip(shapes, names, strict=True)
    ]


def test_mistakes_with_tensors_and_buckets():
    """Each says what was expected and what was given."""
    with pytest.raises(bf.ArgumentError, match="communicated tensor, got one of shape"):
        BaguaBucket([torch.ones(2)], "b", flatten=True)
    with pytest.raises(bf.ArgumentError, match="at least one tensor, got none"):
        BaguaBucket([], "b", flatten=True)
    weight = torch.ones(2, 2)
    both = [one.ensure_bagua_tensor(name, "m") for one, name in ((weight, "w"), (weight.t(), "t"))]
    with pytest.raises(bf.ArgumentError, match=r"(w and t|t and w) share memory"):
        BaguaBucket(both, "b", flatten=True)
    with pytest.raises(bf.ArgumentError, match="two of name 'x'"):
        BaguaBucket(communicated(1, 1, names=["x", "x"]), "b", flatten=True)
    mixed = [torch.ones(1, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    tensors = [t.ensure_bagua_tensor(f"{i}", "model") for i, t in enumerate(mixed)]
    with pytest.raises(bf.ArgumentError, match=r"one model, dtype and device, .* torch\.float64"):
        BaguaBucket(tensors, "b", flatten=True)
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.ensure_bagua_tensor("p", "model", getter_closure=lambda p: p.grad)
    with pytest.raises(bf.UsageError, match="getter_closure gave None"):
        parameter.bagua_getter_closure()
    with pytest.raises(bf.UsageError, match="no registered bucket"):
        parameter.bagua_mark_communication_ready()
    with pytest.raises(bf.UsageError, match="no setter_closure"):
        parameter.bagua_ensure_grad().bagua_setter_closure(torch.ones(1))
    assert not hasattr(torch.ones(1), "bagua_tensor_name")


def test_a_view_is_communicated_apart_from_its_tensor():
    """``to_bagua_tensor`` leaves the tensor alone; ``bagua_set_storage`` moves it."""
    tensor = torch.arange(3.0)
    view = tensor.to_bagua_tensor("view", "model")
    assert view.is_bagua_tensor()
    assert not tensor.is_bagua_tensor()
    assert view.bagua_getter_closure() is tensor
    place = torch.zeros(5)
    view.bagua_set_storage(place.untyped_storage(), 1)
    assert place.tolist() == [0.0, 0.0, 1.0, 2.0, 0.0]
    assert tensor.data_ptr() == place[1:].data_ptr()


def test_one_tensor_is_in_one_bucket():
    """Buckets of one name, or with a tensor in common, are refused."""

    class Twice(Averaged):
        def tensors_to_buckets(self, tensors, do_flatten):
            return super().tensors_to_buckets([tensors[0], tensors[0]], do_flatten)

    def case():
        with pytest.raises(bf.UsageError, match="without a tensor in common"):
            trained(Twice)

    LoopbackWorld(2).run(case)


# names of algorithms


def test_names_of_algorithms():
    """Unknown, taken and other names are errors of the kinds that Bagua raises."""
    made = Algorithm.init("gradient_allreduce", hierarchical=True)
    assert isinstance(made, gradient_allreduce.GradientAllReduceAlgorithm)
    assert made.hierarchical
    with pytest.raises(KeyError, match="unknown algorithm 'bytegrads'; known are: async, bytegrad"):
        Algorithm.init("bytegrads")
    with pytest.raises(TypeError, match="as a string, got 3"):
        Algorithm.init(3)
    with pytest.raises(ValueError, match="'qadam' is registered already"):
        GlobalAlgorithmRegistry.register("qadam", Declared)
    try:
        GlobalAlgorithmRegistry.register("sign_sgd", lambda: Declared(SignSGD), "signs")
        assert isinstance(Algorithm.init("sign_sgd"), Declared)
    finally:
        GlobalAlgorithmRegistry._entries.pop("sign_sgd")


def test_what_is_no_algorithm():
    """A class in place of an object, and a ``reify`` that gives something else."""

    def case():
        bagua.init_process_group()
        model = net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(bf.ArgumentError, match="expected an Algorithm"):
            model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm)
        with pytest.raises(bf.ArgumentError, match=r"Declared\.reify gave 3"):
            model.with_bagua([optimizer], Declared(lambda group: 3))
        with pytest.raises(bf.ArgumentError, match="expected a list of"):
            model.with_bagua([model], gradient_allreduce.GradientAllReduceAlgorithm())

    LoopbackWorld(1).run(case)


def test_nothing_before_the_group():
    """``with_bagua`` and ``new_group`` say what to call first."""

    def case():
        with pytest.raises(RuntimeError, match=r"call bagua\.init_process_group\(\) first"):
            net(0).with_bagua([], gradient_allreduce.GradientAllReduceAlgorithm())

    LoopbackWorld(1).run(case)


def test_the_step_of_each_kind():
    """Closures, schedulers before and after, ``fuse_step`` and GradScaler all reach the method."""

    def case(kind):
        if not bagua.is_initialized():
            bagua.init_process_group()
        model = net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        optimizer = bagua.contrib.fuse_optimizer(optimizer) if kind == "fused" else optimizer
        before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
        after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        scaler = torch.amp.GradScaler("cpu")
        for x, goal in batches(bagua.get_rank()):

            def closure(x=x, goal=goal):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), goal)
                (scaler.scale(loss) if kind == "scaled" else loss).backward()
                return loss

            if kind == "closure":
                assert optimizer.step(closure) is not None
            else:
                closure()
                if kind == "scaled":
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    (optimizer.fuse_step if kind == "fused" else optimizer.step)()
            before.step()
            after.step()
        return flat(model)

    results = [LoopbackWorld(2).run(case, kind) for kind in ("plain", "closure", "fused", "scaled")]
    for found in results:
        assert torch.equal(found[0], found[1])
        torch.testing.assert_close(found[0], results[0][0], rtol=0, atol=1e-6)


def test_a_fused_step_that_came_too_late():
    """Fusing after ``with_bagua`` is an error, since nothing would be averaged."""

    def case():
        bagua.init_process_group()
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
        bagua.contrib.fuse_optimizer(optimizer)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(bf.UsageError, match="was fused after with_bagua"):
            optimizer.fuse_step()

    LoopbackWorld(2).run(case)
