"""What a process with MPI and torch says of them, as JSON: the part of the doctor that needs both.

``python -m asyncddp.launch.probe`` speaks for this machine; started on several ranks with
``ranks``, rank 0 shows what carries tensors between each two of them.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.doctor.machine_findings import gpus
from asyncddp.launch.doctor.package_findings import torch_cuda

__all__ = ["MARK", "main"]

MARK = "asyncddp-probe: "


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def _devices() -> list[str]:
    return ["cpu", "cuda"] if gpus() and torch_cuda() else ["cpu"]


def _alone() -> None:
    try:
        from asyncddp.transport.mpi_library import facts
        from asyncddp.transport.routes import explain
    except (ImportError, EnvironmentProblem) as problem:
        _say({"mpi": {"problem": str(problem)}, "routes": []})
        return
    devices = _devices()
    rows = [dataclasses.asdict(row) for row in explain(devices)]
    wires = _device_wires() if "cuda" in devices else []
    _say({"mpi": facts(), "routes": rows, "device_wires": wires})


def _device_wires() -> list[dict[str, Any]]:
    """What could carry tensors on GPUs, and why not."""
    from asyncddp.config import Config
    from asyncddp.transport.device_agreement import own_facts, wires_of
    from asyncddp.transport.routes import explain_device_wires

    asked = Config.from_environment().device_wires
    rows = explain_device_wires(own_facts(0, 0, 0), wires_of(asked) if asked else ())
    return [dataclasses.asdict(row) for row in rows]


def _on_ranks() -> None:
    import asyncddp
    from asyncddp.ops.objects import gather_records

    asyncddp.init()
    me = {
        "rank": asyncddp.rank(),
        "host": socket.gethostname(),
        "machine": asyncddp.machine_rank(),
        "devices": _devices(),
        "GPU": _gpu(asyncddp.local_rank()),
    }
    ranks = gather_records(me, dict[str, Any], "doctor")
    if asyncddp.rank() == 0:
        _say({"ranks": ranks, "routes": _pairs(ranks)})
    asyncddp.shutdown()


def _gpu(local_rank: int) -> str:
    """Which GPU a rank takes where the user follows the advice of the documentation."""
    from asyncddp.transport.device_routes import device_index

    visible = len(gpus()) if torch_cuda() else 0
    index = device_index(local_rank, visible)
    return "none" if index is None else f"{index} of {visible} by local_rank"


def _pairs(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The routes between each two ranks."""
    from asyncddp.transport.routes import route

    found = []
    for one in ranks:
        for other in ranks[one["rank"] + 1 :]:
            for device in one["devices"]:
                if device in other["devices"]:
                    row = route(device, one["machine"] == other["machine"])
                    pair = f"{one['rank']} and {other['rank']}"
                    found.append({"ranks": pair, **dataclasses.asdict(row)})
    return found


def main(words: Sequence[str]) -> None:
    """Answer for this machine, or as one of several ranks."""
    if list(words) == ["ranks"]:
        _on_ranks()
    else:
        _alone()


if __name__ == "__main__":
    main(sys.argv[1:])
