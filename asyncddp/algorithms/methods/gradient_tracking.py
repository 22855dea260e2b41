"""``gradient_tracking``: ranks descend along estimates of the average gradient, without bias."""

from typing import Literal

from asyncddp.algorithms.method_traits import CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.tracking import Tracking


class GradientTracking(Tracking):
    r"""Gradient tracking (DSGT): each rank descends along an estimate of the average gradient.

    .. math:: Y^{k} = W Y^{k-1} + G(X^{k}) - G(X^{k-1}), \qquad
              X^{k+1} = W \big(X^{k} - U(Y^{k})\big)
              \quad\text{or}\quad X^{k+1} = W X^{k} - U(Y^{k})

    with U the update of the wrapped optimizer, which sees :math:`y_i` in place of the gradient, and
    :math:`Y^0 = G(X^0)`. The mean of the trackers is the mean of the gradients in every step, on
    any doubly stochastic graph or schedule; so at a fixed point all ranks hold the optimum of the
    mean loss, even if their data differ. A round sends parameters and trackers: two messages to
    each neighbour, and two tensors of the model's size to keep. With stochastic gradients
    :math:`G(X^{k-1})` is the stored gradient of the previous batch.

    Local steps (``num_steps_per_communication``) are rounds with W = I. Within ``join`` the
    trackers are reset to the ranks' own gradients when another rank is done.

    Args:
        form: ``"atc"``, the first form, combines after the update; ``"diging"``, the second form,
            overlaps communication with forward and backward pass, and needs smaller steps.

    Raises:
        ArgumentError: Another form.

    References:
        Xu, Zhu, Soh, Xie, "Augmented distributed gradient methods for multi-agent optimization
        under uncoordinated constant stepsizes", CDC 2015. Nedić, Olshevsky, Shi, "Achieving
        geometric convergence for distributed optimization over time-varying graphs", SIAM J. Optim.
        27(4), 2017. Pu, Nedić, "Distributed stochastic gradient tracking methods", Math. Program.
        187, 2021.
    """

    name = "gradient_tracking"
    when = CommunicationTiming.AFTER_STEP
    needs = TopologyRequirements(doubly_stochastic=True)

    def __init__(self, *, form: Literal["atc", "diging"] = "atc") -> None:
        super().__init__(form, beta=0.0)
