"""The public names, listed once; `__init__.py` loads each on first use."""

from . import data as data
from . import simulate as simulate
from . import topology as topology
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import ElasticState as ElasticState
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .context import Context as Context
from .context import current as current
from .context import init as init
from .context import is_initialized as is_initialized
from .context import shutdown as shutdown
from .context.mesh_context import replicas as replicas
from .context.ranks_and_topology import in_neighbor_machine_ranks as in_neighbor_machine_ranks
from .context.ranks_and_topology import in_neighbor_ranks as in_neighbor_ranks
from .context.ranks_and_topology import is_homogeneous as is_homogeneous
from .context.ranks_and_topology import load_machine_topology as load_machine_topology
from .context.ranks_and_topology import load_topology as load_topology
from .context.ranks_and_topology import local_rank as local_rank
from .context.ranks_and_topology import local_size as local_size
from .context.ranks_and_topology import machine_rank as machine_rank
from .context.ranks_and_topology import machine_size as machine_size
from .context.ranks_and_topology import out_neighbor_machine_ranks as out_neighbor_machine_ranks
from .context.ranks_and_topology import out_neighbor_ranks as out_neighbor_ranks
from .context.ranks_and_topology import rank as rank
from .context.ranks_and_topology import set_machine_topology as set_machine_topology
from .context.ranks_and_topology import set_topology as set_topology
from .context.ranks_and_topology import size as size
from .context.ranks_and_topology import view as view
from .context.user_activities import timeline_context as timeline_context
from .context.user_activities import timeline_end_activity as timeline_end_activity
from .context.user_activities import timeline_start_activity as timeline_start_activity
from .data.data_loader import DataLoaderShard as DataLoaderShard
from .data.data_loader import prepare_data_loader as prepare_data_loader
from .data.elastic_sampler import ElasticSampler as ElasticSampler
from .data.load_balancing_sampler import (
    LoadBalancingDistributedBatchSampler as LoadBalancingDistributedBatchSampler,
)
from .data.load_balancing_sampler import (
    LoadBalancingDistributedSampler as LoadBalancingDistributedSampler,
)
from .data.random_batch_sampler import LocalStepRandomBatchSampler as LocalStepRandomBatchSampler
from .data.stateful_sampler import StatefulDistributedSampler as StatefulDistributedSampler
from .engine import Handle as Handle
from .errors import ArgumentError as ArgumentError
from .errors import AsyncDDPError as AsyncDDPError
from .errors import DeadlockError as DeadlockError
from .errors import DtypeError as DtypeError
from .errors import EnvironmentProblem as EnvironmentProblem
from .errors import IsolatedError as IsolatedError
from .errors import MismatchError as MismatchError
from .errors import NonFiniteError as NonFiniteError
from .errors import NotInitializedError as NotInitializedError
from .errors import PeerError as PeerError
from .errors import PeerLeftError as PeerLeftError
from .errors import RankError as RankError
from .errors import UnknownNameError as UnknownNameError
from .errors import UsageError as UsageError
from .errors import WaitTimeoutError as WaitTimeoutError
from .membership import View as View
from .monitoring import Monitor as Monitor
from .monitoring import monitor as monitor
from .ops.allgather import allgather as allgather
from .ops.allgather import allgather_nonblocking as allgather_nonblocking
from .ops.allreduce import allreduce as allreduce
from .ops.allreduce import allreduce_ as allreduce_
from .ops.allreduce import allreduce_nonblocking as allreduce_nonblocking
from .ops.allreduce import allreduce_nonblocking_ as allreduce_nonblocking_
from .ops.allreduce import local_allreduce as local_allreduce
from .ops.allreduce import local_allreduce_ as local_allreduce_
from .ops.allreduce import local_allreduce_nonblocking as local_allreduce_nonblocking
from .ops.allreduce import local_allreduce_nonblocking_ as local_allreduce_nonblocking_
from .ops.alltoall import alltoall as alltoall
from .ops.alltoall import alltoall_ as alltoall_
from .ops.alltoall import alltoall_nonblocking as alltoall_nonblocking
from .ops.alltoall import alltoall_nonblocking_ as alltoall_nonblocking_
from .ops.barrier import barrier as barrier
from .ops.barrier import barrier_nonblocking as barrier_nonblocking
from .ops.broadcast import broadcast as broadcast
from .ops.broadcast import broadcast_ as broadcast_
from .ops.broadcast import broadcast_nonblocking as broadcast_nonblocking
from .ops.broadcast import broadcast_nonblocking_ as broadcast_nonblocking_
from .ops.empty_shared import empty_shared as empty_shared
from .ops.gather import gather as gather
from .ops.gather import gather_nonblocking as gather_nonblocking
from .ops.hierarchical_allreduce import hierarchical_allreduce as hierarchical_allreduce
from .ops.hierarchical_allreduce import hierarchical_allreduce_ as hierarchical_allreduce_
from .ops.hierarchical_allreduce import (
    hierarchical_allreduce_nonblocking as hierarchical_allreduce_nonblocking,
)
from .ops.hierarchical_allreduce import (
    hierarchical_allreduce_nonblocking_ as hierarchical_allreduce_nonblocking_,
)
from .ops.hierarchical_neighbor_allreduce import (
    hierarchical_neighbor_allreduce as hierarchical_neighbor_allreduce,
)
from .ops.hierarchical_neighbor_allreduce import (
    hierarchical_neighbor_allreduce_ as hierarchical_neighbor_allreduce_,
)
from .ops.hierarchical_neighbor_allreduce import (
    hierarchical_neighbor_allreduce_nonblocking as hierarchical_neighbor_allreduce_nonblocking,
)
from .ops.hierarchical_neighbor_allreduce import (
    hierarchical_neighbor_allreduce_nonblocking_ as hierarchical_neighbor_allreduce_nonblocking_,
)
from .ops.neighbor_allgather import neighbor_allgather as neighbor_allgather
from .ops.neighbor_allgather import neighbor_allgather_nonblocking as neighbor_allgather_nonblocking
from .ops.neighbor_allreduce import neighbor_allreduce as neighbor_allreduce
from .ops.neighbor_allreduce import neighbor_allreduce_ as neighbor_allreduce_
from .ops.neighbor_allreduce import neighbor_allreduce_nonblocking as neighbor_allreduce_nonblocking
from .ops.neighbor_allreduce import (
    neighbor_allreduce_nonblocking_ as neighbor_allreduce_nonblocking_,
)
from .ops.new_group import new_group as new_group
from .ops.object_collectives import allgather_object as allgather_object
from .ops.object_collectives import allgather_object_nonblocking as allgather_object_nonblocking
from .ops.object_collectives import broadcast_object as broadcast_object
from .ops.object_collectives import broadcast_object_nonblocking as broadcast_object_nonblocking
from .ops.pair_gossip import pair_gossip as pair_gossip
from .ops.pair_gossip import pair_gossip_ as pair_gossip_
from .ops.pair_gossip import pair_gossip_nonblocking as pair_gossip_nonblocking
from .ops.pair_gossip import pair_gossip_nonblocking_ as pair_gossip_nonblocking_
from .ops.process_group import ProcessGroup as ProcessGroup
from .ops.reduce import reduce as reduce
from .ops.reduce import reduce_ as reduce_
from .ops.reduce import reduce_nonblocking as reduce_nonblocking
from .ops.reduce import reduce_nonblocking_ as reduce_nonblocking_
from .ops.reduce_op import ReduceOp as ReduceOp
from .ops.reduce_scatter import reduce_scatter as reduce_scatter
from .ops.reduce_scatter import reduce_scatter_nonblocking as reduce_scatter_nonblocking
from .ops.scatter import scatter as scatter
from .ops.scatter import scatter_nonblocking as scatter_nonblocking
from .ops.send_recv import recv as recv
from .ops.send_recv import recv_nonblocking as recv_nonblocking
from .ops.send_recv import send as send
from .ops.send_recv import send_nonblocking as send_nonblocking
from .ops.windows.completion import win_cancel as win_cancel
from .ops.windows.completion import win_flush as win_flush
from .ops.windows.completion import win_poll as win_poll
from .ops.windows.completion import win_wait as win_wait
from .ops.windows.creation import (
    get_current_created_window_names as get_current_created_window_names,
)
from .ops.windows.creation import win_create as win_create
from .ops.windows.creation import win_free as win_free
from .ops.windows.get_and_update import win_get as win_get
from .ops.windows.get_and_update import win_get_nonblocking as win_get_nonblocking
from .ops.windows.get_and_update import win_read_neighbor as win_read_neighbor
from .ops.windows.get_and_update import win_update as win_update
from .ops.windows.get_and_update import win_update_then_collect as win_update_then_collect
from .ops.windows.inspection import get_win_version as get_win_version
from .ops.windows.inspection import win_associated_p as win_associated_p
from .ops.windows.inspection import win_staleness as win_staleness
from .ops.windows.locking import win_mutex as win_mutex
from .ops.windows.put_and_accumulate import win_accumulate as win_accumulate
from .ops.windows.put_and_accumulate import win_accumulate_nonblocking as win_accumulate_nonblocking
from .ops.windows.put_and_accumulate import win_put as win_put
from .ops.windows.put_and_accumulate import win_put_nonblocking as win_put_nonblocking
from .optim import DistributedAdaptThenCombineOptimizer as DistributedAdaptThenCombineOptimizer
from .optim import DistributedAdaptWithCombineOptimizer as DistributedAdaptWithCombineOptimizer
from .optim import DistributedAllreduceOptimizer as DistributedAllreduceOptimizer
from .optim import DistributedGradientAllreduceOptimizer as DistributedGradientAllreduceOptimizer
from .optim import (
    DistributedHierarchicalNeighborAllreduceOptimizer as DistributedHierarchicalNeighborAllreduceOptimizer,  # noqa: E501
)
from .optim import DistributedNeighborAllreduceOptimizer as DistributedNeighborAllreduceOptimizer
from .optim import DistributedOptimizer as DistributedOptimizer
from .optim import DistributedPullGetOptimizer as DistributedPullGetOptimizer
from .optim import DistributedPushSumOptimizer as DistributedPushSumOptimizer
from .optim import DistributedWinPutOptimizer as DistributedWinPutOptimizer
from .optim import allreduce_parameters as allreduce_parameters
from .optim import average_model as average_model
from .optim import broadcast_optimizer_state as broadcast_optimizer_state
from .optim import broadcast_parameters as broadcast_parameters
from .optim import consensus_distance as consensus_distance
from .optim.accum_adam import AccumAdam as AccumAdam
from .optim.accum_adam import AccumAdamW as AccumAdamW
from .optim.autotune import Autotune as Autotune
from .optim.fused_optimizer import fuse_optimizer as fuse_optimizer
from .optim.join import join as join
from .optim.qadam import QAdamOptimizer as QAdamOptimizer
from .optim.torch_optimizer_factories import (
    lr_scheduler_fn_cosine_with_warmup as lr_scheduler_fn_cosine_with_warmup,
)
from .optim.torch_optimizer_factories import optim_fn_accum_adam as optim_fn_accum_adam
from .optim.torch_optimizer_factories import optim_fn_accum_adamw as optim_fn_accum_adamw
from .optim.torch_optimizer_factories import optim_fn_adam as optim_fn_adam
from .optim.torch_optimizer_factories import optim_fn_adamw as optim_fn_adamw
from .parallel import DecentralizedDataParallel as DecentralizedDataParallel
from .thread_world import LocalWorld as LocalWorld
from .thread_world import local_world as local_world

__version__: str
