"""Inside a backward pass: gradients get ready, blocks are mixed, updated and published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import finalize

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from asyncddp.algorithms.owners import take_over
from asyncddp.algorithms.recorded import Training
from asyncddp.algorithms.rhythms.hooks import Weakly, watch
from asyncddp.errors import UsageError
from asyncddp.memory.buckets import partition
from asyncddp.ops.agreement import agree
from asyncddp.parallel.blocks import Block, CopiedBlock, LRSchedulerFn, Named, OptimFn, ViewBlock
from asyncddp.parallel.exchange import Exchange
from asyncddp.parallel.optim_state import restore, state_of
from asyncddp.parallel.tracing import Trace

__all__ = ["Listener", "Recipe", "Stepper"]


class Listener(Protocol):
    """Who wants to know what a stepper does, such as a monitor."""

    def updating(self, block: Block) -> None:
        """The optimizer of a block is about to use its gradients."""
        ...

    def stepped(self) -> None:
        """A step was completed."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        optim_fn: Makes the optimizer of a block.
        lr_scheduler_fn: Makes the scheduler of an optimizer.
        scaler: Of the gradients.
        grad_clip_norm: Largest norm of all gradients together; 0 for any.
        cap: Bytes of a block.
        as_view: Whether parameters live in the blocks.
    """

    optim_fn: OptimFn
    lr_scheduler_fn: LRSchedulerFn | None
    scaler: torch.amp.GradScaler | None
    grad_clip_norm: float
    cap: int
    as_view: bool

    @property
    def together(self) -> bool:
        """Whether an update needs the gradients of all blocks."""
        return self.scaler is not None or self.grad_clip_norm > 0


class Stepper:
    """Makes one step in every backward pass.

    The first pass is traced: its gradients wait until it has ended, then the blocks are made and
    its step is made as any other. From then on a block makes its step as soon as all its gradients
    are there; blocks whose gradients are not all there by the end of the pass make theirs then, as
    all blocks do where the update needs all gradients.

    Args:
        named: Names and parameters to train.
        exchange: Takes blocks to the neighbours.
        recipe: How to train.
        notes: Takes notes for the timeline, if there is one.

    Attributes:
        blocks: None before the end of the first pass.
        steps: Steps completed.
        training: Whether backward passes count.
        accumulating: Whether gradients just add up for now.
        listener: Who hears of updates and steps.
    """

    def __init__(
        self, named: Named, exchange: Exchange, recipe: Recipe, notes: Training | None = None
    ) -> None:
        self.named, self.exchange, self._recipe = named, exchange, recipe
        self._notes = notes
        self.blocks: list[Block] = []
        self.steps = 0
        self.listener: Listener | None = None
        self.training, self.accumulating = True, False
        self._trace = Trace()
        self._armed = self._open = False
        self._members: list[list[int]] = []
        self._block_of: dict[int, Block] = {}
        self._missing: list[dict[int, int]] = []
        self._done: set[int] = set()
        self._loaded: dict[str, Any] | None = None
        self._hooks: list[RemovableHandle] = []
        for index, (_, parameter) in enumerate(named):
            hook = Weakly(self._ready, index)
            listener = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._hooks.append(listener)
        finalize(self, _remove, self._hooks).atexit = False
        take_over((parameter for _, parameter in named), self)

    # a backward pass

    def watch(self, output: Any) -> None:
        """Hear of it when a backward pass comes to what the model has given."""
        watch(output, Weakly(self._ring))

    def _ring(self, gradient: torch.Tensor | None = None) -> None:
        """A backward pass goes on; when it ends, the step does."""
        del gradient
        if not self._armed and self.training and not self.accumulating:
            self._armed = True
            Variable._execution_engine.queue_callback(Weakly(self._finish))

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """A parameter got its gradient, added to what it had."""
        del parameter
        if not self.training or self.accumulating:
            return
        self._ring()
        if not self.blocks:
            self._open = True
            self._trace.record(index)
            return
        if not self._open:
            self._begin()
        if not self._recipe.together:
            self._arrived(index)

    def _begin(self) -> None:
        self._open, self._done = True, set()
        self._missing = [
            {index: max(1, self._trace.times(index)) for index in self._members[block.number]}
            for block in self.blocks
        ]
        with self.exchange.exposed:
            self.exchange.begin(self.steps)

    def _arrived(self, index: int) -> None:
        """Count a gradient, and make the step of a block that was its last."""
        block = self._block_of[index]
        if block.number in self._done:
            raise UsageError(
                f"parameter {self.named[index][0]} got another gradient after its update in the "
                "same backward pass, which it did not in the first; use checkpoint(..., "
                "use_reentrant=False), or a grad_clip_norm, which updates at the end of the pass"
            )
        missing = self._missing[block.number]
        left = missing.pop(index, 1) - 1
        if left:
            missing[index] = left
        if not missing:
            self._advance(block, update=True)

    def _advance(self, block: Block, *, update: bool) -> None:
        r"""Make the step of one block: :math:`x \leftarrow (W x) - u`, then publish it."""
        exchange = self.exchange
        with exchange.exposed:
            exchange.mix(block, self.steps)
        if update and self.listener is not None and not self._recipe.together:
            self.listener.updating(block)
        step = block.step
        if update and self._notes is not None:
            step = self._notes.update(step, block.number)
        step(update=update)
        with exchange.exposed:
            exchange.publish(block, self.steps + 1)
        self._done.add(block.number)

    def _rest(self, *, update: bool) -> None:
        for block in self.blocks:
            if block.number not in self._done:
                self._advance(block, update=update)

    def _finish(self) -> None:
        """A backward pass has ended."""
        self._armed = False
        if not self._open:
            return
        if not self.blocks:
            self._build()
            self._begin()
        if self._recipe.together:
            self._update_together()
        self._rest(update=True)
        self._completed()

    def _completed(self) -> None:
        """Count a step, and say so."""
        self._open = False
        self.steps += 1
        if self.listener is not None:
            self.listener.stepped()
        if self._notes is not None:
            self._notes.step_ended()

    def _update_together(self) -> None:
        """Unscale, clip and update all blocks at once, or none of them."""
        scaler, limit = self._recipe.scaler, self._recipe.grad_clip_norm
        parameters: list[torch.Tensor] = [parameter for _, parameter in self.named]
        everything: Any = _Everything(parameters, lambda: self._rest(update=True))
        if scaler is not None:
            scaler.unscale_(everything)
        if self.listener is not None:
            for block in self.blocks:  # before anything is clipped
                self.listener.updating(block)
        if limit > 0:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        if scaler is not None:
            scaler.step(everything)
            scaler.update()
            self._rest(update=False)

    def recover(self) -> None:
        """End the step of a backward pass that has failed half-way, so that neighbours go on.

        Its gradients are dropped; blocks that were not updated are mixed all the same.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # it still goes on
        self._armed = False
        if not self._open:
            return
        if not self.blocks:
            self._trace.clear()
        self._rest(update=False)
        for _, parameter in self.named:
            parameter.grad = None
        self._open = False
        if self.blocks:
            self._completed()

    # the blocks

    def _build(self) -> None:
        """Make the blocks in the order that was traced; collective."""
        names = [name for name, _ in self.named]
        agree(
            self.exchange.context,
            "DecentralizedDataParallel needs gradients in the same order on all ranks",
            self._trace.facts(names),
        )
        blocks: list[Block] = []
        self._members = []
        kind: Callable[..., Block] = ViewBlock if self._recipe.as_view else CopiedBlock
        for part in (self._trace.order, self._trace.unused(len(names))):
            tensors = [self.named[index][1] for index in part]
            for places in partition(tensors, self._recipe.cap):
                members = [part[place] for place in places]
                chosen = [self.named[index] for index in members]
                with torch.no_grad():
                    block = kind(len(blocks), chosen, self.exchange.make)
                block.equip(self._recipe.optim_fn, self._recipe.lr_scheduler_fn)
                if self._loaded is not None:
                    restore(block, self._loaded)
                blocks.append(block)
                self._members.append(members)
        self.exchange.open(blocks)
        for block, members in zip(blocks, self._members, strict=True):
            self._block_of.update(dict.fromkeys(members, block))
        self.blocks, self._loaded = blocks, None

    # around backward passes

    @property
    def state(self) -> dict[str, Any]:
        """Of all optimizers and schedulers, by name."""
        if self._loaded is not None:
            return self._loaded
        return state_of(self.blocks, self.steps)

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        """Go on from another state."""
        self.steps = int(state["step"])
        if not self.blocks:
            self._loaded = state
        for block in self.blocks:
            restore(block, state)

    def settle(self) -> None:
        """Wait until no parameter is being read by a message any more."""
        self.exchange.settle()

    def detach(self) -> None:
        """Hear of no backward pass any more."""
        _remove(self._hooks)


class _Everything:
    """What a GradScaler needs to know of an optimizer."""

    def __init__(self, parameters: list[torch.Tensor], step: Callable[[], None]) -> None:
        self.param_groups = [{"params": parameters}]
        self.step = step


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
