"""The manifests of examples/kubernetes, as far as they can be read without a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.parsed_commands import check_command
from tests.support.packages import need

yaml = pytest.importorskip("yaml", reason="the package pyyaml is not installed")
need("kubernetes_validate")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
KINDS = {
    "mpijob.yaml": ("kubeflow.org/v2beta1", "MPIJob"),
    "pytorchjob.yaml": ("kubeflow.org/v1", "PyTorchJob"),
    "pytorchjob-gpu.yaml": ("kubeflow.org/v1", "PyTorchJob"),
}


def read(name: str) -> dict[str, Any]:
    """A manifest."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return found


def replicas_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """By role what the operator starts."""
    spec = manifest["spec"]
    found: dict[str, Any] = spec.get("mpiReplicaSpecs") or spec["pytorchReplicaSpecs"]
    return found


def container_of(replica: dict[str, Any]) -> dict[str, Any]:
    """The only container of a pod."""
    (found,) = replica["template"]["spec"]["containers"]
    return dict(found)


def read_command(container: dict[str, Any], folder: Path) -> list[str]:
    """The container's command, which this machine can read."""
    (folder / "train.py").write_text("")
    (folder / "hostfile").write_text("a slots=4\nb slots=4\n")
    words = [*container["command"], *container.get("args", [])]
    words = [word.replace("/etc/mpi", str(folder)) for word in words]
    check_command(words, folder)
    return words


def test_there_are_these() -> None:
    """Each manifest is of a known kind, and says how it is applied."""
    assert {path.name for path in FOLDER.glob("*.yaml")} == set(KINDS)
    for name, kind in KINDS.items():
        manifest = read(name)
        assert (manifest["apiVersion"], manifest["kind"]) == kind
        lines = (FOLDER / name).read_text().splitlines()
        assert f"#     kubectl apply --filename examples/kubernetes/{name}" in lines


@pytest.mark.parametrize("name", KINDS)
def test_the_pods_are_what_kubernetes_takes(name: str) -> None:
    """Each template is valid for a Pod, in all names and types; each asks for what it needs."""
    import kubernetes_validate  # which takes a second

    for role, replica in replicas_of(read(name)).items():
        assert set(replica) <= {"replicas", "restartPolicy", "template"}
        assert set(replica["template"]) == {"spec"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role.lower()}}
        newest = kubernetes_validate.latest_version()
        kubernetes_validate.validate({**pod, **replica["template"]}, newest, strict=True)
        resources = container_of(replica)["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"]) == set(resources["limits"])


@pytest.mark.parametrize("name", KINDS)
def test_ranks_of_a_pod_share_memory(name: str) -> None:
    """/dev/shm is in memory and larger than a pod's 64 MB, and fits the limit on memory."""
    roles = replicas_of(read(name))
    for role in set(roles) - {"Launcher"}:
        container = container_of(roles[role])
        (mount,) = container["volumeMounts"]
        (volume,) = roles[role]["template"]["spec"]["volumes"]
        assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}
        assert volume["emptyDir"]["medium"] == "Memory"
        sizes = (volume["emptyDir"]["sizeLimit"], container["resources"]["limits"]["memory"])
        shared, whole = (int(size.removesuffix("Gi")) for size in sizes)
        assert 1 <= shared < whole


def test_mpirun_starts_as_many_ranks_as_there_are_slots(tmp_path: Path) -> None:
    """One launcher runs asyncddp on all workers, which run sshd with the operator's keys."""
    manifest = read("mpijob.yaml")
    spec, roles = manifest["spec"], replicas_of(manifest)
    assert set(roles) == {"Launcher", "Worker"}
    assert roles["Launcher"]["replicas"] == 1
    assert spec["mpiImplementation"] == "OpenMPI"
    words = read_command(container_of(roles["Launcher"]), tmp_path)
    ranks = roles["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert words[words.index("-np") + 1] == str(ranks)
    assert f"{tmp_path}/hostfile" in words
    worker = container_of(roles["Worker"])
    assert worker["command"][-1].endswith("/usr/sbin/sshd -De")
    assert int(worker["resources"]["limits"]["cpu"]) >= spec["slotsPerWorker"]
    image = (FOLDER / "ssh.Dockerfile").read_text()
    assert re.search(r"--tag (\S+)", image)[1] == worker["image"]  # type: ignore[index]
    assert {"openssh-client", "openssh-server", "StrictModes"} <= set(re.findall(r"[\w-]+", image))
    assert "USER root" in image
    assert spec["sshAuthMountPath"] == "/root/.ssh"


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "pytorchjob-gpu.yaml"])
def test_torchrun_starts_the_ranks_of_each_pod(name: str, tmp_path: Path) -> None:
    """One master; a container that the operator knows; a rank for each GPU; a secret."""
    manifest = read(name)
    ranks, roles = int(manifest["spec"]["nprocPerNode"]), replicas_of(manifest)
    assert set(roles) == {"Master", "Worker"}
    assert roles["Master"]["replicas"] == 1
    for replica in roles.values():
        assert replica["restartPolicy"] in ("OnFailure", "ExitCode")
        container = container_of(replica)
        assert container["name"] == "pytorch"
        assert read_command(container, tmp_path) == ["torchrun", "train.py"]
        limits = container["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", ranks) == ranks
        assert int(limits["cpu"]) >= ranks
        variables = {one["name"]: one for one in container["env"]}
        assert "secretKeyRef" in variables["ASYNCDDP_SECRET"]["valueFrom"]
    on_gpus = container["image"] == "asyncddp:cuda"
    assert ("gpu" in name) == ("nvidia.com/gpu" in limits) == on_gpus
