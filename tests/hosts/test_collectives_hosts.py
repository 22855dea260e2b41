"""Collectives of two hosts with two ranks each, which share memory there."""

import json
import re

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

NETWORK = ("--network-interface", "10.77.0.0/24")
SUMS = """
import json, torch, asyncddp as bf
bf.init()
rank, size = bf.rank(), bf.size()
wrong = []
def check(what, found, expected):
    if not torch.equal(found, expected):
        wrong.append(what)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
    for count in (1, 4095, 100_000, 1_000_003):
        terms = [torch.arange(count).remainder(13).add(r).to(dtype) for r in range(size)]
        total = torch.stack(terms).sum(dim=0, dtype=dtype)
        check(f"sum {dtype} {count}", bf.allreduce(terms[rank], average=False), total)
        out = terms[rank].clone()
        bf.allreduce_(out, average=False)
        check(f"in place {dtype} {count}", out, total)
x = torch.linspace(0, 1, 300_000).mul(rank + 1)
every = bf.allgather(bf.allreduce(x).view(1, -1))
check("the same bits on all ranks", every, every[:1].expand_as(every))
whole = torch.arange(400_000.0).view(size, -1) + rank
part = whole[rank] * size + sum(range(size)) - size * rank
check("reduce_scatter", bf.reduce_scatter(whole.view(-1), average=False), part)
handles = [bf.allreduce_nonblocking(torch.full((200_001,), float(rank + k))) for k in range(6)]
for k, handle in reversed(list(enumerate(handles))):
    check(f"under way {k}", handle.wait(), torch.full((200_001,), 1.5 + k))
root = torch.full((700_000,), float(rank))
check("broadcast", bf.broadcast(root, 2), torch.full_like(root, 2.0))
print(json.dumps({"rank": rank, "wrong": wrong}))
"""
BYTES = """
import json, pathlib, time, torch, asyncddp as bf
bf.init()
x = torch.ones(4_000_000)
def sent():
    bf.barrier()
    return int(pathlib.Path("/sys/class/net/e0/statistics/tx_bytes").read_text())
bf.allreduce_(x)
before = sent()
for _ in range(4):
    bf.allreduce_(x)
after = sent()
print(json.dumps({"rank": bf.rank(), "tensors": (after - before) / 4 / x.nbytes}))
"""
DYING = """
import os, threading, time, torch, asyncddp as bf
bf.init()
x = torch.ones(30_000_000)
bf.allreduce_(x[:100_000])
if bf.rank() == 3:
    threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
print("ready", flush=True)
while True:
    bf.allreduce_(x)
"""


def seen(ended):
    code, stdout, stderr = ended
    assert code == 0, stderr
    return [json.loads(line) for line in stdout.splitlines()]


def test_sums_are_those_of_all_ranks(hosts):
    """Any length and dtype, in place, several under way, and with the same bits on all ranks."""
    ranks = seen(hosts.run(*NETWORK, script=SUMS))
    assert [one["wrong"] for one in ranks] == [[]] * 4


def test_a_host_sends_one_tensor_for_a_sum(hosts):
    """Two ranks of a host send half of it each, once it is summed on their host."""
    for one in seen(hosts.run(*NETWORK, script=BYTES)):
        assert one["tensors"] == pytest.approx(1, abs=0.05)


def test_a_rank_that_dies_in_a_sum_ends_the_run(hosts):
    """Whoever sees it first is named: its connection may close before Open MPI sees its end."""
    code, _, stderr = hosts.run(*NETWORK, script=DYING)
    assert code > 0
    assert re.search("asyncddp run: rank [0-3] on h", stderr), stderr
    assert hosts.wait_until_gone(10) == []
