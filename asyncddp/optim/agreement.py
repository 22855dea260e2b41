"""Whether all ranks hold the same model and settings, found out once, before training."""

from __future__ import annotations

from itertools import zip_longest

from asyncddp.algorithms.rhythms import Setting
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import MismatchError
from asyncddp.ops.objects import allgather_object

__all__ = ["agree", "facts_of"]


def facts_of(setting: Setting, update_in_backward: bool) -> list[str]:
    """What must be equal on all ranks."""
    mixer = setting.mixer
    facts = [
        f"algorithm {mixer.algorithm.name!r}",
        f"communication {mixer.communication.name!r}",
        f"num_steps_per_communication={setting.every}",
        f"bucket size {setting.cap} bytes",
        f"update_in_backward={update_in_backward}",
        f"wrapper {mixer.label!r}",
    ]
    return facts + [
        f"parameter {name} of shape {tuple(parameter.shape)}, strides {parameter.stride()}, "
        f"{parameter.dtype}"
        for name, parameter in setting.trainable()
    ]


def agree(context: Context, facts: list[str]) -> None:
    """Compare facts over all ranks; collective.

    Args:
        context: The world.
        facts: Sentences about this rank, in an order that does not depend on it.

    Raises:
        MismatchError: On every rank, if any two differ; the message shows the first difference.
    """
    if context.size == 1:
        return
    with use(context):
        every = allgather_object(facts)
    for rank, theirs in enumerate(every):
        for ours, other in zip_longest(every[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise MismatchError(
                    f"rank {context.rank}: DistributedOptimizer needs the same model and settings "
                    f"on all ranks, but rank 0 has {ours}, and rank {rank} has {other}"
                )
