"""Where reports go; one kind, one file."""

from asyncddp.monitoring.sinks.contract import Sink
from asyncddp.monitoring.sinks.opening import opener

__all__ = ["Sink", "opener"]
