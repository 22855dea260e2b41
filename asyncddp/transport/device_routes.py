"""Which wire carries a tensor between two GPUs: a table, and for each wire that is not taken, why.

A wire carries messages between two ranks where the user allows it and its conditions hold; the
first such wire of the user's list wins, and ``cuda_staged`` serves where none does. All ranks of a
group decide from the same facts and come to the same wires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncddp.errors import MismatchError
from asyncddp.packages import install_command
from asyncddp.rank_lists import list_ranks

__all__ = [
    "LAST_RESORT",
    "Choice",
    "DeviceFacts",
    "choose",
    "device_index",
    "in_reach",
    "same_kind",
]

LAST_RESORT = "cuda_staged"
"""The wire that needs nothing."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a rank says of the device that it would use, and of what could carry its tensors.

    Attributes:
        rank: The rank.
        machine: Number of its machine.
        device: ``"cuda"``, or ``"cpu"`` where torch sees no GPU.
        gpu: The GPU's unique name, the same for ranks that share it; empty if unknown.
        mpi_cuda: Whether the MPI library says that it takes GPU memory; None if it says nothing.
        cupy: Version of cupy; None where it cannot be imported.
        nccl: Version of the NCCL that cupy has loaded, as ``22703`` for 2.27.3; None where none.
        doubt: What is strange about that NCCL; empty where nothing is.
        reaches: Unique names of the other GPUs that the rank sees and whose memory its own reads.
    """

    rank: int
    machine: int = 0
    device: str = "cpu"
    gpu: str = ""
    mpi_cuda: bool | None = None
    cupy: str | None = None
    nccl: int | None = None
    doubt: str = ""
    reaches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What carries a tensor, and why not something else.

    Attributes:
        wire: Name of the wire.
        refused: For each wire that was asked for and not taken, the reason.
    """

    wire: str
    refused: Mapping[str, str]


_Check = Callable[[DeviceFacts, DeviceFacts], str | None]
_NCCL_LEAST = 20700  # send and recv came with 2.7


def _ranks(have: Callable[[DeviceFacts], bool], one: DeviceFacts, other: DeviceFacts) -> str:
    """Those of two ranks for which something does not hold, in words."""
    missing = [f"rank {facts.rank}" for facts in (one, other) if not have(facts)]
    return " and ".join(missing)


def _mpi_says_so(one: DeviceFacts, other: DeviceFacts) -> str | None:
    where = _ranks(lambda facts: facts.mpi_cuda is True, one, other)
    return f"the MPI library of {where} does not say that it takes GPU memory" if where else None


def _gpus_known(one: DeviceFacts, other: DeviceFacts) -> str | None:
    where = _ranks(lambda facts: bool(facts.gpu), one, other)
    return f"it is not known which GPU {where} uses" if where else None


def _cupy_there(one: DeviceFacts, other: DeviceFacts) -> str | None:
    where = _ranks(lambda facts: facts.cupy is not None, one, other)
    install = install_command("cuda12", "cuda13")
    return f"{where} cannot import cupy: {install}" if where else None


def _nccl_there(one: DeviceFacts, other: DeviceFacts) -> str | None:
    where = _ranks(lambda facts: (facts.nccl or 0) >= _NCCL_LEAST, one, other)
    return f"cupy finds no NCCL of at least 2.7 at {where}" if where else None


def _nccl_alike(one: DeviceFacts, other: DeviceFacts) -> str | None:
    if one.nccl == other.nccl:
        return None
    return f"rank {one.rank} has NCCL {one.nccl}, rank {other.rank} has {other.nccl}"


def _two_gpus(one: DeviceFacts, other: DeviceFacts) -> str | None:
    if one.gpu == other.gpu:
        return f"rank {one.rank} and rank {other.rank} share one GPU, which NCCL refuses"
    return None


def _memory_read(one: DeviceFacts, other: DeviceFacts) -> str | None:
    if in_reach(one, other):
        return None
    return f"rank {one.rank} and rank {other.rank} do not read each other's GPU memory"


_CONDITIONS: Mapping[str, tuple[_Check, ...]] = {
    "nccl": (_cupy_there, _nccl_there, _nccl_alike, _gpus_known, _two_gpus),
    "mpi_cuda": (_mpi_says_so,),
    "cuda_ipc": (_gpus_known, _memory_read),
    LAST_RESORT: (),
}
"""What has to hold between two ranks for a wire; the first that does not is the reason."""


def choose(one: DeviceFacts, other: DeviceFacts, wanted: Sequence[str] = (LAST_RESORT,)) -> Choice:
    """Choose the wire for tensors on the GPUs of two ranks.

    Args:
        one: What is known of one rank.
        other: And of the other one; both see it alike.
        wanted: Wires that may be taken, the best first.

    Returns:
        The wire, and what speaks against those before it.

    Raises:
        MismatchError: One rank has a GPU and the other one has none.

    Example:
        >>> one, other = (DeviceFacts(rank, device="cuda", mpi_cuda=False) for rank in (0, 1))
        >>> choice = choose(one, other, ["mpi_cuda"])
        >>> choice.wire
        'cuda_staged'
        >>> choice.refused["mpi_cuda"]
        'the MPI library of rank 0 and rank 1 does not say that it takes GPU memory'
    """
    same_kind([one, other])
    refused: dict[str, str] = {}
    for wire in wanted:
        reasons = (check(one, other) for check in _CONDITIONS[wire])
        reason = next((text for text in reasons if text is not None), None)
        if reason is None:
            return Choice(wire, refused)
        refused[wire] = reason
    return Choice(LAST_RESORT, refused)


def same_kind(group: Sequence[DeviceFacts]) -> None:
    """Refuse a group of which some have GPUs and others have none.

    Raises:
        MismatchError: It names both.
    """
    kinds: dict[str, list[int]] = {}
    for facts in group:
        kinds.setdefault(facts.device, []).append(facts.rank)
    if len(kinds) > 1:
        parts = [
            f"{list_ranks(r)} {'have' if r[1:] else 'has'} tensors on {kind}"
            for kind, r in sorted(kinds.items())
        ]
        raise MismatchError(
            f"{' and '.join(parts)}: expected all ranks of a run on one kind of device. Start it "
            "only where there are GPUs, or hide them with CUDA_VISIBLE_DEVICES= on all ranks"
        )


def device_index(local_rank: int, visible: int) -> int | None:
    """The GPU that a rank would take by itself: its number on the machine, around the visible ones.

    The library never calls ``torch.cuda.set_device``: which GPU a rank uses is the user's choice.

    Args:
        local_rank: The rank's number among those of its machine.
        visible: GPUs that the rank sees.

    Returns:
        The index; None where there is no GPU.

    Example:
        >>> [device_index(rank, 2) for rank in range(4)], device_index(0, 0)
        ([0, 1, 0, 1], None)
    """
    return local_rank % visible if visible else None


def in_reach(one: DeviceFacts, other: DeviceFacts) -> bool:
    """Whether two ranks can read each other's GPU memory.

    They are on one machine, and on one GPU or on two of which each reads the other's memory.

    Args:
        one: What is known of one rank.
        other: And of the other one.

    Example:
        >>> one = DeviceFacts(0, gpu="a", reaches=("b",))
        >>> [in_reach(one, DeviceFacts(1, gpu="b", reaches=seen)) for seen in (("a",), ())]
        [True, False]
    """
    if one.machine != other.machine or not (one.gpu and other.gpu):
        return False
    return one.gpu == other.gpu or (one.gpu in other.reaches and other.gpu in one.reaches)
