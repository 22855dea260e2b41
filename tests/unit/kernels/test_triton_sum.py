"""The kernel that mixes on a GPU: in Triton's interpreter, and compiled for other machines."""

from __future__ import annotations

import collections
import importlib
import re
import sys

import numpy as np
import pytest
import torch

import asyncddp.kernels
from asyncddp.kernels import device_weighted_sum
from asyncddp.kernels.weight_row import WeightRow

pytest.importorskip("triton", reason="torch for CUDA brings it; without, scripts/test installs it")
NAME = "asyncddp.kernels.triton_sum"
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [1, 2047, 2048, 2049, 4096, 5000]


def imported(patch):
    """The kernel's module, made anew: Triton looks at the environment as it makes kernels."""
    patch.delitem(sys.modules, NAME, raising=False)
    patch.delattr(asyncddp.kernels, "triton_sum", raising=False)
    module = importlib.import_module(NAME)
    del sys.modules[NAME], asyncddp.kernels.triton_sum
    return module


@pytest.fixture(scope="module")
def kernel():
    """The module, of which Triton's interpreter runs the kernels, on tensors of the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield imported(patch)


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def drawn(count, size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]


def exact(tensors, weights, divisor=1):
    """The sum in float64, and the same of magnitudes."""
    values = [tensor.double().numpy() for tensor in tensors]
    total = sum(weight * value for weight, value in zip(weights, values, strict=True)) / divisor
    size = sum(abs(weight) * np.abs(value) for weight, value in zip(weights, values, strict=True))
    return torch.from_numpy(np.asarray(total)), torch.from_numpy(np.asarray(size / divisor))


def assert_rounded(out, tensors, weights, divisor=1):
    """Within a unit of its dtype, where the interpreter cuts bfloat16 off, and rounding of sums."""
    expected, size = exact(tensors, weights, divisor)
    unit, step = torch.finfo(out.dtype).eps, torch.finfo(wide(out.dtype)).eps
    least = torch.finfo(out.dtype).smallest_normal * unit
    allowed = unit * expected.abs() + step * (len(tensors) + 2) * size + least
    assert ((out.double() - expected).abs() <= allowed).all()


# in the interpreter


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("others", [0, 1, 2, 5, 8, 9, 17])
def test_the_sum_is_that_of_float64_rounded(kernel, dtype, others):
    """For as many neighbours as one pass takes, and for more, whose sum stays wide in between."""
    for size in SIZES if others in (1, 8) else [2049]:
        tensors = drawn(1 + others, size, dtype, seed=size)
        weights = [(-1) ** k / (k + 3) for k in range(1 + others)]
        out = torch.full((size,), float("nan"), dtype=dtype)
        kernel.weighted_sum(tensors[0], tensors[1:], weights, out, dtype=wide(dtype))
        assert_rounded(out, tensors, weights)


def test_many_halves_are_rounded_once(kernel):
    """256 and 16 times 0.15, in two passes: multiples of 2, in which bfloat16 has only 258."""
    own, one, out = (torch.full((5,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 0.0))
    kernel.weighted_sum(own, [one] * 16, [1.0] + [0.15] * 16, out)
    assert out.tolist() == [258.0] * 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("others", [2, 6, 10])
def test_the_mean_of_equal_values_is_that_value(kernel, dtype, others):
    """Ranks that agree go on agreeing: halves exactly, whose sums float32 has room for."""
    (x,) = drawn(1, 2050, dtype)
    out = torch.empty_like(x)
    kernel.weighted_sum(
        x, [x] * others, [1.0] * (1 + others), out, divisor=1 + others, dtype=wide(dtype)
    )
    unit = 2 * torch.finfo(dtype).eps if dtype == wide(dtype) else 0.0
    torch.testing.assert_close(out, x, rtol=unit, atol=0.0)


def test_weights_reach_the_kernel_with_all_their_bits(kernel):
    """Triton's own floats have 32 bits, as have its integers where the value fits."""
    x, y = torch.ones(3, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    for first, second in [(1 / 3, 1e-17), (0.1 + 2**-54, 0.7), (-1e300, 1e-300), (0.0, 1.0)]:
        out = torch.empty_like(x)
        kernel.weighted_sum(x, [y], [first, second], out, dtype=torch.float64)
        assert out.tolist() == [first + 2.0 * second] * 3
    assert kernel._bits(0.0) == kernel._bits(-0.0) == kernel._bits(5e-324) == -(2**63)
    assert kernel._bits(1.0) == 0x3FF0000000000000
    assert kernel._bits(-2.0) == -0x4000000000000000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_may_replace_a_tensor(kernel, dtype):
    """A sum written into its first term has the same bits as one written into a new tensor."""
    for others in (3, 12):
        tensors = drawn(1 + others, 3000, dtype)
        expected = torch.empty_like(tensors[0])
        weights = [1 / (2 + k) for k in range(1 + others)]
        kernel.weighted_sum(tensors[0], tensors[1:], weights, expected, dtype=wide(dtype))
        kernel.weighted_sum(tensors[0], tensors[1:], weights, tensors[0], dtype=wide(dtype))
        assert torch.equal(tensors[0], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_at_odd_places_and_their_surroundings(kernel, dtype):
    """A tensor that begins anywhere in its storage; nothing beside it is written."""
    bases = drawn(4, 2100, dtype)
    before, weights = bases[3].clone(), [0.5, 0.25, 0.125]
    tensors = [base[1 + k : 2060 + k] for k, base in enumerate(bases)]
    kernel.weighted_sum(tensors[0], tensors[1:3], weights, tensors[3], dtype=wide(dtype))
    assert_rounded(tensors[3], tensors[:3], weights)
    assert torch.equal(bases[3][:4], before[:4])
    assert torch.equal(bases[3][2063:], before[2063:])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (2, 3, 5)])
