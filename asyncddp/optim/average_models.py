"""Averages of the ranks' models, and their consensus distance from the average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from asyncddp.algorithms.gradient_hooks import averagers_of, wait_for_reads
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.published_models import ReplicaAge, published_models, write_average
from asyncddp.algorithms.replicated_parts import holders_of
from asyncddp.algorithms.wrapper_setup import checked_positive
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.context.mesh_context import replica_context
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce import allreduce
from asyncddp.ops.allreduce_tensors import AVERAGED_BYTES, average_module
from asyncddp.ops.inner_mesh import InnerMesh
from asyncddp.ops.settings_agreement import require_equal_tensors, tensors_of
from asyncddp.tensors.allocation import TensorBackup, make_tensor, zeros
from asyncddp.tensors.buckets import partition
from asyncddp.tensors.local_parts import is_distributed, reshard, shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=torch.nn.Module)


def consensus_distance(
    model: torch.nn.Module | Iterable[torch.Tensor], *, mesh: DeviceMesh | None = None
) -> float:
    r"""Compute the root mean square distance of the ranks' parameters from their average.

    .. math:: \Xi = \sqrt{\frac{1}{n} \sum_i \lVert x_i - \bar x \rVert_2^2}

    Collective: all ranks call it. Sums are formed in float64.

    Args:
        model: A module, all of whose parameters count, or tensors. Ranks match parameters by name,
            and tensors by their place.
        mesh: Where the model is sharded: the dimension of the mesh whose ranks are replicas. The
            distance is that of whole models; a part that several ranks of a replica hold counts
            once.

    Returns:
        :math:`\Xi`, the same on all ranks; 0 where they agree.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: An argument that holds no tensors.
        MismatchError: Ranks differ in names, shapes or dtypes; raised on all of them.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.consensus_distance([torch.full((4,), float(bf.rank()))]))
        [1.0, 1.0]

    References:
        Kong et al., "Consensus control for decentralized deep learning", ICML 2021.
    """
    context = replica_context(mesh)
    with use(context):
        named = _tensors_of(model)
        require_equal_tensors(context, "consensus_distance", named)
        inner = InnerMesh.of(context)
        parts = [shard(one) for one in counted_once(inner, named)]
        square = make_tensor(squared_deviation(parts), torch.float64)
        total = float(allreduce(square))
    in_parts = inner is not None and (
        mesh is not None or inner.agree(any(map(is_distributed, named.values())))
    )
    return math.sqrt(inner.sum([total])[0] if inner is not None and in_parts else total)


def counted_once(inner: InnerMesh | None, named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors but those of which lower ranks of the replica have the same part."""
    if inner is None:
        return list(named.values())
    with use(inner.context):
        copies = holders_of(named)
    own = inner.context.rank
    return [one for name, one in named.items() if copies.get(name, (own,))[0] == own]


def squared_deviation(tensors: Sequence[torch.Tensor]) -> float:
    r"""Compute this rank's squared distance :math:`\lVert x_i - \bar x \rVert_2^2`; collective."""
    square = zeros((), torch.float64)
    tensors = [tensor for tensor in tensors if tensor.numel()]
    for indices in partition(tensors, AVERAGED_BYTES):
        parts = [tensors[index].detach().to("cpu").reshape(-1) for index in indices]
        wide = torch.complex128 if parts[0].is_complex() else torch.float64
        flat = torch.cat([part.to(wide) for part in parts])
        square += (flat - allreduce(flat)).abs().square().sum()
    return float(square)


