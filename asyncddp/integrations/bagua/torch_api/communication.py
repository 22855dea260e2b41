"""Bagua's ``bagua.torch_api.communication``: joining the world, groups and collectives."""

from asyncddp.integrations.bagua.torch_api import process_group
from asyncddp.integrations.bagua.torch_api.process_group import *  # noqa: F403

__all__ = [*process_group.__all__]
