r"""How far rank 0's clock is ahead of another rank's, from questions and answers.

A rank asks at :math:`t_1`, rank 0 answers with its own time :math:`t_0`, which comes at
:math:`t_2`. Then rank 0's clock is ahead by

.. math:: o = t_0 - \tfrac{1}{2} (t_1 + t_2) \pm \tfrac{1}{2} (t_2 - t_1),

and of many questions the one with the quickest answer knows best.

Source: Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Sample", "best"]


class Sample(NamedTuple):
    """One measurement, in nanoseconds.

    Attributes:
        time: Of this rank's clock, when it holds.
        offset: How far rank 0's clock was ahead of it.
        error: Half of the time that the answer took.
    """

    time: int
    offset: int
    error: int

    @classmethod
    def of(cls, asked: int, answer: int, heard: int) -> Sample:
        """What a question that was asked and answered then says.

        Example:
            >>> Sample.of(100, 1000, 140)
            Sample(time=120, offset=880, error=20)
        """
        middle = (asked + heard) // 2
        return cls(middle, answer - middle, max(1, (heard - asked + 1) // 2))


def best(samples: Iterable[Sample]) -> Sample:
    """The one with the least error.

    Example:
        >>> best([Sample.of(0, 100, 30), Sample.of(50, 151, 54)]).error
        2
    """
    return min(samples, key=lambda sample: sample.error)
