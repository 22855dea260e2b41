"""BlueFog's module ``mpi_ops``: all of its operations, also those that it does not export."""

from __future__ import annotations

from asyncddp.integrations.bluefog.basics import *  # noqa: F403 - all names, as over there
from asyncddp.integrations.bluefog.collective_verbs import *  # noqa: F403
from asyncddp.integrations.bluefog.neighbor_verbs import *  # noqa: F403
from asyncddp.integrations.bluefog.timeline_functions import timeline_context as timeline_context
from asyncddp.integrations.bluefog.timeline_functions import (
    timeline_end_activity as timeline_end_activity,
)
from asyncddp.integrations.bluefog.timeline_functions import (
    timeline_start_activity as timeline_start_activity,
)
from asyncddp.integrations.bluefog.topology_settings import *  # noqa: F403
from asyncddp.integrations.bluefog.verb_variants import poll as poll
from asyncddp.integrations.bluefog.verb_variants import synchronize as synchronize
from asyncddp.integrations.bluefog.verb_variants import wait as wait
from asyncddp.integrations.bluefog.window_verbs import *  # noqa: F403
