"""``asyncddp doctor``: checks MPI, packages, GPUs and limits, and advises what to change."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from asyncddp.cli.console import make_console
from asyncddp.cli.doctor.check_result import CheckResult, print_check_results, print_rows
from asyncddp.cli.doctor.machine_checks import check_machine, check_mixed_devices, list_gpus
from asyncddp.cli.doctor.mpi_checks import (
    check_launcher,
    check_mpi_library,
    check_torch_launchers,
    query_cuda_awareness,
)
from asyncddp.cli.doctor.mpi_probe import find_answer
from asyncddp.cli.doctor.package_checks import check_packages, torch_cuda_version
from asyncddp.cli.doctor.transport_self_test import self_test, summarise_self_test
from asyncddp.cli.options import placement_options
from asyncddp.environments.rank_process_marker import environment_of_children
from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.launchers.local import LOCAL

_CHECKED_RANKS = 2
_PROBE = "asyncddp.cli.doctor.mpi_probe"
_RUN = ("asyncddp", "run")
_RUN_ERROR_PREFIX = "asyncddp run: "
_TABLES = {
    "routes": "What carries a tensor",
    "device_transports": "Transports for tensors on GPUs",
    "ranks": "Ranks",
    "pairs": "What carries a tensor between these ranks",
    "self_test": "Self-test",
}
_PROBE_TIMEOUT = 120.0  # seconds for importing torch and starting MPI on a slow file system


@click.command("doctor")
@placement_options
@click.option(
    "--check", is_flag=True, help="Try each transport out: 2 ranks, or those of -np or hosts."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(check: bool, as_json: bool, **where: Any) -> None:
    """Show what this machine has for training on many ranks, and what is missing.

    With -np or hosts it also starts ranks there and shows what carries tensors between them. With
    --check it has ranks call every verb over each transport. Ends with 1 where something is missing
    without which ranks cannot run, and where a transport fails.
    """
    report = _run_checks(where, check=check)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        console = make_console(piped_width=100)
        print_check_results(console, [CheckResult(**finding) for finding in report["findings"]])
        for key, title in _TABLES.items():
            print_rows(console, title, report[key])
    sys.exit(any(finding["level"] == "bad" for finding in report["findings"]))


def _run_checks(where: dict[str, Any], *, check: bool) -> dict[str, Any]:
    environment = environment_of_children()
    found_gpus = list_gpus()
    launcher, about_launcher = check_launcher(where["launcher"], environment)
    answer = _run_module([_PROBE])
    if launcher is not None:
        answer["mpi"].setdefault("cuda_aware", query_cuda_awareness(launcher.executable))
    findings = [
        about_launcher,
        *check_mpi_library(answer["mpi"], launcher, bool(found_gpus)),
        check_torch_launchers(answer),
        *check_packages(bool(found_gpus)),
        *check_machine(environment, found_gpus),
    ]
    report: dict[str, Any] = {key: answer.get(key, []) for key in _TABLES}
    given = any(where[key] for key in ("num_proc", "hosts", "hostfile"))
    if launcher is not None and given:
        words = RunOptions(**where).to_arguments()
        there = _run_module([*_RUN, *words, "-m", _PROBE, "ranks"])
        if "ranks" in there:
            report.update(ranks=there["ranks"], pairs=there["routes"])
            findings += check_mixed_devices(there["ranks"])
        else:
            findings.insert(1, _launch_failure(there["mpi"]["problem"]))
    if launcher is not None and check:
        options = RunOptions(**where if given else {**where, "num_proc": _CHECKED_RANKS})
        has_gpus = bool(found_gpus) and torch_cuda_version() is not None
        words = (*_RUN, *options.to_arguments())
        has_mpi = launcher.launcher is not LOCAL
        report["self_test"] = self_test(_run_module, words, has_gpus=has_gpus, has_mpi=has_mpi)
        findings.append(summarise_self_test(report["self_test"]))
    report["findings"] = [dataclasses.asdict(finding) for finding in findings]
    return report


def _launch_failure(problem: str) -> CheckResult:
    advice = f"Starting ranks ended with: {problem}"
    return CheckResult("MPI", "ranks", "could not be started", advice, "bad")


def _run_module(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout: float = _PROBE_TIMEOUT,
) -> dict[str, Any]:
    """Run a Python module and parse its marked JSON line; without one, return a ``problem``."""
    command = [sys.executable, "-m", *words]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, timeout=timeout, env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"mpi": {"problem": f"no answer in {timeout:.0f} s from {' '.join(command)}"}}
    if (found := find_answer(answer.stdout)) is not None:
        return found
    said_last = answer.stderr.strip().splitlines()[-1:] or [f"exit code {answer.returncode}"]
    errors = [line for line in answer.stderr.splitlines() if line.startswith(_RUN_ERROR_PREFIX)]
    return {"mpi": {"problem": (errors or said_last)[0].removeprefix(_RUN_ERROR_PREFIX)}}
