"""``d2``: D², decentralised SGD without bias from heterogeneous data."""

from typing_extensions import override

from asyncddp.algorithms.corrected_diffusion import CorrectedDiffusion
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.topology import GraphOrSchedule, lazy_weights, symmetric_exponential


class D2(CorrectedDiffusion):
    r"""D²: exact diffusion whose mixing matrix is W, not (I + W) / 2, to mix twice as fast.

    .. math:: X^{k+1} = W \big(2 X^{k} - X^{k-1} - U^{k} + U^{k-1}\big), \qquad
              X^{1} = W (X^{0} - U^{0})

    with :math:`U^k` the update of the wrapped optimizer in step k. It diverges unless all
    eigenvalues of W are above −1/3: a ring with weights of one third has −1/3 if n is even.
    Otherwise it is like :class:`~asyncddp.algorithms.methods.exact_diffusion.ExactDiffusion`.

    References:
        Tang, Lian, Yan, Zhang, Liu, "D²: decentralized training over decentralized data", ICML
        2018.
    """

    name = "d2"
    lazy = False
    needs = TopologyRequirements(
        doubly_stochastic=True, symmetric=True, static_only=True, min_eigenvalue=-1 / 3
    )

    @override
    def default_topology(self, nodes: int) -> GraphOrSchedule | None:
        return lazy_weights(symmetric_exponential(nodes))
