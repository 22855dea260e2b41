"""What there is: torch, CUDA, driver, GPUs, NCCL and MPI, told in the log and held to laws."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys

import pytest
import torch

from asyncddp.cli.doctor.machine_checks import list_gpus
from asyncddp.cli.doctor.mpi_checks import query_cuda_awareness
from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.device.stream_registry import streams_of_device
from asyncddp.transport.cuda.nccl.cupy_bindings import describe_conflict, library, versions

PREFIXES = ("ASYNCDDP_", "CUDA_", "NCCL_", "NVIDIA_", "OMPI_MCA_", "PYTORCH_", "UCX_")


@pytest.fixture
def tell(capsys, record_property):
    """Tells a fact in the log, and in JUnit's XML."""

    def told(name, value):
        record_property(name, str(value))
        with capsys.disabled():
            sys.stdout.write(f"\n{name}: {value}")

    return told


def gpus():
    return range(torch.cuda.device_count())


def test_the_driver_is_new_enough_for_torch(tell):
    """The driver's CUDA has at least the major version of torch's."""
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    driver = version.value // 1000
    tell("python", sys.version.split()[0])
    tell("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    tell("driver", f"CUDA {driver}, {list_gpus()}")
    tell("variables", {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)})
    assert driver >= int(torch.version.cuda.partition(".")[0])


def test_every_gpu_computes_and_has_a_name_of_its_own(tell):
    """Each visible GPU sums right, in double and in half precision, and has a UUID of its own."""
    for index in gpus():
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        tell(f"GPU {index}", f"{facts.name}, {facts.major}.{facts.minor}, {facts.uuid}")
        tell(f"GPU {index} has", f"{facts.multi_processor_count} SMs, {free:,} of {total:,} B free")
        for dtype in (torch.float64, torch.bfloat16):
            assert torch.ones(256, dtype=dtype, device=index).sum().item() == 256
    assert len({str(torch.cuda.get_device_properties(k).uuid) for k in gpus()}) == len(gpus())


def test_no_stream_of_torch_s_pool_is_the_library_s():
    """64 streams, twice as many as the pool has, are none of the library's three."""
    streams = streams_of_device(torch.device("cuda", 0))
    own = {streams.stream_pointer(role) for role in StreamRole if role is not StreamRole.CALLER}
    assert len(own) == 3
    assert not own & {torch.cuda.Stream().cuda_stream for _ in range(64)}


def test_memory_is_seen_from_both_sides(tell):
    """Where one GPU can access another's memory, that one can access the first's."""
    access = [[k == j or torch.cuda.can_device_access_peer(k, j) for j in gpus()] for k in gpus()]
    tell("peer access", [[int(can) for can in row] for row in access])
    assert all(access[k][j] == access[j][k] for k in gpus() for j in gpus())


def test_a_copy_between_gpus_arrives():
    """What is copied from each GPU to each other one is what was sent."""
    for one in gpus():
        sent = torch.arange(100_003, device=torch.device("cuda", one))
        for other in gpus():
            assert torch.equal(sent.to(torch.device("cuda", other)).cpu(), sent.cpu()), (one, other)


def test_cupy_uses_the_cuda_and_the_nccl_of_torch(tell):
    """cupy's runtime has the major version of torch's CUDA, and one NCCL is loaded for both."""
    cupy = pytest.importorskip("cupy", reason="cupy is not installed: NCCL cannot be used")
    name, nccl = versions()
    runtime = cupy.cuda.runtime.runtimeGetVersion()
    tell("cupy", f"{name}, CUDA {runtime}, NCCL {nccl}; torch's NCCL {torch.cuda.nccl.version()}")
    assert runtime // 1000 == int(torch.version.cuda.partition(".")[0])
    assert cupy.cuda.runtime.getDeviceCount() == len(gpus())
    assert library().nccl.available
    major, minor, patch = torch.cuda.nccl.version()[:3]
    assert nccl == major * 10_000 + minor * 100 + patch
    assert describe_conflict(nccl) == ""


def test_mpi_takes_gpu_memory_only_where_it_was_built_to(tell):
    """Open MPI says that it takes GPU memory only where ompi_info says that it was built so."""
    from asyncddp.transport.cuda.cuda_aware_mpi import query_cuda_support  # may find no MPI
    from asyncddp.transport.mpi.runtime import describe_mpi

    found = describe_mpi()
    says, built = query_cuda_support(), query_cuda_awareness(shutil.which("mpirun") or "mpirun")
    tell("MPI", found)
    tell("MPI takes GPU memory", f"{says}; built so: {built}")
    assert not (says and built is False)
