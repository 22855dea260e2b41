"""What holds on all transports holds on ``cuda_staged`` and ``nccl`` over simulated devices.

The cases are those of the conformance tests. Copies are made late and in small pieces, so that
whoever reads or writes too early gets wrong values.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.conformance import test_alltoall as alltoall
from tests.conformance import test_collectives as collectives
from tests.conformance import test_forms as forms
from tests.conformance import test_gather_scatter as roots
from tests.conformance import test_handles as handles
from tests.conformance import test_mismatches as mismatches
from tests.conformance import test_neighbor_allgather as gathering
from tests.conformance import test_neighbor_allreduce as neighbors
from tests.conformance import test_process_groups as groups
from tests.conformance import test_reduce_ops as operators
from tests.conformance import test_reduce_scatter as scattering
from tests.conformance import test_send_recv as pairs
from tests.conformance import test_transports as transports
from tests.support.nccl_world import NcclWorld
from tests.support.oracle import SHAPES
from tests.support.staged import StagedWorld

pytestmark = [pytest.mark.training, pytest.mark.exhaustive]

DTYPES = [torch.uint8, torch.bfloat16]
AVERAGING = DTYPES[1:]


@pytest.fixture(scope="module", params=[StagedWorld, NcclWorld], ids=["cuda_staged", "nccl"])
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def world(transport):
    return transport(2)


@pytest.fixture(scope="module")
def four(transport):
    return transport(4)


# the contract of transports


@pytest.mark.parametrize(
    "case",
    [
        transports.messages_in_order,
        transports.by_tag_backwards,
        transports.several_at_once,
        transports.several_large_at_once,
        transports.splits,
        transports.closes_twice,
        transports.every_collective,
        transports.every_dtype_in_bulk,
    ],
    ids=lambda case: case.__name__,
)
def test_the_contract_of_transports(four, case):
    """Messages, collectives, splits and closing keep the contract of transports on 4 ranks."""
    four.run_bare(case)


def test_transfers_of_one_tag_keep_their_order(world):
    """Messages of one tag arrive in the order in which they were sent."""
    assert world.run_bare(transports.same_tag_in_order) == [list(range(20))] * world.size


def test_bytes_arrive_exactly_at_all_sizes_around_a_piece(world):
    """Messages of sizes around multiples of a piece arrive byte for byte."""
    world.run_bare(transports.around_pieces, [0, 1, 959, 960, 961, 1920, 1921, 20_000])


def test_collectives_are_exact_at_all_sizes_around_a_piece(world):
    """Collectives of lengths around multiples of a piece are exact in every dtype."""
    world.run_bare(transports.collectives_around_pieces, [0, 1, 124, 125, 251])


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex128], ids=str)
def test_allreduce_sums_on_all_ranks_alike(world, dtype):
    """allreduce and reduce_scatter sum all lengths of a dtype alike on all ranks."""
    world.run_bare(transports.sums, dtype)
    world.run_bare(transports.scattered_sums, dtype)


def test_a_receive_that_was_given_up_takes_nothing_any_more(world):
    """An abandoned receive leaves its buffer as it is; the next one gets the message."""
    assert world.run_bare(transports.given_up_receive)[0] == ([0.0] * 3, [1.0] * 3)


def test_a_send_that_nobody_takes_meets_its_deadline_and_holds_nothing_up(world):
    """A send without a receive times out, and later transfers go on."""
    assert world.run_bare(transports.given_up_send) == [True] * world.size


def test_a_wait_past_its_deadline_says_who_waited_for_what(world, tmp_path):
    """The error of a receive past its deadline names both ranks and the tag."""
    message, *_ = world.run_bare(transports.past_deadline, "receive", tmp_path)
    assert message == "rank 0: receive from rank 1, tag 9, was not done in 0.2 s"


# verbs


@pytest.mark.parametrize("dtype", AVERAGING, ids=str)
def test_neighbor_allreduce_of_every_shape(world, dtype):
    """neighbor_allreduce of every shape, in each dtype, equals the weighted sum of its row."""
    world.run(neighbors.averages_shapes, dtype, SHAPES)


@pytest.mark.parametrize(
    "case",
    [
        neighbors.scales,
        neighbors.half_sends,
        neighbors.half_the_neighbourhood,
        neighbors.averages_expanded,
    ],
    ids=lambda case: case.__name__,
)
def test_neighbor_allreduce_with_weights_by_hand(four, case):
    """neighbor_allreduce is right with weights per call, one-way edges, expanded tensors."""
    four.run(case)


def test_integers_are_rounded_half_to_even(world):
    """0.5, 2.5, 4.5 and -1.5 become 0, 2, 4 and -2."""
    assert world.run(neighbors.rounds_half_to_even) == [[0, 2, 4, -2]] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbor_allgather_of_rows_in_unequal_numbers(world, dtype):
    """neighbor_allgather joins rows in unequal numbers in the order of source ranks."""
    world.run(gathering.gathers, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_broadcasts_and_gathers_of_every_shape(world, dtype):
    """Collectives without averaging are right for every shape in each dtype."""
    world.run(collectives.sums, dtype)
    world.run(collectives.broadcasts, dtype)
    world.run(collectives.gathers, dtype)
    world.run(scattering.sums, dtype)


@pytest.mark.parametrize("dtype", AVERAGING, ids=str)
def test_averages_over_all_ranks(world, dtype):
    """allreduce and reduce_scatter give the mean over all ranks for every shape."""
    world.run(collectives.averages, dtype)
    world.run(scattering.averages, dtype)


@pytest.mark.parametrize(
    "case", [scattering.into_out, scattering.into_itself], ids=lambda case: case.__name__
)
def test_where_a_part_of_a_sum_goes(four, case):
    """reduce_scatter writes into a tensor given to it, be it a part of its own input."""
    four.run(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_parts_and_pairs(world, dtype):
    """What goes from rank to rank for a collective is right for every shape in each dtype."""
    world.run(operators.over_all, dtype)
    world.run(alltoall.exchanges, dtype)
    world.run(roots.gathers, dtype)
    world.run(roots.scatters, dtype)
    world.run(pairs.round_trip, dtype)


def test_groups_of_ranks(four, monkeypatch):
    """Collectives of a group, and of two that overlap, are right beside those of all ranks.

    What ranks compare when they make a group is read on the host, which is a late device here.
    """
    monkeypatch.setattr("asyncddp.ops.new_group.require_equal_on_all_ranks", lambda *_: None)
    assert four.run(groups.in_a_group_of_three) == [6.0] * 4
    four.run(groups.crosswise, 50_000)
    four.run(operators.over_group, torch.bfloat16)


@pytest.mark.parametrize("verb", forms.TENSOR_VERBS)
def test_all_forms_of_a_verb(four, verb):
    """Each form of a verb gives the same bits, and frees its input when it is over."""
    four.run(forms.forms_agree, verb, settings=forms.SETTINGS)
    four.run(forms.input_may_change_after, verb, settings=forms.SETTINGS)


def test_named_verbs_match_in_whatever_order_ranks_start_and_end_them(world):
    """Named verbs match by name and use, whatever each rank's order of starts and waits."""
    world.run(handles.any_order, 3, 20)
    world.run(handles.same_name_again)


@pytest.mark.parametrize("kind", mismatches.EXPECTED)
def test_a_mismatch_is_told_on_both_ranks_and_the_world_goes_on(world, kind):
    """A mismatch raises MismatchError on both ranks, after which verbs work again."""
    for error, message in world.run(mismatches.neighbour_mismatch, kind, "blocking"):
        assert error == "MismatchError"
        assert re.search(mismatches.differs(*mismatches.EXPECTED[kind]), message), message
