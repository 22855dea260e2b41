"""Average consensus as users of BlueFog write it: all its ways to the mean of the ranks' vectors.

Prints how far each rank ends from the mean, relative to it, for each way.
"""

# ruff: noqa: T201

import bluefog.torch as bf
import torch
from bluefog.common import topology_util

ROUNDS = 100


def averaged(x):
    """With all neighbours of a static graph in each round."""
    for _ in range(ROUNDS):
        x = bf.neighbor_allreduce(x, name="x")
    return x


def averaged_in_turns(x):
    """With one neighbour of the graph in each round."""
    turns = topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
    for _ in range(ROUNDS):
        send, receive = next(turns)
        weight = 1 / (len(receive) + 1)
        x = bf.neighbor_allreduce(
            x,
            name="x",
            self_weight=weight,
            src_weights=dict.fromkeys(receive, weight),
            dst_weights=send,
            enable_topo_check=False,
        )
    return x


def push_sum(x, in_turns):
    """One-sided, with the scalar p that goes along with x."""
    neighbors = bf.out_neighbor_ranks()
    bf.turn_on_win_ops_with_associated_p()
    bf.win_create(x, name="x", zero_init=True)
    for round_ in range(ROUNDS):
        targets = [neighbors[round_ % len(neighbors)]] if in_turns else neighbors
        weight = 1 / (len(targets) + 1)
        bf.win_accumulate(
            x,
            name="x",
            self_weight=weight,
            dst_weights=dict.fromkeys(targets, weight),
            require_mutex=True,
        )
        bf.barrier()
        bf.win_update_then_collect(name="x")
    p = bf.win_associated_p(name="x")
    mean_of_p = bf.allreduce(torch.tensor([p], dtype=torch.float64)).item()
    print(f"rank {bf.rank()}, mean of p: {mean_of_p - 1:.1e}", flush=True)
    bf.turn_off_win_ops_with_associated_p()
    bf.win_free(name="x")
    return x / p


def report(way, x, mean):
    distance = (torch.linalg.norm(x - mean) / torch.linalg.norm(mean)).item()
    print(f"rank {bf.rank()}, {way}: {distance:.1e}", flush=True)


bf.init()
torch.manual_seed(2020 * bf.rank())
start = torch.randn(1000, dtype=torch.float64)
goal = bf.allreduce(start, average=True)
report("start", start, goal)
for name, graph, is_weighted in [
    ("exponential", topology_util.ExponentialGraph(bf.size()), False),
    ("one-way ring", topology_util.RingGraph(bf.size(), connect_style=1), False),
    ("weighted star", topology_util.StarGraph(bf.size()), True),
    ("complete", topology_util.FullyConnectedGraph(bf.size()), False),
]:
    assert bf.set_topology(graph, is_weighted=is_weighted)
    report(name, averaged(start), goal)
bf.set_topology()
report("one peer", averaged_in_turns(start), goal)
report("push-sum", push_sum(start.clone(), in_turns=False), goal)
report("push-sum, one peer", push_sum(start.clone(), in_turns=True), goal)
