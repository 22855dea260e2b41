"""``DistributedDataParallel`` with torch's arguments and one of Bagua's algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.torch_api.algorithms.base import Algorithm
from asyncddp.integrations.bagua.torch_api.algorithms.gradient_allreduce import (
    GradientAllReduceAlgorithm,
)
from asyncddp.integrations.bagua.torch_api.data_parallel.bagua_distributed import wrap
from asyncddp.integrations.bagua.torch_api.process_group import (
    BaguaProcessGroup,
    from_torch_group,
)

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(torch.nn.Module):
    """Module that trains another module on all ranks, like torch's module of this name.

    Its state dict has the prefix ``module.``, like torch's. Arguments that Bagua passes on to
    torch's module take effect if they mean something here, and otherwise raise an error.

    Args:
        module: The module.
        device_ids: None, or a list with the one device on which the module is.
        output_device: None, or that device.
        dim: 0: a batch is not scattered over devices.
        broadcast_buffers: Whether buffers are set to the first rank's at the start; they are not
            synchronised later.
        process_group: The ranks that train, also a group of torch.distributed; all by default.
        bucket_cap_mb: Has no effect: ``BAGUA_DEFAULT_BUCKET_SIZE`` is the size of buckets.
        find_unused_parameters: Whether parameters may be unused. With the library's methods they
            always may.
        check_reduction: Has no effect, as with torch.
        gradient_as_bucket_view: Has no effect on results.
        static_graph: Has no effect.
        optimizers: The optimizers that make the steps. Without any, only gradients are averaged.
        algorithm: The algorithm; None averages gradients.

    Raises:
        ArgumentError: An invalid argument.

    Example:
        >>> import asyncddp as bf
        >>> import asyncddp.integrations.bagua.torch_api as bagua
        >>> def gradient():
        ...     bagua.init_process_group()
        ...     ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     ddp(torch.full((1, 1), float(bagua.get_rank()))).sum().backward()
        ...     return ddp.module.weight.grad.item()
        >>> with bf.local_world(3) as world:
        ...     world.run(gradient)
        [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm | None = None,
    ) -> None:
        super().__init__()
        _check_devices(module, [*(device_ids or ()), output_device])
        if dim != 0 or len(device_ids or ()) > 1:
            raise ArgumentError(
                "DistributedDataParallel: arguments dim, device_ids: expected dim=0 and at most "
                f"one device, got dim={dim} and {device_ids}; start a rank for each device"
            )
        if process_group is not None and not isinstance(process_group, BaguaProcessGroup):
            process_group = from_torch_group(process_group)
        self.module = module
        self._wrapper = wrap(
            module,
            optimizers,
            algorithm or GradientAllReduceAlgorithm(),
            process_group,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication inside a ``with`` block.

        The next backward pass outside the block averages the accumulated gradients.
        """
        return self._wrapper.no_sync()


def _check_devices(module: torch.nn.Module, devices: Sequence[int | torch.device | None]) -> None:
    """Raise ArgumentError unless given devices are those of the module's parameters."""
    given = [one for one in devices if one is not None]
    wanted = {torch.device("cuda", one) if isinstance(one, int) else one for one in given}
    found = {parameter.device for parameter in module.parameters()}
    if wanted and not wanted <= found:
        raise ArgumentError(
            "DistributedDataParallel: arguments device_ids, output_device: expected the device on "
            f"which the module is, {sorted(map(str, found))}, got {sorted(map(str, wanted))}; move "
            "the module there before"
        )
