"""Checks of ``asyncddp doctor``: machine, MPI, packages and transports."""

from __future__ import annotations

from asyncddp.cli.doctor.check_result import CheckResult

__all__ = ["CheckResult"]
