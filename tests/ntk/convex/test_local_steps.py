"""The closed form of TCT's local steps against the loop, and algorithm 1 against what we run."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedntk.ntk import NotEnoughMemory, one_hot, ridge_regression
from fedntk.ntk.convex.local_steps import (
    Spectrum,
    best_bias,
    centred_targets,
    convex_loss,
    geometric_sums,
    mean_gradient,
    residual_sum,
)
from fedntk.ntk.losses import residual
from fedntk.ntk.support import memory as ntk_memory

from ...conftest import refused
from ..arithmetic import looped_steps, normal, relative

SHAPES = {"wide": (9, 30), "tall": (30, 9), "square": (12, 12), "one": (1, 5), "repeated": (24, 40)}


def problem(shape, outputs=3):
    """Z, W_0, Y (one-hot less 1/C) and h, in float64; "repeated" holds each example three times."""
    n, p = SHAPES[shape]
    z = normal(n, p, seed=1) * torch.logspace(0, -1, p, dtype=torch.float64)
    if shape == "repeated":
        z = z[torch.arange(n) % (n // 3)]
    labels = torch.randint(outputs, (n,), generator=torch.Generator().manual_seed(4))
    y = functional.one_hot(labels, outputs).double() - 1 / outputs
    return z, normal(p, outputs, seed=2), y, normal(p, outputs, seed=3)


def closed(z, w, y, h, rate, steps, loss="mse"):
    """W_M and S by the closed form; the rate eta lambda_max / n gives eta."""
    kernel = z @ z.T
    eta = rate * len(z) / float(torch.linalg.eigvalsh(kernel)[-1])
    matrix = Spectrum.of(kernel) if loss == "mse" else kernel
    s = residual_sum(matrix, z @ w, y, z @ h, learning_rate=eta, local_steps=steps, loss=loss)
    return w + eta * (z.T @ s / len(z) + steps * h), s, eta


STEPS = [("mse", m, rate) for m in (1, 7, 500) for rate in (1e-12, 0.3, 2.0, 2.5)]
STEPS += [("cross-entropy", m, rate) for m in (1, 40) for rate in (0.5, 3.0)]


@pytest.mark.parametrize(("loss", "steps", "rate"), STEPS)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_closed_form_and_dual_are_the_loop_on_the_weights(shape, loss, steps, rate):
    """To 1e-11, whatever the size: at a rate of 2.5 and M = 500 residuals reach 1.5^500 = 1e88.

    An eigenvalue's relative error of 1e-15 is raised to the 500th power: 1e-12. For cross-entropy
    the same arithmetic in another order, 1e-10: softmax' has norm at most 1/2, so that a rate of 3
    is within the bound 4 of gradient descent, and no step expands errors.
    """
    z, w, y, h = problem(shape)
    tolerance = 1e-11
    if loss == "cross-entropy":
        y, h, tolerance = y + 1 / 3, 0.1 * h, 1e-10
    fast, s, eta = closed(z, w, y, h, rate, steps, loss)
    slow, total = looped_steps(z, w, y, h, learning_rate=eta, local_steps=steps, loss=loss)
    assert relative(s, total) < tolerance
    assert relative(fast, slow) < tolerance


def test_a_spectrum_is_the_squared_singular_values_where_it_fits(monkeypatch):
    """16 of 24 eigenvalues of tripled examples are 0, none is below; 5 x 8 x 24^2 bytes."""
    z, *_ = problem("repeated")
    for size in (5 * 8 * 24**2 - 1, 5 * 8 * 24**2):
        monkeypatch.setattr(ntk_memory, "available_memory", lambda device, size=size: size)
        if size % 2:
            refused("for 24 examples needs .*fewer ex", Spectrum.of, z @ z.T, error=NotEnoughMemory)
    actual = Spectrum.of(z @ z.T)
    expected = np.linalg.svd(z.numpy(), compute_uv=False)[::-1] ** 2
    np.testing.assert_allclose(actual.values, expected, rtol=1e-12, atol=1e-12)
    assert float(actual.values.min()) >= 0
    assert actual.rate(0.3) == pytest.approx(0.3 * np.linalg.norm(z, 2) ** 2 / 24, rel=1e-12)


def exact_sums(a, steps):
    """phi_1 and phi_2 by their definition, summed as fractions of whole numbers."""
    a, first, second, power, partial = map(Fraction, (a, 0, 0, 1, 0))
    for _ in range(steps):
        first += power
        second += partial  # (1 - (1 - a)^m) / a = sum of (1 - a)^j over j < m
        partial += power
        power *= 1 - a
    return first, second


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 60])
def test_geometric_sums_against_exact_arithmetic(steps):
    """Over 14 powers of ten, both sides of the switches at M a = 1e-2 and a = 0.5, and above 2.

    phi_2 = (M - phi_1) / a loses the digits that M a / 2 is short of 1: at the switch 200 times
    float64's 1e-16, 5e-14 with the rounding of phi_1. It is compared with M (M - 1) / 2, or with
    itself where steps grow.
    """
    switch = 1e-2 / steps
    grid = [10.0**k for k in range(-14, 0)]
    for a in (switch, 0.5, 1.0, 2.0):
        grid += [math.nextafter(a, 0), a, math.nextafter(a, 9)]
    grid += [0.0, 0.99 * switch, 1.01 * switch, 0.3, 0.7, 1.3, 1.7, 1.99, 2.01, 2.5, 7.0]
    firsts, seconds = geometric_sums(torch.tensor(grid, dtype=torch.float64), steps)
    for a, first, second in zip(grid, firsts.tolist(), seconds.tolist(), strict=True):
        one, two = exact_sums(a, steps)
        assert abs(Fraction(first) - one) <= 2e-14 * max(1, abs(one)), a
        assert abs(Fraction(second) - two) <= 1e-13 * max(1, abs(two)), a


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_loss_and_a_step_are_torchs_loss_and_its_gradient(loss):
    """With eta = 1 and h = 0 a step subtracts the gradient; h is added to it, times eta."""
    z, w, y, h = problem("wide")
    y = y + 1 / 3
    leaf = w.clone().requires_grad_()
    squares = ((z @ leaf - y) ** 2).sum() / (2 * len(z))
    value = squares if loss == "mse" else functional.cross_entropy(z @ leaf, y)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert convex_loss(z @ w, y, loss) == pytest.approx(value.item(), rel=1e-13)
    after, total = looped_steps(z, w, y, 0 * h, learning_rate=1, local_steps=1, loss=loss)
    torch.testing.assert_close(w - after, gradient, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(-z.T @ total / 9, gradient, rtol=1e-12, atol=1e-13)
    after, _ = looped_steps(z, w, y, h, learning_rate=0.3, local_steps=1, loss=loss)
    torch.testing.assert_close(w - after, 0.3 * (gradient - h), rtol=1e-12, atol=1e-13)


def test_unknown_losses_and_the_wrong_kernel_are_refused():
    z, w, y, h = problem("wide")
    for kernel, loss, words, error in (
        (z @ z.T, "mse", "Spectrum", TypeError),
        (Spectrum.of(z @ z.T), "cross-entropy", "matrix", TypeError),
        (z @ z.T, "hinge", "loss: expected one of mse, cross-entropy, got 'hin", ValueError),
    ):
        options = {"learning_rate": 0.1, "local_steps": 2, "loss": loss, "error": error}
        refused(words, residual_sum, kernel, z @ w, y, z @ h, **options)


SIZES, MIXING = (5, 9, 14), normal(8, 12, seed=99) / 12**0.5
# clients of different sizes and targets; more examples than the rank of 8: no exact fit
CLIENTS = [
    (normal(n, 8, seed=k) @ MIXING, normal(n, 3, seed=10 + k) + k) for k, n in enumerate(SIZES)
]


def mean_of(models):
    return sum(n / sum(SIZES) * model for n, model in zip(SIZES, models, strict=True))


def algorithm_1(start, eta, steps, rounds):
    """Yield theta^{t+1} and the h_k^t: the paper's words, gradients from autograd."""
    theta = start
    h = [torch.zeros_like(theta) for _ in CLIENTS]
    last = [theta for _ in CLIENTS]
    for _ in range(rounds):
        for k, (z, y) in enumerate(CLIENTS):
            h[k] = h[k] + (theta - last[k]) / (steps * eta)  # eq. (2)
            local = theta
            for _ in range(steps):
                leaf = local.clone().requires_grad_()
                value = ((z @ leaf - y) ** 2).sum() / (2 * len(z))
                local = local - eta * (torch.autograd.grad(value, leaf)[0] - h[k])  # eq. (3)
            last[k] = local
        theta = mean_of(last)
        yield theta, list(h)


