"""DecentralizedDataParallel, a model wrapper that trains in its backward pass.

Here belong the wrapper and its buckets. Users and Bagua's names call it. A step of a bucket is the
user's own optimizer, restricted to the bucket's parameters.
"""

from asyncddp.parallel.decentralized_data_parallel import DecentralizedDataParallel

__all__ = ["DecentralizedDataParallel"]
