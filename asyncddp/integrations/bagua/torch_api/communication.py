"""Bagua's ``bagua.torch_api.communication``: initialisation, groups and collectives."""

from asyncddp.integrations.bagua.torch_api import (
    collectives,
    collectives_in_place,
    process_group,
)
from asyncddp.integrations.bagua.torch_api.collectives import *  # noqa: F403
from asyncddp.integrations.bagua.torch_api.collectives_in_place import *  # noqa: F403
from asyncddp.integrations.bagua.torch_api.communicator import Communicator, ReduceOp
from asyncddp.integrations.bagua.torch_api.process_group import *  # noqa: F403

__all__ = [
    "Communicator", "ReduceOp", *collectives.__all__, *collectives_in_place.__all__,
    *process_group.__all__,
]  # fmt: skip
