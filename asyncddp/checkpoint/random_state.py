"""State of the random generators of torch, Python and NumPy, as bytes that any file can hold."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from asyncddp.tensors.allocation import make_tensor


def random_state() -> dict[str, bytes]:
    """Return the state of this process's generators, and of the GPU in use."""
    name, keys, *rest = np.random.get_state()
    found = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": json.dumps(random.getstate()).encode(),
        "numpy": json.dumps([name, np.asarray(keys).tolist(), *rest]).encode(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


def restore_random_state(saved: dict[str, bytes]) -> None:
    """Give the generators a state of :func:`random_state`; that of a GPU where there is one."""
    torch.set_rng_state(make_tensor(list(saved["torch"]), torch.uint8))
    version, internal, gauss = json.loads(saved["python"])
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = json.loads(saved["numpy"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(make_tensor(list(saved["cuda"]), torch.uint8))
