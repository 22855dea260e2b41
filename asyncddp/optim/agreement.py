"""Whether all ranks hold the same model and settings, found out once, before training."""

from __future__ import annotations

from asyncddp.algorithms.rhythms import Setting
from asyncddp.context import Context
from asyncddp.ops import agreement

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
    agreement.agree(
        context, "DistributedOptimizer needs the same model and settings on all ranks", facts
    )
