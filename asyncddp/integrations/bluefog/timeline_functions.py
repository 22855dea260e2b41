"""BlueFog's timeline functions, which are asyncddp's own."""

from __future__ import annotations

from asyncddp.context.timeline_activities import (
    timeline_context,
    timeline_end_activity,
    timeline_start_activity,
)

__all__ = ["timeline_context", "timeline_end_activity", "timeline_start_activity"]
