"""Each family of launchers: its signature, its flags, and how it says that a rank died."""

import shlex

import pytest

from asyncddp.errors import ArgumentError
from asyncddp.launch.hosts import parse_hosts
from asyncddp.launch.job_options import Job
from asyncddp.launch.launcher_discovery import identify_launcher
from asyncddp.launch.launchers import LAUNCHERS, FailedRank, Launcher
from tests.launch import recorded


@pytest.mark.parametrize(
    ("output", "vendor", "version"),
    [
        (recorded.OPEN_MPI_4_VERSION, "open_mpi_4", "4.1.4"),
        (recorded.OPEN_MPI_4_DEBIAN_VERSION, "open_mpi_4", "4.1.4"),
        (recorded.OPEN_MPI_5_VERSION, "open_mpi_5", "5.0.11"),
        (recorded.MPICH_4_VERSION, "mpich", "4.3.1"),
        (recorded.MPICH_5_VERSION, "mpich", "5.0.2"),
        (recorded.INTEL_MPI_2021_VERSION, "intel_mpi", "2021.18.1"),
        (recorded.INTEL_MPI_2019_VERSION, "intel_mpi", "2019 Update 7"),
        (recorded.SRUN_DEBIAN_VERSION, "slurm", "22.05.8"),
        (recorded.SRUN_VERSION, "slurm", "23.02.6"),
    ],
)
def test_a_launcher_is_recognised_by_its_version(output, vendor, version):
    """The output of ``--version`` gives family and version; only one family claims it."""
    assert identify_launcher(output) == (LAUNCHERS[vendor], version)
    claimed = [name for name, launcher in LAUNCHERS.items() if launcher.parse_version(output)]
    assert claimed == [vendor]


@pytest.mark.parametrize("output", ["", "GNU bash, version 5.2", "Open MPI", "mpirun 4.1"])
def test_what_is_no_launcher_is_not_recognised(output):
    """Output of other programs, or cut short, is of no family."""
    assert identify_launcher(output) is None


def job(ranks=4, hosts="", **given):
    """A job of ``./solver``, on ``hosts``; remote where there are any."""
    placed = parse_hosts(hosts) if hosts else ()
    return Job(**{"ranks": ranks, "program": ("./solver",), "hosts": placed, **given})


