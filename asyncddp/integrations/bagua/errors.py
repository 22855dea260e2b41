"""Errors of Bagua's API: asyncddp's, which are also the built-in ones that Bagua raises."""

from __future__ import annotations

from asyncddp.errors import ArgumentError, UsageError


class ProcessGroupError(UsageError, RuntimeError):
    """``init_process_group`` was not called, or twice."""


class AlgorithmNameError(UsageError, TypeError):
    """A name of an algorithm is no string."""


class UnmanagedParameterError(UsageError, RuntimeError):
    """A parameter belongs to no optimizer, and the algorithm communicates in their steps."""


class SparseGradientError(ArgumentError, NotImplementedError):
    """A module has sparse gradients, which the algorithm cannot average."""
