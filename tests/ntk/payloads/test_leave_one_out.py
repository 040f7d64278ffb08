"""Clients left out of the kernel: equal to fresh regressions; malicious ones are found."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedntk import ntk
from fedntk.ntk.evolution.candidates import trimmed_losses
from fedntk.ntk.payloads.leave_one_out import POWER, RIDGE, ClientRidge, screen_harmful
from fedntk.ntk.payloads.screening import screen_strangers

from ...conftest import refused

with torch.random.fork_rng(devices=[]):
    torch.default_generator.manual_seed(0)
    MODEL = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    CENTRES = 3 * torch.randn(3, 6).double()
SIZES = [19, 24, 21, 30, 22, 26]


def upload(client, *, shift=0, scale=1.0, first=0, classes=3, noise=1.0, draw=0):
    """Examples of some of three classes around their centres; `shift` moves labels."""
    generator = torch.Generator().manual_seed(client + 100 * draw)
    y = (first + torch.randint(classes, (SIZES[client],), generator=generator)) % 3
    x = CENTRES[y] + noise * torch.randn(len(y), 6, generator=generator).double()
    blocks = ntk.jacobian(MODEL, x).blocks  # the last factor: derivatives by a layer's outputs
    jac = ntk.Jacobian(tuple(b.with_arrays([*b.arrays[:-1], scale * b.arrays[-1]]) for b in blocks))
    targets = ntk.one_hot((y + shift) % 3, 3).double()
    return ntk.JacobianUpload(jac, MODEL(x).detach(), targets)


def mapped(sent, change):
    return replace(sent, jacobian=sent.jacobian.mapped(change))


def uploads(malicious=(), **changes):
    return [upload(k, **(changes if k in malicious else {})) for k in range(len(SIZES))]


def dropped(sent, malicious, **options):
    return [
        k for k, bad in enumerate(screen_harmful(sent, malicious, **options)) if bad is not None
    ]


def loss_without(sent, client, left_out):
    """Mean squared error on a client's examples, from a fresh regression on the others'."""
    others = ntk.JacobianUpload.concatenate(
        [part for k, part in enumerate(sent) if k not in {client, *left_out}]
    )
    part = sent[client]

    def kernel(one, other):
        norms = one.squared_norms()[:, None] * other.squared_norms()
        return (one.gram(other) * one.num_outputs / norms.sqrt()) ** POWER

    ridge = (
        kernel(others.jacobian, others.jacobian) + RIDGE * torch.eye(len(others.targets)).double()
    )
    learned = torch.linalg.solve(ridge, others.targets - 1 / 3)
    errors = part.targets - 1 / 3 - kernel(part.jacobian, others.jacobian) @ learned
    return errors.square().sum(1).clamp(max=2).mean()


@pytest.mark.parametrize("gone", [(), (4,), (1, 4)])
def test_harm_is_that_of_fresh_regressions_on_the_others_examples(gone):
    """In float64: condition numbers are at most 142 / 0.01, 1e-10 is 30 times their rounding."""
    sent = uploads([2], shift=1)
    regression = ClientRidge.of(sent)
    for client in gone:
        regression = regression.without(client)
    for client in {0, 2, 3} - set(gone):
        others = set(range(len(sent))) - {client, *gone}
        expected = [
            loss_without(sent, k, gone) - loss_without(sent, k, (*gone, client)) for k in others
        ]
        assert abs(regression.harm(client) - sum(expected) / len(expected)) < 1e-10


def test_false_labels_are_found_and_the_honest_stay():
    assert dropped(uploads(), 2) == []
    assert dropped(uploads([3], shift=1), 1) == [3]
    assert dropped(uploads([3], shift=1), 2) == [3]  # no more than do harm
    assert dropped(uploads([0, 3], shift=2), 2) == [0, 3]  # who agree with each other


@pytest.mark.parametrize("draw", range(6))
def test_noisy_clients_with_two_classes_of_three_stay_beside_a_malicious_one(draw):
    """The honest do harm of up to 0.09, the other at least 0.2; their own losses are below 0.43.

    A fixed limit of 0.01 that is found on cleaner examples drops an honest one in all draws but 4.
    """
    noisy = {"classes": 2, "noise": 2.0, "draw": draw}
    sent = [upload(k, first=k, **noisy) for k in range(len(SIZES))]
    assert dropped(sent, 2) == []
    sent[3] = upload(3, first=3, shift=1, **noisy)
    assert dropped(sent, 2) == [3]


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_scaled_jacobians_of_false_labels_are_found_like_others(scale):
    assert dropped(uploads([1, 5], shift=1, scale=scale), 2) == [1, 5]


def test_the_order_of_clients_and_rows_without_derivatives_change_no_verdict():
    sent = uploads([3], shift=1)
    assert dropped(sent[::-1], 1) == [2]
    silent = mapped(sent[1], torch.zeros_like)
    assert dropped([sent[0], silent, *sent[2:]], 1) == [3]


def test_a_client_that_trusts_itself_finds_the_malicious_one_among_one_or_most_of_its_neighbours():
    """Without trust there is no telling which of two is false."""
    pair = [upload(0), upload(3, shift=1)]
    assert dropped(pair, 1) == []
    assert dropped(pair, 1, trusted=1) == [1]
    most = [upload(3), upload(0, shift=1), upload(2, shift=1), upload(5)]
    assert dropped(most, 2, trusted=1) == [1, 2]


def test_a_kernel_that_is_not_finite_is_refused():
    first, *others = uploads()
    sent = [mapped(first, lambda array: 1e200 * array), *others]
    refused("not finite", screen_harmful, sent, 1, error=FloatingPointError)


def test_strangers_lose_far_more_than_most_on_the_own_examples():
    """Limits: 3 times the median or 3; one neighbour is compared with the client itself."""
    actual = screen_strangers([0.5, 2.9, 3.1, 0.4, 0.6, math.inf])
    assert [bad is None for bad in actual] == [True, True, False, True, True, False]
    assert [bad is None for bad in screen_strangers([0.5, 1e6])] == [True, False]
    assert screen_strangers([9.0, 2.0, 10.0]) == [None] * 3


def test_a_minority_does_not_choose_by_its_losses():
    """The largest and smallest loss are cut for each of them; few losses leave their median."""
    losses = [np.array(part) for part in ([1.0, 0.5], [1.2, 0.4], [0.0, 90.0], [1.4, math.nan])]
    assert trimmed_losses(losses[:3], 1) == trimmed_losses(losses[:3], 2) == [1.0, 0.5]
    assert trimmed_losses(losses, 1) == pytest.approx([1.1, 45.25])
    assert trimmed_losses([*losses, np.array([1.1, 0.6])], 1) == pytest.approx([1.1, 91.1 / 3])
    assert trimmed_losses([], 1) == []