FORWARD = ("ASYNCDDP_CHECK", "PATH")
FULL = {
    "hosts": "h1:2,h2:2",
    "remote": True,
    "interface": "eth0",
    "ssh_port": 2222,
    "remote_shell": "/bin/agent",
    "tag_output": True,
    "forward": FORWARD,
    "extra": ("--extra", "1"),
}
SIGNALS_4 = "--mca odls_base_signal_direct_children_only 1"
SIGNALS_5 = (
    "--prtemca odls_base_signal_direct_children_only 1 "
    "--prtemca ess_base_forward_signals 10,12,14,15,18,20"
)
KEEPALIVE = {
    f"{prefix}_MCA_oob_tcp_keepalive_{name}": value
    for prefix in ("PRTE", "OMPI")
    for name, value in (("time", "10"), ("intvl", "5"), ("probes", "3"))
}
GOLDEN = {
    ("open_mpi_4", "plain"): (
        "RUN -np 4 --map-by slot --bind-to none --mca osc ^ucx --mca btl ^ofi "
        f"{SIGNALS_4} --stdin none ./solver",
        {},
    ),
    ("open_mpi_4", "crowded root"): (
        "RUN -np 4 --map-by slot:OVERSUBSCRIBE --bind-to none --mca osc ^ucx --mca btl ^ofi "
        "--mca mpi_yield_when_idle 1 "
        f"{SIGNALS_4} --stdin none ./solver",
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ),
    ("open_mpi_4", "full"): (
        "RUN -np 4 --host h1:2,h2:2 --map-by slot --bind-to none --mca osc ^ucx --mca btl ^ofi "
        "--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --mca plm_rsh_args '-p 2222' "
        "--mca plm_rsh_agent /bin/agent "
        f"{SIGNALS_4} --stdin none --tag-output -x ASYNCDDP_CHECK -x PATH "
        "--extra 1 ./solver",
        KEEPALIVE,
    ),
    ("open_mpi_5", "plain"): (
        "RUN -np 4 --map-by slot --bind-to none --mca osc ^ucx --mca btl ^ofi "
        f"{SIGNALS_5} --stdin none ./solver",
        {},
    ),
    ("open_mpi_5", "crowded root"): (
        "RUN -np 4 --map-by slot:OVERSUBSCRIBE --bind-to none --mca osc ^ucx --mca btl ^ofi "
        "--mca mpi_yield_when_idle 1 "
        f"{SIGNALS_5} --stdin none ./solver",
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ),
    ("open_mpi_5", "full"): (
        "RUN -np 4 --host h1:2,h2:2 --map-by slot --bind-to none --mca osc ^ucx --mca btl ^ofi "
        "--mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0 "
        "--prtemca plm_ssh_args '-p 2222' --prtemca plm_ssh_agent /bin/agent "
        f"{SIGNALS_5} --stdin none "
        "--output tag -x ASYNCDDP_CHECK -x PATH --extra 1 ./solver",
        KEEPALIVE,
    ),
    ("mpich", "plain"): ("RUN -n 4 -bind-to none ./solver", {}),
    ("mpich", "crowded root"): ("RUN -n 4 -bind-to none ./solver", {}),
    ("mpich", "full"): (
        "RUN -n 4 -hosts h1:2,h2:2 -bind-to none -prepend-rank -iface eth0 -launcher ssh "
        "-launcher-exec /bin/agent -genvlist ASYNCDDP_CHECK,PATH --extra 1 ./solver",
        {"FI_TCP_IFACE": "eth0", "HYDRA_LAUNCHER_EXTRA_ARGS": "-p 2222"},
    ),
    ("intel_mpi", "plain"): ("RUN -n 4 ./solver", {"I_MPI_PIN": "0"}),
    ("intel_mpi", "crowded root"): ("RUN -n 4 ./solver", {"I_MPI_PIN": "0"}),
    ("intel_mpi", "full"): (
        "RUN -n 4 -hosts h1:2,h2:2 -prepend-rank -iface eth0 -launcher ssh "
        "-launcher-exec /bin/agent -genvlist ASYNCDDP_CHECK,PATH --extra 1 ./solver",
        {
            "FI_TCP_IFACE": "eth0",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-p 2222",
            "I_MPI_PIN": "0",
        },
    ),
    ("slurm", "plain"): (
        "RUN --ntasks 4 --kill-on-bad-exit=1 --input=none --cpu-bind=none "
        "--export=OMPI_MCA_osc,OMPI_MCA_btl ./solver",
        {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi"},
    ),
    ("slurm", "crowded root"): (
        "RUN --ntasks 4 --kill-on-bad-exit=1 --input=none --cpu-bind=none --overcommit "
        "--export=OMPI_MCA_osc,OMPI_MCA_btl,OMPI_MCA_mpi_yield_when_idle ./solver",
        {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi", "OMPI_MCA_mpi_yield_when_idle": "1"},
    ),
    ("slurm", "full"): (
        "RUN --ntasks 4 --kill-on-bad-exit=1 --input=none --nodes=2 --ntasks-per-node=2 "
        "--nodelist=h1,h2 --distribution=block --cpu-bind=none --label "
        "--export=ASYNCDDP_CHECK,PATH,OMPI_MCA_osc,OMPI_MCA_btl,OMPI_MCA_btl_tcp_if_include,"
        "FI_TCP_IFACE --extra 1 ./solver",
        {
            "OMPI_MCA_osc": "^ucx",
            "OMPI_MCA_btl": "^ofi",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "FI_TCP_IFACE": "eth0",
        },
    ),
}


def jobs_for(vendor):
    full = {**FULL, "ssh_port": None, "remote_shell": None} if vendor == "slurm" else FULL
    return {
        "plain": job(),
        "crowded root": job(oversubscribe=True, root=True),
        "full": job(**full),
    }


@pytest.mark.parametrize("name", ["plain", "crowded root", "full"])
@pytest.mark.parametrize("vendor", list(LAUNCHERS))
def test_the_command_is_the_one_of_its_family(vendor, name):
    """For each family and job, command line and environment are exactly the golden ones."""
    command = LAUNCHERS[vendor].build_command("RUN", jobs_for(vendor)[name])
    arguments, environment = GOLDEN[vendor, name]
    assert shlex.join(command.arguments) == shlex.join(shlex.split(arguments))
    assert command.environment == environment


@pytest.mark.parametrize("vendor", list(LAUNCHERS))
def test_every_family_keeps_the_contract(vendor):
    """The program comes last and unchanged, variables are set, nothing else is let out."""
    launcher = LAUNCHERS[vendor]
    words = ("./solver", "a b", "$HOME", "'", "-np", "9", "")
    secret = {"AWS_SECRET_ACCESS_KEY": "hunter2", "PATH": "/bin"}
    made = launcher.build_command(
        "RUN",
        job(program=words, set_environment={"LR": "0.1"}, environment=secret, forward=("LR",)),
    )
    assert isinstance(launcher, Launcher)
    assert made.arguments[0] == "RUN"
    assert made.arguments[-len(words) :] == words
    assert made.environment["LR"] == "0.1"
    assert "AWS_SECRET_ACCESS_KEY" not in " ".join([*made.arguments, *made.environment])
    assert launcher.parse_rank_exit("") is None


@pytest.mark.parametrize("vendor", ["open_mpi_4", "open_mpi_5"])
def test_a_setting_that_the_user_has_made_is_left_alone(vendor):
    """Open MPI refuses a parameter that is there twice, so ours must give way."""
    by_argument = job(oversubscribe=True, extra=("--mca", "osc", "ucx", "--map-by", "node"))
    words = LAUNCHERS[vendor].build_command("RUN", by_argument).arguments
    assert words.count("osc") == words.count("--map-by") == 1
    by_variable = job(environment={"OMPI_MCA_osc": "rdma"})
    assert "osc" not in LAUNCHERS[vendor].build_command("RUN", by_variable).arguments


@pytest.mark.parametrize(
    ("vendor", "flag"),
    [("open_mpi_5", "--output :raw"), ("slurm", "--unbuffered"), ("open_mpi_4", ""), ("mpich", "")],
)
def test_unfinished_lines_are_shown_where_somebody_looks(vendor, flag):
    """Open MPI 5 and srun wait for the ends of lines unless told; the others never do."""
    shown = {
        live: LAUNCHERS[vendor].build_command("RUN", job(live=live)).arguments for live in (0, 1)
    }
    assert " ".join(word for word in shown[1] if word not in shown[0]) == flag


def test_intel_mpi_pins_by_variables_that_the_user_may_have_set():
    """``--bind-to`` sets ``I_MPI_PIN_DOMAIN``; a user's ``I_MPI_PIN`` is left alone."""
    launcher = LAUNCHERS["intel_mpi"]
    assert launcher.build_command("RUN", job(bind_to="numa")).environment == {
        "I_MPI_PIN_DOMAIN": "numa"
    }
    assert launcher.build_command("RUN", job(environment={"I_MPI_PIN": "1"})).environment == {}


@pytest.mark.parametrize("vendor", ["mpich", "intel_mpi"])
@pytest.mark.parametrize("interface", ["10.0.0.0/24", "eth0,eth1"])
def test_hydra_takes_the_name_of_one_interface(vendor, interface):
    """MPICH and Intel MPI refuse a subnet or a list as ``--network-interface``."""
    with pytest.raises(ArgumentError, match=r"--network-interface: .* takes the name of one"):
        LAUNCHERS[vendor].build_command("RUN", job(interface=interface))


def test_srun_takes_the_same_number_of_ranks_on_every_host():
    """With srun, hosts with different numbers of slots are refused and shown."""
    with pytest.raises(ArgumentError, match="same number of ranks on every host, got h1:2,h2:1"):
        LAUNCHERS["slurm"].build_command("RUN", job(3, "h1:2,h2:1"))


@pytest.mark.parametrize(
    ("flag", "given"), [("--ssh-port", {"ssh_port": 22}), ("--remote-shell", {"remote_shell": "x"})]
)
def test_srun_has_no_remote_shell(flag, given):
    """With srun, ``--ssh-port`` and ``--remote-shell`` are refused with the reason."""
    with pytest.raises(ArgumentError, match=f"{flag}: srun starts ranks without ssh"):
        LAUNCHERS["slurm"].build_command("RUN", job(**given))


@pytest.mark.parametrize(
    ("vendor", "said", "rank_exit"),
    [
        ("open_mpi_5", recorded.OPEN_MPI_5_KILLED, FailedRank(2, "vm", signal=9)),
        ("open_mpi_5", recorded.OPEN_MPI_5_EXIT, FailedRank(2, code=3)),
        ("open_mpi_5", recorded.OPEN_MPI_5_ABORT, FailedRank(2, code=3)),
        ("open_mpi_5", recorded.OPEN_MPI_5_HOST_LOST, FailedRank(None, "h2", lost_host=True)),
        ("open_mpi_5", recorded.OPEN_MPI_5_HOST_SILENT, FailedRank(None, "h2", lost_host=True)),
        ("open_mpi_5", recorded.OPEN_MPI_5_CONNECTION_CLOSED, FailedRank(0, "h1")),
        ("open_mpi_5", recorded.OPEN_MPI_5_NO_SLOTS, None),
        ("open_mpi_4", recorded.OPEN_MPI_4_KILLED, FailedRank(2, "vm", signal=11)),
        ("open_mpi_4", recorded.OPEN_MPI_4_EXIT, FailedRank(2, code=3)),
        ("mpich", recorded.MPICH_KILLED, FailedRank(None, signal=11)),
        ("mpich", recorded.HYDRA_ABORT, FailedRank(2, code=5)),
        ("intel_mpi", recorded.INTEL_KILLED_ALONE, FailedRank(2, "vm", signal=9)),
        ("intel_mpi", recorded.INTEL_KILLED_ALL, FailedRank(None, "vm", signal=9)),
        ("intel_mpi", recorded.INTEL_CRASHED, FailedRank(2, "vm", signal=11)),
        ("intel_mpi", recorded.HYDRA_ABORT, FailedRank(2, code=5)),
        ("slurm", recorded.SRUN_EXIT, FailedRank(2, "node7", code=3)),
        ("slurm", recorded.SRUN_KILLED, FailedRank(2, "node7", signal=9)),
        ("slurm", recorded.SRUN_CRASHED, FailedRank(2, "node7", signal=11)),
    ],
)
def test_the_launchers_words_say_who_died(vendor, said, rank_exit):
    """Only who surely was first is named: Hydra kills the others and shows them too."""
    assert LAUNCHERS[vendor].parse_rank_exit(said) == rank_exit
