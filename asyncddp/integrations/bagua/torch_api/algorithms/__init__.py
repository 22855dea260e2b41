"""Bagua's ``bagua.torch_api.algorithms``."""

from asyncddp.integrations.bagua.torch_api.algorithms import q_adam

__all__ = ["q_adam"]
