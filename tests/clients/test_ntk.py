"""NTKFLClient sends what section 4.1 says; each tool of section 4.2 does what it says."""

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from fedntk.clients import CPNTKFLClient, NTKFLClient, SealedProjection, get_weights, project
from fedntk.ntk import (
    CentredInputs,
    CompressedUpload,
    JacobianUpload,
    UploadLimits,
    jacobian,
    loss_value,
    one_hot,
)
from fedntk.trust import (
    SEALED_SEED,
    ClientKeys,
    KeyServer,
    SealError,
    ShufflingServer,
    new_key,
    public_bytes,
)

from ..conftest import refused
from ..strategies.federation import network as small
from ..trust.uploads import rows
from .problem import X, Y, raw

N = 40
IMAGES = torch.randn(N, 2, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) % 3
RUN, FIRST = "a run", {"server-round": 1}
KEY = new_key()
SERVER = KeyServer(bytes(range(32)), [public_bytes(KEY)], Ed25519PrivateKey.generate())
KEYS = ClientKeys(KEY, run=RUN, verify_key=SERVER.verify_key, state={})
SEED = SERVER.projection_seed(RUN)
SEALED = SERVER.sealed_seed(public_bytes(KEY), KEYS.request()["challenge"], RUN)


def network(width=6):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, 3))


WEIGHTS = get_weights(network())
SHAPES = {name: list(p.shape) for name, p in network().named_parameters()}


def client(**options):
    return CPNTKFLClient(network(), IMAGES, LABELS, **options)


def projected(*choice):
    return lambda: {"projection": SealedProjection(choice[0], KEYS, *choice[1:])}


def upload_in(arrays):
    return CompressedUpload.from_arrays(arrays.records["arrays"], UploadLimits(SHAPES))


@pytest.mark.parametrize(("rate", "size"), [(0.001, 1), (0.3, 12), (0.99, 40)])
def test_a_sample_has_its_size_and_candidates_are_compared_on_it(rate, size):
    own = client(sampling_rate=rate)
    sent = upload_in(own.fit(WEIGHTS, FIRST)[0])
    expected = float(nn.functional.cross_entropy(sent.outputs, sent.targets.argmax(1)))
    answer = own.query([np.stack([w, w]) for w in WEIGHTS], FIRST)
    assert answer["num-examples"] == len(sent.outputs) == size
    assert answer["losses"] == pytest.approx([expected] * 2)


def test_samples_are_the_rounds_and_the_partitions_and_draw_every_example_equally_often():
    """Of 400 rounds a quarter: 100 +- 8.7 each; 5 deviations allowed."""
    numbered = torch.arange(float(N)).view(N, 1, 1).expand(N, 2, 3)
    own, other = (
        CPNTKFLClient(network(), numbered, LABELS, sampling_rate=0.25, seed=(3, k)) for k in (7, 8)
    )

    def drawn(own, server_round):
        x, targets = own.training_examples({"server-round": server_round})
        positions = x[:, 0, 0].long()
        assert torch.equal(targets, one_hot(LABELS, 3)[positions])
        return positions.tolist()

    samples = [drawn(own, server_round) for server_round in range(400)]
    assert {len(set(sample)) for sample in samples} == {10}
    assert samples[1] == drawn(own, 1)
    assert samples[1] not in (samples[2], drawn(other, 1))
    assert np.abs(np.bincount(np.concatenate(samples), minlength=N) - 100).max() < 5 * 8.7


def test_a_client_with_a_projection_is_one_of_projected_examples():
    """It trains, evaluates and compares candidates on the same."""
    options = {"sampling_rate": 0.5, "seed": (1, 2)}
    own = CPNTKFLClient(network(4), IMAGES, LABELS, projection=SealedProjection(4, KEYS), **options)
    plain = CPNTKFLClient(network(4), project(IMAGES, 4, SEED), LABELS, **options)
    weights, config = get_weights(network(4)), {**FIRST, SEALED_SEED: SEALED}
    (sent, *told), (expected, *expected_told) = own.fit(weights, config), plain.fit(weights, FIRST)
    assert told == expected_told
    assert raw(sent) == raw(expected)
    assert own.evaluate(weights, config) == plain.evaluate(weights, {})
    stacked = [w[None] for w in weights]
    assert own.query(stacked, config) == plain.query(stacked, FIRST)
    refused("give the strategy key_server=", own.fit, weights, {}, error=SealError)