class ModelAverage(AbstractContextManager[M]):
    """Context manager of :func:`asyncddp.average_model`: inside, the model holds the average.

    Attributes:
        ages: The age of each replica in the average, by rank, this one's among them; empty before
            the block.
        missing: Ranks that are not in the average, ascending.
    """

    def __init__(
        self, model: M, *, buffers: bool, wait: bool, timeout: float | None, context: Context
    ) -> None:
        self._model, self._buffers, self._wait, self._timeout = model, buffers, wait, timeout
        self._context = context
        self.ages: dict[int, ReplicaAge] = {}
        self.missing: tuple[int, ...] = ()

    def __enter__(self) -> M:
        self._lent = self._lend_all() if self._wait else self._lend_published()
        with use(self._context):
            return self._lent.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._lent.__exit__(*error)

    @contextmanager
    def _lend_all(self) -> Iterator[M]:
        reshard([self._model])
        context, named = self._context, tensors_of(self._model, buffers=self._buffers)
        require_equal_tensors(context, "average_model", named)
        with lend_average(self._model, buffers=self._buffers):
            self.ages = dict.fromkeys(range(context.size), ReplicaAge(0, 0.0))
            yield self._model

    @contextmanager
    def _lend_published(self) -> Iterator[M]:
        averagers = _publishing_averagers(list(self._model.parameters()))
        context = averagers[0].context
        context.engine.ensure_open("average_model")
        with _restored(self._model):
            with published_models(context, averagers, self._timeout) as found, torch.no_grad():
                write_average(averagers, list(found.values()))
                ages = {peer: replica.age for peer, replica in found.items()}
            self.ages = dict(sorted({**ages, context.rank: ReplicaAge(0, 0.0)}.items()))
            self.missing = tuple(rank for rank in range(context.size) if rank not in self.ages)
            yield self._model


