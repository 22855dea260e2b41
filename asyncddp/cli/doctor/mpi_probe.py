"""Child process of ``asyncddp doctor`` that loads MPI and torch, and reports on them as JSON.

It reports on this machine; where it was started on several ranks, with the argument ``ranks``, rank
0 reports the transport between each two of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from asyncddp.cli.doctor.machine_checks import list_gpus
from asyncddp.cli.doctor.package_checks import torch_cuda_version
from asyncddp.errors import EnvironmentProblem

_MARK = "asyncddp-probe: "


def print_answer(answer: Mapping[str, Any]) -> None:
    """Print the probe's answer as a marked line, which :func:`find_answer` parses."""
    click.echo(f"{_MARK}{json.dumps(answer)}")


def find_answer(output: str) -> dict[str, Any] | None:
    """Parse the answer from a child process's output; None if there is none."""
    for line in output.splitlines():
        _, mark, data = line.partition(_MARK)
        if mark:
            return dict(json.loads(data))
    return None


def _list_devices() -> list[str]:
    return ["cpu", "cuda"] if list_gpus() and torch_cuda_version() else ["cpu"]


def _report_machine() -> None:
    answer: dict[str, Any] = {"mpi": _describe_mpi(), **_describe_c10d(), "routes": []}
    if "c10d_problem" not in answer:
        from asyncddp.transport import C10D, DEFAULT_TRANSPORT
        from asyncddp.transport.selection import select_route

        devices, by_mpi = _list_devices(), "problem" not in answer["mpi"]
        rows = _list_device_transports() if "cuda" in devices else []
        used = [row["transport"] for row in rows if row["state"] == "in use"]
        answer["routes"] = [
            dataclasses.asdict(select_route(device, same_machine, transport, used))
            for transport in ([DEFAULT_TRANSPORT] if by_mpi else []) + [C10D]
            for device in devices
            for same_machine in (True, False)
        ]
        answer["device_transports"] = rows
    print_answer(answer)


def _describe_mpi() -> dict[str, Any]:
    try:
        from asyncddp.transport.mpi.runtime import describe_mpi
    except (ImportError, EnvironmentProblem) as problem:
        return {"problem": str(problem)}
    return describe_mpi()


def _describe_c10d() -> dict[str, Any]:
    """Describe the torch.distributed world announced by the environment, if any."""
    try:
        from asyncddp.environments.launchers import torch_world

        world = torch_world()
    except (ImportError, EnvironmentProblem) as problem:
        return {"c10d_problem": str(problem)}
    return {"announced": f"{world.command}, rank {world.rank} of {world.size}" if world else ""}


def _list_device_transports() -> list[dict[str, Any]]:
    from asyncddp.config import Config
    from asyncddp.transport.cuda.device_transport_selection import parse_transport_names
    from asyncddp.transport.cuda.negotiation import detect_capabilities
    from asyncddp.transport.selection import list_device_transports

    names = parse_transport_names(Config.from_environment().device_transports)
    rows = list_device_transports(detect_capabilities(0, 0, 0), names)
    return [dataclasses.asdict(row) for row in rows]


def _report_ranks() -> None:
    import asyncddp
    from asyncddp.ops.object_collectives import gather_records

    asyncddp.init()
    me = {
        "rank": asyncddp.rank(),
        "host": socket.gethostname(),
        "machine": asyncddp.machine_rank(),
        "devices": _list_devices(),
        "GPU": _describe_gpu(asyncddp.current().default_gpu),
    }
    ranks = gather_records(me, dict[str, Any], "doctor")
    if asyncddp.rank() == 0:
        context = asyncddp.current()
        used = context.device_choice.transport.split("+")
        print_answer({"ranks": ranks, "routes": _rank_pairs(ranks, context.transport.name, used)})
    asyncddp.shutdown()


def _describe_gpu(index: int | None) -> str:
    return "none" if index is None else f"{index} of {len(list_gpus())} by local_rank"


def _rank_pairs(
    ranks: Sequence[Mapping[str, Any]], transport: str, device_transports: Sequence[str]
) -> list[dict[str, Any]]:
    from asyncddp.transport.selection import select_route

    found = []
    for one, other in itertools.combinations(ranks, 2):
        for device in one["devices"]:
            if device in other["devices"]:
                near = one["machine"] == other["machine"]
                row = select_route(device, near, transport, device_transports)
                pair = f"{one['rank']} and {other['rank']}"
                found.append({"ranks": pair, **dataclasses.asdict(row)})
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["ranks"]:
        _report_ranks()
    else:
        _report_machine()
