"""Every compressor of the registry, alone and with error feedback, does what the contract says."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncddp as bf
from asyncddp.compression import COMPRESSORS, Compressor, ErrorFeedback, compressor_for
from asyncddp.compression.error_feedback import RESIDUAL
from asyncddp.compression.tensor_compressor import TensorCompressor
from tests.support.loops import each

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [1, 2, 7, 64, 255, 256, 257, 1000]
ALONE = {name: kind() for name, kind in COMPRESSORS.items()}
ALL = {**ALONE, **{f"error_feedback({name})": ErrorFeedback(one) for name, one in ALONE.items()}}
UNBIASED = {
    **{name: one for name, one in ALONE.items() if one.unbiased},
    "random_k, unbiased": COMPRESSORS["random_k"](ratio=0.3, unbiased=True),
}
CONTRACTIONS = {
    **{name: one for name, one in ALONE.items() if one.contraction(300) is not None},
    "random_k, unbiased": COMPRESSORS["random_k"](ratio=0.7, unbiased=True),
}


def of(compressors):
    return pytest.mark.parametrize("q", compressors.values(), ids=list(compressors))


every_compressor = of(ALL)
every_dtype = each("dtype", DTYPES)


def normal(*shape, dtype=torch.float32, seed=0):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def encoded(q, chunks, *, seed=0, state=None, fill=0xA5):
    rows = torch.full(
        (len(chunks), q.encoded_size(chunks.shape[1], chunks.dtype)), fill, dtype=torch.uint8
    )
    q.encode(chunks, rows, seed=seed, state=state)
    return rows


def decoded(q, rows, chunks):
    result = torch.full_like(chunks, torch.nan)
    q.decode(rows, result)
    return result


def received(q, chunks, *, seed=0, state=None):
    return decoded(q, encoded(q, chunks, seed=seed, state=state), chunks)


@pytest.mark.parametrize("name", list(COMPRESSORS))
def test_the_declaration_is_complete(name):
    """A compressor is a frozen dataclass of options with its name, its laws and its source."""
    kind = COMPRESSORS[name]
    assert issubclass(kind, Compressor)
    assert kind.name == name
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert compressor_for("test", name) == kind()
    one = kind()
    assert isinstance(one.unbiased, bool)
    assert isinstance(one.wants_error_feedback, bool)
    assert not (one.unbiased and one.wants_error_feedback)
    module = importlib.import_module(kind.__module__)
    documented = inspect.getdoc(kind) + (inspect.getdoc(kind.__bases__[0]) or "")
    for part in ("Example:", "References:"):
        assert part in documented, f"{name}'s docstring has no {part}"
    others = {other.__module__ for other in COMPRESSORS.values()} - {kind.__module__}
    assert not [other for other in others if f"from {other} import" in inspect.getsource(module)]


@every_compressor
@every_dtype
def test_chunks_of_any_size_take_the_declared_bytes(q, dtype):
    """All bytes of ``encoded_size``, a multiple of 8, are written, and none depends on chance."""
    for numel in SIZES:
        x = normal(2, numel, dtype=dtype)
        size = q.encoded_size(numel, dtype)
        assert size > 0
        assert size % 8 == 0
        assert q.bits_per_element(numel, dtype) == 8 * size / numel
        rows = [encoded(q, x, seed=5, state=q.new_state(x), fill=fill) for fill in (0, 255)]
        assert torch.equal(*rows), numel
        back = decoded(q, rows[0], x)
        assert back.isfinite().all()
        assert back.shape == x.shape


@every_compressor
def test_encoding_reads_its_input_and_no_generator(q):
    """The input and torch's random state stay as they were."""
    x = normal(2, 300)
    before = x.clone(), torch.get_rng_state()
    received(q, x, seed=3, state=q.new_state(x))
    assert torch.equal(x, before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


@every_compressor
def test_the_seed_decides(q):
    """Seeds near each other and the largest one give different bytes where chance has a say."""
    x = normal(1, 400)
    seeds = (0, 1, 2, 2**62, 2**63 - 1)
    rows = [encoded(q, x, seed=seed) for seed in seeds]
    inner = q.inner if isinstance(q, ErrorFeedback) else q
    distinct = {tuple(one[0].tolist()) for one in rows}
    random = inner.unbiased or inner.name in ("random_k", "power_sgd")
    assert len(distinct) == (len(seeds) if random else 1)


@of(UNBIASED)
@each("dtype", [torch.float32, torch.float64])
def test_unbiased_compressors_are_right_on_average(q, dtype):
    """Over seeds, and over chunks of one seed, the mean is the input."""
    x = normal(1, 270, dtype=dtype)
    x[0, :20] *= 1e-3
    rows = torch.cat([received(q, x.expand(500, -1).contiguous(), seed=s) for s in range(8)])
    error = rows.double() - x.double()
    deviation = error.std(0).clamp(min=1e-6 * float(x.abs().max()))
    assert (error.mean(0).abs() / deviation).max() * math.sqrt(len(rows)) < 5.5
    summed = error.sum(1)
    assert abs(summed.mean()) < 4.5 * summed.std() / math.sqrt(len(rows))


@of(UNBIASED)
def test_errors_of_two_elements_are_nearly_uncorrelated(q):
    """Equal elements of one chunk are not rounded alike: their sum is much better than each."""
    x = torch.full((400, 2048), 0.3)
    x[:, ::256] = 1.0
    error = received(q, x, seed=1).double() - x
    of_sums = error.sum(1).var() / error.shape[1]
    assert of_sums < 1.5 * error.var()


def adversaries(numel):
    """Chunks on which compressors do badly, for their norm."""
    one_hot = torch.zeros(numel)
    one_hot[numel // 2] = 3.0
    spread = torch.full((numel,), 0.066)
    spread[0] = 1.0
    decaying = torch.logspace(0, -6, numel)
    return {
        "normal": normal(numel),
        "one": one_hot,
        "one, negative": -one_hot,
        "equal": torch.full((numel,), 0.7),
        "alternating": torch.tensor([1.0, -1.0]).repeat(numel)[:numel],
        "one large": spread,
        "decaying": decaying,
        "heavy": normal(numel, seed=4) / normal(numel, seed=5).abs().clamp(min=1e-3),
        "offset": 1000 + normal(numel),
    }


@of(CONTRACTIONS)
@each("numel", [1, 2, 50, 300])
def test_a_contraction_contracts_as_declared(q, numel):
    """The mean squared error is at most 1 - δ of the squared norm, on any input."""
    delta = q.contraction(numel)
    if delta is None:
        return  # of longer chunks only
    assert 0 < delta <= 1
    for name, x in adversaries(numel).items():
        chunks = x.expand(400, -1).contiguous()
        error = (received(q, chunks, seed=7) - chunks).double().square().sum(1)
        error /= x.double().square().sum()
        slack = 4.5 * float(error.std()) / math.sqrt(len(error)) + 1e-6
        assert error.mean() <= 1 - delta + slack, name


@of({name: one for name, one in CONTRACTIONS.items() if name in ("bf16", "sign", "top_k")})
@settings(max_examples=60)
@given(data=st.data())
def test_no_input_is_found_on_which_a_contraction_fails(q, data):
    """Of compressors without chance: for every chunk that hypothesis tries."""
    elements = st.floats(-(2.0**50), 2.0**50, width=32).filter(lambda x: x == 0 or abs(x) > 1e-15)
    x = torch.tensor([data.draw(st.lists(elements, min_size=1, max_size=40))])
    error = (received(q, x).double() - x.double()).square().sum()
    bound = (1 - q.contraction(x.shape[1])) * x.double().square().sum()
    assert error <= bound * (1 + 1e-5) + 1e-30


@every_compressor
@every_dtype
def test_zero_decodes_to_zero(q, dtype):
    """Of zeros, exactly zeros come back."""
    for numel in SIZES:
        x = torch.zeros(2, numel, dtype=dtype)
        state = q.new_state(x)
        for _ in range(2):
            assert not received(q, x, state=state).any()


@every_compressor
@every_dtype
def test_chunks_are_encoded_and_decoded_each_by_itself(q, dtype):
    """A chunk's bytes do not depend on other chunks' values, and each decodes alone."""
    x = normal(3, 600, dtype=dtype)
    rows = encoded(q, x, seed=2)
    other = x.clone()
    other[1] = other[1] * 100 + 3
    changed = encoded(q, other, seed=2)
    assert torch.equal(rows[[0, 2]], changed[[0, 2]])
    assert not torch.equal(rows[1], changed[1])
    together = decoded(q, rows, x)
    for k in range(3):
        assert torch.equal(decoded(q, rows[k : k + 1], x[k : k + 1])[0], together[k])


@every_compressor
def test_long_chunks_are_as_short_ones(q):
    """Chunks longer than a piece, several in one tensor, decode near what was encoded."""
    x = normal(2, 300_001)
    x[:, 5] = 40.0
    error = received(q, x, seed=1) - x
    assert error.square().sum() < x.square().sum()
    assert error[:, 5].abs().max() <= 40.0
    assert torch.equal(*(encoded(q, x, seed=1, state=q.new_state(x), fill=f) for f in (0, 255)))


@every_compressor
@every_dtype
def test_decode_add_adds_what_decode_gives(q, dtype):
    """To all bits with whole weights, else up to rounding."""
    for numel in (1, 300, 5000):
        x, start = normal(2, numel, dtype=dtype), normal(2, numel, dtype=dtype, seed=1)
        rows = encoded(q, x)
        found = decoded(q, rows, x)
        for weight in (1.0, -1.0, 0.3):
            total = start.clone()
            q.decode_add(rows, total, weight)
            eps = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                total, start.clone().add_(found, alpha=weight), rtol=eps, atol=4 * eps
            )


@every_compressor
@every_dtype
@each("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_by_the_receiver(q, dtype, bad):
    """The chunk decodes to something that is not finite, and other chunks are unharmed."""
    for numel, at in ((1, 0), (300, 0), (300, 299), (600, 130)):
        x = normal(3, numel, dtype=dtype)
        unharmed = received(q, x)[[0, 2]]
        x[1, at] = bad
        found = received(q, x)
        assert not found[1].isfinite().all()
        assert torch.equal(found[[0, 2]], unharmed)


@every_compressor
@every_dtype
def test_the_ends_of_the_range_raise_nothing(q, dtype):
    """Subnormal and huge elements, alone and together, can be encoded and decoded."""
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps
    for values in ([smallest] * 9, [info.tiny, -smallest, 0.0], [info.max] * 9, [info.max, -1, 0]):
        x = torch.tensor([values, [-value for value in values]], dtype=dtype)
        state = q.new_state(x)
        for seed in range(2):
            assert received(q, x, seed=seed, state=state).shape == x.shape


@every_compressor
def test_a_state_is_updated_in_place(q):
    """What a state holds is shaped by the chunks, and encoding replaces no tensor of it."""
    x = normal(2, 300)
    state = q.new_state(x)
    before = dict(state)
    encoded(q, x, state=state)
    assert all(state[key] is before[key] for key in {**state, **before})
    assert all(tensor.shape[0] == 2 for tensor in state.values())


@every_compressor
def test_inference_mode_changes_nothing(q):
    """The bytes are the same inside ``torch.inference_mode``, and states made there stay usable."""
    x = normal(2, 300)
    with torch.inference_mode():
        state = q.new_state(x)
        inside = encoded(q, x, state=state)
    assert torch.equal(inside, encoded(q, x, state=q.new_state(x)))
    encoded(q, x, state=state)


@every_compressor
@every_dtype
def test_nobody_waits_for_a_device(q, dtype):
    """No value is read on the host: tensors that have none, on torch's meta device, do as well."""
    x = torch.empty(2, 500, dtype=dtype, device="meta")
    rows = torch.empty(2, q.encoded_size(500, dtype), dtype=torch.uint8, device="meta")
    state = q.new_state(x)
    q.encode(x, rows, state=state)
    q.decode(rows, x)
    q.decode_add(rows, x, 0.5)
    assert all(tensor.is_meta for tensor in state.values())


@every_compressor
def test_a_tensor_compressor_repeats_itself(q):
    """The same seed and inputs give the same bytes; each use has a seed of its own."""
    x = normal(2, 500)
    one, two = TensorCompressor(q, seed=3), TensorCompressor(q, seed=3)
    rows = [one.encode(x) for _ in range(3)]
    assert all(torch.equal(row, two.encode(x)) for row in rows)
    if q.unbiased:
        assert not torch.equal(rows[0], rows[1])
    total = torch.zeros(2, 500)
    one.decode_add(rows[0], total, 2.0)
    torch.testing.assert_close(total, 2 * one.decode(rows[0], torch.empty(2, 500)))


@every_compressor
def test_what_cannot_be_encoded_is_named(q):
    """Integers, empty chunks, flat and transposed tensors are refused in words."""
    compressor = TensorCompressor(q)
    with pytest.raises(bf.DtypeError, match=f"^{q.name}: .*float16.*got torch.int32"):
        compressor.encode(torch.ones(1, 4, dtype=torch.int32))
    for wrong in (torch.ones(4), torch.ones(2, 0), torch.ones(4, 2).t(), torch.ones(1, 2, 2)):
        with pytest.raises(bf.ArgumentError, match=rf"^{q.name}: argument chunks: expected .*view"):
            compressor.encode(wrong)


@of(ALONE)
@every_dtype
def test_error_feedback_loses_nothing(q, dtype):
    """Input + old residual = output + new residual, at every use, up to rounding."""
    feedback = ErrorFeedback(q)
    state = feedback.new_state(normal(2, 300, dtype=dtype))
    eps = torch.finfo(state[RESIDUAL].dtype).eps
    for use in range(5):
        x = normal(2, 300, dtype=dtype, seed=use)
        old = state[RESIDUAL].double().clone()
        found = received(feedback, x, seed=use, state=state)
        left, right = x.double() + old, found.double() + state[RESIDUAL].double()
        torch.testing.assert_close(left, right, rtol=0, atol=float(16 * eps * left.abs().max()))


@of({name: one for name, one in ALONE.items() if one.contraction(300) is not None})
def test_with_error_feedback_averages_over_time_are_right(q):
    """Of a contraction the residual stays bounded, so that the mean of outputs tends to x."""
    feedback = ErrorFeedback(q)
    x = normal(1, 300)
    state = feedback.new_state(x)
    delta, norm = q.contraction(300), float(x.norm())
    total = torch.zeros(1, 300)
    for use in range(400):
        feedback.decode_add(encoded(feedback, x, seed=use, state=state), total)
        assert state[RESIDUAL].norm() <= 2 * math.sqrt(1 - delta) / delta * norm + 1e-3
    assert (total / 400 - x).norm() <= state[RESIDUAL].norm() / 400 + 1e-4 * norm


@of(ALONE)
@each("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_leaves_the_residual_alone(q, bad):
    """The chunk's residual stays as it was, that of other chunks goes on, and so does the next."""
    feedback = ErrorFeedback(q)
    state = feedback.new_state(normal(2, 300))
    encoded(feedback, normal(2, 300), state=state)
    before = state[RESIDUAL].clone()
    x = normal(2, 300, seed=1)
    x[0, 17] = bad
    assert not received(feedback, x, state=state)[0].isfinite().all()
    assert torch.equal(state[RESIDUAL][0], before[0])
    assert not torch.equal(state[RESIDUAL][1], before[1]) or not before.any()
    assert received(feedback, normal(2, 300, seed=2), state=state).isfinite().all()
    assert state[RESIDUAL].isfinite().all()


def test_error_feedback_wraps_a_compressor_once():
    """What is none, and error feedback itself, are refused."""
    for wrong in ("sign", None, ErrorFeedback(ALONE["sign"])):
        with pytest.raises(bf.ArgumentError, match="argument inner: expected a compressor without"):
            ErrorFeedback(wrong)


def test_a_compressor_is_found_by_name_or_given():
    """An unknown name and what is no compressor are refused, with the names that exist."""
    sign = ALONE["sign"]
    assert compressor_for("verb", sign) is sign
    with pytest.raises(bf.UnknownNameError, match=r"unknown compressor 'qsgd'; .*Did you mean"):
        compressor_for("verb", "qsgd")
    with pytest.raises(bf.ArgumentError, match=r"^verb: argument compression: .*qsgd_int8.* got 3"):
        compressor_for("verb", 3)
