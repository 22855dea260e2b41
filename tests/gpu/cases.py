"""What ranks do with tensors on a device; the tests compare it with what the host gives.

Each case takes a :class:`~tests.gpu.places.Place` first, and runs on a GPU and on a pretended one.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from tests.support.oracle import held, options

SHAPES = [(), (0,), (1,), (5,), (3, 4), (70_001,), (3_000_000,)]


def verbs():
    """Each verb that takes a tensor, with the arguments that it needs."""
    last = bf.size() - 1
    return {
        "neighbor_allreduce": bf.neighbor_allreduce,
        "neighbor_allreduce_": lambda x, **more: bf.neighbor_allreduce_(x.clone(), **more),
        "later": lambda x, **more: bf.neighbor_allreduce_nonblocking(x, **more).wait(),
        "pair_gossip": lambda x, **more: bf.pair_gossip(x, bf.rank() ^ 1, **more),
        "hierarchical": bf.hierarchical_neighbor_allreduce,
        "allreduce": bf.allreduce,
        "allreduce_": lambda x, **more: bf.allreduce_(x.clone(), **more),
        "broadcast": lambda x, **_: bf.broadcast(x, last),
        "allgather": lambda x, **_: bf.allgather(x.reshape(-1)),
        "reduce_scatter": lambda x, **more: bf.reduce_scatter(
            x.reshape(-1).repeat(bf.size()), **more
        ),
        "neighbor_allgather": lambda x, **_: bf.neighbor_allgather(x.reshape(-1)),
        **{
            f"{name} compressed": compressed(verb)
            for name, verb in (
                ("neighbor_allreduce", bf.neighbor_allreduce),
                ("allreduce", bf.allreduce),
                ("hierarchical_allreduce", bf.hierarchical_allreduce),
                ("hierarchical", bf.hierarchical_neighbor_allreduce),
            )
        },
    }


def compressed(verb):
    """The verb with bfloat16 on the way, which every device rounds to alike; floats only."""

    def call(x, **more):
        floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
        return verb(x, **more, compression="bf16" if x.dtype in floats else None)

    return call


def prepare():
    bf.set_topology(topology.ring(bf.size()))
    bf.set_machine_topology(topology.ring(bf.machine_size()))


def agrees_with_the_host(place, dtype):
    """Every verb and shape gives on the device what it gives on the host, within rounding."""
    prepare()
    for name, verb in verbs().items():
        for seed, shape in enumerate(SHAPES):
            x = held(bf.rank(), shape, dtype, seed)
            expected = verb(x, **options(dtype))
            with place.there():
                got = verb(x.to(place.device), **options(dtype))
                assert got.device == place.device, name
                torch.testing.assert_close(got.cpu(), expected, msg=f"{name} of {shape}")


def _input(place, values):
    """Those values on the device, which are written only after a while; NaN till then."""
    made = torch.full(values.shape, float("nan"))
    place.late(made, values)
    return made


def races(place, steps, side):
    """Slow work before a verb makes its input, and slow work after it uses its result.

    The input is overwritten as soon as the verb is over, and its memory is given back for others to
    use, who fill it with NaN.
    """
    prepare()
    for step in range(steps):
        for name, verb in verbs().items():
            x = held(bf.rank(), (100_000,), torch.float32, step)
            expected = verb(x)
            with place.there(), place.side() if side else nullcontext():
                late = _input(place, x)
                got = verb(late)
                late.fill_(float("nan"))
                del late
                spoilt = torch.full((100_000,), float("nan"))
                place.busy()
                torch.testing.assert_close((got + 0.0).cpu(), expected, msg=f"{name}, {step}")
                del spoilt


def waited_elsewhere(place):
    """A handle is started on one stream, and waited for on another one and by another thread."""
    bf.set_topology(topology.ring(bf.size()))
    values = [held(bf.rank(), (50_000,), torch.float32, seed) for seed in range(6)]
    expected = [bf.neighbor_allreduce(value) for value in values]
    found = {}

    def wait(number, handle):
        with place.there(), place.side():
            result = handle.wait()
            place.busy()
            found[number] = (result + 0.0).cpu()

    with place.there():
        with place.side():
            inputs = [_input(place, value) for value in values]
            start = bf.neighbor_allreduce_nonblocking
            handles = [start(x, name=f"h{k}") for k, x in enumerate(inputs)]
        for number in (0, 1, 2):
            wait(number, handles[number])
        threads = [threading.Thread(target=wait, args=(k, handles[k])) for k in (3, 4, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, value in enumerate(expected):
        torch.testing.assert_close(found[number], value, msg=f"handle {number}")


def graphed(place, rounds):
    """A graph of the computation between two verbs, replayed with new values in its tensors."""
    bf.set_topology(topology.ring(bf.size()))
    x = held(bf.rank(), (10_000,), torch.float64)
    with place.there():
        inside = x.to(place.device)
        outside = torch.empty_like(inside)

        def compute():
            torch.mul(inside, 0.5, out=outside)
            outside.add_(1.0)

        replay = place.graph(compute)
        for _ in range(rounds):
            inside.copy_(bf.neighbor_allreduce(inside))
            replay()
            inside.copy_(bf.neighbor_allreduce(outside))
        got = inside.cpu()
    for _ in range(rounds):
        x = bf.neighbor_allreduce(bf.neighbor_allreduce(x) * 0.5 + 1.0)
    torch.testing.assert_close(got, x, rtol=1e-12, atol=0)


def each_verb_once(place, watch):
    """Warmed up, then every verb once under ``watch``, a context that is told its name."""
    prepare()
    with place.there():
        x = held(bf.rank(), (300_000,), torch.float32)
        for name, verb in verbs().items():
            verb(x)
            place.ends()
            bf.barrier()
            with watch(name):
                result = verb(x)
                bf.barrier()
            place.ends()
            del result


COMPRESSED = {
    "beer": {},
    "bytegrad": {},
    "choco_sgd": {"compression": "sign"},
    "deepsqueeze": {},
    "demo": {},
    "gradient_allreduce compressed": {"compression": "power_sgd"},
    "low_precision_decentralized": {},
    "moniqua": {},
    "power_gossip": {},
    "sparse_loco": {},
}
"""Where a last bit may decide on a level of quantisation, or on what is largest."""
WITHOUT_WAITING = {"a2cid2", "ad_psgd", "async_model_average", "overlap_sgp", "pull_get", "win_put"}
APART = {"push_sum", "qadam", *WITHOUT_WAITING, *COMPRESSED}
WITH_MOMENTUM = {"decentlam", "edm", "momentum_tracking", "quasi_global_momentum"}
METHODS = {
    "adapt_then_combine in backward": {"update_in_backward": True},
    **{name: {} for name in ALGORITHMS if name not in APART},
}
"""Methods whose weights are the same on every device, up to rounding."""


def trains(place, method, steps):
    """Weights of a convnet after some steps on the device, and after the same ones on the host."""
    with place.there():
        there = _trained(method, steps)
    return there, _trained(method, steps)


def trains_by_each(place, steps):
    """``trains`` by every method, one after the other."""
    return {method: trains(place, method, steps) for method in METHODS}


def _trained(method, steps):
    """In double precision, where no device rounds as coarsely as in TF32."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, dtype=torch.float64),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(144, 10, dtype=torch.float64),
    )
    flat = 0.1 * held(0, (1490,), torch.float64)
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    algorithm = method.partition(" ")[0]
    momentum = 0.0 if algorithm in WITH_MOMENTUM else 0.9
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    graph = {"topology": topology.one_peer_exponential(bf.size())}
    given = graph if algorithm.startswith("adapt") else {}
    options = {**METHODS, **COMPRESSED}[method]
    optimizer = bf.DistributedOptimizer(inner, model, algorithm, **given, **options)
    for step in range(steps):
        data = held(bf.rank(), (8, 1, 8, 8), torch.float64, step)
        labels = torch.arange(8) % 10
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), labels).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def joins(place):
    """Like ``trains``, where rank r has r + 2 batches."""
    with place.there():
        there = _joined()
    return there, _joined()


def _joined():
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    flat = held(0, (4,), torch.float64)
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bf.DistributedOptimizer(inner, model, "gradient_allreduce")
    with bf.join(optimizer):
        for step in range(bf.rank() + 2):
            data = held(bf.rank(), (4, 3), torch.float64, step)

            def closure(data=data):
                optimizer.zero_grad()
                loss = model(data).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def mixed_devices(place):
    """The error that a rank gets whose neighbour has its tensor on another kind of device."""
    with place.there():
        device = place.device if bf.rank() else torch.device("cpu")
        try:
            bf.neighbor_allreduce(torch.ones(70_000, device=device), name="x")
        except bf.MismatchError as error:
            return str(error)
    return "no error"
