"""Whether one method is ahead of another, by paired differences over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from benchmarks.methods.grid import Values

__all__ = ["PairedDifference"]

_ERRORS = 2.0  # standard errors, within which a difference says nothing


@dataclass(frozen=True)
class PairedDifference:
    r"""Mean difference of two methods on the same seeds, and its standard error.

    .. math:: \bar d = \frac1S \sum_s (a_s - b_s), \qquad
              e = \sqrt{\frac1{S (S - 1)} \sum_s (a_s - b_s - \bar d)^2}

    Attributes:
        mean: :math:`\bar d`.
        error: e.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, one: Values, other: Values) -> PairedDifference:
        """Return the difference of figures of the same seeds, at least two."""
        differences = [a - b for a, b in zip(one, other, strict=True)]
        return cls(fmean(differences), stdev(differences) / sqrt(len(differences)))

    @property
    def positive(self) -> bool | None:
        """Whether it is above 0; None within twice its standard error of 0."""
        return None if abs(self.mean) <= _ERRORS * self.error else self.mean > 0

    def told(self, scale: float) -> str:
        """Tell mean and standard error, both times a factor."""
        return f"{scale * self.mean:+.1f} ± {scale * self.error:.1f}"
