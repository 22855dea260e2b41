"""set_conda_down.sh against a conda that keeps environments, and refuses what conda refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.scripts.stand_in_conda import CONDA
from tests.support import run_on_mpirun, run_to_end

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "set_conda_down.sh"
SETTINGS = (
    "OMPI_MCA_opal_cuda_support=true UCX_MEMTYPE_CACHE=n OMPI_MCA_pml=ucx "
    "OMPI_MCA_opal_common_ucx_tls=any OMPI_MCA_opal_common_ucx_devices=any"
)
MEET = """
from mpi4py import MPI
print("sum", MPI.COMM_WORLD.allreduce(1), flush=True)
"""

NVIDIA = '[[ "$1" == -L ]] && echo "GPU 0: stand-in"'


@pytest.fixture
def down(machine):
    """Run the script with the given arguments and environment; ``conda`` and a driver are there."""
    machine.install("conda", CONDA)
    machine.environ["CONDA_ROOT"] = str(machine.root / "conda")
    machine.install("nvidia-smi", NVIDIA)

    def run(*arguments, **environ):
        machine.log.unlink(missing_ok=True)
        return machine.run(SCRIPT, *arguments, **environ)

    return run


def conda_calls(machine, name="conda"):
    """The calls of conda as words, without ``env list``, which changes nothing."""
    calls = [call.split(" [") for call in machine.calls() if call.startswith(f"{name} ")]
    words = [[word.rstrip("]") for word in call[1:]] for call in calls]
    return [call for call in words if call != ["env", "list"]]


def activation(machine, name="asyncddp"):
    """The script that is run when the environment is activated."""
    return machine.root / "conda" / "envs" / name / "etc" / "conda" / "activate.d" / "asyncddp.sh"


def test_fresh_creates_stores_settings_installs_and_tests_itself(machine, down):
    """Without the environment: create, settings, this clone without its dependencies, doctor."""
    done = down()
    assert done.returncode == 0, done.stderr
    create, prefix, install, ucx, doctor = conda_calls(machine)
    assert create[:6] == [
        "create", "--yes", "--name", "asyncddp", "--override-channels", "--channel",
    ]  # fmt: skip
    packages = create[7:]
    assert "openmpi>=5.0.7,!=5.0.8,<6" in packages
    assert {"python=3.12", "pytorch=2.*=cuda*", "cuda-version>=12", "ucx", "nccl"} < set(packages)
    assert prefix[:5] == ["run", "--name", "asyncddp", "python", "-c"]
    assert install[:3] == ["run", "--name", "asyncddp"]
    assert install[-4:] == ["--no-deps", "--no-build-isolation", "--editable", str(REPO)]
    assert ucx == ["run", "--name", "asyncddp", "ucx_info", "-d"]
    assert doctor == ["run", "--name", "asyncddp", "asyncddp", "doctor", "--check"]
    assert done.stdout.endswith("Ready. Now: conda activate asyncddp\n")


def test_the_self_test_is_shown_and_runs_with_the_settings(down):
    """Inside the environment, activated as a user's shell would."""
    said = down().stdout.splitlines()
    assert "doctor: OMPI_MCA_opal_cuda_support=true" in said
    assert "doctor: OMPI_MCA_pml=ucx UCX_MEMTYPE_CACHE=n" in said


def test_a_setting_of_the_users_own_stays(down):
    """Activation keeps a variable that the caller has set, and sets the others."""
    assert "doctor: OMPI_MCA_pml=ob1 UCX_MEMTYPE_CACHE=n" in down(OMPI_MCA_pml="ob1").stdout


def test_mpi_starts_with_the_settings_on_a_machine_without_infiniband_and_cuda(down, tmp_path):
    """Open MPI's default list of UCX's transports would leave it without any for messages."""
    if "pml: ucx" not in run_to_end([str(Path(sys.executable).parent / "ompi_info")]).stdout:
        pytest.skip("the MPI of this environment is no Open MPI with UCX")
    shown = re.search("then (.*) are stored", down("--dry-run").stdout)[1]
    settings = dict(word.split("=") for word in shown.split())
    del settings["OMPI_MCA_opal_cuda_support"]  # which a build without CUDA refuses
    ended = run_on_mpirun(2, MEET, tmp_path, environ=settings, warm=False)
    assert ended.code == 0, ended
    assert ended.stdout.count("sum 2") == 2, ended


