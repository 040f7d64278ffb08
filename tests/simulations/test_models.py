"""The papers' networks, and a pre-trained one of torchvision's, as the page on AFL says."""

import math
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models import resnet18

from fedntk.simulations import Config, ConfigError, load_predictor, run
from fedntk.simulations.data.load import load_data
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.models import build_model
from fedntk.simulations.report.results import load_model

from ..conftest import ROOT
from .outcomes import refused

THREE_CLASSES = "tests.simulations.networks:three_classes"
LENET = 456 + 2416 + 576 * 120 + 120 + 120 * 84 + 84 + 850
BATCH_NORMS = 2 * (64 + 64 + 128 + 128 + 2048 + 512)
DIGITS = 76 * 64 + 1601 * 64 + 1601 * 128 + 3201 * 128 + 6273 * 2048 + 2049 * 512 + 5130
DIGITS_CNN = DIGITS + BATCH_NORMS
CNN = 32 * 9 + 32 + 64 * 32 * 9 + 64 + 3136 * 128 + 128 + 1290


@pytest.mark.parametrize(
    ("options", "shape", "parameters"),
    [
        ({"model": "mlp", "width": 7}, (5,), 5 * 7 + 7 + 7 * 10 + 10),
        ({"model": "simple-cnn"}, (1, 28, 28), CNN),
        ({"model": "lenet"}, (3, 32, 32), LENET),
        ({"model": "lenet-bn"}, (3, 32, 32), LENET + 2 * (6 + 16)),
        ({"model": "digits-cnn", "width": 512}, (3, 28, 28), DIGITS_CNN),
        ({"model": "scattering"}, (3, 28, 20), 3 * 81 * 7 * 5 * 10 + 10),
        ({"model": "scattering", "random_features": 30}, (1, 8, 8), 310),
        ({"model": "resnet18"}, (3, 32, 32), 11_173_962),
        ({"model": "resnet18", "norm": "group"}, (1, 28, 28), 11_173_962 - 2 * 64 * 9),
    ],
)
def test_networks_have_their_size_and_one_output_for_each_class(options, shape, parameters):
    """ResNet-18 for CIFAR-10 (3 x 3 stem, 10 classes) is known to have 11,173,962 parameters."""
    model = build_model(Config(**options), shape, 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.randn(2, *shape)).shape == (2, 10)
    if options["model"] == "resnet18":
        kinds = {type(module) for module in model.modules()}
        grouped = "norm" in options
        assert (nn.GroupNorm in kinds, nn.BatchNorm2d in kinds) == (grouped, not grouped)


def test_mlp_starts_kaiming_normal_with_zero_biases():
    """Standard deviation sqrt(2 / 784) from 78,400 draws: four standard errors are 1.01 %."""
    weights = build_model(Config(), (1, 28, 28), 10).state_dict()
    assert float(weights["1.weight"].std()) == pytest.approx(math.sqrt(2 / 784), rel=0.0102)
    assert not torch.cat([weights["1.bias"], weights["3.bias"]]).any()


@pytest.mark.parametrize("init", ["he", "xavier"])
def test_first_weights_by_a_rule_that_does_not_depend_on_the_layers(init):
    """They follow only the seed; global generators play no part, and stay as they are."""
    config, state = Config(model="lenet", init=init), torch.get_rng_state()
    drawn = build_model(config, (1, 28, 28), 10).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(1)
    plain, same, other = (
        build_model(Config(model="lenet", init=own, seed=seed), (1, 28, 28), 10).state_dict()
        for own, seed in (("default", 0), (init, 0), (init, 1))
    )
    for name, array in drawn.items():
        assert torch.equal(array, same[name])
        if array.ndim < 2:
            assert torch.equal(array, plain[name])
            continue
        fan_out, fan_in = (array.shape[i] * array[0, 0].numel() for i in (0, 1))
        variance = 2 / fan_in if init == "he" else 2 / (fan_in + fan_out)
        # four standard deviations of the sample variance of normal draws; uniform ones vary less
        assert float(array.var()) == pytest.approx(variance, rel=4 * math.sqrt(2 / array.numel()))
        assert not torch.equal(other[name], array)


def test_models_can_be_drawn_as_the_networks_layers_draw_them():
    """Torch's are uniform within 1 / sqrt(fan_in) of zero, which normal ones would soon leave."""
    own = {"init": "network"}
    config = Config(method="fed-ensemble", model="digits-cnn", width=64, fed_ensemble=own)
    strategy = make_strategy(load_setup(config))
    first, *others, again = (strategy.init(k).state_dict() for k in (0, 1, 2, 3, 4, 1))
    for name, array in first.items():
        assert torch.equal(others[0][name], again[name])
        for own in (first, *others) if array.ndim > 1 else ():
            assert float(own[name].abs().max()) <= array[0].numel() ** -0.5 + 1e-6
            assert sum(torch.equal(own[name], other[name]) for other in (first, *others)) == 1


