"""Lists of tensors as flat ones: when they are a view, what is copied, how they are described."""

from __future__ import annotations

import pytest
import torch

from asyncddp.tensors.tensor_lists import TensorListLayout, describe_difference


def layout_of(tensors, keys=None):
    return TensorListLayout.of(keys, tensors)


def group_of(tensors):
    (group,) = layout_of(tensors).groups
    return group


def parts():
    """Parts of one tensor, side by side."""
    flat = torch.arange(10.0)
    return flat, [flat[:4].view(2, 2), flat[4:9], flat[9].view(1)]


def test_tensors_side_by_side_are_viewed():
    """Writing into the flat view writes into them."""
    flat, tensors = parts()
    view = group_of(tensors).flat_view(tensors)
    assert view.data_ptr() == flat.data_ptr()
    assert view.shape == (10,)
    view.fill_(7.0)
    assert all(one.eq(7.0).all() for one in tensors)


APART = {
    "a gap": lambda flat, t: [t[0], t[2]],
    "another order": lambda flat, t: [t[1], t[0]],
    "the same twice": lambda flat, t: [t[0], t[0]],
    "transposed": lambda flat, t: [t[0].t(), t[1]],
    "strided": lambda flat, t: [flat[:8:2], flat[4:6]],
    "an empty one": lambda flat, t: [t[0], flat[4:4], t[1]],
    "other storages": lambda flat, t: [t[0].clone(), t[1].clone()],
    "negated": lambda flat, t: [torch._neg_view(t[0]), t[1]],
    "conjugated": lambda flat, t: [torch.arange(4).to(torch.complex64).conj()],
}


@pytest.mark.parametrize("kind", APART)
def test_other_tensors_are_copied(kind):
    """Their copy has their values, in the order of the list, and leaves them alone."""
    flat, tensors = parts()
    given = APART[kind](flat, tensors)
    kept = [one.clone() for one in given]
    group = group_of(given)
    assert group.flat_view(given) is None
    packed = group.pack(given)
    expected = torch.cat([one.resolve_neg().resolve_conj().reshape(-1) for one in given])
    assert torch.equal(packed.flat, expected)
    assert all(map(torch.equal, packed.views, kept))
    packed.flat.zero_()
    assert all(map(torch.equal, given, kept))


def test_neighbours_in_memory_of_different_storages_are_copied():
    """Storages side by side by chance are no reason to write beyond the end of the first."""
    memory = bytearray(64)
    one = torch.frombuffer(memory, dtype=torch.float32, count=8)
    other = torch.frombuffer(memory, dtype=torch.float32, count=8, offset=32)
    assert other.data_ptr() == one.data_ptr() + 32
    assert group_of([one, other]).flat_view([one, other]) is None


def test_copies_are_used_again():
    """The one that was given back, by the next list of the same form, and no other."""
    _, tensors = parts()
    given = [one.clone() for one in tensors]
    first, second = group_of(given).pack(given), group_of(given).pack(given)
    assert first.flat.data_ptr() != second.flat.data_ptr()
    group_of(given).give_back(first)
    assert group_of([one.clone() for one in given]).pack(given).flat is first.flat


def test_groups_by_dtype_in_the_order_of_the_list():
    """Each group has its tensors' places."""
    tensors = [torch.ones(1), torch.ones(2).int(), torch.ones(3), torch.ones(4).bool()]
    groups = layout_of(tensors).groups
    assert [group.indices for group in groups] == [[0, 2], [1], [3]]
    assert [one.numel() for one in groups[0].of(tensors)] == [1, 3]


def test_a_description_has_keys_dtypes_and_shapes():
    """And a digest of those beyond the first hundred."""
    x, y = torch.ones(2, 3), torch.ones(()).int()
    assert layout_of([x, y]).description == "a list of 2 tensors; [0] float32 (2, 3); [1] int32 ()"
    named = layout_of([x], ("w",)).description
    assert named == "a dict of 1 tensors; ['w'] float32 (2, 3)"
    many = layout_of([x] * 150).description
    other = layout_of([x] * 149 + [x.view(6)]).description
    assert many != other
    assert many.count(";") == other.count(";") == 101
    assert "50 more, of digest" in describe_difference(many, other)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (["[0] a", "[1] b"], ["[0] a"], "expected [1] b in 2, got nothing more in 1"),
        (["[0] a"], ["[0] a", "[1] b"], "expected nothing more in 1, got [1] b in 2"),
        (["[0] a"], ["[0] c"], "expected [0] a in 1, got [0] c in 1"),
        (["[0] a"], [], "expected [0] a in 1, got nothing more in 0"),
    ],
)
def test_the_first_difference_is_told(one, other, found):
    """With the number of tensors of both."""
    texts = ["; ".join([str(len(entries)), *entries]) for entries in (one, other)]
    assert describe_difference(*texts) == found
