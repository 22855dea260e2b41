"""What ranks do on a GPU whose device contexts, captures and threads are then looked at."""

from __future__ import annotations

import ctypes

import torch

import asyncddp as bf
from asyncddp import topology
from tests.gpu.agreed import agreed_transport
from tests.gpu.cases import prepare, verbs
from tests.gpu.places import GPU
from tests.support import until
from tests.support.oracle import held

__all__ = ["beside_a_capture", "contexts", "threads_of_the_user", "use_the_gpu", "verbs_on_default"]


def beside_a_capture(place, begun):
    """Rank 0 captures a graph while its progress thread serves a verb from its start to its end.

    The other ranks enter the verb only once the capture has begun, and its progress thread ends the
    verb before the capture ends. The graph must replay, and the verb give what the host gives.
    """
    bf.set_topology(topology.ring(bf.size()))
    value = held(bf.rank(), (3_000_000,), torch.float32)
    expected = bf.neighbor_allreduce(value)
    with place.there():
        x, inside = value.to(place.device), torch.ones(1000)
        outside = torch.empty_like(inside)

        def compute():
            torch.mul(inside, 2.0, out=outside)

        for name in ("first", "captured"):
            place.ends()
            bf.barrier()
            if bf.rank() == 0 and name == "captured":
                handle = bf.neighbor_allreduce_nonblocking(x, name=name)

                def meanwhile(handle=handle):
                    begun.set()
                    until(handle.poll)

                replay = place.captured(compute, meanwhile)
                outside.zero_()
                replay()
                assert outside.cpu().tolist() == [2.0] * 1000
            else:
                if name == "captured":
                    begun.wait()
                handle = bf.neighbor_allreduce_nonblocking(x, name=name)
            got = handle.wait()
            torch.testing.assert_close(got.cpu(), expected, msg=name)


def threads_of_the_user(place):
    """The calling thread's current device and stream capture mode after blocking verbs."""
    prepare()
    torch.cuda.set_device(0)
    x = held(bf.rank(), (70_001,), torch.float32).to(place.device)
    for verb in verbs().values():
        verb(x)
    mode = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    return torch.cuda.current_device(), mode.value


def contexts():
    """The GPUs on which this process has an active primary context."""
    driver, active = ctypes.CDLL("libcuda.so.1"), []
    for index in range(torch.cuda.device_count()):
        device, flags, state = ctypes.c_int(0), ctypes.c_uint(0), ctypes.c_int(0)
        assert driver.cuDeviceGet(ctypes.byref(device), index) == 0
        found = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(state))
        assert found == 0
        if state.value:
            active.append(index)
    return active


def use_the_gpu():
    """Verbs and windows on this rank's GPU, which is nowhere made the current device.

    Returns the rank, its GPU's number, and the transport that served it.
    """
    place = GPU()
    prepare()
    x = torch.full((70_001,), float(bf.rank()), device=place.device)
    for verb in verbs().values():
        verb(x)
    handle = bf.neighbor_allreduce_nonblocking(x)
    until(handle.poll)
    handle.wait()
    bf.win_create(x, "x")
    bf.win_put(x, "x")
    bf.barrier()
    bf.win_update("x")
    bf.win_free("x")
    return bf.rank(), place.device.index, agreed_transport(place)


def verbs_on_default():
    """Every verb of tensors made on the default device, a GPU, gives what the host gives."""
    prepare()
    for name, verb in verbs().items():
        x = held(bf.rank(), (70_001,), torch.float32)
        assert x.is_cuda
        torch.testing.assert_close(verb(x).cpu(), verb(x.cpu()), msg=name)
