"""Hosts as users write them."""

import socket

import pytest

from asyncddp.errors import ArgumentError
from asyncddp.launch.hosts import (
    Host,
    assign_slots,
    is_this_machine,
    parse_hostfile,
    parse_hosts,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1", [Host("h1")]),
        ("h1:2,h2:4", [Host("h1", 2), Host("h2", 4)]),
        ("node-01.cluster.local:8", [Host("node-01.cluster.local", 8)]),
        ("10.0.0.1:2, 10.0.0.2", [Host("10.0.0.1", 2), Host("10.0.0.2")]),
        ("[fe80::1]:2,[::1]", [Host("fe80::1", 2), Host("::1")]),
        ("[fe80::1%eth0]:2", [Host("fe80::1%eth0", 2)]),
        ("7,gpu_3", [Host("7"), Host("gpu_3")]),
    ],
)
def test_hosts_are_read(text, expected):
    """``-H`` takes names, IPv4 and bracketed IPv6 addresses, each with slots or without."""
    assert list(parse_hosts(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h1:",
        "h1:two",
        "h1:2:3",
        "h1:0",
        "h1,,h2",
        "h1;rm -rf",
        "$(id):2",
        "h 1",
        "-oProxyCommand=id",
        "256.0.0.1",
        "fe80::1",
        "[10.0.0.1]:2",
        "[h1]:2",
        "h1-:2",
        "a" * 64,
    ],
)
def test_what_is_no_host_is_refused_with_what_was_expected(text):
    """What is no name or address with slots is refused, also options and shell syntax."""
    with pytest.raises(ArgumentError, match=r"-H: expected .*got"):
        parse_hosts(text)


def test_a_host_that_is_there_twice_is_refused_with_the_remedy():
    """A host named twice in ``-H`` is refused, with the sum of its slots as the remedy."""
    with pytest.raises(ArgumentError, match=r"'h1' is there twice.*h1:2"):
        parse_hosts("h1:1,h2:1,h1:1")


def test_a_hostfile_is_read_in_each_of_its_forms(tmp_path):
    """A hostfile has comments, ``slots=``, ``host:slots``, and keys that are ignored."""
    path = tmp_path / "hosts"
    path.write_text("# ours\n\nh1 slots=2\nh2:3   # two GPUs\n[::1] slots=1 max_slots=4\nh4\n")
    found = parse_hostfile(path)
    assert found == (Host("h1", 2), Host("h2", 3), Host("::1", 1), Host("h4"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h1\nh2 slots=x\n", "line 2: expected slots=NUMBER after the host, got 'slots=x'"),
        ("h1 user=ada\n", "line 1: expected slots=NUMBER after the host, got 'user=ada'"),
        ("h1:2 slots=2\n", "line 1: the number of slots is given twice"),
        ("h;1\n", "line 1: expected a name"),
        ("# nothing\n", "names no host"),
        ("h1\nh1\n", "'h1' is there twice"),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_named(tmp_path, text, message):
    """What is wrong in a hostfile is named, with the line's number where it is one line."""
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        parse_hostfile(path)


def test_a_hostfile_that_is_not_there_is_named(tmp_path):
    """A hostfile that cannot be read is refused with its path."""
    with pytest.raises(ArgumentError, match=r"--hostfile: cannot read .*nowhere"):
        parse_hostfile(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("h1,h2", 8, "h1:4,h2:4"),
        ("h1,h2", 5, "h1:3,h2:3"),
        ("h1,h2", None, "h1:1,h2:1"),
        ("h1:2,h2", 8, "h1:2,h2:6"),
        ("h1:2,h2", 1, "h1:2,h2:1"),
        ("h1:2,h2:2", 8, "h1:2,h2:2"),
    ],
)
def test_ranks_are_shared_out_over_hosts_without_a_number(text, ranks, expected):
    """Ranks beyond the given slots are divided among hosts without, at least one each."""
    assert ",".join(map(str, assign_slots(parse_hosts(text), ranks))) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        (socket.gethostname(), True),
        ("10.77.0.9", False),
        ("another-machine", False),
    ],
)
def test_this_machine_is_known_by_its_names(name, expected):
    """A host is this machine if it is localhost, a loopback address or the host name."""
    assert is_this_machine(Host(name)) is expected
