"""Each wire tried out: ranks are started on it, call every verb and look at what comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncddp.launch.doctor.finding import Finding

__all__ = ["DEVICE_WIRES", "HOST_WIRES", "LIMIT", "self_test", "self_test_finding"]

HOST_WIRES = ("shared_memory", "mpi")
DEVICE_WIRES = ("cuda_staged", "cuda_ipc", "mpi_cuda", "nccl")
LIMIT = 100.0
"""Seconds for each wire, the start of the ranks included."""

_WAIT = "30"  # seconds that a rank waits for another
_PROGRAM = ("-m", "asyncddp.self_test")

Ask = Callable[[Sequence[str], Mapping[str, str], float], Mapping[str, Any]]
"""Runs words of ``asyncddp run`` with these variables, for so long, and gives the answer."""


def self_test(ask: Ask, where: Sequence[str], *, has_gpus: bool) -> list[dict[str, Any]]:
    """Try each wire out, one after the other.

    Args:
        ask: Starts ranks.
        where: Options of ``asyncddp run`` that say how many ranks there are, and where.
        has_gpus: Whether there are GPUs, and a torch that can use them.

    Returns:
        For each wire ``wire``, ``device``, ``result`` (``passed``, ``failed`` or ``not run``) and
        ``what`` came of it, in words.
    """
    rows = [_try(ask, where, wire, "cpu", {"ASYNCDDP_TRANSPORT": wire}) for wire in HOST_WIRES]
    for wire in DEVICE_WIRES:
        if has_gpus:
            rows.append(_try(ask, where, wire, "cuda", {"ASYNCDDP_DEVICE_WIRES": wire}))
        else:
            rows.append(_row(wire, "cuda", "not run", "no GPU, or a torch that cannot use it"))
    return rows


def _row(wire: str, device: str, result: str, what: str) -> dict[str, Any]:
    return {"wire": wire, "device": device, "result": result, "what": what}


def _try(
    ask: Ask, where: Sequence[str], wire: str, device: str, variables: Mapping[str, str]
) -> dict[str, Any]:
    start = time.monotonic()
    words = [*where, "--timeout", f"{LIMIT:.0f}", *_PROGRAM, device]
    answer = ask(words, {**os.environ, "ASYNCDDP_TIMEOUT": _WAIT, **variables}, LIMIT + 20)
    if "checks" not in answer:
        return _row(wire, device, "failed", str(answer["mpi"]["problem"]))
    if device == "cuda" and answer["device_wire"] != wire:
        reason = answer["refused"].get(wire, f"the ranks chose {answer['device_wire']}")
        return _row(wire, device, "not run", reason)
    if answer["problems"]:
        more = len(answer["problems"]) - 1
        first = answer["problems"][0]
        return _row(wire, device, "failed", f"{first} (and {more} more)" if more else first)
    seconds = time.monotonic() - start
    return _row(
        wire,
        device,
        "passed",
        f"{answer['checks']} checks on {answer['ranks']} ranks in {seconds:.0f} s",
    )


def self_test_finding(rows: Sequence[Mapping[str, Any]]) -> Finding:
    """The self-test in one line; ``bad`` where a wire failed."""
    failed = [row["wire"] for row in rows if row["result"] == "failed"]
    passed = [row["wire"] for row in rows if row["result"] == "passed"]
    if not failed:
        return Finding("Self-test", "wires", f"passed: {', '.join(passed)}")
    advice = (
        f"The table of the self-test says what {' and '.join(failed)} did. asyncddp run -np 2 "
        f"{' '.join(_PROGRAM)} cpu (or cuda) shows all that the ranks wrote; ASYNCDDP_TRANSPORT "
        "and ASYNCDDP_DEVICE_WIRES choose another wire."
    )
    return Finding("Self-test", "wires", f"failed: {', '.join(failed)}", advice, "bad")
