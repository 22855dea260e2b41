"""An exchange whose sends are under way says for which ranks it waits."""

from __future__ import annotations

from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.engine.messages import ExchangeSignature, MatchKey
from asyncddp.transport.base import Request


class UnderWay(Request):
    """A send that does not end."""

    def done(self):
        return False

    def abandon(self):
        pass


def test_nobody_waits_for_a_peer_that_was_left_out_beside_one_that_is_slow():
    """An average named the dead neighbour as needed while a send to the living one went on."""
    key = MatchKey("x", 1)
    exchange = ExchangeRequest(
        key, ExchangeSignature("neighbor_allreduce", "float32", ()), (), (1, 2)
    )
    exchange.tolerates_loss = True
    exchange.sends = [(peer, UnderWay()) for peer in (1, 2)]
    assert exchange.sent().missing() == [(1, key), (2, key)]
    exchange.leave_out(2)
    assert exchange.sent().missing() == [(1, key)]
