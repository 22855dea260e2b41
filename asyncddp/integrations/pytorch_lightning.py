"""Strategy ``AsyncDDPStrategy`` and callbacks for the package ``pytorch_lightning``."""

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

with needed_package("asyncddp.integrations.pytorch_lightning needs it", "lightning"):
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.strategies import (
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
