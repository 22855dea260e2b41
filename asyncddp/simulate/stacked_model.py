"""Stacked models of all ranks: one tensor holds a parameter of all ranks; gradients by vmap."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.func import functional_call, vmap

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationTiming
from asyncddp.errors import ArgumentError
from asyncddp.ops.settings_agreement import tensors_of
from asyncddp.simulate.problem import Batch, Problem
from asyncddp.tensors.allocation import detached_copy, empty_like, zeros
from asyncddp.tensors.buckets import NamedFlatBucket, fragments_of, partition, require_untied

Named = dict[str, torch.Tensor]
Scale = Callable[[torch.Tensor, "torch.Tensor | float"], object]
EVERY_RANK = slice(None)
_CONVOLUTIONS = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d
_LARGE_INPUTS = 1 << 12  # elements of a rank's batch


class StackedModel:
    """Models of n ranks, stacked as rows of flat tensors with the bucket layout of real ranks.

    Args:
        problem: Model, loss and data.
        bucket_bytes: Bytes of a bucket of one rank at most.
        chunk: Ranks whose gradients are computed at once; None for all, or for one where a model
            has convolutions of large inputs: stacked, these are grouped ones, which are slow. One
            goes without ``vmap``, which costs as much again then.
        fragments: Parts of the parameters that no bucket mixes.

    Attributes:
        parameters: Parameters by name, ``(n, *shape)``: views of the flat tensors.
        buffers: Buffers by name, ``(n, *shape)``.
        layouts: Layout of each bucket, for one rank.
        flats: Flat tensor of each bucket, ``(n, d)``.
    """

    def __init__(
        self, problem: Problem, bucket_bytes: int, chunk: int | None = None, fragments: int = 1
    ) -> None:
        self.ranks, self._loss = problem.ranks, problem.loss
        given = problem.model
        models = list(given) if isinstance(given, Sequence) else [given] * self.ranks
        require_untied(tensors_of(models[0]).items())  # which copies are not
        self._template = copy.deepcopy(models[0])
        named = [
            (name, parameter)
            for name, parameter in self._template.named_parameters()
            if parameter.requires_grad and parameter.numel()
        ]
        if not named:
            raise ArgumentError("Problem: argument model: no parameter of it requires gradients")
        tensors = [parameter for _, parameter in named]
        parts, of_each = (
            partition(tensors, bucket_bytes, fragments),
            fragments_of(tensors, fragments),
        )
        self.layouts = [NamedFlatBucket([named[index] for index in part]) for part in parts]
        for layout, part in zip(self.layouts, parts, strict=True):
            layout.fragment = of_each[part[0]]
        self.flats = [
            zeros((self.ranks, one.flat.numel()), one.flat.dtype, one.flat.device)
            for one in self.layouts
        ]
        views: Named = {}
        for layout, flat in zip(self.layouts, self.flats, strict=True):
            views.update(zip(layout.names, layout.views_of(flat), strict=True))
        states = [dict(model.named_parameters()) for model in models]
        with torch.no_grad():
            for name, view in views.items():
                for row, state in zip(view, states, strict=True):
                    row.copy_(state[name])
        self.parameters = {name: torch.nn.Parameter(views[name]) for name, _ in named}
        buffers = [dict(model.named_buffers()) for model in models]
        self.buffers = {key: torch.stack([one[key] for one in buffers]) for key in buffers[0]}
        chunk = self._usual_chunk(problem) if chunk is None else chunk
        self._chunk = self.ranks if chunk is None else min(chunk, self.ranks)
        self._stacked_losses = vmap(self._loss_of, randomness="different")

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's flat tensors."""
        return sum(flat[0].nbytes for flat in self.flats)

    def _usual_chunk(self, problem: Problem) -> int | None:
        convolves = any(isinstance(one, _CONVOLUTIONS) for one in self._template.modules())
        inputs = problem.data[0][0]
        samples = problem.batch_size or len(inputs)
        large = samples * inputs[0].numel() >= _LARGE_INPUTS
        return 1 if convolves and large else None

    def _loss_of(
        self, parameters: Mapping[str, torch.Tensor], buffers: Named, batch: Batch
    ) -> torch.Tensor:
        """Compute the loss of one rank; the model may write into its buffers."""
        inputs, *targets = batch
        output = functional_call(self._template, {**parameters, **buffers}, (inputs,))
        return self._loss(output, *targets)

    def gradients(self, batch: Batch) -> torch.Tensor:
        """Compute and set the gradients of all ranks, each at its own parameters and batch.

        Args:
            batch: Tensors ``(n, samples, …)``.

        Returns:
            The loss of each rank, ``(n,)``.
        """
        losses = []
        for first in range(0, self.ranks, self._chunk):
            places = slice(first, min(first + self._chunk, self.ranks))
            found, some = self._gradients_of_some(places, tuple(one[places] for one in batch))
            losses.append(some)
            for name, parameter in self.parameters.items():
                if self._chunk == self.ranks:
                    parameter.grad = found[name].reshape(parameter.shape)
                    continue
                if not first:
                    parameter.grad = empty_like(parameter)
                assert parameter.grad is not None
                parameter.grad[places] = found[name]
        return torch.cat(losses)

    def _gradients_of_some(self, places: slice, batch: Batch) -> tuple[Named, torch.Tensor]:
        """Return stacked gradients and losses of consecutive ranks."""
        one = places.stop - places.start == 1
        at = places.start if one else places
        rows = {name: row.detach()[at].requires_grad_() for name, row in self.parameters.items()}
        buffers = {name: row[at] for name, row in self.buffers.items()}
        if one:
            losses = self._loss_of(rows, buffers, tuple(row[0] for row in batch)).reshape(1)
        else:
            losses = self._stacked_losses(rows, buffers, batch)
        # the sum of the ranks' losses has the gradients of all
        found = torch.autograd.grad(losses.sum(), list(rows.values()), materialize_grads=True)
        return dict(zip(rows, found, strict=True)), losses.detach()

    def gradients_of(self, rank: int, batch: Batch) -> tuple[Named, float]:
        """Return one rank's gradients by name, at its own parameters, and its loss.

        Args:
            rank: The rank.
            batch: Tensors ``(1, samples, …)``.
        """
        found, loss = self._gradients_of_some(slice(rank, rank + 1), batch)
        return found, float(loss)

    def admit(self, sponsors: Mapping[int, int], copies: ParameterCopies) -> None:
        """Give each rank that arrives the model of its sponsor."""
        new, given = list(sponsors), list(sponsors.values())
        for stacked in (*self.flats, *copies.averaged_flats, *self.buffers.values()):
            stacked[new] = stacked[given]

    def scale(
        self, by: Scale, weights: torch.Tensor | float, ranks: int | slice = EVERY_RANK
    ) -> None:
        """Multiply or divide the parameters of ranks by their weights."""
        with torch.no_grad():
            for flat in self.flats:
                one = weights.to(flat.dtype) if isinstance(weights, torch.Tensor) else weights
                by(flat[ranks], one)

    def flat_rows(self) -> torch.Tensor:
        """Return all parameters in float64 in the model's order, one row per rank, ``(n, d)``."""
        rows = [one.detach().reshape(self.ranks, -1).double() for one in self.parameters.values()]
        return torch.cat(rows, dim=1)

    def average_model(self, ranks: Sequence[int]) -> torch.nn.Module:
        """Return a copy of the model averaged over some ranks; integers are the first's."""
        chosen = list(ranks)

        def mean(stacked: torch.Tensor) -> torch.Tensor:
            floats = stacked.is_floating_point() or stacked.is_complex()
            return stacked[chosen].mean(dim=0) if floats else stacked[chosen[0]]

        model = copy.deepcopy(self._template)
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, stacked in {**self.parameters, **self.buffers}.items():
                own[name].copy_(mean(stacked.detach()))
        return model


class ParameterCopies:
    """Copies of the parameters from a step's start, which some algorithms average instead.

    Attributes:
        averaged_flats: The stacked tensors that are averaged: the copies, or the parameters.
    """

    def __init__(self, model: StackedModel, method: Algorithm) -> None:
        through = method.when is CommunicationTiming.THROUGH_STEP
        copies = [detached_copy(flat) for flat in model.flats] if through else []
        self.averaged_flats = copies or model.flats
        self._pairs = list(zip(copies, model.flats, strict=through))

    def take(self, ranks: int | slice = EVERY_RANK) -> None:
        """Copy the parameters."""
        for copied, flat in self._pairs:
            copied[ranks].copy_(flat[ranks])

    @contextlib.contextmanager
    def averaged(self, ranks: int | slice = EVERY_RANK) -> Iterator[None]:
        """Add the changes that the ``with`` block makes to the copies to the parameters."""
        for copied, flat in self._pairs:
            flat[ranks].sub_(copied[ranks])
        yield
        for copied, flat in self._pairs:
            flat[ranks].add_(copied[ranks])
