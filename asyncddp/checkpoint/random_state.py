"""State of the random generators of torch, Python and NumPy, as bytes for any file format."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncddp.tensors.byte_views import from_bytes


def random_state() -> dict[str, bytes]:
    """Return the random state of this process's generators and of the current GPU."""
    name, keys, *rest = np.random.get_state()
    found = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": json.dumps(random.getstate()).encode(),
        "numpy": json.dumps([name, np.asarray(keys).tolist(), *rest]).encode(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


def decoded_random_state(saved: Mapping[str, bytes]) -> dict[str, Any]:
    """Decode a :func:`random_state`, and test it on temporary generators.

    A damaged state raises one of ``FILE_ERRORS``.
    """
    version, internal, gauss = json.loads(saved["python"])
    name, keys, *rest = json.loads(saved["numpy"])
    found: dict[str, Any] = {
        "torch": from_bytes(saved["torch"], torch.uint8, (len(saved["torch"]),)),
        "python": (version, tuple(internal), gauss),
        "numpy": (name, np.array(keys, dtype=np.uint32), *rest),
    }
    torch.Generator().set_state(found["torch"])
    random.Random().setstate(found["python"])
    np.random.RandomState().set_state(found["numpy"])
    if "cuda" in saved and torch.cuda.is_available():
        found["cuda"] = from_bytes(saved["cuda"], torch.uint8, (len(saved["cuda"]),))
        torch.Generator("cuda").set_state(found["cuda"])
    return found


def restore_random_state(decoded: Mapping[str, Any]) -> None:
    """Set the generators to a :func:`decoded_random_state`, including a GPU's if present."""
    torch.set_rng_state(decoded["torch"])
    random.setstate(decoded["python"])
    np.random.set_state(decoded["numpy"])
    if "cuda" in decoded:
        torch.cuda.set_rng_state(decoded["cuda"])
