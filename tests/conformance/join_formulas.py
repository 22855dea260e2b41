"""Methods within ``join`` by formulas: T trains, W' is W in which its ranks keep others' weights.

Each takes one step of SGD with momentum, ``h``, and then a round of the method among T.
"""

from __future__ import annotations

import numpy as np

from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.algorithms.method_traits import JoinedRanks
from asyncddp.compression.bf16 import BF16
from asyncddp.compression.largest_error import largest_error
from tests.conformance.join_reference import LR, MOMENTUM, Reference, mean_of
from tests.support.methods import bfloat16

GAMMA, THETA = 0.6, 4.0
ETA, MU, BETA = 0.7, 0.9, 0.9


class JoinedFormula(Reference):
    """One method's models of all ranks; what it keeps by name."""

    def __init__(self, method, graph, n, every=1):
        super().__init__(method, graph, n, every)
        self.kept = {}
        self.trained = list(range(n))
        self.outer = self.x.copy()

    def of(self, name):
        """A tensor of the state, zero at first."""
        return self.kept.setdefault(name, np.zeros_like(self.x))

    def matrix(self, training):
        if ALGORITHMS[self.method].joined_ranks is JoinedRanks.FOLLOW:
            return mean_of(self.n, training)
        return super().matrix(training)

    def epoch(self, batches):
        super().epoch(batches)
        self.begin_anew(list(range(self.n)))
        return self

    def begin_anew(self, training):
        """Trackers of all ranks are what they track where others train than before."""
        if training != self.trained:
            self.of("tracker")[:] = self.of("tracked")
        self.trained = training

    def step(self, training, gradients, averages):
        t, h = training, self.x.copy()
        if self.method == "beer":
            self.of("tracker")[t] += gradients[t] - self.of("tracked")[t]
            self.of("tracked")[t] = gradients[t]
            gradients = self.of("tracker")
        self.momentum[t] = MOMENTUM * self.momentum[t] + gradients[t]
        h[t] -= LR * self.momentum[t]
        if averages:
            self.begin_anew(t)
            self.rounds += 1
            h = ROUNDS[self.method](self, t, h, self.matrix(t))
        self.x = h


def choco_sgd(run, t, h, w):
    known = run.of("known")
    known[t] += bfloat16(h - known)[t]
    return h + GAMMA * (w @ known - known)


def beer(run, t, h, w):
    models, trackers, tracker = run.of("models"), run.of("trackers"), run.of("tracker")
    x = h + GAMMA * (w @ models - models)
    models[t] += bfloat16(x - models)[t]
    trackers[t] += bfloat16(tracker - trackers)[t]
    tracker += GAMMA * (w @ trackers - trackers)
    return x


def deepsqueeze(run, t, h, w):
    error = run.of("error")
    q = bfloat16(h + error)
    error[t] = (h + error - q)[t]
    return h + GAMMA * (w @ q - q)


def moniqua(run, t, h, w):
    modulus = 2 * THETA / (1 - 2 * largest_error(BF16()))
    q = bfloat16(h / modulus - np.round(h / modulus))
    apart = q[None, :, :] - h[:, None, :] / modulus  # by receiver and sender
    apart = modulus * (apart - np.round(apart))
    change = np.einsum("ij,ijd->id", w, apart) - np.einsum("iid->id", apart)
    return h + GAMMA * change


def low_precision_decentralized(run, t, h, w):
    replicas = run.kept.setdefault("replicas", run.x.copy())
    replicas[t] += bfloat16(w @ replicas - 2 * replicas + h)[t]
    h[t] = replicas[t]
    return h


def power_gossip(run, t, h, w):
    return w @ h  # as parameters are vectors


def relay_sgd(run, t, h, w):
    own = np.zeros((run.n, 1))
    own[t] = 1.0
    full = topology.mixing_matrix(run.schedule, 0)
    links = [(i, j) for i, j in np.argwhere(full).tolist() if i != j]
    nothing = np.zeros(run.x.shape[1]), np.zeros(1)
    before = run.kept.setdefault("messages", {(i, j): nothing for i, j in links})
    after = {}
    for i, j in links:
        others = [before[k, to] for k, to in links if to == i and k != j]
        after[i, j] = (
            own[i] * h[i] + sum(m for m, _ in others),
            own[i] + sum(c for _, c in others),
        )
    run.kept["messages"] = after
    x = h.copy()
    for i in t:
        arrived = [after[k, to] for k, to in links if to == i]
        count = sum(c for _, c in arrived)
        x[i] = (h[i] * (run.n - count) + sum(m for m, _ in arrived)) / run.n
    return x


def sparse_loco(run, t, h, w):
    error = run.of("error")
    error[t] = BETA * error[t] + (run.outer - h)[t]
    s = bfloat16(error)
    error[t] -= s[t]
    run.outer -= ETA * s[t].mean(0)
    return run.outer.copy()


def demo(run, t, h, w):
    momentum = run.of("demo")
    momentum[t] = BETA * momentum[t] + (run.outer - h)[t]
    q = bfloat16(momentum)
    momentum[t] -= q[t]
    run.outer -= LR * np.sign(q[t].mean(0))
    return run.outer.copy()


def diloco(run, t, h, w):
    m, change = run.of("outer momentum"), (run.outer - h)[t].mean(0)
    m[:] = MU * m + change
    run.outer -= ETA * (change + MU * m)
    return run.outer.copy()


def streaming_diloco(run, t, h, w):
    outer = diloco(run, t, h, w)
    outer[t] = 0.5 * h[t] + 0.5 * outer[t]
    return outer


def slowmo(run, t, h, w):
    u = run.of("slow momentum")
    u[:] = 0.5 * u + (run.outer - h[t].mean(0)) / LR
    run.outer -= LR * u
    return run.outer.copy()


ROUNDS = {
    one.__name__: one
    for one in (
        choco_sgd,
        beer,
        deepsqueeze,
        moniqua,
        low_precision_decentralized,
        power_gossip,
        relay_sgd,
        sparse_loco,
        demo,
        diloco,
        streaming_diloco,
        slowmo,
    )
}
_GOSSIP = {"compression": "bf16", "consensus_step": GAMMA}
OPTIONS = {
    "choco_sgd": _GOSSIP,
    "beer": _GOSSIP,
    "deepsqueeze": _GOSSIP,
    "moniqua": {**_GOSSIP, "theta": THETA},
    "low_precision_decentralized": {"compression": "bf16", "communication_interval": 1},
    "power_gossip": {},
    "relay_sgd": {},
    "sparse_loco": {"compression": "bf16", "outer_lr": ETA, "error_decay": BETA},
    "demo": {"compression": "bf16", "beta": BETA},
    "diloco": {"outer_lr": ETA, "outer_momentum": MU},
    "streaming_diloco": {"fragments": 1, "outer_lr": ETA, "outer_momentum": MU},
    "slowmo": {"beta": 0.5},
}
"""By method, the options with which a round is what the formula says."""
