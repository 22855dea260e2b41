"""The conformance cases that hold on devices too, and how they run there.

They are those of ``tests/conformance``, word for word: within ``with torch.device("cuda"):`` what
they make lies on the GPU.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

import torch

from asyncddp.tensors.dtypes import DTYPES
from tests.support.oracle import AVERAGING, SHAPES

__all__ = ["CASES", "Case", "perform", "perform_all"]


@dataclass(frozen=True)
class Case:
    """A case of a module of ``tests/conformance``.

    Attributes:
        module: The module's name, without ``test_``.
        name: Of the function.
        args: Its arguments.
        ranks: Numbers of ranks on which it holds.
        settings: Of the world.
    """

    module: str
    name: str
    args: tuple = ()
    ranks: tuple = (2, 4)
    settings: dict = field(default_factory=lambda: {"ranks_per_machine": 2}, hash=False)

    def __str__(self):
        words = [str(word) for word in self.args if not isinstance(word, list)]
        return "-".join([self.module, self.name, *words])


def perform(place, case):
    """Run a case where ``place`` is."""
    module = importlib.import_module(f"tests.conformance.test_{case.module}")
    with place.there():
        getattr(module, case.name)(*case.args)


def perform_all(place, cases):
    """Run several, one after the other, and say in which one it stopped."""
    for case in cases:
        try:
            perform(place, case)
        except Exception as problem:
            raise AssertionError(f"{case}: {problem}") from problem


def _per_dtype(module, name, dtypes, *args, **more):
    return [Case(module, name, (dtype, *args), **more) for dtype in dtypes]


_SOME = [torch.float32, torch.bfloat16, torch.complex64, torch.int16]
_TENSOR_VERBS = (
    "allgather",
    "allreduce",
    "broadcast",
    "hierarchical_neighbor_allreduce",
    "local_allreduce",
    "neighbor_allgather",
    "neighbor_allreduce",
    "pair_gossip",
)
_GRAPHS = ("ring", "star", "exponential_two", "complete", "one_peer_exponential", "base_k")
_FORMS = ("forms_agree", "results_are_mine", "input_may_change_after", "outside_autograd")

CASES = [
    *_per_dtype("neighbor_allreduce", "averages_shapes", AVERAGING, SHAPES),
    *_per_dtype("neighbor_allreduce", "averages_layouts", _SOME),
    *(Case("neighbor_allreduce", "follows", (name,)) for name in _GRAPHS),
    *(
        Case("neighbor_allreduce", name)
        for name in (
            *("averages_expanded", "rounds_by_name", "dynamic_average", "moves", "half_sends"),
            *("scales", "half_the_neighbourhood", "tiny", "lonely", "scaled_integers"),
        )
    ),
    *(
        Case("neighbor_allreduce", name, ranks=(4,))
        for name in ("subset", "directed_columns", "unweighted", "two_rounds")
    ),
    *_per_dtype("neighbor_allgather", "gathers", DTYPES),
    Case("neighbor_allgather", "one_way"),
    *_per_dtype("collectives", "sums", DTYPES),
    *_per_dtype("collectives", "averages", AVERAGING),
    *_per_dtype("collectives", "broadcasts", DTYPES),
    *_per_dtype("collectives", "gathers", DTYPES),
    *_per_dtype("collectives", "keeps_layouts", _SOME),
    Case("collectives", "overflows"),
    Case("collectives", "halves", ranks=(4,)),
    Case("collectives", "same_bits"),
    Case("collectives", "barrier_beside_others"),
    Case("collectives", "local_sums"),
    *_per_dtype("hierarchical", "averages", AVERAGING),
    Case("hierarchical", "anchors", ranks=(4,)),
    Case("hierarchical", "in_place_and_fused", ranks=(4,)),
    Case("hierarchical", "integers_scaled", ranks=(4,)),
    *_per_dtype("pair_gossip", "averages", AVERAGING),
    Case("pair_gossip", "asymmetric", ranks=(2,)),
    Case("pair_gossip", "in_flight"),
    *(Case("forms", name, (verb,)) for verb in _TENSOR_VERBS for name in _FORMS),
    *(Case("forms", "checked", (verb,)) for verb in _TENSOR_VERBS),
    Case("forms", "into_out"),
    Case("handles", "any_order", (3, 20)),
    Case("handles", "mixed_kinds", (1,)),
    Case("handles", "same_name_again"),
    Case("handles", "from_threads"),
]
"""What is run on every transport."""
