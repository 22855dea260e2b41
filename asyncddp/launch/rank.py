"""Entry point of one rank: runs a script, ``python -m asyncddp.launch.rank train.py --lr 0.1``.

If it ends with an exception or a non-zero exit code, all ranks are ended, and this one says why.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from asyncddp.config import read_variable, set_defaults, tune_cuda, tune_open_mpi, whole_number
from asyncddp.environments.launchers import announced, set_torch_variables

RANKS_PER_NODE = "ASYNCDDP_RANKS_PER_NODE"
"""Set by a launcher that starts equally many ranks on each node, one node after another."""
RUNNER = ("-m", "asyncddp.launch.rank")
"""Arguments of Python that run the rest of a command line as a rank."""
_HANDLER = "asyncddp.context.crash_handler"
_NVIDIA_DRIVER = Path("/dev/nvidiactl")


@contextlib.contextmanager
def _recorded_lifetime() -> Iterator[None]:
    report_directory, rank = read_variable("ASYNCDDP_REPORT_DIR", str), announced("RANK")
    if not (report_directory and rank and Path(report_directory).is_dir()):
        yield
        return
    from asyncddp.launch.rank_processes import parent_death_setter
    from asyncddp.launch.rank_tracker import record_end, record_start

    parent_death_setter()()  # a launcher whose parent was killed may end without ending its ranks
    record_start(report_directory, rank)
    process = os.getpid()
    yield
    if os.getpid() == process:  # a process that the script has forked may come by here as well
        record_end(report_directory, rank)


def set_variables() -> None:
    """Set OMP_NUM_THREADS and torch.distributed's variables, unless the user has set them."""
    size = announced("LOCAL_WORLD_SIZE")
    if size is not None and read_variable("OMP_NUM_THREADS", str) is None:
        from asyncddp.launch.machine_limits import threads_per_rank

        set_defaults({"OMP_NUM_THREADS": str(threads_per_rank(int(size)))})
    tune_open_mpi()  # the script may start MPI before it imports the library
    if _NVIDIA_DRIVER.exists():  # or put something on its GPU before it calls init()
        tune_cuda(read_variable("ASYNCDDP_DEVICE_TRANSPORTS", str))
    set_torch_variables()
    rank, each = announced("RANK"), read_variable(RANKS_PER_NODE, whole_number(1))
    if rank is not None and each is not None:
        set_defaults({"NODE_RANK": str(int(rank) // each)})


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop this module's and runpy's frames from a traceback, unless no frame would remain."""
    left = trace
    while left is not None and (
        left.tb_frame.f_code.co_filename in {__file__, runpy.__file__, "<frozen runpy>"}
    ):
        left = left.tb_next
    return trace if left is None else left


def main(words: Sequence[str]) -> None:
    """Run a script or module with its arguments as one rank; end all ranks if it fails."""
    if not words or list(words) == ["-m"]:
        sys.exit("usage: python -m asyncddp.launch.rank SCRIPT.py|-m MODULE [ARGUMENT]...")
    set_variables()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # lines of ranks do not mix, even without buffers
            stream.reconfigure(line_buffering=True, write_through=False)
    process = os.getpid()
    with _recorded_lifetime():
        try:
            _run(list(words))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and os.getpid() == process:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher may pass it on as well
            success = isinstance(error, SystemExit) and error.code in (None, 0)
            if os.getpid() == process and not success:
                _end_all_ranks(error)
            if os.getpid() != process or not success:
                raise


def _end_all_ranks(error: BaseException) -> None:
    """End all ranks; just return if the library cannot be imported.

    Ctrl-C may have interrupted that: then the rank has met no others, and ends without a traceback.
    """
    if isinstance(error, KeyboardInterrupt) and _HANDLER not in sys.modules:
        os._exit(128 + signal.SIGINT)
    try:
        from asyncddp.context.crash_handler import end_run
    except Exception:  # noqa: BLE001 - torch raises others where its import was interrupted
        return
    end_run(error.with_traceback(_user_frames(error.__traceback__)))


if __name__ == "__main__":
    main(sys.argv[1:])
