"""Predictors: what was learned, the loss and accuracy of clients, files; ensembles' uncertainty."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from fedntk import ntk
from fedntk.clients import ModelClient, get_weights
from fedntk.ntk.convex.local_steps import convex_loss
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.ntk.predictors.network import Predictor, arrays_of

from ..conftest import refused

K, C, N = 5, 3, 2100  # N: two chunks and a part
EPS = 2.0**-24  # half a unit in the last place of float32, relative
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 6, generator=GENERATOR)
Y = torch.randint(C, (N,), generator=GENERATOR)
FEW = X[:40]


def network(width=8, seed=1):
    """With BatchNorm, whose running statistics are other than 0 and 1."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        norm = nn.BatchNorm1d(width)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        return nn.Sequential(
            nn.Linear(6, width), norm, nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, C)
        )


def tct(loss="mse", seed=2):
    width = ntk.FeatureMap().width(network())
    linear = torch.randn(width, C, generator=torch.Generator().manual_seed(seed)) / width
    parts = network(), ntk.FeatureMap(), ntk.Normaliser.identity(width), linear.numpy()
    return ntk.TCTModel(*parts, loss=loss)


def prototypes(**options):
    means = np.random.default_rng(0).random((C, 8), np.float32)
    return ntk.PrototypePredictor(network(), Prototypes(means, np.ones(C, int)), **options)


def ensemble(count=K):
    return ntk.EnsemblePredictor([ntk.NetworkPredictor(network(seed=k)) for k in range(count)])


def mixed():
    members = [ntk.NetworkPredictor(network()), tct("mse"), tct("cross-entropy", 3)]
    return ntk.EnsemblePredictor(members)


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_a_networks_metrics_are_the_bits_of_a_clients(loss):
    client = ModelClient(network(), X, Y, loss=loss)
    value, _, metrics = client.evaluate(get_weights(network()), {})
    predictor = ntk.NetworkPredictor(network(), loss=loss)
    evaluated = predictor.evaluate(X, Y)
    assert (evaluated.loss, evaluated.accuracy) == (value, metrics["accuracy"])
    assert torch.equal(predictor.predict(X), client.outputs(X))


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_tct_has_the_loss_of_its_convex_problem(loss):
    """Least squares against one-hot minus 1/C."""
    model = tct(loss)
    scores = model.predict(X)
    targets = nn.functional.one_hot(Y, C) - (1 / C if loss == "mse" else 0)
    evaluated = model.evaluate(X, Y)
    assert evaluated.loss == pytest.approx(convex_loss(scores, targets, loss), rel=1e-12)
    assert evaluated.accuracy == float((scores.argmax(1) == Y).double().mean())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ntk.NetworkPredictor(network(), loss="mse"),
        lambda: tct("cross-entropy"),
        lambda: prototypes(head="4"),
        mixed,
    ],
)
def test_a_predictor_is_a_module_whose_state_and_files_hold_it(make, tmp_path):
    predictor, other = make(), make()
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1)
    assert isinstance(predictor, Predictor)
    assert not torch.equal(predictor.predict(X), other.predict(X))
    other.load_state_dict(predictor.state_dict())
    assert torch.equal(predictor.predict(X), other.predict(X))
    assert torch.equal(predictor.eval()(X), predictor.predict(X))
    predictor.save(tmp_path)
    loaded = type(predictor).load(tmp_path, network())
    assert torch.equal(loaded.predict(X), predictor.predict(X))
    assert (loaded.loss, loaded.evaluate(X, Y)) == (predictor.loss, predictor.evaluate(X, Y))


def test_a_predictor_keeps_its_own_network():
    """In training, what it is given may change; gradients flow through a call."""
    model = network()
    arrays = {**arrays_of(network()), "more": X.numpy()}
    predictor = ntk.NetworkPredictor.from_arrays(model, arrays)
    before = predictor.predict(X)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(predictor.predict(X), before)
    predictor(X[:5]).sum().backward()
    assert predictor.network[0].weight.grad.abs().sum() > 0
    assert not before.requires_grad


@pytest.mark.parametrize(
    ("make", "file", "content", "message"),
    [
        (ensemble, "model-0/network.safetensors", b"", "no network that can be read"),
        (ensemble, "model-0/network.safetensors", None, "no network that can be read"),
        (prototypes, "prototypes.safetensors", b"nothing", "no prototypes that can be read"),
        *(
            (ensemble, "ensemble.json", text, "describes no ensemble")
            for text in (b"", b"{}", b'{"kinds": ["Other"]}', b'{"kinds": 3}')
        ),
    ],
)
def test_a_damaged_file_is_refused(make, file, content, message, tmp_path):
    make().save(tmp_path)
    path = tmp_path / file
    path.write_bytes(path.read_bytes()[:100] if content is None else content)
    refused(message, type(make()).load, tmp_path, network())
    path.unlink()
    with pytest.raises(FileNotFoundError):
        type(make()).load(tmp_path, network())


