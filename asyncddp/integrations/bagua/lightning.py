"""``BaguaStrategy`` for the Trainer of the package ``lightning``, as Lightning once had it."""

from __future__ import annotations

from asyncddp.integrations.bagua.bagua_strategy import BaguaStrategyMixin
from asyncddp.integrations.lightning import AsyncDDPStrategy, StrategyRegistry


class BaguaStrategy(BaguaStrategyMixin, AsyncDDPStrategy):  # noqa: D101
    __doc__ = BaguaStrategyMixin.__doc__


BaguaStrategy.register_strategies(StrategyRegistry)