def test_any_shape(kernel, shape):
    """Scalars, empty tensors and those of several dimensions are summed in their own shape."""
    x, y = torch.full(shape, 3.0), torch.full(shape, 5.0)
    out = torch.empty_like(x)
    kernel.weighted_sum(x, [y], [0.5, 0.75], out)
    assert torch.equal(out, torch.full(shape, 5.25))


# as part of the verbs


@pytest.fixture
def fused(kernel, monkeypatch):
    """Tensors of the host are mixed by the kernel, as those on a GPU are."""
    monkeypatch.setitem(sys.modules, NAME, kernel)
    monkeypatch.setattr(asyncddp.kernels, "triton_sum", kernel, raising=False)
    monkeypatch.setattr(
        device_weighted_sum, "_triton_sum", device_weighted_sum.TritonWeightedSum("cpu")
    )
    calls, mix = [], kernel.weighted_sum
    monkeypatch.setattr(
        kernel, "weighted_sum", lambda *args, **more: calls.append(1) or mix(*args, **more)
    )
    return calls


ROWS = {
    "one": WeightRow(0.25, {3: 0.5}, {}),
    "mean": WeightRow(1 / 3, {1: 1 / 3, 4: 1 / 3}, {}),
    "weighted": WeightRow(0.4, {5: 0.3, 2: 0.2, 9: 0.1}, {}),
    "many": WeightRow(0.1, {k: 0.9 / 11 for k in range(11)}, {}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_it_gives_what_torch_gives(fused, dtype, row):
    """To a unit in the last place of the dtype, or of the terms of the sum."""
    mixing, size = ROWS[row], 3001
    own, *others = drawn(1 + len(mixing.sources), size, dtype)
    ours, torchs = torch.empty_like(own), torch.empty_like(own)
    device_weighted_sum.weighted_sum_on_device(mixing, wide(dtype), own, others, ours)
    assert fused == [1]
    mixing.weighted_sum_in(wide(dtype), own, others, torchs)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, torchs, rtol=unit, atol=4 * torch.finfo(wide(dtype)).eps)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.complex64], ids=str)
