"""Strategy of Lightning's Fabric that trains by any of asyncddp's algorithms.

::

    from lightning import Fabric
    from asyncddp.integrations.lightning.fabric import AsyncDDPStrategy

    fabric = Fabric(strategy=AsyncDDPStrategy(algorithm="bytegrad"))
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

Importing it registers the names ``"asyncddp"`` and ``"asyncddp_bytegrad"``, one for each method.
"""

from __future__ import annotations

from asyncddp.install_commands import needed_package
from asyncddp.integrations.lightning.fabric_strategy import FabricStrategyMixin
from asyncddp.integrations.lightning.world_strategy import WorldEnvironment

with needed_package("asyncddp.integrations.lightning.fabric needs Lightning", "lightning"):
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.parallel import ParallelStrategy

__all__ = ["AsyncDDPStrategy"]


class AsyncDDPStrategy(FabricStrategyMixin, ParallelStrategy):  # type: ignore[misc] # noqa: D101
    __doc__ = FabricStrategyMixin.__doc__


ClusterEnvironment.register(WorldEnvironment)
AsyncDDPStrategy.register_strategies(STRATEGY_REGISTRY)
