"""Runs under ``mpirun`` in which a neighbour is stopped or killed while others train on."""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.support import run_on_mpirun

METHODS = ["ad_psgd", "async_model_average", "pull_get", "push_sum", "win_put"]
HEAD = """
import os, signal, sys, time
import torch
import asyncddp as bf
from asyncddp import topology

bf.init()

def trained(method, bound=None):
    model = torch.nn.Linear(1000, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = bf.DistributedOptimizer(
        optimizer, model, method, topology=topology.ring(bf.size()), max_staleness=bound
    )
    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
        return optimizer.round
    for _ in range(3):
        step()
    return step

def go_on(method, step):
    start, before, rounds = time.monotonic(), step(), 0
    while time.monotonic() - start < 0.2 or rounds < 10:
        rounds = step() - before
    print(f"rank {bf.rank()}: {method} {rounds}\\n", end="", flush=True)

"""
ALL = f"steps = {{method: trained(method) for method in {METHODS}}}\nbf.barrier()\n"


def assert_went_on(done):
    """Every rank but 1 has made many steps by every method."""
    told = re.findall(r"rank (\d): (\w+) (\d+)", done.stdout)
    expected = [(rank, method) for rank in "023" for method in METHODS]
    assert sorted((rank, method) for rank, method, _ in told) == expected, done
    assert all(int(rounds) > 5 for _, _, rounds in told), done


@pytest.mark.mpi(4)
def test_nobody_waits_for_a_neighbour_that_is_stopped(tmp_path):
    """While rank 1 stands still, by SIGSTOP, the others train on; then it goes on as well."""
    body = """
    pids = bf.allgather_object(os.getpid())
    bf.barrier()
    if bf.rank() == 1:
        time.sleep(0.5)  # the signal comes here
        for step in steps.values():
            step()
    else:
        if bf.rank() == 0:
            os.kill(pids[1], signal.SIGSTOP)
        for method, step in steps.items():
            go_on(method, step)
        if bf.rank() == 0:
            time.sleep(0.5)
            os.kill(pids[1], signal.SIGCONT)
    bf.barrier()
    """
    script = HEAD + ALL + textwrap.dedent(body)
    done = run_on_mpirun(4, script, tmp_path, environ={"ASYNCDDP_TRANSPORT": "shared_memory"})
    assert (done.code, done.stderr, done.left) == (0, "", ()), done
    assert_went_on(done)


@pytest.mark.mpi(4)
def test_survivors_of_a_killed_neighbour_train_on(tmp_path):
    """Where the launcher lets them live, no method of theirs needs the dead."""
    body = """
    if bf.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for method, step in steps.items():
        go_on(method, step)
    time.sleep(0.5)
    os._exit(0)
    """
    script = HEAD + ALL + textwrap.dedent(body)
    done = run_on_mpirun(4, script, tmp_path, options=["--with-ft", "ulfm"])
    assert not done.timed_out, done
    assert done.left == (), done
    assert_went_on(done)


AVERAGE = """
def averaged(method, model, **options):
    own = model.weight.detach().clone()
    average = bf.average_model(model, wait=False, **options)
    with average:
        mean = model.weight[0, 0].item()
    assert torch.equal(model.weight, own)
    print(f"rank {bf.rank()}: {method} {mean} {average.missing}\\n", end="", flush=True)

models, kept = {}, []
for method in METHODS:
    models[method] = torch.nn.Linear(1, 1000, bias=False)
    torch.nn.init.constant_(models[method].weight, bf.rank())
    sgd = torch.optim.SGD(models[method].parameters(), lr=0.0)
    options = {"topology": topology.ring(bf.size()), "broadcast": False}
    optimizer = bf.DistributedOptimizer(sgd, models[method], method, **options)
    kept.append(optimizer)
    for _ in range(method == "ad_psgd"):  # whose ranks publish in their first step
        optimizer.force_barrier = True
        models[method](torch.ones(1, 1)).sum().backward()
        optimizer.step()
pids = bf.allgather_object(os.getpid())
bf.barrier()
""".replace("METHODS", repr(METHODS))


def assert_averaged(done, expected):
    """Each of these ranks has averaged by every method over some ranks."""
    told = re.findall(r"rank (\d): (\w+) (\S+) (\(.*\))", done.stdout)
    every = {(rank, method): missing for rank, method, _, missing in told}
    assert every == {(rank, method): "(1,)" for rank in expected for method in METHODS}, done
    windows = {float(mean) for _, method, mean, _ in told if method != "ad_psgd"}
    assert {round(mean, 5) for mean in windows} == {round((0.0 + 2.0 + 3.0) / 3, 5)}, done


