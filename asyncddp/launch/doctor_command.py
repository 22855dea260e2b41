"""``asyncddp doctor``: what this machine has, and what to install or change."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from asyncddp.launch.doctor import Finding
from asyncddp.launch.doctor.machine_findings import gpus, machine_findings, mixed_devices
from asyncddp.launch.doctor.mpi_findings import cuda_awareness, find_launcher, library_findings
from asyncddp.launch.doctor.package_findings import package_findings, torch_cuda
from asyncddp.launch.doctor.self_test import self_test, self_test_finding
from asyncddp.launch.options import where_options

__all__ = ["doctor_command"]

_MARK = "asyncddp-probe: "
_VERDICT = "asyncddp run: "
_PATIENCE = 120.0  # seconds for importing torch and starting MPI on a slow file system


@click.command(
    "doctor",
    short_help="Show what this machine has, and what to install or change.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@where_options
@click.option("--check", is_flag=True, help="Try each wire out: 2 ranks, or those of -np or hosts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(check: bool, as_json: bool, **where: Any) -> None:
    """Show what this machine has for training on many ranks, and what is missing.

    With -np or hosts it also starts ranks there and shows what carries tensors between them. With
    --check it has ranks call every verb over each wire. Ends with 1 where something is missing
    without which ranks cannot run, and where a wire fails.
    """
    report = _examine(where, check=check)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report)
    bad = any(finding["level"] == "bad" for finding in report["findings"])
    sys.exit(int(bad))


def _examine(where: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Everything that is known, as plain data."""
    environment = dict(os.environ)
    found_gpus = gpus()
    launcher, about_launcher = find_launcher(where["launcher"], environment)
    answer = _ask([sys.executable, "-m", "asyncddp.launch.probe"])
    if launcher is not None:
        answer["mpi"].setdefault("cuda_aware", cuda_awareness(launcher.executable))
    findings = [
        about_launcher,
        *library_findings(answer["mpi"], launcher, bool(found_gpus)),
        *package_findings(bool(found_gpus)),
        *machine_findings(environment, found_gpus),
    ]
    report: dict[str, Any] = {"routes": answer.get("routes", []), "pairs": [], "ranks": []}
    report["device_wires"] = answer.get("device_wires", [])
    report["self_test"] = []
    given = any(where[key] for key in ("num_proc", "hosts", "hostfile"))
    if launcher is not None and given:
        there = _on_ranks([*_options(where), *_PROBE])
        if "ranks" in there:
            report.update(ranks=there["ranks"], pairs=there["routes"])
            findings += mixed_devices(there["ranks"])
        else:
            findings.insert(1, _no_ranks(there["mpi"]["problem"]))
    if launcher is not None and check:
        there_are = _options(where if given else {**where, "num_proc": _CHECKED_RANKS})
        has_gpus = bool(found_gpus) and torch_cuda() is not None
        report["self_test"] = self_test(_on_ranks, there_are, has_gpus=has_gpus)
        findings.append(self_test_finding(report["self_test"]))
    report["findings"] = [dataclasses.asdict(finding) for finding in findings]
    return report


_CHECKED_RANKS = 2
_PROBE = ("-m", "asyncddp.launch.probe", "ranks")


def _no_ranks(problem: str) -> Finding:
    advice = f"Starting ranks ended with: {problem}"
    return Finding("MPI", "ranks", "could not be started", advice, "bad")


def _options(where: dict[str, Any]) -> list[str]:
    """The options of ``asyncddp run`` that say where; ours have the same names."""
    given = {name: value for name, value in where.items() if value is not None}
    return [word for n, v in given.items() for word in (f"--{n.replace('_', '-')}", str(v))]


def _on_ranks(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    patience: float = _PATIENCE,
) -> dict[str, Any]:
    """What ``asyncddp run`` with these words says."""
    return _ask([sys.executable, "-m", "asyncddp", "run", *words], environment, patience)


def _ask(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    patience: float = _PATIENCE,
) -> dict[str, Any]:
    """What a program of ours says on its marked line; its silence is a ``problem`` too."""
    try:
        answer = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=patience,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"mpi": {"problem": f"no answer in {patience:.0f} s from {' '.join(command)}"}}
    for line in answer.stdout.splitlines():
        _, mark, data = line.partition(_MARK)
        if mark:
            said: dict[str, Any] = json.loads(data)
            return said
    said_last = answer.stderr.strip().splitlines()[-1:] or [f"exit code {answer.returncode}"]
    verdicts = [line for line in answer.stderr.splitlines() if line.startswith(_VERDICT)]
    return {"mpi": {"problem": (verdicts or said_last)[0].removeprefix(_VERDICT)}}


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console

    from asyncddp.launch.doctor.show import show_findings, show_rows

    width = None if sys.stdout.isatty() else max(100, shutil.get_terminal_size().columns)
    console = Console(highlight=False, width=width)
    show_findings(console, [Finding(**finding) for finding in report["findings"]])
    show_rows(console, "What carries a tensor", report["routes"])
    show_rows(console, "Wires for tensors on GPUs", report["device_wires"])
    show_rows(console, "Ranks", report["ranks"])
    show_rows(console, "What carries a tensor between these ranks", report["pairs"])
    show_rows(console, "Self-test", report["self_test"])
