"""The environment variables that a run gives its ranks, and how many threads each rank has."""

import os
from unittest import mock

import pytest

from asyncddp.errors import ArgumentError
from asyncddp.launch import rank
from asyncddp.launch.machine_limits import cores, threads_per_rank
from asyncddp.launch.rank_environment import forwarded_variables, launch_variables, parse_exports


@pytest.mark.parametrize("item", ["", "=1", "1A=2", "A B=1", "A;B", "LR-2=1"])
def test_no_variable_has_such_a_name(item):
    """``-x`` refuses what is no name of an environment variable."""
    with pytest.raises(ArgumentError, match="-x: expected VAR or VAR=value, got"):
        parse_exports([item], {})


def test_a_variable_that_is_not_set_is_refused_with_the_remedy():
    """``-x VAR`` of a variable that is not set is refused, with ``-x VAR=value`` as the remedy."""
    with pytest.raises(
        ArgumentError, match=r"-x: LR is not set here\. Set it, or give -x LR=value"
    ):
        parse_exports(["LR"], {"OTHER": "1"})


def test_only_what_is_needed_goes_to_other_machines():
    """A user's secrets stay here: the whole environment is never sent."""
    environment = {
        "ASYNCDDP_CHECK": "1",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HOME": "/home/ada",
        "LD_LIBRARY_PATH": "/lib",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "UCX_TLS": "tcp",
        "VIRTUAL_ENV": "/venv",
        "WANDB_API_KEY": "hunter3",
    }
    assert forwarded_variables(environment, ["LR"]) == (
        "ASYNCDDP_CHECK",
        "CUDA_DEVICE_ORDER",
        "LD_LIBRARY_PATH",
        "LR",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTHONPATH",
        "PYTORCH_CUDA_ALLOC_CONF",
        "UCX_TLS",
        "VIRTUAL_ENV",
    )


def test_each_machine_has_its_own_visible_gpus_unless_they_are_named():
    """``CUDA_VISIBLE_DEVICES`` of this machine stays here; with ``-x`` it goes to all machines."""
    environment = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_MODULE_LOADING": "LAZY"}
    assert forwarded_variables(environment, []) == ("CUDA_MODULE_LOADING",)
    named = parse_exports(["CUDA_VISIBLE_DEVICES"], environment)
    assert forwarded_variables(environment, named) == tuple(sorted(environment))


def test_a_secret_goes_to_other_machines_by_name_alone():
    """MPI, which starts ranks there, would send it in the clear and does not use it."""
    environment = {"ASYNCDDP_SECRET": "s", "ASYNCDDP_CHECK": "1"}
    assert forwarded_variables(environment, []) == ("ASYNCDDP_CHECK",)
    assert "ASYNCDDP_SECRET" in forwarded_variables(environment, ["ASYNCDDP_SECRET"])


def test_threads_are_set_where_all_ranks_are_here_and_the_user_has_not():
    """``OMP_NUM_THREADS`` is set if all ranks are here and the user has not set it."""
    seen = {"TTY_COMPATIBLE": "1"}

    def added(*given):
        return launch_variables(*given, terminal=False)

    assert added(seen, {"A": "1"}, 1) == {"OMP_NUM_THREADS": str(cores()), "A": "1"}
    assert added({"OMP_NUM_THREADS": "3", **seen}, {}, 1) == {}
    assert added(seen, {}, None) == {}
    assert added(seen, {"OMP_NUM_THREADS": "5"}, 1) == {"OMP_NUM_THREADS": "5"}


def test_ranks_are_told_whether_people_see_a_terminal_unless_the_user_has_said_so():
    """``TTY_COMPATIBLE`` says whether there is a terminal, unless the user has set it."""
    told = launch_variables({}, {}, None, terminal=True)
    assert told["TTY_COMPATIBLE"] == "1"
    assert int(told["COLUMNS"]) > 0
    assert launch_variables({}, {}, None, terminal=False) == {"TTY_COMPATIBLE": "0"}
    assert launch_variables({"TTY_COMPATIBLE": "1"}, {}, None, terminal=False) == {}


def test_cores_are_shared_out_and_no_rank_is_left_without():
    """``cores()`` is at most the machine's, and a rank has at least one thread."""
    assert 1 <= cores() <= os.cpu_count()
    assert threads_per_rank(1) == cores()
    assert threads_per_rank(10_000) == 1


def test_a_containers_quota_limits_the_cores(monkeypatch, tmp_path):
    """A quota in cgroup's cpu.max limits the number of cores, to at least one."""
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("asyncddp.launch.machine_limits._QUOTA", quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(1000, 1008)))
    for text, expected in [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("", 8)]:
        quota.write_text(text)
        assert cores() == expected, text


@pytest.mark.parametrize("driver", [True, False])
def test_a_rank_asks_cuda_for_queues_before_its_script_begins(monkeypatch, tmp_path, driver):
    """On machines that have NVIDIA's driver."""
    monkeypatch.setattr(rank, "_NVIDIA_DRIVER", tmp_path if driver else tmp_path / "none")
    with mock.patch.dict(os.environ, clear=True):
        rank.set_variables()
        assert ("CUDA_DEVICE_MAX_CONNECTIONS" in os.environ) is driver
