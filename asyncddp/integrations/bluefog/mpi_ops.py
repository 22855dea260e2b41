"""The module in which BlueFog keeps its verbs, with the names that it does not export."""

from __future__ import annotations

from asyncddp.integrations.bluefog.basics import *  # noqa: F403 - all names, as over there
from asyncddp.integrations.bluefog.collectives import *  # noqa: F403
from asyncddp.integrations.bluefog.forms import poll as poll
from asyncddp.integrations.bluefog.forms import synchronize as synchronize
from asyncddp.integrations.bluefog.forms import wait as wait
from asyncddp.integrations.bluefog.neighbors import *  # noqa: F403
from asyncddp.integrations.bluefog.timeline import timeline_context as timeline_context
from asyncddp.integrations.bluefog.timeline import timeline_end_activity as timeline_end_activity
from asyncddp.integrations.bluefog.timeline import (
    timeline_start_activity as timeline_start_activity,
)
from asyncddp.integrations.bluefog.topologies import *  # noqa: F403
from asyncddp.integrations.bluefog.windows import *  # noqa: F403
