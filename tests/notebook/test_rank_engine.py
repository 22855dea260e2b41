"""An engine's connections to its controller, over real ZeroMQ sockets."""

import contextlib
import threading
import time

import pytest

zmq = pytest.importorskip("zmq")
pytest.importorskip("ipyparallel")

from asyncddp.launch.notebook_cluster.rank_engine import SocketConnector  # noqa: E402
from tests.support.sockets import free_ports  # noqa: E402


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


def connect(socket, url):
    socket.connect(url)


def test_a_router_knows_the_peer_once_its_connection_is_said_to_be_there(context):
    """A message sent right then arrives from each of two routers that begin to listen late."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(context.socket(zmq.ROUTER))
        engine.setsockopt(zmq.IDENTITY, b"engine")
        connections = stack.enter_context(SocketConnector(connect, 60.0))
        for port in free_ports(2):
            router = stack.enter_context(context.socket(zmq.ROUTER))
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be delivered is an error
            late = threading.Timer(0.3, router.bind, [f"tcp://127.0.0.1:{port}"])
            began = time.monotonic()
            late.start()
            connections.connect(engine, late.args[0])
            late.join()
            assert time.monotonic() - began >= 0.3
            router.send_multipart([b"engine", b"cell"])
            assert engine.poll(60_000)
            assert engine.recv_multipart()[-1] == b"cell"


def test_a_router_that_is_not_there_is_named(context):
    """After the timeout, an error says which address did not answer."""
    url = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with (
        context.socket(zmq.ROUTER) as engine,
        SocketConnector(connect, 0.1) as connections,
        pytest.raises(TimeoutError, match=url),
    ):
        connections.connect(engine, url)
