"""Process group for torch.distributed: its methods start collectives and return ``Work``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from asyncddp.errors import ArgumentError
from asyncddp.integrations.torch_distributed import collectives
from asyncddp.integrations.torch_distributed.arguments import (
    VerbOptions,
    as_list,
    as_lists,
    check_count,
    check_rows,
    check_tensors,
    verb_options,
)
from asyncddp.integrations.torch_distributed.group_base import ProcessGroupBase
from asyncddp.ops.barrier import plan_barrier
from asyncddp.torch_modes import uncompiled


class AsyncDDPProcessGroup(ProcessGroupBase):
    """Torch process group with its own transport; created by ``init_process_group``.

    Each verb takes the arguments of torch's own groups, in all forms, and returns a work.
    """

    @uncompiled
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce a tensor over all ranks, in place."""
        return self._allreduce("allreduce", as_list(tensors), verb_options(opts, timeout=timeout))

    @uncompiled
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce tensors over all ranks, in place; tensors of one dtype are sent together."""
        return self._allreduce("allreduce_coalesced", as_list(tensors), verb_options(opts))

    def _allreduce(self, verb: str, tensors: list[torch.Tensor], options: VerbOptions) -> dist.Work:
        check_tensors(verb, tensors)
        specs = collectives.allreduce(self.group, verb, tensors, options.op)
        return self._submit(verb, options, specs, tensors)

    @uncompiled
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> dist.Work:
        """Reduce a tensor over all ranks, into the root's tensor."""
        options, given = verb_options(opts, op=op, timeout=timeout), as_list(tensors)
        check_tensors("reduce", given)
        root = self._root("reduce", options)
        specs = collectives.reduce(self.group, "reduce", given, options.op, root)
        return self._submit("reduce", options, specs, given)

    @uncompiled
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Overwrite a tensor with the root's."""
        options, given = verb_options(opts, timeout=timeout), as_list(tensors)
        check_tensors("broadcast", given)
        specs = collectives.broadcast(self.group, given, self._root("broadcast", options))
        return self._submit("broadcast", options, specs, given)

    @uncompiled
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather the tensors of all ranks into a list of tensors."""
        return self._allgather("allgather", as_lists(outputs), as_list(inputs), verb_options(opts))

    @uncompiled
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather several tensors of all ranks into lists, one per rank or one per tensor."""
        lists, given = as_lists(outputs), as_list(inputs)
        if len(lists) == self.group.size and all(len(one) == len(given) for one in lists):
            lists = [list(column) for column in zip(*lists, strict=True)]
        return self._allgather("allgather_coalesced", lists, given, verb_options(opts))

    def _allgather(
        self,
        verb: str,
        lists: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        options: VerbOptions,
    ) -> dist.Work:
        every = [out for outs in lists for out in outs]
        for outs in lists:
            check_count(verb, "a list", outs, self.group.size)
        check_tensors(verb, [*every, *inputs])
        specs = [
            collectives.allgather(self.group, outs, own)
            for outs, own in zip(lists, inputs, strict=True)
        ]
        alike = all(len({out.shape for out in outs}) == 1 for outs in lists)
        value = (lambda: [torch.stack(outs) for outs in lists]) if alike else None
        return self._submit(verb, options, specs, every, inputs, value)

    @uncompiled
    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:  # noqa: A002
        """Gather the tensors of all ranks into one tensor."""
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    all_gather_single = _allgather_base

    @uncompiled
    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """Gather several tensors of all ranks into one tensor each."""
        verb, outs, given, specs = "all_gather_single", as_list(outputs), as_list(inputs), []
        check_tensors(verb, [*outs, *given])
        for out, own in zip(outs, given, strict=True):
            if out.numel() != own.numel() * self.group.size or out.dtype != own.dtype:
                raise ArgumentError(
                    f"{verb}: expected a result of {own.numel() * self.group.size} elements of "
                    f"{own.dtype}, got {out.numel()} of {out.dtype}"
                )
            specs.append(collectives.allgather_whole(self.group, out, own))
        return self._submit(verb, verb_options(opts), specs, outs, given)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    @uncompiled
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Gather the tensors of all ranks into a list on the root."""
        options = verb_options(opts, timeout=timeout)
        root, own = self._root("gather", options), as_list(inputs)[0]
        here = self.group.context.rank == root
        outs = as_lists(outputs)[0] if here else []
        if here:
            check_count("gather", "a list", outs, self.group.size)
        check_tensors("gather", [*outs, own])
        spec = collectives.gather(self.group, outs, own, root)
        return self._submit("gather", options, [spec], outs, [own])

    @uncompiled
    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        """Send part r of the root's list to rank r."""
        options = verb_options(opts, timeout=timeout)
        root, out = self._root("scatter", options), as_list(outputs)[0]
        here = self.group.context.rank == root
        parts = as_lists(inputs)[0] if here else []
        if here:
            check_count("scatter", "a list", parts, self.group.size)
        check_tensors("scatter", [*parts, out])
        spec = collectives.scatter(self.group, out, parts, root)
        return self._submit("scatter", options, [spec], [out], parts)

    @uncompiled
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        """Reduce part r of the lists of all ranks into the tensor of rank r."""
        options = verb_options(opts, timeout=timeout)
        outs, lists, specs = as_list(outputs), as_lists(inputs), []
        every = [part for parts in lists for part in parts]
        check_tensors("reduce_scatter", [*outs, *every])
        for out, parts in zip(outs, lists, strict=True):
            check_count("reduce_scatter", "a list", parts, self.group.size)
            specs.append(collectives.reduce_scatter(self.group, out, parts, options.op))
        return self._submit("reduce_scatter", options, specs, outs, every)

    @uncompiled
    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:  # noqa: A002
        """Reduce one tensor in parts of equal length, each into the tensor of its rank."""
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    reduce_scatter_single = _reduce_scatter_base

    @uncompiled
    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors in parts, each into the tensor of its rank."""
        verb, options = "reduce_scatter_single", verb_options(opts)
        outs, given, specs = as_list(outputs), as_list(inputs), []
        check_tensors(verb, [*outs, *given])
        for out, whole in zip(outs, given, strict=True):
            if whole.numel() != out.numel() * self.group.size or out.dtype != whole.dtype:
                raise ArgumentError(
                    f"{verb}: expected an input of {out.numel() * self.group.size} elements of "
                    f"{out.dtype}, got {whole.numel()} of {whole.dtype}"
                )
            specs.append(collectives.reduce_scatter_whole(self.group, verb, out, whole, options.op))
        return self._submit(verb, options, specs, outs, given)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    @uncompiled
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Send part r of a list to rank r, and receive into another list."""
        outs, parts = as_list(outputs), as_list(inputs)
        for tensors in (outs, parts):
            check_count("alltoall", "a list", tensors, self.group.size)
        check_tensors("alltoall", [*outs, *parts])
        spec = collectives.alltoall(self.group, outs, parts)
        return self._submit("alltoall", verb_options(opts), [spec], outs, parts)

    @uncompiled
    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """Send rows of one tensor to each rank, and receive rows into another."""
        verb, size = "all_to_all_single", self.group.size
        check_tensors(verb, [output, input])
        check_rows(verb, output, output_split_sizes, size)
        check_rows(verb, input, input_split_sizes, size)
        splits = tuple(output_split_sizes), tuple(input_split_sizes)
        spec = collectives.alltoall_whole(self.group, output, input, *splits)
        return self._submit(verb, verb_options(opts), [spec], [output], [input])

    all_to_all_single = alltoall_base

    @uncompiled
    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Wait until all ranks have called it."""
        options = verb_options(opts, timeout=timeout)
        return self._submit("barrier", options, [plan_barrier(self.group)], [])

    def _root(self, verb: str, options: VerbOptions) -> int:
        """Return the root's rank in the world."""
        if not 0 <= options.root < self.group.size:
            raise ArgumentError(
                f"{verb}: argument root: expected 0 to {self.group.size - 1}, got {options.root}"
            )
        return self.group.ranks[options.root]
