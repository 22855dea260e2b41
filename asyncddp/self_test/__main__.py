"""One rank of a self-test: ``python -m asyncddp.self_test cpu``, or ``cuda``, on several ranks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch

import asyncddp as bf
from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.probe import MARK
from asyncddp.ops.objects import gather_records
from asyncddp.self_test.checks import CHECKS, problems
from asyncddp.transport.device_routes import device_index

__all__ = ["main"]


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    index = device_index(bf.local_rank(), torch.cuda.device_count())
    if index is None:
        raise EnvironmentProblem(
            f"rank {bf.rank()} sees no GPU; look at CUDA_VISIBLE_DEVICES and nvidia-smi there"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def main(words: Sequence[str]) -> None:
    """Run the checks on this rank; rank 0 says what came of them on all.

    Args:
        words: The kind of device, ``cpu`` or ``cuda``.
    """
    if list(words) not in (["cpu"], ["cuda"]):
        sys.exit("usage: python -m asyncddp.self_test cpu|cuda")
    bf.init()
    start = time.monotonic()
    found = gather_records(problems(_device(words[0])), list[str], "self-test")
    if bf.rank() == 0:
        choice = bf.current().device_choice
        answer = {
            "ranks": bf.size(),
            "checks": len(CHECKS),
            "problems": [problem for rank in found for problem in rank],
            "device_wire": choice.wire,
            "refused": dict(choice.refused),
            "seconds": time.monotonic() - start,
        }
        sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()
    bf.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
