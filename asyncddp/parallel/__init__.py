"""DecentralizedDataParallel, a model wrapper that trains in its backward pass.

This package holds the wrapper and its buckets. Users call it, and so do Bagua's names. Each bucket
has an optimizer of the user's own kind for the bucket's parameters.
"""

from asyncddp.parallel.decentralized_data_parallel import DecentralizedDataParallel

__all__ = ["DecentralizedDataParallel"]
