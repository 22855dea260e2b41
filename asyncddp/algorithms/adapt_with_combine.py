"""``adapt_with_combine``: average with the neighbours while the gradient is computed."""

from __future__ import annotations

from asyncddp.algorithms.contract import Algorithm, How, What, When
from asyncddp.algorithms.needs import Needs

__all__ = ["AdaptWithCombine"]


class AdaptWithCombine(Algorithm):
    r"""Decentralised SGD whose averaging overlaps the forward and backward pass.

    .. math:: X^{+} = W X - U\big(G(X)\big)

    with :math:`U` the optimizer's update, :math:`\gamma G(X)` for SGD. The gradient is taken at the
    parameters before averaging, and applied to those after it. With a constant step size
    :math:`\gamma < (1 + \lambda_{\min}(W)) / L` it converges to a neighbourhood of the optimum of
    radius :math:`O(\gamma \zeta / (1 - \rho))`, where :math:`\zeta` is the difference between
    the ranks' gradients and :math:`\rho = \lVert W - J \rVert_2`.

    References:
        Nedić, Ozdaglar, "Distributed subgradient methods for multi-agent optimization", IEEE TAC
        54(1), 2009. Lian et al., "Can decentralized algorithms outperform centralized algorithms?",
        NeurIPS 2017.
    """

    name = "adapt_with_combine"
    what = What.PARAMETER
    when = When.BEFORE_FORWARD
    how = (How.NEIGHBORS, How.MACHINES, How.GLOBAL)
    needs = Needs(doubly_stochastic=True, min_eigenvalue=-1.0)
    exact = False
