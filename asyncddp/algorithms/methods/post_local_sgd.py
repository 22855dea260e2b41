"""``post_local_sgd``: averages gradients in early steps, later models after local steps."""

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.wrapper_setup import checked_integer, checked_interval


class PostLocalSGD(Algorithm):
    r"""Post-local SGD: data-parallel SGD in the first steps, then local SGD.

    .. math:: x \leftarrow x - U\Big(\frac1n \sum_j g_j\Big) \quad\text{in the first steps, then}
              \quad x_i \leftarrow \frac1n \sum_j x_j \quad\text{every H steps}

    with U the update of the wrapped optimizer. The first steps are those of
    ``gradient_allreduce``; the paper ends them when the learning rate first decays, and finds
    flatter minima with the communication volume of local SGD.

    Args:
        warmup_steps: Steps before the first local one.
        communication_interval: H, in steps of the optimizer, not backward passes.

    Raises:
        ArgumentError: Less than 0 steps, or an interval below 1.

    References:
        Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020.
    """

    name = "post_local_sgd"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.GLOBAL,)
    averages_first_step = False

    def __init__(self, *, warmup_steps: int = 0, communication_interval: int = 8) -> None:
        self.warmup_steps = checked_integer("argument warmup_steps", warmup_steps, 0)
        self.communication_interval = checked_interval(communication_interval)

    @override
    def warms_up(self, optimizer: torch.optim.Optimizer, steps: int) -> bool:
        return steps < self.warmup_steps
