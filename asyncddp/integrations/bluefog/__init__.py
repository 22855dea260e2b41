"""BlueFog's API on asyncddp: a BlueFog script runs after changing its two import lines.

::

    import asyncddp.integrations.bluefog as bf  # was: import bluefog.torch as bf
    from asyncddp.integrations.bluefog import topology_util  # was: from bluefog.common import …

Names, arguments, defaults and results are BlueFog's; the operations are asyncddp's own. What
differs, since BlueFog is wrong there or does without:

- Neighbours are matched by rank: ``src_weights`` may name some of them, the others count 0.
  Results are never the input's own memory. Weights stay float64. Disagreement on a root raises.
- Nothing is negotiated. ``set_skip_negotiate_stage`` sets a flag without effect;
  ``pair_gossip`` works whatever it is. What ranks do not agree about raises an exception that
  names them, a ``ValueError`` as in BlueFog; with ``enable_topo_check`` on the ranks concerned.
- Any number of puts may be in flight in one window; a put completes while its target computes, and
  is read whole. ``get_win_version`` counts what was accumulated too. ``win_get`` gives what was
  published: in ``win_create``, in puts of the window's own tensor, in ``win_update``.
- ``win_mutex(for_self=True)`` holds off in-neighbours, and may be taken twice by one thread. Its
  ``ranks`` are neighbours: others have no buffer to hold.
- ``set_topology`` with an equal graph and another ``is_weighted`` is not ignored. The matrix of
  ``Infer…`` has columns that sum to 1. Graphs may have their nodes in any order.
- Optimizers take over the state of what they wrap, and work with any ``torch.optim`` optimizer,
  closures, frozen, unused and shared parameters, leaf models, accumulation and GradScaler.
  Gradients are averaged when ``backward()`` returns: ``synchronize()`` and ``skip_synchronize()``
  need not be called. ``DistributedPushSumOptimizer`` and ``DistributedPullGetOptimizer`` work, and
  are exported. ``DistributedWinPutOptimizer`` and ``DistributedPullGetOptimizer`` wait for those
  neighbours that have made fewer averagings, since in BlueFog puts wait for MPI, which keeps ranks
  near; ``asyncddp.DistributedWinPutOptimizer`` waits for nobody.
- ``broadcast_optimizer_state`` sends options and numbers exactly, and makes no step;
  ``allreduce_parameters`` leaves integers as they are.
- Tensors may be non-contiguous, 0-dim, bfloat16 or complex; lists may be generators.
- ``init()`` may follow ``shutdown()``. A wait that is too long raises, after ``ASYNCDDP_TIMEOUT``.
"""

from asyncddp.integrations.bluefog import (
    basics,
    bluefog_optimizer,
    topology_settings,
    topology_util,
    verb_variants,
    verbs,
    window_verbs,
)
from asyncddp.integrations.bluefog.basics import *  # noqa: F403
from asyncddp.integrations.bluefog.bluefog_optimizer import *  # noqa: F403
from asyncddp.integrations.bluefog.topology_settings import *  # noqa: F403
from asyncddp.integrations.bluefog.topology_util import *  # noqa: F403
from asyncddp.integrations.bluefog.verb_variants import *  # noqa: F403
from asyncddp.integrations.bluefog.verbs import *  # noqa: F403
from asyncddp.integrations.bluefog.window_verbs import *  # noqa: F403

__all__ = [
    "topology_util", *basics.__all__, *bluefog_optimizer.__all__, *topology_settings.__all__,
    *topology_util.__all__, *verb_variants.__all__, *verbs.__all__, *window_verbs.__all__,
]  # fmt: skip
