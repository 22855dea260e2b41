"""examples/grpo.py: rewards by a rule, the clipped loss, and a policy that learns."""

from __future__ import annotations

import argparse
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

import asyncddp as bf
from tests.examples.launches import RANKS, WAYS, launch, load

grpo = load("grpo.py")


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("way", WAYS)
def test_ends_by_the_clock_in_each_way_of_starting(way, tmp_path):
    """Each rank says how many episodes it has made, and how long they were."""
    done = launch(way, "grpo.py", "--smoke", "--kl", "0.1", "--out", "found.png", cwd=tmp_path)
    assert done.code == 0, done
    assert not done.left
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.startswith(f"{RANKS[way]} ranks train by win_put; at the start\n"), done
    assert re.search(r"^ *\d+\.\d s +1 episodes  reward 0\.\d\d$", done.stdout, re.MULTILINE)
    found = re.findall(r"^rank (\d): (\d+) episodes of (\d+) tokens$", done.stdout, re.MULTILINE)
    assert [int(rank) for rank, _, _ in found] == list(range(RANKS[way])), done
    assert all(int(episodes) >= 1 and int(tokens) >= 128 for _, episodes, tokens in found)
    judged = r"^  [23] digits: reward \d\.\d\d, +\d+% in order$"
    assert len(re.findall(judged, done.stdout, re.MULTILINE)) == 4


def test_ranks_that_wait_for_each_other_end_by_the_clock_as_well(monkeypatch, capsys):
    """A rank whose time is over is left out of the averages; rank 1 has the faster clock."""
    clocks = [itertools.count(step=1.0), itertools.count(step=2.0)]
    monkeypatch.setattr(grpo, "time", SimpleNamespace(monotonic=lambda: next(clocks[bf.rank()])))
    options = ["--method", "adapt_then_combine", "--longest", "2", "--seconds", "7"]
    monkeypatch.setattr("sys.argv", ["grpo.py", *options])
    with bf.local_world(2, timeout=60) as world:
        world.run(grpo.main)
    found = re.findall(r"^rank \d: (\d+) episodes", capsys.readouterr().out, re.MULTILINE)
    assert found == ["6", "3"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.training
def test_the_policy_learns(monkeypatch, capsys):
    """Far above chance after 160 episodes, in each of which the clock ticks once."""
    ticks = itertools.count()
    monkeypatch.setattr(grpo, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    options = ["--longest", "2", "--prompts", "8", "--seconds", "160"]
    monkeypatch.setattr("sys.argv", ["grpo.py", *options])
    grpo.main()
    bf.shutdown()
    judged = re.findall(r"  2 digits: reward (\d\.\d\d)", capsys.readouterr().out)
    before, after = map(float, judged)
    assert before < 0.2
    assert after > 0.35


def tokens(*texts: str) -> torch.Tensor:
    """Rows of tokens, with their separator and end."""
    return torch.tensor([["0123456789>.".index(letter) for letter in text] for text in texts])


@pytest.mark.parametrize(
    ("written", "reward"),
    [("1134.", 1.0), ("1143.", 0.4), ("113.", 0.6), ("4311.", 0.0), ("11345", 0.8), (".", 0.0)],
)
def test_the_reward_is_the_share_of_tokens_before_the_first_mistake(written, reward):
    """Of five tokens; those after a mistake do not count, though they may be right."""
    assert grpo.rewards(tokens("3141>"), tokens(written)).tolist() == pytest.approx([reward])


def test_completions_end_and_do_not_go_on():
    """After END there is nothing else, and no completion is longer than a right answer."""
    torch.manual_seed(0)
    written = grpo.Policy(10).complete(tokens("3141>").repeat(400, 1))
    assert written.shape == (400, 5)
    ended = (written == grpo.END).int().cummax(dim=1).values.bool()
    assert ended[:, :-1].any()
    assert (written[ended] == grpo.END).all()
    assert (written[~ended] < grpo.TOKENS).all()


def test_probabilities_are_those_by_which_tokens_were_drawn():
    """Of 4,000 first tokens each occurs as often as its probability says."""
    torch.manual_seed(0)
    policy = grpo.Policy(6)
    prompts = tokens("31>").repeat(4000, 1)
    with torch.no_grad():
        written = policy.complete(prompts)
        told = policy.log_probabilities(prompts, written)[:, 0].exp()
    for token in written[:, 0].unique():
        drawn = written[:, 0] == token
        assert drawn.double().mean() == pytest.approx(told[drawn][0].item(), abs=0.03)


def test_the_loss_is_clipped_on_the_side_of_the_reward_only():
    """By hand: r = 2 and 1/2, A = 1 and -1, eps = 0.2; and the distance from the first policy."""
    options = argparse.Namespace(clip=0.2, kl=0.0)
    new = torch.tensor([2.0, 0.5, 2.0, 0.5]).log()
    old, advantage = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0])
    found = grpo.loss_of_tokens(new, old, old, advantage, options)
    torch.testing.assert_close(found, torch.tensor([-1.2, -0.5, 2.0, 0.8]))
    options.kl = 0.5
    far = grpo.loss_of_tokens(new, old, old, advantage, options) - found
    wanted = [0.5 * (q - 1 - torch.tensor(q).log().item()) for q in (0.5, 2.0, 0.5, 2.0)]
    torch.testing.assert_close(far, torch.tensor(wanted))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--group", "1"), "argument --group: expected at least 2, got 1"),
        (("--longest", "1"), "argument --longest: expected at least 2, got 1"),
        (("--seconds", "soon"), "argument --seconds: invalid float value: 'soon'"),
        (("--method", "magic"), "argument --method: invalid choice: 'magic'"),
    ],
)
def test_bad_options_are_named(options, said, monkeypatch, capsys):
    """With what was expected, and what was given."""
    monkeypatch.setattr("sys.argv", ["grpo.py", *options])
    with pytest.raises(SystemExit, match="2"):
        grpo.parse_options()
    assert said in capsys.readouterr().err
