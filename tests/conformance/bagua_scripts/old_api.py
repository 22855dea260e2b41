"""A Bagua script of its first releases: training that switches between algorithms."""

import sys

import bagua.torch_api as bagua
import torch
from bagua.torch_api.distributed import DistributedAlgorithm, bagua_init


def main():
    bagua.init_process_group()
    rank = bagua.get_rank()
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(64, 8, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    for parameter in model.parameters():  # ranks that are threads share torch's own generator
        parameter.data.uniform_(-0.5, 0.5, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = bagua_init(model, optimizer, broadcast_buffers=True)
    for name in sys.argv[1:]:
        model.switch_to(DistributedAlgorithm(name))
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
        sys.stdout.write(f"rank {rank}, {name}: {loss.item():.2e} {model.stage}\n")


main()
