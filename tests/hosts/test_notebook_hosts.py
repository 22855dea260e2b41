"""A notebook's cluster over two hosts that share no memory."""

import shlex
import subprocess
import sys

import pytest

from tests.hosts.namespaces import LIMIT, SCRIPT
from tests.support.processes import warm_python

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

NOTEBOOK = """
import contextlib, os, socket, time
import ipyparallel, psutil
from asyncddp.notebook import Cluster

addresses, here = [], os.stat("/proc/self/ns/net").st_ino
for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error, OSError):  # others come and go
        if os.stat(f"/proc/{process.pid}/ns/net").st_ino != here:
            continue
        if "ipyparallel.controller" in process.cmdline():
            listens = [one for one in process.net_connections("inet") if one.status == "LISTEN"]
            addresses += [one.laddr.ip for one in listens]
with Cluster.connect() as cluster:
    cluster.view.execute("import os, socket; host = socket.gethostname()")
    cluster.view.execute("where = host, os.environ['OMPI_COMM_WORLD_RANK']")
    where = cluster.view["where"]
    cluster.view.execute(
        "import asyncddp as bf, torch; bf.init(); y = bf.allreduce(torch.tensor([1.0 * bf.rank()]))"
    )
    waiting = cluster.view.apply_async(lambda: __import__("time").sleep(300))
    time.sleep(0.5)
    busy = cluster.interrupt(timeout=30.0)
    names = [one.ename for one in waiting.get(timeout=30, return_exceptions=True)]
    values = [float(one) for one in cluster.view["y"]]
    print(where, values, busy, set(names), sorted(set(addresses)))
"""


def on_h1(folder, *words, python=sys.executable):
    """Run Python on host h1, with profiles of the test's own."""
    command = shlex.join(["env", f"IPYTHONDIR={folder}", python, *words])
    done = subprocess.run(
        [str(SCRIPT), "h1", f"cd {shlex.quote(str(folder))} && exec {command}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.nightly
def test_engines_on_two_hosts_meet_on_the_network_that_was_named(hosts):
    """What travels is encrypted, the keys go by the launcher, and the client stays on loopback."""
    pytest.importorskip("ipyparallel")
    where = [
        "-H",
        "h1:2,h2:2",
        "--remote-shell",
        str(SCRIPT),
        "--network-interface",
        "10.77.0.0/24",
    ]
    start = ("-c", "from asyncddp.cli.main import main; main()", "notebook", "start")
    code, _, said = on_h1(hosts.folder, *start, *where, python=warm_python())
    assert code == 0, said
    script = hosts.folder / "notebook.py"
    script.write_text(NOTEBOOK)
    code, out, said = on_h1(hosts.folder, str(script))
    assert code == 0, said
    ranks = [("h1", "0"), ("h1", "1"), ("h2", "2"), ("h2", "3")]
    values, busy = [1.5] * 4, [0, 1, 2, 3]
    addresses = ["10.77.0.1", "127.0.0.1"]
    assert out.strip() == f"{ranks} {values} {busy} {{'KeyboardInterrupt'}} {addresses}", said
    assert on_h1(hosts.folder, "-m", "asyncddp", "notebook", "stop")[0] == 0
    assert hosts.wait_until_gone(10.0) == []
