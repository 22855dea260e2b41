"""A Python that has torch loaded and becomes, by a fork for each line it reads, a script.

A line is a JSON list: the script, the folder to run in, the file for what it prints. The answer is
the script's exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import threading
import warnings


def become(script: str, folder: str, output: str) -> None:
    """Run a script in this process, as ``python -W error script`` does in the folder.

    A script that ends well ends as Python does, but that nobody takes torch's modules apart, which
    takes longer than most scripts.
    """
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nothing, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.argv = [script]
    sys.path[0] = folder
    warnings.simplefilter("error")
    runpy.run_path(script, run_name="__main__")
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def wait_for_a_script() -> list[str]:
    """Answer lines until a fork of this process is to run what one of them names."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return [str(word) for word in json.loads(line)]
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    sys.exit()


if __name__ == "__main__":
    import torch

    import asyncddp
    import topology
    from tests.support.warm_ranks import freeze

    loaded = [torch, topology, *(getattr(asyncddp, name) for name in asyncddp.__all__)]
    freeze()
    become(*wait_for_a_script())
