"""``with_bagua`` and the attributes of wrapped models, added to every module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from asyncddp.integrations.bagua.torch_api.algorithms.base import Algorithm
from asyncddp.integrations.bagua.torch_api.data_parallel.bagua_distributed import (
    wrap,
    wrapper_of,
)
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup

__all__ = ["BaguaModule", "with_bagua"]

M = TypeVar("M", bound=torch.nn.Module)


def with_bagua(
    model: M,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    process_group: BaguaProcessGroup | None = None,
    do_flatten: bool = True,
) -> M:
    """Wrap a model so that an algorithm trains it, and return the model; collective.

    Parameters, buffers and optimizer states are set to those of the group's first rank. The
    training loop stays the same: ``loss.backward()``, ``optimizer.step()`` with the given
    optimizers. Wrapping a model again switches the algorithm: operations in progress are finished,
    and parameters and buffers become averages over all ranks. It is also a method of every module.

    Args:
        model: The model.
        optimizers: Its optimizers.
        algorithm: The algorithm.
        process_group: The ranks that train; all by default.
        do_flatten: Whether buckets of an ``AlgorithmImpl`` move tensors to flat memory.

    Returns:
        The model itself, with attributes such as ``bagua_buckets``.

    Raises:
        ProcessGroupError: ``init_process_group`` was not called.
        ArgumentError: An invalid argument.
        UnmanagedParameterError: The algorithm needs all parameters to belong to an optimizer.
        MismatchError: Ranks differ in parameters or settings.

    Example:
        >>> import asyncddp as bf
        >>> import asyncddp.integrations.bagua.torch_api as bagua
        >>> from asyncddp.integrations.bagua.torch_api.algorithms import gradient_allreduce
        >>> def train():
        ...     bagua.init_process_group()
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
        ...     model = model.with_bagua([optimizer], algorithm)
        ...     model(torch.full((1, 1), float(bagua.get_rank()))).sum().backward()
        ...     optimizer.step()
        ...     return model.weight.item()
        >>> with bf.local_world(3) as world:
        ...     world.run(train)
        [-1.0, -1.0, -1.0]
    """
    wrap(model, optimizers, algorithm, process_group, do_flatten)
    return model


class _WrapperAttribute:
    """Descriptor of an attribute that only wrapped models have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: torch.nn.Module | None, kind: type | None = None) -> Any:
        if module is None:
            return self
        wrapper = wrapper_of(module)
        if wrapper is None:
            raise AttributeError(
                f"{type(module).__name__} has no attribute {self._name!r} before with_bagua(...)"
            )
        return getattr(wrapper, self._name)


class BaguaModule:
    """Methods added to every ``torch.nn.Module`` when ``torch_api`` is imported, as with Bagua."""

    with_bagua = with_bagua
    bagua_algorithm = _WrapperAttribute("bagua_algorithm")
    bagua_buckets = _WrapperAttribute("bagua_buckets")
    bagua_build_params = _WrapperAttribute("bagua_build_params")
    bagua_module_name = _WrapperAttribute("bagua_module_name")
    bagua_optimizers = _WrapperAttribute("bagua_optimizers")
    bagua_train_step_counter = _WrapperAttribute("bagua_train_step_counter")


def add_methods() -> None:
    """Add the methods and attributes of :class:`BaguaModule` to all modules."""
    for name, attribute in vars(BaguaModule).items():
        if not name.startswith("_"):
            setattr(torch.nn.Module, name, attribute)
