"""Position within an epoch that samplers and loaders save and restore, and checks of samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.context import current, is_initialized
from asyncddp.errors import ArgumentError

_REMEDY = "another order of samples; build it as it was, or begin an epoch by set_epoch"


class EpochPosition:
    """Base class of samplers and loaders that resume in mid-epoch, by epoch and consumed samples.

    The count assumes that all ranks are at this rank's position, so that other ranks can resume.
    """

    epoch = 0
    _start = 0  # where iterators begin: 0, or where a loaded state was
    _consumed = 0
    _settings: Mapping[str, int]  # what determines the order of samples

    def _place(self, epoch: int, start: int = 0) -> None:
        self.epoch, self._start, self._consumed = epoch, start, start

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; does nothing if this is the current epoch.

        Args:
            epoch: Its number, from 0 on, the same on all ranks.

        Raises:
            ArgumentError: It is below 0, or no whole number.
        """
        argument = f"{type(self).__name__}.set_epoch: argument epoch"
        if checked_integer(argument, epoch, 0) != self.epoch:
            self._place(int(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of samples that all ranks have consumed, and the settings.

        Plain numbers, for ``bf.save_checkpoint(…, extra={"loader": loader.state_dict()})``.
        """
        return {"epoch": self.epoch, "consumed": self._consumed, **self._settings}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume in mid-epoch from a saved state; the number of ranks may differ.

        Args:
            state_dict: What :meth:`state_dict` gave.

        Raises:
            ArgumentError: The settings differ, so that samples would come in another order.
        """
        caller, own = f"{type(self).__name__}.load_state_dict", EpochPosition.state_dict(self)
        check_state(caller, state_dict, own, ("epoch", "consumed"), _REMEDY)
        self._place(int(state_dict["epoch"]), int(state_dict["consumed"]))


def check_state(
    caller: str, state: Mapping[str, Any], own: Mapping[str, Any], free: Sequence[str], remedy: str
) -> None:
    """Raise an error unless a state has the keys of ``own`` and, but for ``free``, its values."""
    for key, value in own.items():
        if key not in state:
            raise ArgumentError(f"{caller}: expected an entry {key!r}, got {sorted(state)}")
        if key in free:
            checked_integer(f"{caller}: entry {key!r}", state[key], 0)
        elif state[key] != value:
            expected = f"expected {key}={value!r} as here, got {state[key]!r}"
            raise ArgumentError(f"{caller}: {expected}, which gives {remedy}")


def checked_replica(caller: str, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Check ``num_replicas`` and ``rank``, which default to the world's, or to 1 and 0."""
    size, own = (current().size, current().rank) if is_initialized() else (1, 0)
    size = size if num_replicas is None else num_replicas
    own = own if rank is None else rank
    size = checked_integer(f"{caller}: argument num_replicas", size, 1)
    if checked_integer(f"{caller}: argument rank", own, 0) >= size:
        raise ArgumentError(
            f"{caller}: argument rank: expected one of {size} ranks, 0 to {size - 1}, got {own}"
        )
    return size, int(own)


def steps_of(samples: int, ranks: int, drop_last: bool) -> int:
    """Return the samples per rank, rounded down with ``drop_last``, else rounded up."""
    return samples // ranks if drop_last else -(-samples // ranks)
