"""Non-blocking averages that nobody drives: shown at once, formed when somebody asks."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

from asyncddp.engine import Handle
from asyncddp.engine.channels import Channel
from asyncddp.engine.messages import Key
from asyncddp.memory.modes import uncompiled
from asyncddp.ops.mixing import Mixing

if TYPE_CHECKING:
    from asyncddp.ops.express import Express

__all__ = ["Posted", "detached"]


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor outside autograd."""
    return tensor.detach() if tensor.requires_grad else tensor


class Posted(Handle[torch.Tensor]):
    """An average whose own tensor is shown, and which is formed when somebody asks for it.

    Whoever does not ask soon leaves it to the engine, so that neighbours need not wait.

    Args:
        way: The short way.
        channel: Of the name and form.
        step: The step.
        row: The weights.
        own: The tensor.
        out: Where the average goes, or None.
        shown: Pieces that are shown.
    """

    def __init__(
        self,
        way: Express,
        channel: Channel,
        step: int,
        row: Mixing,
        own: torch.Tensor,
        out: torch.Tensor | None,
        shown: int,
    ) -> None:
        self._way, self._channel, self._step, self._row = way, channel, step, row
        self._own, self._out, self._shown = own, out, shown
        self._lock = threading.Lock()
        self._found: torch.Tensor | Handle[torch.Tensor] | None = None
        self._error: BaseException | None = None
        self.since = time.monotonic()
        channel.posted.append(self)
        way.lent[id(self)] = self

    @uncompiled
    def poll(self) -> bool:
        """Whether the average is there, or can be formed at once."""
        if self._error is not None:
            return True
        if self._found is None:
            seen, step = self._channel.seen, self._step
            if not all([seen[peer].shown(step) for peer in self._row.sources]):
                return False
            self.settle()
        return self._found.poll() if isinstance(self._found, Handle) else True

    @uncompiled
    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """As of every handle."""
        if self._found is None:
            self.settle()
        found = self._found
        if isinstance(found, Handle):
            found = found.wait(timeout)
        if found is None:
            raise RuntimeError("a posted tensor was neither averaged nor handed over")
        return found if self._out is None else self._out

    def settle(self) -> None:
        """Form the average, and what was posted before it; or leave it to the engine."""
        if self._error is not None:
            raise self._error
        posted = self._channel.posted
        while posted and posted[0] is not self and self._found is None:
            posted[0].settle()
        with self._lock:
            if self._found is None:
                self._found = self._way.take(
                    self._step, self._row, self._own, self._into, self._shown
                )
                self._forget()

    def hand_over(self) -> None:
        """Leave it to the engine, unless somebody is forming it just now."""
        if self._lock.acquire(blocking=False):
            try:
                if self._found is None:
                    self._found = self._way.hand_over(
                        self._step, self._row, self._own, self._into, self._shown
                    )
                    self._forget()
            finally:
                self._lock.release()

    def forget(self, error: BaseException) -> None:
        """End it with an error in a forked process, telling nobody: the parent goes on with it."""
        self._lock, self._error = threading.Lock(), error
        self._channel.posted.clear()

    @property
    def _into(self) -> torch.Tensor | None:
        return None if self._out is None else detached(self._out)

    def _forget(self) -> None:
        self._channel.posted.remove(self)
        self._way.lent.pop(id(self), None)

    def __repr__(self) -> str:
        if isinstance(self._found, Handle):
            return repr(self._found)
        state = "under way" if self._found is None else "done"
        return f"<Handle {self._channel.form.verb} {Key(self._channel.name, self._step)} {state}>"
