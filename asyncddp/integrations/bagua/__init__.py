"""Bagua's names on asyncddp: import lines change, and calls stay.

::

    import asyncddp.integrations.bagua.torch_api as bagua  # was: import bagua.torch_api as bagua
    from asyncddp.integrations.bagua.torch_api.contrib import fuse_optimizer

What is behind ``bagua.torch_api`` has the same path behind :mod:`asyncddp.integrations.bagua`.
``python -m bagua.distributed.launch`` becomes ``python -m asyncddp.integrations.bagua.launch``, and
``baguarun`` is there too. What differs from Bagua, since it is wrong there or does without:

- ``QAdamOptimizer`` uses every gradient, where Bagua leaves out that of step ``warmup_steps``.
- ``LoadBalancingDistributedSampler`` fills the last chunk up with samples of like complexity.
- ``load_checkpoint`` honours ``strict``; files are whole or not there, and each rank may save its
  own model. ``fuse_optimizer`` refuses optimizers whose update of an element depends on others.
- One command starts the ranks of all nodes, and there is no service process.
"""
