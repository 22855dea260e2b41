"""Wrappers that a user makes begin with rank 0's model on all ranks, and nothing else does."""

from __future__ import annotations

import re

import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from asyncddp.context.context import use
from asyncddp.context.group_context import split_context
from asyncddp.errors import ArgumentError
from tests.support import LoopbackWorld, on
from tests.support.loops import on_each_rank
from tests.support.methods import every_step, fitting_graph

NOISY = (
    "qadam", "choco_sgd", "beer", "deepsqueeze", "moniqua", "demo", "low_precision_decentralized",
)  # fmt: skip
"""Methods that move parameters though the step size is zero, by compression errors and signs."""
SOME = on("loopback-4", "mpi-2")


class Net(torch.nn.Module):
    """Parameters and buffers, of several dtypes, that differ from rank to rank."""

    def __init__(self, rank):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 2, dtype=torch.float64)
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.outside = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.register_buffer("turned", torch.zeros(4, 6).t()[::2])
        with torch.no_grad():
            for one in (*self.parameters(), *self.buffers()):
                one.fill_(rank + 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).double())

    def trained(self):
        return [p for name, p in self.named_parameters() if name != "outside"]


def is_of(rank, tensors):
    return all(bool((one == rank + 1).all()) for one in tensors)


def sgd_of(model, lr=0.0):
    return torch.optim.SGD(model.trained(), lr=lr)


def wrapped(model, method="adapt_then_combine", **options):
    options = {**every_step(method), **options}
    if method == "qadam":
        return bf.DistributedOptimizer(bf.QAdamOptimizer(model.trained()), model, method, **options)
    graph = fitting_graph(method, bf.size())
    return bf.DistributedOptimizer(sgd_of(model), model, method, topology=graph, **options)


def starts(method, buckets):
    net = Net(bf.rank())
    optimizer = wrapped(net, method, bucket_size_in_mb=buckets)
    assert is_of(0, [*net.trained(), *net.buffers()])
    assert is_of(bf.rank(), [net.outside])
    if method not in NOISY:
        net.eval()(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        bf.barrier()
        assert is_of(0, net.trained()), "what the method or its windows keep is of other values"
    optimizer.close()


@SOME
def test_all_ranks_begin_with_the_model_of_rank_0(world):
    """Parameters of the optimizer, frozen ones too, and buffers; what is outside it stays."""
    for method in ("adapt_then_combine", "gradient_allreduce", "win_put", "choco_sgd"):
        world.run(starts, method, 25)
        world.run(starts, method, 1e-5)


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_any_method_begins_with_it(method):
    """With a step size of zero no rank moves from there: state and windows are of these values."""
    LoopbackWorld(4).run(starts, method, 25)


def keeps(make):
    net = Net(bf.rank())
    make(net)
    assert is_of(bf.rank(), [*net.parameters(), *net.buffers()])


def module_of(net, **options):
    net.outside.requires_grad = False
    sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.0)  # noqa: E731
    return bf.DecentralizedDataParallel(net, sgd, **options)


def own_starts(number):
    makers = (
        lambda net: wrapped(net, broadcast=False),
        lambda net: bf.DistributedPushSumOptimizer(sgd_of(net), net, broadcast=False),
        lambda net: module_of(net, broadcast=False),
        lambda net: module_of(net, init_sync=False),
        lambda net: module_of(net, broadcast=False, algorithm="gradient_allreduce"),
    )
    keeps(makers[number])


@SOME
def test_ranks_keep_their_own_where_the_user_says_so(world):
    """``broadcast=False`` for each wrapper, and the older ``init_sync=False``."""
    for number in range(5):
        world.run(own_starts, number)


@on_each_rank(ranks=2)
def test_entries_with_a_rule_of_their_own_keep_it():
    """BlueFog's users call its ``broadcast_parameters``; its wrappers leave the models alone."""
    from asyncddp.integrations import bluefog

    keeps(lambda net: bluefog.DistributedGradientAllreduceOptimizer(sgd_of(net), net))


def of_module(algorithm):
    net = Net(bf.rank())
    module_of(net, algorithm=algorithm)
    assert is_of(0, [*net.parameters(), *net.buffers()])


@SOME
def test_a_module_wrapper_gives_the_whole_module(world):
    """By any algorithm, as DDP does."""
    for algorithm in ("adapt_with_combine", "gradient_allreduce"):
        world.run(of_module, algorithm)


@pytest.mark.parametrize("module", [False, True])
@on_each_rank(ranks=2)
def test_buffers_of_any_kind(module):
    """Expanded ones and any dtype are given; what is no dense memory of values stays."""
    net = Net(bf.rank())
    own = float(bf.rank() + 1)
    with torch.inference_mode():
        net.register_buffer("inference", torch.full((2,), own))
    net.register_buffer("expanded", torch.tensor([[own]]).expand(5, 3))
    net.register_buffer("eighth", torch.full((3,), own).to(torch.float8_e4m3fn))
    net.register_buffer("unsigned", torch.full((3,), int(own), dtype=torch.uint32))
    net.register_buffer("nothing", torch.zeros(0))
    net.register_buffer("sparse", (torch.eye(2) * own).to_sparse())
    net.register_buffer("meta", torch.zeros(2, device="meta"))
    if not module:
        net.lazy = torch.nn.LazyBatchNorm1d(affine=False)
    module_of(net) if module else wrapped(net)
    assert is_of(0, [net.expanded, net.eighth.float(), net.unsigned.long()])
    assert net.sparse.to_dense().tolist() == [[own, 0.0], [0.0, own]]
    assert net.inference.tolist() == [own, own]


