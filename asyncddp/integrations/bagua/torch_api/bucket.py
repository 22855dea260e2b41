"""``BaguaBucket``: tensors that are communicated together, and the operations on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.compression import Compressor
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.integrations.bagua.torch_api.bucket_operations import (
    BucketOperation,
    OperatedBucket,
    reduced,
)
from asyncddp.integrations.bagua.torch_api.decentralized_operations import (
    DecentralizedOperation,
    compressed_differences,
)
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup
from asyncddp.integrations.bagua.torch_api.tensor import CommunicatedTensor, record_of
from asyncddp.tensors.allocation import detached_copy, zeros
from asyncddp.tensors.buckets import require_untied

__all__ = ["BaguaBucket"]


class BaguaBucket:
    r"""Bucket of communicated tensors of one dtype, device and model, with its operations.

    The operations run when all tensors are ready and all earlier buckets have been launched.

    Args:
        tensors: The tensors, after ``ensure_bagua_tensor`` was called on each of them.
        name: Name of the bucket, unique in its model.
        flatten: Whether to move the effective tensors into one flat tensor, on which operations run
            in place; otherwise each operation copies them there and back.
        alignment: The number of elements is padded with zeros to a multiple of it.

    Attributes:
        bagua_module_name: Name of the model.
        padding: Number of zeros appended.
        operations: The operations, in the order in which they run.
        label: Name of the bucket in messages, unique in this world; set on registration.

    Raises:
        ArgumentError: No tensors, or tensors that cannot be in one bucket.

    Example:
        >>> import asyncddp.integrations.bagua.torch_api
        >>> weights = [torch.ones(2), torch.ones(3)]
        >>> tensors = [w.ensure_bagua_tensor(f"w{i}", "model") for i, w in enumerate(weights)]
        >>> bucket = BaguaBucket(tensors, name="weights", flatten=True, alignment=4)
        >>> bucket.bytes(), bucket.padding, bucket.check_flatten()
        (32, 3, True)
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], name: str, flatten: bool, alignment: int = 1
    ) -> None:
        self.tensors, self.name, self.label = list(tensors), name, name
        self.records = [record_of(tensor) for tensor in self.tensors]
        like = self._checked(self.records)
        self.bagua_module_name = self.records[0].module_name
        step = checked_integer("BaguaBucket: argument alignment", alignment, 1)
        self._sizes = [one.effective.numel() for one in self.records]
        self.padding = -sum(self._sizes) % step
        self.numel = sum(self._sizes) + self.padding
        self.operations: list[BucketOperation] = []
        self._flat: torch.Tensor | None = None
        self._like = like
        if flatten:
            require_untied([(one.name, one.effective) for one in self.records])
            self._flat = zeros((self.numel,), like.dtype, like.device)
            for record, view in zip(self.records, self._views_of(self._flat), strict=True):
                record.move_to(view)

    def _checked(self, records: Sequence[CommunicatedTensor]) -> torch.Tensor:
        """Raise ArgumentError unless tensors fit into one bucket; return one effective tensor."""
        where = f"BaguaBucket {self.name!r}: argument tensors"
        if not records:
            raise ArgumentError(f"{where}: expected at least one tensor, got none")
        names = [record.name for record in records]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ArgumentError(f"{where}: expected a name for each, got two of name {twice!r}")
        forms = [(one.module_name, one.effective.dtype, one.effective.device) for one in records]
        for name, form in zip(names, forms, strict=True):
            if form != forms[0]:
                raise ArgumentError(
                    f"{where}: expected tensors of one model, dtype and device, got "
                    f"{', '.join(map(str, forms[0]))} for {names[0]!r} and "
                    f"{', '.join(map(str, form))} for {name!r}"
                )
        return records[0].effective

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(flat, [*self._sizes, self.padding])
        return [
            part.view(record.effective.shape)
            for part, record in zip(parts, self.records, strict=False)
        ]

    # what operations work on

    @property
    def flatten(self) -> bool:
        """True if the tensors are stored in one flat tensor."""
        return self._flat is not None

    @property
    def backend_tensor(self) -> torch.Tensor | None:
        """Flat tensor that stores the tensors; None if there is none."""
        return self._flat

    @property
    def backend_bucket(self) -> BaguaBucket:
        """This bucket, which has no separate back end."""
        return self

    def gather(self) -> torch.Tensor:
        """Return the flat tensor with the current values, including padding."""
        if self._flat is not None:
            for record in self.records:
                record.return_home()
            return self._flat
        return self._copied()

    def scatter(self, flat: torch.Tensor) -> None:
        """Copy a flat tensor into the effective tensors, unless it stores them."""
        if self._flat is not flat:
            with torch.no_grad():
                for record, view in zip(self.records, self._views_of(flat), strict=True):
                    record.effective.copy_(view)

    def _copied(self) -> torch.Tensor:
        flat = zeros((self.numel,), self._like.dtype, self._like.device)
        with torch.no_grad():
            for record, view in zip(self.records, self._views_of(flat), strict=True):
                view.copy_(record.effective)
        return flat

    def flattened_tensor(self) -> torch.Tensor:
        """Return a new flat tensor with the values of all tensors, and padding."""
        return self._copied() if self._flat is None else detached_copy(self.gather())

    def check_flatten(self) -> bool:
        """Return True if the effective tensors follow each other in memory."""
        ends = [one.effective.data_ptr() + one.effective.nbytes for one in self.records]
        starts = [one.effective.data_ptr() for one in self.records]
        dense = all(one.effective.is_contiguous() for one in self.records)
        return dense and starts[1:] == ends[:-1]

    def bytes(self) -> int:
        """Return the size in bytes, including padding."""
        return self.numel * self._like.element_size()

    # operations

    def clear_ops(self) -> BaguaBucket:
        """Remove all operations, and return the bucket."""
        self.operations.clear()
        return self

    def append_python_op(
        self, python_function: Callable[[str], Any], group: BaguaProcessGroup | None = None
    ) -> BaguaBucket:
        """Append a function that is called with the bucket's name; ``group`` has no effect."""

        def operation(bucket: OperatedBucket) -> None:
            python_function(bucket.name)

        self.operations.append(operation)
        return self

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | Compressor | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> BaguaBucket:
        """Append an operation that sums or averages over the ranks of a group.

        Args:
            hierarchical: Whether one rank of each node communicates with other nodes.
            average: Whether to divide by the number of ranks.
            scattergather: Whether each rank reduces a part and sends it to all.
            compression: None, ``"MinMaxUInt8"``, or a compressor of ``asyncddp.compression``.
            group: The group; all ranks by default.
        """
        self.operations.append(
            reduced(
                group,
                hierarchical=hierarchical,
                average=average,
                scattergather=scattergather,
                compression=compression,
            )
        )
        return self

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: BaguaProcessGroup | None = None,
    ) -> DecentralizedOperation:
        """Append an operation that averages with all ranks or one peer, into another tensor.

        Args:
            peer_weight: Flat tensor of the bucket's size that gets the average.
            hierarchical: Whether the peers are nodes.
            peer_selection_mode: ``"all"`` or ``"shift_one"``.
            group: The group; all ranks by default.

        Returns:
            The operation, whose ``copy_back_peer_weight(bucket)`` writes the average to the
            bucket's tensors.
        """
        operation = DecentralizedOperation(
            group, peer_weight, mode=peer_selection_mode, hierarchical=hierarchical
        )
        self.operations.append(operation)
        return operation

    def decentralized_synchronous_op_copy_back_peer_weight(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        group: BaguaProcessGroup | None = None,
    ) -> None:
        """Copy a tensor of averages into the bucket's tensors; other arguments have no effect."""
        flat = self.gather()
        with torch.no_grad():
            flat.copy_(peer_weight.view(-1))
        self.scatter(flat)

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        hierarchical: bool = True,
        compression: str = "MinMaxUInt8",
        group: BaguaProcessGroup | None = None,
    ) -> BaguaBucket:
        """Append an operation that exchanges compressed differences with both ring neighbours.

        Args:
            weight: Flat tensor of the bucket's size, a copy of this rank's tensors.
            left_peer_weight: Copy of the previous rank's tensors, equal at the start.
            right_peer_weight: Copy of the next rank's tensors.
            hierarchical: Whether the ring consists of nodes, whose ranks average first.
            compression: ``"MinMaxUInt8"`` or a name of ``asyncddp.compression``.
            group: The group; all ranks by default.
        """
        copies = weight, left_peer_weight, right_peer_weight
        self.operations.append(
            compressed_differences(
                group, copies, hierarchical=hierarchical, compression=compression
            )
        )
        return self

    def append_asynchronous_model_average_op(
        self, peer_selection_mode: str, group: BaguaProcessGroup | None = None
    ) -> None:
        """Raise UsageError: asynchronous averaging is a method of the library, not an operation."""
        raise UsageError(
            "append_asynchronous_model_average_op: models are averaged by the clock between two "
            "steps here, not by a thread that an operation starts; give with_bagua "
            "AsyncModelAverageAlgorithm(...), which has abort() and resume()"
        )

    def execute(self) -> Iterator[None]:
        """Run the operations; yield after starting a non-blocking one, finish it when resumed."""
        for operation in list(self.operations):
            finish = operation(self)
            if finish is not None:
                yield
                finish()
