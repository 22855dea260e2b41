"""Autotuning ends, takes the fastest setting on all ranks at once, and leaves training as it is."""

from __future__ import annotations

import logging

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import BEFORE_DEADLINE, LoopbackWorld
from tests.unit.optim.autotune_reference import (
    FOUR,
    buckets_of,
    one_step,
    search,
    sgd,
    short,
    trained,
    wrapped,
)
from tests.unit.optim.optim_reference import mlp, vector

TRIALS = 5  # of three candidates
STEPS = 2 * (3 * 2 + 2) + 2  # at most: parts of trials, each with a step that is not measured
SLOW = 0.08  # seconds, beside which the rest of a step is short
MACHINES = {"ranks_per_machine": 2}


# L1 and L2


@pytest.mark.parametrize(("fast", "chosen"), [(1, 25), (4, FOUR)])
def test_the_search_ends_and_installs_the_fastest(fast, chosen):
    """After the trials that it was said to make the fastest bucket size is in use, and stays."""

    def case():
        model, optimizer = wrapped("adapt_then_combine", autotune=short(steps_per_trial=4))
        search(optimizer, model, lambda buckets: SLOW * (buckets != fast))
        installed = buckets_of(optimizer)
        one_step(optimizer, model, 0)
        assert buckets_of(optimizer) == installed
        result = optimizer.autotune.result
        assert sum(len(one.seconds) for one in result.tried) == 2 * TRIALS
        return result.setting["bucket_size_in_mb"], len(installed)

    assert LoopbackWorld(2).run(case) == [(chosen, fast)] * 2


def test_the_slowest_rank_counts():
    """One bucket is slow on rank 1, and four a little on rank 0; neither waits for the other."""

    def case():
        model, optimizer = wrapped(autotune=short(steps_per_trial=4, bucket_sizes_in_mb=[FOUR]))
        optimizer.self_weight, optimizer.src_weights, optimizer.dst_weights = 1.0, {}, []
        here = bf.rank()
        search(optimizer, model, lambda b: SLOW * (b == 1) if here else SLOW / 4 * (b == 4))
        one, four = optimizer.autotune.result.tried
        assert min(one.seconds) > SLOW > SLOW / 4 < min(four.seconds)
        return optimizer.autotune.result.setting["bucket_size_in_mb"]

    assert LoopbackWorld(2).run(case) == [FOUR] * 2


def test_all_ranks_change_their_buckets_in_the_same_steps():
    """In each step all ranks have the same buckets, and all that are tried are seen."""

    def case():
        model, optimizer = wrapped("gradient_allreduce", autotune=short())
        seen = search(optimizer, model)
        return [*seen, buckets_of(optimizer)], optimizer.autotune.result

    every = LoopbackWorld(4).run(case)
    layouts, result = every[0]
    assert every == [(layouts, result)] * 4
    assert {len(layout) for layout in layouts} == {1, 2, 4}
    assert len(layouts) - 1 <= 1 + STEPS


@pytest.mark.parametrize("limit", [2, 4, 11])
def test_max_trials_is_kept(limit):
    """Candidates are left out, not trials cut short: what is in use is always among them."""

    def case():
        sizes = (2e-5, 2e-4, 3e-4, 3.7e-4, 1e-5)  # the first and the last cut alike
        autotune = short(bucket_sizes_in_mb=sizes, max_trials=limit)
        model, optimizer = wrapped(autotune=autotune)
        search(optimizer, model)
        result = optimizer.autotune.result
        assert result.tried[0].setting["bucket_size_in_mb"] == 25
        return sum(len(one.seconds) for one in result.tried) / 2

    made = LoopbackWorld(2).run(case)
    assert max(made) <= limit
    assert made[0] == {2: 2, 4: 2, 11: 10}[limit]


def test_sizes_are_powers_of_two_from_a_sixteenth_of_the_model_on():
    """Unasked: those that cut the model in other ways, beside the one in use."""

    def case():
        layers = [torch.nn.Linear(256, 256) for _ in range(16)]  # of 257 KiB
        model = torch.nn.Sequential(*layers)
        optimizer = bf.DistributedOptimizer(sgd(model), model, autotune=True)
        title, *_ = optimizer.autotune.report().splitlines()
        return [one["bucket_size_in_mb"] for one in optimizer.autotune._settings], title.strip()

    sizes, title = LoopbackWorld(2).run(case)[0]
    assert sizes == [25, 4, 2, 1, 0.5]
    assert title == "autotune: 0 of 10 trials"


# the same results


