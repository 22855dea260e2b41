"""Autotuning on real processes: one choice on all ranks, and the same training."""

from __future__ import annotations

import pytest
import torch

from tests.support import on
from tests.unit.optim.autotune_reference import buckets_of, search, short, trained, wrapped


def chosen(path):
    """What a search has found, the buckets of each step, and what follows."""
    model, optimizer = wrapped(autotune=short(path=path))
    seen = search(optimizer, model)
    return optimizer.autotune.result.setting, seen, buckets_of(optimizer)


@on("mpi-2")
def test_all_ranks_make_one_choice(world, tmp_path):
    """Ranks have the same buckets in each step; the next run takes the choice from the file."""
    every = world.run(chosen, tmp_path / "autotune.json")
    assert every == [every[0]] * world.size
    assert {len(layout) for layout in every[0][1]} == {1, 2, 4}
    again = world.run(chosen, tmp_path / "autotune.json")
    assert again == [(every[0][0], [], every[0][2])] * world.size


@pytest.mark.nightly
@on("shared_memory-4")
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("adapt_then_combine", {"update_in_backward": True}),
        ("adapt_with_combine", {"num_steps_per_communication": 2}),
        ("gradient_allreduce", {}),
    ],
)
def test_training_is_as_without_a_search(world, algorithm, options):
    """To the rounding of sums, whose order may depend on buckets in MPI."""
    plain = world.run(trained, algorithm, 48, **options)
    tuned = world.run(trained, algorithm, 48, autotune=short(), **options)
    for (want, *counts, _), (got, *others, over) in zip(plain, tuned, strict=True):
        assert over
        assert others == counts
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