def method(start, eta, steps, rounds):
    """Yield the same by what clients keep, c_k = -Z_k^T A_k, and c from two models."""
    theta, before, options = start, start, {"learning_rate": eta, "local_steps": steps}
    spectra = [Spectrum.of(z @ z.T) for z, _ in CLIENTS]
    c = [torch.zeros_like(start) for _ in CLIENTS]
    for _ in range(rounds):
        control = mean_gradient(before, theta, steps * eta)
        h = [gradient - control for gradient in c]
        c = []
        for spectrum, (z, y), drift in zip(spectra, CLIENTS, h, strict=True):
            s = residual_sum(spectrum, z @ theta, y, z @ drift, **options)
            c.append(-z.T @ s / (len(z) * steps))
        local = [theta - eta * steps * (a - b) for a, b in zip(c, h, strict=True)]
        before, theta = theta, mean_of(local)
        yield theta, h


def test_rounds_are_algorithm_1_and_keep_its_invariant():
    """10 rounds of 20 steps from random weights: the same models and h_k to 1e-11.

    So h_k^{t+1} = c_k^{t+1} - c^{t+1} (appendix A.1), and the h_k have mean 0.
    """
    task = normal(12, 3, seed=5), 0.05, 20, 10
    for expected, (theta, h) in zip(algorithm_1(*task), method(*task), strict=True):
        torch.testing.assert_close((theta, h), expected, rtol=1e-11, atol=1e-11)
        assert float(mean_of(h).abs().max()) < 1e-12
    assert float(h[0].norm()) > 0.1