@pytest.mark.training
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("adapt_then_combine", {}),
        ("adapt_then_combine", {"num_steps_per_communication": 3}),
        ("adapt_then_combine", {"update_in_backward": True}),
        ("adapt_with_combine", {}),
        ("adapt_with_combine", {"num_steps_per_communication": 2}),
        ("decentralized", {"communication_interval": 2}),
        ("gradient_allreduce", {"num_steps_per_communication": 2}),
    ],
    ids=str,
)
def test_training_is_as_without_a_search(algorithm, options):
    """Bit by bit, over a graph that changes in each round, and with as many rounds."""
    graph = None
    if algorithm.startswith("adapt"):
        graph = topology.one_peer_exponential(4)
    autotune = short(bucket_sizes_in_mb=[FOUR]) if "update_in_backward" in options else short()
    steps = 46
    world = LoopbackWorld(4)
    plain = world.run(trained, algorithm, steps, topology=graph, **options)
    tuned = world.run(trained, algorithm, steps, topology=graph, autotune=autotune, **options)
    for (want, *counts, _), (got, *others, over) in zip(plain, tuned, strict=True):
        assert over
        assert torch.equal(got, want)
        assert others == counts


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "adapt_then_combine"])
def test_hierarchical_averages_are_tried_between_machines(algorithm):
    """Where two machines have two ranks each, for averages over all ranks: equal to rounding."""

    def case(steps, autotune):
        model, optimizer = wrapped(algorithm, communication="allreduce", autotune=autotune)
        used = set()
        for step in range(steps):
            one_step(optimizer, model, step)
            used.add(optimizer.communication)
        return vector(model), used, optimizer.autotune is None or optimizer.autotune.done

    world = LoopbackWorld(4)
    plain = world.run(case, 16, None, settings=MACHINES)
    for autotune, tried in (
        (short(bucket_sizes_in_mb=[]), {"allreduce", "hierarchical_allreduce"}),
        (short(bucket_sizes_in_mb=[FOUR], hierarchical=False), {"allreduce"}),
    ):
        tuned = world.run(case, 16, autotune, settings=MACHINES)
        for (want, *_), (got, used, over) in zip(plain, tuned, strict=True):
            assert over
            assert used == tried
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_neighbours_and_machines_are_other_averages():
    """``hierarchical_neighbor_allreduce`` is never tried, and refused where it is asked for."""

    def case():
        _, optimizer = wrapped(autotune=short())
        with pytest.raises(bf.ArgumentError, match="only averages over all ranks are the same"):
            wrapped(autotune=short(hierarchical=True))
        return {one["communication"] for one in optimizer.autotune._settings}

    assert LoopbackWorld(4).run(case, settings=MACHINES) == [{None}] * 4


def test_update_in_backward_is_tried_where_it_is_asked_for_or_in_use():
    """Otherwise a loop that clips gradients would fail in the midst of the search."""

    def case():
        def tried(autotune, **options):
            _, optimizer = wrapped(autotune=autotune, **options)
            return [one["update_in_backward"] for one in optimizer.autotune._settings]

        sizes = {"bucket_sizes_in_mb": ()}
        assert tried(short(**sizes)) == [False]
        assert tried(short(**sizes, update_in_backward=True)) == [False, True]
        assert tried(short(**sizes), update_in_backward=True) == [True, False]
        with pytest.raises(bf.ArgumentError, match="only a method that averages after_step"):
            wrapped("adapt_with_combine", autotune=short(update_in_backward=True))

    LoopbackWorld(2).run(case)


def test_weights_set_by_hand_and_another_topology_stay():
    """What was set after the wrapper was made is not lost when settings change."""

    def case():
        model, optimizer = wrapped(autotune=short(), topology=topology.ring(2))
        optimizer.self_weight, optimizer.src_weights = 0.75, {1 - bf.rank(): 0.25}
        optimizer.dst_weights = [1 - bf.rank()]
        optimizer._averager.set_topology(topology.complete(2))
        search(optimizer, model)
        assert optimizer.self_weight == 0.75
        assert optimizer.src_weights == {1 - bf.rank(): 0.25}
        return topology.describe(optimizer._averager.topology), optimizer.bytes_sent > 0

    assert LoopbackWorld(2).run(case) == [("complete(2)", True)] * 2


# compressors


