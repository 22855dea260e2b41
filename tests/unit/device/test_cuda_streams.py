"""The queues of a CUDA device: which of torch's streams, events and handles they use, and how."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from asyncddp.device.cuda_streams import CudaStreams
from asyncddp.device.stream_interfaces import StreamRole, mark_library_thread
from asyncddp.hooks import ByteGradState, hook_state


class FakeStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    cuda_stream, device = 4711, torch.device("cuda", 0)

    def query(self):
        return True

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.place))


class FakeEvent:
    def __init__(self, log):
        self.log, self.place = log, None

    def record(self, stream):
        self.place = stream.name
        self.log.append(("record on", stream.name))

    def query(self):
        self.log.append(("asked", self.place))
        return False


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda with streams and events that note their use; whatever else is asked fails."""
    log, names = [], iter(["work", "out", "in"])
    current = FakeStream(log, "current")

    def entered(stream):
        log.append(("entered", stream.name))
        return nullcontext()

    def refused(*_):
        raise AssertionError("somebody waits for the device")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", refused)
    return log


def test_cuda_s_queues_are_streams_that_wait_for_events(cuda):
    """Streams wait for events of other streams on the device; the host never synchronizes."""
    streams = CudaStreams(torch.device("cuda", 0))
    begun = streams.record_event(StreamRole.CALLER)
    streams.wait_event(StreamRole.COMPUTE, begun)
    with streams.stream_context(StreamRole.COMPUTE):
        ended = streams.record_event(StreamRole.COMPUTE)
    streams.wait_event(StreamRole.CALLER, ended)
    assert not ended.done()
    assert cuda == [
        ("record on", "current"),
        ("work", "waits for", "current"),
        ("entered", "work"),
        ("record on", "work"),
        ("current", "waits for", "work"),
        ("asked", "work"),
    ]


def test_cuda_s_copies_do_not_block(cuda):
    """Copies are non-blocking on their stream, which is recorded for CUDA tensors only."""

    class Tensor:
        is_cuda = True

        def copy_(self, source, *, non_blocking=False):
            cuda.append(("copied", source, non_blocking))

        def record_stream(self, stream):
            cuda.append(("held for", stream.name))

    streams, out = CudaStreams(torch.device("cuda", 0)), Tensor()
    streams.copy(out, "source", StreamRole.HOST_TO_DEVICE)
    streams.record_stream(out, StreamRole.HOST_TO_DEVICE)
    assert cuda == [("entered", "in"), ("copied", "source", True), ("held for", "in")]
    assert streams.stream_pointer(StreamRole.COMPUTE) == 4711
    streams.record_stream(torch.zeros(1), StreamRole.HOST_TO_DEVICE)
    assert len(cuda) == 3, "memory of the host has no stream"


def test_cuda_s_streams_are_the_library_s_own(cuda, driver, monkeypatch):
    """The driver makes each, with cudaStreamNonBlocking, while the device is the current one."""
    made, current = [], []

    @contextmanager
    def entered(device):
        current.append(device)
        yield
        current.pop()

    def create(pointer, flags):
        assert current == [DEVICE]
        made.append(flags)
        pointer._obj.value = 1000 + len(made)
        return 0

    def external(pointer, device):
        return SimpleNamespace(cuda_stream=pointer, device=device)

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    driver.cuStreamCreate = create
    streams = CudaStreams(DEVICE)
    roles = [role for role in StreamRole if role is not StreamRole.CALLER]
    assert {streams.stream_pointer(role) for role in roles} == {1001, 1002, 1003}
    assert {streams.stream(role).device for role in roles} == {DEVICE}
    assert made == [1, 1, 1]


def test_what_the_driver_refuses_comes_from_torch_s_pool(cuda, driver):
    """An error of cuStreamCreate leaves the streams that torch gives."""
    driver.cuStreamCreate = lambda pointer, flags: 201
    assert CudaStreams(DEVICE).stream(StreamRole.COMPUTE).name == "work"


class Storage:
    """Of a tensor on a GPU, as far as showing it to another process goes."""

    def __init__(self, log):
        self.log = log

    def data_ptr(self):
        return 4711

    def nbytes(self):
        return 12

    def _share_cuda_(self):
        self.log.append("shown")
        return 5, b"handle", 12, 0, b"counter", 3, b"event", True


def test_cuda_s_memory_is_shown_to_other_processes_as_torch_shows_it(cuda, monkeypatch):
    """The reader opens it on its own GPU, whatever number it has where it lies."""
    streams, opened = CudaStreams(torch.device("cuda", 0)), []

    class Tensor:
        def untyped_storage(self):
            return Storage(cuda)

        def set_(self, storage):
            return "all bytes of", storage

    def found(*arguments):
        opened.append(arguments)
        return "storage"

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", found)
    monkeypatch.setattr(torch, "empty", lambda *_, **options: Tensor())
    token = streams.export_memory(Tensor())
    assert streams.import_memory(token) == ("all bytes of", "storage")
    assert opened == [(0, b"handle", 12, 0, b"counter", 3, b"event", True)]
    assert cuda == [("entered", "in"), "shown", ("entered", "in")], "its own event holds nobody up"


