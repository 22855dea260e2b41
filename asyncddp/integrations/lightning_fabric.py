"""Strategy ``AsyncDDPStrategy`` for Fabric of the package ``lightning_fabric``."""

from __future__ import annotations

from asyncddp.install_commands import needed_package
from asyncddp.integrations.lightning.fabric_strategy import FabricStrategyMixin
from asyncddp.integrations.lightning.world_strategy import WorldEnvironment

with needed_package("asyncddp.integrations.lightning_fabric needs it", "lightning"):
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from lightning_fabric.strategies import STRATEGY_REGISTRY
    from lightning_fabric.strategies.parallel import ParallelStrategy

__all__ = ["AsyncDDPStrategy"]


class AsyncDDPStrategy(FabricStrategyMixin, ParallelStrategy):  # type: ignore[misc] # noqa: D101
    __doc__ = FabricStrategyMixin.__doc__


ClusterEnvironment.register(WorldEnvironment)
AsyncDDPStrategy.register_strategies(STRATEGY_REGISTRY)
