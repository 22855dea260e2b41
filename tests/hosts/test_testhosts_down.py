"""Our script that makes hosts takes everything down again."""

import subprocess

import pytest
from namespaces import SCRIPT, call_script

pytestmark = pytest.mark.hosts


def test_it_can_be_taken_down_twice_and_made_again_even_with_processes_left():
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
