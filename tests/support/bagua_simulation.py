"""Bagua's methods by their formulas: one process holds the models of all ranks.

Of the library it takes the quantiser, which has tests of its own, and the layout of buckets, on
which quantisation depends; all else is written here: gradients of all ranks, one after the other,
then what each rank would have received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncddp.tensors.means import first_divisor
from asyncddp.topology import mixing_matrix
from tests.support.bagua_buckets import Layout, mean, quantised, quantised_mean
from tests.support.bagua_net import STEPS, Make, Tensors, loss_of, net, sgd, vector

THIRD = 1 / 3


class Simulation:
    """Training of n ranks.

    Args:
        n: How many.
        alike: Whether all start from the same model.
        make: Makes the optimizer of some parameters.
        cap: Bytes of a bucket.
        per_machine: Ranks of a machine, the last of which may have fewer; None for no machines.
        batches: Batches of each rank, which come again and again.

    Attributes:
        models: The models of all ranks.
        averages: Of each step the vectors of all ranks' parameters just before the update.
        replicas: Of ``low_precision``, by rank and bucket, its replica.
    """

    def __init__(
        self,
        n: int,
        *,
        alike: bool = False,
        make: Make = sgd,
        cap: int = 25 << 20,
        per_machine: int | None = None,
        batches: int = 1000,
    ) -> None:
        self.n, self.step, self._cap, self._batches = n, 0, cap, batches
        self.models = [net(0 if alike else rank) for rank in range(n)]
        self.optimizers = [make(model.parameters()) for model in self.models]
        self.averages: list[Tensors] = []
        self.replicas: list[Tensors] = []
        size = per_machine or 1
        self.machines = [list(range(first, min(first + size, n))) for first in range(0, n, size)]

    @property
    def vectors(self) -> Tensors:
        """The parameters of all ranks."""
        return [vector(model) for model in self.models]

    @property
    def loss(self) -> float:
        """The mean loss of all ranks on their batches, with the models as they are."""
        with torch.no_grad():
            losses = [
                loss_of(model, rank, step)
                for rank, model in enumerate(self.models)
                for step in range(self._batches)
            ]
        return float(torch.stack(losses).mean())

    def gradients(self) -> list[Tensors]:
        """The gradients of all ranks where their models are."""
        found = []
        for rank, model in enumerate(self.models):
            loss = loss_of(model, rank, self.step % self._batches)
            found.append(list(torch.autograd.grad(loss, list(model.parameters()))))
        return found

    def update(self, gradients: Sequence[Tensors]) -> None:
        """Let each rank's optimizer make its step."""
        self.averages.append(self.vectors)
        for model, optimizer, given in zip(self.models, self.optimizers, gradients, strict=True):
            for parameter, gradient in zip(model.parameters(), given, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        self.step += 1

    def assign(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        """Replace a rank's parameters."""
        with torch.no_grad():
            for parameter, tensor in zip(self.models[rank].parameters(), tensors, strict=True):
                parameter.copy_(tensor)

    def assign_vector(self, rank: int, values: torch.Tensor) -> None:
        """Replace a rank's parameters by the parts of a vector."""
        parameters = list(self.models[rank].parameters())
        parts = values.split([one.numel() for one in parameters])
        self.assign(rank, [part.view_as(one) for part, one in zip(parts, parameters, strict=True)])

    def average(self) -> None:
        """Replace all models by their mean, as a switch does."""
        tensors = [mean(same) for same in zip(*(m.parameters() for m in self.models), strict=True)]
        for rank in range(self.n):
            self.assign(rank, [one.detach().clone() for one in tensors])

    def average_state(self) -> None:
        """Replace the moments of all optimizers by their means, as a switch to ``qadam`` does."""
        for moment in ("m", "v"):
            every = [getattr(optimizer, moment) for optimizer in self.optimizers]
            means = [mean(same) for same in zip(*every, strict=True)]
            for optimizer in self.optimizers:
                setattr(optimizer, moment, means)

    # gradients

    def gradient_allreduce(self, steps: int = STEPS, *, average: bool = True) -> None:
        """The mean gradient of all ranks, or their sum, for each of them."""
        for _ in range(steps):
            every = [mean(same) for same in zip(*self.gradients(), strict=True)]
            self.update([[one if average else one * self.n for one in every]] * self.n)

    def bytegrad(self, steps: int = STEPS) -> None:
        """Q(mean Q(g)); inside of machines gradients are summed as they are."""
        layout = Layout(self.models[0], self._cap, backwards=True)
        for _ in range(steps):
            flats = [layout.pack(one) for one in self.gradients()]
            self.update([layout.unpack(self._quantised_means(flats))] * self.n)

    def _quantised_means(self, flats: Sequence[Tensors]) -> Tensors:
        """The quantised mean of each bucket, of which all ranks have one in ``flats``.

        Machines send sums that are divided by a power of two, the least that is not below a
        machine's number of ranks.
        """
        means, first = [], first_divisor(max(map(len, self.machines)))
        for same in zip(*flats, strict=True):
            sums = [sum((same[r] for r in m[1:]), same[m[0]]) for m in self.machines]
            means.append(quantised_mean([one / first for one in sums], self.n / first))
        return means

    def qadam(self, steps: int = STEPS) -> None:
        """The mean gradient in the warm-up, then m = Q(mean Q(β₁ m + (1 - β₁) g)).

        The optimizers are :class:`FrozenAdam`, alike on all ranks.
        """
        layout = Layout(self.models[0], self._cap, backwards=True)
        for _ in range(steps):
            if self.optimizers[0].warming_up:
                self.gradient_allreduce(1)
                continue
            own = [
                layout.pack(optimizer.next_momentum(gradients))
                for optimizer, gradients in zip(self.optimizers, self.gradients(), strict=True)
            ]
            averaged = layout.unpack(self._quantised_means(own))
            self.averages.append(self.vectors)
            for optimizer in self.optimizers:
                optimizer.step(averaged)
            self.step += 1

    # parameters

    def decentralized(
        self, mode: str = "all", interval: int = 1, steps: int = STEPS, *, first: bool = False
    ) -> None:
        """The gradient is taken before averaging, with all or with one peer, and applied after.

        Args:
            mode: Bagua's ``peer_selection_mode``, among ranks or machines.
            interval: Steps from one averaging to the next.
            steps: How many.
            first: Average first, then take the gradient; Bagua does not.
        """
        for t in range(steps):
            gradients = [] if first else self.gradients()
            if t % interval == 0:
                for rank, average in enumerate(self._peers_average(mode, t // interval)):
                    self.assign(rank, average)
            self.update(gradients or self.gradients())

    def _peers_average(self, mode: str, k: int) -> list[Tensors]:
        """The averages of all ranks' parameters in communication k."""
        own = [[one.detach().clone() for one in model.parameters()] for model in self.models]
        nodes = [
            [mean(same) for same in zip(*(own[r] for r in members), strict=True)]
            for members in self.machines
        ]
        n = len(nodes)
        if mode == "all":
            averages = [[mean(same) for same in zip(*nodes, strict=True)]] * n
        else:
            half = n // 2
            peers = [
                (k + r) % ((n + 1) // 2) + half if r < half else (r - half - k) % half
                for r in range(n)
            ]
            averages = [
                [(a + b) / 2 for a, b in zip(nodes[r], nodes[peer], strict=True)]
                for r, peer in enumerate(peers)
            ]
        return [averages[node] for node, members in enumerate(self.machines) for _ in members]

    def low_precision(self, interval: int = 1, steps: int = STEPS) -> None:
        """w + Q((w + L + R) / 3 - w + (h - w)), with h after the step, on a ring of equal replicas.

        All ranks start alike.
        """
        layout, n = Layout(self.models[0], self._cap, backwards=False), self.n
        w = [layout.pack([one.detach() for one in model.parameters()]) for model in self.models]
        for t in range(steps):
            self.update(self.gradients())
            if t % interval:
                continue
            changes = []
            for rank, model in enumerate(self.models):
                h = layout.pack([one.detach() for one in model.parameters()])
                left, right = w[(rank - 1) % n], w[(rank + 1) % n]
                y = [
                    at + one * THIRD + other * THIRD - own * (1 + 2 * THIRD)
                    for at, one, other, own in zip(h, left, right, w[rank], strict=True)
                ]
                changes.append([quantised(one.view(1, -1)).view(-1) for one in y])
            for rank in range(n):
                w[rank] = [own + q for own, q in zip(w[rank], changes[rank], strict=True)]
                self.assign(rank, layout.unpack(w[rank]))
        self.replicas = w

    # methods that Bagua does not have

    def adapt_with_combine(self, graph: Any, steps: int = STEPS) -> None:
        """W X - U(G(X))."""
        for _ in range(steps):
            gradients = self.gradients()
            self._mix(graph)
            self.update(gradients)

    def adapt_then_combine(self, graph: Any, steps: int = STEPS) -> None:
        """W (X - U(G(X)))."""
        for _ in range(steps):
            self.update(self.gradients())
            self._mix(graph)

    def _mix(self, graph: Any) -> None:
        x = weights_of(graph) @ torch.stack(self.vectors)
        for rank, row in enumerate(x):
            self.assign_vector(rank, row)

    def choco_sgd(self, graph: Any, steps: int = STEPS) -> None:
        """x̂ ← x̂ + Q(h - x̂), x ← h + Σ w (x̂ⱼ - x̂ᵢ), with a consensus step of 1."""
        layout, w = Layout(self.models[0], self._cap, backwards=False), weights_of(graph)
        public: list[Tensors] = []
        for _ in range(steps):
            self.update(self.gradients())
            own = [layout.pack([p.detach() for p in model.parameters()]) for model in self.models]
            public = public or [[torch.zeros_like(one) for one in same] for same in own]
            for known, new in zip(public, own, strict=True):
                for copy, h in zip(known, new, strict=True):
                    copy += quantised((h - copy).view(1, -1)).view(-1)
            for rank, flats in enumerate(own):
                for bucket, h in enumerate(flats):
                    copies = torch.stack([known[bucket] for known in public])
                    h += w[rank] @ copies - copies[rank]
                self.assign(rank, layout.unpack(flats))


def weights_of(graph: Any) -> torch.Tensor:
    """The mixing matrix in single precision."""
    return torch.from_numpy(mixing_matrix(graph)).to(torch.float32)
