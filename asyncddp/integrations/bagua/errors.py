"""Errors of Bagua's API: subclasses of asyncddp's and of the built-in errors that Bagua raises."""

from __future__ import annotations

from asyncddp.errors import ArgumentError, UsageError


class ProcessGroupError(UsageError, RuntimeError):
    """Error: ``init_process_group`` was not called, or called twice."""


class AlgorithmNameError(UsageError, TypeError):
    """Error: the name of an algorithm is not a string."""


class UnmanagedParameterError(UsageError, RuntimeError):
    """Error: a trained parameter belongs to no optimizer, so the algorithm cannot average it."""


class SparseGradientError(ArgumentError, NotImplementedError):
    """Error: a module has sparse gradients, which the algorithm cannot average."""
