"""Links: what their words mean, what shares them, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncddp import topology
from asyncddp.topology import Link, Links

SLOW = Link(0.1, 1e6)


@pytest.mark.parametrize(
    ("text", "latency", "rate"),
    [
        ("100Mbit,20ms", 0.02, 1e8),
        ("100mbit , 20 MS", 0.02, 1e8),
        ("2.5 Gbit/s, 10 µs", 1e-5, 2.5e9),
        ("10gbit,50us", 5e-5, 1e10),
        ("1e9bit,0s", 0.0, 1e9),
        ("64kbit,.5s", 0.5, 64e3),
        (".4Tbit,900ns", 9e-7, 4e11),
        ("1Gbit", 5e-5, 1e9),
    ],
)
def test_words_are_a_rate_in_bits_and_a_latency(text, latency, rate):
    """A rate in bits per second and a latency, with SI prefixes in any case; 50 µs if unsaid."""
    link = Link.parse(text)
    assert link.latency == pytest.approx(latency, rel=1e-12)
    assert 8 * link.bandwidth == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("text", ["100 Mbit/s, 20 ms", "10 Gbit/s, 50 µs", "1.6 Tbit/s, 2 s"])
def test_a_link_is_printed_as_it_is_read(text):
    """``str(Link.parse(text))`` is the text, and reading it gives the link again."""
    assert str(Link.parse(text)) == text
    assert Link.parse(str(Link())) == Link()


@pytest.mark.parametrize(
    "text",
    ["", "fast", "100", "100Mbit;20ms", "100Mbit,20", "20ms,100Mbit", "12MB,1ms", "-1Mbit,1ms",
     "0Mbit,1ms", "1Mbit,-1ms", "1Mbit,1ms,1ms", "1..5Mbit"],
)  # fmt: skip
def test_other_words_are_refused_with_those_that_are_expected(text):
    """The error repeats the text, and shows two links and all units."""
    with pytest.raises(topology.TopologyError) as caught:
        Link.parse(text)
    assert str(caught.value) == (
        f"cannot read {text!r} as a link; expected a rate and a latency such as 100Mbit,20ms or "
        "25Gbit,10us: bit, kbit, Mbit, Gbit or Tbit per second, then ns, us, ms or s"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(latency=math.nan), "Link needs latency >= 0 in seconds, got latency=nan"),
        (
            lambda: Link(bandwidth=0),
            "Link needs bandwidth > 0 in bytes per second, got bandwidth=0",
        ),
        (
            lambda: Link(bandwidth=math.inf),
            "Link needs bandwidth > 0 in bytes per second, got bandwidth=inf",
        ),
        (
            lambda: Links(ranks_per_machine=0),
            "Links needs ranks_per_machine >= 1, got ranks_per_machine=0; "
            "nearest: ranks_per_machine=1",
        ),
        (
            lambda: Links(slow={-1: SLOW}),
            "Links(slow=…) needs machine >= 0, got machine=-1; nearest: machine=0",
        ),
        (
            lambda: Links(slow={(2, 2): SLOW}),
            "Links needs the keys of slow to be machines, 3, or pairs of two machines, (0, 3), "
            "got (2, 2)",
        ),
        (
            lambda: topology.communication_cost(
                topology.ring(8), 1, Links(ranks_per_machine=4, slow={(0, 2): SLOW})
            ),
            "Links has a link of (0, 2) in slow, but 8 ranks with ranks_per_machine=4 are on the "
            "machines 0..1",
        ),
    ],
)
def test_impossible_links_are_refused(make, message):
    """Numbers out of range, odd keys and machines that are not there, each with its bound."""
    with pytest.raises(topology.TopologyError) as caught:
        make()
    assert str(caught.value) == message


def seconds(links, *messages, nbytes=1e6):
    """Of each message (source, target), all sent at once."""
    sources, targets = (np.array(ranks) for ranks in zip(*messages, strict=True))
    return links.latencies(sources, targets) + links.transfers(sources, targets, nbytes)


def test_directions_of_a_link_do_not_share_it():
    """A link is full duplex: pairs that exchange take as long as a message alone."""
    links = Links(Link(0.5, 1e6))
    assert seconds(links, (0, 1)) == pytest.approx([1.5])
    assert seconds(links, (0, 1), (1, 0)) == pytest.approx([1.5, 1.5])


def test_messages_of_a_machine_share_its_link():
    """Two ranks that send from one machine take twice as long; a third inside takes none of it."""
    links = Links(Link(0.5, 1e6), ranks_per_machine=4, inside=Link(0.25, 2e6))
    found = seconds(links, (0, 4), (1, 8), (2, 3), (12, 9))
    assert found == pytest.approx([2.5, 2.5, 0.75, 2.5])


def test_links_inside_are_those_of_ranks():
    """Two messages of one rank share its link; those of other ranks of the machine do not."""
    links = Links(ranks_per_machine=4, inside=Link(0.25, 2e6))
    assert seconds(links, (0, 1), (0, 2), (2, 3)) == pytest.approx([1.25, 1.25, 0.75])


def test_a_slow_machine_delays_what_it_sends_and_receives():
    """Its link counts for both directions, and nothing else is slower."""
    links = Links(Link(0.01, 1e8), slow={1: Link(0.5, 1e6)})
    found = seconds(links, (0, 1), (1, 2), (2, 3))
    assert found == pytest.approx([1.5, 1.5, 0.02])


def test_a_slow_way_delays_what_takes_it_in_either_direction():
    """All messages between the two machines share it, each direction for itself."""
    links = Links(Link(0.01, 1e8), ranks_per_machine=2, slow={(0, 1): Link(0.5, 1e6)})
    found = seconds(links, (0, 2), (1, 3), (2, 0), (0, 4))
    assert found == pytest.approx([2.5, 2.5, 1.5, 0.04])
