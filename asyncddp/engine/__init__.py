"""Verbs under way: requests, handles, matching by name, deadlines, the worker thread.

Nothing in here knows a particular verb, and nothing negotiates: every message carries a header, and
the rank that receives it checks that header against what it has asked for.
"""

from __future__ import annotations

from asyncddp.engine.desk import Desk
from asyncddp.engine.engine import Engine
from asyncddp.engine.handle import Handle
from asyncddp.engine.operation import Operation, Program, Steps, Wait
from asyncddp.engine.posting import Form
from asyncddp.engine.stream import Stream

__all__ = ["Desk", "Engine", "Form", "Handle", "Operation", "Program", "Steps", "Stream", "Wait"]
