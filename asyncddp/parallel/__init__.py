"""DecentralizedDataParallel, a model wrapper that trains in its backward pass."""

from asyncddp.parallel.decentralized_data_parallel import DecentralizedDataParallel

__all__ = ["DecentralizedDataParallel"]
