"""State of a training run in a checkpoint: this rank's own, and the average over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from asyncddp.context import current
from asyncddp.context.group_context import alone
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce_tensors import AVERAGED_BYTES, average_tensors
from asyncddp.ops.object_collectives import gather_records
from asyncddp.ops.settings_agreement import require_equal_tensors, tensors_of
from asyncddp.optim.average_models import average_model, check_timeout, lend_average
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.optim.replica_synchronization import tensors_differ
from asyncddp.parallel.bucket_optimizer_state import check_state
from asyncddp.parallel.decentralized_data_parallel import DecentralizedDataParallel
from asyncddp.rank_list_text import list_ranks
from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.buckets import partition
from asyncddp.tensors.local_parts import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_VERB = "save_checkpoint"
METHOD_KEYS = ("asyncddp", "algorithm")
"""Keys of the averaging in an optimizer's state: a wrapper's own, and that of a module."""
_OF_ONE_RANK = ("parameters", "compressors")
"""Keys of what a method remembers of a rank's own model, which has no average."""


class HasState(Protocol):
    """Interface of objects with a state dict, such as a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore a state."""


@contextmanager
def saving_ranks(
    model: torch.nn.Module,
    replicas: str,
    timeout: float | None,
    mesh: DeviceMesh | None,
    *,
    wait: bool,
) -> Iterator[dict[str, Any]]:
    """Let all ranks save in a ``with`` block, or only this one, from published replicas.

    Yields the manifest's entries about the run.
    """
    context = current()
    check_timeout(_VERB, timeout, wait=wait)
    if wait:
        left = sorted(set(range(context.size)).difference(context.members))
        if left and replicas == "all":
            raise ArgumentError(
                f"{_VERB}: argument replicas: expected 'average' or 'rank0', as this run goes on "
                f"without {list_ranks(left)}, got 'all'"
            )
        yield {"missing": left} if left else {}
        return
    if mesh is not None:
        raise ArgumentError(
            f"{_VERB}: argument wait: expected True with mesh, since the ranks of a replica save "
            "together, got False; call it on all ranks after the same step"
        )
    if replicas != "average":
        raise ArgumentError(
            f"{_VERB}: argument replicas: expected 'average' with wait=False, since this rank has "
            f"no other rank's state, got {replicas!r}"
        )
    average = average_model(model, wait=False, timeout=timeout)
    with average, alone(context):
        yield {"world_size": context.size, "missing": list(average.missing)}


def own_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: HasState | None
) -> dict[str, Any]:
    """Return this rank's state dicts of model, optimizer and scheduler, if given, not copied."""
    found: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        found["optimizer"] = optimizer.state_dict()
    elif isinstance(model, DecentralizedDataParallel):
        found["optimizer"] = model.optim_state_dict()
    if scheduler is not None:
        found["scheduler"] = scheduler.state_dict()
    return found


def averaging_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the averaging state inside an optimizer's state; empty for a plain optimizer."""
    found: Any = next((state[key] for key in METHOD_KEYS if key in state), {})
    return found if isinstance(found, Mapping) else {}


def algorithm_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> str | None:
    """Return the name of the training algorithm; None without a distributed wrapper."""
    if isinstance(optimizer, DistributedOptimizer):
        return str(averaging_of(state.get("optimizer", {}))["algorithm"])
    return model.algorithm if isinstance(model, DecentralizedDataParallel) else None


def progress_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[int, int] | None:
    """Return the numbers of completed steps and rounds; None without a distributed wrapper."""
    counting = optimizer if isinstance(optimizer, DistributedOptimizer) else model
    if isinstance(counting, DistributedOptimizer | DecentralizedDataParallel):
        return counting.steps, counting._averager.round
    return None


