"""Strategy of Lightning's Trainer that trains by any of asyncddp's algorithms.

::

    from lightning import Trainer
    from asyncddp.integrations.lightning import AsyncDDPStrategy

    trainer = Trainer(strategy=AsyncDDPStrategy(algorithm="bytegrad"))

Importing it registers the names ``"asyncddp"`` and ``"asyncddp_bytegrad"``, one for each method.
For the Trainer of ``pytorch_lightning``, :mod:`asyncddp.integrations.pytorch_lightning` has the
same.
"""

from __future__ import annotations

from asyncddp.install_commands import needed_package
from asyncddp.integrations.lightning.callbacks import (
    ConsensusMonitorMixin,
    SwitchAlgorithmMixin,
    TimelineCallbackMixin,
)
from asyncddp.integrations.lightning.sharded_strategy import ShardedStrategyMixin
from asyncddp.integrations.lightning.trainer_strategy import TrainerStrategyMixin
from asyncddp.integrations.lightning.world_strategy import WorldEnvironment

with needed_package("asyncddp.integrations.lightning needs Lightning", "lightning"):
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import (
        ModelParallelStrategy,
        ParallelStrategy,
        StrategyRegistry,
    )

__all__ = [
    "AsyncDDPStrategy",
    "AsyncModelParallelStrategy",
    "ConsensusMonitor",
    "StrategyRegistry",
    "SwitchAlgorithm",
    "TimelineCallback",
]


class AsyncDDPStrategy(TrainerStrategyMixin, ParallelStrategy):  # type: ignore[misc] # noqa: D101
    __doc__ = TrainerStrategyMixin.__doc__


class AsyncModelParallelStrategy(  # noqa: D101
    ShardedStrategyMixin,
    ModelParallelStrategy,  # type: ignore[misc]
):
    __doc__ = ShardedStrategyMixin.__doc__


ClusterEnvironment.register(WorldEnvironment)
AsyncDDPStrategy.register_strategies(StrategyRegistry)


class ConsensusMonitor(ConsensusMonitorMixin, Callback):  # type: ignore[misc] # noqa: D101
    __doc__ = ConsensusMonitorMixin.__doc__


class SwitchAlgorithm(SwitchAlgorithmMixin, Callback):  # type: ignore[misc] # noqa: D101
    __doc__ = SwitchAlgorithmMixin.__doc__


class TimelineCallback(TimelineCallbackMixin, Callback):  # type: ignore[misc] # noqa: D101
    __doc__ = TimelineCallbackMixin.__doc__
