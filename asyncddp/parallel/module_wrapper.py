"""Base classes of module wrappers, which keep parameter names and give the average model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from typing_extensions import Self

from asyncddp.context.context import use
from asyncddp.errors import UsageError
from asyncddp.ops.allreduce_tensors import average_module, dense_floats
from asyncddp.parallel.reducer import Reducer
from asyncddp.tensors.allocation import TensorBackup
from asyncddp.tensors.local_parts import reshard, shard

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class TransparentModuleWrapper(torch.nn.Module):
    """Base class of module wrappers that add no prefix to names of parameters and submodules.

    Example:
        >>> wrapper = TransparentModuleWrapper(torch.nn.Linear(1, 1))
        >>> [name for name, _ in wrapper.named_parameters()]
        ['weight', 'bias']
    """

    module: torch.nn.Module

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "module", model)  # not as a submodule, which would be a prefix
        for shared in _SHARED:
            self.__dict__[shared] = getattr(model, shared)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the wrapper and the model."""
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state dict, without a prefix for the wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Iterate over the model and its submodules."""
        yield from self.module.named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Apply a function to the model and its submodules."""
        self.module.apply(fn)
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} belongs to a running world and cannot be copied or pickled; "
            "copy its module, or keep its state dicts"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"


class AveragedModelAccess(TransparentModuleWrapper):
    """Base class of module wrappers that give access to the average of all ranks' models."""

    _reducer: Reducer
    _averages_buffers: bool  # beside parameters

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._backup: TensorBackup | None = None  # this rank's parameters, while averages are shown
        self._closed = False

    def _require_open(self, caller: str) -> None:
        if self._closed:
            raise UsageError(f"{caller}: called after close(); make another wrapper")

    def _average(self) -> None:
        """Conclude steps through windows, and replace parameters by their average; collective."""
        averager = self._reducer.averager
        averager.windows.conclude()
        with use(averager.context), torch.no_grad():
            average_module(self.module, buffers=self._averages_buffers)

    def _restore_own(self) -> None:
        """Restore this rank's own parameters bit for bit, if averages have replaced them."""
        if self._backup is not None:
            reshard([self.module])  # what was gathered has the averages
            self._backup.restore()
        self._backup = None

    def global_avg(self) -> None:
        r"""Replace the parameters of all ranks by their average, to train on from it; collective.

        .. math:: x_i \leftarrow \frac{1}{n} \sum_j x_j

        Pending averages are written first. Optimizers, schedulers and gradients stay unchanged.

        Raises:
            UsageError: After :meth:`close`.
            PeerError: A rank failed.
        """
        self._require_open("global_avg")
        self._restore_own()
        self._reducer.end_failed_step()
        self._reducer.conclude()
        self._average()
        self._reducer.restart(averaged=True)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, and restore each rank's own parameters after :meth:`eval`.

        Args:
            mode: False is ``eval(average=False)``.
        """
        if mode:
            self._restore_own()
        self._reducer.training = mode
        return super().train(mode)

    def eval(self, average: bool = True) -> Self:
        """Set evaluation mode, with the ranks' average model in place until :meth:`train`.

        Collective, unless ``average=False``. Until :meth:`train`, the state dict is that of the
        average model, and backward passes make no steps. :meth:`train` restores each rank's own
        parameters bit for bit, and sends nothing; pending averages are written in their step.

        Args:
            average: False shows this rank's own parameters.

        Raises:
            PeerError: A rank failed.
        """
        if average and self._backup is None and not self._closed:
            self._reducer.end_failed_step()
            self._reducer.wait_for_reads()
            reshard([self.module])
            own = dense_floats(self.module, buffers=self._averages_buffers)
            self._backup = TensorBackup(map(shard, own))
            self._average()
            self._reducer.averager.windows.resume()
        return self.train(False)
