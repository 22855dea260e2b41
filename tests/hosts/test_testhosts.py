"""Our script that makes hosts: it keeps to itself and takes everything down again."""

import subprocess

import pytest

from tests.hosts.namespaces import call_script

pytestmark = pytest.mark.hosts


def on(host, command):
    ended = call_script(host, command)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_a_host_has_its_name_its_address_and_an_empty_environment(network, monkeypatch):
    """Commands on a host see its hostname and interface, and no variables but those of a login."""
    monkeypatch.setenv("OF_THE_CALLER", "1")
    assert on("h2", "hostname") == "h2"
    assert "10.77.0.2/24" in on("h2", "ip -4 -o addr show e0")
    names = {line.partition("=")[0] for line in on("h1", "env").splitlines()}
    assert names - {"_", "PWD", "OLDPWD", "SHLVL"} == {"HOME", "USER", "PATH"}


def test_hosts_share_no_memory(network):
    """A file in /dev/shm on one host does not exist on the other."""
    assert on("h1", "touch /dev/shm/mark; ls /dev/shm") == "mark"
    assert on("h2", "ls /dev/shm") == ""


def test_there_is_no_way_out_of_the_network(network):
    """Hosts have no default route, and their bridge has no IPv4 address."""
    assert on("h1", "ip route show default") == ""
    bridge = subprocess.run(
        ["ip", "-o", "addr", "show", "asyncddp0"], capture_output=True, text=True, check=True
    )
    assert "inet " not in bridge.stdout


def test_options_of_ssh_are_passed_over(network):
    """Options before the host are ignored, and a command's words are joined as ssh does."""
    assert call_script("-x", "-p", "22", "h1", "echo", "a  b").stdout == "a b\n"


def test_exit_codes_come_back(network):
    """The script exits with the code of the command, and with 255 for an unknown host."""
    assert call_script("h1", "exit 7").returncode == 7
    assert call_script("h9", "true").returncode == 255


def test_a_wrong_call_is_answered_with_the_right_ones():
    """An unknown subcommand exits with 2 and prints the usage on stderr."""
    ended = call_script("sideways")
    assert ended.returncode == 2
    assert "usage: testhosts up" in ended.stderr
