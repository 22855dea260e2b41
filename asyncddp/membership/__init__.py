"""Membership of a run: ranks agree on which of them take part, and from which round on.

Here belongs the agreement of ranks on views, as a state machine without sockets, threads or clocks.
The engine's progress loop feeds it messages, evidence and times, and sends its messages. Two ranks
never go on in different views of one number, and a committed view never changes.
"""

from asyncddp.membership.agreement import Agreement
from asyncddp.membership.messages import MembershipMessage
from asyncddp.membership.view import View

__all__ = ["Agreement", "MembershipMessage", "View"]
