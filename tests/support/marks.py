"""Pytest parameters of the worlds that a test runs on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from tests.support.worlds import DEFAULT_WORLDS, WORLDS

__all__ = ["WHOLE_PROGRAMS", "on", "parameters"]

WHOLE_PROGRAMS = (
    "tests/conformance/test_bagua_scripts.py",
    "tests/conformance/test_bluefog_scripts.py",
    "tests/conformance/test_compiled_models.py",
    "tests/docs/test_blocks.py",
    "tests/docs/test_extending.py",
    "tests/docs/test_site.py",
    "tests/examples/",
    "tests/gpu/",
    "tests/hosts/",
    "tests/hugging_face/",
    "tests/lightning/",
    "tests/mpi/",
    "tests/notebook/",
    "tests/scripts/test_script_gpu.py",
    "tests/slurm/",
    "tests/torch_distributed/",
)
"""Tests of programs as a user starts them, or on ranks of their own: all ``exhaustive``."""


def parameters(names: Collection[str], *, always: bool = False) -> list[Any]:
    """Pytest parameters, marked ``mpi(ranks)`` where the ranks are processes.

    The default run takes the :data:`~tests.support.worlds.DEFAULT_WORLDS` among them, or the first
    where there is none and it is of threads or two processes; others are ``exhaustive``. Four
    processes where others try the law, too, are left to ``nightly``: on few processors they take
    most of the time. An ``always`` test runs on all of its worlds in ``scripts/test all``.
    """
    names = list(names)
    cheap = [name for name in names[:1] if name.startswith("loopback") or name.endswith("-2")]
    default = [name for name in names if name in DEFAULT_WORLDS] or cheap
    found = []
    for name in names:
        transport, size = WORLDS[name]
        marks = [] if transport == "loopback" else [pytest.mark.mpi(size)]
        if name not in default:
            marks.append(pytest.mark.exhaustive)
            if transport in ("mpi", "shared_memory") and size > 2 and len(names) > 1 and not always:
                marks.append(pytest.mark.nightly)
        found.append(pytest.param(name, marks=marks, id=name))
    return found


def on(*names: str, always: bool = False) -> pytest.MarkDecorator:
    """Run a test that takes ``world`` on these worlds only.

    Args:
        *names: Names of :data:`tests.support.worlds.WORLDS`, or of a transport, for all its worlds.
        always: True to run on four processes of each, too, for the laws of the transports.
    """
    chosen = [
        world for world, (transport, _) in WORLDS.items() if world in names or transport in names
    ]
    unknown = set(names) - set(WORLDS) - {transport for transport, _ in WORLDS.values()}
    if unknown:
        raise ValueError(f"unknown worlds {sorted(unknown)}; known are {sorted(WORLDS)}")
    return pytest.mark.parametrize("world", parameters(chosen, always=always), indirect=True)