@on_each_rank(ranks=2)
def test_nothing_is_sent_later():
    """A switch, a loaded state, other buckets, and ``join`` leave the ranks' models alone."""
    net = Net(bf.rank())
    optimizer = wrapped(net, broadcast=True)
    with torch.no_grad():
        for one in (*net.parameters(), *net.buffers()):
            one.fill_(bf.rank() + 1)
    optimizer.switch_to("win_put", replicas="keep")
    optimizer.load_state_dict(optimizer.state_dict())
    net.frozen.requires_grad = True  # other buckets, in the next step
    optimizer.switch_to("adapt_with_combine", communication="empty", replicas="keep")
    with bf.join(optimizer):
        net.eval()(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert is_of(bf.rank(), [*net.parameters(), *net.buffers()])


def one_rank():
    net = Net(7)
    keeps_own = [one.clone() for one in net.parameters()]
    wrapped(net)
    module_of(Net(7))
    assert all(map(torch.equal, keeps_own, net.parameters()))


def test_one_rank_sends_nothing(monkeypatch):
    """At n = 1 no broadcast is made."""
    monkeypatch.setattr("asyncddp.ops.allreduce_tensors.broadcast_nonblocking_", None)
    LoopbackWorld(1).run(one_rank)


def after_a_checkpoint(folder):
    net = Net(bf.rank())
    bf.save_checkpoint(folder, net, step=1, replicas="all")
    again = Net(9)
    again.added = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(again.added.weight, bf.rank() + 1.0)
    added = [again.__dict__["_modules"].pop("added")]
    assert bf.load_checkpoint(folder, again).exact
    again.added = added[0]
    again.double().float()  # as a move to another device
    wrapped(again).close()
    own = [p for name, p in again.named_parameters() if "added" not in name]
    assert is_of(bf.rank(), [p for p in own if p is not again.outside])
    assert is_of(0, [again.added.weight]), "what the checkpoint lacks begins as rank 0 has it"
    module_of(again)
    assert is_of(bf.rank(), [again.first.weight])
    with torch.no_grad():
        again.first.weight.add_(0.0)  # as a training step
    wrapped(again)
    assert is_of(0, [again.first.weight])


@on("loopback-2", "mpi-2")
def test_replicas_of_a_checkpoint_stay(world, tmp_path):
    """What ``load_checkpoint`` gave each rank is not sent by wrappers made then, all else is."""
    world.run(after_a_checkpoint, str(tmp_path))


@SOME
@pytest.mark.parametrize("broadcast", [True, False])
@on_each_rank
def test_parameters_that_are_added_begin_alike(broadcast):
    """``add_param_group`` gives them as rank 0 has them, unless ``broadcast=False``."""
    net = Net(bf.rank())
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(net.first.parameters(), lr=0.0), net, broadcast=broadcast
    )
    assert is_of(bf.rank(), net.last.parameters())
    optimizer.add_param_group({"params": net.last.parameters()})
    assert is_of(0 if broadcast else bf.rank(), net.last.parameters())


@on("loopback-4", "mpi-4")
@on_each_rank
def test_a_group_begins_with_its_first_rank():
    """In a world of some ranks its own rank 0 counts."""
    rank = bf.rank()
    group = split_context(bf.current(), (1, 2))
    net = Net(rank)
    if group is not None:
        with use(group):
            optimizer = wrapped(net, "gradient_allreduce")
        optimizer.add_param_group({"params": [net.outside]})
    expected = rank if group is None else 1
    assert is_of(expected, net.parameters())


@on_each_rank(ranks=2)
def test_several_modules_and_shared_ones():
    """Each of the list begins so; what they share is named once."""
    net = Net(bf.rank())
    pair = torch.nn.ModuleList([net, net])
    pair.last = torch.nn.Linear(2, 2)
    pair.last.weight = torch.nn.Parameter(torch.full((2, 2), bf.rank() + 1.0))
    parts = [net, pair]
    optimizer = torch.optim.SGD([*net.trained(), pair.last.weight], lr=0.0)
    bf.DistributedOptimizer(optimizer, parts)
    assert is_of(0, [*net.trained(), *net.buffers(), pair.last.weight])


def unlike(what):
    net = Net(bf.rank())
    if what == "buffer" and bf.rank() == 1:
        net.register_buffer("queue", torch.zeros(5))
    return wrapped(net, broadcast=not (what == "flag" and bf.rank() == 1))


@SOME
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("buffer", "rank 1 has queue of shape (5,), torch.float32, which broadcast=False leaves"),
        ("flag", "rank 0 has broadcast=True, and rank 1 has broadcast=False"),
    ],
)
def test_ranks_that_differ_are_told(world, what, told):
    """Other buffers, or another ``broadcast``: a MismatchError on all ranks, not a hang."""
    for outcome in world.outcomes(unlike, what):
        assert outcome.error == "MismatchError", outcome.trace
        assert "DistributedOptimizer needs the same model and settings" in outcome.message
        assert told in outcome.message


def fails_on_one():
    if bf.rank() == 1:
        raise ArithmeticError("while it makes its optimizer")
    wrapped(Net(bf.rank()))


@SOME
def test_a_rank_that_fails_before_it_does_not_keep_the_others(world):
    """They learn of it, by the deadline at the latest."""
    first, second, *_ = world.outcomes(fails_on_one)
    assert second.error == "ArithmeticError"
    assert "AsyncDDPError" in first.bases, first.trace


@on_each_rank(ranks=1)
def test_the_flag_is_checked():
    """It is True or False."""
    net = Net(0)
    with pytest.raises(ArgumentError, match=re.escape("argument broadcast: expected True or")):
        bf.DistributedOptimizer(sgd_of(net), net, broadcast="no")
