"""Progress engine: runs operations, matches messages between ranks, and bounds all waits in time.

Here belong exchanges, matching by name, handles, deadlines, and the thread that makes progress.
``ops`` and ``windows`` submit operations to it. It does not depend on particular verbs, and ranks
negotiate nothing: every message carries a header, which the receiving rank checks against its own
exchange request.
"""

from asyncddp.engine.chunked_exchange import ChunkedExchange, RaggedExchange
from asyncddp.engine.deferred_calls import DeferredCalls
from asyncddp.engine.exchange_request import ShortMessage
from asyncddp.engine.handle import Handle
from asyncddp.engine.messages import AnyTensorSignature, ExchangeSignature
from asyncddp.engine.operation_exchanges import OperationExchanges, PeerExchanges
from asyncddp.engine.progress_engine import ProgressEngine
from asyncddp.engine.slot_exchange import SlotCall, SlotExchange
from asyncddp.engine.started_collective import StartedCollective, run_collective
from asyncddp.engine.work import OperationSpec, Steps, in_sequence, require_name

__all__ = [
    "AnyTensorSignature",
    "ChunkedExchange",
    "DeferredCalls",
    "ExchangeSignature",
    "Handle",
    "OperationExchanges",
    "OperationSpec",
    "PeerExchanges",
    "ProgressEngine",
    "RaggedExchange",
    "ShortMessage",
    "SlotCall",
    "SlotExchange",
    "StartedCollective",
    "Steps",
    "in_sequence",
    "require_name",
    "run_collective",
]
