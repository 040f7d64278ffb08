"""An ensemble's probabilities and its uncertainty: identities that hold for any models."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from fedntk import ntk

from ..conftest import refused

K, C, N = 5, 4, 40
EPS = 2.0**-24  # half a unit in the last place of float32, relative


def drawn(seed, *shape, scale=2.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, C))


def cnn():
    """With BatchNorm, whose running statistics are other than 0 and 1."""
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5),
        nn.Flatten(), nn.Linear(16, C),
    )  # fmt: skip
    network[1].running_mean.normal_()
    network[1].running_var.uniform_(0.5, 2)
    return network


X = drawn(0, N, 1, 6, 6)


def members(make=mlp, count=K):
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        return [ntk.NetworkPredictor(make()) for _ in range(count)]


def probabilities():
    """Random rows in float64 that add up to 1: some nearly certain, some of exact zeros."""
    p = drawn(0, K, N, C, scale=4.0).double().softmax(-1)
    p[0, 0] = torch.eye(C, dtype=torch.float64)[0]
    return p


@pytest.mark.parametrize("make", [mlp, cnn])
def test_probabilities_are_the_mean_of_the_models(make):
    """Against a pass of each model in float64 through NumPy.

    The ensemble's float32 is off by the roundings of the outputs, sums of at most 36 products of
    numbers below 20, and of exp and log: within 36 x 20 x EPS of the logarithms, twice for the
    sum of the exponentials.
    """
    ensemble = ntk.EnsemblePredictor(members(make))
    expected = np.zeros((N, C))
    for member in ensemble.models:
        exact = copy.deepcopy(member.network).double().eval()
        logits = exact(X.double()).detach().numpy()
        assert np.abs(logits).max() < 20
        raised = np.exp(logits - logits.max(1, keepdims=True))
        expected += raised / raised.sum(1, keepdims=True) / K
    actual = ensemble.predict(X)
    bound = 2 * 36 * 20 * EPS
    np.testing.assert_allclose(actual.numpy(), np.log(expected), rtol=0, atol=bound)
    of_models = ensemble.probabilities(X)
    assert of_models.shape == (K, N, C)
    assert (of_models.double().sum(-1) - 1).abs().max() < C * 4 * EPS
    np.testing.assert_allclose(of_models.double().mean(0), expected, rtol=0, atol=bound)


def test_certain_models_have_finite_scores():
    """Outputs of 1e4: probabilities of 0 in float32, and a mean of logarithms would be -5e3."""
    scores = torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]])
    actual = ntk.EnsemblePredictor(members(count=2)).together(scores)
    torch.testing.assert_close(actual, torch.full((1, 2), 0.5).log(), rtol=0, atol=2 * EPS)


def test_one_model_is_itself():
    (one,) = members(count=1)
    ensemble = ntk.EnsemblePredictor([one])
    assert torch.equal(ensemble.predict(X), one.predict(X).log_softmax(1))
    assert torch.equal(ensemble.uncertainty(X).mutual_information, torch.zeros(N))


def test_entropy_and_variance_are_split_into_those_of_the_models_and_those_between_them():
    """Mutual information by its definition: the mean divergence of a model from the mean.

    By the law of total variance, that of the one-hot label of a model drawn at random, added over
    the classes, 1 - sum of the squares of the mean, is 1 - sum p_k^2 within a model and `variance`
    between them.
    """
    p = probabilities()
    actual = ntk.uncertainty_of(p)
    mean = p.numpy().mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = p.numpy() * (np.log(p.numpy()) - np.log(mean))
    divergence = np.nan_to_num(terms).sum(-1).mean(0)
    np.testing.assert_allclose(actual.mutual_information, divergence, rtol=0, atol=1e-14)
    parts = actual.expected_entropy + actual.mutual_information
    np.testing.assert_allclose(actual.entropy, parts, rtol=0, atol=1e-14)
    within = (1 - p.square().sum(-1)).mean(0)
    total = 1 - p.mean(0).square().sum(-1)
    torch.testing.assert_close(total, within + actual.variance, rtol=0, atol=1e-14)


def test_models_certain_of_different_classes_disagree_most():
    """C models, one for each class: log C nats, no entropy in each, variance 1 - 1/C."""
    p = torch.eye(C, dtype=torch.float64)[:, None].expand(C, N, C)
    actual = ntk.uncertainty_of(p)
    assert torch.equal(actual.expected_entropy, torch.zeros(N, dtype=torch.float64))
    np.testing.assert_allclose(actual.entropy, math.log(C), rtol=1e-14)
    np.testing.assert_allclose(actual.mutual_information, math.log(C), rtol=1e-14)
    np.testing.assert_allclose(actual.variance, 1 - 1 / C, rtol=1e-14)


def test_evaluation_is_that_of_the_mean_and_tells_of_the_single_models():
    """NLL by hand in float64; float32 scores are off as in the test of the probabilities."""
    ensemble = ntk.EnsemblePredictor(members())
    y = torch.arange(N) % C
    actual = ensemble.evaluate(X, y)
    p = np.stack([m.predict(X).double().softmax(1).numpy() for m in ensemble.models])
    accuracies = (p.argmax(2) == y.numpy()).mean(1)
    mean = p.mean(0)
    assert actual.loss == pytest.approx(-np.log(mean[np.arange(N), y]).mean(), abs=8 * 20 * EPS)
    assert actual.accuracy == (mean.argmax(1) == y.numpy()).mean()
    uncertain = ntk.uncertainty_of(torch.from_numpy(p))
    assert actual.more == pytest.approx(
        {
            "model-accuracy-max": accuracies.max(),
            "model-accuracy-mean": accuracies.mean(),
            "model-accuracy-min": accuracies.min(),
            "model-entropy-mean": float(uncertain.expected_entropy.mean()),
            "mutual-information": float(uncertain.mutual_information.mean()),
        },
        rel=1e-12,
    )
    own_entropy = float(ensemble.uncertainty(X).expected_entropy.mean())  # of float32
    assert own_entropy == pytest.approx(actual.more["model-entropy-mean"], rel=1e-5)
    # by Jensen's inequality the mean's NLL is at most the models' mean NLL
    assert actual.loss < np.mean([m.evaluate(X, y).loss for m in ensemble.models])


def tct(loss="mse", seed=2):
    width = ntk.FeatureMap().width(mlp())
    linear = drawn(seed, width, C, scale=1.0) / width
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        network = mlp()
    parts = network, ntk.FeatureMap(), ntk.Normaliser.identity(width)
    return ntk.TCTModel(*parts, linear.numpy(), loss=loss)


def test_models_of_both_losses_count_as_of_cross_entropy():
    """The softmax of all scores, those of least squares too."""
    mixed = ntk.EnsemblePredictor([*members(count=1), tct("mse")])
    assert mixed.loss == "cross-entropy"
    expected = torch.stack([m.predict(X).softmax(1) for m in mixed.models]).mean(0).log()
    torch.testing.assert_close(mixed.predict(X), expected, rtol=0, atol=8 * EPS * 4)


def test_the_mean_of_least_squares_is_that_of_outputs_and_has_no_entropy():
    ensemble = ntk.EnsemblePredictor([tct("mse"), tct("mse", 3)])
    assert ensemble.loss == "mse"
    expected = (ensemble.models[0].predict(X) + ensemble.models[1].predict(X)) / 2
    torch.testing.assert_close(ensemble.predict(X), expected, rtol=0, atol=0)
    for call in (ensemble.probabilities, ensemble.uncertainty):
        refused("expected models with cross-entropy, got mse", call, X)


def test_models_of_several_kinds_are_saved_together(tmp_path):
    one = ntk.EnsemblePredictor([*members(count=2), tct("mse"), tct("cross-entropy", 3)])
    one.save(tmp_path)
    loaded = ntk.EnsemblePredictor.load(tmp_path, mlp())
    kinds, expected = ([(type(m), m.loss) for m in each.models] for each in (loaded, one))
    assert kinds == expected
    assert torch.equal(loaded.scores(X), one.scores(X))


@pytest.mark.parametrize("text", ["", "{}", '{"kinds": ["Other"]}', '{"kinds": 3}'])
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "ensemble.json").write_text(text)
    refused("describes no ensemble", ntk.EnsemblePredictor.load, tmp_path, mlp())


def test_what_cannot_be_is_refused():
    refused("members: expected at least one model", ntk.EnsemblePredictor, [])
    with pytest.raises(ValueError, match="at least one example and as many labels"):
        ntk.EnsemblePredictor(members()).evaluate(X, torch.zeros(3).long())
