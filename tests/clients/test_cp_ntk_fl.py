"""CPNTKFLClient: each tool of section 4.2 does what it says, alone and together."""

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from fedntk.clients import (
    CPNTKFLClient,
    NTKFLClient,
    SealedProjection,
    SGDClient,
    get_weights,
    project,
)
from fedntk.ntk import CentredInputs, CompressedUpload, UploadLimits, one_hot
from fedntk.trust import SEALED_SEED, KeyServer, SealError, ShufflingServer, new_key

from .keys import enrolled

N = 40
X, Y = torch.randn(N, 2, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3
RUN = "a run"


def network(width=6):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, 3))


def limits(**asked):
    return UploadLimits({name: list(p.shape) for name, p in network().named_parameters()}, **asked)


def parsed(arrays, **asked):
    return CompressedUpload.from_arrays(arrays.records["arrays"], limits(**asked))


def fit(round_number=1, width=6, config=None, kind=CPNTKFLClient, **options):
    model = network(width)
    client = kind(model, X, Y, **options)
    config = {"server-round": round_number, **(config or {})}
    return client, client.fit(get_weights(model), config)


def test_without_tools_it_sends_what_ntk_fl_sends():
    _, (plain, *told) = fit(kind=NTKFLClient)
    _, (arrays, *own_told) = fit()
    for name, array in parsed(arrays).to_arrays().items():
        assert array.tobytes() == plain.records["arrays"][name].tobytes()
    assert own_told == told


# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize(("rate", "size"), [(0.001, 1), (0.3, 12), (0.99, 40)])
def test_a_sample_has_its_size_and_candidates_are_compared_on_it(rate, size):
    client, (arrays, count, _) = fit(sampling_rate=rate)
    sent = parsed(arrays)
    expected = float(nn.functional.cross_entropy(sent.outputs, sent.targets.argmax(1)))
    stacked = [np.stack([w, w]) for w in get_weights(client.model)]
    answer = client.query(stacked, {"server-round": 1})
    assert answer["num-examples"] == count == size
    assert answer["losses"] == pytest.approx([expected] * 2)


def test_samples_are_the_rounds_and_the_partitions_and_draw_every_example_equally_often():
    """Of 400 rounds a quarter: 100 +- 8.7 each; 5 deviations allowed."""
    client, other = (fit(sampling_rate=0.25, seed=(3, k))[0] for k in (7, 8))
    counts, drawn = torch.zeros(N), []
    for server_round in [*range(400), 1]:
        x, targets = client.training_examples({"server-round": server_round})
        drawn.append(torch.cdist(x.flatten(1), X.flatten(1)).argmin(1))
        assert torch.equal(targets, one_hot(Y, 3)[drawn[-1]])
        assert len(drawn[-1].unique()) == 10
        counts[drawn[-1]] += server_round != 1
    assert torch.equal(drawn[1], drawn[-1])
    assert not torch.equal(drawn[1], drawn[2])
    x, _ = other.training_examples({"server-round": 1})
    assert not torch.equal(x, client.training_examples({"server-round": 1})[0])
    assert (counts - 100).abs().max() < 5 * 8.7


# -------------------------------------------------------------------- projection


SEED = KeyServer(bytes(range(32)), [], Ed25519PrivateKey.generate()).projection_seed(RUN)


@pytest.fixture
def party():
    """Keys of an enrolled client, and a message's configuration."""
    keys, sealed = enrolled()
    return keys, {SEALED_SEED: sealed}


@pytest.mark.parametrize("kind", [CPNTKFLClient, SGDClient])
def test_a_client_with_a_projection_is_one_of_projected_examples(party, kind):
    """It trains, evaluates and compares candidates on the same; FedAvg's client, too."""
    keys, config = party
    options = {"sampling_rate": 0.5, "seed": (1, 2)}
    own = {"projection": SealedProjection(4, keys), "config": config, "kind": kind}
    client, (sent, *told) = fit(width=4, **own, **options)
    plain = kind(network(4), project(X, 4, SEED), Y, **options)
    weights, first = get_weights(network(4)), {"server-round": 1}
    expected, *expected_told = plain.fit(weights, first)
    assert (len(plain.inputs), told) == (N, expected_told)
    assert [a.tobytes() for a in sent] == [a.tobytes() for a in expected]
    assert client.evaluate(weights, config) == plain.evaluate(weights, {})
    if kind is CPNTKFLClient:
        stacked = [w[None] for w in weights]
        assert client.query(stacked, config | first) == plain.query(stacked, first)
    assert set(client.get_properties({})) == {"public-key", "challenge"}
    assert plain.get_properties({}) == {}
    with pytest.raises(SealError, match="give the strategy key_server="):
        client.fit(weights, {})


def test_standardised_inputs_stay_standardised():
    """Variance of 2,000 x 300 features of 784 inputs: standard error below 1 %."""
    x = torch.randn(2000, 784, generator=torch.Generator().manual_seed(0))
    z = project(x, 300, bytes(range(32)))
    assert z.shape == (2000, 300)
    assert float(z.var()) == pytest.approx(1, abs=0.03)


