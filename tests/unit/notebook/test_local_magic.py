"""``%%px`` on ranks that are threads of the session's own process."""

import os
import signal
import threading
import time

import pytest

import asyncddp as bf
from asyncddp.errors import ArgumentError, RankError, UsageError
from asyncddp.notebook.error_grouping import CellFailure, group_failures
from tests.support import PATIENCE
from tests.support.session import open_session, plain

VALUES = "import asyncddp as bf, torch\nbf.init()\nx = torch.tensor([1.0 + bf.rank()])"


@pytest.fixture(scope="module")
def session():
    with open_session() as opened:
        yield opened


@pytest.fixture
def view(session):
    with bf.local_world(4, timeout=90.0) as world:
        found = world.activate()
        session(f"%%px\n{VALUES}")
        yield found


def values(view, name="y"):
    return [float(value) for value in view[name]]


def test_each_rank_has_its_names_which_last(session, view):
    """Each rank keeps its own names between cells; push, pull and apply reach them."""
    session("%px y = bf.neighbor_allreduce(x) * 0 + bf.rank()")
    session("%px y += 1")
    assert values(view) == [1, 2, 3, 4]
    view.push({"shared": [1]})
    session("%px shared.append(bf.rank())")
    assert view.pull("shared") == [[1, rank] for rank in range(4)]
    assert view.pull(["shared", "y"])[0][0] == [1, 0]
    assert view.apply_sync(lambda: bf.rank()) == [0, 1, 2, 3]
    with pytest.raises(ArgumentError, match="pull: rank 0 has no 'nothing'"):
        view.pull("nothing")


def test_lines_begin_with_the_rank_and_values_are_shown_in_order(session, view, capsys):
    """Printed lines name their rank; results are shown in order of rank, none after ``;``."""
    session("%%px\nprint('one', end=' ')\nprint('line')\nprint('no end', end='')\nbf.rank() * 10")
    out = capsys.readouterr().out.splitlines()
    printed = [f"[stdout:{rank}] {text}" for rank in range(4) for text in ("one line", "no end")]
    assert sorted(out[:-4]) == sorted(printed)
    assert out[-4:] == ["Out[0]: 0", "Out[1]: 10", "Out[2]: 20", "Out[3]: 30"]
    session("%px bf.rank();")
    assert capsys.readouterr().out == ""


def test_the_same_error_is_shown_once_and_all_goes_on(session, view, capsys):
    """An error of all ranks is shown once with their range; the ranks keep their state."""
    error = session("%px undefined + 1")
    assert isinstance(error, RankError)
    assert str(error) == "ranks 0\u20133: NameError: name 'undefined' is not defined"
    shown = plain(capsys.readouterr().out)
    assert shown.count("undefined + 1") == shown.count("ranks 0\u20133") == 1, shown
    assert "begun anew" not in shown
    session("%px y = bf.allreduce(x)")
    assert values(view) == [2.5] * 4


def test_an_error_on_one_rank_frees_the_others_and_the_next_cell_works(session, view, capsys):
    """Ranks that have lost step begin anew, with the topology that was set."""
    session("%px bf.set_topology(__import__('topology').ring(4))")
    error = session("%%px\nif bf.rank() == 2: raise ValueError('bad')\nbf.allreduce(x)")
    assert str(error).startswith("rank 2: ValueError: bad\nranks 0, 1, 3: ")
    shown = capsys.readouterr()
    assert plain(shown.out).count("Traceback") == 1
    assert "the ranks had lost step and have begun anew" in shown.err
    session("%%px\ny = bf.allreduce(x)\nnear = len(bf.in_neighbor_ranks())")
    assert values(view) == [2.5] * 4
    assert view["near"] == [2] * 4


def test_a_cell_that_is_no_python_is_told(session, view):
    """A cell that does not parse gives its SyntaxError, and options are refused."""
    assert isinstance(session("%%px\ndef ("), SyntaxError)
    assert "takes no options" in str(session("%%px --noblock\n1"))


def ctrl_c_once(begun):
    """Interrupt this process when all threads have come to an event; gives the thread to join."""

    def wait():
        begun.wait(PATIENCE)
        time.sleep(0.3)  # the main thread has yet to wait for the ranks
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_ctrl_c_ends_the_cell_on_all_ranks_and_the_next_one_works(session, view, capsys):
    """SIGINT ends a cell on ranks that wait and on ranks that compute; the next cell runs."""
    begun = threading.Barrier(5)
    view.push({"begin": lambda: begun.wait(PATIENCE)})  # a function is not copied
    interrupting = ctrl_c_once(begun)
    start = time.monotonic()
    error = session(
        "%%px\nbegin()\nif bf.rank() < 2:\n    bf.neighbor_allreduce(x)\n"
        "else:\n    while True: pass"
    )
    interrupting.join()
    assert isinstance(error, KeyboardInterrupt)
    assert time.monotonic() - start < 45
    assert "the ranks have ended the cell" in capsys.readouterr().out
    session("%px y = bf.allreduce(x)")
    assert values(view) == [2.5] * 4


def test_cells_need_ipython(session, view, monkeypatch):
    """``activate`` outside IPython raises UsageError that says what to use in a script."""
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: None)
    with pytest.raises(UsageError, match=r"cells need IPython or a notebook; in a script use"):
        bf.local_world(2).activate()


def test_ctrl_c_ends_a_function_that_runs_on_all_ranks():
    """SIGINT during ``world.run`` ends it on all ranks with KeyboardInterrupt."""
    begun = threading.Barrier(3)

    def forever():
        begun.wait(PATIENCE)
        while True:
            time.sleep(0.01)

    with bf.local_world(2) as world:
        interrupting = ctrl_c_once(begun)
        with pytest.raises(KeyboardInterrupt):
            world.run(forever)
    interrupting.join()


def test_causes_come_before_consequences_and_each_rank_is_named():
    """A grouped failure puts causes before the PeerLeftErrors that follow from them."""
    left = [CellFailure(rank, "PeerLeftError", f"rank {rank}: rank 1 has left") for rank in (0, 2)]
    error = group_failures([left[0], CellFailure(1, "ValueError", "bad", ["trace"]), left[1]])
    assert error.rank == 1
    assert str(error) == "rank 1: ValueError: bad\nranks 0, 2: PeerLeftError, in consequence"
    assert error._render_traceback_()[0] == "trace"
    assert str(group_failures(left)) == "ranks 0, 2: PeerLeftError: rank 0: rank 1 has left"
