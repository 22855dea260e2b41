"""``gradient_allreduce``: the central average of all gradients, the measure of the others."""

from __future__ import annotations

from asyncddp.algorithms.contract import Algorithm, How, What, When
from asyncddp.algorithms.needs import Needs

__all__ = ["GradientAllreduce"]


class GradientAllreduce(Algorithm):
    r"""Centralised data-parallel SGD, as Horovod and DistributedDataParallel do it.

    .. math:: x^{+} = x - U\Big(\frac{1}{n} \sum_i g_i(x)\Big)

    All ranks start from the same parameters and keep them equal.

    References:
        Sergeev, Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
        Li et al., "PyTorch Distributed: experiences on accelerating data parallel training",
        VLDB 2020.
    """

    name = "gradient_allreduce"
    what = What.GRADIENT
    when = When.GRADIENT_READY
    how = (How.GLOBAL,)
    needs = Needs()
    exact = True
