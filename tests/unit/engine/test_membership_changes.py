"""Members that change: requests of a process that joins, at awkward moments."""

from __future__ import annotations

from asyncddp.engine.membership_changes import MembershipChanges
from asyncddp.membership import View
from asyncddp.membership.messages import Commit


class Sent:
    """Queue of messages that remembers them."""

    def __init__(self):
        self.messages = []

    def put(self, peer, message):
        self.messages.append((peer, message))


def changes_of(rank, outside=None):
    sent = Sent()
    return MembershipChanges(rank, 3, dict, sent, outside), sent


def test_a_process_that_joins_is_no_member_of_the_view_in_which_its_rank_has_died():
    """The others may not know yet, and count the process before it."""
    joins, _ = changes_of(2, View.first(range(3)))
    assert joins.awaits_part
    later = View(2, (0, 1, 2), {}, joined=(2,), voters=(0, 1))
    joins.receive(0, Commit(later))
    assert joins.progress() is not None  # raised IsolatedError
    assert joins.view_to_join().joined == (2,)


def test_a_request_that_comes_while_the_view_with_its_rank_begins_is_none_for_another():
    """The rank has asked again, and would have been left out of the next view as dead."""
    member, sent = changes_of(0)
    agreed = View(1, (0, 1, 2), {}, joined=(2,), left=(2,), voters=(0, 1))
    member.receive(1, Commit(agreed))
    member.admit(2)
    assert member.progress().number == 1
    assert sent.messages == []
