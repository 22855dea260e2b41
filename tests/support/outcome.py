"""Outcomes, of which tests here want more than is public."""

from asyncddp.testing.outcome import Outcome, RanksFailedError, returned_values

__all__ = ["Outcome", "RanksFailedError", "returned_values"]
