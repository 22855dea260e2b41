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
from asyncddp.integrations.lightning.strategy import StrategyMembers
from asyncddp.integrations.lightning.world_environment import WorldEnvironment

with needed_package("asyncddp.integrations.lightning needs Lightning", "lightning"):
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry

__all__ = ["AsyncDDPStrategy"]


class _Environment(WorldEnvironment, ClusterEnvironment):  # type: ignore[misc]
    """Cluster environment of the package ``lightning``."""


class AsyncDDPStrategy(StrategyMembers, ParallelStrategy):  # type: ignore[misc]
    """Strategy of the Trainer of this package; its arguments are those of ``StrategyMembers``."""

    environment = _Environment


AsyncDDPStrategy.register_strategies(StrategyRegistry)
