"""Monitoring of a training run: consensus distance, step times and traffic of all ranks.

Here belong measures and the sinks that show or write them. Training loops call it once a step. It
never delays a step for a rank that is late: reports go by message, and what is missing is named.
"""

from asyncddp.monitoring.monitor import Monitor, monitor
from asyncddp.monitoring.rank_record import Record

__all__ = ["Monitor", "Record", "monitor"]
