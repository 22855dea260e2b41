"""Averaged bucket: a flat tensor of parameters or gradients, with the algorithm's state for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import override

from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.errors import ArgumentError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.tensors.allocation import zeros_like
from asyncddp.tensors.buckets import NamedFlatBucket
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.tensors.local_parts import fitted, is_distributed, local_grad, shard

_VECTOR = "vector: "
"""Prefix of the names of vectors in checkpoints."""
_NO_TERMS = "an average has no terms: declare compression = CompressionUse.DIFFERENCES"


class AveragedBucket:
    """Flat tensor of parameters or gradients that ranks average, with the algorithm's state for it.

    Attributes:
        index: Index of the bucket.
        flat: The flat tensor that is averaged, in whose layout the parameters lie, ``(d,)``; where
            the models of n ranks are stacked, as in a simulation, ``(n, d)``, one row a rank.
        names: Names of the parameters.
        parameters: The parameters.
        optimizer: The optimizer that updates them.
        state: Tensors that the method keeps by name, each of ``flat``'s size, or one number without
            dimensions that is the same in all buckets. Checkpoints hold them parameter by
            parameter.
        vectors: Tensors of any size that the method keeps by name and parameter, such as small ones
            for single neighbours. Checkpoints hold them as well.
        compressor: Compressor of what is sent, with its state; None sends tensors as they are.
        rank: This rank.
        row: This rank's weights in the round, where it averages with neighbours by messages.
        joined: Whether this rank is done, within ``join``, and takes part for the others alone.
        nodes: Number of nodes of the graph: ranks or machines.
        fragment: Which of the method's ``fragments`` the parameters belong to.
        round: Index of the round in progress, or else of the last one; -1 before the first.
        method: Name of the method, for messages.
        steps: Steps since the one in which that round began, when ``after_step`` is called.
    """

    def __init__(
        self,
        index: int,
        flat: torch.Tensor,
        layout: NamedFlatBucket,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.index, self.flat, self.optimizer = index, flat, optimizer
        self.names, self.parameters = layout.names, layout.parameters
        self.state: dict[str, torch.Tensor] = {}
        self.vectors: dict[str, dict[str, torch.Tensor]] = {}
        self.compressor: TensorCompressor | None = None
        self.row: WeightRow | None = None
        self.fragment, self.rank, self.nodes = layout.fragment, 0, 1
        self.joined, self.method = False, ""
        self.round, self.steps = -1, 0
        self._layout = layout

    @property
    def payload(self) -> torch.Tensor:
        """Part of the flat tensor that holds the parameters, and may be compressed."""
        return self.flat[..., : self.flat.shape[-1] - self._layout.tail.numel()]

    @property
    def tail(self) -> torch.Tensor:
        """Rest of the flat tensor, such as flags of parameters with gradients."""
        return self.flat[..., self.payload.shape[-1] :]

    def message_bytes(self, parts: int, sent: torch.Tensor, dtype: torch.dtype) -> int:
        """Compute the size of a message with this bucket, in bytes.

        Args:
            parts: Equal parts in which a row is encoded, if there is a compressor.
            sent: The tensor that a rank sends: a row like ``flat``, or several.
            dtype: Dtype in which it is sent without a compressor.
        """
        if self.compressor is None:
            return sent.numel() * dtype.itemsize
        numel, encoder = self.payload.shape[-1], self.compressor.compressor
        rows = sent.numel() // sent.shape[-1]
        tail = self.tail.shape[-1] * sent.element_size()
        return tail + rows * parts * encoder.encoded_size(-(-numel // parts), sent.dtype)

    def new_state(self) -> torch.Tensor:
        """Make zeros for the state, in the shape of ``flat``; in float32 for half precision."""
        return zeros_like(self.flat, DTYPES[self.flat.dtype].accumulate)

    def gradient(self) -> torch.Tensor:
        """Return the gradients as a tensor like :meth:`new_state`, zero for missing gradients."""
        flat = self.new_state()
        parts = zip(self.names, self.parameters, self.views_of(flat), strict=True)
        for name, parameter, view in parts:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ArgumentError(
                    f"{self.method}: the gradient of {name} is {parameter.grad.layout}; expected "
                    "a dense one. Build the embedding with sparse=False, or use "
                    "algorithm='adapt_with_combine', which averages parameters alone"
                )
            gradient = local_grad(parameter)
            if gradient is not None:
                fitted(view, gradient).copy_(gradient)
        return flat

    def set_gradient(self, flat: torch.Tensor) -> None:
        """Set the parameters' gradients, which the user's optimizer sees, from a flat tensor."""
        for parameter, view in zip(self.parameters, self.views_of(flat), strict=True):
            if parameter.grad is None:
                parameter.grad = zeros_like(parameter)
            gradient = shard(parameter.grad)
            gradient.copy_(fitted(view, gradient))

    def optimizer_state(self, key: str) -> torch.Tensor:
        """Return the optimizer's state tensors of one name as a tensor like :meth:`new_state`.

        The name is one such as ``exp_avg``; elements without state are zero.

        Raises:
            ArgumentError: A state of that name has another shape than its parameter.
        """
        flat = self.new_state()
        for view, kept in self._optimizer_tensors(key, flat):
            view.copy_(kept)
        return flat

    def set_optimizer_state(self, key: str, flat: torch.Tensor) -> None:
        """Write a tensor like that of :meth:`optimizer_state` to the optimizer's existing state."""
        for view, kept in self._optimizer_tensors(key, flat):
            kept.copy_(view)

    def _optimizer_tensors(
        self, key: str, flat: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a view in a flat tensor and the optimizer's state tensor, for each parameter."""
        state = self.optimizer.state
        for name, parameter, view in zip(
            self.names, self.parameters, self.views_of(flat), strict=True
        ):
            kept = state[parameter].get(key) if parameter in state else None
            if kept is not None:
                expected = parameter.shape if is_distributed(parameter) else view.shape
                if not isinstance(kept, torch.Tensor) or kept.shape != expected:
                    raise ArgumentError(
                        f"optimizer: what it keeps of {name} as {key!r} cannot be averaged with "
                        f"the parameters; expected a tensor of shape {tuple(expected)}, got "
                        f"{kept!r}"
                    )
                part = shard(kept)
                yield (fitted(view, part) if is_distributed(kept) else view), part

    def step_sizes(self) -> float | torch.Tensor:
        """Return the current learning rates: one number, or a flat tensor if they differ.

        The tensor is of :meth:`new_state`'s size and dtype, with a parameter's rate in all its
        elements.
        """
        rates = {
            id(parameter): float(group["lr"])
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        own = [rates[id(parameter)] for parameter in self.parameters]
        if len(set(own)) == 1:
            return own[0]
        flat = self.new_state()
        for rate, view in zip(own, self.views_of(flat), strict=True):
            view.fill_(rate)
        return flat

    def per_step_size(self, change: torch.Tensor) -> torch.Tensor:
        """Divide a parameter change by the learning rates in place; elements with rate 0 give 0."""
        rates = self.step_sizes()
        if isinstance(rates, float):
            return change.div_(rates) if rates else change.zero_()
        return change.div_(rates).masked_fill_(rates == 0.0, 0.0)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views in a tensor of the flat tensor's size, one per parameter."""
        return self._layout.views_of(flat)

    def clear_padding(self) -> None:
        """Write zeros to the padding of the flat tensor and of the state.

        Compressors may decode zeros there to other numbers, which must not be sent again.
        """
        for flat in (self.flat, *self.state.values()):
            if flat.shape[-1:] == self.flat.shape[-1:]:
                self._layout.clear_padding(flat)

    def describe_not_finite(self, flat: torch.Tensor) -> str:
        """Format which parameters have NaN or infinities in a tensor of the bucket's layout."""
        groups = {
            id(parameter): number
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }
        found = [
            f"{name} (parameter group {groups.get(id(parameter), '?')})"
            for name, parameter, view in zip(
                self.names, self.parameters, self.views_of(flat), strict=True
            )
            if not bool(torch.isfinite(view).all())
        ]
        return f"NaN or infinities in {', '.join(found)}"

    def state_views(self) -> list[list[torch.Tensor]]:
        """Return views in the state's tensors, for each tensor one per parameter."""
        return [self._state_views(kept) for kept in self.state.values()]

    def _state_views(self, kept: torch.Tensor) -> list[torch.Tensor]:
        """Return views in a state tensor, one per parameter; all parameters share a scalar."""
        return self.views_of(kept) if kept.dim() else [kept] * len(self.names)

    def state_dict(self) -> dict[str, Any]:
        """Return the method's state as views, by parameter and name, and the compressor's state."""
        by_parameter: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.names}
        for key, flat in self.state.items():
            for name, view in zip(self.names, self._state_views(flat), strict=True):
                by_parameter[name][key] = view
        for key, of_each in self.vectors.items():
            for name, vector in of_each.items():
                by_parameter[name][_VECTOR + key] = vector
        found: dict[str, Any] = {"parameters": by_parameter}
        if self.compressor is not None:
            found["compressor"] = self.compressor.state_dict()
        return found

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of these parameters from :meth:`state_dict` of buckets of any size.

        Missing entries leave the state unchanged, unknown entries are ignored. The compressor's
        state belongs to a whole bucket: it is restored if ``saved`` has it.
        """
        by_parameter = saved["parameters"]
        for key, flat in self.state.items():
            for name, view in zip(self.names, self._state_views(flat), strict=True):
                if key in by_parameter.get(name, ()):
                    view.copy_(by_parameter[name][key])
        self.vectors, wide = {}, DTYPES[self.flat.dtype].accumulate
        for name in self.names:
            for key, vector in by_parameter.get(name, {}).items():
                if key.startswith(_VECTOR):
                    of_each = self.vectors.setdefault(key.removeprefix(_VECTOR), {})
                    of_each[name] = vector.to(self.flat.device, wide, copy=True)
        if self.compressor is not None and "compressor" in saved:
            self.compressor.load_state_dict(saved["compressor"])


class Received(ABC):
    r"""Base class of the result of exchanging one bucket: the tensors that a rank has received.

    Attributes:
        sources: Ranks from which tensors came, ascending.
        states: :math:`\sum_j w_{ij} s_j` by name, of the state that is averaged as well.
        sent_to_each: Tensors that out-neighbours got, by rank, if these differed.
    """

    sources: Sequence[int] = ()
    states: Mapping[str, torch.Tensor] = MappingProxyType({})
    sent_to_each: Mapping[int, torch.Tensor] = MappingProxyType({})

    @property
    @abstractmethod
    def mixed(self) -> torch.Tensor:
        r"""Return :math:`\sum_j w_{ij} z_j`, the weighted sum of all sent tensors."""

    def add_to(self, target: torch.Tensor, rank: int, weight: float = 1.0) -> None:
        """Add ``weight`` times the decoded tensor of one source rank to a tensor.

        Args:
            target: In the bucket's layout.
            rank: One of ``sources``.
            weight: The factor.

        Raises:
            TypeError: Only the average is known, not its single terms.
        """
        raise TypeError(_NO_TERMS)

    def add_own_to(self, target: torch.Tensor, weight: float = 1.0) -> None:
        """Add ``weight`` times this rank's own sent tensor, as receivers decode it, to a tensor."""
        raise TypeError(_NO_TERMS)


class ReceivedAverage(Received):
    """Result of an exchange of which only the weighted average is known, not its single terms."""

    def __init__(self, mixed: torch.Tensor) -> None:
        self._mixed = mixed

    @property
    @override
    def mixed(self) -> torch.Tensor:
        return self._mixed
