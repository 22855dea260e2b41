"""The timeline's names, which are ours."""

from __future__ import annotations

from asyncddp.context.activities import (
    timeline_context,
    timeline_end_activity,
    timeline_start_activity,
)

__all__ = ["timeline_context", "timeline_end_activity", "timeline_start_activity"]
