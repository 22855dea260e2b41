"""Monitoring of a training run: consensus distance, step times and traffic of all ranks."""

from asyncddp.monitoring.monitor import Monitor, monitor
from asyncddp.monitoring.rank_record import Record

__all__ = ["Monitor", "Record", "monitor"]
