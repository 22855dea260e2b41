"""Asynchronous training over a slow link: a straggler on one host holds up nobody on the other."""

import pytest

from tests.examples.test_digits import SCRIPT, number, table_of
from tests.hosts.namespaces import Hosts, call_script
from tests.support.processes import Finished, warm_script

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

NETWORK = ("--network-interface", "10.77.0.0/24")


@pytest.fixture
def slow_hosts(tmp_path):
    """Two hosts with links of 100 Mbit/s; skipped in words where they cannot be had."""
    can = call_script("check")
    if can.returncode != 0:
        pytest.skip(f"no hosts can be made here: {can.stderr.strip()}")
    call_script("down")
    made = call_script("up", "2", "100mbit")
    assert made.returncode == 0, made.stderr
    try:
        yield Hosts(tmp_path)
    finally:
        call_script("down")


def run_on(hosts, *options):
    """The table of a short run of the example, four ranks on both hosts."""
    child = hosts.start(*NETWORK, *warm_script(SCRIPT, "--seconds", "4", *options, frameworks=True))
    stdout, stderr = child.communicate(timeout=100)
    assert child.returncode == 0, stderr
    return table_of(Finished(0, stdout, stderr, 0.0, 0.0, timed_out=False, left=()))


@pytest.mark.nightly
def test_fast_ranks_keep_their_speed_beside_a_straggler_on_the_other_host(slow_hosts):
    """At least 80 % of their steps, where ranks that wait keep a tenth."""
    (equal,) = run_on(slow_hosts, "--slower", "1", "--methods", "win_put")["steps per second"]
    table = run_on(slow_hosts, "--methods", "adapt_then_combine", "win_put")
    waiting, free = map(number, table["steps per second"])
    assert free >= 0.8 * number(equal)
    assert waiting < 0.4 * free
    assert not slow_hosts.wait_until_gone(5.0)
