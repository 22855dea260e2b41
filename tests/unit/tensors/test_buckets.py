"""Flat buckets: layout, alignment, strides, and parameters that live in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asyncddp.errors import ArgumentError
from asyncddp.tensors.buckets import (
    ALIGNMENT,
    FlatBucket,
    ParameterBucket,
    fragments_of,
    partition,
    require_untied,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]

shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.sampled_from(DTYPES), st.integers(0, 3))
def test_views_are_aligned_disjoint_and_shaped(shapes, dtype, extra):
    """Each tensor has room of its own at a multiple of 64 bytes; the rest is zero."""
    tensors = [torch.ones(shape, dtype=dtype) for shape in shapes]
    bucket = FlatBucket(tensors, extra)
    assert bucket.flat.is_contiguous()
    assert bucket.tail.numel() == extra
    for view, tensor in zip(bucket.views, tensors, strict=True):
        assert view.shape == tensor.shape
        assert (view.data_ptr() - bucket.flat.data_ptr()) % ALIGNMENT == 0
        assert not view.any(), "views overlap"
        view.copy_(tensor)
    assert bucket.flat.count_nonzero() == sum(tensor.numel() for tensor in tensors)
    bucket.tail.fill_(1)
    assert bucket.flat.count_nonzero() == sum(tensor.numel() for tensor in tensors) + extra


@given(shapes, st.sampled_from(DTYPES), st.integers(0, 3))
def test_padding_can_be_cleared_alone(shapes, dtype, extra):
    """In a tensor of the bucket's size: tensors and tail stay, all else is zero."""
    bucket = FlatBucket([torch.ones(shape, dtype=dtype) for shape in shapes], extra)
    other = torch.ones_like(bucket.flat)
    bucket.clear_padding(other)
    assert all(view.all() for view in bucket.views_of(other))
    assert other[other.numel() - extra :].all()
    assert other.count_nonzero() == sum(view.numel() for view in bucket.views) + extra


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 800))
def test_partition_keeps_order_and_cap(sizes, cap):
    """Every index once, ascending; no bucket is above the cap, unless it holds one tensor."""
    tensors = [torch.empty(size, dtype=DTYPES[2 + size % 2], device="meta") for size in sizes]
    buckets = partition(tensors, cap)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len({tensors[index].dtype for index in bucket}) == 1
        used = sum(tensors[index].nbytes for index in bucket)
        assert used <= cap or len(bucket) == 1


def test_partition_fills_buckets():
    """A bucket is closed only when the next tensor does not fit."""
    assert partition([torch.empty(2)] * 7, cap=24) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(3, 4).t(),
        torch.rand(1, 4),
        torch.rand(4)[:, None].expand(4, 1),
        torch.rand(()),
    ],
    ids=["channels_last", "transposed", "one row", "expanded by one", "0-dim"],
)
def test_dense_strides_are_kept(tensor):
    """A parameter keeps its memory format."""
    parameter = nn.Parameter(tensor)
    strides, value = parameter.stride(), parameter.detach().clone()
    ParameterBucket([("p", parameter)])
    assert parameter.stride() == strides
    assert torch.equal(parameter, value)


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(4, 6)[:, ::2], torch.rand(4, 1).expand(4, 3), torch.rand(6, 6)[:4, :3]],
    ids=["every second", "overlapping", "corner"],
)
def test_other_strides_become_contiguous(tensor):
    """What is not dense cannot be kept as it lies; its values are."""
    parameter = nn.Parameter(tensor)
    value = parameter.detach().clone()
    ParameterBucket([("p", parameter)])
    assert parameter.is_contiguous()
    assert torch.equal(parameter, value)


def two():
    parameters = [nn.Parameter(torch.rand(3, 2)), nn.Parameter(torch.rand(5))]
    return ParameterBucket([("a", parameters[0]), ("b", parameters[1])]), parameters


