"""Two hosts in network namespaces, made for these tests and always taken down again."""

import contextlib

import psutil
import pytest

from tests.hosts.namespaces import Hosts, call_script


@pytest.fixture(scope="module")
def network():
    """The hosts themselves; skipped with the script's own words where they cannot be had."""
    can = call_script("check")
    if can.returncode != 0:
        pytest.skip(f"no hosts can be made here: {can.stderr.strip()}")
    try:
        made = call_script("up", "2")
        assert made.returncode == 0, made.stderr
        yield
    finally:
        call_script("down")


@pytest.fixture
def hosts(network, tmp_path):
    del network
    made = Hosts(tmp_path)
    yield made
    for process in made.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()