@pytest.mark.parametrize(
    ("algorithm", "options", "compressors", "tried"),
    [
        ("gradient_allreduce", {}, ("bf16", "sign"), [None, "bf16", "sign"]),
        ("gradient_allreduce", {"compression": "sign"}, (None,), ["sign", None]),
        ("bytegrad", {}, ("qsgd_int8",), [None, "qsgd_int8"]),
    ],
    ids=str,
)
def test_compressors_are_tried_where_they_are_asked_for(algorithm, options, compressors, tried):
    """And no others; those that encode whole buckets keep the buckets in use."""

    def case():
        autotune = short(bucket_sizes_in_mb=None, compressors=compressors)
        model, optimizer = wrapped(algorithm, autotune=autotune, **options)
        search(optimizer, model)
        tried = optimizer.autotune.result.tried
        return [one.setting["compression"] for one in tried], vector(model)

    every = LoopbackWorld(2).run(case)
    assert [found for found, _ in every] == [tried] * 2
    assert torch.equal(every[0][1], every[1][1])


def test_a_compressor_that_the_method_refuses_is_refused_at_once():
    """In the method's own words, and not in the midst of the search."""

    def case():
        with pytest.raises(bf.ArgumentError, match="keeps ranks apart"):
            wrapped(autotune=short(compressors=["bf16"]))
        with pytest.raises(bf.UnknownNameError, match="bf61"):
            bf.Autotune(compressors=["bf61"])

    LoopbackWorld(1).run(case)


def test_the_state_of_a_method_and_its_compressor_is_carried_over():
    """``choco_sgd`` in the same buckets, updated in backward or not: bit by bit as without."""

    def case(autotune):
        options = {"topology": topology.ring(4), "update_in_backward": True}
        return trained("choco_sgd", 30, autotune=autotune, **options)

    world = LoopbackWorld(4)
    plain, tuned = world.run(case, None), world.run(case, short(bucket_sizes_in_mb=None))
    for (want, *counts, _), (got, *others, over) in zip(plain, tuned, strict=True):
        assert over
        assert torch.equal(got, want)
        assert others == counts


def test_what_a_rebuild_does_not_change_is_as_if_there_was_none():
    """Residuals of error feedback stay where buckets do, and count again in other ones."""

    def case(rebuilds, size):
        model, optimizer = wrapped("gradient_allreduce", compression="sign")
        for step in range(6):
            one_step(optimizer, model, step)
            if step == 2:
                for _ in range(rebuilds):
                    optimizer._switcher.rebuild(_resized(optimizer._switcher.settings, size))
        return vector(model)

    world = LoopbackWorld(2)
    plain, same, other = (world.run(case, *one)[0] for one in ((0, 25), (2, 25), (1, FOUR)))
    assert torch.equal(same, plain)
    assert not torch.equal(other, plain)
    assert bool(torch.isfinite(other).all())


def _resized(settings, size):
    from dataclasses import replace

    return replace(settings, bucket_size_in_mb=size)


# what cannot be