@pytest.mark.parametrize("own", ["", "UCX_MEMTYPE_CACHE=y", "OMPI_MCA_pml="])
@pytest.mark.parametrize("times", [1, 2])
def test_leaving_the_environment_restores_what_was_set_before(machine, down, own, times):
    """After activation and deactivation, once or twice, every variable is as the user had it."""
    down()
    enter = activation(machine)
    leave = enter.parents[1] / "deactivate.d" / "asyncddp.sh"
    seen = "compgen -e | grep -E 'ASYNCDDP|OMPI|UCX' | while read -r v; do echo \"$v=${!v}\"; done"
    text = f"set -eu\n{seen}\necho --\n"
    text += f". {enter}\n{seen}\necho --\n. {leave}\n" * times + seen
    done = machine.run("-c", text, **dict(word.split("=") for word in filter(None, [own])))
    before, within, *_, after = done.stdout.split("--\n")
    assert done.returncode == 0, done.stderr
    assert before == after == (f"{own}\n" if own else "")
    expected = dict(word.split("=") for word in [*SETTINGS.split(), *filter(None, [own])])
    found = dict(line.split("=") for line in within.splitlines())
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("has", "words"),
    [
        ("cuda_copy cuda_ipc gdr_copy tcp", "UCX takes GPU memory, by cuda_copy cuda_ipc gdr_copy"),
        (
            "self tcp",
            "ucx_info -d shows no transport for CUDA. Without a GPU that is so everywhere",
        ),
    ],
)
def test_what_ucx_can_do_is_told(down, has, words):
    """The transports of ucx_info -d for CUDA are named; where there are none, what that means."""
    done = down(UCX_HAS=has)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "UCX takes" not in down("--cpu").stdout


def test_a_ucx_info_that_does_not_run_is_no_failure(down):
    """The user is told that it is not known, and the self-test follows."""
    done = down(FAKE_FAILS="ucx_info")
    assert done.returncode == 0, done.stderr
    assert "it is not known whether UCX takes GPU memory" in done.stdout
    assert done.stdout.endswith("Ready. Now: conda activate asyncddp\n")


def test_second_run_updates_in_place(machine, down):
    """With the environment there: the same packages by ``install``, and nothing is created."""
    down()
    created, script = conda_calls(machine), activation(machine).read_text()
    assert down().returncode == 0
    updated = conda_calls(machine)
    assert updated[0] == ["install", *created[0][1:]]
    assert updated[1:] == created[1:]
    assert activation(machine).read_text() == script


def test_an_environment_whose_name_only_begins_alike_is_another(machine, down):
    """``asyncddp-old`` is not ``asyncddp``."""
    assert down("--name", "asyncddp-old").returncode == 0
    assert down().returncode == 0
    assert conda_calls(machine)[0][0] == "create"


def test_cpu_leaves_cuda_out(machine, down):
    """--cpu: no CUDA package and no setting; those that an earlier run stored are taken back."""
    assert down("--cpu", "--name", "little", "--python", "3.11").returncode == 0
    create, *inside = conda_calls(machine)
    assert {"python=3.11", "pytorch=2.*=cpu*"} < set(create)
    assert not [word for word in create if "cu" in word and "cpu" not in word]
    assert not {"nccl", "ucx"} & set(create)
    assert [call[:3] for call in inside] == [["run", "--name", "little"]] * 3
    assert not activation(machine, "little").exists()
    down()
    assert activation(machine).exists()
    assert "OMPI_MCA_opal_cuda_support=unset" in down("--cpu").stdout
    assert not activation(machine).exists()


def test_what_pyproject_asks_for_is_among_the_packages(machine, down):
    """pip installs this clone without its dependencies, so that conda must bring all of them."""
    down()
    bounds = {}
    for word in conda_calls(machine)[0][7:]:
        found = re.match(r"([a-z0-9-]+?)(?:-base)?(?:>=([0-9.]+)|=([0-9]+).*)?(?:,.*)?$", word)
        bounds[found[1].replace("pytorch", "torch")] = found[2] or found[3]
    declared = (REPO / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)\]", declared, re.MULTILINE | re.DOTALL)[1]
    for name, least in re.findall(r'"([a-z0-9-]+)>=([0-9.]+)"', needed):
        assert name in bounds, f"{name} is not among conda's packages"
        assert name == "torch" or bounds[name].removesuffix(".0") == least.removesuffix(".0"), name


def test_without_a_driver_the_cuda_packages_come_all_the_same(machine, down, has_gpu):
    """On a login node conda is told which CUDA to expect, and the user is told that it was."""
    if has_gpu:
        pytest.skip("this machine has a GPU, so its driver cannot be missing")
    (machine.bin / "nvidia-smi").unlink()
    done = down()
    assert done.returncode == 0
    assert "No NVIDIA driver here: installing for CUDA 12.9 all the same" in done.stderr
    assert "__cuda is 12.9" in done.stdout
    assert "cuda-version=12.9" in conda_calls(machine)[0]
    assert down("--cuda", "13").returncode == 0
    assert "cuda-version=13" in conda_calls(machine)[0]


