"""The example's backend, with a stand-in for laplace-torch's classes, which are not installed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

PATH = Path(__file__).parents[1] / "examples" / "laplace" / "fedntk_backend.py"


class Base:
    """What the backend reads of laplace-torch's interface."""

    last_layer = stochastic = False
    subnetwork_indices, factor, likelihood = None, 1.0, "classification"

    def __init__(self, model):
        self.model, self.params_dict = model, dict(model.named_parameters())
        self.params, self.lossfunc = [*self.params_dict.values()], nn.CrossEntropyLoss()


class Scaled(nn.Module):
    """Times a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.scale * self.layer(x)


@pytest.fixture
def backend(monkeypatch):
    laplace, curvature = ModuleType("laplace"), ModuleType("laplace.curvature")
    laplace.DiagLaplace = Base
    curvature.CurvatureInterface = Base
    curvature.EFInterface = curvature.GGNInterface = type("Interface", (Base,), {})
    monkeypatch.setitem(sys.modules, "laplace", laplace)
    monkeypatch.setitem(sys.modules, "laplace.curvature", curvature)
    spec = importlib.util.spec_from_file_location("fedntk_backend", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("network", [lambda: nn.Linear(4, 3), Scaled])
def test_matrices_have_the_networks_dtype_and_all_parameters(backend, network, dtype):
    """Against autograd, one example at a time, in float64."""
    model, x, y = network().to(dtype), torch.randn(10, 4, dtype=dtype), torch.arange(10) % 3
    rows, hessian = [], 0
    exact = network().double()
    exact.load_state_dict(model.state_dict())
    for own in x.double():
        scores = exact(own[None])[0]
        each = (torch.autograd.grad(s, [*exact.parameters()], retain_graph=True) for s in scores)
        rows.append(torch.stack([torch.cat([g.flatten() for g in grads]) for grads in each]))
        p = scores.detach().softmax(0)
        hessian = hessian + rows[-1].T @ (p.diag() - torch.outer(p, p)) @ rows[-1]
    rtol = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    ggn = backend.FedntkGGN(model)
    jacobians, outputs = ggn.jacobians(x)
    _, diagonal = ggn.diag(x, y)
    _, fisher = backend.FedntkEF(model).diag(x, y)
    assert jacobians.dtype == outputs.dtype == diagonal.dtype == fisher.dtype == dtype
    for found, expected in ((jacobians, torch.stack(rows)), (diagonal, hessian.diagonal())):
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol)
    residuals = nn.functional.one_hot(y, 3) - exact(x.double()).detach().softmax(1)
    gradients = torch.einsum("ncp,nc->np", torch.stack(rows), residuals)
    torch.testing.assert_close(fisher.double(), gradients.square().sum(0), rtol=rtol, atol=rtol)
    variances = backend.DiagLaplaceInParts(model)
    variances.backend = ggn
    parts = {name: torch.ones_like(p).flatten() for name, p in ggn.params_dict.items()}
    covariances = torch.stack([own @ own.T for own in rows])
    found = variances._variances(x, parts)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), covariances, rtol=rtol, atol=rtol)
