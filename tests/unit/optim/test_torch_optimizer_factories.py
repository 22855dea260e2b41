"""Makers of optimizers: who decays; and the schedule of step sizes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import asyncddp as bf

MAKERS = {
    "optim_fn_adam": (torch.optim.Adam, 1 / 32768),
    "optim_fn_adamw": (torch.optim.AdamW, 0.1),
    "optim_fn_accum_adam": (bf.AccumAdam, 1 / 32768),
    "optim_fn_accum_adamw": (bf.AccumAdamW, 0.1),
}
every_maker = pytest.mark.parametrize("maker", list(MAKERS))


def network():
    """Weights, biases and norms of several kinds."""
    return torch.nn.ModuleDict(
        {
            "conv": torch.nn.Conv2d(2, 3, 3),
            "bn": torch.nn.BatchNorm2d(3),
            "attention": torch.nn.MultiheadAttention(4, 2),
            "norm": torch.nn.LayerNorm(4),
            "table": torch.nn.Embedding(5, 4),
        }
    )


DECAYING = {"conv.weight", "attention.in_proj_weight", "attention.out_proj.weight", "table.weight"}


@every_maker
def test_weights_decay_and_biases_and_norms_do_not(maker):
    """Each parameter is in one group; those of one dimension, and every bias, have no decay."""
    kind, decay = MAKERS[maker]
    model = network()
    optimizer = getattr(bf, maker)(list(model.named_parameters()))
    assert type(optimizer) is kind
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(parameter)]: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert found == {name: decay if name in DECAYING else 0.0 for name in names.values()}


@every_maker
def test_options_are_passed_on(maker):
    """lr, betas, eps and weight_decay arrive, in every group."""
    options = {"lr": 0.5, "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4}
    if "accum" in maker:
        options["accum_iter"] = 7
    optimizer = getattr(bf, maker)(network().named_parameters(), **options)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 0.3)
        assert group.get("accum_iter", 7) == 7
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.4, 0.0]


@every_maker
def test_the_order_of_positional_arguments(maker):
    """That of the fork's helpers, whose two kinds differ in it."""
    last = (0.4, 0.3) if "accum" in maker else (0.3, 0.4)
    optimizer = getattr(bf, maker)(network().named_parameters(), 0.5, 0.1, 0.2, *last)
    group = optimizer.param_groups[0]
    assert (group["weight_decay"], group["eps"]) == (0.3, 0.4)


@every_maker
def test_no_group_is_empty(maker):
    """A bucket of biases alone has one group, as has one of weights alone."""
    bias = [("0.bias", torch.nn.Parameter(torch.zeros(3)))]
    weight = [("0.weight", torch.nn.Parameter(torch.zeros(3, 3)))]
    for content, decays in ((bias, False), (weight, True)):
        groups = getattr(bf, maker)(content).param_groups
        assert [group["weight_decay"] > 0 for group in groups] == [decays]


@every_maker
def test_params_that_cannot_be(maker):
    """Parameters without names, and none at all."""
    make = getattr(bf, maker)
    words = rf"{maker}: argument params: expected \(name, parameter\) pairs .* got Parameter"
    with pytest.raises(bf.ArgumentError, match=words):
        make(network().parameters())
    with pytest.raises(bf.ArgumentError, match=words):
        make(torch.nn.Parameter(torch.zeros(2, 2)))
    with pytest.raises(bf.ArgumentError, match=f"{maker}: argument params: .*at least one"):
        make([])


# the schedule


def rates(steps, *arguments, lr=1.0, **options):
    """Step sizes of a run in which every warning is an error."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = bf.lr_scheduler_fn_cosine_with_warmup(optimizer, *arguments, **options)
        found = [optimizer.param_groups[0]["lr"]]
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
    return found


def test_the_known_values():
    """γ = 1, warm-up 4, T = 10, γ_min = 0.1, as written down of the fork; then it stays there."""
    found = rates(16, 10, 4, cosine_eta_min=0.1)
    known = [0.01, 0.2575, 0.505, 0.7525, 1.0, 0.978, 0.914, 0.8145, 0.689, 0.55]
    assert found[:10] == pytest.approx(known, abs=6e-4)
    assert found[14:] == pytest.approx([0.1, 0.1, 0.1], rel=1e-12)


def test_it_is_torchs_line_and_cosine():
    """``LinearLR``, then ``CosineAnnealingLR``, step by step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7, 1e-3)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    found = rates(12, 7, 5, 1e-3, 0.2, lr=0.3)
    assert found[:5] == pytest.approx([0.3 * (0.2 + 0.8 * t / 5) for t in range(5)], rel=1e-12)
    assert found[5:] == pytest.approx(expected, rel=1e-12)


def test_without_warm_up():
    """t_warmup = 0 begins with the cosine."""
    assert rates(2, 2, 0, 0.0) == pytest.approx([1.0, 0.5, 0.0], abs=1e-15)


def test_groups_and_resumption():
    """Each group goes from its own step size to the same end; a state goes on exactly."""

    def made():
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (1.0, 0.2)]
        optimizer = torch.optim.SGD(groups)
        return optimizer, bf.lr_scheduler_fn_cosine_with_warmup(optimizer, 6, 3, 0.05)

    def go(optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    first = made()
    assert go(*first, 9) == pytest.approx([0.05, 0.05])
    second = made()
    go(*second, 4)
    saved = copy.deepcopy([part.state_dict() for part in second])
    third = made()
    for part, state in zip(third, saved, strict=True):
        part.load_state_dict(state)
    assert go(*third, 2) == go(*second, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1), "t_max: expected a whole number of at least 1, got 0"),
        ((10, -1), "t_warmup: expected a whole number of at least 0, got -1"),
        ((10.0, 1), "t_max: expected a whole number of at least 1, got 10.0"),
        ((10, 1, 0.0, 1.5), "warmup_decay: expected a number between 0 and 1, got 1.5"),
    ],
)
def test_values_that_cannot_be(arguments, words):
    """Which argument, what was expected, what was given."""
    with pytest.raises(bf.ArgumentError, match=f"argument {words}"):
        rates(1, *arguments)
