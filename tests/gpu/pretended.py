"""A GPU that is pretended, so that cases for GPUs run where there is none.

Its tensors say that they lie on ``cuda:0``, and their values lie on the host. What a GPU refuses is
refused here: arithmetic between a tensor there and one on the host, and its memory as NumPy's.
What makes the host wait for a GPU is counted. Copies are late, as those of
:class:`~tests.support.simulated_streams.SimulatedStreams` are; arithmetic is done at once, after
what is queued on its thread's stream.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from asyncddp.device import stream_registry as known
from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.transport.cuda import staged_transport as cuda_staged
from tests.support.simulated_streams import SimulatedStreams

__all__ = ["DEVICE", "Pretended", "pretended_gpu", "waits"]

DEVICE = torch.device("cuda", 0)
_BETWEEN_DEVICES = {"copy_", "_to_copy", "index", "index_put", "index_put_"}
_WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"}


class _Waits:
    """What has made the host wait for the device, by operation."""

    def __init__(self):
        self.lock, self.seen = threading.Lock(), Counter()

    def note(self, operation):
        with self.lock:
            self.seen[operation] += 1


class _Here(threading.local):
    """The queue on which a thread works."""

    queue = StreamRole.CALLER


waits, _here = _Waits(), _Here()


class Pretended(torch.Tensor):
    """A tensor that says that it lies on the pretended GPU."""

    @staticmethod
    def __new__(cls, inner):
        inner = inner.detach().resolve_conj().resolve_neg()
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if DEVICE in known._by_device:
            known._by_device[DEVICE].catch_up()
        _refuse_mixed(name, tree_leaves((args, kwargs)))
        out = args[0] if name.endswith("_") else kwargs.get("out")
        to_host = name == "copy_" and type(out) is torch.Tensor
        if name in _WAITS or (to_host and args[-1] is not True):
            waits.note(name)
        given = {key: _inner(value) for key, value in kwargs.items()}
        found = func(*tree_map(_inner, args), **given)
        if not func._schema.returns:  # as of _foreach_copy_
            return None
        return tree_map(_outer, found) if out is None else out

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _MOVES:
            return _moved(func, *args, **kwargs)
        device = kwargs.pop("device", None)
        if device is not None and not _is_gpu(device):  # such as empty_like
            return func(*tree_map(_inner, args), **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def data(self):
        return Pretended(self.inner)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner

    def numpy(self, **_):
        raise TypeError(f"{DEVICE}: its memory is none of NumPy's; copy it to the host first")

    def tolist(self):
        waits.note("tolist")
        return self.inner.tolist()

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def __format__(self, form):
        return format(self.inner, form)

    def __repr__(self):
        return f"Pretended({self.inner})"


def _inner(value):
    return value.inner if isinstance(value, Pretended) else value


def _outer(value):
    return Pretended(value) if type(value) is torch.Tensor else value


def _is_gpu(device):
    return device is not None and torch.device(device).type == "cuda"


def _refuse_mixed(name, values):
    strangers = [v for v in values if type(v) is torch.Tensor and v.dim() > 0]
    if strangers and name not in _BETWEEN_DEVICES:
        raise RuntimeError(
            f"{name}: expected all tensors on {DEVICE}, got one of shape "
            f"{tuple(strangers[0].shape)} on {strangers[0].device}"
        )


_MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)


def _moved(func, tensor, *args, device=None, dtype=None, non_blocking=False, copy=False, **_):
    """What ``to`` and its kin give, between the host and the pretended GPU."""
    device = {torch.Tensor.cpu: "cpu", torch.Tensor.cuda: DEVICE}.get(func, device)
    for value in args:
        if isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (str, torch.device)):
            device = value
    device = tensor.device if device is None else torch.device(device)
    dtype = tensor.dtype if dtype is None else dtype
    was, goes = isinstance(tensor, Pretended), _is_gpu(device)
    with torch._C.DisableTorchFunctionSubclass():
        if was == goes:
            return func(tensor, dtype=dtype, copy=copy) if func is torch.Tensor.to else tensor
        if was and not non_blocking:
            waits.note("to the host")
        found = _inner(tensor).detach().clone().to(dtype)
        return Pretended(found) if goes else found


class _Factories(TorchFunctionMode):
    """While entered, what this thread makes on the pretended GPU is made on the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _MOVES:
            return _moved(func, *args, **kwargs)
        pretended = any(isinstance(value, Pretended) for value in tree_leaves((args, kwargs)))
        if not pretended and _is_gpu(kwargs.get("device")):
            return Pretended(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


class PretendedStreams(SimulatedStreams):
    """The queues of the pretended GPU."""

    kind = "cuda"
    device = DEVICE

    @contextmanager
    def stream_context(self, queue):
        before, _here.queue = _here.queue, queue
        try:
            with _Factories():
                yield
        finally:
            _here.queue = before

    def catch_up(self):
        """Do what is queued where this thread works, since what it does now comes after it."""
        queue = _here.queue
        self.wait_event(queue, self.record_event(queue))

    def copy(self, out, source, queue):
        super().copy(_inner(out), _inner(source), queue)


@contextmanager
def pretended_gpu(laziness=1, piece=60_000):
    """While entered, the pretended GPU is there; a thread that is to use it enters ``working``.

    Args:
        laziness: As of SimulatedStreams.
        piece: Bytes of a piece of what is staged.
    """
    streams, before = PretendedStreams(laziness), cuda_staged._PIECE
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # what is a class of its own
    known._by_device[DEVICE], cuda_staged._PIECE = streams, piece
    try:
        yield streams
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        cuda_staged._PIECE = before
        del known._by_device[DEVICE]
