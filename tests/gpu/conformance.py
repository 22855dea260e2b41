"""The conformance cases that hold on devices too, and how they run there.

They are those of ``tests/conformance``, word for word: within ``with torch.device("cuda"):`` what
they make lies on the GPU.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

import torch

from asyncddp.tensors.dtypes import DTYPES
from asyncddp.testing.rank_function_call import RANK_FUNCTION
from tests.support.oracle import AVERAGING, SHAPES

__all__ = ["CASES", "Case", "perform", "perform_all"]


@dataclass(frozen=True)
class Case:
    """A case of a module of ``tests/conformance``.

    Attributes:
        module: The module's name, without ``test_``.
        name: Of the function, or of a test that runs on each rank.
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
    test = getattr(module, case.name)
    with place.there():
        getattr(test, RANK_FUNCTION, test)(*case.args)


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
_FORMS = ("forms_agree", "input_may_change_after")

CASES = [
    *_per_dtype("neighbor_allreduce", "averages_shapes", AVERAGING, SHAPES),
    *_per_dtype("neighbor_allreduce", "test_values_count_not_how_they_lie_in_memory", _SOME),
    *(Case("neighbor_allreduce", "follows", (name,)) for name in _GRAPHS),
    *(
        Case("neighbor_allreduce", name)
        for name in (
            *("averages_expanded", "moves", "half_sends", "scales", "half_the_neighbourhood"),
            *("scaled_integers", "test_each_name_counts_its_own_rounds"),
            "test_given_neighbours_need_not_be_the_graph_s",
            "test_sums_and_means_of_tiny_doubles_are_exact",
            "test_without_sources_the_input_stays_and_is_not_shared",
        )
    ),
    *(
        Case("neighbor_allreduce", name, ranks=(4,))
        for name in (
            *("directed_columns", "unweighted", "two_rounds"),
            "test_in_neighbours_left_out_count_nothing",
        )
    ),
    *_per_dtype("neighbor_allgather", "gathers", DTYPES),
    Case("neighbor_allgather", "one_way"),
    *_per_dtype("collectives", "sums", DTYPES),
    *_per_dtype("collectives", "averages", AVERAGING),
    *_per_dtype("collectives", "broadcasts", DTYPES),
    *_per_dtype("collectives", "gathers", DTYPES),
    Case("collectives", "test_integer_sums_wrap_around_as_torch_s_do"),
    Case("collectives", "halves", ranks=(4,)),
    Case("collectives", "test_allreduce_gives_all_ranks_the_same_bits"),
    Case("collectives", "barrier_beside_others"),
    Case("collectives", "local_sums"),
    *_per_dtype("hierarchical", "averages", AVERAGING),
    Case("hierarchical", "anchors", ranks=(4,)),
    Case("hierarchical", "test_many_in_flight_in_place", ranks=(4,)),
    Case("hierarchical", "integers_scaled", ranks=(4,)),
    Case("pair_gossip", "test_every_dtype_and_shape"),
    Case("pair_gossip", "asymmetric", ranks=(2,)),
    Case("pair_gossip", "test_several_in_flight_in_place"),
    *(Case("forms", name, (verb,)) for verb in _TENSOR_VERBS for name in _FORMS),
    Case("forms", "test_ranks_that_share_a_process_share_no_results"),
    Case("forms", "test_verbs_stand_outside_autograd"),
    Case("forms", "test_checking_changes_no_result"),
    Case("forms", "test_values_are_read_not_how_they_lie_in_memory"),
    Case("forms", "test_results_can_be_written_into_a_tensor_of_the_caller"),
    Case("handles", "any_order", (3, 20)),
    Case("handles", "mixed_kinds", (1,)),
    Case("handles", "same_name_again"),
    Case("handles", "from_threads"),
]
"""What is run on every transport."""
