"""Asynchronous training over a slow link: a straggler on one host holds up nobody on the other."""

from pathlib import Path

import pytest
from namespaces import Hosts, call_script

from tests.examples.test_digits import number, table_of
from tests.support.processes import Finished

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(240)]

NETWORK = ("--network-interface", "10.77.0.0/24")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "async_digits.py")


def rate(cell):
    return number(cell.removesuffix("/s"))


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


def test_fast_ranks_keep_their_speed_beside_a_straggler_on_the_other_host(slow_hosts):
    """Four ranks on two hosts: at least 80 % of the steps, where synchronous ones keep a tenth."""
    child = slow_hosts.start(*NETWORK, EXAMPLE, "--seconds", "5", "--straggler", "3")
    stdout, stderr = child.communicate(timeout=170)
    code = child.returncode
    assert code in (0, 1), stderr
    assert "of its steps beside the straggler" not in stderr
    table = table_of(Finished(code, stdout, stderr, 0.0, 0.0, timed_out=False, left=()))
    for rank in range(3):
        _, equal, waiting, free = map(rate, table[f"rank {rank}"])
        assert free >= 0.8 * equal
        assert waiting < 0.4 * free
    assert not slow_hosts.wait_until_gone(5.0)
