"""Training algorithms: which tensors are averaged, when in a step, and with which ranks.

Here belong methods (``methods``, one file each), the training step (``phases``) and the rounds in
which a method's buckets are averaged (``rounds``). ``optim`` and ``parallel`` call it, ``simulate``
runs the same classes. A method declares its data and guarantees, and does not know the engine;
torch's optimizers are never re-implemented.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader

from asyncddp.registry import PluginRegistry

if TYPE_CHECKING:
    from asyncddp.algorithms.algorithm import Algorithm
    from asyncddp.algorithms.method_traits import (
        AveragedQuantity,
        CommunicationPattern,
        CommunicationTiming,
        CompressionUse,
    )
    from asyncddp.algorithms.topology_requirements import TopologyRequirements

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AveragedQuantity",
    "CommunicationPattern",
    "CommunicationTiming",
    "CompressionUse",
    "TopologyRequirements",
]

# with torch, which the names of methods do not need
__getattr__, _, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "algorithm": ["Algorithm"],
        "method_traits": [
            "AveragedQuantity", "CommunicationPattern", "CommunicationTiming", "CompressionUse",
        ],
        "topology_requirements": ["TopologyRequirements"],
    },
)  # fmt: skip

_METHODS = "asyncddp.algorithms.methods"

ALGORITHMS: PluginRegistry[type[Algorithm]] = PluginRegistry(
    "algorithm",
    {
        "a2cid2": f"{_METHODS}.a2cid2:A2CiD2",
        "ad_psgd": f"{_METHODS}.ad_psgd:ADPSGD",
        "adapt_then_combine": f"{_METHODS}.adapt_then_combine:AdaptThenCombine",
        "adapt_with_combine": f"{_METHODS}.adapt_with_combine:AdaptWithCombine",
        "async_model_average": f"{_METHODS}.async_model_average:AsyncModelAverage",
        "beer": f"{_METHODS}.beer:Beer",
        "bytegrad": f"{_METHODS}.bytegrad:ByteGrad",
        "choco_sgd": f"{_METHODS}.choco_sgd:ChocoSGD",
        "d2": f"{_METHODS}.d2:D2",
        "decentralized": f"{_METHODS}.decentralized:Decentralized",
        "decentlam": f"{_METHODS}.decentlam:DecentLaM",
        "decoupled_diloco": f"{_METHODS}.decoupled_diloco:DecoupledDiLoCo",
        "deepsqueeze": f"{_METHODS}.deepsqueeze:DeepSqueeze",
        "demo": f"{_METHODS}.demo:DeMo",
        "des_loc": f"{_METHODS}.des_loc:DesLoc",
        "diloco": f"{_METHODS}.diloco:DiLoCo",
        "edm": f"{_METHODS}.edm:ExactDiffusionMomentum",
        "exact_diffusion": f"{_METHODS}.exact_diffusion:ExactDiffusion",
        "extra": f"{_METHODS}.extra:Extra",
        "factored_gossip_diloco": f"{_METHODS}.factored_gossip_diloco:FactoredGossipDiLoCo",
        "gasloc": f"{_METHODS}.gasloc:GASLoC",
        "gradient_allreduce": f"{_METHODS}.gradient_allreduce:GradientAllreduce",
        "gradient_tracking": f"{_METHODS}.gradient_tracking:GradientTracking",
        "local_sgd": f"{_METHODS}.local_sgd:LocalSGD",
        "low_precision_decentralized": (
            f"{_METHODS}.low_precision_decentralized:LowPrecisionDecentralized"
        ),
        "momentum_tracking": f"{_METHODS}.momentum_tracking:MomentumTracking",
        "moniqua": f"{_METHODS}.moniqua:Moniqua",
        "muloco": f"{_METHODS}.muloco:MuLoCo",
        "noloco": f"{_METHODS}.noloco:NoLoCo",
        "overlap_sgp": f"{_METHODS}.overlap_sgp:OverlapSGP",
        "post_local_sgd": f"{_METHODS}.post_local_sgd:PostLocalSGD",
        "power_gossip": f"{_METHODS}.power_gossip:PowerGossip",
        "pull_get": f"{_METHODS}.pull_get:PullGet",
        "push_diging": f"{_METHODS}.push_diging:PushDIGing",
        "push_sum": f"{_METHODS}.push_sum:PushSum",
        "qadam": f"{_METHODS}.qadam:QAdam",
        "quasi_global_momentum": f"{_METHODS}.quasi_global_momentum:QuasiGlobalMomentum",
        "relay_sgd": f"{_METHODS}.relay_sgd:RelaySGD",
        "slowmo": f"{_METHODS}.slowmo:SlowMo",
        "sparse_loco": f"{_METHODS}.sparse_loco:SparseLoCo",
        "streaming_diloco": f"{_METHODS}.streaming_diloco:StreamingDiLoCo",
        "win_put": f"{_METHODS}.win_put:WinPut",
    },
    group="asyncddp.algorithms",
)
