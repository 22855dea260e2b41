r"""Windows: tensors that neighbours publish and read without waiting for each other.

Every rank of a window holds its own tensor x and, for each in-neighbour j, a *buffer* :math:`b_j`:
what j has put there. ``win_put`` and ``win_accumulate`` write into the neighbours' buffers,
``win_get`` reads a neighbour's tensor into one's own buffer, ``win_update`` mixes the buffers into
one's own tensor. Only ``win_create`` and ``win_free`` are collective.

A put completes while its target computes, or sleeps. A reader sees each neighbour's tensor whole,
of one version; a writer never waits for a reader. What is accumulated and collected counts exactly
once, so that sums over ranks are conserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from asyncddp.context import Context, current
from asyncddp.errors import ArgumentError, DtypeError, MismatchError
from asyncddp.memory.dtypes import DTYPES, Kind
from asyncddp.ops.barrier import barrier
from asyncddp.ops.door import check_tensor
from asyncddp.ops.objects import allgather_object
from asyncddp.ops.weights import number
from asyncddp.windows import Staleness, Window, windows_of
from asyncddp.windows.handle import WindowHandle

__all__ = [
    "get_current_created_window_names",
    "get_win_version",
    "turn_off_win_ops_with_associated_p",
    "turn_on_win_ops_with_associated_p",
    "win_accumulate",
    "win_accumulate_nonblocking",
    "win_associated_p",
    "win_cancel",
    "win_create",
    "win_free",
    "win_get",
    "win_get_nonblocking",
    "win_mutex",
    "win_poll",
    "win_put",
    "win_put_nonblocking",
    "win_read_neighbor",
    "win_staleness",
    "win_update",
    "win_update_then_collect",
    "win_wait",
]

_ROUNDS = 4096


def win_create(tensor: torch.Tensor, name: str, zero_init: bool = False) -> bool:
    """Make a window along the edges of the topology; collective.

    Args:
        tensor: This rank's own tensor, equal in shape and dtype on all ranks. The window keeps it,
            and updates are written into it.
        name: The window's name, equal on all ranks.
        zero_init: Whether the buffers begin at zero; as this rank's own tensor otherwise.

    Returns:
        True; False if this rank has a window of that name already, and nothing was done.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: Something that is no tensor, or a schedule without a period.
        DtypeError: The dtype is neither float nor integer.
        MismatchError: Ranks differ in name, shape, dtype or ``zero_init``.

    Example:
        >>> import asyncddp as bf, torch
        >>> def gossip():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x")
        ...     bf.win_put(x, "x")
        ...     bf.barrier()
        ...     return bf.win_update("x").item()
        >>> with bf.local_world(2) as world:
        ...     world.run(gossip)
        [0.5, 0.5]
    """
    row = check_tensor("win_create", tensor)
    if row.kind in (Kind.BOOL, Kind.COMPLEX):
        raise DtypeError(f"win_create: a window holds floats or integers, got {row.name}")
    context = current()
    windows = windows_of(context)
    if name in windows.names:
        return False
    sources, targets = _neighbors(context)
    window = windows.prepare(name, tensor, zero_init=zero_init)
    places, own = windows.boards(targets)
    facts = {"name": name, "shape": tuple(tensor.shape), "dtype": row.name, "zero_init": zero_init}
    every = allgather_object((facts, targets, places))
    for peer, (theirs, _, _) in enumerate(every):
        for key, value in facts.items():
            if theirs[key] != value:
                raise MismatchError(
                    f"win_create: rank {context.rank} gives {key}={value!r}, but rank {peer} "
                    f"{theirs[key]!r}; call it with equal names, shapes, dtypes and zero_init"
                )
    for peer in sources:
        if context.rank not in every[peer][1]:
            raise MismatchError(
                f"win_create: rank {context.rank} receives from rank {peer}, which does not send "
                "to it; set the same topology on all ranks"
            )
    shown = {peer: every[peer][2].get(context.rank) for peer in sources}
    windows.connect(window, targets, shown, own)
    barrier()
    return True


def _neighbors(context: Context) -> tuple[list[int], list[int]]:
    """In- and out-neighbours in any round of the topology."""
    schedule = context.topologies.ranks
    period = schedule.period
    if period is None or period > _ROUNDS:
        raise ArgumentError(
            f"win_create: {schedule.name} does not repeat, so that its edges are not known; set a "
            f"graph, or a schedule with a period of at most {_ROUNDS} rounds"
        )
    rounds = [schedule.neighbors(context.rank, k) for k in range(period)]
    sources = {peer for near in rounds for peer in near.src_weights}
    return sorted(sources), sorted({peer for near in rounds for peer in near.dst_ranks})


def win_free(name: str | None = None) -> bool:
    """Free a window, or all; collective.

    Args:
        name: Which one; all if None.

    Returns:
        True.

    Raises:
        UnknownNameError: There is no such window.
    """
    windows = windows_of(current())
    names = windows.names if name is None else [windows.find("win_free", name).name]
    barrier()
    for one in names:
        windows.drop(one)
    barrier()
    return True


def get_current_created_window_names() -> list[str]:
    """The names of this rank's windows, sorted."""
    return windows_of(current()).names


