"""Who looks after which parameter: see :mod:`asyncddp.algorithms.owners`."""

from __future__ import annotations

from asyncddp.algorithms.owners import settle, take_over

__all__ = ["settle", "take_over"]
