"""Expected results of operations, computed from all ranks' inputs, and assertions across ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from asyncddp.context import current
from asyncddp.ops.object_collectives import allgather_object
from asyncddp.optim import consensus_distance
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from asyncddp.topology import GraphOrSchedule, as_schedule


def held(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Generate the input ``X[rank]``: random values, which every rank can compute for all ranks.

    The values are equal on every device, and are created on torch's default device: a test of host
    tensors becomes a test of GPU tensors inside ``with torch.device("cuda"):``.
    """
    generator = torch.Generator().manual_seed(10_007 * seed + rank)
    if dtype == torch.bool:
        drawn = torch.rand(tuple(shape), generator=generator, device="cpu") < 0.3
    elif dtype.is_floating_point or dtype.is_complex:
        drawn = torch.randn(tuple(shape), generator=generator, dtype=dtype, device="cpu")
    else:
        info = torch.iinfo(dtype)
        ends = max(info.min, -1000), min(info.max, 1000) + 1
        drawn = torch.randint(*ends, tuple(shape), generator=generator, dtype=dtype, device="cpu")
    # torch.get_default_device() of torch 2.6 does not see `with torch.device(…)`.
    return drawn.to(torch.tensor(0).device)  # noqa: TID251 - the caller's context


def oracle(
    topology: GraphOrSchedule, rank: int, of: Callable[[int], torch.Tensor], k: int = 0
) -> torch.Tensor:
    r"""Compute the expected neighbour average of a rank, in double precision.

    .. math:: (W_k X)_i = \sum_j w_{ij} x_j

    Args:
        topology: Graph or schedule.
        rank: The rank i.
        of: The tensor of each rank, such as :func:`held`.
        k: The round of the schedule.

    Returns:
        The average, in float64 or complex128.

    Example:
        >>> import torch
        >>> from asyncddp import topology
        >>> oracle(topology.ring(4), 0, lambda rank: torch.tensor([3.0 * rank]))
        tensor([4.], dtype=torch.float64)
    """
    near = as_schedule(topology).neighbors(rank, k)
    return mixed(rank, near.self_weight, near.src_weights, of)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def mixed(
    rank: int,
    self_weight: float,
    src_weights: Mapping[int, float],
    of: Callable[[int], torch.Tensor],
    sent_with: Callable[[int, int], float] = lambda source, target: 1.0,
) -> torch.Tensor:
    r"""Compute :math:`w_{ii} x_i + \sum_j w_{ij} d_{ji} x_j` in double precision."""
    own = of(rank)
    total = own.to(_wide(own.dtype)) * self_weight
    for source, weight in src_weights.items():
        total += of(source).to(total.dtype) * (weight * sent_with(source, rank))
    return total


def summed(ranks: Sequence[int], of: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Compute the expected sum over ranks; bools by logical or, integers modulo their range."""
    parts = torch.stack([of(rank) for rank in ranks])
    if parts.dtype == torch.bool:
        return parts.any(dim=0)
    kind = DTYPES[parts.dtype].kind
    return parts.sum(dim=0, dtype=parts.dtype if kind is DtypeKind.INTEGER else _wide(parts.dtype))


def assert_result(got: torch.Tensor, like: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that an operation's result equals ``expected`` up to rounding in its dtype.

    Args:
        got: The result.
        like: The verb's input, whose dtype, device and shape the result has.
        expected: The exact value.
    """
    assert got.dtype == like.dtype, f"dtype {got.dtype} came of {like.dtype}"
    assert got.device == like.device
    assert tuple(got.shape) == tuple(like.shape), f"shape {tuple(got.shape)} of {tuple(like.shape)}"
    assert got.requires_grad is False
    if not (expected.is_floating_point() or expected.is_complex()):
        assert torch.equal(got, expected.to(got.dtype))
        return
    if DTYPES[got.dtype].kind is DtypeKind.INTEGER:
        error = (got.to(expected.dtype) - expected).abs()
        assert not error.numel() or error.max() <= 0.5 + 1e-9, f"off by {error.max()}"
        return
    exact = expected.to(_wide(got.dtype))
    size = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
    allowed = 4 * torch.finfo(got.dtype).eps * size
    close = (got.to(exact.dtype) - exact).abs().le(allowed).all()
    if not close:  # slower, with the reason in words; knows of infinities
        torch.testing.assert_close(got.to(exact.dtype), exact, rtol=0, atol=allowed)


def assert_consensus(model: torch.nn.Module | Iterable[torch.Tensor], within: float = 0.0) -> None:
    r"""Assert that the ranks' parameters are close to their average.

    .. math:: \sqrt{\tfrac{1}{n} \textstyle\sum_i \lVert x_i - \bar x \rVert_2^2} \le \epsilon

    Collective: all ranks call it, and all fail or none does.

    Args:
        model: A module, all of whose parameters count, or tensors.
        within: :math:`\epsilon`, the largest distance that is right.

    Raises:
        AssertionError: They are further away; the message says how far.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: assert_consensus([torch.ones(3) * bf.rank()], within=1.0))
        [None, None]
    """
    distance = consensus_distance(model)
    if not distance <= within:
        raise AssertionError(
            f"the parameters of {current().size} ranks are {distance:g} from their average, "
            f"expected at most {within:g}"
        )


def assert_alike(value: object) -> None:
    """Assert that all ranks hold equal values; tensors must be equal bit for bit.

    Collective: all ranks call it, and all fail or none does.

    Args:
        value: What pickle can carry and ``==`` can compare; or a tensor.

    Raises:
        AssertionError: A rank holds something else than rank 0; the message shows both.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: assert_alike(bf.size()))
        [None, None]
    """
    every = allgather_object(value)
    for rank, other in enumerate(every):
        if not _same(every[0], other):
            raise AssertionError(f"rank 0 holds {every[0]!r}, but rank {rank} holds {other!r}")


def _same(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