@pytest.mark.mpi(4)
def test_the_average_is_without_a_rank_that_is_stopped(tmp_path):
    """By SIGSTOP, so that it answers nothing: no longer than the timeout is waited for it."""
    body = """
    if bf.rank() == 0:
        os.kill(pids[1], signal.SIGSTOP)
        for method, model in models.items():
            averaged(method, model, timeout=0.5)
        os.kill(pids[1], signal.SIGCONT)
    bf.barrier()
    """
    script = HEAD + AVERAGE + textwrap.dedent(body)
    done = run_on_mpirun(4, script, tmp_path, environ={"ASYNCDDP_TRANSPORT": "mpi"})
    assert (done.code, done.left) == (0, ()), done
    assert done.stderr.count("rank 1 left out, without an answer in 0.5 s") == len(METHODS), done
    assert_averaged(done, "0")


@pytest.mark.mpi(4)
def test_the_average_is_without_a_rank_that_was_killed(tmp_path):
    """Its death is known soon, and nobody waits for the timeout, which is the deadline here."""
    body = """
    if bf.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not bf.current().engine.has_exited(1):
        time.sleep(0.01)
    for method, model in models.items():
        averaged(method, model, timeout=600)
    time.sleep(2.0)  # for the others to have averaged
    os._exit(0)
    """
    script = HEAD + AVERAGE + textwrap.dedent(body)
    done = run_on_mpirun(4, script, tmp_path, options=["--with-ft", "ulfm"])
    assert not done.timed_out, done
    assert done.left == (), done
    assert_averaged(done, "023")


@pytest.mark.mpi(2)
def test_who_does_not_come_is_named_where_staleness_is_bounded(tmp_path):
    """After two steps more the deadline runs; its error says who is missing."""
    body = """
    step = trained("win_put", bound=2)
    bf.barrier()
    if bf.rank() == 1:
        time.sleep(60)
    for _ in range(9):
        step()
    """
    environ = {"ASYNCDDP_TRANSPORT": "mpi", "ASYNCDDP_TIMEOUT": "6"}
    done = run_on_mpirun(2, HEAD + textwrap.dedent(body), tmp_path, environ=environ)
    assert done.code != 0, done
    assert not done.timed_out, done
    error = (
        r"rank 0 of 2 failed: WaitTimeoutError: rank 0: step 6 of DistributedOptimizer0 with "
        r"max_staleness=2 was not done in \d+\.\d s \(ASYNCDDP_TIMEOUT=6\); missing: rank 1"
    )
    assert re.search(error, done.stderr), done


@pytest.mark.mpi(4)
def test_a_run_with_open_windows_ends_well(tmp_path):
    """Ranks end at different times, without ``shutdown()``, and print nothing."""
    body = """
    for step in steps.values():
        for _ in range(2 * bf.rank()):
            step()
    time.sleep(0.1 * bf.rank())
    """
    done = run_on_mpirun(4, HEAD + ALL + textwrap.dedent(body), tmp_path)
    assert (done.code, done.stdout, done.stderr, done.left) == (0, "", "", ()), done


@pytest.mark.mpi(4)
def test_a_rank_that_ends_early_anchors_nobody(tmp_path):
    """Rank 3 ends after 20 steps of 200: the others reach the optimum of their own average.

    How near depends on how evenly a busy machine runs them: it is given other chances.
    """
    script = """
    import torch
    import asyncddp as bf
    from asyncddp import topology

    bf.init()
    rank, graph = bf.rank(), topology.ring(bf.size())
    data = torch.ones(1, 1, dtype=torch.float64)

    def trained(method):
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        loss = lambda output: (output - rank).square().div(2).sum()
        if method == "module":
            sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.05)
            ddp = bf.DecentralizedDataParallel(model, sgd, sync=False, topology=graph)
            ddp.global_avg()  # makes the windows
            return model, lambda: loss(ddp(data)).backward()
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = bf.DistributedOptimizer(
            plain, model, method, topology=graph, max_staleness=10  # also paces the module
        )

        def step():
            optimizer.zero_grad()
            loss(model(data)).backward()
            optimizer.step()

        return model, step

    made = {name: trained(name) for name in METHODS}
    for _, step in made.values():  # the first backward pass of a module is collective
        step()
    bf.barrier()
    for _ in range(19 if rank == 3 else 199):
        for _, step in made.values():
            step()
    for name, (model, _) in made.items() if rank < 3 else ():
        print(f"{rank} {name} {model.weight.item()}\\n", end="", flush=True)
    """
    methods = ["async_model_average", "pull_get", "win_put", "module"]
    script = textwrap.dedent(script).replace("METHODS", repr(methods))
    environ = {"ASYNCDDP_TRANSPORT": "shared_memory"}
    tried = []
    for _ in range(3):
        done = run_on_mpirun(4, script, tmp_path, environ=environ)
        assert (done.code, done.stderr, done.left) == (0, "", ()), done
        told = [line.split() for line in done.stdout.splitlines()]
        tried.append({name: [float(x) for _, m, x in told if m == name] for name in methods})
        assert all(len(weights) == 3 for weights in tried[-1].values()), done
        if all(
            sum(weights) / 3 == pytest.approx(1.0, abs=0.08)
            and weights == pytest.approx([1.0] * 3, abs=0.3)
            for weights in tried[-1].values()
        ):
            return
    pytest.fail(f"weights that are 1 in theory: {tried}")
