r"""Training of PyTorch models on many processes, without a central average.

Every rank mixes its parameters with a few neighbours over a virtual graph,
:math:`x_i \leftarrow \sum_j w_{ij} x_j`. The public names are loaded on first use; the stub beside
this file lists them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

try:
    from asyncddp._version import __version__
except ModuleNotFoundError:  # a folder that nobody has installed
    __version__ = "0+unknown"


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disable the garbage collector while loading: it would scan all of torch's objects.

    Loading makes no garbage. ``import torch`` leaves the collector so near its next full pass,
    0.1 s, that whatever is loaded next would set it off.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def __getattr__(name: str) -> object:
    """Load a public name on first use.

    Raises:
        AttributeError: There is none of that name; the nearest is named.
    """
    if name in __all__:
        with _without_collection():
            return _load(name)
    from asyncddp.registry import nearest

    hint = "" if name.startswith("_") else nearest(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
