"""The one exception of this package."""

__all__ = ["TopologyError"]


class TopologyError(ValueError):
    """A graph, schedule or weight that cannot be; says why and what comes nearest and works."""
