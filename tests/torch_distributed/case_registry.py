"""Cases that run on any backend: functions of no argument that return tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

Case = Callable[[], list[torch.Tensor]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function
