"""The strategy of :mod:`asyncddp.integrations.lightning` for the package ``pytorch_lightning``."""

from __future__ import annotations

from asyncddp.install_commands import needed_package
from asyncddp.integrations.lightning.callbacks import (
    ConsensusMonitorMembers,
    SwitchAlgorithmMembers,
    TimelineCallbackMembers,
)
from asyncddp.integrations.lightning.strategy import StrategyMembers
from asyncddp.integrations.lightning.world_environment import WorldEnvironment

with needed_package("asyncddp.integrations.pytorch_lightning needs it", "lightning"):
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.strategies import ParallelStrategy, StrategyRegistry

__all__ = ["AsyncDDPStrategy", "ConsensusMonitor", "SwitchAlgorithm", "TimelineCallback"]


class _Environment(WorldEnvironment, ClusterEnvironment):  # type: ignore[misc]
    """Cluster environment of the package ``pytorch_lightning``."""


class AsyncDDPStrategy(StrategyMembers, ParallelStrategy):  # type: ignore[misc]
    """Strategy of the Trainer of this package; its arguments are those of ``StrategyMembers``."""

    environment = _Environment


AsyncDDPStrategy.register_strategies(StrategyRegistry)


class ConsensusMonitor(ConsensusMonitorMembers, Callback):  # type: ignore[misc]
    """Callback that logs how all ranks are doing; see ``ConsensusMonitorMembers``."""


class SwitchAlgorithm(SwitchAlgorithmMembers, Callback):  # type: ignore[misc]
    """Callback that switches the algorithm at epochs; see ``SwitchAlgorithmMembers``."""


class TimelineCallback(TimelineCallbackMembers, Callback):  # type: ignore[misc]
    """Callback that shows epochs in the timeline; see ``TimelineCallbackMembers``."""
