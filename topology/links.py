"""Network links for the cost model: latency and bandwidth, inside machines and between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .checks import check_int
from .errors import TopologyError

__all__ = ["Link", "Links", "check_quantity"]

Ranks = npt.NDArray[np.intp]
Seconds = npt.NDArray[np.float64]

_RATES = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12}  # powers of ten, so that 50us is 5e-5 itself
_TIMES = {"ns": -9, "us": -6, "µs": -6, "μs": -6, "ms": -3, "s": 0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d+))?"
_TEXT = re.compile(
    rf"\s*{_NUMBER}\s*([kmgt]?)bit(?:/s)?\s*(?:,\s*{_NUMBER}\s*({'|'.join(_TIMES)})\s*)?",
    re.IGNORECASE,
)


def check_quantity(value: float, name: str, unit: str, where: str, zero: bool) -> float:
    """Check that a number is finite and positive, or zero if ``zero`` is set.

    Raises:
        TopologyError: If it is not; the message names the bound and the unit.
    """
    if not (0 <= value < float("inf")) or (value == 0 and not zero):
        bound = ">= 0" if zero else "> 0"
        raise TopologyError(f"{where} needs {name} {bound} in {unit}, got {name}={value!r}")
    return float(value)


@dataclass(frozen=True, slots=True)
class Link:
    r"""Full-duplex network link: latency and bandwidth, the same in both directions.

    .. math:: T(B) = \alpha + B / \beta

    Args:
        latency: Time until a message of no size has arrived, α, in seconds.
        bandwidth: β, in bytes per second; the default is 10 Gbit/s.

    Raises:
        TopologyError: If the latency is negative, the bandwidth not positive, or one not finite.

    Example:
        >>> Link(latency=0.02, bandwidth=12.5e6) == Link.parse("100Mbit,20ms")
        True
    """

    latency: float = 5e-5
    bandwidth: float = 1.25e9

    def __post_init__(self) -> None:
        check_quantity(self.latency, "latency", "seconds", "Link", zero=True)
        check_quantity(self.bandwidth, "bandwidth", "bytes per second", "Link", zero=False)

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse a link from a string such as ``"100Mbit,20ms"``, in the units of ``tc``.

        Args:
            text: A rate in bit, kbit, Mbit, Gbit or Tbit (per second) and, after a comma, a latency
                in ns, us, ms or s, by default 50 µs. Output of ``str(link)`` is accepted, too.

        Returns:
            The link.

        Raises:
            TopologyError: If the text has another form.

        Example:
            >>> print(Link.parse("25Gbit,10us"), "and", Link.parse("1gbit"))
            25 Gbit/s, 10 µs and 1 Gbit/s, 50 µs
        """
        found = _TEXT.fullmatch(text)
        if found is None or not float(found[1]):
            raise TopologyError(
                f"cannot read {text!r} as a link; expected a rate and a latency such as "
                "100Mbit,20ms or 25Gbit,10us: bit, kbit, Mbit, Gbit or Tbit per second, then ns, "
                "us, ms or s"
            )
        rate, rate_power, unit, latency, latency_power, time_unit = found.groups()
        bandwidth = float(f"{rate}e{int(rate_power or 0) + _RATES[unit.lower()]}") / 8
        if latency is None:
            return cls(bandwidth=bandwidth)
        power = int(latency_power or 0) + _TIMES[time_unit.lower()]
        return cls(float(f"{latency}e{power}"), bandwidth)

    def __str__(self) -> str:
        """Format the link, such as ``100 Mbit/s, 20 ms``."""
        rate = _scaled(8 * self.bandwidth, (1e12, "Tbit"), (1e9, "Gbit"), (1e6, "Mbit"))
        return f"{rate}/s, {_scaled(self.latency, (1.0, 's'), (1e-3, 'ms'), (1e-6, 'µs'))}"


def _scaled(value: float, *units: tuple[float, str]) -> str:
    """Format a value in the largest unit that it reaches, or in the last unit."""
    factor, name = next((unit for unit in units if value >= 0.9995 * unit[0]), units[-1])
    return f"{value / factor:.4g} {name}"


