"""Environment variables are read once, checked, and named when they are wrong."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import asyncddp as bf
from asyncddp.config import Config, tune_cuda

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "hangs.md"


def test_defaults_are_those_of_the_documentation():
    """With no variables set, waits warn and end, and checks are off, as the guide's table says."""
    config = Config.from_environment({})
    table = re.findall(r"^\| `(ASYNCDDP_\w+)` \| (\d+) \|", GUIDE.read_text(), re.MULTILINE)
    names = {item.metadata["name"]: item.name for item in fields(Config)}
    told = {names[variable]: float(default) for variable, default in table}
    assert told.keys() == {"warn_after", "timeout", "network_timeout", "check"}
    assert told == {name: getattr(config, name) for name in told}
    assert config.transport is config.ranks_per_machine is config.report_dir is None


def test_every_variable_is_documented_with_its_field():
    """The docstring of ``Config`` lists each field with its environment variable."""
    for item in fields(Config):
        assert f"{item.name}: ``{item.metadata['name']}``" in Config.__doc__


def test_variables_are_read():
    """Each variable sets its field in the field's own type; other variables are ignored."""
    config = Config.from_environment(
        {
            "ASYNCDDP_TIMEOUT": "5",
            "ASYNCDDP_WARN_AFTER": "0.5",
            "ASYNCDDP_CHECK": "yes",
            "ASYNCDDP_TRANSPORT": "loopback",
            "ASYNCDDP_RANKS_PER_MACHINE": "2",
            "OTHER": "ignored",
        }
    )
    assert (config.timeout, config.warn_after, config.check) == (5.0, 0.5, True)
    assert (config.transport, config.ranks_per_machine) == ("loopback", 2)


def test_arguments_win_unless_they_are_none():
    """An argument overrides its environment variable; None leaves the variable's value."""
    environ = {"ASYNCDDP_TIMEOUT": "5"}
    assert Config.from_environment(environ, timeout=7.0).timeout == 7.0
    assert Config.from_environment(environ, timeout=None).timeout == 5.0


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ASYNCDDP_TIMEOUT", "0", "a number above zero"),
        ("ASYNCDDP_TIMEOUT", "nan", "a number above zero"),
        ("ASYNCDDP_RANKS_PER_MACHINE", "0", "a whole number of at least 1"),
        ("ASYNCDDP_CHECK", "maybe", "one of 0, 1, true, false, yes, no, on, off"),
    ],
)
def test_a_wrong_value_names_variable_expected_and_got(name, value, expected):
    """A bad value raises ArgumentError with the variable, what it takes and what it got."""
    with pytest.raises(bf.ArgumentError) as caught:
        Config.from_environment({name: value})
    assert str(caught.value) == f"environment variable {name}: expected {expected}, got {value!r}"


@pytest.mark.parametrize("name", ["ASYNCDDP_TIMEOUT", "ASYNCDDP_RANKS_PER_MACHINE"])
def test_what_is_no_number_is_refused_in_words(name):
    """Not in those of ``float()``."""
    with pytest.raises(bf.ArgumentError) as caught:
        Config.from_environment({name: "soon"})
    assert str(caught.value).startswith(f"environment variable {name}: expected a")
    assert str(caught.value).endswith("got 'soon'")


def test_a_folder_may_be_given_as_a_path(tmp_path):
    """A path object is accepted as the timeline's folder and stored as text."""
    assert Config.from_environment({}, timeline=tmp_path).timeline == str(tmp_path)


def test_a_configuration_cannot_be_changed():
    """Assigning to a field of ``Config`` raises FrozenInstanceError."""
    with pytest.raises(FrozenInstanceError):
        Config().timeout = 3.0


def test_a_variable_s_former_name_is_read_with_a_warning():
    """The new name wins where both are set."""
    former, new = {"ASYNCDDP_DEVICE_WIRES": "nccl"}, {"ASYNCDDP_DEVICE_TRANSPORTS": "cuda_ipc"}
    with pytest.warns(FutureWarning, match="ASYNCDDP_DEVICE_WIRES is called ASYNCDDP_DEVICE_TRANS"):
        assert Config.from_environment(former).device_transports == "nccl"
    assert Config.from_environment(former | new).device_transports == "cuda_ipc"


@pytest.mark.parametrize(
    ("transports", "sets"),
    [
        (None, True),
        ("auto", True),
        ("cuda_ipc, nccl", True),
        ("cuda_ipc,cuda_staged", False),
    ],
)
def test_hardware_queues_are_asked_for_where_nccl_may_serve(transports, sets):
    """Not where the user leaves NCCL out, and another number that is set stays."""
    environ, others = {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    tune_cuda(transports, environ)
    assert environ == ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"} if sets else {})
    tune_cuda(transports, others)
    assert others == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
