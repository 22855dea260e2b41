"""Synchronous bucket communicator: averages buckets with neighbours step by step, by messages."""

from __future__ import annotations

from contextlib import suppress
from weakref import ref

import torch

from asyncddp.algorithms.methods.adapt_with_combine import AdaptWithCombine
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.errors import NotInitializedError, PeerError
from asyncddp.ops.neighbor_allreduce import neighbor_allreduce_nonblocking
from asyncddp.parallel.bucket_communicator import BucketCommunicator
from asyncddp.parallel.optimizer_buckets import OptimizerBucket
from asyncddp.tensors.buckets import TensorFactory
from topology import GraphOrSchedule


class SynchronousBucketCommunicator(BucketCommunicator):
    """Synchronous communicator: averages each bucket with the neighbours' of the last step.

    There is one message per bucket, step and neighbour. A bucket is pending from its publication to
    its averaging; in between its parameters are read, by the model and by neighbours, and must not
    change. A bucket that is not pending when a backward pass begins, in the first step or after new
    values, is sent then.
    """

    needs = AdaptWithCombine.needs

    def __init__(self, context: Context, label: str, topology: GraphOrSchedule | None) -> None:
        super().__init__(context, label, topology)
        self._pending = _PendingAverages(self)
        self._mixed: set[int] = set()

    @property
    def tensor_factory(self) -> TensorFactory | None:
        """Factory for shared memory, in which neighbours on this machine read buckets in place."""
        group = self.context.transport.shared_memory_group
        return None if group is None else group.arena.empty

    def begin_step(self, step: int) -> None:
        """Send the buckets that are not pending."""
        for bucket in self.buckets:
            if bucket.index not in self._pending and bucket.index not in self._mixed:
                self._send(bucket, step)

    def mix(self, bucket: OptimizerBucket, step: int) -> None:
        """Wait for the average, and write it into the bucket."""
        if bucket.index in self._mixed:
            return
        if bucket.index not in self._pending:
            self._send(bucket, step)
        mixed = self._pending[bucket.index].wait()
        bucket.check_unchanged()
        bucket.assign(mixed)
        del self._pending[bucket.index]
        self._mixed.add(bucket.index)

    def publish(self, bucket: OptimizerBucket, step: int) -> None:
        """Send a bucket to the neighbours of the next step."""
        self._send(bucket, step)
        self._mixed.discard(bucket.index)

    def _send(self, bucket: OptimizerBucket, step: int) -> None:
        near = self.schedule.neighbors(self.context.rank, step)
        bucket.pack()
        bucket.record_versions()
        with use(self.context), torch.no_grad():
            self._pending[bucket.index] = neighbor_allreduce_nonblocking(
                bucket.flat,
                self_weight=near.self_weight,
                src_weights=near.src_weights,
                dst_weights=near.dst_ranks,
                name=self.message_name(bucket),
            )
        self.bytes_sent += len(near.dst_ranks) * bucket.flat.nbytes

    def wait_for_reads(self) -> None:
        """Wait for all pending averages, which are written in their step."""
        self._pending.wait()

    def mix_pending(self, step: int) -> None:
        """Write the pending averages into their buckets."""
        for bucket in self.buckets:
            if bucket.index in self._pending:
                self.mix(bucket, step)

    def restart(self, *, mixed: bool) -> None:
        """Drop pending averages; the next backward pass sends the new values, unless mixed."""
        self.wait_for_reads()
        self._pending.clear()
        self._mixed = {bucket.index for bucket in self.buckets} if mixed else set()

    def close(self) -> None:
        """Wait until no neighbour reads the parameters any more."""
        self._pending()
        self._pending.clear()


class _PendingAverages(dict[int, Handle[torch.Tensor]]):
    """Handles of averages in progress, by bucket; as an exit callback it waits for them.

    A rank must not leave the world before its neighbours have its messages.

    Args:
        owner: The communicator, kept by weak reference.
    """

    def __init__(self, owner: SynchronousBucketCommunicator) -> None:
        super().__init__()
        self._owner = ref(owner)
        exit_callbacks = owner.context.exit_callbacks
        exit_callbacks[:] = [
            one
            for one in exit_callbacks
            if not (isinstance(one, _PendingAverages) and one.is_complete)
        ]
        exit_callbacks.append(self)

    @property
    def is_complete(self) -> bool:
        """True if the communicator is gone and all averages are complete."""
        return self._owner() is None and all([handle.poll() for handle in self.values()])

    def wait(self) -> None:
        """Wait for all averages.

        Raises:
            PeerError: A neighbour failed, or does something else.
        """
        for handle in self.values():
            handle.wait()

    def __call__(self) -> None:
        """Wait for all averages that can still complete."""
        with suppress(PeerError, NotInitializedError):
            self.wait()
