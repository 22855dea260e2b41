"""Cells on the ranks of a real cluster of four, and what becomes of its errors."""

import os
import re
import signal
import stat
import threading
import time

import psutil
import pytest

import asyncddp as bf
from asyncddp.errors import EnvironmentProblem, PeerError, RankError, UsageError
from asyncddp.notebook import Cluster
from tests.support import PATIENCE, RUN_LIMIT, FileEvent, until
from tests.support.processes import warm_python
from tests.support.session import plain
from tests.support.sockets import open_to_others

pytestmark = pytest.mark.mpi(4)


@pytest.fixture(scope="module")
def cluster(mpi, session):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", warm_python())
        started = Cluster(4, timeout=RUN_LIMIT)
    with started:
        session(
            "%%px\nimport asyncddp as bf, torch\nbf.init()\nx = torch.tensor([1.0 + bf.rank()])"
        )
        yield started


def test_an_engine_is_its_rank(cluster, session):
    """The engines' ids are the ranks, and a view on all of them is in their order."""
    assert cluster.size == 4
    assert cluster.client.ids == cluster.view.targets == [0, 1, 2, 3]
    session("%px rank, size = bf.rank(), bf.size()")
    assert cluster.view.pull(["rank", "size"]) == [[rank, 4] for rank in range(4)]


def test_a_client_opens_once_output_arrives_and_not_before(cluster):
    """Output that is lost at first, as while a client connects, is asked for again."""
    client = cluster.client
    client._io_loop.add_callback(client._iopub_socket.unsubscribe, b"")
    lost = cluster.view.execute("", block=False)
    assert not lost.wait_for_output(2.0)
    opening = threading.Thread(target=cluster._wait_for_output, daemon=True)
    opening.start()
    opening.join(1.5)
    assert opening.is_alive()
    client._io_loop.add_callback(client._iopub_socket.subscribe, b"")
    opening.join(PATIENCE)
    assert not opening.is_alive()
    cluster.view.execute("")  # which waits for output, without an end


def test_verbs_run_in_cells_and_names_last_from_cell_to_cell(cluster, session):
    """Verbs run in cells, on names that earlier cells or ``push`` have set."""
    cluster.view.push({"factor": 10.0})
    session("%px y = bf.allreduce(x * factor)")
    assert [float(y) for y in cluster.view["y"]] == [25.0] * 4


def test_what_the_ranks_print_and_give_is_shown_in_their_order(cluster, session, capsys):
    """A cell's prints and results are shown ordered by rank."""
    session("%%px\nprint('hello', bf.rank())\nbf.rank() * 10")
    out = capsys.readouterr().out
    places = [out.index(f"[stdout:{rank}] hello {rank}\n") for rank in range(4)]
    places += [out.index(f"Out[{rank}:") for rank in range(4)]
    assert places == sorted(places), out


def test_the_same_error_on_all_ranks_is_shown_once(cluster, session, capsys):
    """An error that all ranks raise before any message is shown once, and verbs go on."""
    error = session("%px undefined + 1")
    assert isinstance(error, RankError)
    assert str(error) == "ranks 0\u20133: NameError: name 'undefined' is not defined"
    shown = plain(capsys.readouterr().out)
    assert shown.count("undefined + 1") == shown.count("ranks 0\u20133") == 1, shown
    session("%px y = bf.allreduce(x)")  # nothing had been sent, so all goes on
    assert [float(y) for y in cluster.view["y"]] == [2.5] * 4


def test_an_error_before_a_verb_frees_the_others_and_says_what_to_call(cluster, session, capsys):
    """Ranks in a verb with one that raised fail soon; verbs then name shutdown and init."""
    start = time.monotonic()
    error = session("%%px\nif bf.rank() == 2: raise ValueError('bad')\nbf.allreduce(x)")
    assert time.monotonic() - start < 60
    assert error.rank == 2
    assert re.fullmatch(
        r"rank 2: ValueError: bad\nranks 0, 1, 3: [A-Z]\w+Error(, \w+Error)?, in consequence",
        str(error),
    )
    assert capsys.readouterr().out.count("Traceback (most recent call last)") == 1
    again = session("%px bf.allreduce(x)")
    assert "ranks 0\u20133: PeerError" in str(again)
    assert "call bf.shutdown() and then bf.init() on all ranks" in str(again)
    session("%px bf.shutdown(); bf.init(); y = bf.allreduce(x)")
    assert [float(y) for y in cluster.view["y"]] == [2.5] * 4


def test_a_function_that_fails_frees_the_others(cluster, session):
    """Where a function applied to all engines raises on one, the others raise ``PeerError``."""
    ipyparallel = pytest.importorskip("ipyparallel")

    def fails_on_rank_1(bf, x):
        if bf.rank() == 1:
            raise ValueError("bad")
        return bf.allreduce(x)

    fails_on_rank_1.__module__ = "__main__"  # as in a notebook; else the engines import this file
    start = time.monotonic()
    failing = cluster.view.apply_async(
        fails_on_rank_1, ipyparallel.Reference("bf"), ipyparallel.Reference("x")
    )
    found = failing.get(timeout=60, return_exceptions=True)
    assert time.monotonic() - start < 60
    assert found[1].ename == "ValueError"
    assert {issubclass(getattr(bf, found[rank].ename), PeerError) for rank in (0, 2, 3)} == {True}
    session("%px bf.shutdown(); bf.init(); y = bf.allreduce(x)")
    assert [float(y) for y in cluster.view["y"]] == [2.5] * 4


