"""Trainable part of a model: ranks average and save only this, not the frozen parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from typing_extensions import override


class TrainablePart(torch.nn.Module):
    """View of a model's trainable parameters, such as LoRA adapters without the frozen base model.

    Frozen parameters are equal on all ranks, so that ranks need neither average nor save them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        every = super().named_parameters(prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, parameter in every if parameter.requires_grad)

    @override
    def state_dict(self, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override] # no overloads
        every = super().named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in every if not parameter.requires_grad}
        state = super().state_dict(**kwargs)
        return {name: value for name, value in state.items() if name not in frozen}

    @override
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = False, assign: bool = False
    ) -> Any:
        return super().load_state_dict(state_dict, False, assign)
