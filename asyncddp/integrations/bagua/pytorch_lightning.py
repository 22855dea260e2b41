"""``BaguaStrategy`` for the Trainer of the package ``pytorch_lightning``."""

from __future__ import annotations

from asyncddp.integrations.bagua.bagua_strategy import BaguaStrategyMixin
from asyncddp.integrations.pytorch_lightning import AsyncDDPStrategy, StrategyRegistry


class BaguaStrategy(BaguaStrategyMixin, AsyncDDPStrategy):  # noqa: D101
    __doc__ = BaguaStrategyMixin.__doc__


BaguaStrategy.register_strategies(StrategyRegistry)
