"""Error feedback: its state, and what it is for."""

from __future__ import annotations

import pytest
import torch

from asyncddp.compression import ErrorFeedback
from asyncddp.compression.error_feedback import RESIDUAL
from asyncddp.compression.power_sgd import PowerSGD
from asyncddp.compression.sign import Sign
from asyncddp.compression.tensor_compressor import TensorCompressor
from tests.unit.compression.codec import encoded, normal, received


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_residuals_of_short_floats_are_float32(dtype):
    """What is too small beside an element to be added in its dtype is sent in the end."""
    x = torch.tensor([[1.0, 1e-3]], dtype=dtype)
    feedback = ErrorFeedback(Sign())
    state = feedback.new_state(x)
    assert state[RESIDUAL].dtype == torch.float32
    total = sum(received(feedback, x, state=state).double() for _ in range(1000))
    torch.testing.assert_close(total / 1000, x.double(), rtol=0, atol=4e-3)


def test_the_state_has_the_inner_one_s_too():
    """With PowerSGD inside, Q is kept beside the residual, and both change."""
    x = normal(2, 100)
    feedback = ErrorFeedback(PowerSGD(rank=1))
    state = feedback.new_state(x)
    assert {key: tuple(one.shape) for key, one in state.items()} == {
        "power_sgd.q": (2, 1, 8),
        RESIDUAL: (2, 100),
    }
    encoded(feedback, x, state=state)
    assert all(one.any() for one in state.values())


def test_without_a_state_it_is_the_inner_compressor():
    """Bytes and sizes are the same."""
    x = normal(2, 100)
    assert torch.equal(encoded(ErrorFeedback(Sign()), x), encoded(Sign(), x))


def test_descent_by_signs_arrives_only_with_error_feedback():
    """On ε|x + y| + |x - y| the signs of gradients never change x + y: Karimireddy et al., 2."""
    ends = {}
    for name, compressor in {"alone": Sign(), "feedback": ErrorFeedback(Sign())}.items():
        tensor, x = TensorCompressor(compressor), torch.tensor([[1.0, 1.003]])
        for _ in range(500):
            both, apart = x.sum().sign() * 0.5, (x[0, 0] - x[0, 1]).sign()
            gradient = torch.stack([both + apart, both - apart]).view(1, 2)
            tensor.decode_add(tensor.encode(gradient), x, -0.01)
        ends[name] = float(x.sum())
    assert ends["alone"] >= 2 - 0.05
    assert abs(ends["feedback"]) < 0.05


def test_what_is_forgotten_is_never_repaid():
    """After ``forget()`` both messages are encoded as the first ones, and seeds go on."""
    x, tensor = normal(2, 100), TensorCompressor(ErrorFeedback(Sign()))
    messages = [tensor, tensor.second_message]
    first = [one.encode(x) for one in messages]
    assert all(
        not torch.equal(one.encode(x), sent) for one, sent in zip(messages, first, strict=True)
    )
    tensor.forget()
    assert tensor.uses == 2
    assert all(torch.equal(one.encode(x), sent) for one, sent in zip(messages, first, strict=True))
