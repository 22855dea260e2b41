"""``momentum_tracking``: ranks descend along estimates of the average momentum, without bias."""

from typing import Literal

from asyncddp.algorithms.method_traits import CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.tracking import Tracking
from asyncddp.algorithms.wrapper_setup import checked_share


class MomentumTracking(Tracking):
    r"""Momentum tracking: each rank descends along an estimate of the average momentum.

    .. math:: M^{k} = \beta M^{k-1} + G(X^{k}), \qquad Y^{k} = W Y^{k-1} + M^{k} - M^{k-1}, \qquad
              X^{k+1} = W X^{k} - U(Y^{k})

    with U the update of the wrapped optimizer, which has no momentum of its own and sees
    :math:`y_i` in place of the gradient, and :math:`M^{-1} = Y^{-1} = 0`; in the paper's words,
    :math:`C^{k} = M^{k} - Y^{k}`. Its convergence rate does not depend on the heterogeneity of the
    data. Messages, memory, local steps and ``join`` are as with
    :class:`~asyncddp.algorithms.methods.gradient_tracking.GradientTracking`.

    Args:
        beta: :math:`\beta` in [0, 1).
        form: ``"diging"`` is the paper's, given above; ``"atc"`` combines after the update,
            :math:`X^{k+1} = W (X^{k} - U(Y^{k}))`, which allows larger steps.

    Raises:
        ArgumentError: Another form, a :math:`\beta` out of range, or an optimizer with momentum.

    References:
        Takezawa, Bao, Niwa, Sato, Yamada, "Momentum tracking: momentum acceleration for
        decentralized deep learning on heterogeneous data", TMLR 2023.
    """

    name = "momentum_tracking"
    when = CommunicationTiming.BEFORE_FORWARD
    needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=-1.0)
    owns_momentum = changes_alone = True

    def __init__(self, *, beta: float = 0.9, form: Literal["atc", "diging"] = "diging") -> None:
        super().__init__(form, checked_share("argument beta", beta))
