"""The one table of dtypes, and tensors seen as bytes."""

from __future__ import annotations

import pytest
import torch

from asyncddp.errors import DtypeError
from asyncddp.tensors.byte_views import as_bytes, from_bytes, on_host
from asyncddp.tensors.dtypes import DTYPES, DtypeKind, dtype_traits_of


@pytest.mark.parametrize("row", DTYPES.values(), ids=lambda row: row.name)
def test_a_row_describes_its_dtype(row):
    """Sums are formed in a dtype of the same kind that holds every value."""
    zero = torch.zeros(1, dtype=row.dtype)
    assert row.name == str(row.dtype).removeprefix("torch.")
    assert (row.kind is DtypeKind.FLOAT) == row.dtype.is_floating_point
    assert (row.kind is DtypeKind.COMPLEX) == row.dtype.is_complex
    assert row.averages == (row.kind in (DtypeKind.FLOAT, DtypeKind.COMPLEX))
    assert torch.promote_types(row.dtype, row.accumulate) == row.accumulate
    assert row.mpi in (DTYPES[row.accumulate].mpi, "INT32_T")
    assert (DTYPES[row.accumulate].kind, dtype_traits_of(zero, "v")) == (row.kind, row)


def test_an_unknown_dtype_lists_the_known():
    """An unsupported dtype raises DtypeError that names the verb and all supported ones."""
    with pytest.raises(DtypeError) as caught:
        dtype_traits_of(torch.zeros(1, dtype=torch.uint16), "allreduce")
    known = ", ".join(row.name for row in DTYPES.values())
    assert str(caught.value) == (
        f"allreduce: argument tensor has dtype torch.uint16; expected one of {known}. Cast it "
        "first with tensor.to(...)."
    )


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)], ids=str)
def test_bytes_and_back(dtype, shape):
    """Bytes of a tensor of any dtype and shape, empty ones included, restore it exactly."""
    x = (torch.rand(shape) * 100).to(dtype)
    data = as_bytes(x)
    assert data.shape == (x.numel() * x.element_size(),)
    back = from_bytes(data.numpy().tobytes(), dtype, shape)
    assert torch.equal(back, x)
    assert back.dtype == dtype


def test_bytes_share_storage():
    """``as_bytes`` is a view: writing to it changes the tensor."""
    x = torch.zeros(2)
    as_bytes(x).fill_(255)
    assert torch.isnan(x).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[0].expand(3, 4),
        lambda x: x.conj(),
        lambda x: x.conj().imag,
        lambda x: x.clone().requires_grad_(),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negative", "with gradient"],
)
def test_on_host_gives_the_values_ready_to_be_sent(view):
    """``on_host`` gives any view's values contiguous, resolved and without gradient."""
    x = view(torch.randn(4, 4, dtype=torch.complex64))
    host = on_host(x)
    assert host.is_contiguous()
    assert not any([host.requires_grad, host.is_conj(), host.is_neg()])
    assert torch.equal(host, x.detach().resolve_conj().resolve_neg())
    as_bytes(host)


def test_on_host_copies_nothing_where_it_need_not():
    """``on_host`` of a contiguous CPU tensor has the same memory."""
    x = torch.ones(3)
    assert on_host(x).data_ptr() == x.data_ptr()
