"""``muloco``: DiLoCo with Muon as the inner optimizer, and model changes in two bits."""

from asyncddp.algorithms.outer_nesterov import OuterNesterov


class MuLoCo(OuterNesterov):
    r"""MuLoCo: H steps of Muon, then a Nesterov step along the mean of changes sent in two bits.

    .. math:: e_i \leftarrow e_i + \theta - \theta_i, \qquad s_i = Q(e_i), \qquad
              e_i \leftarrow e_i - s_i, \\
              \Delta = \frac1n \sum_j s_j, \qquad m \leftarrow \mu m + \Delta, \qquad
              \theta \leftarrow \theta - \eta\, (\Delta + \mu m), \qquad \theta_i \leftarrow \theta

    with :math:`\theta` the parameters that all ranks held after the last outer step. Muon is yours
    to give, as ``torch.optim.Muon`` of all matrices but embeddings, beside another optimizer for
    the rest: its steps have about the same size in all directions, so that little is lost in
    :math:`Q`, ``lloyd_max_int2`` unless you name another compressor. The mean is quantised once
    more on its way back, with error feedback as well. A rank keeps :math:`\theta` and m, and the
    compressor :math:`e_i`; all ranks begin from one model.

    Args:
        communication_interval: H, in steps of the optimizer, not backward passes.
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\mu` in [0, 1).

    Raises:
        ArgumentError: A number out of range.

    References:
        Thérien, Huang, Defazio, Rish, Belilovsky, "MuLoCo: Muon is a practical inner optimizer for
        DiLoCo", 2025. Its authors' code lets :math:`e_i` decay, which is not done here, and
        quantises each row of a matrix by itself, here blocks of 4096 elements.
    """

    name = "muloco"
    default_compression = "lloyd_max_int2"

    def __init__(
        self,
        *,
        communication_interval: int = 30,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.6,
    ) -> None:
        super().__init__(communication_interval, outer_lr, outer_momentum)
