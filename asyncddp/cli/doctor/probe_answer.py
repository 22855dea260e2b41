"""Prints and finds the JSON line by which a child process of ``asyncddp doctor`` answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

_MARK = "asyncddp-probe: "


def print_answer(answer: Mapping[str, Any]) -> None:
    """Print an answer, from the child process."""
    sys.stdout.write(f"{_MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def find_answer(output: str) -> dict[str, Any] | None:
    """Find the answer in what a child process has printed; None if there is none."""
    for line in output.splitlines():
        _, mark, data = line.partition(_MARK)
        if mark:
            answer: dict[str, Any] = json.loads(data)
            return answer
    return None
