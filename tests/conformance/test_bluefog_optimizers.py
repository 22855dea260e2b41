"""BlueFog's optimizers on four ranks: its own regression problem, and its numbers for one step.

Y = X A + E with 16 inputs and 3 outputs, the same A on all ranks and other data on each. A method
passes where the mean squared errors of the last epochs are those of the noise E.
"""

from __future__ import annotations

import itertools
import random
import time
import warnings

import pytest
import torch

import asyncddp.integrations.bluefog as bf
from tests.support import LoopbackWorld, on

BATCH, BATCHES, EPOCHS = 128, 8, 25
NOISE = 1e-3
AWC, ATC = "DistributedAdaptWithCombineOptimizer", "DistributedAdaptThenCombineOptimizer"
GRADIENT, PUT = "DistributedGradientAllreduceOptimizer", "DistributedWinPutOptimizer"


class Linear(torch.nn.Module):
    """A layer in a module."""

    def __init__(self, generator):
        super().__init__()
        self.fc = torch.nn.Linear(16, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x):
        return self.fc(x)


def data(rank, samples):
    truth = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(1000 + rank + samples)
    x = torch.randn(samples, 16, generator=own)
    return x, x @ truth + NOISE * torch.randn(samples, 3, generator=own)


def begin(name, kind=None, *, lr=0.01, **options):
    """A model that all ranks start alike, and its optimizer, as in BlueFog's scripts."""
    model = Linear(torch.Generator().manual_seed(bf.rank()))
    base = torch.optim.Adam(model.parameters(), lr=lr * bf.size())
    bf.broadcast_parameters(model.state_dict(), root_rank=0)
    bf.broadcast_optimizer_state(base, root_rank=0)
    if kind is not None:
        options["communication_type"] = bf.CommunicationType[kind]
    return model, getattr(bf, name)(base, model, **options)


def epoch(model, optimizer, batches, pieces=1, before=lambda: None):
    """One pass over the data, in batches of so many pieces each; gives the mean loss."""
    total = 0.0
    for x, y in batches:
        optimizer.zero_grad()
        for part, goal in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            before()
            loss = torch.nn.functional.mse_loss(model(part), goal)
            (loss / pieces).backward()
            total += loss.item() / pieces / len(batches)
        optimizer.step()
    return total


def last_errors(model, optimizer, pieces=1, before=lambda: None, waits=0, epochs=EPOCHS):
    """The greatest training and test error of the last three epochs, averaged over ranks."""
    x, y = data(bf.rank(), BATCH * BATCHES)
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    test_x, test_y = data(bf.rank(), BATCH)
    found = []
    for number in range(epochs):
        model.train()
        train = epoch(model, optimizer, batches if number >= waits else [], pieces, before)
        model.eval()
        with torch.no_grad():
            test = torch.nn.functional.mse_loss(model(test_x), test_y).item()
        found.append((train, test))
    means = bf.allreduce(torch.tensor(found[-3:], dtype=torch.float64))
    return means.amax(dim=0).tolist()


def bound(kind):
    return (2.0 if kind == "empty" else 1.5) * NOISE**2


def regression(name, kind, pieces=1):
    bf.init()
    options = {} if pieces == 1 else {"num_steps_per_communication": pieces}
    errors = last_errors(*begin(name, kind, **options), pieces)
    assert max(errors) < bound(kind), errors
    bf.barrier()


@pytest.mark.parametrize(
    ("name", "kind"), [(ATC, "neighbor_allreduce"), (AWC, "empty"), (PUT, None)]
)
def test_each_method_reaches_the_noise(name, kind):
    """All errors end below 1.5 times the noise variance, 2 times without communication."""
    LoopbackWorld(4).run(regression, name, kind)


def one_peer(name):
    bf.init()
    model, optimizer = begin(name)
    turns = bf.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())

    def choose():
        send, receive = next(turns)
        optimizer.dst_weights = send
        optimizer.src_weights = dict.fromkeys(receive, 1 / (len(receive) + 1))
        optimizer.self_weight = 1 / (len(receive) + 1)

    errors = last_errors(model, optimizer, before=choose)
    assert max(errors) < bound(None), errors


@pytest.mark.parametrize("name", [AWC, ATC])
def test_one_peer_in_each_turn(name):
    """Weights set for each batch, before forward."""
    LoopbackWorld(4).run(one_peer, name)


def put_to_one():
    bf.init()
    model, optimizer = begin(PUT, window_prefix="job")
    targets = itertools.cycle(bf.out_neighbor_ranks())
    pause = random.Random(bf.rank())

    def choose():
        optimizer.dst_weights = {next(targets): 1.0}
        if pause.random() < 0.2:
            time.sleep(pause.expovariate(100))

    errors = last_errors(model, optimizer, before=choose, waits=3, epochs=2 * EPOCHS)
    assert max(errors) < bound(None), errors
    bf.barrier()
    assert all(name.startswith("job") for name in bf.get_current_created_window_names())
    optimizer.unregister_window()
    assert bf.get_current_created_window_names() == []


def test_puts_to_one_neighbour_in_each_turn():
    """Ranks that pause at random learn too, of neighbours that put to them in every second step.

    Nothing is learned in the first epochs; the windows are there all the same.
    """
    LoopbackWorld(4).run(put_to_one)


