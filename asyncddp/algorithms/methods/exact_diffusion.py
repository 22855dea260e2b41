"""``exact_diffusion``: decentralised SGD with a bias correction, on symmetric graphs."""

from asyncddp.algorithms.corrected_diffusion import CorrectedDiffusion
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class ExactDiffusion(CorrectedDiffusion):
    r"""Exact diffusion: decentralised SGD with a correction that removes the bias of diffusion.

    .. math:: \psi^{k+1} = X^{k} - U(G(X^{k})), \qquad
              X^{k+1} = \tfrac12 (I + W) \big(\psi^{k+1} + X^{k} - \psi^{k}\big)

    with U the update of the wrapped optimizer and :math:`\psi^0 = X^0`. It costs the messages of
    ``adapt_then_combine`` and one tensor of the model's size, half the cost of
    ``gradient_tracking``, but requires a static symmetric graph: with weights that change from
    round to round, or differ in the two directions, it diverges. Within ``join`` the correction is
    reset when another rank is done. With several local steps between rounds, bias from their drift
    remains.

    References:
        Yuan, Ying, Zhao, Sayed, "Exact diffusion for distributed optimization and learning", IEEE
        TSP 67(3), 2019.
    """

    name = "exact_diffusion"
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True, static_only=True)
