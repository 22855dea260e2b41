"""What this machine has for training on many ranks, and what to install or change."""

from __future__ import annotations

from asyncddp.launch.doctor.finding import Finding

__all__ = ["Finding"]