def test_low_frequencies_are_a_rotation_of_one_size_with_the_gaussian_features(party):
    """With all of them norms are kept: features of inputs of variance 1 have variance 1."""
    keys, config = party
    images = torch.randn(50, 1, 3, 2, generator=torch.Generator().manual_seed(0))
    z = SealedProjection(6, keys, "low-frequency")(images, config)
    rows = images.flatten(1)
    assert torch.equal(z, project(images, 6, SEED, "low-frequency"))
    torch.testing.assert_close(z @ z.T, rows @ rows.T, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(z, project(images, 6, SEED))
    fewer = project(images, 3, SEED, "low-frequency")  # sqrt(3/6) of what these keep
    assert float(fewer.norm() ** 2) < float(rows.norm() ** 2) / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((4, "low-frequency"), "expected images of shape .* use the Gaussian"),
        ((4, "low"), "expected the kind gaussian, low-frequency, got 'low'"),
        ((0,), "projection: expected 1 ... 6 features"),
        ((7,), "projection: expected 1 ... 6 features"),
    ],
)
def test_projections_that_cannot_be_are_refused_when_the_client_is_made(party, options, message):
    features, *kind = options
    x = X.flatten(1)
    with pytest.raises(ValueError, match=message):
        CPNTKFLClient(network(), x, Y, projection=SealedProjection(features, party[0], *kind))


# ---------------------------------------------------------- compression and sealing


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_an_upload_is_compressed_as_asked(structure):
    _, (arrays, _, _) = fit(sparsity=0.5, bits=6, structure=structure)
    _, (plain, _, _) = fit(structure=structure)
    received = parsed(arrays, sparsity=0.5, bits=6)
    assert ('"dense"' in received.jacobian.layout) == (structure == "dense")
    assert sum(a.nbytes for a in arrays) < 0.5 * sum(a.nbytes for a in plain)


def test_a_sealed_upload_opens_only_for_the_shuffling_server_and_no_loss_comes_with_it():
    server = ShufflingServer()
    tools = {"sparsity": 0.5, "bits": 6, "sampling_rate": 0.5, "run": RUN}
    sent = [
        fit(round_number=3, shuffling_key=server.public_key, seed=(0, p), **tools)[1]
        for p in range(2)
    ]
    assert [told for _, *told in sent] == [[20, {}]] * 2
    blobs = [arrays.records["arrays"]["sealed"].tobytes() for arrays, *_ in sent]
    place = {"limits": limits(sparsity=0.5, bits=6), "run": RUN, "server_round": 3}
    assert server.shuffle(blobs, **place).accepted == 2
    stranger = ShufflingServer().shuffle(blobs, **place)
    assert [bad.reason for bad in stranger.rejected.values()] == ["sealed", "sealed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 17}, "bits: expected"),
        ({"noise_multiplier": 1.0}, "takes clip and noise_multiplier above 0"),
        ({"clip": 1.0}, "takes clip and noise_multiplier above 0"),
        ({"label_noise": 0.5}, "takes clip and noise_multiplier above 0"),
        ({"shuffling_key": bytes(3), "run": RUN}, "expected the 32 raw bytes of an X25519 key"),
        ({"shuffling_key": new_key().public_key().public_bytes_raw()}, "run: expected a name"),
    ],
)
def test_tools_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CPNTKFLClient(network(), X, Y, **options)


# ------------------------------------------------------------- differential privacy

DP = {"clip": 1.0, "noise_multiplier": 2.0, "label_noise": 0.5}


def test_noise_comes_from_the_system_unless_a_seed_is_given():
    def sent(round_number=1, **options):
        return fit(round_number, **DP, **options)[1][0].records["arrays"]["outputs"].tobytes()

    assert sent() != sent()
    seeded = [sent(noise_seed=(1, 2)), sent(noise_seed=(1, 3)), sent(2, noise_seed=(1, 2))]
    assert len(set(seeded)) == 3
    assert sent(noise_seed=(1, 2)) == seeded[0]


def test_a_private_client_tells_nothing_else_of_its_training_examples():
    client, (_, _, metrics) = fit(**DP)
    assert metrics == {"noise-multiplier": 2.0, "label-noise": 0.5}
    weights, centred = get_weights(client.model), CentredInputs(network(), X.shape[1:])
    shuffled = CPNTKFLClient(centred, X, Y, shuffling_key=bytes(range(32)), run=RUN)
    for ask, message in (
        (lambda: client.query([w[None] for w in weights], {}), "use selection='linearised'"),
        (lambda: client.evaluate(weights, {}), "give the client test examples"),
        (lambda: client.input_sums({}), "have the strategy leave centre_inputs out"),
        (lambda: shuffled.input_sums({}), "by which shuffled rows can be told apart"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
    tested = CPNTKFLClient(network(), X, Y, x_test=X[:5], y_test=Y[:5], **DP)
    assert tested.evaluate(weights, {})[1] == 5