def test_rounds_reach_the_minimum_norm_least_squares_of_all_examples():
    """Features have rank 8 of 12, the start is 0; no client's own gradient is 0 there."""
    z, y = (torch.cat(parts) for parts in zip(*CLIENTS, strict=True))
    solution = torch.linalg.pinv(z, rtol=1e-10) @ y
    *_, (reached, _) = method(torch.zeros_like(solution), 0.2, 20, 600)
    assert relative(reached, solution) < 1e-8


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 10.0])
def test_ridge_regression_solves_the_primal_normal_equations(shape, ridge):
    """(Z^T Z + rho I) W = Z^T Y with rho = ridge trace(K) / n.

    In the dual, what Y has in K's null space is divided by rho before Z^T takes it out: rounding is
    1e-16 / ridge.
    """
    z, _, y, _ = problem(shape)
    kernel = z @ z.T
    before = kernel.clone()
    w = z.T @ ridge_regression(kernel, y, ridge)
    assert torch.equal(kernel, before)
    rho = ridge * float(kernel.trace()) / len(z)
    primal = torch.linalg.solve(z.T @ z + rho * torch.eye(z.shape[1], dtype=z.dtype), z.T @ y)
    assert relative(w, primal) < 1e-11 + 1e-14 / ridge


def test_ridge_must_be_above_zero_and_large_enough():
    """A kernel of ones has eigenvalues 0: 1e-300 of its diagonal is lost in float64."""
    y = torch.zeros(4, 2)
    for ridge in (0, -1.0, math.nan):
        words = f"ridge: expected more than 0, got {ridge}"
        refused(words, ridge_regression, torch.eye(4), y, ridge)
    refused(r"ridge = 1e-300 is too small.*raise it", ridge_regression, torch.ones(4, 4), y, 1e-300)
    assert torch.equal(ridge_regression(torch.zeros(4, 4), y, 1.0), y.double())


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_the_bias_starts_where_the_joint_loss_has_no_gradient(loss):
    """Beside features of mean 0, least squares have none at b for any W, cross-entropy at W = 0.

    Of cross-entropy the start is for one example more of each class, so it is finite.
    """
    counts = np.array([60, 0, 3, 1])
    labels = torch.from_numpy(np.repeat(np.arange(4), counts + (loss != "mse")))
    targets = centred_targets(one_hot(labels, 4).double(), loss)
    z = normal(len(labels), 5, seed=0)
    z, w = z - z.mean(0), normal(5, 4, seed=1) * (loss == "mse")
    b = torch.from_numpy(best_bias(counts, loss)).double()
    left = residual(z @ w + b, targets, loss)
    torch.testing.assert_close(left.mean(0), torch.zeros(4).double(), rtol=0, atol=1e-6)