def test_projections_keep_the_variance_of_inputs():
    """Of 500 x 100 Gaussian features of 784 inputs: standard error below 1 %.

    All low frequencies are a rotation of the image, and keep its norm.
    """
    x = torch.randn(500, 784, generator=torch.Generator().manual_seed(0))
    assert float(project(x, 100, SEED).var()) == pytest.approx(1, abs=0.03)
    images = IMAGES[:, None]
    z = SealedProjection(6, KEYS, "low-frequency")(images, {SEALED_SEED: SEALED})
    pixels = images.flatten(1)
    assert torch.equal(z, project(images, 6, SEED, "low-frequency"))
    torch.testing.assert_close(z @ z.T, pixels @ pixels.T, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(z, project(images, 6, SEED))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (projected(4, "low-frequency"), "expected images of shape .* use the Gaussian"),
        (projected(4, "low"), "expected the kind gaussian, low-frequency, got 'low'"),
        (projected(0), "projection: expected 1 ... 6 features"),
        (projected(7), "projection: expected 1 ... 6 features"),
        (lambda: {"bits": 17}, "bits: expected"),
        (lambda: {"shuffling_key": bytes(3), "run": RUN}, "expected the 32 raw bytes of an X255"),
        (lambda: {"shuffling_key": public_bytes(KEY), "run": RUN}, "private_key: expected the key"),
        (lambda: {"shuffling_key": public_bytes(KEY)}, "run: expected a name"),
    ],
)
def test_what_does_not_go_together_is_refused_when_the_client_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        CPNTKFLClient(network(), IMAGES.flatten(1), LABELS, **options())


def test_a_sealed_upload_opens_only_for_the_shuffling_server_and_no_loss_comes_with_it():
    """Each row is compressed by itself."""
    keys, tools, config = [new_key(), new_key()], {"sparsity": 0.5, "bits": 6}, {"server-round": 3}
    enrolled = [public_bytes(key) for key in keys]
    server = ShufflingServer(enrolled)
    sealing = {"shuffling_key": server.public_key, "run": RUN, "sampling_rate": 0.5}
    clients = [client(seed=(0, k), private_key=keys[k], **sealing, **tools) for k in range(2)]
    sent = [own.fit(WEIGHTS, config) for own in clients]
    assert [told for _, *told in sent] == [[20, {}]] * 2
    blobs = [arrays.records["arrays"]["sealed"].tobytes() for arrays, *_ in sent]
    place = {"limits": UploadLimits(SHAPES, **tools), "run": RUN, "server_round": 3}
    compressed = [
        CompressedUpload.compress(own.upload(WEIGHTS, config), by_row=True, **tools).to_arrays()
        for own in clients
    ]
    expected = [CompressedUpload.from_arrays(own, place["limits"]) for own in compressed]
    pooled = server.shuffle(blobs, **place).upload
    assert rows(pooled) == rows(JacobianUpload.concatenate(expected))
    stranger = ShufflingServer(enrolled).shuffle(blobs, **place)
    assert [bad.reason for bad in stranger.rejected.values()] == ["sealed", "sealed"]


def test_a_client_that_seals_for_shuffling_gives_no_sum_of_its_inputs():
    centred = CentredInputs(network(), IMAGES.shape[1:])
    keys = {"shuffling_key": public_bytes(KEY), "private_key": KEY}
    shuffled = CPNTKFLClient(centred, IMAGES, LABELS, run=RUN, **keys)
    refused("which helps to tell shuffled rows apart", shuffled.input_sums, {})


# ------------------------------------------------------------------ NTK-FL


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_upload_is_jacobian_outputs_and_labels_at_the_received_weights(structure):
    sent = small().eval()
    client = NTKFLClient(small(2), X, Y, structure=structure)
    arrays, count, metrics = client.fit(get_weights(sent), {})
    shapes = {name: p.shape for name, p in sent.named_parameters()}
    upload = JacobianUpload.from_arrays(arrays.records["arrays"], parameters=shapes)
    assert count == 20
    assert torch.equal(upload.targets, one_hot(Y, 3))
    with torch.no_grad():
        assert torch.equal(upload.outputs, sent(X))
    assert ('"linear"' in upload.jacobian.layout) == (structure == "factored")
    actual, expected = upload.jacobian.dense(), jacobian(sent, X).dense()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert metrics["train-loss"] == loss_value(upload.outputs, upload.targets, "cross-entropy")


def test_candidates_of_different_numbers_are_refused():
    first, *others = (np.stack([array, array]) for array in get_weights(small()))
    refused("one number of rows", NTKFLClient(small(), X, Y).query, [first[:1], *others], {})
