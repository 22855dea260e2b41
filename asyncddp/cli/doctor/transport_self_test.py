"""Self-test of each transport: starts ranks that call every operation over it and check results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncddp.cli.doctor.check_result import CheckResult

HOST_TRANSPORTS = ("shared_memory", "mpi")
DEVICE_TRANSPORTS = ("cuda_staged", "cuda_ipc", "mpi_cuda", "nccl")
LIMIT = 100.0
"""Seconds for each transport, the start of the ranks included."""

_WAIT = "30"  # seconds that a rank waits for another
_PROGRAM = ("-m", "asyncddp.testing.self_test")

Ask = Callable[[Sequence[str], Mapping[str, str], float], Mapping[str, Any]]
"""Runs ``asyncddp run`` with arguments, variables and a timeout, and returns the answer."""


def self_test(ask: Ask, where: Sequence[str], *, has_gpus: bool) -> list[dict[str, Any]]:
    """Test each transport, one after the other.

    Args:
        ask: Function that starts ranks.
        where: Arguments of ``asyncddp run`` for the number of ranks and their hosts.
        has_gpus: Whether there are GPUs, and a torch that can use them.

    Returns:
        For each transport ``wire`` (its name), ``device``, ``result`` (``passed``, ``failed`` or
        ``not run``) and ``what`` (details in words).
    """
    rows = [
        _test_transport(ask, where, transport, "cpu", {"ASYNCDDP_TRANSPORT": transport})
        for transport in HOST_TRANSPORTS
    ]
    for transport in DEVICE_TRANSPORTS:
        if has_gpus:
            rows.append(
                _test_transport(ask, where, transport, "cuda", {"ASYNCDDP_DEVICE_WIRES": transport})
            )
        else:
            rows.append(
                _make_row(transport, "cuda", "not run", "no GPU, or a torch that cannot use it")
            )
    return rows


def _make_row(transport: str, device: str, result: str, what: str) -> dict[str, Any]:
    return {"transport": transport, "device": device, "result": result, "what": what}


def _test_transport(
    ask: Ask, where: Sequence[str], transport: str, device: str, variables: Mapping[str, str]
) -> dict[str, Any]:
    start = time.monotonic()
    words = [*where, "--timeout", f"{LIMIT:.0f}", *_PROGRAM, device]
    answer = ask(words, {**os.environ, "ASYNCDDP_TIMEOUT": _WAIT, **variables}, LIMIT + 20)
    if "checks" not in answer:
        return _make_row(transport, device, "failed", str(answer["mpi"]["problem"]))
    if device == "cuda" and answer["device_transport"] != transport:
        reason = answer["refused"].get(transport, f"the ranks chose {answer['device_transport']}")
        return _make_row(transport, device, "not run", reason)
    if answer["problems"]:
        more = len(answer["problems"]) - 1
        first = answer["problems"][0]
        return _make_row(
            transport, device, "failed", f"{first} (and {more} more)" if more else first
        )
    seconds = time.monotonic() - start
    return _make_row(
        transport,
        device,
        "passed",
        f"{answer['checks']} checks on {answer['ranks']} ranks in {seconds:.0f} s",
    )


def summarise_self_test(rows: Sequence[Mapping[str, Any]]) -> CheckResult:
    """Summarise the self-test in one result, ``bad`` where a transport failed."""
    failed = [row["transport"] for row in rows if row["result"] == "failed"]
    passed = [row["transport"] for row in rows if row["result"] == "passed"]
    if not failed:
        return CheckResult("Self-test", "wires", f"passed: {', '.join(passed)}")
    advice = (
        f"The table of the self-test says what {' and '.join(failed)} did. asyncddp run -np 2 "
        f"{' '.join(_PROGRAM)} cpu (or cuda) shows all that the ranks wrote; ASYNCDDP_TRANSPORT "
        "and ASYNCDDP_DEVICE_WIRES choose another wire."
    )
    return CheckResult("Self-test", "wires", f"failed: {', '.join(failed)}", advice, "bad")