def test_parameters_live_in_the_bucket():
    """Writing into either shows in the other, and autograd goes on as before."""
    bucket, (a, b) = two()
    assert bucket.detached_indices() == []
    bucket.flat.fill_(2.0)
    assert (a == 2).all()
    assert (b == 2).all()
    (a.sum() + b.sum()).backward()
    torch.optim.SGD([a, b], lr=1.0).step()
    assert bucket.flat.min() == 1.0
    assert a.is_leaf
    assert isinstance(a, nn.Parameter)


def test_a_parameter_that_moved_out_is_taken_in_again():
    """Its new value counts; the other parameter is not touched."""
    bucket, (a, b) = two()
    kept = b.detach().clone()
    a.data = torch.full((3, 2), 7.0)
    assert bucket.detached_indices() == [0]
    assert bucket.reattach()
    assert bucket.detached_indices() == []
    assert (bucket.views[0] == 7).all()
    assert torch.equal(b, kept)


def test_a_bucket_that_moves_takes_its_parameters_along():
    """``share_memory()`` moves the memory below: parameters stay views, and are nobody's copies."""
    bucket, (a, b) = two()
    a.share_memory_()
    assert bucket.detached_indices() == []
    a.data.fill_(5.0)
    assert (bucket.views[0] == 5).all()
    assert b.is_shared()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data.double(),
        lambda p: p.data[:2],
        lambda p: p.data.t().contiguous().t(),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_what_fits_no_longer_needs_another_bucket(change):
    """The bucket says so, and leaves the parameter as it is."""
    bucket, (a, _) = two()
    a.data = change(a)
    assert not bucket.reattach()
    assert bucket.detached_indices() == [0]


def test_versions_grow_with_changes_in_place():
    """Changes under no_grad and by optimizers are seen; those of the bucket itself are not."""
    bucket, (_, b) = two()
    before = bucket.versions()
    bucket.flat.mul_(2)
    assert bucket.versions() == before
    with torch.no_grad():
        b.add_(1)
    after = bucket.versions()
    assert after[0] == before[0]
    assert after[1] > before[1]


def test_fragments_are_consecutive_and_no_bucket_mixes_them():
    """Each has about its share of the elements; one without tensors has no bucket."""
    tensors = [torch.empty(size) for size in (30, 10, 20, 1, 19, 40)]
    of_each = fragments_of(tensors, 3)
    assert of_each == [0, 0, 1, 1, 1, 2]
    assert partition(tensors, 1 << 20, 3) == [[0, 1], [2, 3, 4], [5]]
    assert partition(tensors, 80, 3) == [[0], [1], [2], [3, 4], [5]]
    assert fragments_of(tensors[:1], 3) == [1]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4)), max_size=4))
def test_what_shares_elements_is_refused(views):
    """Views of one memory are tied if an element is in two of them, and else are not."""
    memory = torch.arange(24.0)
    named = [
        (str(number), memory[start::step][:count])
        for number, (start, step, count) in enumerate(views)
    ]
    elements = [int(one) for _, view in named for one in view]
    if len(set(elements)) == len(elements):
        require_untied(named)
    else:
        with pytest.raises(ArgumentError, match="share memory"):
            require_untied(named)


def test_others_may_share_among_themselves():
    """Two that stay where they are may; one of them and one that moves may not."""
    memory = torch.zeros(4, 4)
    require_untied([("moved", torch.zeros(4))], [("one", memory), ("other", memory.t())])
    with pytest.raises(ArgumentError, match=r"moved and one share memory|one and moved share"):
        require_untied([("moved", memory.t())], [("one", memory)])


def test_a_parameter_that_was_given_anothers_memory():
    """It is noticed where parameters are taken in again."""
    bucket, (_, b) = two()
    b.data = bucket.views[0].view(-1)[:5]
    with pytest.raises(ArgumentError, match=r"a and b share memory|b and a share memory"):
        bucket.reattach()
