"""What hosts to simulate, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostNetwork"]


@dataclass(frozen=True)
class HostNetwork:
    """Hosts and the links between them.

    Attributes:
        hosts: How many.
        rate: Of each host's link, as ``scripts/testhosts`` is told.
        latency: Seconds from host to host, besides.
        slow_rate: Of the last host's link instead; None where all are equal.
        ranks_per_host: Ranks that share a host's link.
        keeps_window: Whether TCP goes on after a pause as it was, by
            ``net.ipv4.tcp_slow_start_after_idle=0``, as the guide on slow networks advises; Linux's
            default is to begin slowly.
    """

    hosts: int
    rate: str
    latency: float = 0.0
    slow_rate: str | None = None
    ranks_per_host: int = 1
    keeps_window: bool = False