def average_model(
    model: M,
    *,
    buffers: bool = True,
    wait: bool = True,
    timeout: float | None = None,
    mesh: DeviceMesh | None = None,
) -> ModelAverage[M]:
    r"""Replace a model's parameters and buffers by their average over ranks, in a ``with`` block.

    .. math:: \bar x = \frac{1}{n} \sum_i x_i

    It is meant for evaluation and checkpoints. Collective at the start, unless ``wait=False``. At
    the end, and after an exception, each rank has its own parameters and buffers again, bit by bit;
    nothing is sent then.

    Running means and variances, of batch normalisation, become those of all ranks' data together:
    the spread of the ranks' means is part of the variance. They were taken with each rank's own
    parameters; to have them for the average model, estimate them anew in the block, by
    ``torch.optim.swa_utils.update_bn(loader, model)``.

    ``wait=False`` is for one-sided methods, ``win_put``, ``pull_get``, ``push_sum``, ``ad_psgd``,
    ``a2cid2``, ``async_model_average`` by steps and ``DecentralizedDataParallel(sync=False)``. One
    rank calls it, or any that like to, at any time between two steps of its own; the others compute
    on, and do nothing for it. The average is of this rank's present parameters and of what each
    other living rank has published last, whether it is a neighbour or not, divided by p with
    ``push_sum``. Each bucket of parameters is of one moment, and different buckets may be of two
    successive steps. What is not published stays this rank's own: buffers, and parameters that the
    wrapper does not train. Ranks are left out, and named in ``missing``, that have died, raised or
    ended, that have announced by ``conclude()`` that they make no more steps, and have made fewer
    than this one, that have published nothing yet, as with pairs before the first step, or whose
    answer has not come within ``timeout``. Where nobody else is left, the average is this rank's
    own model.

    Args:
        model: The module; its parameters are changed in place.
        buffers: Whether to average floating-point buffers as well; integers, such as
            ``num_batches_tracked``, and sparse buffers stay each rank's own.
        wait: Whether all ranks call it together; False fetches what they have published.
        timeout: With ``wait=False``: seconds for all answers; None for
            ``ASYNCDDP_NETWORK_TIMEOUT``, which is 30. From other machines whole models come, for
            which this rank needs time and memory.
        mesh: Where the model is sharded: the dimension of the mesh whose ranks are replicas.

    Returns:
        A context manager that gives the model. Its ``ages`` tell by rank how many averagings
        the replica was behind this rank, ``lag``, and how many ``seconds`` ago it was published,
        of its oldest bucket; its ``missing`` are the ranks that were left out.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No module was given; or ``wait=False`` where no wrapper of the model
            publishes it, since its ranks wait for each other or it has none.
        MismatchError: Ranks differ in names, shapes or dtypes, perhaps of buffers:
            ``buffers=False`` leaves them; raised on all ranks.

    Example:
        >>> import asyncddp as bf, torch
        >>> def look():
        ...     model = torch.nn.Linear(1, 1)
        ...     torch.nn.init.constant_(model.weight, bf.rank())
        ...     with bf.average_model(model) as averaged:
        ...         inside = averaged.weight.item()
        ...     return inside, model.weight.item()
        >>> with bf.local_world(2) as world:
        ...     world.run(look)
        [(0.5, 0.0), (0.5, 1.0)]
        >>> def look_alone():
        ...     model = torch.nn.Linear(1, 1)
        ...     torch.nn.init.constant_(model.weight, bf.rank())
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     optimizer = bf.DistributedOptimizer(sgd, model, "win_put", broadcast=False)
        ...     if bf.rank() == 0:
        ...         average = bf.average_model(model, wait=False)
        ...         with average:
        ...             print(model.weight.item(), sorted(average.ages), average.missing)
        ...     bf.barrier()
        >>> with bf.local_world(2) as world:
        ...     _ = world.run(look_alone)
        0.5 [0, 1] ()
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"average_model: argument model: expected a torch.nn.Module, got {type(model).__name__}"
        )
    check_timeout("average_model", timeout, wait=wait)
    context = replica_context(mesh)
    return ModelAverage(model, buffers=buffers, wait=wait, timeout=timeout, context=context)


def check_timeout(verb: str, timeout: Any, *, wait: bool) -> None:
    """Require a positive timeout or None, and None if all ranks wait for each other."""
    if timeout is None:
        return
    if wait:
        raise ArgumentError(
            f"{verb}: argument timeout: expected None, or wait=False with it, got {timeout!r}; "
            "where ranks wait for each other ASYNCDDP_TIMEOUT is the limit"
        )
    checked_positive(f"{verb}: argument timeout", timeout)


def _publishing_averagers(parameters: Sequence[torch.Tensor]) -> list[ModelAverager]:
    """Return the averagers that publish these parameters; raise if there are none."""
    averagers, problem = averagers_of(parameters), "no wrapper of this model publishes it"
    for averager in averagers:
        problem = ""
        if not averager.communication.asynchronous:
            method, how = averager.algorithm.name, averager.communication.name
            problem = f"{method}, which trains it by {how}, publishes nothing"
            break
    if problem:
        raise ArgumentError(
            "average_model: argument wait: with False it fetches what other ranks have published, "
            f"and {problem}; expected wait=True, on all ranks between two steps, or a one-sided "
            "method such as algorithm='win_put' or DecentralizedDataParallel(sync=False)"
        )
    return averagers


@contextmanager
def lend_average(model: M, *, buffers: bool, parameters: bool = True) -> Iterator[M]:
    """Do the work of :func:`average_model`, without checks; optionally for buffers only."""
    with _restored(model):
        average_module(model, buffers=buffers, parameters=parameters)
        yield model


@contextmanager
def _restored(model: torch.nn.Module) -> Iterator[None]:
    """Restore a model's parameters and buffers at the end of a ``with`` block.

    Forward passes inside start no round.
    """
    reshard([model])
    every = list(model.parameters())
    kept = [b for b in model.buffers() if b.layout == torch.strided]
    wait_for_reads(every)
    own, averagers = TensorBackup([*map(shard, every), *kept]), averagers_of(every)
    for averager in averagers:
        averager.lent += 1
    try:
        yield
    finally:
        reshard([model])  # what was gathered has the averages
        own.restore()
        for averager in averagers:
            averager.lent -= 1


def _tensors_of(model: torch.nn.Module | Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    if isinstance(model, torch.nn.Module):
        reshard([model])
        named = tensors_of(model, buffers=False)
    elif isinstance(model, Iterable):
        named = {f"tensor {position}": tensor for position, tensor in enumerate(model)}
    tensors = named.values()
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ArgumentError(
            "consensus_distance: argument model: expected a module with parameters or a list of "
            f"tensors, got {type(model).__name__}"
        )
    return named
