"""A Bagua script: least squares by an algorithm that is named on the command line."""

import sys

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.contrib import LoadBalancingDistributedSampler


def main(names):
    if torch.cuda.is_available():
        torch.cuda.set_device(bagua.get_local_rank())
    bagua.init_process_group()
    rank = bagua.get_rank()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 8, generator=generator)
    truth = torch.randn(8, 1, generator=generator)
    samples = torch.utils.data.TensorDataset(inputs, inputs @ truth)
    sampler = LoadBalancingDistributedSampler(samples, lambda sample: int(sample[0][0] > 0))
    loader = torch.utils.data.DataLoader(samples, batch_size=16, sampler=sampler)
    for name in names:
        model = torch.nn.Linear(8, 1)
        torch.nn.init.constant_(model.weight, rank)
        if name == "qadam":
            optimizer = QAdamOptimizer(model.parameters(), lr=0.1, warmup_steps=20)
            algorithm = QAdamAlgorithm(optimizer)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            algorithm = Algorithm.init(name, **({"sync_interval_ms": 1} if name == "async" else {}))
        model = model.with_bagua([optimizer], algorithm)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
        if name == "async":
            algorithm.abort(model)
        total = loss.detach().clone()
        bagua.allreduce_inplace(total, op=bagua.ReduceOp.AVG)
        steps = model.bagua_train_step_counter
        sys.stdout.write(f"rank {rank}, {name}: {total.item():.2e} {steps}\n")


main(sys.argv[1:])
