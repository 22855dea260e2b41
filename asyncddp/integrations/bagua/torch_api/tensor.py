"""Communicated tensors: attributes and methods that Bagua adds to ``torch.Tensor``.

A communicated tensor has a name, and refers to the *effective* tensor that is sent, which may be
another tensor, such as the gradient of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, cast

import torch

from asyncddp.errors import ArgumentError, UsageError
from asyncddp.tensors.allocation import zeros_like

__all__ = ["BaguaTensor", "CommunicatedTensor", "record_of"]

Getter: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Setter: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]

_ATTRIBUTE = "_bagua_record"


class ReadinessListener(Protocol):
    """Interface of an object that is notified when a tensor is ready to be sent."""

    def mark_communication_ready(self, record: CommunicatedTensor) -> None:
        """Handle that a tensor is ready."""


class CommunicatedTensor:
    """Record of a communicated tensor: its name, the tensor to send, and the listener to notify.

    Attributes:
        proxy: The tensor on which ``ensure_bagua_tensor`` was called.
        name, module_name: Its name, and that of its model.
        listener: Object to notify when it is ready; set when its bucket is registered.
        home: View of its bucket's flat tensor that stores the effective tensor, if there is one.
    """

    def __init__(
        self,
        proxy: torch.Tensor,
        name: str,
        module_name: str,
        getter: Getter | None,
        setter: Setter | None,
    ) -> None:
        self.proxy, self.name, self.module_name = proxy, name, module_name
        self._getter, self._setter = getter, setter
        self.listener: ReadinessListener | None = None
        self.home: torch.Tensor | None = None

    @property
    def effective(self) -> torch.Tensor:
        """Tensor that is sent."""
        found = self.proxy if self._getter is None else self._getter(self.proxy)
        if not isinstance(found, torch.Tensor):
            raise UsageError(
                f"communicated tensor {self.name}: its getter_closure gave {found!r} in place of a "
                "tensor; call bagua_ensure_grad() before, where it is a gradient"
            )
        return found

    def replace(self, tensor: torch.Tensor) -> None:
        """Replace the effective tensor by another tensor."""
        with torch.no_grad():
            if self._setter is not None:
                self._setter(self.proxy, tensor)
            elif self._getter is None:
                self.proxy.data = tensor
            else:
                raise UsageError(
                    f"communicated tensor {self.name}: it has a getter_closure and no "
                    "setter_closure, so that it cannot move to a flat bucket; give both"
                )

    def move_to(self, home: torch.Tensor) -> None:
        """Copy the effective tensor into a view of a flat tensor, which replaces it."""
        with torch.no_grad():
            home.copy_(self.effective)
        self.home = home
        self.replace(home)

    def return_home(self) -> None:
        """Move the effective tensor back into its flat tensor, if it was replaced meanwhile."""
        if self.home is not None and self.effective.data_ptr() != self.home.data_ptr():
            self.move_to(self.home)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a parameter that is copied or saved does not take it along


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, as a ``getter_closure`` does."""
    return parameter.grad  # type: ignore[return-value] # None is refused where it is used


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Replace the gradient of a parameter, as a ``setter_closure`` does."""
    parameter.grad = gradient


def record_of(tensor: torch.Tensor) -> CommunicatedTensor:
    """Return the record of a communicated tensor.

    Raises:
        ArgumentError: ``ensure_bagua_tensor`` was not called on it.
    """
    record = getattr(tensor, _ATTRIBUTE, None)
    if record is None:
        raise ArgumentError(
            f"expected a communicated tensor, got one of shape {tuple(tensor.shape)} that is none; "
            "call ensure_bagua_tensor(name, module_name) on it first"
        )
    return cast("CommunicatedTensor", record)


class BaguaTensor:
    """Methods added to every ``torch.Tensor`` when ``torch_api`` is imported, as with Bagua.

    Example:
        >>> import asyncddp.integrations.bagua.torch_api
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> sent = weight.bagua_ensure_grad().ensure_bagua_tensor(
        ...     "weight", "model", getter_closure=lambda parameter: parameter.grad
        ... )
        >>> sent is weight, weight.bagua_getter_closure()
        (True, tensor([0., 0.]))
    """

    def is_bagua_tensor(self) -> bool:
        """Return True if this is a communicated tensor."""
        return hasattr(self, _ATTRIBUTE)

    @property
    def bagua_tensor_name(self) -> str:
        """Name of the communicated tensor; other tensors lack the attribute."""
        record = getattr(self, _ATTRIBUTE, None)
        if record is None:
            raise AttributeError("bagua_tensor_name: this tensor is no communicated one")
        return str(record.name)

    def ensure_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> torch.Tensor:
        """Make this tensor a communicated one, and return it.

        Args:
            name: Name of the tensor, unique in the model.
            module_name: Name of the model, ``bagua_ddp.bagua_module_name``.
            getter_closure: Function from this tensor to the one to send; by default this one is
                sent.
            setter_closure: Function ``setter(this, other)`` that makes another tensor the one to
                send.
        """
        tensor = _tensor(self)
        names = str(name or id(tensor)), str(module_name)
        record = CommunicatedTensor(tensor, *names, getter_closure, setter_closure)
        setattr(tensor, _ATTRIBUTE, record)
        return tensor

    def to_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> torch.Tensor:
        """Return a view of this tensor as a communicated tensor; this tensor is unchanged.

        The arguments are those of :meth:`ensure_bagua_tensor`; closures get this tensor.
        """
        tensor = _tensor(self)
        names = str(name or id(tensor)), str(module_name)
        view = tensor.detach()
        setattr(
            view, _ATTRIBUTE, CommunicatedTensor(tensor, *names, getter_closure, setter_closure)
        )
        return view

    def bagua_ensure_grad(self) -> torch.Tensor:
        """Set a missing gradient of this parameter to zeros, and return the parameter."""
        tensor = _tensor(self)
        if tensor.grad is None:
            tensor.grad = zeros_like(tensor.data)
        return tensor

    def bagua_getter_closure(self) -> torch.Tensor:
        """Return the effective tensor."""
        return record_of(_tensor(self)).effective

    def bagua_setter_closure(self, tensor: torch.Tensor) -> None:
        """Replace the effective tensor by another tensor."""
        record_of(_tensor(self)).replace(tensor)

    def bagua_set_storage(self, storage: Any, storage_offset: int = 0) -> None:
        """Move the effective tensor into a storage, at an offset in elements."""
        record = record_of(_tensor(self))
        like = record.effective
        flat = like.detach().new_empty(0)
        flat.set_(storage, storage_offset, (like.numel(),), (1,))
        record.move_to(flat.view(like.shape))

    def bagua_mark_communication_ready(self) -> None:
        """Mark the effective tensor as ready to be sent, after pending work of its device."""
        record = record_of(_tensor(self))
        if record.listener is None:
            raise UsageError(
                f"communicated tensor {record.name}: it is in no registered bucket; return it from "
                "init_tensors, or put it into a BaguaBucket"
            )
        record.listener.mark_communication_ready(record)

    bagua_mark_communication_ready_without_synchronization = bagua_mark_communication_ready


def _tensor(methods: object) -> torch.Tensor:
    """Cast ``self`` of a :class:`BaguaTensor` method to the tensor that it is."""
    return cast("torch.Tensor", methods)


def add_methods() -> None:
    """Add the methods of :class:`BaguaTensor` to all tensors."""
    for name, method in vars(BaguaTensor).items():
        if not name.startswith("_"):
            setattr(torch.Tensor, name, method)
