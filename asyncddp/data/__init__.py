"""Data loading on several ranks: partitions, samplers and loaders that divide a data set.

Here belong partitions (lists of indices, made by numpy alone), samplers and loaders. Users call
them; samplers and loaders ask for the rank when they are made. Nothing here communicates: ranks
draw the same shares from a common seed.
"""

from asyncddp.data import partition as partition
from asyncddp.data.data_loader import DataLoaderShard as DataLoaderShard
from asyncddp.data.data_loader import prepare_data_loader as prepare_data_loader
from asyncddp.data.load_balancing_sampler import (
    LoadBalancingDistributedBatchSampler as LoadBalancingDistributedBatchSampler,
)
from asyncddp.data.load_balancing_sampler import (
    LoadBalancingDistributedSampler as LoadBalancingDistributedSampler,
)
from asyncddp.data.random_batch_sampler import (
    LocalStepRandomBatchSampler as LocalStepRandomBatchSampler,
)
from asyncddp.data.stateful_sampler import StatefulDistributedSampler as StatefulDistributedSampler