def test_cuda_s_events_are_shown_without_being_recorded_first(cuda, monkeypatch):
    """Their handle is taken on their own device, and opened on that of whoever waits."""

    class Shared(FakeEvent):
        def __init__(self, log, interprocess=False):
            super().__init__(log)
            assert interprocess

        def ipc_handle(self):
            self.log.append("handle")
            return b"handle"

        @staticmethod
        def from_ipc_handle(device, handle):
            event = FakeEvent(cuda)
            event.place = device, handle
            return event

    def entered(device):
        cuda.append(("on", device))
        return nullcontext()

    create, streams = Shared, CudaStreams(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "Event", lambda **flags: create(cuda, **flags))
    torch.cuda.Event.from_ipc_handle = Shared.from_ipc_handle
    event = streams.create_interprocess_event()
    assert event.handle == b"handle"
    event.record(StreamRole.COMPUTE)
    streams.wait_event(StreamRole.COMPUTE, streams.import_event(event.handle))
    where = torch.device("cuda", 0)
    assert cuda == [
        ("on", where),
        "handle",
        ("record on", "work"),
        ("work", "waits for", (where, b"handle")),
    ]


# threads


@pytest.fixture
def driver(cuda, monkeypatch):
    """torch.cuda.set_device and CUDA's driver, which note what a thread asks of them."""

    def exchange(mode):
        cuda.append(("capture mode", mode._obj.value))
        return 0

    found = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": found}[name])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: cuda.append(("set", device)))
    return found


DEVICE = torch.device("cuda", 1)
BOUND = [("set", DEVICE), ("capture mode", 2)]
FIRST_USES = {
    "record": lambda streams, _: streams.record_event(StreamRole.COMPUTE),
    "wait": lambda streams, event: streams.wait_event(StreamRole.COMPUTE, event),
    "query": lambda _, event: event.done(),
    "context": lambda streams, _: streams.stream_context(StreamRole.COMPUTE).__enter__(),
    "copy": lambda streams, _: streams.copy(torch.zeros(1), torch.ones(1), StreamRole.COMPUTE),
    "pointer": lambda streams, _: streams.stream_pointer(StreamRole.COMPUTE),
}


def on_a_thread(cuda, *calls):
    """What is asked of CUDA by a new thread that makes these calls."""
    before = len(cuda)
    thread = threading.Thread(target=lambda: [call() for call in calls])
    thread.start()
    thread.join()
    return cuda[before:]


@pytest.mark.parametrize("use", FIRST_USES.values(), ids=list(FIRST_USES))
def test_a_thread_of_the_library_is_bound_before_all_else(cuda, driver, use):
    """On a marked thread the device and the capture mode are set before the first use, once."""
    streams = CudaStreams(DEVICE)
    event = streams.record_event(StreamRole.CALLER)
    asked = on_a_thread(cuda, mark_library_thread, *2 * [lambda: use(streams, event)])
    assert asked[:2] == BOUND
    assert not set(BOUND) & set(asked[2:])


@pytest.mark.parametrize("use", FIRST_USES.values(), ids=list(FIRST_USES))
def test_a_thread_of_the_user_keeps_its_device_and_capture_mode(cuda, driver, use):
    """On a thread that is not marked no use sets the device or the capture mode."""
    streams = CudaStreams(DEVICE)
    event = streams.record_event(StreamRole.CALLER)
    asked = on_a_thread(cuda, lambda: use(streams, event))
    assert not set(BOUND) & set(asked)


@pytest.mark.parametrize("missing", ["library", "function", "refused"])
def test_without_the_driver_s_function_a_thread_is_bound_all_the_same(
    cuda, driver, monkeypatch, caplog, missing
):
    """What keeps the capture mode as it was is told at debug level only."""
    if missing == "library":
        monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("no libcuda.so.1")))
    elif missing == "function":
        del driver.cuThreadExchangeStreamCaptureMode
    else:
        driver.cuThreadExchangeStreamCaptureMode = lambda mode: 1
    with caplog.at_level("DEBUG", "asyncddp"):
        CudaStreams(DEVICE).bind_thread()
    assert cuda == [("set", DEVICE)]
    told = [record for record in caplog.records if "captures" in record.message]
    assert [record.levelname for record in told] == ["DEBUG"]


def test_a_stream_is_left_within_its_own_device(cuda, monkeypatch):
    """torch.cuda.stream is left before torch.cuda.device, so that it finds its own device."""

    @contextmanager
    def noted(kind):
        cuda.append(("enter", kind))
        yield
        cuda.append(("leave", kind))

    streams = CudaStreams(DEVICE)
    monkeypatch.setattr(torch.cuda, "device", lambda device: noted(device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted(stream.name))
    with streams.stream_context(StreamRole.COMPUTE):
        pass
    device = FakeStream.device
    assert cuda == [("enter", device), ("enter", "work"), ("leave", "work"), ("leave", device)]


def test_hooks_of_ddp_queue_their_work_on_a_private_stream(monkeypatch):
    """It waits for other ranks, so it must not be a stream that torch hands to a user as well."""
    waited = []
    stream = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(hook_state, "private_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current of", device))
    monkeypatch.setattr(torch.cuda, "stream", lambda given: ("on", given))
    state, device = object.__new__(ByteGradState), torch.device("cuda", 1)
    state._stream = None
    assert state._stream_of(device) == state._stream_of(device) == ("on", stream)
    assert waited == [("current of", device)] * 2
