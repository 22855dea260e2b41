"""Averages over what ranks have published, while these do nothing for it, on every transport."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import FileEvent, on

WINDOWS = ["win_put", "pull_get", "push_sum", "async_model_average"]
PAIRS = ["ad_psgd", "a2cid2"]
EVERYWHERE = on("loopback-4", "shared_memory-4", "mpi-4")
still = partial(torch.optim.SGD, lr=0.0)


def net(rank):
    """Parameters of several shapes and buckets, large enough to travel by more than one message."""
    torch.manual_seed(rank)
    layers = torch.nn.Linear(3, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 70)
    return torch.nn.Sequential(*layers).double()


def vector(model):
    return torch.cat([one.detach().reshape(-1).clone() for one in model.parameters()])


def gradients(model):
    model.zero_grad()
    model(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()


def trained(method, steps=3, **options):
    """This rank's model and wrapper after some steps, and what it has published last of windows."""
    model = net(bf.rank())
    if method == "ddp":
        make = partial(bf.optim_fn_adamw, lr=0.0, weight_decay=0.0)
        model = bf.DecentralizedDataParallel(
            model, make, topology=topology.ring(bf.size()), sync=False, broadcast=False
        )
        for _ in range(steps):
            gradients(model)
        return model, model, vector(model)  # it puts what a step has made
    if method in WINDOWS:
        options = {"topology": topology.ring(bf.size()), "bucket_size_in_mb": 0.1, **options}
    if method == "push_sum":
        options["scale_steps"] = False
    optimizer = bf.DistributedOptimizer(
        still(model.parameters()), model, method, broadcast=False, **options
    )
    optimizer.force_barrier = method in PAIRS  # else averages may be under way
    published = vector(model)
    for _ in range(steps):
        published = vector(model)
        gradients(model)
        optimizer.step()
    return model, optimizer, vector(model) if method in PAIRS else published


def is_mean_of_published(method, folder):
    """Rank 1 averages; the others wait for its end without a call of the library."""
    rank, size, over = bf.rank(), bf.size(), FileEvent(folder / f"over {method}")
    model, _, published = trained(method)
    every = bf.allgather(published.view(1, -1))
    if rank != size // 2:
        return over.wait()
    own, buffers = vector(model), [one.clone() for one in model.buffers()]
    every[rank] = own
    average = bf.average_model(model, wait=False)
    assert (average.ages, average.missing) == ({}, ())
    with average as inside:
        assert inside is model
        expected = every.mean(0)
        if method == "a2cid2":  # the last step has mixed the parameters after they were published
            expected = vector(model)
            assert not torch.allclose(expected, own)
        torch.testing.assert_close(vector(model), expected, rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, model.buffers(), buffers))
    assert torch.equal(vector(model), own)
    assert (sorted(average.ages), average.missing) == (list(range(size)), ())
    assert average.ages[rank] == (0, 0.0)
    assert all(age.lag == 0 and age.seconds >= 0.0 for age in average.ages.values())
    return over.set()


@pytest.mark.training
@EVERYWHERE
@pytest.mark.parametrize("method", [*WINDOWS, *PAIRS, "ddp"])
def test_the_average_is_of_what_all_ranks_have_published(world, method, tmp_path):
    """On a ring a rank has two neighbours, and fetches of the third one as well."""
    world.run(is_mean_of_published, method, tmp_path)


def is_whole(method, folder):
    """Ranks publish constants again and again: each tensor that is averaged is one of them."""
    over, model = FileEvent(folder / f"over {method}"), torch.nn.Linear(1, 100_000, bias=False)
    torch.nn.init.zeros_(model.weight)  # which is published first
    options = {} if method in PAIRS else {"topology": topology.ring(bf.size())}
    optimizer = bf.DistributedOptimizer(still(model.parameters()), model, method, **options)
    step, means = 0, []
    try:
        while not over.is_set():
            step += 1
            with torch.no_grad():
                model.weight.fill_(float(step % 7))
            model(torch.ones(1, 1)).sum().backward()
            if bf.rank() == 0:
                with bf.average_model(model, wait=False) as inside:
                    low, high = inside.weight.min().item(), inside.weight.max().item()
                assert high - low < 1e-4, (low, high)
                means.append(low)
                if len(means) == 20:
                    break
            optimizer.step()
    finally:
        if bf.rank() == 0:
            over.set()
    assert bf.rank() > 0 or len(set(means)) > 1
    bf.barrier()


@pytest.mark.training
@on("loopback-4", "shared_memory-4", "mpi-4")
@pytest.mark.parametrize("method", ["win_put", "push_sum", "ad_psgd"])
def test_each_tensor_is_whole_while_its_owner_publishes_the_next(world, method, tmp_path):
    """Readers see no half-written tensor, neither in shared memory nor by message."""
    world.run(is_whole, method, tmp_path)


def saves_alone(folder):
    over = FileEvent(folder / "over")
    model, optimizer, published = trained("win_put")
    every = bf.allgather(published.view(1, -1))
    if bf.rank() != bf.size() - 1:
        return over.wait()
    own, every[bf.rank()] = vector(model), vector(model)
    found = bf.save_checkpoint(
        folder, model, optimizer, step=7, extra={"of": bf.rank()}, wait=False, keep=1
    )
    assert torch.equal(vector(model), own)
    assert [one.name for one in sorted(found.iterdir())] == ["average.pt", "manifest.json"]
    torch.save(every.mean(0), folder / "expected.pt")
    return over.set()


def loads(folder, saved_by):
    model = net(9)
    optimizer = bf.DistributedOptimizer(still(model.parameters()), model, "win_put")
    found = bf.load_checkpoint(folder, model, optimizer)
    expected = torch.load(folder / "expected.pt")
    torch.testing.assert_close(vector(model), expected, rtol=1e-12, atol=1e-12)
    assert (found.step, found.extra, found.exact) == (7, {"of": saved_by - 1}, False)
    assert (found.manifest["world_size"], found.manifest["missing"]) == (saved_by, [])
    assert (optimizer.steps, optimizer.round) == (3, 3 if saved_by > 1 else 0)


@pytest.mark.training
@on("loopback-1", "loopback-4", "shared_memory-4", "c10d-4")
def test_a_rank_saves_the_average_by_itself(world, tmp_path):
    """Other numbers of ranks load it, and as many, while no rank but one has saved anything."""
    world.run(saves_alone, tmp_path)
    for ranks in (1, 3, 4):
        with bf.local_world(ranks) as other:
            other.run(loads, tmp_path, world.size)
