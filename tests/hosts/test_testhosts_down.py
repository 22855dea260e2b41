"""Our script that makes hosts takes everything down again."""

import subprocess

import pytest

from tests.hosts.namespaces import SCRIPT, call_script

pytestmark = pytest.mark.hosts


def test_it_can_be_taken_down_twice_and_made_again_even_with_processes_left():
    """testhosts down kills processes on hosts and leaves no namespace or link."""
    can = call_script("check")
    if can.returncode != 0:
        pytest.skip(f"no hosts can be made here: {can.stderr.strip()}")
    for _ in range(2):
        assert call_script("up", "1").returncode == 0
        command = [str(SCRIPT), "h1", "echo started; exec sleep 300"]
        left = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert left.stdout.readline() == "started\n"
        assert call_script("down").returncode == 0
        assert left.wait(timeout=10) == -9
        left.stdout.close()
        assert call_script("down").returncode == 0
    for command in (["ip", "netns", "list"], ["ip", "link", "show"]):
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "asyncddp" not in shown


def test_a_link_has_the_rate_that_was_asked_for_or_none():
    """tc's own words; a packet is never larger than the burst, or tbf would cut it up."""
    can = call_script("check")
    if can.returncode != 0:
        pytest.skip(f"no hosts can be made here: {can.stderr.strip()}")
    show = ["tc", "-n", "asyncddp-h1", "qdisc", "show", "dev", "e0"]
    try:
        for rate, seen in (("100mbit", "rate 100Mbit burst 64Kb"), ("unlimited", "noqueue")):
            assert call_script("up", "1", rate).returncode == 0
            assert seen in subprocess.run(show, capture_output=True, text=True, check=True).stdout
    finally:
        call_script("down")