def test_other_dtypes_are_left_to_torch(fused, dtype):
    """Tensors of integer and complex dtypes are averaged by torch, not by the kernel."""
    own, other = torch.tensor([2, 4]).to(dtype), torch.tensor([5, 8]).to(dtype)
    form = torch.float64 if not dtype.is_complex else dtype
    device_weighted_sum.weighted_sum_on_device(ROWS["one"], form, own, [other], own)
    assert own.tolist() == [3, 5]
    assert fused == []


def test_one_pass_of_torch_is_not_replaced(fused):
    """The kernel is not launched for a lerp of two or a tensor without neighbours."""
    x, y = torch.zeros(4), torch.ones(4)
    device_weighted_sum.weighted_sum_on_device(
        WeightRow(0.5, {1: 0.5}, {}), torch.float32, x, [y], x
    )
    device_weighted_sum.weighted_sum_on_device(WeightRow(0.5, {}, {}), torch.float32, x, [], x)
    assert (x.tolist(), fused) == ([0.25] * 4, [])


# compiled


class NoGpu:
    """What Triton asks of a machine before it compiles."""

    def __init__(self, target):
        self.get_current_target = lambda: target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Compiles what would run on a GPU of that generation, and gives it."""
    triton = pytest.importorskip("triton", minversion="3.3", reason="of Triton's insides")
    from triton.backends.compiler import GPUTarget

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, found = imported(monkeypatch), []
    for function in (module._ALIGNED_KERNEL, module._UNALIGNED_KERNEL):

        def run(*args, run=function.run, **more):
            found.append(run(*args, **{**more, "warmup": True}))

        monkeypatch.setattr(function, "run", run)

    def compiled(generation, *args, **more):
        there = NoGpu(GPUTarget("cuda", generation, 32))
        driver = type(triton.runtime.driver)
        monkeypatch.setattr(driver, "active", property(lambda _: there), raising=False)
        module.weighted_sum(*args, **more)
        return found[-1]

    return compiled


def accesses(compiled, what):
    """How often the machine code reads or writes memory, by the width of what it reads."""
    return collections.Counter(re.findall(rf"{what}\.global\.(\S+)", compiled.asm["ptx"]))


@pytest.mark.parametrize("generation", [80, 90])
def test_each_tensor_is_read_once_with_accesses_of_16_bytes(compiled, generation):
    """2048 floats are 16 for each of 128 threads: 4 such accesses; and one at a time at the end."""
    tensors = drawn(5, 10_000, torch.float32)
    made = compiled(generation, tensors[0], tensors[1:4], [0.1, 0.2, 0.3, 0.4], tensors[4])
    assert accesses(made, "ld") == {"v4.b32": 4 * 4, "b32": 4 * 16}
    assert accesses(made, "st") == {"v4.b32": 4, "b32": 16}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_compiles_to_machine_code_for_each_dtype(compiled, dtype):
    """With all neighbours of a pass, a division, and tensors at odd places."""
    tensors = [tensor[1:] for tensor in drawn(10, 5001, dtype)]
    made = compiled(
        90, tensors[0], tensors[1:9], [1.0] * 9, tensors[9], divisor=9, dtype=wide(dtype)
    )
    assert made.asm["cubin"]
    assert not re.search(r"\.local", made.asm["ptx"]), "registers are enough"
    divisions = set(re.findall(r"div\.(\S+)", made.asm["ptx"]))
    assert len(divisions) == 1
    assert divisions <= {"rn.f32", "rn.ftz.f32", "rn.f64"}, "none is approximate"


def test_weights_come_as_64_bits_whatever_they_are(compiled):
    """So that one kernel serves all weights of a dtype and number of neighbours."""
    x, y, out = drawn(3, 4096, torch.float32)
    made = [compiled(90, x, [y], weights, out) for weights in ([0.0, 1.0], [5e-324, -1 / 3])]
    assert made[0].hash == made[1].hash
    source = made[0].src
    assert {source.signature[f"w{k}"] for k in range(9)} | {source.signature["divisor"]} == {"i64"}
