"""Replacements that cannot take over a state: they say why, and the others train on."""

from __future__ import annotations

import pytest

SCRIPT = """
import fractions, os, pathlib, signal, sys
import asyncddp as bf
import torch

case, new = sys.argv[1], "ASYNCDDP_REPLACES" in os.environ


class Broken(Exception):
    pass


class Part:
    def state_dict(self):
        if case == "broken":
            raise Broken("the reader is closed")
        odd = {"unpicklable": lambda: 0, "odd": fractions.Fraction(1, 2)}
        return {"odd": odd.get(case)}

    def load_state_dict(self, state):
        pass


bf.init()
model = torch.nn.Linear(3 if new and case == "shape" else 2, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = bf.DistributedOptimizer(sgd, model, algorithm="adapt_then_combine")
parts = {"reader" if new and case == "name" else "sampler": Part()}
try:
    state = bf.ElasticState(model, optimizer, **parts)
except Exception:
    pathlib.Path("refused").touch()
    raise
for step in state.steps(10**6):
    if bf.rank() == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    if bf.allreduce(torch.tensor(float(pathlib.Path("refused").exists()))) > 0:
        break
"""
SENT = "EnvironmentProblem: rank 1: ElasticState: rank 0 could not make its state: "
PLAIN = "tensors, numbers, strings, lists and dicts"
REFUSED = {
    "shape": "ArgumentError: ElasticState: argument model: the state of rank 0 is of another "
    "model: weight has shape (1, 2) in it, and (1, 3) in the model. Build the same model",
    "name": "ArgumentError: ElasticState: arguments: expected model, optimizer, sampler, as on "
    "rank 0, got model, optimizer, reader; give the same objects by the same names on all ranks",
    "odd": f"ArgumentError: ElasticState: the state of rank 0: expected {PLAIN} in state dicts, "
    "got fractions.Fraction; convert the others in state_dict()",
    "broken": f"{SENT}Broken: the reader is closed",
    "unpicklable": SENT,
}


@pytest.mark.parametrize(
    ("case", "ranks"),
    [("shape", 3), ("name", 2), ("odd", 2), ("broken", 3), ("unpicklable", 2)],
)
def test_a_replacement_that_cannot_have_the_state_ends_alone(run, case, ranks):
    """It says which objects differ, or that the sender has none to give; the others go on."""
    words = "--elastic", "--restarts", "1", "-np", str(ranks)
    ended = run(*words, *run.warm(SCRIPT), case)
    assert ended.code == 0, ended
    assert REFUSED[case] in ended.stderr, ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        f"asyncddp: {ranks - 1} of {ranks} ranks ended with exit code 0; rank 1 ended with exit "
        "code 1"
    )
    warned = "rank 0: ElasticState: no state can be made for rank 1: "
    assert (warned in ended.stderr) == (REFUSED[case].startswith(SENT))
