"""Errors of Bagua's API: subclasses of asyncddp's and of the built-in errors that Bagua raises."""

from __future__ import annotations

from asyncddp.errors import ArgumentError, UsageError


class ProcessGroupError(UsageError, RuntimeError):
    """Error of a missing or repeated call of ``init_process_group``."""


class AlgorithmNameError(UsageError, TypeError):
    """Error of an algorithm name that is not a string."""


class UnmanagedParameterError(UsageError, RuntimeError):
    """Error of a parameter without optimizer, for an algorithm that communicates in its steps."""


class SparseGradientError(ArgumentError, NotImplementedError):
    """Error of a module with sparse gradients, which the algorithm cannot average."""
