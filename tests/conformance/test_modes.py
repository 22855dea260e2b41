"""Verbs, windows and optimizers within what users switch on in torch: right then, and afterwards.

A name is used within a mode, outside of it, and within it again: what the library keeps between two
uses is made once, and serves both.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import on, run_to_end
from tests.support.small_chunks import in_small_chunks

SMALL, LARGE = 16, 5 << 10
"""Elements of one chunk in a ring buffer, and of several where these are small."""


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
        bf.barrier()  # ranks may be threads, and have it in common
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
        bf.barrier()
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "device": lambda: torch.device("meta"),
    "default_device": default_device,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default_dtype": default_dtype,
    "deterministic": deterministic,
}


def full(count, value):
    return torch.full((count,), float(value), dtype=torch.float32, device="cpu")


def mean_with_others(count, k):
    """What averaging with a neighbour on each side, or the only one, gives."""
    rank, size = bf.rank(), bf.size()
    near = {rank, (rank + 1) % size, (rank - 1) % size}
    return full(count, sum(one + k for one in near) / len(near))


def mean_of_pair(count, k):
    return full(count, (bf.rank() // 2) * 2 + 0.5 + k)


def mean_of_all(count, k):
    return full(count, (bf.size() - 1) / 2 + k)


def returned(verb, expected):
    """A verb that gives a new tensor."""

    def use(count, k):
        x = full(count, bf.rank() + k)
        return verb(x), expected(count, k)

    return use


def started(verb, expected, *, replaces=False):
    """The same, of the non-blocking form."""

    def use(count, k):
        x = full(count, bf.rank() + k)
        found = verb(x).wait()
        assert (found is x) == replaces
        return found, expected(count, k)

    return use


def finished_outside(verb, expected):
    """A handle that is waited for outside of the mode in which the verb was started."""

    def use(count, k):
        x = full(count, bf.rank() + k)
        handle = verb(x)
        return lambda: (handle.wait(), expected(count, k))

    return use


def of_root(count, k):
    return full(count, 1 + k)


def gathered(count, k):
    return torch.cat([full(count, rank + k) for rank in range(bf.size())])


def of_this_rank(count, k):
    """Each part of ``reduce_scatter`` is as long on all ranks."""
    return mean_of_all(count // bf.size(), k)


def gathered_from_neighbors(count, k):
    return torch.cat([full(count, rank + k) for rank in targets()])


def max_of_all(count, k):
    return full(count, bf.size() - 1 + k)


def parts_of_all(count, k):
    """A part of each rank's."""
    return torch.cat([full(count // bf.size(), rank + k) for rank in range(bf.size())])


def of_first(found):
    """The result of rank 0, on all ranks."""
    return bf.broadcast_object(found)


def sent_around(count, k):
    after, before = (bf.rank() + 1) % bf.size(), (bf.rank() - 1) % bf.size()
    handle = bf.send_nonblocking(full(count, bf.rank() + k), after)
    found = bf.recv(None, before)
    handle.wait()
    return found, full(count, before + k)


def into(verb, expected):
    """A verb that writes into a tensor of the caller's."""

    def use(count, k):
        out = full(count, 0.0)
        verb(full(count, bf.rank() + k), out=out)
        return out, expected(count, k)

    return use


def objects(count, k):
    found = bf.allgather_object((bf.rank(), k)), bf.broadcast_object(bf.rank() + k, 1)
    expected = [(rank, k) for rank in range(bf.size())], 1 + k
    return full(count, found == expected), full(count, 1.0)


def shared(count, k):
    """Memory that neighbours read where it lies."""
    x = bf.empty_shared(count, dtype=torch.float32)
    x.fill_(bf.rank() + k)
    return bf.neighbor_allreduce(x), mean_with_others(count, k)


def put(count, k):
    """The own tensor and the puts of the neighbours, averaged."""
    x = WINDOW[bf.rank()]
    if x.get(count) is None:
        with torch.inference_mode(False):
            x[count] = full(count, 0.0)
        bf.win_create(x[count], f"put {count}", zero_init=True)
    own = x[count]
    own.fill_(bf.rank() + k)
    bf.win_put(own, f"put {count}")
    bf.barrier()
    found = bf.win_update(f"put {count}", clone=True)
    bf.barrier()
    return found, mean_with_others(count, k)


def accumulate(count, k):
    """What neighbours have added since, collected; each value counts once."""
    name, near = f"add {count}", (bf.size() > 1) + (bf.size() > 2)
    bf.win_create(full(count, 0.0), name, zero_init=True)
    bf.win_accumulate(full(count, k), name, dst_weights=dict.fromkeys(targets(), 1.0))
    bf.win_accumulate(full(count, 1.0), name, dst_weights=dict.fromkeys(targets(), 1.0))
    bf.barrier()
    found = bf.win_update_then_collect(name)
    bf.barrier()
    bf.win_free(name)
    return found, full(count, near * (k + 1))


def get(count, k):
    """What neighbours let others get."""
    name = f"get {count}"
    bf.win_create(full(count, bf.rank() + k), name)
    bf.win_get(name)
    found = bf.win_update(name, clone=True)
    bf.barrier()
    bf.win_free(name)
    return found, mean_with_others(count, k)


def targets():
    size = bf.size()
    return sorted({(bf.rank() + 1) % size, (bf.rank() - 1) % size} - {bf.rank()})


def broadcast_parameters(count, k):
    x = full(count, bf.rank() + k)
    bf.broadcast_parameters({"x": x}, root_rank=1)
    return x, of_root(count, k)


def allreduce_parameters(count, k):
    x = full(count, bf.rank() + k)
    bf.allreduce_parameters({"x": x})
    return x, mean_of_all(count, k)


def averaged(count, k):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(full(count, bf.rank() + k))
    with bf.average_model(model) as lent:
        return lent.weight.detach().clone(), mean_of_all(count, k)


def distance(count, k):
    del k
    spread = sum((rank - (bf.size() - 1) / 2) ** 2 for rank in range(bf.size())) / bf.size()
    found = bf.consensus_distance([full(count, bf.rank())])
    return full(1, found), full(1, (spread * count) ** 0.5)


WINDOW = {rank: {} for rank in range(8)}
USES = {
    "neighbor_allreduce": returned(bf.neighbor_allreduce, mean_with_others),
    "neighbor_allreduce_": returned(bf.neighbor_allreduce_, mean_with_others),
    "neighbor_allreduce_nonblocking": started(bf.neighbor_allreduce_nonblocking, mean_with_others),
    "neighbor_allreduce_nonblocking_": started(
        bf.neighbor_allreduce_nonblocking_, mean_with_others, replaces=True
    ),
    "neighbor_allreduce finished outside": finished_outside(
        bf.neighbor_allreduce_nonblocking, mean_with_others
    ),
    "neighbor_allreduce_ finished outside": finished_outside(
        bf.neighbor_allreduce_nonblocking_, mean_with_others
    ),
    "allreduce": returned(bf.allreduce, mean_of_all),
    "allreduce_": returned(bf.allreduce_, mean_of_all),
    "allreduce_nonblocking": started(bf.allreduce_nonblocking, mean_of_all),
    "allreduce_nonblocking_": started(bf.allreduce_nonblocking_, mean_of_all, replaces=True),
    "allreduce_ finished outside": finished_outside(bf.allreduce_nonblocking_, mean_of_all),
    "broadcast": returned(lambda x: bf.broadcast(x, 1), of_root),
    "broadcast_": returned(lambda x: bf.broadcast_(x, 1), of_root),
    "broadcast_ finished outside": finished_outside(
        lambda x: bf.broadcast_nonblocking_(x, 1), of_root
    ),
    "allgather": returned(bf.allgather, gathered),
    "neighbor_allgather": returned(bf.neighbor_allgather, gathered_from_neighbors),
    "reduce_scatter": returned(bf.reduce_scatter, of_this_rank),
    "maximum": returned(lambda x: bf.allreduce(x, op="max"), max_of_all),
    "maximum finished outside": finished_outside(
        lambda x: bf.allreduce_nonblocking_(x, op="max"), max_of_all
    ),
    "reduce": returned(lambda x: of_first(bf.reduce(x, 0)), mean_of_all),
    "gather": returned(lambda x: of_first(bf.gather(x, 0)), gathered),
    "scatter": returned(bf.scatter, lambda count, k: full(count // bf.size(), k)),
    "alltoall": returned(bf.alltoall, parts_of_all),
    "alltoall_ finished outside": finished_outside(bf.alltoall_nonblocking_, parts_of_all),
    "send and recv": sent_around,
    "local_allreduce": returned(bf.local_allreduce, mean_of_all),
    "pair_gossip": returned(lambda x: bf.pair_gossip(x, bf.rank() ^ 1), mean_of_pair),
    "neighbor_allreduce into out": into(bf.neighbor_allreduce, mean_with_others),
    "objects": objects,
    "empty_shared": shared,
    "put": put,
    "accumulate": accumulate,
    "get": get,
    "broadcast_parameters": broadcast_parameters,
    "allreduce_parameters": allreduce_parameters,
    "average_model": averaged,
    "consensus_distance": distance,
}


def used(mode, uses):
    """Each use of a name within the mode, outside of it, and within it again."""
    bf.set_topology(topology.ring(bf.size()))
    WINDOW[bf.rank()].clear()
    wrong = []
    for name in uses:
        for count in (SMALL, LARGE):
            for k, inside in enumerate([True, True, True, False, True]):
                with MODES[mode]() if inside else torch.enable_grad():
                    found = USES[name](count, k)
                value, expected = found() if callable(found) else found
                where = f"{name} of {count}, use {k}, {'inside' if inside else 'outside'}"
                if value.dtype != torch.float32 or value.device.type != "cpu":
                    wrong.append(f"{where}: {value.dtype} on {value.device}")
                elif not torch.allclose(value, expected):
                    wrong.append(f"{where}: {value.unique()[:3]} instead of {expected.unique()}")
                elif not inside and value.is_inference():
                    wrong.append(f"{where}: an inference tensor")
    return wrong


def used_on(world, mode):
    """What each rank found wrong; each has ring buffers of its own where it is a process."""
    processes = (in_small_chunks,) if world.transport != "loopback" else ()
    return world.run(*processes, used, mode, list(USES))


@on("loopback-2", "mpi-2", "shared_memory-4")
def test_what_is_kept_is_ordinary_although_it_was_made_in_inference_mode(world):
    """Names first used in inference mode give right results, ordinary ones outside of it."""
    assert used_on(world, "inference_mode") == [[]] * world.size


@on("loopback-2", "shared_memory-2")
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "inference_mode"])
def test_verbs_are_right_within_a_mode_and_after_it(world, mode):
    """Modes change neither the values nor the dtype nor the device of any result."""
    assert used_on(world, mode) == [[]] * world.size


def trained(mode):
    """Which weights differ after steps in and out of a mode from those after plain steps.

    What one-sided methods mix depends on what has arrived by then: five steps of -0.5 from 0 and 1,
    scaled by at most the ratio of the ranks' speeds, lie within bounds.
    """
    wrong = []
    for communication in ("adapt_then_combine", "gradient_allreduce", "win_put", "push_sum"):
        found = stepped(communication, mode, (True, True, False, True, False))
        expected = stepped(communication, mode, (False,) * 5)
        if found.is_inference():
            wrong.append(f"{communication}: an inference tensor")
        elif communication in ("win_put", "push_sum"):
            if not (found.min() >= -3.0 and found.max() < -0.5):
                wrong.append(f"{communication}: {found} out of bounds")
        elif not torch.allclose(found, expected):
            wrong.append(f"{communication}: {found} instead of {expected}")
    return wrong


def stepped(communication, mode, insides):
    """A weight after steps, each within a mode or outside of it; ranks step in turn with others."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(bf.rank()))
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model, algorithm=communication, broadcast=False
    )
    for inside in insides:
        optimizer.zero_grad()
        model(torch.ones(2, 4, device="cpu", dtype=torch.float32)).mean().backward()
        with MODES[mode]() if inside else torch.enable_grad():
            optimizer.step()
        bf.barrier()
    weight = model.weight
    bf.barrier()
    return weight if weight.is_inference() else weight.detach().clone()


@on("loopback-2", "shared_memory-2")
@pytest.mark.parametrize("mode", ["inference_mode", "device", "default_dtype"])
def test_optimizers_step_within_a_mode_and_after_it(world, mode):
    """Steps in a mode leave ordinary weights, equal to plain ones with two-sided methods."""
    assert world.run(trained, mode) == [[]] * world.size


def compiled(backend):
    """Where compiled functions with verbs differ from the plain ones; warnings are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know")
        return compared(backend)


def compared(backend):
    """Where compiled functions with verbs differ from the plain ones, or are one graph."""
    from torch._dynamo.utils import counters  # which takes long to import

    bf.set_topology(topology.ring(bf.size()))
    bf.win_create(full(SMALL, 0.0), "compiled", zero_init=True)

    def blocking(x):
        return bf.neighbor_allreduce(2 * x) + bf.allreduce(x + 1)

    def nonblocking(x):
        handle = bf.neighbor_allreduce_nonblocking(2 * x)
        y = x.sin()
        return handle.wait() + y

    def in_place(x):
        y = 2 * x
        bf.allreduce_(y)
        bf.neighbor_allreduce_nonblocking_(y).wait()
        return y + 1

    def window(x):
        bf.win_put(2 * x, "compiled")
        bf.barrier()
        y = bf.win_update("compiled", clone=True) + 1
        bf.barrier()
        return y

    wrong = []
    for plain in (blocking, nonblocking, in_place, window):
        fast = torch.compile(plain, backend=backend)
        counters.clear()
        for k in range(3):
            x = full(SMALL, bf.rank() + k)
            expected, found = plain(x.clone()), fast(x.clone())
            if not torch.allclose(found, expected):
                wrong.append(f"{plain.__name__}, use {k}: {found} instead of {expected}")
        if not counters["graph_break"]:
            wrong.append(f"{plain.__name__}: its graph was not broken")
    bf.win_free("compiled")
    trained = [compiled_training(backend), compiled_training(None)]
    return wrong if torch.allclose(*trained) else [*wrong, f"trained {trained}"]


def compiled_training(backend):
    """A weight after steps of a training step that is compiled as a whole, or not at all."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(bf.rank()))
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, broadcast=False
    )

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    train = step if backend is None else torch.compile(step, backend=backend)
    for _ in range(3):
        train(full(8, 1.0).view(2, 4))
    return model.weight.detach().clone()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@on("shared_memory-2")
def test_verbs_within_compiled_functions_break_their_graphs_and_warn_of_nothing(world, backend):
    """Compiled functions are cut at their verbs, and give what they give uncompiled."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    assert world.run(compiled, backend, limit=240.0) == [[]] * world.size


def test_verbs_are_marked_without_the_compiler():
    """Which takes longer to import than the rest of a start."""
    script = "import sys, asyncddp as bf; bf.allreduce; print('torch._dynamo' in sys.modules)"
    done = run_to_end([sys.executable, "-c", script], timeout=120.0)
    assert done.stdout == "False\n", done


def transformed():
    """What verbs say within a function that torch.func transforms, and what they give after it."""
    bf.set_topology(topology.ring(bf.size()))
    x, said, engine = full(SMALL, bf.rank()), [], bf.current().engine
    bf.win_create(full(SMALL, -1.0), "x")
    calls = {
        "neighbor_allreduce": lambda y: bf.neighbor_allreduce(y),
        "neighbor_allreduce of another": lambda y: bf.neighbor_allreduce(x) + y,
        "allreduce": lambda y: bf.allreduce(y),
        "win_put": lambda y: [bf.win_put(y, "x"), y][1],
    }
    for _ in range(3):
        for name, call in calls.items():
            for transform in (torch.func.vmap, lambda f: torch.func.grad(lambda y: f(y).sum())):
                before = engine.use_counts()
                with pytest.raises(bf.ArgumentError, match=r"torch\.func transforms") as raised:
                    transform(call)(x)
                assert engine.use_counts() == before, "the verb has begun"
                said.append(str(raised.value).startswith(name.split()[0]))
        found = bf.neighbor_allreduce(x)
        said.append(torch.allclose(found, mean_with_others(SMALL, 0)))
        assert engine.use_counts() != before
    bf.barrier()
    for rank in bf.in_neighbor_ranks():
        assert (bf.win_read_neighbor("x", rank) == -1.0).all(), "the put has begun"
    bf.win_free("x")
    return said


@on("loopback-2", "shared_memory-2")
def test_transformed_functions_are_refused_in_words_before_anything_is_sent(world):
    """Verbs in vmap or grad raise ArgumentError and begin nothing; the next plain call is right."""
    assert world.run(transformed) == [[True] * 27] * world.size


def on_meta():
    with pytest.raises(bf.ArgumentError, match="expected a tensor with values, got one on device"):
        bf.allreduce(torch.empty(3, device="meta"))
    return bf.allreduce(torch.ones(1)).item()


def test_tensors_without_values_are_refused():
    """A tensor on the meta device raises ArgumentError, and the next call is right."""
    with bf.local_world(2) as world:
        assert world.run(on_meta) == [1.0, 1.0]