def without_own_memory(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without the method's tensors about one rank's model.

    After loading, the method restarts these tensors from the models that all ranks have loaded.
    """
    found = dict(optimizer)
    for key in METHOD_KEYS:
        if isinstance(found.get(key), Mapping):
            found[key] = {k: v for k, v in found[key].items() if k not in _OF_ONE_RANK}
    return found


def averaged_state(model: torch.nn.Module, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the average state of all ranks on the first one, and nothing elsewhere; collective.

    Of the model parameters and floating-point buffers are averages, as in ``average_model``; of
    the optimizer floating-point tensors that all ranks have. Where the ranks have the same bits
    they keep them. All else is rank 0's.
    """
    root = current().is_first
    found = dict(own) if root else {}
    require_equal_tensors(current(), _VERB, tensors_of(model))
    differ = tensors_differ(tensors_of(model, buffers=False).values())
    with torch.no_grad(), lend_average(model, buffers=True, parameters=differ):
        if root:
            found["model"] = compact(model.state_dict(), copies=True)
    if "optimizer" in own:
        averaged = averaged_optimizer_state(own["optimizer"])
        if root:
            found["optimizer"] = averaged
    return found


def averaged_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state averaged over ranks, on rank 0; collective.

    Other ranks get their own state. The method's tensors about one rank's model are left out.
    """
    shared = without_own_memory(state)
    averages = _averaged_tensors(shared)
    found: dict[str, Any] = tree_map_only(
        torch.Tensor, lambda tensor: averages.get(id(tensor), tensor), shared
    )
    return found


def _averaged_tensors(state: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Return averages on rank 0, keyed by the id of the tensor to replace; empty elsewhere."""
    named = {
        f"{keystr(path)} {tuple(value.shape)} {value.dtype}": value
        for path, value in tree_flatten_with_path(state)[0]
        if isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.is_floating_point()
    }
    everywhere = set.intersection(*map(set, gather_records(sorted(named), list[str], _VERB)))
    tensors = [named[name] for name in sorted(everywhere)]
    if not tensors or not tensors_differ(tensors):
        return {}
    found: dict[int, torch.Tensor] = {}
    for indices in partition(tensors, AVERAGED_BYTES):
        copies = [detached_copy(tensors[index]) for index in indices]
        average_tensors(copies)
        if current().is_first:
            found.update((id(tensors[i]), c.cpu()) for i, c in zip(indices, copies, strict=True))
    return found


def compact(state: Any, *, copies: bool = False) -> Any:
    """Copy tensors to the host where needed to keep a larger storage out of the file.

    Parameters are views of buckets, and ``torch.save`` writes the whole memory behind a view.
    DTensors stay, unless there are to be copies.
    """
    known: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if is_distributed(tensor):
            return detached_copy(tensor).cpu() if copies else tensor
        if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor
        alone = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
        if tensor.is_cpu and alone and not copies:
            return tensor
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        if key not in known or not tensor.numel():
            known[key] = detached_copy(tensor).cpu()
        return known[key]

    found = tree_map_only(torch.Tensor, copy, state)
    if hasattr(state, "_metadata"):  # versions of modules, which a state dict carries along
        found._metadata = state._metadata
    return found


def check_fit(
    verb: str,
    saved: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: HasState | None,
    source: str = "the checkpoint",
) -> None:
    """Raise an error that names the parts of a saved state that do not fit; change nothing.

    ``source`` is what the messages call the state.
    """
    problems = list(_model_problems(saved["model"], model.state_dict()))
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ArgumentError(
            f"{verb}: argument model: {source} is of another model: "
            f"{'; '.join(problems[:5])}{more}. Build the same model"
        )
    for key, part in (("optimizer", optimizer), ("scheduler", scheduler)):
        if part is not None and key not in saved:
            raise ArgumentError(
                f"{verb}: argument {key}: expected None, since the checkpoint was saved without "
                f"one; give {key} to save_checkpoint too"
            )
    if optimizer is None:
        if isinstance(model, DecentralizedDataParallel) and "optimizer" in saved:
            names = [name for name, _ in model._reducer.named_parameters]
            check_state(saved["optimizer"], names)
        return
    groups = [len(group["params"]) for group in saved["optimizer"].get("param_groups", ())]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if groups != here:
        raise ArgumentError(
            f"{verb}: argument optimizer: {source} has groups of {groups} parameters, and "
            f"the optimizer of {here}; make it with the same groups"
        )
    if isinstance(optimizer, DistributedOptimizer):
        _check_algorithm(verb, averaging_of(saved["optimizer"]), optimizer, source)


def _check_algorithm(
    verb: str, averaging: Mapping[str, Any], optimizer: DistributedOptimizer, source: str
) -> None:
    """Raise if loading would continue with another algorithm; plain states fit all."""
    before = averaging.get("algorithm")
    after = optimizer.method_after_loading(averaging) if "steps" in averaging else before
    if before != after:
        raise ArgumentError(
            f"{verb}: argument optimizer: {source} is of {before}, and the optimizer would "
            f"go on with {after}; make it with algorithm={before!r}, and call "
            f"optimizer.switch_to({after!r}) on all ranks once it is loaded"
        )


def _model_problems(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"it lacks {name}" for name in here if name not in saved)
    yield from (f"it has {name}, which the model has not" for name in saved if name not in here)
    for name in here:
        if name not in saved or not isinstance(here[name], torch.Tensor):
            continue
        if not isinstance(saved[name], torch.Tensor):
            yield f"{name} is a {type(saved[name]).__name__} in it, and a tensor in the model"
        elif (one := tuple(saved[name].shape)) != (other := tuple(here[name].shape)):
            yield f"{name} has shape {one} in it, and {other} in the model"


def load_state(
    saved: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: HasState | None,
) -> None:
    """Load saved states into model, optimizer and scheduler; collective.

    The scheduler's state is loaded first, because it is unchecked: if the scheduler rejects it,
    model and optimizer are unchanged.
    """
    if scheduler is not None:
        scheduler.load_state_dict(saved["scheduler"])
    model.load_state_dict(saved["model"])
    if optimizer is not None:
        optimizer.load_state_dict(saved["optimizer"])
    elif isinstance(model, DecentralizedDataParallel) and "optimizer" in saved:
        model.load_optim_state_dict(saved["optimizer"])
