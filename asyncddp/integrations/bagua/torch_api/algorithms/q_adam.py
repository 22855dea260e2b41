"""Bagua's ``bagua.torch_api.algorithms.q_adam``."""

from asyncddp.optim.qadam import QAdamOptimizer

__all__ = ["QAdamOptimizer"]
