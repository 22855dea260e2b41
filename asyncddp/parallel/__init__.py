"""DecentralizedDataParallel, a model wrapper that trains in its backward pass, and a sampler."""

from asyncddp.parallel.decentralized_data_parallel import DecentralizedDataParallel
from asyncddp.parallel.random_batch_sampler import LocalStepRandomBatchSampler

__all__ = ["DecentralizedDataParallel", "LocalStepRandomBatchSampler"]
