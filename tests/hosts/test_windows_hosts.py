"""Windows between hosts that share no memory: one-sided over the transport."""

import json

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

NETWORK = ("--network-interface", "10.77.0.0/24")
SCRIPT = """
import json, time
import torch
import asyncddp as bf
from asyncddp import topology

bf.init()
n, r = bf.size(), bf.rank()
bf.set_topology(topology.complete(n))
last = n - 1
took = {}
for name, count in (("small", 23), ("large", 200_000)):
    x = torch.full((count,), float(r), dtype=torch.float64)
    bf.win_create(x, name, zero_init=True)
    bf.barrier()
    started = time.monotonic()
    if r == last:
        time.sleep(3.0)
        bf.win_update(name, 0.0, {0: 1.0})
        assert (x == 12).all(), x
    elif r == 0:
        bf.win_put(torch.full((count,), 5.0, dtype=torch.float64), name, dst_weights=[last])
        bf.win_accumulate(
            torch.full((count,), 7.0, dtype=torch.float64), name, dst_weights=[last]
        )
        bf.win_get(name, [last])
        took[name] = time.monotonic() - started
        assert (bf.win_read_neighbor(name, last) == last).all()
    bf.barrier()

x = torch.full((50,), float(r), dtype=torch.float64)
bf.win_create(x, "mass", zero_init=True, associated_p=True)
bf.win_update_then_collect("mass")
p = bf.win_associated_p("mass")
share = 1 / n
for _ in range(200):
    handle = bf.win_accumulate_nonblocking(x, "mass", share, dict.fromkeys(
        bf.out_neighbor_ranks(), share))
    bf.win_update_then_collect("mass")
handle.wait()
bf.win_accumulate(x, "mass", share, dict.fromkeys(bf.out_neighbor_ranks(), share))
bf.barrier()
bf.win_update_then_collect("mass")
ps = bf.allgather_object(bf.win_associated_p("mass"))
xs = bf.allgather_object(x[0].item())
print(json.dumps({"rank": r, "took": took, "p": sum(ps), "x": sum(xs)}), flush=True)
"""


@pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("c10d", marks=pytest.mark.nightly)]
)
def test_a_put_to_a_rank_that_sleeps_on_another_host_completes_promptly(hosts, transport):
    """Put, accumulate and get of 8 bytes x 23 and x 200,000, beside three seconds of sleep.

    Ranks of one host use its memory, and the others the network; mass is conserved over both.
    """
    code, stdout, stderr = hosts.run(
        *NETWORK, script=SCRIPT, environ={"ASYNCDDP_TRANSPORT": transport}
    )
    assert code == 0, stderr
    ranks = {one["rank"]: one for one in map(json.loads, stdout.splitlines())}
    assert len(ranks) == 4
    assert ranks[0]["took"]["small"] < 1.0
    assert ranks[0]["took"]["large"] < 2.0
    for one in ranks.values():
        assert one["p"] == pytest.approx(4, rel=1e-12)
        assert one["x"] == pytest.approx(6, rel=1e-12)
