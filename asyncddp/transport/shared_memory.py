"""``shared_memory``: MPI, and memory that the ranks of a machine read where it lies."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch

from asyncddp.errors import EnvironmentProblem, PeerError
from asyncddp.memory.shared import Arena, Place, place_of
from asyncddp.transport.contract import Neighborhood, Transfer, Transport
from asyncddp.transport.mpi import MPITransport
from asyncddp.transport.mpi_collectives import gathered
from asyncddp.transport.mpi_communicators import CommunicatorPair
from asyncddp.transport.mpi_library import MPI
from asyncddp.transport.shared_board import LEAST, Board
from asyncddp.transport.shared_reduce_scatter import SharedReduceScatter
from asyncddp.transport.shared_sum import SharedSum
from asyncddp.transport.starting import Start

__all__ = ["SharedMemoryTransport"]

logger = logging.getLogger("asyncddp")

_MAGIC = 0x41_44_44_50


class _Entry(NamedTuple):
    """A rank, its process, and the page that it shows."""

    rank: int
    process: int
    page: Place | None


class SharedMemoryTransport(MPITransport):
    """MPI between all ranks, and shared memory among those of each machine.

    What is short, and what goes to other machines, goes by MPI. A rank whose machine does not let
    processes see each other's memory has :attr:`neighborhood` None and uses MPI alone.

    Args:
        pair: The communicators; clones of ``COMM_WORLD`` if not given.
        neighborhood: Who shares memory, where that is known; else the ranks find out.
        start: How long to wait for the other ranks where no communicators are given.
        required: Whether to raise where memory cannot be shared, instead of warning.

    Raises:
        EnvironmentProblem: Memory cannot be shared, but is required.
    """

    name = "shared_memory"

    def __init__(
        self,
        pair: CommunicatorPair | None = None,
        neighborhood: Neighborhood | None = None,
        start: Start | None = None,
        *,
        required: bool = True,
    ) -> None:
        super().__init__(pair, start)
        self.neighborhood = neighborhood
        if pair is None:
            self.neighborhood, problem = _meet(self._comm)
            if problem is not None:
                self._complain(problem, required=required)
        self._board = self._find_board()

    def _find_board(self) -> Board | None:
        """Where sums are formed, if all ranks see each other's memory; collective."""
        near = self.neighborhood
        if near is None or len(near.processes) < max(2, self._comm.size):
            return None
        return Board(near, self.rank, lambda place: gathered(self._comm, place, Place))

    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Transfer:
        """Sum through shared memory what is large, where all ranks see it."""
        board = self._board_for(tensor)
        if board is None:
            return super().iallreduce(tensor, out, divisor)
        into = tensor if out is None else out
        return SharedSum(board, tensor, into, divisor, self._break)

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Transfer:
        """Sum through shared memory what is large, where all ranks see it."""
        board = self._board_for(tensor)
        if board is None:
            return super().ireduce_scatter(tensor, out, divisor)
        return SharedReduceScatter(board, tensor, out, divisor, self._break)

    def _board_for(self, tensor: torch.Tensor) -> Board | None:
        """Where a tensor is summed through shared memory; None where that is not the way."""
        if self._board is None or tensor.nbytes < LEAST or tensor.dtype == torch.bool:
            return None
        if self.broken:
            raise PeerError(f"collectives cannot go on: {self.broken}. End and restart the run.")
        return self._board

    def _break(self) -> None:
        self.broken = "an earlier collective was given up while some ranks had not joined it"

    def _complain(self, problem: str, *, required: bool) -> None:
        text = f"the ranks of this machine cannot share memory ({problem})"
        if required:
            raise EnvironmentProblem(f"transport shared_memory: {text}; use ASYNCDDP_TRANSPORT=mpi")
        if self.machine() == self.rank:
            logger.warning("%s; they exchange tensors by MPI instead, which is slower", text)

    def close(self) -> None:
        """Let what was posted leave; let go of shared memory that no tensor uses."""
        super().close()
        if self._world and self.neighborhood is not None:
            self.neighborhood.arena.close()
            self.neighborhood = None
        self._board = None

    def split(self, color: int, key: int) -> Transport:
        """Split the communicator; the parts share what memory their ranks shared before."""
        part = self._pair.split(color, key)
        members = gathered(part.comm, self.rank, int)
        known = self.neighborhood
        if known is None or not all(rank in known.processes for rank in members):
            return MPITransport(part)
        processes = {place: known.processes[rank] for place, rank in enumerate(members)}
        return SharedMemoryTransport(part, Neighborhood(known.arena, processes))


def _meet(comm: MPI.Intracomm) -> tuple[Neighborhood | None, str | None]:
    """Show each other a page; whom this rank shares memory with, or why it cannot; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    try:
        arena, place, problem = Arena(), None, None
        if node.size > 1:
            place, problem = _shown(arena)
        entries = gathered(node, _Entry(comm.rank, os.getpid(), place), _Entry)
        processes = {rank: process for rank, process, _ in entries}
        problem = problem or _seen(arena, [(p, shown) for _, p, shown in entries])
        problems = [text for text in gathered(node, problem or "", str) if text]
        if node.size == 1 or problems:
            return None, problems[0] if problems else None
        return Neighborhood(arena, processes), None
    finally:
        node.Free()


def _shown(arena: Arena) -> tuple[Place | None, str | None]:
    if not hasattr(os, "memfd_create"):
        return None, "this system has no memfd_create"
    try:
        block = arena.take(64)
    except OSError as error:
        return None, f"memfd_create: {error}"
    block.chunk.words(block.offset, 1)[0] = _MAGIC + os.getpid()
    return place_of(block), None


def _seen(arena: Arena, shown: list[tuple[int, Place | None]]) -> str | None:
    for process, place in shown:
        if place is None:
            continue
        try:
            word = arena.open(process, place).words(place.offset, 1)[0]
        except (OSError, ValueError) as error:
            return f"process {process} is out of sight: {error}"
        if word != _MAGIC + process:
            return f"process {process} lives in another process namespace"
    return None
