"""The protocol of averages in pairs: sums stay, nobody waits, whatever is late, lost or refused."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from functools import partial

import pytest
import torch

from asyncddp.windows.pair_averaging import ASK, PairAveraging


class Network:
    """Ranks whose messages arrive when the test says so, in order between two ranks."""

    def __init__(self, n):
        self.under_way = defaultdict(deque)
        self.gone, self.time = set(), 0.0
        self.ranks = [
            PairAveraging(partial(self.send, rank), self.gone.__contains__, lambda: self.time)
            for rank in range(n)
        ]

    def send(self, source, target, *message):
        self.under_way[source, target].append(message)

    def deliver(self, source, target):
        self.ranks[target].receive(source, *self.under_way[source, target].popleft())

    def deliver_all(self):
        while ways := [way for way, messages in self.under_way.items() if messages]:
            self.deliver(*ways[0])


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def opened(*values):
    network = Network(len(values))
    for rank, value in zip(network.ranks, values, strict=True):
        rank.begin(tensor(value))
    return network


def test_two_ranks_average_at_once():
    """x_i − w (x_i − x_j) and x_j + w (x_i − x_j), the answer without the other's doing."""
    network = opened(0.0, 8.0)
    assert network.ranks[0].ask(1, 0.25)
    network.deliver_all()
    assert [rank.end().item() for rank in network.ranks] == [2.0, 6.0]
    assert [rank.sent for rank in network.ranks] == [1, 1]


def test_who_has_asked_refuses_others_and_asks_nobody_else():
    """Averages never overlap, so that no circle of ranks can wait for each other."""
    network = opened(0.0, 4.0, 8.0)
    assert network.ranks[1].ask(2, 0.5)
    assert not network.ranks[1].ask(0, 0.5)
    network.ranks[0].ask(1, 0.5)
    network.deliver(0, 1)
    network.deliver(1, 0)
    assert network.ranks[0].waits_for is None
    network.deliver_all()
    assert [rank.end().item() for rank in network.ranks] == [0.0, 6.0, 6.0]


def test_a_circle_of_questions_ends():
    """Each asks the next one: all are refused, and may ask again."""
    network = opened(0.0, 1.0, 2.0)
    for rank in range(3):
        network.ranks[rank].ask((rank + 1) % 3, 0.5)
    network.deliver_all()
    assert [rank.waits_for for rank in network.ranks] == [None] * 3
    assert [rank.end().item() for rank in network.ranks] == [0.0, 1.0, 2.0]


def test_a_question_to_who_is_closed_is_answered_when_it_opens():
    """With what it has by then."""
    network = opened(0.0, 8.0)
    network.ranks[1].end()
    network.ranks[0].ask(1, 0.5)
    network.deliver_all()
    assert network.ranks[0].waits_for == 1
    network.ranks[1].begin(tensor(6.0))
    network.deliver_all()
    assert [rank.end().item() for rank in network.ranks] == [3.0, 3.0]


def test_a_question_of_who_has_died_is_not_answered():
    """It could not subtract its part of the average."""
    network = opened(0.0, 8.0)
    network.ranks[1].end()
    network.ranks[0].ask(1, 0.5)
    network.deliver_all()
    network.gone.add(0)
    network.ranks[1].begin(tensor(8.0))
    assert network.ranks[1].end().item() == 8.0


def test_an_answer_that_is_late_counts_in_the_next_opening():
    """The change is subtracted from what the rank has by then."""
    network = opened(0.0, 8.0)
    network.ranks[0].ask(1, 0.5)
    assert network.ranks[0].end().item() == 0.0
    network.deliver_all()
    network.ranks[0].begin(tensor(1.0))
    assert network.ranks[0].end().item() == 5.0
    assert network.ranks[1].end().item() == 4.0


def test_a_question_that_lies_too_long_is_withdrawn():
    """The closed rank gives it back; a rank that has answered already need not."""
    network = opened(0.0, 8.0)
    network.ranks[1].end()
    network.ranks[0].ask(1, 0.5)
    network.ranks[0].end()
    network.deliver_all()
    assert network.ranks[0].waits_for == 1
    network.time = 1.0
    network.ranks[0].begin(tensor(0.0))
    network.ranks[0].end()
    network.deliver_all()
    assert network.ranks[0].waits_for is None
    network.ranks[1].begin(tensor(8.0))
    network.deliver_all()
    assert network.ranks[1].end().item() == 8.0