@pytest.mark.parametrize("expand", ["fourier", "buckets"])
@pytest.mark.parametrize("method", ["afl", "fed3r", "fed-ncm", "one-exchange"])
def test_a_last_layer_of_random_features_is_computed_and_read_again(tmp_path, method, expand):
    """The layer changes, and nothing else; the run's predictor makes the same features."""
    own = {"random_features": 60, "expand": expand, "width": 20, "out": str(tmp_path / "a")}
    config = Config(method=method, rounds=1, **own)
    done = run(config, progress=False)
    before = build_model(config, (1, 8, 8), 10).state_dict()
    after = load_file(done.folder / "model.safetensors")
    changed = {name for name, own in before.items() if not torch.equal(own, after[name])}
    assert changed == {"3.1.weight", "3.1.bias"}
    data = load_data(config)
    found = load_predictor(done.folder).evaluate(data.x_test, data.y_test).accuracy
    assert found == pytest.approx(done.summary["accuracy"], abs=1e-3)
    assert found > 0.4  # a tenth by chance


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        (
            {"model": "vgg"},
            (3, 32, 32),
            "model: expected mlp, .* lenet-bn, .*, scattering, or your own as",
        ),
        ({"model": "math:nothing"}, (4,), "math has no nothing"),
        ({"model": "lenet"}, (1, 8, 8), "model = lenet: .* at least 16 x 16"),
        ({"model": "two-patch-cnn"}, (3, 60), r"expected examples of shape \(2, d\) and 2 classes"),
        ({"model": THREE_CLASSES}, (4,), r"outputs of shape \(n, 4\), .* got \('n', 3\)"),
        ({"random_features": 6, "expand": "buckets"}, (5,), "random-features: .* multiple of .*6"),
        ({"projection": 65}, (1, 8, 8), "projection: expected at most 64, the numbers in an ex"),
        ({"model": "char-lstm", "centre": True}, (5,), "char-lstm: fails .* centred by"),
    ],
)
def test_networks_that_do_not_fit_are_refused(options, shape, message):
    refused(message, build_model, Config(**options), shape, 4)


def test_weights_of_a_centred_run_serve_only_a_centred_network(tmp_path):
    centred = Config(centre=True, width=7, seed=1)
    kept = build_model(centred, (5,), 3).state_dict() | {"centre": torch.ones(5)}
    save_file(kept, tmp_path / "model.safetensors")
    given = centred.replace(weights=str(tmp_path / "model.safetensors"), seed=2)
    found = build_model(given, (5,), 3).state_dict()
    assert not found.pop("centre").any()  # every run asks its own clients
    assert all(torch.equal(array, kept[name]) for name, array in found.items())
    with pytest.raises(ConfigError, match="mean taken off; set centre = true"):
        build_model(given.replace(centre=False), (5,), 3)
    refused("not of this network, which has also", build_model, given.replace(width=8), (5,), 3)


CLASSES = 3


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a pattern for each class, and noise a tenth as large: grey, 20 x 20."""
    patterns = np.random.default_rng(0).standard_normal((CLASSES, 1, 20, 20))
    noise = np.random.default_rng([1, seed]).standard_normal((count, 1, 20, 20))
    y = np.arange(count) % CLASSES
    return (patterns[y] + 0.1 * noise).astype(np.float32), y


def test_afl_is_least_squares_on_its_features_by_the_running_statistics(tmp_path, monkeypatch):
    """Against torchvision's own network in evaluation mode, on images that its factory would make.

    The page's function stands beside the file of weights in this very folder. 12 images have 512
    features: the solution of least norm, whose scores of these images are the labels. The last
    layer is float32; an output is a sum of 512 products of it, so 1e-4.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = resnet18()
        for module in body.modules():
            if isinstance(module, nn.BatchNorm2d):  # unlike the statistics of any batch
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
    page = (ROOT / "docs" / "methods" / "afl.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    (tmp_path / "pretrained.py").write_text(code, encoding="utf-8")
    save_file(body.state_dict(), tmp_path / "resnet18.safetensors")
    (x, y), (x_test, y_test) = images(12, 0), images(CLASSES, 1)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(
        dataset="npz:own.npz", model="pretrained:network", partition="pathological",
        classes_per_client=1, class_assignment="first-deterministic", num_clients=3,
        clients_per_round=3, clients_per_evaluation=0, rounds=1, method="afl",
        out=str(tmp_path / "run"),
    )  # fmt: skip
    result = run(config, progress=False)
    sys.modules.pop("pretrained", None)
    assert result.summary["accuracy"] == 1.0
    learned = {name: torch.from_numpy(array) for name, array in load_model(result.folder).items()}
    for name, tensor in body.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(learned[f"body.{name}"], tensor)
    body.fc = nn.Identity()
    scaled = torch.from_numpy((x - x.mean()) / x.std())
    larger = nn.functional.interpolate(scaled, size=(64, 64), mode="bilinear").expand(-1, 3, -1, -1)
    with torch.no_grad():
        z = body.eval()(larger).double()
        batch = body.train()(larger).double()
    linear = torch.linalg.pinv(z) @ torch.eye(CLASSES).double()[torch.from_numpy(y)]
    torch.testing.assert_close(
        z @ learned["body.fc.weight"].double().T, z @ linear, rtol=0, atol=1e-4
    )
    assert float((batch - z).norm() / z.norm()) > 0.1  # the running statistics matter


class Named(nn.Linear):
    """Returns its scores by name."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)}


def test_a_network_that_returns_no_tensor_is_refused_by_name():
    config = Config(model=Named(6, 3))
    with pytest.raises(ConfigError, match=r"one tensor of scores \(n, C\), got a dict; wrap it"):
        build_model(config, (6,), 3)
