"""TCTModel against the prediction written out, and its files."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn

from fedntk.ntk import FeatureMap, Normaliser, TCTModel

from ...conftest import refused
from ..arithmetic import normal

CLASSES = 3
FILE = "tct.safetensors"


def network(width=4):
    """With BatchNorm's buffers, one of which counts, moved from their defaults."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * width, CLASSES),
        )  # fmt: skip
        for _ in range(3):
            model.train()(2 + torch.randn(8, 1, 6, 6))
    return model


X = normal(11, 1, 6, 6, seed=1).float()


def model(*, bias=False, kind="entk", num_features=50):
    feature_map = FeatureMap(kind, num_features, seed=3)
    net = network()
    width = feature_map.width(net)
    shapes = (width,), (width,), (width + bias, CLASSES)
    *sides, linear = (normal(*s, seed=i).float().numpy() for i, s in enumerate(shapes, start=2))
    return TCTModel(net, feature_map, Normaliser(*sides), linear)


OPTIONS = [{}, {"kind": "last-layer", "bias": True}, {"num_features": 0, "bias": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_scores_are_features_normalised_times_w_plus_b_in_any_chunks(options):
    """In chunks of 1, 2, 5, all examples, or of fewer bytes than one has, against float64.

    Features are right to 1e-6 of their size, and up to 105 are added: 1e-4.
    """
    tct = model(**options)
    z = tct.feature_map.extractor(network().double())(X.double()).double().numpy()
    width = z.shape[1]
    tilde = (z - tct.normaliser.mean) * tct.normaliser.inv_std
    expected = tilde @ tct.linear[:width].double().numpy()
    if options.get("bias"):
        expected = expected + tct.linear[width].numpy()
    for count, chunks in ((0, 11), (1, 11), (2, 6), (5, 3), (100, 1)):
        size = 4 * width * count + 3
        parts = list(tct.features(X, chunk_bytes=size))
        assert len(parts) == chunks
        np.testing.assert_allclose(torch.cat(parts), tilde, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(tct.predict(X, chunk_bytes=size), expected, rtol=1e-4, atol=1e-4)
    assert tct.predict(X[:0]).shape == (0, CLASSES)


@pytest.mark.parametrize(
    ("mean", "scale", "linear", "message"),
    [
        (49, 50, (50, 3), r"normaliser: expected 50 features.*got \(49,\) and \(50,\)"),
        (50, 50, (49, 3), r"linear: expected 50 rows, or 51 with a bias, got \(49, 3\)"),
        (50, 50, (50,), r"got \(50,\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(mean, scale, linear, message):
    normaliser = Normaliser(np.zeros(mean, "f4"), np.ones(scale, "f4"))
    with pytest.raises(ValueError, match=message):
        TCTModel(network(), FeatureMap(num_features=50), normaliser, np.zeros(linear, "f4"))


@pytest.mark.parametrize("options", OPTIONS)
def test_files_and_a_strategys_arrays_give_the_same_bits(options, tmp_path):
    """Arrays may be read-only; the network given stays as it is."""
    tct, other = model(**options), network()
    for tensor in other.state_dict().values():
        tensor.zero_()
    arrays = {name: t.numpy() for name, t in tct.network.state_dict().items()}
    arrays |= {"tct.linear": tct.linear.numpy(), "tct.mean": tct.normaliser.mean}
    arrays |= {"tct.scale": tct.normaliser.inv_std}
    arrays = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    tct.save(tmp_path / "a" / "b")
    loaded = TCTModel.load(tmp_path / "a" / "b", other)
    for actual in (loaded, TCTModel.from_arrays(other, tct.feature_map, arrays)):
        assert torch.equal(actual.predict(X), tct.predict(X))
        counter = actual.network[1].num_batches_tracked
        assert (counter.dtype, counter.item()) == (torch.int64, 3)
    assert loaded.feature_map == tct.feature_map
    assert not any(t.any() for t in other.state_dict().values())


def described(**change):
    def damage(folder):
        arrays = load_file(folder / FILE)
        with safe_open(folder / FILE, framework="numpy") as file:
            old = json.loads(file.metadata()["fedntk"])
        if change.pop("without_mean", False):
            del arrays["tct.mean"]
        save_file(arrays, folder / FILE, {"fedntk": json.dumps(old | change)})

    return damage


def cut(folder):
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[: int(0.9 * len(data))])


WIDER = r"another network: it differs in 0\.weight, 0\.bias, 1\.weight, 1\.bias, 1\.running_mean$"


@pytest.mark.parametrize(
    ("damage", "other", "message"),
    [
        (cut, network(), "no TCT model that can be read: "),
        (described(**{"feature-kind": "x"}), network(), "features: expected one of"),
        (described(**{"num-features": 51}), network(), "expected 51 features"),
        (described(without_mean=True), network(), "differs in its linear model"),
        (described(), network(width=5), WIDER),
        (described(), nn.Sequential(*network(), nn.Linear(3, 3)), r"in 5\.weight, 5\.bias$"),
    ],
)
def test_files_that_give_no_model_are_refused(damage, other, message, tmp_path):
    model().save(tmp_path)
    damage(tmp_path)
    refused(message, TCTModel.load, tmp_path, other)
