"""The models of all ranks, stacked: one tensor for a parameter of all, and gradients by vmap."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch.func import functional_call, grad_and_value, vmap

from asyncddp.errors import ArgumentError
from asyncddp.simulate.problem import Batch, Problem
from asyncddp.tensors.allocation import empty_like, make_tensor, zeros
from asyncddp.tensors.buckets import NamedFlatBucket, fragments_of, partition

Named = dict[str, torch.Tensor]
_CONVOLUTIONS = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d
_LARGE_INPUTS = 1 << 12  # elements of a rank's batch


class StackedModel:
    """Models of n ranks, each a row of flat tensors that are laid out as buckets of real ranks.

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
        self._one_by_one = chunk == 1
        self._gradients = vmap(
            grad_and_value(self._loss_of, has_aux=True),
            in_dims=0,
            randomness="different",
            chunk_size=chunk,
        )

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
        self, parameters: Named, buffers: Named, batch: Batch
    ) -> tuple[torch.Tensor, Named]:
        """Evaluate the loss of one rank; gives the buffers as well, which the model may change."""
        inputs, *targets = batch
        output = functional_call(self._template, {**parameters, **buffers}, (inputs,))
        return self._loss(output, *targets), buffers

    def gradients(self, batch: Batch) -> torch.Tensor:
        """Set the gradients of all ranks, each at its own parameters on its batch.

        Args:
            batch: Tensors ``(n, samples, …)``.

        Returns:
            The loss of each rank, ``(n,)``.
        """
        if self._one_by_one:
            return self._gradients_one_by_one(batch)
        found, (losses, buffers) = self._gradients(dict(self.parameters), self.buffers, batch)
        for name, gradient in found.items():
            self.parameters[name].grad = gradient
        self.buffers = {name: one.detach() for name, one in buffers.items()}
        detached: torch.Tensor = losses.detach()
        return detached

    def _gradients_one_by_one(self, batch: Batch) -> torch.Tensor:
        losses = []
        stacked = {name: empty_like(one) for name, one in self.parameters.items()}
        for rank in range(self.ranks):
            found, loss = self.gradients_of(rank, tuple(one[rank : rank + 1] for one in batch))
            losses.append(loss)
            for name, gradient in found.items():
                stacked[name][rank] = gradient
        for name, parameter in self.parameters.items():
            parameter.grad = stacked[name]
        return make_tensor(losses, torch.float64)

    def gradients_of(self, rank: int, batch: Batch) -> tuple[Named, float]:
        """Return the gradients of one rank at its own parameters, by name, and its loss.

        Args:
            rank: The rank.
            batch: Tensors ``(1, samples, …)``.
        """
        rows = {name: one.detach()[rank].requires_grad_() for name, one in self.parameters.items()}
        buffers = {name: one[rank] for name, one in self.buffers.items()}  # which it may change
        with torch.enable_grad():
            loss, _ = self._loss_of(rows, buffers, tuple(one[0] for one in batch))
            found = torch.autograd.grad(loss, list(rows.values()), materialize_grads=True)
        return dict(zip(rows, found, strict=True)), float(loss.detach())

    def flat_rows(self) -> torch.Tensor:
        """Return all parameters in float64, one row a rank, ``(n, d)``, in the model's order."""
        rows = [one.detach().reshape(self.ranks, -1).double() for one in self.parameters.values()]
        return torch.cat(rows, dim=1)

    def model_of(self, rank: int) -> torch.nn.Module:
        """Return a copy of the model with one rank's parameters and buffers."""
        return self._filled(lambda stacked: stacked[rank])

    def average_model(self, ranks: Sequence[int]) -> torch.nn.Module:
        """Return a copy of the model with the average of some ranks; whole numbers of the first."""
        chosen = list(ranks)

        def mean(stacked: torch.Tensor) -> torch.Tensor:
            floats = stacked.is_floating_point() or stacked.is_complex()
            return stacked[chosen].mean(dim=0) if floats else stacked[chosen[0]]

        return self._filled(mean)

    def _filled(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
        model = copy.deepcopy(self._template)
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, stacked in {**self.parameters, **self.buffers}.items():
                own[name].copy_(pick(stacked.detach()))
        return model
