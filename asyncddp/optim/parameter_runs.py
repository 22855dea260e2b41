"""Flat runs: sequences of parameters adjacent in memory, each viewed as one flat tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch

from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.buckets import dense_strides

_CPU_LIMIT = 1 << 20
"""Bytes of a run on a CPU: its moments stay in a core's cache from one operation to the next."""

States: TypeAlias = MutableMapping[torch.Tensor, dict[str, Any]]


def moments_of(parameter: torch.Tensor, states: States) -> dict[str, torch.Tensor]:
    """Return the state tensors with the parameter's shape."""
    return {
        key: value
        for key, value in states.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    }


def distance(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Return the offset in elements from the first tensor to the second; None across storages."""
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    return int(second.storage_offset()) - int(first.storage_offset())


def find_runs(
    parameters: Iterable[torch.Tensor], states: States, alignment: int
) -> list[list[torch.Tensor]]:
    """Divide parameters with gradients into runs whose tensors are adjacent in memory.

    In a run weights, gradients and each kind of moment lie in the same order at the same distances,
    and all other state is equal. A parameter that is no part of a longer run is one by itself.

    Args:
        parameters: The parameters.
        states: The optimizer's state of each.
        alignment: Bytes to whose multiples members of a run are padded.
    """
    runs: list[list[torch.Tensor]] = []
    last: tuple[Any, ...] | None = None
    for parameter in sorted(parameters, key=torch.Tensor.data_ptr):
        traits = _traits(parameter, states)
        fits = traits is not None and traits == last
        if (
            fits
            and _is_small(runs[-1][0], parameter)
            and _follows(runs[-1][-1], parameter, states, alignment)
        ):
            runs[-1].append(parameter)
        else:
            runs.append([parameter])
        last = traits
    return runs


def _is_small(first: torch.Tensor, last: torch.Tensor) -> bool:
    """Return whether a run from the first to the last parameter is within the size limit."""
    size = last.data_ptr() + last.numel() * last.element_size() - first.data_ptr()
    return not first.is_cpu or size <= _CPU_LIMIT


def _traits(parameter: torch.Tensor, states: States) -> tuple[Any, ...] | None:
    """Return the properties that must be equal within a run; None for unsuitable parameters."""
    gradient, moments = parameter.grad, moments_of(parameter, states)
    if gradient is None or gradient.layout != torch.strided or parameter.dim() == 0:
        return None  # without dimensions, a number of the state cannot be told from a moment
    same = {tensor.stride() for tensor in (parameter, gradient, *moments.values())}
    if len(same) > 1 or dense_strides(parameter) != parameter.stride():
        return None
    numbers = {}
    for key, value in states.get(parameter, {}).items():
        if key not in moments:
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                return None
            numbers[key] = value.item() if isinstance(value, torch.Tensor) else value
    kinds = {key: moment.dtype for key, moment in moments.items()}
    return parameter.dtype, parameter.device, kinds, numbers


def _follows(first: torch.Tensor, second: torch.Tensor, states: States, alignment: int) -> bool:
    unit = max(1, alignment // first.element_size())
    between = distance(first, second)
    others, behind = moments_of(first, states), moments_of(second, states)
    pairs = [(first.grad, second.grad), *((others[key], behind[key]) for key in others)]
    return between == -(-first.numel() // unit) * unit and all(
        one is not None and other is not None and distance(one, other) == between
        for one, other in pairs
    )


class FlatRun:
    """Consecutive parameters as one flat tensor; its gradient and state share their memory.

    It can be stepped again as long as :meth:`is_current`.

    Attributes:
        members: The parameters.
        flat: The flat tensor.
        state: State for an optimizer that steps ``flat``.
    """

    def __init__(self, members: list[torch.Tensor], states: States) -> None:
        self.members = members
        first, last = members[0], members[-1]
        self._places = [one.storage_offset() - first.storage_offset() for one in members]
        self._span = self._places[-1] + last.numel()
        self.flat = self._flattened(first.data)
        self.flat.grad = self._flattened(_gradient(first))
        moments = moments_of(first, states)
        self.state = {
            key: self._flattened(value) if key in moments else value
            for key, value in states.get(first, {}).items()
        }
        self._addresses = [(one.data_ptr(), _gradient(one).data_ptr()) for one in members]
        self._numbers: dict[str, torch.Tensor] = {}  # with an element for each member
        self._given: dict[str, Any] = {}
        self._written: list[dict[str, Any]] = []

    def _flattened(self, first: torch.Tensor) -> torch.Tensor:
        return first.as_strided((self._span,), (1,))

    def is_current(self, states: States) -> bool:
        """Return whether weights, gradients and state are unmoved, and their scalars equal."""
        for member, where, written in zip(
            self.members, self._addresses, self._written, strict=True
        ):
            state = states.get(member, {})
            if (member.data_ptr(), _gradient(member).data_ptr()) != where:
                return False
            if len(state) != len(written):
                return False
            if any(state.get(key) is not value for key, value in written.items()):
                return False
        return all(bool((numbers == numbers[0]).all()) for numbers in self._numbers.values())

    def lend(self, states: States) -> None:
        """Add the state of ``flat`` to the optimizer's states, for one step."""
        if self.state:
            states[self.flat] = self.state

    def write_back(self, states: States) -> None:
        """Remove the state of ``flat``, and return to each member its part."""
        left = states.pop(self.flat, None)
        if left is None:
            self._written = self._written or [{} for _ in self.members]
            return
        for key, numbers in self._numbers.items():
            if left[key] is self._given[key]:  # changed in place, if at all
                numbers[1:].copy_(numbers[0])
        changed = [
            key for key in left if key not in self._given or left[key] is not self._given[key]
        ]
        parts = {key: self._divided(key, left[key]) for key in changed}
        for place, member in enumerate(self.members):
            states[member].update({key: values[place] for key, values in parts.items()})
        if changed or not self._written:
            self._written = [dict(states[member]) for member in self.members]
            left.update({key: numbers[0] for key, numbers in self._numbers.items()})
            self.state, self._given = left, dict(left)

    def _divided(self, key: str, value: Any) -> Sequence[Any]:
        """Split a value into the members' parts; scalars become views of one tensor."""
        if not isinstance(value, torch.Tensor):
            return [value] * len(self.members)
        if value.shape == self.flat.shape:
            start = value.storage_offset()
            return [
                value.as_strided(member.shape, member.stride(), start + place)
                for member, place in zip(self.members, self._places, strict=True)
            ]
        self._numbers[key] = detached_copy(value.expand(len(self.members), *value.shape))
        return self._numbers[key].unbind()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient


class GroupRuns:
    """Flat runs of a parameter group's parameters with gradients, reused from step to step.

    Attributes:
        runs: Those of more than one parameter.
        alone: The other parameters.
    """

    def __init__(self, parameters: list[torch.Tensor], states: States, alignment: int) -> None:
        self._parameters = parameters
        runs = find_runs(parameters, states, alignment)
        self.runs = [FlatRun(run, states) for run in runs if len(run) > 1]
        self.alone = [run[0] for run in runs if len(run) == 1]

    def is_current(self, parameters: list[torch.Tensor], states: States) -> bool:
        """Return whether the runs still match these parameters."""
        return (
            len(parameters) == len(self._parameters)
            and all(map(operator.is_, parameters, self._parameters))
            and all(run.is_current(states) for run in self.runs)
        )
