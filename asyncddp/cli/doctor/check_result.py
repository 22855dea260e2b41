"""Result of one check of ``asyncddp doctor``, with advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckResult:
    """Result of a check of ``asyncddp doctor``: what was found, how serious it is, what to do.

    Attributes:
        section: Section of the report: ``MPI``, ``Python``, ``GPU``, ``Machine``.
        name: Name of the check.
        value: Finding, in words.
        advice: Advice what to install or change; empty where nothing is needed.
        level: ``good``; ``note`` for what could be better; ``bad`` for what keeps ranks from
            running.
    """

    section: str
    name: str
    value: str
    advice: str = ""
    level: Literal["good", "note", "bad"] = "good"