@pytest.mark.parametrize("told", [True, False])
def test_who_has_left_or_is_silent_is_asked_no_more(told):
    """Its partner averages with others again: at once if it knows, else after a while."""
    network = opened(0.0, 8.0, 4.0)
    network.ranks[0].ask(1, 0.5)
    if told:
        network.gone.add(1)
    for _ in range(110):
        network.time += 1.0
        network.ranks[0].end()
        network.ranks[0].begin(tensor(0.0))
    assert network.ranks[0].waits_for is None
    assert not network.ranks[0].ask(1, 0.5)
    assert network.ranks[0].ask(2, 0.5)
    network.deliver(0, 2)
    network.deliver(2, 0)
    assert network.ranks[0].end().item() == 2.0
    if not told:  # until it is heard of
        network.deliver_all()
        network.ranks[0].begin(tensor(0.0))
        assert network.ranks[0].ask(1, 0.5)


def test_who_concludes_refuses_until_it_opens_again():
    """Also what lay there."""
    network = opened(0.0, 8.0)
    network.ranks[1].end()
    network.ranks[0].ask(1, 0.5)
    network.deliver_all()
    network.ranks[1].conclude()
    network.deliver_all()
    assert network.ranks[0].waits_for is None
    network.ranks[0].ask(1, 0.5)
    network.deliver_all()
    assert network.ranks[0].waits_for is None
    network.ranks[1].begin(tensor(8.0))
    network.ranks[0].ask(1, 0.5)
    network.deliver_all()
    assert [rank.end().item() for rank in network.ranks] == [4.0, 4.0]


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_is_kept_in_any_order_of_events(seed):
    """Openings, questions and arrivals at random: at the end of all messages no sum has changed."""
    dice, n = random.Random(seed), 5
    values = [float(rank**2) for rank in range(n)]
    network = opened(*values)
    for _ in range(400):
        rank = dice.randrange(n)
        one = network.ranks[rank]
        event = dice.choice(["ask", "toggle", "deliver", "deliver"])
        network.time += 0.02 * dice.random()
        if event == "ask" and one.open:
            one.ask(dice.choice([peer for peer in range(n) if peer != rank]), 0.5)
        elif event == "toggle" and one.open:
            values[rank] = one.end().item()
        elif event == "toggle":
            one.begin(tensor(values[rank]))
        ways = [way for way, messages in network.under_way.items() if messages]
        if event == "deliver" and ways:
            network.deliver(*dice.choice(ways))
    for rank, one in enumerate(network.ranks):
        if not one.open:
            one.begin(tensor(values[rank]))
    network.deliver_all()
    final = [one.end().item() for one in network.ranks]
    assert sum(final) == pytest.approx(sum(float(rank**2) for rank in range(n)), rel=1e-12)
    assert sum(one.averages for one in network.ranks) > 8
    assert max(final) - min(final) < 16.0


def test_a_question_travels_with_what_the_rank_has_when_it_asks():
    """What happens to its tensor afterwards does not change the message."""
    network = opened(3.0, 0.0)
    network.ranks[0].ask(1, 0.5)
    network.ranks[0].end().fill_(7.0)
    word, _, weight, sent = network.under_way[0, 1][0]
    assert (word, weight, sent.item()) == (ASK, 0.5, 3.0)


def test_a_look_sees_what_averages_have_made_and_changes_nothing():
    """Also what came after the end, which the rank itself takes in as it opens again."""
    network = opened(0.0, 8.0)
    assert network.ranks[0].look()[1].item() == 0.0
    network.ranks[0].ask(1, 0.5)
    network.ranks[0].end()
    network.deliver_all()
    network.time = 3.0
    looks = [rank.look() for rank in network.ranks]
    assert [(age, values.item()) for age, values in looks] == [(3.0, 4.0), (3.0, 4.0)]
    looks[1][1].zero_()
    assert [rank.end().item() for rank in network.ranks] == [0.0, 4.0]
    assert network.ranks[0].steps == 1
    network.ranks[0].begin(tensor(0.0))
    assert network.ranks[0].end().item() == 4.0


def test_there_is_nothing_to_see_before_the_first_opening():
    """A pair that has made no step yet has no tensor to show."""
    assert Network(1).ranks[0].look() == (0.0, None)
