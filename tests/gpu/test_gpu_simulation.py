"""The simulator on a GPU: where model and data are there, so is every step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from asyncddp import simulate


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def there(problem, device):
    """The same problem with its model and data on a device."""
    data = [tuple(tensor.to(device) for tensor in part) for part in problem.data]
    model = problem.model.to(device)
    optimum = None if problem.optimum is None else problem.optimum.to(device)
    return dataclasses.replace(problem, model=model, data=data, optimum=optimum)


@pytest.mark.parametrize("method", ["adapt_then_combine", "gradient_tracking", "diloco"])
def test_a_simulated_run_on_a_gpu_equals_that_on_the_host(method, device):
    """The errors of 64 ranks over 20 steps, to rounding."""
    options = {"steps": 20}
    here = simulate.train(simulate.least_squares(64), sgd, method, **options)
    found = simulate.train(there(simulate.least_squares(64), device), sgd, method, **options)
    expected = torch.as_tensor(here.error)
    torch.testing.assert_close(torch.as_tensor(found.error), expected, rtol=1e-8, atol=1e-12)
