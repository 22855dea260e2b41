"""Runs an installation's self-test as one rank: ``python -m asyncddp.testing.self_test cpu``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

import asyncddp as bf
from asyncddp.cli.doctor.mpi_probe import print_answer
from asyncddp.errors import EnvironmentProblem
from asyncddp.ops.object_collectives import gather_records
from asyncddp.testing.self_test.verb_checks import CHECKS, problems
from asyncddp.transport.cuda.capabilities import default_device_index


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    index = default_device_index(bf.local_rank(), torch.cuda.device_count())
    if index is None:
        raise EnvironmentProblem(
            f"rank {bf.rank()} sees no GPU; look at CUDA_VISIBLE_DEVICES and nvidia-smi there"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def main(words: Sequence[str]) -> None:
    """Run the checks on this rank; rank 0 prints the results of all ranks."""
    if list(words) not in (["cpu"], ["cuda"]):
        sys.exit("usage: python -m asyncddp.testing.self_test cpu|cuda")
    bf.init()
    start = time.monotonic()
    found = gather_records(problems(_device(words[0])), list[str], "self-test")
    if bf.rank() == 0:
        choice = bf.current().device_choice
        answer = {
            "ranks": bf.size(),
            "checks": len(CHECKS),
            "problems": [problem for rank in found for problem in rank],
            "device_transport": choice.transport,
            "refused": dict(choice.refused),
            "seconds": time.monotonic() - start,
        }
        print_answer(answer)
    bf.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
