r"""Train PyTorch models on many processes without a central average.

Every rank mixes its parameters with a few neighbours over a virtual graph,
:math:`x_i \leftarrow \sum_j w_{ij} x_j`. The public names are loaded on first use; the stub beside
this file lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"