def test_another_network_and_no_examples_are_refused(tmp_path):
    ntk.NetworkPredictor(network()).save(tmp_path)
    with pytest.raises(ValueError, match=r"another network: it differs in 0\.weight, 0\.bias"):
        ntk.NetworkPredictor.load(tmp_path, network(width=5))
    for predictor, x, y in ((ensemble(1).models[0], X[:0], Y[:0]), (ensemble(), X, Y[:3])):
        refused("at least one example and as many labels", predictor.evaluate, x, y)
    refused("loss: expected one of", ntk.NetworkPredictor, network(), loss="l1")
    refused("members: expected at least one model", ntk.EnsemblePredictor, [])
    make = ntk.PrototypePredictor, nn.Linear(2, 3)
    refused("expected one of at least one class, got none", *make, Prototypes.none(3, 2))
    refused("expected 3 classes and 2 features", *make, Prototypes.none(3, 5))


def test_a_class_without_a_prototype_is_never_predicted_and_its_loss_is_finite():
    means = np.array([[9.0, 9.0], [0.0, 0.0], [1.0, 1.0]], np.float32)
    predictor = ntk.PrototypePredictor(nn.Linear(2, 3), Prototypes(means, np.array([0, 3, 4])))
    x = torch.tensor([[9.0, 9.0], [0.0, 0.0]])
    scores = predictor.predict(x)
    assert scores.argmax(1).tolist() == [2, 1]
    assert scores[0].tolist() == pytest.approx([-163, -162, -128])
    assert np.isfinite(predictor.evaluate(x, torch.tensor([0, 0])).loss)
    assert predictor(x).tolist() == scores.tolist()


def test_scores_are_distances_to_the_prototypes():
    """Sums of 8 squares in float32: 1e-5."""
    predictor = prototypes()
    with torch.no_grad():
        z = network().eval()[:4](X).double()
    expected = -(z[:, None] - torch.from_numpy(predictor.prototypes.means)).square().sum(2)
    np.testing.assert_allclose(predictor.predict(X), expected, rtol=1e-5, atol=1e-5)


def test_pooled_prototypes_are_those_of_all_examples_together():
    """In float64 and rounded to float32: 1e-6. A class that nobody has stays without."""
    rng = np.random.default_rng(0)
    sets = [(rng.random((n, 5), np.float32), rng.integers(0, 3, n)) for n in (4, 9, 1)]

    def of(x: np.ndarray, y: np.ndarray) -> Prototypes:
        return Prototypes.of(lambda z: z, torch.from_numpy(x), torch.from_numpy(y), 4)

    pooled = Prototypes.pooled([of(x, y) for x, y in sets])
    together = of(*(np.concatenate(parts) for parts in zip(*sets, strict=True)))
    assert pooled.counts.tolist() == together.counts.tolist()
    np.testing.assert_allclose(pooled.means, together.means, rtol=1e-6)
    assert pooled.counts[3] == 0
    assert not pooled.means[3].any()
    before = Prototypes(np.full((4, 5), 7, np.float32), np.full(4, 2))
    after = before.update_from(pooled)
    assert after.counts.tolist() == [*pooled.counts[:3], 2]
    assert (after.means[3] == 7).all()
    assert after.means[:3].tobytes() == pooled.means[:3].tobytes()


def test_an_ensembles_probabilities_and_evaluation_are_those_of_the_mean():
    """Against a pass of each model in float64 through NumPy.

    The ensemble's float32 is off by the roundings of the outputs, sums of at most 8 products of
    numbers below 20, and of exp and log: within 8 x 20 x EPS of the logarithms, twice for the sum
    of the exponentials.
    """
    predictor, y = ensemble(), Y[:40]
    expected = []
    for member in predictor.models:
        logits = copy.deepcopy(member.network).double().eval()(FEW.double()).detach().numpy()
        assert np.abs(logits).max() < 20
        raised = np.exp(logits - logits.max(1, keepdims=True))
        expected.append(raised / raised.sum(1, keepdims=True))
    mean, bound = np.mean(expected, 0), 2 * 8 * 20 * EPS
    np.testing.assert_allclose(predictor.predict(FEW).numpy(), np.log(mean), rtol=0, atol=bound)
    of_models = predictor.probabilities(FEW).double()
    np.testing.assert_allclose(of_models, expected, rtol=0, atol=bound)
    assert (of_models.sum(-1) - 1).abs().max() < C * 4 * EPS

    evaluated = predictor.evaluate(FEW, y)
    accuracies = (np.array(expected).argmax(2) == y.numpy()).mean(1)
    assert evaluated.loss == pytest.approx(-np.log(mean[np.arange(40), y]).mean(), abs=bound)
    assert evaluated.accuracy == (mean.argmax(1) == y.numpy()).mean()
    scores = torch.stack([m.predict(FEW) for m in predictor.models])
    uncertain = ntk.uncertainty_of(scores.double().softmax(2))
    assert evaluated.more == pytest.approx(
        {
            "model-accuracy-max": accuracies.max(),
            "model-accuracy-mean": accuracies.mean(),
            "model-accuracy-min": accuracies.min(),
            "model-entropy-mean": float(uncertain.expected_entropy.mean()),
            "mutual-information": float(uncertain.mutual_information.mean()),
        },
        rel=1e-12,
    )
    in_float32 = float(predictor.uncertainty(FEW).expected_entropy.mean())
    assert in_float32 == pytest.approx(evaluated.more["model-entropy-mean"], rel=1e-5)
    # by Jensen's inequality the mean's NLL is at most the models' mean NLL
    assert evaluated.loss < np.mean([m.evaluate(FEW, y).loss for m in predictor.models])