# writing


def win_put_nonblocking(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> WindowHandle:
    """Start :func:`win_put` and give a handle; the tensor may be changed at once."""
    return _write("win_put", tensor, name, self_weight, dst_weights, require_mutex, add=False)


def win_put(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> bool:
    r"""Overwrite this rank's buffer at neighbours, whatever they do meanwhile.

    .. math:: b_i^{(j)} \leftarrow w_j x \quad \text{at each rank j}, \qquad x \leftarrow w_0 x

    Args:
        tensor: x, of the window's shape and dtype.
        name: The window.
        self_weight: :math:`w_0`, by which ``tensor`` is multiplied in place in the end; 1 if None.
        dst_weights: :math:`w_j` by rank, or ranks of weight 1; all out-neighbours of the round if
            None.
        require_mutex: Wait while a neighbour holds its own mutex. A put is whole without it.

    Returns:
        True, once all these neighbours can see it.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: Another shape or dtype, or a rank that is no out-neighbour.
        PeerLeftError: A neighbour on another machine has ended.
        WaitTimeoutError: A neighbour on another machine cannot be reached.
    """
    return win_put_nonblocking(tensor, name, self_weight, dst_weights, require_mutex).wait()


def win_accumulate_nonblocking(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> WindowHandle:
    """Start :func:`win_accumulate` and give a handle; the tensor may be changed at once."""
    return _write("win_accumulate", tensor, name, self_weight, dst_weights, require_mutex, add=True)


def win_accumulate(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> bool:
    r"""Add to this rank's buffer at neighbours; as :func:`win_put` otherwise.

    .. math:: b_i^{(j)} \leftarrow b_i^{(j)} + w_j x \quad \text{at each rank j}, \qquad
              x \leftarrow w_0 x
    """
    return win_accumulate_nonblocking(tensor, name, self_weight, dst_weights, require_mutex).wait()


def _write(
    verb: str,
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None,
    dst_weights: Mapping[int, float] | Iterable[int] | None,
    require_mutex: bool,
    *,
    add: bool,
) -> WindowHandle:
    context = current()
    windows = windows_of(context)
    window = windows.find(verb, name)
    if not isinstance(tensor, torch.Tensor) or (
        tuple(tensor.shape) != window.shape or tensor.dtype != window.dtype
    ):
        check_tensor(verb, tensor)
        raise ArgumentError(
            f"{verb}: argument tensor: window {name!r} holds {window.dtype} of shape "
            f"{window.shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    windows.insist(window)
    weights = _targets(verb, context, window, dst_weights)
    own = 1.0 if self_weight is None else number(verb, "self_weight", self_weight)
    with _held(window, weights if require_mutex else (), ()):
        handle = window.put(tensor, own, weights, add=add, with_p=windows.with_p)
        if require_mutex:
            handle.wait()
    return handle


def _targets(
    verb: str,
    context: Context,
    window: Window,
    given: Mapping[int, float] | Iterable[int] | None,
) -> Mapping[int, float]:
    if given is None:
        schedule = context.topologies.ranks
        return dict.fromkeys(schedule.neighbors(context.rank, window.step_of_put).dst_ranks, 1.0)
    weights = given if isinstance(given, Mapping) else dict.fromkeys(given, 1.0)
    return _checked(verb, "dst_weights", weights, window.edges.outgoing, "an out-neighbour")


def _checked(
    verb: str, argument: str, given: Mapping[int, float], known: Iterable[int], what: str
) -> dict[int, float]:
    strangers = sorted(set(given) - set(known))
    if strangers:
        raise ArgumentError(
            f"{verb}: argument {argument}: rank {strangers[0]} is not {what} of this rank in the "
            f"window; those are {sorted(known)}"
        )
    return {int(rank): number(verb, argument, weight) for rank, weight in given.items()}


# reading


def win_get_nonblocking(
    name: str,
    src_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> WindowHandle:
    """Start :func:`win_get` and give a handle."""
    context = current()
    windows = windows_of(context)
    window = windows.find("win_get", name)
    windows.insist(window)
    if src_weights is None:
        near = context.topologies.ranks.neighbors(context.rank, window.step_of_update)
        src_weights = dict.fromkeys(near.src_weights, 1.0)
    given = src_weights if isinstance(src_weights, Mapping) else dict.fromkeys(src_weights, 1.0)
    weights = _checked("win_get", "src_weights", given, window.edges.incoming, "an in-neighbour")
    far = [source for source in weights if source not in window.edges.gets]
    with _held(window, (), weights if require_mutex else ()):
        for source in weights:
            if source in window.edges.gets:
                window.get(source, weights[source])
            else:
                windows.ask(window, source)

    def silent() -> list[int]:
        return [source for source in far if windows.answer(window, source) is None]

    def finish() -> None:
        for source in far:
            shown = windows.answer(window, source)
            if shown is not None:
                window.lay_down(source, shown, weights[source])

    return WindowHandle(context, f"win_get {name!r}", (), silent, finish)


def win_get(
    name: str,
    src_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> bool:
    r"""Read neighbours' tensors into this rank's buffers, whatever they do meanwhile.

    .. math:: b_j \leftarrow w_j x_j

    A neighbour's tensor is what it has published last: in ``win_create``, ``win_update``, and, once
    somebody gets, in ``win_put`` and ``win_accumulate`` of the window's own tensor. A rank that
    puts, and whose tensor nobody has got yet, publishes in its puts alone.

    Args:
        name: The window.
        src_weights: :math:`w_j` by rank, or ranks of weight 1; all in-neighbours of the round if
            None.
        require_mutex: Wait while this rank's buffers are held by their writers' mutex.

    Returns:
        True, once the values are here.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: A rank that is no in-neighbour.
        PeerLeftError: A neighbour on another machine has ended.
        WaitTimeoutError: A neighbour on another machine cannot be reached.
    """
    return win_get_nonblocking(name, src_weights, require_mutex).wait()


def win_update(
    name: str,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
    require_mutex: bool = False,
) -> torch.Tensor:
    r"""Mix the buffers into this rank's tensor; nobody is asked, and nothing is waited for.

    .. math:: x \leftarrow w_0 x + \sum_j w_j b_j

    Args:
        name: The window.
        self_weight: :math:`w_0`.
        neighbor_weights: :math:`w_j` of some in-neighbours. Both or neither; if neither, the
            topology's weights of the round.
        reset: Whether the buffers of these neighbours are zero afterwards.
        clone: Give a new tensor, and leave this rank's own as it is.
        require_mutex: Wait while a neighbour holds this rank's mutex.

    Returns:
        The tensor that ``win_create`` was given, or the new one.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: One of the weights without the other, a rank that is no in-neighbour, or
            integers with weights that are not whole.
    """
    context = current()
    windows = windows_of(context)
    window = windows.find("win_update", name)
    own, weights = _sources(context, window, self_weight, neighbor_weights)
    if DTYPES[window.dtype].kind is Kind.INTEGER:
        _whole([own, *weights.values()], window)
    with _held(window, (), weights if require_mutex else ()):
        return window.update(own, weights, reset=reset, clone=clone, with_p=windows.with_p)


def _sources(
    context: Context,
    window: Window,
    self_weight: float | None,
    given: Mapping[int, float] | None,
) -> tuple[float, Mapping[int, float]]:
    if (self_weight is None) != (given is None):
        raise ArgumentError(
            "win_update: arguments self_weight, neighbor_weights: expected both or neither"
        )
    if self_weight is None or given is None:
        near = context.topologies.ranks.neighbors(context.rank, window.step_of_update)
        return near.self_weight, near.src_weights
    known = window.edges.incoming
    weights = _checked("win_update", "neighbor_weights", given, known, "an in-neighbour")
    return number("win_update", "self_weight", self_weight), weights


def _whole(weights: list[float], window: Window) -> None:
    if any(weight != int(weight) for weight in weights):
        raise ArgumentError(
            f"win_update: the average of {window.dtype} values is no {window.dtype}; give whole "
            "weights, or make the window of floats"
        )


def win_update_then_collect(name: str, require_mutex: bool = True) -> torch.Tensor:
    r"""Add all buffers to this rank's tensor, and leave them at zero.

    .. math:: x \leftarrow x + \sum_j b_j, \qquad b_j \leftarrow 0

    Each value that a neighbour has accumulated is collected exactly once.

    Args:
        name: The window.
        require_mutex: Wait while a neighbour holds this rank's mutex.

    Returns:
        The tensor that ``win_create`` was given.

    Raises:
        UnknownNameError: There is no such window.
    """
    window = windows_of(current()).find("win_update_then_collect", name)
    ones = dict.fromkeys(window.edges.incoming, 1.0)
    return win_update(name, 1.0, ones, reset=True, require_mutex=require_mutex)


def win_read_neighbor(name: str, rank: int, require_mutex: bool = True) -> torch.Tensor:
    """Give a copy of one in-neighbour's buffer, which stays as it is.

    Args:
        name: The window.
        rank: The neighbour.
        require_mutex: Wait while it holds this rank's mutex.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: The rank is no in-neighbour.
    """
    window = windows_of(current()).find("win_read_neighbor", name)
    known = window.edges.incoming
    (source,) = _checked("win_read_neighbor", "rank", {rank: 1.0}, known, "an in-neighbour")
    with _held(window, (), [source] if require_mutex else ()):
        return window.peek(source)


# handles


def win_wait(handle: WindowHandle) -> bool:
    """Wait for a non-blocking window verb; True."""
    return handle.wait()


def win_poll(handle: WindowHandle) -> bool:
    """Whether a non-blocking window verb is done; never waits."""
    return handle.poll()


def win_cancel(handle: WindowHandle) -> None:
    """Wait for a non-blocking window verb no more; what is under way goes on unheard."""
    handle.cancel()


# what is known of a window


def get_win_version(name: str) -> dict[int, int]:
    """How many times each in-neighbour's buffer was written since this rank's last update.

    Args:
        name: The window.

    Raises:
        UnknownNameError: There is no such window.
    """
    return windows_of(current()).find("get_win_version", name).versions()


def win_staleness(name: str) -> dict[int, Staleness]:
    """How old what was last read of each in-neighbour is.

    Args:
        name: The window.

    Returns:
        By rank, a tuple ``(version, steps, seconds, lag)``: how many times the neighbour had
        published to this rank, how many steps it has made since, how long ago that was, and by how
        many steps it was behind this rank. A step is a put or an accumulate.

    Raises:
        UnknownNameError: There is no such window.
    """
    return windows_of(current()).find("win_staleness", name).staleness()


def win_associated_p(name: str) -> float:
    """This rank's associated scalar p, which push-sum divides by.

    Args:
        name: The window.

    Raises:
        UnknownNameError: There is no such window.
    """
    return windows_of(current()).find("win_associated_p", name).p


def turn_on_win_ops_with_associated_p() -> None:
    """From now on puts, accumulates and updates of this rank map p as they map the tensor."""
    windows_of(current()).with_p = True


def turn_off_win_ops_with_associated_p() -> None:
    """From now on they leave p alone."""
    windows_of(current()).with_p = False


# the mutex


@contextmanager
def win_mutex(
    name: str, for_self: bool = False, ranks: Iterable[int] | None = None
) -> Iterator[None]:
    """Keep the buffers of a window as they are while inside.

    What is published or read is whole without a mutex. It is for sequences of verbs: a writer that
    holds a neighbour's mutex keeps that neighbour from updating with ``require_mutex``, a rank that
    holds its own keeps its neighbours from writing with it. Two writers do not exclude each other.

    Args:
        name: The window.
        for_self: Hold this rank's own buffers; those at other ranks otherwise.
        ranks: The neighbours concerned; all out-neighbours, or all in-neighbours for ``for_self``.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: A rank that is no such neighbour.
        PeerLeftError: A rank that holds it has ended.
        WaitTimeoutError: The deadline has passed.
    """
    window = windows_of(current()).find("win_mutex", name)
    known: Iterable[int] = window.edges.incoming if for_self else window.edges.outgoing
    what = "an in-neighbour" if for_self else "an out-neighbour"
    chosen = (
        known
        if ranks is None
        else _checked("win_mutex", "ranks", dict.fromkeys(ranks, 1.0), known, what)
    )
    with _held(window, () if for_self else chosen, chosen if for_self else ()):
        yield


@contextmanager
def _held(window: Window, holders: Iterable[int], writers: Iterable[int]) -> Iterator[None]:
    holders, writers = list(holders), list(writers)
    if not holders and not writers:
        yield
        return
    mutex = windows_of(window.context).mutex(window)
    mutex.acquire(holders, writers)
    try:
        yield
    finally:
        mutex.release(holders, writers)
