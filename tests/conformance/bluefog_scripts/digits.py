"""BlueFog's MNIST example in other words, with scikit-learn's digits in place of MNIST.

Trains a small network with three of BlueFog's optimizers in turn, and prints its test accuracy.
"""

# ruff: noqa: T201

import argparse

import bluefog.torch as bf
import torch
import torch.nn.functional as F
from bluefog.common import topology_util
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

KINDS = {
    "neighbor_allreduce": bf.DistributedAdaptWithCombineOptimizer,
    "hierarchical_neighbor_allreduce": bf.DistributedAdaptThenCombineOptimizer,
    "win_put": bf.DistributedWinPutOptimizer,
}
BATCH = 16


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(64, 64)
        self.drop = torch.nn.Dropout(0.1)
        self.out = torch.nn.Linear(64, 10)

    def forward(self, x):
        return F.log_softmax(self.out(self.drop(F.relu(self.hidden(x)))), dim=1)


def read_digits():
    """Let one rank read the images, and give them to the others."""
    images, labels = torch.zeros(1797, 64), torch.zeros(1797, dtype=torch.int64)
    if bf.rank() == 0:
        from sklearn.datasets import load_digits

        found = load_digits()
        images += torch.from_numpy(found.data / 16).float()
        labels += torch.from_numpy(found.target)
    bf.broadcast_(images, root_rank=0, name="images")
    bf.broadcast_(labels, root_rank=0, name="labels")
    return TensorDataset(images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def wrapped(kind, optimizer, model):
    if kind == "win_put":
        return KINDS[kind](optimizer, model=model)
    return KINDS[kind](optimizer, model=model, communication_type=bf.CommunicationType[kind])


def choose_neighbors(kind, optimizer, turns, batch):
    """Another neighbour, or machine, for each batch; and now and then all ranks."""
    if kind == "win_put":
        neighbors = bf.out_neighbor_ranks()
        optimizer.dst_weights = {neighbors[batch % len(neighbors)]: 1.0}
        return
    send, receive = next(turns)
    optimizer.self_weight = 1 / (len(receive) + 1)
    optimizer.enable_topo_check = False
    weights = {r: 1 / (len(receive) + 1) for r in receive}
    if kind == "neighbor_allreduce":
        optimizer.dst_weights, optimizer.src_weights = send, weights
        often, rarely = bf.CommunicationType.neighbor_allreduce, bf.CommunicationType.allreduce
        optimizer.communication_type = rarely if batch % 10 == 9 else often
    else:
        optimizer.dst_machine_weights, optimizer.src_machine_weights = send, weights


def train(kind, dataset, epochs):
    torch.manual_seed(42)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * bf.size(), momentum=0.5)
    bf.broadcast_parameters(model.state_dict(), root_rank=0)
    bf.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = wrapped(kind, optimizer, model)
    if kind.startswith("hierarchical"):
        turns = topology_util.GetExp2DynamicSendRecvMachineRanks(
            world_size=bf.size(),
            local_size=bf.local_size(),
            self_rank=bf.rank(),
            local_rank=bf.local_rank(),
        )
    else:
        turns = topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
    sampler = DistributedSampler(dataset, num_replicas=bf.size(), rank=bf.rank())
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    model.train()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, (images, labels) in enumerate(loader):
            choose_neighbors(kind, optimizer, turns, batch)
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
    if kind == "win_put":
        optimizer.unregister_window()
    return model


def accuracy(model, images, labels):
    """Of each rank's own model, averaged over the ranks."""
    model.eval()
    with torch.no_grad():
        hits = (model(images).argmax(1) == labels).double().mean()
    return bf.allreduce(hits, name="accuracy").item()


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
bf.init()
bf.set_machine_topology(topology_util.ExponentialTwoGraph(bf.machine_size()))
train_set, test_set = read_digits()
for name in KINDS:
    reached = accuracy(train(name, train_set, args.epochs), *test_set)
    print(f"rank {bf.rank()}, {name}: {reached:.3f}", flush=True)
bf.barrier()
