"""Scheduler of buckets: launches them in order, each once all its tensors are ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from asyncddp.errors import UsageError
from asyncddp.integrations.bagua.torch_api.bucket import BaguaBucket
from asyncddp.integrations.bagua.torch_api.tensor import CommunicatedTensor, record_of

__all__ = ["BucketScheduler", "suggested_groups"]


class BucketScheduler:
    """Scheduler of one model's buckets: launches them in order, each once its tensors are ready.

    A bucket is launched when its tensors are ready and all earlier buckets have been launched; then
    it goes to the end of the queue. All ranks therefore communicate in the same order, in whatever
    order their tensors become ready.

    Args:
        label: Name of the model in messages, equal on all ranks.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._waiting: deque[BaguaBucket] = deque()
        self._ready: set[CommunicatedTensor] = set()
        self._under_way: list[Iterator[None]] = []

    def register_ordered_buckets(self, buckets: Sequence[BaguaBucket]) -> None:
        """Replace the buckets, after all launched operations have ended.

        Raises:
            UsageError: Two buckets have one name, or a tensor is in two of them.
        """
        self.wait_pending_comm_ops()
        names = [bucket.name for bucket in buckets]
        records = [record for bucket in buckets for record in bucket.records]
        if len(set(names)) < len(names) or len(set(records)) < len(records):
            content = {bucket.name: [one.name for one in bucket.records] for bucket in buckets}
            raise UsageError(
                f"{self._label}: expected buckets of different names, without a tensor in common, "
                f"got {len(buckets)}: {content}"
            )
        for bucket in buckets:
            bucket.label = f"{self._label}.{bucket.name}"
        for record in records:
            record.listener = self
        self._waiting = deque(buckets)
        self._ready.clear()

    def mark_communication_ready(self, record: CommunicatedTensor) -> None:
        """Mark a tensor as ready, and launch the buckets that are complete.

        Raises:
            UsageError: It was ready already, and its bucket has not been launched since.
        """
        if record in self._ready:
            raise UsageError(
                f"{self._label}: tensor {record.name} was marked ready twice, while its bucket "
                f"waits for {', '.join(self.missing_tensors()) or 'an earlier one'}"
            )
        self._ready.add(record)
        while self._waiting and self._ready.issuperset(self._waiting[0].records):
            bucket = self._waiting.popleft()
            self._waiting.append(bucket)
            self._ready.difference_update(bucket.records)
            steps = bucket.execute()
            if next(steps, self) is None:
                self._under_way.append(steps)

    def wait_pending_comm_ops(self) -> None:
        """Wait until all operations of launched buckets have ended."""
        under_way, self._under_way = self._under_way, []
        for steps in under_way:
            for _ in steps:
                pass

    def missing_tensors(self) -> list[str]:
        """Return the names of tensors that are not ready, if other tensors are waiting for them."""
        if not self._ready:
            return []
        return [
            record.name
            for bucket in self._waiting
            for record in bucket.records
            if record not in self._ready
        ]

    def forget_ready_tensors(self) -> None:
        """Unmark ready tensors whose bucket has not been launched."""
        self._ready.clear()


def suggested_groups(tensors: Sequence[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """Group tensors for buckets in their order, by dtype; close a group at ``size`` bytes.

    Example:
        >>> import asyncddp.integrations.bagua.torch_api
        >>> tensors = [torch.ones(n).ensure_bagua_tensor(f"{n}", "model") for n in (1, 3, 1)]
        >>> [[one.bagua_tensor_name for one in group] for group in suggested_groups(tensors, 12)]
        [['1', '3'], ['1']]
    """
    groups: list[list[torch.Tensor]] = []
    kind, used = None, 0
    effective = {id(tensor): record_of(tensor).effective for tensor in tensors}
    for tensor in sorted(tensors, key=lambda one: str(effective[id(one)].dtype)):
        content = effective[id(tensor)]
        if kind != (content.dtype, content.device) or used >= size:
            groups.append([])
            kind, used = (content.dtype, content.device), 0
        groups[-1].append(tensor)
        used += content.nbytes
    return groups
