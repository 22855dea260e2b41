"""Bagua's API on asyncddp: only import lines change, and calls run on CPU as well as GPU.

::

    import asyncddp.integrations.bagua.torch_api as bagua  # was: import bagua.torch_api as bagua
    from asyncddp.integrations.bagua.torch_api.algorithms import bytegrad

The modules of ``bagua.torch_api`` have the same paths below :mod:`asyncddp.integrations.bagua`.
``python -m bagua.distributed.launch`` becomes ``python -m asyncddp.integrations.bagua.launch``, and
``baguarun`` exists too. Bagua's algorithms are methods of the library; algorithms that users write
with Bagua's hooks, and the old API, run on the library's verbs. As with Bagua, importing
``torch_api`` adds methods such as ``with_bagua`` to all modules, and such as
``ensure_bagua_tensor`` to all tensors. Deliberate differences from Bagua:

- ``with_bagua`` makes buffers and options of optimizers equal at the start, too; wrapping a model
  again averages the ranks' models, in place of dropping all but one.
- Hierarchical averages weight nodes by their numbers of ranks; on one node nothing is quantised.
- Asynchronous averaging adds its change between two steps; there is no lock and no thread.
- Evaluation never communicates and counts no step. Gradients may be set to None. A parameter that
  lets ranks wait is named in an error.
- In the old API a switch works with integer buffers, and ``message_size`` closes buckets.
- ``QAdamOptimizer`` uses every gradient, where Bagua leaves out that of step ``warmup_steps``.
- ``LoadBalancingDistributedSampler`` fills the last chunk up with samples of like complexity.
- ``load_checkpoint`` honours ``strict``; files are whole or not there, and each rank may save its
  own model. ``fuse_optimizer`` refuses optimizers whose update of an element depends on others.
- One command starts the ranks of all nodes, and there is no service process.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Load ``BaguaStrategy`` on first use, since it needs Lightning."""
    if name == "BaguaStrategy":
        from asyncddp.integrations.bagua.lightning import BaguaStrategy

        return BaguaStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
