"""BlueFog's functions that record activities in the timeline, taken from asyncddp unchanged."""

from __future__ import annotations

from asyncddp.context.timeline_activities import (
    timeline_context,
    timeline_end_activity,
    timeline_start_activity,
)

__all__ = ["timeline_context", "timeline_end_activity", "timeline_start_activity"]
