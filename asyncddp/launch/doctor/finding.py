"""One thing that was looked at, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        section: What it belongs to: ``MPI``, ``Python``, ``GPU``, ``Machine``.
        name: What was looked at.
        value: What was found, in words.
        advice: What to install or change; empty where nothing is needed.
        level: ``good``; ``note`` for what could be better; ``bad`` for what keeps ranks from
            running.
    """

    section: str
    name: str
    value: str
    advice: str = ""
    level: Literal["good", "note", "bad"] = "good"