def test_certain_models_have_finite_scores_and_one_model_is_itself():
    """Outputs of 1e4: probabilities of 0 in float32, and a mean of logarithms would be -5e3."""
    scores = torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]])
    actual = ensemble(2).together(scores)
    torch.testing.assert_close(actual, torch.full((1, 2), 0.5).log(), rtol=0, atol=2 * EPS)
    predictor = ensemble(1)
    expected = predictor.models[0].predict(FEW).log_softmax(1)
    assert torch.equal(predictor.predict(FEW), expected)
    assert torch.equal(predictor.uncertainty(FEW).mutual_information, torch.zeros(40))


def test_entropy_and_variance_are_split_into_those_of_the_models_and_those_between_them():
    """Mutual information by its definition: the mean divergence of a model from the mean.

    By the law of total variance, that of the one-hot label of a model drawn at random, added over
    the classes, 1 - sum of the squares of the mean, is 1 - sum p_k^2 within a model and `variance`
    between them. Rows are nearly certain, some of exact zeros.
    """
    drawn = torch.randn(K, 40, C, generator=torch.Generator().manual_seed(0)).double()
    p = (4 * drawn).softmax(-1)
    p[0, 0] = torch.eye(C, dtype=torch.float64)[0]
    actual, mean = ntk.uncertainty_of(p), p.numpy().mean(0)
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
    actual = ntk.uncertainty_of(torch.eye(C, dtype=torch.float64)[:, None].expand(C, N, C))
    assert torch.equal(actual.expected_entropy, torch.zeros(N, dtype=torch.float64))
    np.testing.assert_allclose(actual.entropy, math.log(C), rtol=1e-14)
    np.testing.assert_allclose(actual.mutual_information, math.log(C), rtol=1e-14)
    np.testing.assert_allclose(actual.variance, 1 - 1 / C, rtol=1e-14)


def test_ensembles_of_least_squares_average_outputs_and_mixed_ones_probabilities():
    least_squares = ntk.EnsemblePredictor([tct("mse"), tct("mse", 3)])
    assert (least_squares.loss, mixed().loss) == ("mse", "cross-entropy")
    first, second = (model.predict(FEW) for model in least_squares.models)
    torch.testing.assert_close(least_squares.predict(FEW), (first + second) / 2, rtol=0, atol=0)
    for call in (least_squares.probabilities, least_squares.uncertainty):
        refused("expected models with cross-entropy, got mse", call, FEW)
    expected = torch.stack([m.predict(FEW).softmax(1) for m in mixed().models]).mean(0).log()
    torch.testing.assert_close(mixed().predict(FEW), expected, rtol=0, atol=8 * EPS * 4)


def test_answers_have_probabilities_and_names():
    """One network has them, and an ensemble, whose probabilities are the means."""
    network, x = nn.Linear(4, 3), torch.randn(5, 4)
    one, other = (ntk.NetworkPredictor(layer) for layer in (network, nn.Linear(4, 3)))
    p = one.predict_proba(x)
    torch.testing.assert_close(p, network(x).double().softmax(1).detach())
    both = ntk.EnsemblePredictor([one, other]).predict_proba(x)
    torch.testing.assert_close(both, (p + other.predict_proba(x)) / 2, atol=1e-6, rtol=0)
    assert one.predict_classes(x) == p.argmax(1).tolist()
    one.inputs = InputTransform((4,), np.zeros(1), np.ones(1), classes=("a", "b", "c"))
    assert one.predict_classes(x) == ["abc"[i] for i in p.argmax(1)]
    refused("cross-entropy", ntk.NetworkPredictor(network, loss="mse").predict_proba, x)
