"""Packs the libraries of UCX out of its wheel, to carry them along, and unpacks them."""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_UCX = ("libucm.so.0", "libucp.so.0", "libucs.so.0", "libuct.so.0", "libucs_signal.so.0")
_UCX_FOR_CUDA = ("libucm_cuda.so.0", "libuct_cuda.so.0", "libuct_cma.so.0")
_PLACES = {
    **{f"libucx/lib/{name}": f"ucx/{name}" for name in _UCX},
    **{f"libucx/lib/ucx/{name}": f"ucx/ucx/{name}" for name in _UCX_FOR_CUDA},
}
"""Where the libraries lie in their wheel, and where they are unpacked."""
_NCCL = "libnccl.so.2"  # where somebody has brought one


def pack(wheels: Path, folder: Path) -> None:
    """Pack the libraries of wheels, without their symbols where ``strip`` is there."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as opened, tempfile.TemporaryDirectory() as made:
            for name in _PLACES.keys() & set(opened.namelist()):
                library = Path(opened.extract(name, made))
                if shutil.which("strip"):
                    subprocess.run(["strip", "--strip-debug", str(library)], check=True)
                packed = folder / f"{_PLACES[name]}.xz"
                packed.parent.mkdir(parents=True, exist_ok=True)
                packed.write_bytes(lzma.compress(library.read_bytes(), preset=3))


def unpack(folder: Path, to: Path) -> None:
    """Unpack what :func:`pack` has packed, where it is there."""
    for place in (*_PLACES.values(), _NCCL):
        packed, library = folder / f"{place}.xz", to / place
        if packed.exists() and not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_bytes(lzma.decompress(packed.read_bytes()))


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](*map(Path, sys.argv[2:]))
