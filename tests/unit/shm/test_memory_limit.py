"""Memory that a machine or a container has."""

from __future__ import annotations

import os

import pytest

from asyncddp.shm import memory_limit as module


@pytest.mark.parametrize(("text", "limit"), [("max\n", None), ("1048576\n", 1 << 20), (None, None)])
def test_a_container_s_limit_is_the_memory_that_there_is(monkeypatch, tmp_path, text, limit):
    """Without a limit, and without a file that could have one, it is the machine's memory."""
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(module, "_LIMIT", file)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert module.memory_limit() == (limit or physical)
