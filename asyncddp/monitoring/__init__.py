"""Watch a run: how far the ranks are apart, how fast they are, what they wait for."""

from asyncddp.monitoring.monitor import Monitor, monitor
from asyncddp.monitoring.record import Record

__all__ = ["Monitor", "Record", "monitor"]
