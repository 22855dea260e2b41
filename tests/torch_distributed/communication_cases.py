"""Objects, messages and verbs, run on gloo and on asyncddp by ``training_cases``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.torch_distributed.case_registry import case


@case
def objects() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "tensor": torch.full((2 + rank,), float(rank))}
    every: list[Any] = [None] * size
    dist.all_gather_object(every, mine)
    there: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, there, dst=0)
    sent: list[Any] = [mine if rank == 1 else None]
    dist.broadcast_object_list(sent, src=1)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [{"to": to} for to in range(size)] if rank == 0 else None, src=0)
    assert got[0] == {"to": rank}, got
    passed: list[Any] = [mine]
    if rank == 0:
        dist.send_object_list(passed, dst=1)
    elif rank == 1:
        dist.recv_object_list(passed, src=0)
        assert passed[0]["rank"] == 0
    return [one["tensor"] for one in [*every, *(there or []), sent[0]]]


@case
def point_to_point() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    out, back = torch.zeros(50_000), torch.zeros(3)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((50_000,), float(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, out, (rank - 1) % size),
        ]
    )
    for request in requests:
        request.wait()
    if rank == 0:
        for _ in range(size - 1):
            assert 0 < dist.recv(back) < size
    else:
        dist.send(torch.ones(3), 0)
    return [out, back]


@case
def verbs() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    found = []
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for count in (0, 1, 5000):
                x = torch.randint(0, 3, (count,)).to(dtype)
                dist.all_reduce(x, op=op)
                found.append(x)
    x = torch.randn(3, 5).t()  # strided
    dist.all_reduce(x)
    out = torch.zeros(2)
    dist.scatter(
        out, [torch.full((2,), float(r)) for r in range(size)] if rank == 1 else None, src=1
    )
    gathered = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(out, gathered, dst=0)
    x2 = torch.randn(4)
    dist.reduce(x2, dst=1)
    sizes = [r + 1 for r in range(size)]
    received = torch.zeros(size * (rank + 1))
    dist.all_to_all_single(received, torch.arange(float(sum(sizes))), [rank + 1] * size, sizes)
    part = torch.zeros(6)
    dist.reduce_scatter_tensor(part, torch.randn(6 * size))
    reduced = [x2] if rank == 1 else []  # gloo overwrites the others' tensors
    return [*found, x, out, *(gathered or []), *reduced, received, part]
