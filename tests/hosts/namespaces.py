"""Runs over hosts in network namespaces."""

import contextlib
import shlex
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

from tests.support.processes import warm_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "testhosts"
LIMIT = 300.0  # seconds for any run of these tests


def call_script(*arguments):
    """Run our own script; its words are in the output."""
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


class Hosts:
    """``asyncddp run`` on host ``h1``, over ``h1`` and ``h2``."""

    def __init__(self, folder):
        self.folder = folder
        self.mark = uuid.uuid4().hex

    def start(self, *arguments, script=None, hosts="h1:2,h2:2", warm=True, environ=None):
        """Start a run; h1's shell has ``environ`` alone, as after a login."""
        words = ["env", *(f"{name}={value}" for name, value in (environ or {}).items())]
        words += [sys.executable, "-m", "asyncddp", "run", "-H", hosts]
        words += ["--remote-shell", str(SCRIPT), "-x", f"ASYNCDDP_TEST_MARK={self.mark}"]
        words += arguments
        if script is not None:
            path = self.folder / "script.py"
            path.write_text(script)
            words += warm_script(str(path)) if warm else [str(path)]
        return subprocess.Popen(
            [str(SCRIPT), "h1", f"cd {shlex.quote(str(self.folder))} && exec {shlex.join(words)}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments, **given):
        """Run to the end: exit code, output, errors."""
        child = self.start(*arguments, **given)
        stdout, stderr = child.communicate(timeout=LIMIT)
        return child.returncode, stdout, stderr

    def processes(self):
        """Whatever is left of the runs, on both hosts: ranks, and daemons in the namespaces."""
        spaces = [path.stat().st_ino for path in Path("/run/netns").glob("asyncddp-h*")]
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                space = Path(f"/proc/{process.pid}/ns/net").stat().st_ino
                if space in spaces and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until_gone(self, seconds):
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return left
