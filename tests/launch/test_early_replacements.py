"""Replacements that ask to join before the others have agreed that their rank has died."""

from __future__ import annotations

ASKS_EARLY = """
import os, pathlib, signal, sys
import asyncddp as bf
import torch
from asyncddp.checkpoint import elastic_state
from asyncddp.engine.membership_changes import MembershipChanges
from asyncddp.transport.sockets.replacement_join import ReplacementJoin

met, meet, waiting = pathlib.Path("met"), ReplacementJoin._meet, []
suspect, progress = MembershipChanges.suspect, MembershipChanges.progress

def suspect_late(changes, *facts, certified):
    waiting.append((facts, certified))

def progress_late(changes):
    while waiting and met.exists():
        facts, certified = waiting.pop()
        suspect(changes, *facts, certified=certified)
    return progress(changes)

def meet_first(join):
    view = meet(join)
    sys.stdout.write(f"met in view {view.number} of {list(view.members)}\\n")
    met.touch()
    return view

MembershipChanges.suspect, MembershipChanges.progress = suspect_late, progress_late
ReplacementJoin._meet = meet_first
elastic_state._ASK_SECONDS = 0.0005  # so that it asks again after it was let in
bf.init()
model = torch.nn.Linear(1, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = bf.DistributedOptimizer(sgd, model, algorithm="adapt_then_combine")
state = bf.ElasticState(model, optimizer)
last = 10**6
for step in state.steps(10**6):
    if bf.rank() == 2 and not state.joined and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    if bf.view().joined:
        last = min(last, step + 20)
    if step == last:
        break
bf.barrier()
sys.stdout.write(f"{bf.rank()} of {bf.size()} {state.joined}\\n")
"""


def test_a_replacement_joins_that_was_there_before_the_death_was_agreed_on(run):
    """The members that it finds include its former self, which it is not to take for itself."""
    ended = run("--elastic", "--restarts", "1", "-np", "4", *run.warm(ASKS_EARLY))
    assert ended.code == 0, ended
    said = [f"{rank} of 4 {rank == 2}" for rank in range(4)]
    assert sorted(ended.stdout.splitlines()) == [*said, "met in view 0 of [0, 1, 2, 3]"], ended
    assert "4 of 4 ranks ended with exit code 0" in ended.stderr, ended.stderr
