"""``diloco``: many local steps, then one step of an outer Nesterov optimizer."""

from asyncddp.algorithms.outer_nesterov import OuterNesterov


class DiLoCo(OuterNesterov):
    r"""DiLoCo: H local steps, then an outer Nesterov step along the mean model change.

    .. math:: \Delta = \theta - \frac1n \sum_j \theta_j, \qquad m \leftarrow \mu m + \Delta, \qquad
              \theta \leftarrow \theta - \eta\, (\Delta + \mu m), \qquad \theta_i \leftarrow \theta

    with :math:`\theta` the parameters that all ranks held after the last outer step. The optimizer
    of the local steps is the user's, AdamW in the paper; its state stays local. A rank keeps
    :math:`\theta` and m, two tensors of the model's size; all ranks begin from one model. With a
    compressor, :math:`\theta - \theta_j` is sent compressed, and all ranks decode the same mean.

    Args:
        communication_interval: H, in steps of the optimizer, not backward passes. The paper's 500
            is for long runs: choose it so that a run has ten rounds or more.
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\mu` in [0, 1). The paper's 0.9 is for hundreds of rounds; with
            tens of them 0.5 is better.

    Raises:
        ArgumentError: A number out of range.

    References:
        Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023.
    """

    name = "diloco"

    def __init__(
        self,
        *,
        communication_interval: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__(communication_interval, outer_lr, outer_momentum)
