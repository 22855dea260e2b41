"""Exception of this package."""

__all__ = ["TopologyError"]


class TopologyError(ValueError):
    """Error of an invalid graph, schedule or weight; the message suggests the nearest valid one."""