@pytest.mark.parametrize(
    ("failing", "step", "calls"),
    [
        ("create", "creating the environment asyncddp", 1),
        ("pip install", f"installing asyncddp from {REPO}", 3),
        ("doctor", "self-test: asyncddp doctor --check", 5),
    ],
)
def test_a_failing_step_ends_it_with_a_sentence(machine, down, failing, step, calls):
    """Whichever step fails: its name and code, exit code 1, and nothing after it."""
    done = down(FAKE_FAILS=failing)
    assert done.returncode == 1
    assert f"set_conda_down.sh: {step} failed (exit code 1)" in done.stderr
    assert "Ready" not in done.stdout
    assert len(conda_calls(machine)) == calls


def test_an_environment_whose_python_does_not_run_is_named(machine, down):
    """It may be broken by an earlier run that was cut off."""
    done = down(FAKE_FAILS="sys.prefix")
    assert done.returncode == 1
    assert "the Python of the environment asyncddp does not run: remove it" in done.stderr
    assert "conda env remove --name asyncddp" in done.stderr
    assert len(conda_calls(machine)) == 2


def test_an_env_list_that_fails_is_no_reason_to_create(machine, down):
    """Where conda cannot even list, nothing is created over what may be there."""
    done = down(FAKE_FAILS="env list")
    assert done.returncode == 1
    assert "env list' failed" in done.stderr
    assert not conda_calls(machine)


def test_dry_run_runs_nothing_and_prints_what_can_be_pasted(machine, down):
    """--dry-run: conda is not called at all, not even to list; the lines are shell commands."""
    done = down("--dry-run", "--cuda", "12.9")
    assert done.returncode == 0
    assert not conda_calls(machine)
    assert not [call for call in machine.calls() if call.startswith("conda")]
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert f"# then {SETTINGS} are stored" in done.stdout
    assert machine.run("-c", "\n".join(lines)).returncode == 0
    pasted = conda_calls(machine)
    assert down("--cuda", "12.9", "--name", "asyncddp").returncode == 0
    real = [call for call in conda_calls(machine) if "-c" not in call]
    assert [["install", *pasted[0][1:]], *pasted[1:]] == real


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "my env"], "make a name, got 'my env'"),
        (["--name", "a;rm"], "make a name, got 'a;rm'"),
        (["--name", "../up"], "make a name, got '../up'"),
        (["--name", ""], "make a name, got ''"),
        (["--name", "-n"], "make a name, got '-n'"),
        (["--name", "base"], "'base' is conda's own environment"),
        (["--name"], "--name needs a value"),
        (["--python", "3.9"], "--python: expected 3.10 or newer, such as 3.12, got '3.9'"),
        (["--cuda", "11.8"], "--cuda: expected 12 or newer, such as 12.9, got '11.8'"),
        (["--cuda", "12", "--cpu"], "--cuda and --cpu exclude each other"),
        (["--gpu"], "unknown argument '--gpu'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(machine, down, arguments, message):
    """Wrong arguments name themselves, and conda is never called."""
    done = down(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not machine.calls()


def test_conda_is_found_by_variable_and_by_name(machine, down):
    """CONDA_CMD wins, then CONDA_EXE, conda, mamba, micromamba."""
    tool = machine.install("my-conda", CONDA)
    for variable in ("CONDA_CMD", "CONDA_EXE"):
        assert down(**{variable: str(tool)}).returncode == 0
        assert conda_calls(machine, "my-conda")
        assert not conda_calls(machine)
    (machine.bin / "conda").rename(machine.bin / "unused")
    machine.install("micromamba", CONDA)
    done = down()
    assert done.returncode == 0
    assert done.stdout.endswith("Ready. Now: micromamba activate asyncddp\n")


def test_without_conda_one_sentence(machine, down):
    """No conda at all, or a CONDA_CMD that is none: one sentence that says what to do."""
    (machine.bin / "conda").unlink()
    done = down()
    assert done.returncode == 1
    assert done.stderr.startswith("set_conda_down.sh: no conda, mamba or micromamba found: install")
    done = down(CONDA_CMD="/nowhere/conda")
    assert done.returncode == 1
    assert "CONDA_CMD=/nowhere/conda is not a program" in done.stderr


def test_help_teaches(machine, down):
    """--help names every option and runs nothing."""
    done = down("--help")
    assert done.returncode == 0
    for option in ("--name", "--python", "--cuda", "--cpu", "--dry-run"):
        assert option in done.stdout
    assert not machine.calls()
