"""The reconstruction benchmark's attackers do what they are said to do."""

import math

import pytest
import torch

from fedntk.ntk import random_projection

pytest.importorskip("scipy")
pytest.importorskip("skimage")
WIRES = ("dense", "factored")


@pytest.fixture
def attack(program):
    return program("reconstruction")


def seen_by_server(attack, wire, sparsity=0.0):
    """Network, what the server sees of four pictures, and these, standardised."""
    line = torch.linspace(-1, 1, 28)
    down, across = torch.meshgrid(line, line, indexing="ij")
    disc = (down**2 + across**2 < 0.5).float()
    frame = (torch.maximum(down.abs(), across.abs()) > 0.6).float()
    images = torch.stack([disc, frame, (down + 1) / 2, disc * (across + 1) / 2])
    x = (images.flatten(1) - attack.MEAN) / attack.STD
    model = attack.network(x.shape[1], seed=0)
    net = attack.Network.of(model)
    sent = attack.upload(model, x, torch.arange(len(x)), wire)
    tensors = attack.received(model, sent, sparsity, 32)
    seen = [attack.see(tensors, row, sent.outputs[row], net) for row in range(len(x))]
    return net, seen, x.double()


@pytest.mark.parametrize("wire", WIRES)
def test_closed_form_is_exact_without_protection(attack, wire):
    """An entry g x of a float32 Jacobian is rounded once, by 2^-24 at most; the rest is float64."""
    _, seen, x = seen_by_server(attack, wire)
    for one, original in zip(seen, x, strict=True):
        assert ((one.closed - original).abs() <= 2**-23 * original.abs()).all()


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("sparsity", [0.5, 0.99])
def test_what_the_attacker_infers_is_true(attack, wire, sparsity):
    """Numbers that came are right, those that did not are within their bounds (to float32)."""
    net, seen, x = seen_by_server(attack, wire, sparsity)
    for one, original in zip(seen, x, strict=True):
        before = net.w1 @ original + net.b1
        assert (before[one.on] > 0).all()
        assert (before[one.off] <= 0).all()
        got = one.hidden != 0
        assert torch.allclose(one.hidden[got], before[got], rtol=1e-5, atol=1e-5)
        assert (before[~got] <= one.hidden_bound + 1e-5).all()
        known, missing = one.known, original[~one.known]
        assert torch.allclose(one.inputs[known], original[known], rtol=1e-5)
        assert (missing.abs() <= one.bound * (1 + 1e-5)).all()


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
def test_deep_leakage_and_the_adaptive_attack_succeed_without_protection(attack, wire):
    net, seen, x = seen_by_server(attack, wire)
    for row in (0, 3):
        original = attack.pixels(x[row])
        for found in attack.deep_leakage(seen[row], net, seed=0), attack.adaptive(seen[row], net):
            assert attack.ssim(attack.pixels(found), original) > 0.95


def test_projection_hides_the_direction_from_those_without_the_seed(attack):
    """With the seed the angle's cosine is about sqrt(200 / 784); without, the rebuilt image is in
    a uniformly random direction, whose cosine has a standard deviation of 1 / sqrt(784)."""
    x = torch.randn(1, 784, generator=torch.Generator().manual_seed(0)).double()
    matrices = [random_projection(torch.eye(784), 200, seed).double() for seed in range(4)]
    z = x @ matrices[0]
    cosines = [float(torch.cosine_similarity(attack.lifted(z, matrix), x)) for matrix in matrices]
    assert cosines[0] == pytest.approx(math.sqrt(200 / 784), abs=5 / math.sqrt(784))
    assert max(map(abs, cosines[1:])) < 5 / math.sqrt(784)