def test_interrupt_frees_ranks_that_wait_for_one_that_never_calls(cluster, session, tmp_path):
    """``interrupt`` ends the cell on busy ranks only; names stay, verbs need a new ``init``."""
    session("%px state = 'kept'")
    done = FileEvent(tmp_path / "done")
    cell = (
        f"if bf.rank() < 3: bf.neighbor_allreduce(x)\nelse: open({str(done.path)!r}, 'w').close()"
    )
    waiting = session.shell.run_cell_magic("px", "--noblock", cell)
    done.wait()
    time.sleep(0.5)
    assert not waiting.ready()
    until(lambda: cluster._busy() == [0, 1, 2], "the hub's word that rank 3 rests")
    assert cluster.interrupt() == [0, 1, 2]
    found = waiting.get(timeout=60, return_exceptions=True)
    assert [getattr(one, "ename", None) for one in found] == ["KeyboardInterrupt"] * 3 + [None]
    assert cluster.view["state"] == ["kept"] * 4
    error = session("%px bf.neighbor_allreduce(x)")
    assert "call bf.shutdown() and then bf.init() on all ranks" in str(error)
    session("%px bf.shutdown(); bf.init(); y = bf.allreduce(x)")
    assert [float(y) for y in cluster.view["y"]] == [2.5] * 4


def test_interrupt_of_ranks_that_rest_does_nothing(cluster):
    """``interrupt`` returns no rank if none is busy."""
    assert cluster.interrupt() == []


def test_interrupt_waits_until_the_hub_has_heard_of_a_cell(cluster, session, monkeypatch):
    """The client knows of its cell before the hub, which then names all ranks."""
    busy, asked = cluster._busy, []
    monkeypatch.setattr(cluster, "_busy", lambda: asked.append(1) or busy()[: 4 * len(asked[2:])])
    session("%%px --noblock\nwhile True: pass")
    assert cluster.interrupt() == [0, 1, 2, 3]
    assert cluster.interrupt() == []


def test_ranks_rest_whose_cells_the_client_has_seen_end(cluster, monkeypatch):
    """The hub may say for a while that they are queued."""
    asked = cluster.view.apply_async(int)
    asked.get(timeout=60)
    late = {rank: {"queue": [one]} for rank, one in enumerate(asked.msg_ids)}
    monkeypatch.setattr(cluster.client, "queue_status", lambda *_, **__: late)
    assert cluster.interrupt() == []


@pytest.mark.parametrize("late", [False, True], ids=["", "the hub knows late"])
def test_ctrl_c_ends_the_cell_on_the_ranks_and_verbs_go_on(
    cluster, session, tmp_path, monkeypatch, late
):
    """SIGINT in the notebook raises ``KeyboardInterrupt`` in all ranks' cells; verbs go on."""
    busy, asked = cluster._busy, []
    monkeypatch.setattr(
        cluster, "_busy", lambda: asked.append(1) or busy()[: 4 * len(asked[late:])]
    )
    begun = FileEvent(tmp_path / "begun")

    def interrupt():
        begun.wait_for(range(4))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    file = f"{str(begun.path)!r} + f' of rank {{bf.rank()}}'"
    error = session(f"%%px\nopen({file}, 'w').close()\nwhile True: pass")
    thread.join()
    assert str(error) == "ranks 0\u20133: KeyboardInterrupt"
    session("%px y = bf.allreduce(x)")
    assert [float(y) for y in cluster.view["y"]] == [2.5] * 4


def test_only_this_machine_and_this_user_can_connect(cluster):
    """Keys sign what is sent, nobody else may read them, and all processes are on loopback."""
    folder = cluster._profile_directory
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert cluster.client.session.key
    daemon = psutil.Process(folder.running_cluster().pid)
    parts = [one for one in daemon.children(recursive=True) if "controller" in one.cmdline()[2]]
    addresses = [socket.laddr for one in parts for socket in one.net_connections("inet")]
    assert addresses
    assert {address.ip for address in addresses} == {"127.0.0.1"}
    assert open_to_others([daemon, *daemon.children(recursive=True)]) == []


def test_a_dead_engine_ends_the_cluster_in_words_and_nothing_is_left(mpi, session, marked):
    """A killed engine ends the cluster with the reason, and no process or folder is left."""
    other = Cluster(2)
    folder = other._profile_directory.path
    assert folder.is_dir()
    pid = other.view.apply_sync(os.getpid)[1]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EnvironmentProblem, match=r"the cluster has ended\. engines: ended with"):
        other.check(wait=PATIENCE)
    other.stop()
    other.stop()
    assert marked.left() == []
    assert not folder.exists()
    with pytest.raises(UsageError, match=r"has been stopped: make another one, Cluster\(n\)"):
        other.check()
    assert repr(other) == "<Cluster of 2 ranks, stopped>"
