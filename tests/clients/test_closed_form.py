"""ClosedFormClient: sums of the features by the received weights, and what it refuses."""

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import ClosedFormClient, GLMClient, MaskedSums, SAFLeClient, get_weights
from fedntk.ntk import FeatureMap, with_overlap_codes
from fedntk.ntk.features import feature_map
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.newton_sums import NewtonTask
from fedntk.ntk.payloads.sum_task import SumTask

from ..conftest import refused
from ..strategies.federation import examples, network


def config(**options):
    return {**FeatureMap("last-layer", **options).to_config(), **SumTask().to_config()}


def client(**options):
    return ClosedFormClient(network(), *examples(3), **options)


def test_sums_are_of_the_received_weights_in_chunks(monkeypatch):
    """Products in float64, of float32 features: 1e-6 for those of other chunks."""
    monkeypatch.setattr(feature_map, "check_once", lambda _: lambda _: None)
    _, y = examples(3)
    with torch.no_grad():
        z = network(1).eval()[:3](examples(3)[0]).double().numpy()
    received = get_weights(network(1))
    own, passed = client(batch_size_eval=3), []
    note = own.model[0].register_forward_hook  # copied with the network
    note(lambda _, inputs, __: passed.append(len(inputs[0])))
    arrays, count, metrics = own.fit(received, config())
    assert sum(passed) == len(y)  # each example passes once
    gram, sums, counts = (arrays.records["arrays"][n] for n in ("gram", "class-sums", "counts"))
    actual = FeatureStatistics(gram, sums, counts, np.ones(3))
    np.testing.assert_allclose(actual.matrix(), z.T @ z, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sums, np.eye(3)[y].T @ z, rtol=1e-6, atol=1e-6)
    assert counts.tolist() == torch.bincount(y, minlength=3).tolist()
    assert count == len(y)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(network(1).eval()(examples(3)[0]), y)
    assert metrics == {"train-loss": pytest.approx(float(loss), rel=1e-6)}


@pytest.mark.parametrize("real", [False, True])
def test_sums_for_a_step_of_newton_are_derivatives_of_the_deviance(real):
    """By autograd, in float64, at the received weights: -1/2 and 1/2 of the first and second."""
    x, y = examples(3)
    family, targets = ("gaussian", x[:, :2] * 3) if real else ("multinomial", y)
    model, number = nn.Linear(x.shape[1], 2 if real else 3).double(), 2
    client = GLMClient(
        model,
        x.double(),
        targets,
        batch_size_eval=3,
        **({"loss": "mse"} if real else {}),
        real_targets=real,
    )
    told = FeatureMap("last-layer").to_config() | NewtonTask(family=family).to_config()
    arrays, count, _ = client.fit(get_weights(model), told)
    rows = torch.cat([x.double(), torch.ones(len(x), 1).double()], 1)
    layer = torch.cat([model.weight.detach().T, model.bias.detach()[None]])

    def deviance(flat):
        eta = rows @ flat.reshape(number, -1).T
        if real:
            return (targets - eta).square().sum()
        scores = torch.cat([torch.zeros(len(x), 1), eta], 1)
        return 2 * nn.functional.cross_entropy(scores, y, reduction="sum")

    at = (layer if real else layer[:, 1:] - layer[:, :1]).T.flatten()
    gradient = -torch.autograd.functional.jacobian(deviance, at).reshape(number, -1).T / 2
    hessian = torch.autograd.functional.hessian(deviance, at) / 2
    size = rows.shape[1] * (1 if real else number)
    sums = arrays.records["arrays"]
    np.testing.assert_allclose(sums["gradient"], gradient, rtol=1e-12, atol=1e-12)
    triangle = hessian[:size, :size][np.triu_indices(size)]
    np.testing.assert_allclose(sums["hessian"], triangle, rtol=1e-12, atol=1e-12)
    assert count == len(y)
    other = NewtonTask(family="multinomial" if real else "gaussian").to_config()
    refused("real_targets: expected", client.fit, get_weights(model), told | other)


def test_a_sample_of_the_examples_is_drawn_if_wanted():
    arrays, count, _ = client(sampling_rate=0.5).fit(get_weights(network()), config())
    assert count == 4 == arrays[2].sum()


def test_a_layer_that_does_not_give_the_logits_is_refused():
    text = "head: the last linear layer has 8 outputs and the net"
    refused(text, client().fit, get_weights(network()), config(head="0"))


def test_moments_are_of_the_codes_inputs_by_the_received_weights():
    """Chunks of three examples; joined in float64, of float32 features."""
    coded, received = (with_overlap_codes(network(seed), 1, 5, 0) for seed in (0, 1))
    with torch.no_grad():
        z = received.eval()[:3](examples(3)[0]).double().numpy()
    own = SAFLeClient(coded, *examples(3), batch_size_eval=3)
    told = own.query(get_weights(received), config())
    np.testing.assert_allclose(told["mean"], z.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(told["sum-sq-dev"], len(z) * z.var(0), rtol=1e-5, atol=1e-6)
    assert told["num-examples"] == len(z)
    assert not coded[3][0]._forward_pre_hooks


def test_moments_of_a_network_without_codes_and_of_a_private_client_are_refused():
    x, y = examples(3)
    plain = SAFLeClient(network(), x, y)
    refused("network: expected OverlapCodes", plain.query, get_weights(network()), config())
    coded = with_overlap_codes(network(), 1, 5, 0)
    private = SAFLeClient(coded, x, y, secure=MaskedSums(only_masked=True))
    refused("this client promises", private.query, get_weights(coded), config())