@dataclass(frozen=True, slots=True)
class Links:
    r"""Links of all ranks: one per machine to the network, and one per rank inside its machine.

    A message from i to j takes

    .. math:: T_{ij} = \alpha + \max\Big(\frac{B\, m_i^\text{out}}{\beta_i},
              \frac{B\, m_j^\text{in}}{\beta_j}\Big)

    with m the messages that share the link at the same time: those from, or to, the same machine,
    or inside a machine the same rank. All are sent at once, so that their latency counts once.

    Args:
        between: Link of a machine to the network, shared by its ranks.
        ranks_per_machine: Ranks 0..L-1 are on machine 0, the next L on machine 1, and so on.
        inside: Link of a rank to the others of its machine.
        slow: Links that differ. Keyed by a machine's number: its link in place of ``between``.
            Keyed by a pair of machines: a further link on the path between them, both directions.

    Raises:
        TopologyError: If ``ranks_per_machine`` is below one, or a key of ``slow`` is neither a
            machine nor a pair of machines.

    Example:
        Four machines, the last of which has a slow link:

        >>> links = Links(Link.parse("1Gbit,1ms"), slow={3: Link.parse("100Mbit,1ms")})
        >>> from asyncddp import topology
        >>> cost = topology.communication_cost(topology.one_peer_exponential(4), 12.5e6, links)
        >>> print(f"{cost.neighbors.seconds:.3f} s")
        1.001 s
    """

    between: Link = Link()
    ranks_per_machine: int = 1
    inside: Link = Link(latency=2e-6, bandwidth=1e10)
    slow: Mapping[int | tuple[int, int], Link] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_int(self.ranks_per_machine, "ranks_per_machine", "Links", 1)
        for key in self.slow:
            pair = key if isinstance(key, tuple) else (key,)
            machines = [check_int(machine, "machine", "Links(slow=…)", 0) for machine in pair]
            if len(machines) > 2 or len(set(machines)) != len(machines):
                raise TopologyError(
                    "Links needs the keys of slow to be machines, 3, or pairs of two machines, "
                    f"(0, 3), got {key!r}"
                )

    def check_size(self, n: int) -> None:
        """Raise a :class:`TopologyError` if ``slow`` names a machine that n ranks do not have."""
        machines = -(-n // self.ranks_per_machine)
        for key in self.slow:
            if max(key if isinstance(key, tuple) else (key,)) >= machines:
                raise TopologyError(
                    f"Links has a link of {key!r} in slow, but {n} ranks with "
                    f"ranks_per_machine={self.ranks_per_machine} are on the machines "
                    f"0..{machines - 1}"
                )

    def latencies(self, sources: Ranks, targets: Ranks) -> Seconds:
        """Return the latency of each message: the larger one of both machines' links.

        Args:
            sources: Ranks that send, of any length.
            targets: The rank that each sends to.

        Returns:
            Seconds, one for each message.
        """
        senders, receivers = sources // self.ranks_per_machine, targets // self.ranks_per_machine
        latency = self._per_machine(senders, receivers, "latency")
        found = np.maximum(latency[senders], latency[receivers])
        found[senders == receivers] = self.inside.latency
        for link, chosen in self._ways(senders, receivers):
            found[chosen] = np.maximum(found[chosen], link.latency)
        return found

    def transfers(self, sources: Ranks, targets: Ranks, nbytes: float) -> Seconds:
        """Return the transfer time of each message without latency, if all are sent at once.

        Args:
            sources: Ranks that send, of any length; a rank that occurs twice sends two messages.
            targets: The rank that each sends to.
            nbytes: Size of each message, in bytes.

        Returns:
            Seconds, one for each message.
        """
        senders, receivers = sources // self.ranks_per_machine, targets // self.ranks_per_machine
        inside = senders == receivers
        busiest = np.maximum(_sharing(sources, inside), _sharing(targets, inside))
        found = busiest * (nbytes / self.inside.bandwidth)
        bandwidth = self._per_machine(senders, receivers, "bandwidth")
        out = _sharing(senders, ~inside) * nbytes / bandwidth[senders]
        into = _sharing(receivers, ~inside) * nbytes / bandwidth[receivers]
        found = np.where(inside, found, np.maximum(out, into))
        for link, chosen in self._ways(senders, receivers):
            found[chosen] = np.maximum(found[chosen], chosen.sum() * nbytes / link.bandwidth)
        return found

    def _per_machine(self, senders: Ranks, receivers: Ranks, what: str) -> Seconds:
        """Return latency or bandwidth of each machine's link."""
        machines = 1 + max(int(senders.max(initial=-1)), int(receivers.max(initial=-1)))
        values = np.full(machines, getattr(self.between, what), dtype=np.float64)
        for key, link in self.slow.items():
            if not isinstance(key, tuple) and key < machines:
                values[key] = getattr(link, what)
        return values

    def _ways(
        self, senders: Ranks, receivers: Ranks
    ) -> Iterator[tuple[Link, npt.NDArray[np.bool_]]]:
        """Yield each slow path between two machines, per direction, with a mask of its messages."""
        for key, link in self.slow.items():
            if isinstance(key, tuple):
                for first, second in (key, key[::-1]):
                    yield link, (senders == first) & (receivers == second)


def _sharing(places: Ranks, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Count, for each message, the chosen messages with the same machine or rank."""
    return np.bincount(places[chosen], minlength=int(places.max(initial=-1)) + 1)[places]
