"""Runs a script or module as one rank: ``python -m asyncddp.launch.rank train.py --lr 0.1``.

The script sees what it would see under ``python train.py``. If it ends with an exception or a
non-zero exit code, all ranks are ended, and this one says why.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from asyncddp.config import tune_open_mpi

__all__ = ["launched_rank", "main"]

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_OF_TORCH = {
    "RANK": _RANK,
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": _LOCAL_SIZE,
}


def _first(names: Sequence[str], environment: Mapping[str, str]) -> str | None:
    return next((environment[name] for name in names if name in environment), None)


def launched_rank(environment: Mapping[str, str]) -> int | None:
    """The rank of a process as its launcher has set it; None where no launcher has started it.

    Example:
        >>> launched_rank({"OMPI_COMM_WORLD_RANK": "3"})
        3
    """
    rank = _first(_RANK, environment)
    return None if rank is None else int(rank)


@contextlib.contextmanager
def _on_roll() -> Iterator[None]:
    """Sign in with the launcher, and out if all went well."""
    folder, rank = os.environ.get("ASYNCDDP_REPORT_DIR"), _first(_RANK, os.environ)
    if not (folder and rank and Path(folder).is_dir()):
        yield
        return
    from asyncddp.launch.processes import die_with_parent
    from asyncddp.launch.roll_call import sign_in, sign_out

    if (ask := die_with_parent()) is not None:
        ask()  # a launcher whose own parent was killed may end without ending its ranks
    sign_in(folder, rank)
    process = os.getpid()
    yield
    if os.getpid() == process:  # a process that the script has forked may come by here as well
        sign_out(folder, rank)


def _limit_threads() -> None:
    """Share the cores of this machine out, where the one that started the run could not."""
    size = _first(_LOCAL_SIZE, os.environ)
    if size is not None and "OMP_NUM_THREADS" not in os.environ:
        from asyncddp.launch.machine import threads_for

        os.environ["OMP_NUM_THREADS"] = str(threads_for(int(size)))


def _announce_world() -> None:
    """Set what torch.distributed and libraries on it read, unless the user has set any of it."""
    if os.environ.keys().isdisjoint(_OF_TORCH):
        found = {name: _first(names, os.environ) for name, names in _OF_TORCH.items()}
        os.environ.update({name: value for name, value in found.items() if value is not None})


def _write_whole_lines() -> None:
    """Show each line at once and in one piece, as on a terminal, though this may be a pipe."""
    if "PYTHONUNBUFFERED" not in os.environ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without our frames and runpy's; the whole where nothing would be left."""
    left = trace
    while left is not None and (
        left.tb_frame.f_code.co_filename in {__file__, runpy.__file__, "<frozen runpy>"}
    ):
        left = left.tb_next
    return trace if left is None else left


def main(words: Sequence[str]) -> None:
    """Run a script or module to its end, and all other ranks to theirs if it fails.

    Args:
        words: The script, or ``-m`` and the module, and its arguments.
    """
    if not words or list(words) == ["-m"]:
        sys.exit("usage: python -m asyncddp.launch.rank SCRIPT.py|-m MODULE [ARGUMENT]...")
    _limit_threads()
    tune_open_mpi(os.environ)  # the script may start MPI before it imports the library
    _announce_world()
    _write_whole_lines()
    process = os.getpid()
    with _on_roll():
        try:
            _run(list(words))
        except BaseException as error:
            if os.getpid() == process and not _well(error):
                _end(error)
            if os.getpid() != process or not _well(error):
                raise


def _well(error: BaseException) -> bool:
    """Whether it is no error, but an exit with code 0."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _end(error: BaseException) -> None:
    """End all ranks; come back where the library cannot be imported, and leave it to Python."""
    try:
        from asyncddp.context.failure import end_run
    except ImportError:
        return
    end_run(error.with_traceback(_own_frames(error.__traceback__)))


if __name__ == "__main__":
    main(sys.argv[1:])
