r"""Train PyTorch models on many processes without a central average.

Every rank mixes its parameters with a few neighbours over a virtual graph,
:math:`x_i \leftarrow \sum_j w_{ij} x_j`. The public names are loaded on first use; the stub beside
this file lists them.
"""

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load a public name on first use.

    Raises:
        AttributeError: There is none of that name; the nearest is named.
    """
    if name in __all__:
        return _load(name)
    from asyncddp.registry import nearest

    hint = "" if name.startswith("_") else nearest(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