class Twice(torch.nn.Module):
    """A layer that is used twice in each pass."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.fc2(self.fc1(torch.relu(self.fc1(x))))


@pytest.mark.parametrize("name", [AWC, ATC, GRADIENT, PUT])
def test_a_layer_that_is_used_twice_is_no_surprise(name):
    """One backward pass is one pass: nobody is told of unexpected behavior."""

    def case():
        bf.init()
        model = Twice()
        optimizer = getattr(bf, name)(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        bf.barrier()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LoopbackWorld(4).run(case)


# single steps


def weighted(name, gradients, every=1, lr=0.1, **options):
    """Rank r starts at 1 + r; gives its parameter after each step."""
    bf.init()
    r = bf.rank()
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0 + r)
    model = model.double()
    base = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = getattr(bf, name)(base, model, num_steps_per_communication=every, **options)
    if name == PUT:
        optimizer.force_barrier = True
    found = []
    for gradient in gradients:
        optimizer.zero_grad()
        model(torch.tensor([gradient], dtype=torch.float64)).sum().backward()
        optimizer.step()
        found.append(model.weight[0].tolist())
    bf.barrier()
    return found


@pytest.mark.parametrize("name", [AWC, ATC, PUT])
def test_one_step_from_different_starts(name):
    """BlueFog's numbers on exponential-2: 8/3 − 0.1 and 8/3 − 0.2 on rank 0."""
    got = LoopbackWorld(4).run(weighted, name, [(1.0, 2.0)])
    assert got[0][0] == pytest.approx([8 / 3 - 0.1, 8 / 3 - 0.2], abs=1e-12)


@pytest.mark.parametrize("name", [AWC, ATC])
def test_local_steps_between_two_averagings(name):
    """BlueFog's numbers for J = 2 and gradients 1, 2, 3, 4: every second step averages."""
    gradients = [(float(g), 0.0) for g in (1, 2, 3, 4)]
    got = LoopbackWorld(4).run(weighted, name, gradients, every=2)
    assert [step[0] for step in got[0]] == pytest.approx([0.9, 2.3667, 2.0667, 1.5556], abs=1e-4)


def rank_dependent(name):
    return weighted(name, [(1.0 + bf.rank(), 0.0)])[0][0]


def test_combining_then_adapting_differs_from_adapting_then_combining():
    """W x − γ g against W (x − γ g), with gradients that differ between ranks."""
    start = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    rows = torch.zeros(4, 4, dtype=torch.float64)
    for r in range(4):
        rows[r, [r, (r - 1) % 4, (r - 2) % 4]] = 1 / 3
    expected = {AWC: rows @ start - 0.1 * start, ATC: rows @ (start - 0.1 * start)}
    for name, values in expected.items():
        got = LoopbackWorld(4).run(rank_dependent, name)
        assert got == pytest.approx(values.tolist(), abs=1e-12)


def gossip_only(name):
    """Steps of size 0: each rank's parameter after 40 of them."""
    return weighted(name, [(0.0, 0.0)] * 40, lr=0.0)[-1][0]


@pytest.mark.parametrize("name", ["DistributedPushSumOptimizer", "DistributedPullGetOptimizer"])
def test_what_bluefog_does_not_export_works(name):
    """Push-sum reaches the mean exactly; pull-get reaches consensus."""
    got = LoopbackWorld(4).run(gossip_only, name)
    assert max(got) - min(got) < 1e-3
    if name == "DistributedPushSumOptimizer":
        assert got == pytest.approx([2.5] * 4, abs=1e-9)


def machines():
    bf.set_machine_topology(bf.ExponentialTwoGraph(bf.machine_size()))
    kind = bf.CommunicationType.hierarchical_neighbor_allreduce
    first = weighted(AWC, [(0.0, 0.0)], communication_type=kind)
    with pytest.warns(PendingDeprecationWarning):
        second = weighted("DistributedHierarchicalNeighborAllreduceOptimizer", [(0.0, 0.0)])
    return first[0][0], second[0][0]


@on("shared_memory-4")
def test_hierarchical_averaging(world):
    """Two machines of two ranks: the mean of all after one step."""
    got = world.run(machines, settings={"ranks_per_machine": 2})
    assert got == [pytest.approx((2.5, 2.5))] * 4


def changes_of_mind():
    bf.init()
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(bf.rank()))
    optimizer = bf.DistributedAdaptThenCombineOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model, bf.CommunicationType.empty
    )
    found = []
    for kind in ("empty", "allreduce"):
        optimizer.communication_type = bf.CommunicationType[kind]
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        found.append(model.weight.item())
    return found


def test_the_type_may_change_from_batch_to_batch():
    """As BlueFog's MNIST example does every hundredth batch."""
    assert LoopbackWorld(4).run(changes_of_mind) == [[float(r), 1.5] for r in range(4)]


def foreign_parameters():
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="belongs to none of the models given"):
        getattr(bf, AWC)(torch.optim.SGD(other.parameters(), lr=0.1), model)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    getattr(bf, AWC)(both, [model, other])


def test_parameters_belong_to_the_models():
    """A list of models is one; a parameter of none is refused."""
    LoopbackWorld(2).run(foreign_parameters)
