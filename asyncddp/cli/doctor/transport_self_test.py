"""Self-test of each transport: starts ranks that call every operation, and checks the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncddp.cli.doctor.check_result import CheckResult
from asyncddp.environments.rank_process_marker import environment_of_children

HOST_TRANSPORTS = ("shared_memory", "mpi", "c10d")
_NEED_MPI = ("shared_memory", "mpi", "mpi_cuda")
DEVICE_TRANSPORTS = ("cuda_staged", "cuda_ipc", "mpi_cuda", "nccl")
LIMIT = 100.0
"""Seconds for each transport, the start of the ranks included."""

_WAIT = "30"  # seconds that a rank waits for another
_PROGRAM = ("-m", "asyncddp.testing.self_test")

Ask = Callable[[Sequence[str], Mapping[str, str], float], Mapping[str, Any]]
"""Runs a module with arguments, variables and a timeout, and returns the answer."""


def self_test(
    ask: Ask, where: Sequence[str], *, has_gpus: bool, has_mpi: bool = True
) -> list[dict[str, Any]]:
    """Test each transport on ranks started by ``ask`` with the arguments ``where``.

    Returns rows with ``transport``, ``device``, ``result`` (``passed``, ``failed`` or ``not run``)
    and ``what`` (details in words).
    """
    tests = [(name, "cpu", "ASYNCDDP_TRANSPORT") for name in HOST_TRANSPORTS]
    tests += [(name, "cuda", "ASYNCDDP_DEVICE_TRANSPORTS") for name in DEVICE_TRANSPORTS]
    rows = []
    for transport, device, variable in tests:
        if device == "cuda" and not has_gpus:
            result, what = "not run", "no GPU, or a torch that cannot use it"
        elif transport in _NEED_MPI and not has_mpi:
            result, what = "not run", "no MPI launcher"
        else:
            result, what = _test_transport(ask, where, transport, device, variable)
        rows.append({"transport": transport, "device": device, "result": result, "what": what})
    return rows


def _test_transport(
    ask: Ask, where: Sequence[str], transport: str, device: str, variable: str
) -> tuple[str, str]:
    start = time.monotonic()
    words = [*where, "--timeout", f"{LIMIT:.0f}", *_PROGRAM, device]
    environment = {**environment_of_children(), "ASYNCDDP_TIMEOUT": _WAIT, variable: transport}
    answer = ask(words, environment, LIMIT + 20)
    if "checks" not in answer:
        return "failed", str(answer["mpi"]["problem"])
    if device == "cuda" and answer["device_transport"] != transport:
        chosen = f"the ranks chose {answer['device_transport']}"
        result = "failed" if transport in answer["failed"] else "not run"
        return result, answer["refused"].get(transport, chosen)
    if answer["problems"]:
        first, more = answer["problems"][0], len(answer["problems"]) - 1
        return "failed", f"{first} (and {more} more)" if more else first
    seconds = time.monotonic() - start
    return "passed", f"{answer['checks']} checks on {answer['ranks']} ranks in {seconds:.0f} s"


def summarise_self_test(rows: Sequence[Mapping[str, Any]]) -> CheckResult:
    """Summarise the self-test as one result: ``bad`` if any transport failed."""
    failed = [row["transport"] for row in rows if row["result"] == "failed"]
    passed = [row["transport"] for row in rows if row["result"] == "passed"]
    if not failed:
        return CheckResult("Self-test", "transports", f"passed: {', '.join(passed)}")
    advice = (
        f"The table of the self-test says what {' and '.join(failed)} did. asyncddp run -np 2 "
        f"{' '.join(_PROGRAM)} cpu (or cuda) shows all that the ranks wrote; ASYNCDDP_TRANSPORT "
        "and ASYNCDDP_DEVICE_TRANSPORTS choose another transport."
    )
    return CheckResult("Self-test", "transports", f"failed: {', '.join(failed)}", advice, "bad")
