"""Sinks for monitor reports: console, JSON lines, TensorBoard, or a user's function."""

from asyncddp.monitoring.sinks.sink_factory import Sink, sink_opener

__all__ = ["Sink", "sink_opener"]