@pytest.mark.parametrize(
    ("algorithm", "options", "words"),
    [
        ("win_put", {}, "lets each rank go on at its own pace"),
        ("push_sum", {}, "lets each rank go on at its own pace"),
        ("async_model_average", {"sync_interval_ms": 5}, "lets each rank go on at its own pace"),
        ("bytegrad", {"autotune": True}, "depend on its buckets"),
        ("adapt_then_combine", {"switch_at": {9: "bytegrad"}}, "which switch_at would end"),
        ("adapt_then_combine", {"autotune": 3}, r"expected True, False, or asyncddp.Autotune"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_words(algorithm, options, words):
    """On all ranks, when the wrapper is made."""

    def case():
        with pytest.raises(bf.ArgumentError, match=words):
            wrapped(algorithm, **{"autotune": short(), **options})

    LoopbackWorld(2).run(case)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps_per_trial": 0}, "steps_per_trial: expected a whole number of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps: expected a whole number of at least 0"),
        ({"max_trials": 1}, "max_trials: expected a whole number of at least 2"),
        ({"bucket_sizes_in_mb": [1, 0]}, "expected numbers above 0, got 0"),
        ({"bucket_sizes_in_mb": 4}, "bucket_sizes_in_mb: expected a list, got 4"),
        ({"compressors": "bf16"}, "compressors: expected a list, got 'bf16'"),
    ],
)
def test_settings_that_cannot_be(options, words):
    """Each names the argument, what was expected, and what it got."""
    with pytest.raises(bf.ArgumentError, match=words):
        bf.Autotune(**options)


def test_ranks_must_ask_for_the_same_search():
    """Also where only one rank asks for one: nobody waits for the deadline."""

    def case(mine):
        with pytest.raises(bf.MismatchError, match="autotune="):
            wrapped(autotune=mine[bf.rank()])

    world = LoopbackWorld(2)
    world.run(case, [short(), None])
    world.run(case, [short(), short(warmup_steps=3)])


@pytest.mark.parametrize(
    ("size", "options"), [(1, {}), (2, {"communication": "empty"})], ids=["alone", "empty"]
)
def test_where_nothing_is_sent_there_is_nothing_to_try(size, options):
    """The search is over before it has begun, and training goes on."""

    def case():
        model, optimizer = wrapped(autotune=True, **options)
        assert optimizer.autotune.done
        one_step(optimizer, model, 0)
        return optimizer.autotune.result.origin

    assert (
        LoopbackWorld(size).run(case) == ["nothing is sent, so that there is nothing to try"] * size
    )


def test_a_model_of_one_tensor_has_one_candidate():
    """Buckets hold whole tensors."""

    def case():
        model = torch.nn.Linear(512, 512, bias=False)
        optimizer = bf.DistributedOptimizer(sgd(model), model, autotune=True)
        return optimizer.autotune.result.origin

    assert LoopbackWorld(2).run(case) == ["there is but one candidate"] * 2


def test_the_method_is_switched_and_ranks_join_after_the_search():
    """Both are refused while it is under way."""

    def case():
        model, optimizer = wrapped(autotune=short())
        with pytest.raises(bf.UsageError, match="switch_to: autotuning is under way"):
            optimizer.switch_to("gradient_allreduce")
        words = "is autotuning, by steps that all ranks make"
        with pytest.raises(bf.UsageError, match=words), bf.join(optimizer):
            pass
        search(optimizer, model)
        with bf.join(optimizer):
            one_step(optimizer, model, 0)
        with pytest.raises(bf.ArgumentError, match="a switch begins no search"):
            optimizer.switch_to("gradient_allreduce", autotune=short())
        optimizer.switch_to("gradient_allreduce")
        one_step(optimizer, model, 0)
        return optimizer.algorithm, "autotune" in optimizer.averaging_state

    assert LoopbackWorld(2).run(case) == [("gradient_allreduce", False)] * 2


def test_a_warm_up_is_not_measured():
    """The search begins with the method itself, whose buckets travel compressed."""

    def case():
        model = mlp(0)
        adam = bf.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=20)
        optimizer = bf.DistributedOptimizer(adam, model, "qadam", autotune=short())
        while optimizer.algorithm != "qadam":
            assert len(buckets_of(optimizer)) == 1
            one_step(optimizer, model, optimizer.steps)
        early = "0 of 5 trials" in optimizer.autotune.report()
        search(optimizer, model)
        return early and optimizer.steps, vector(model)

    (early, first), (other, second) = LoopbackWorld(2).run(case)
    assert early == other > 20 + TRIALS
    assert torch.equal(first, second)


@pytest.mark.parametrize("step", [3, 4, 7])
def test_a_rank_that_fails_in_a_trial_frees_the_others(step):
    """In the midst of a measurement or at its end: an error well before the deadline."""

    def case():
        model, optimizer = wrapped(autotune=short())
        for k in range(40):
            if bf.rank() == 1 and k == step:
                raise RuntimeError("out of data")
            one_step(optimizer, model, k)

    outcomes = LoopbackWorld(2).outcomes(case)
    assert outcomes[1].message == "out of data"
    assert "PeerError" in outcomes[0].bases
    assert outcomes[0].seconds < BEFORE_DEADLINE


# what it shows


def test_rank_0_shows_what_was_tried(capsys, caplog):
    """A table on standard error at the end, and a line of the log for each measurement."""

    def case():
        model, optimizer = wrapped(autotune=short(show=True))
        search(optimizer, model)
        return optimizer.autotune.report(), optimizer.autotune.result.setting["bucket_size_in_mb"]

    with caplog.at_level(logging.INFO, "asyncddp"):
        every = LoopbackWorld(2).run(case)
    shown, chosen = every[0]
    assert every == [(capsys.readouterr().err, chosen)] * 2
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0] == ["autotune:", "5", "trials"]
    assert float(lines[4][0]) == chosen
    assert lines[4][2:] == ["1.00", "2", "chosen"]
    assert sorted(float(line[0]) for line in lines[4:7]) == [1e-5, 3e-4, 25]
    told = [record.getMessage() for record in caplog.records if "autotune" in record.getMessage()]
    assert len(told) == 1 + 2 * TRIALS + 1
    assert told[-1] == f"autotune: 5 trials: bucket_size_in_mb={chosen}"
