"""Strategy of Lightning's Trainer that trains by any method of the library.

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
    ConsensusMonitorMembers,
    SwitchAlgorithmMembers,
    TimelineCallbackMembers,
)
from asyncddp.integrations.lightning.strategy import StrategyMembers
from asyncddp.integrations.lightning.world_environment import WorldEnvironment

with needed_package("asyncddp.integrations.lightning needs Lightning", "lightning"):
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry

__all__ = [
    "AsyncDDPStrategy",
    "ConsensusMonitor",
    "StrategyRegistry",
    "SwitchAlgorithm",
    "TimelineCallback",
]


class _Environment(WorldEnvironment, ClusterEnvironment):  # type: ignore[misc]
    """Cluster environment of the package ``lightning``."""


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
