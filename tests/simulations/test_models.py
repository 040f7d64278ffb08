"""The papers' networks, a pre-trained one of torchvision's, and one array under two names."""

import math
import re
import sys
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights, resnet18

from fedntk.simulations import Config, load_model, load_predictor, run
from fedntk.simulations.data.load import load_data
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.methods import own_methods
from fedntk.simulations.models import CharLSTM, build_model

from ..conftest import ROOT
from .outcomes import measured, refused
from .settings import tiny

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


@pytest.mark.parametrize("groups", [1, 2, 32])
def test_each_group_of_channels_is_normalised_by_itself(groups):
    """Torchvision's network with torch's GroupNorm, to the bit; 32 groups by default.

    A layer against float64: sums of at most 1,024 numbers in float32, 1,024 * 6e-8 < 1e-4.
    """
    config = Config(model="resnet18", norm="group", **({} if groups == 32 else {"groups": groups}))
    ours = build_model(config, (3, 8, 8), 10).eval()
    theirs = resnet18(num_classes=10, norm_layer=partial(nn.GroupNorm, groups)).eval()
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    theirs.load_state_dict(ours.state_dict())
    generator = torch.Generator().manual_seed(0)
    x, maps = (torch.randn(shape, generator=generator) for shape in ((2, 3, 8, 8), (2, 64, 4, 4)))
    assert torch.equal(ours(x), theirs(x))
    by_group = maps.double().unflatten(1, (groups, -1)).flatten(2)
    spread = (by_group.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = ((by_group - by_group.mean(2, keepdim=True)) / spread).view_as(maps)
    torch.testing.assert_close(ours.layer1[0].bn1(maps).double(), expected, rtol=0, atol=1e-4)


def test_networks_from_imagenet_keep_all_but_the_last_layer(monkeypatch):
    """Weights that stand in for torchvision's, and seven classes."""
    there = resnet18(weights=None)
    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", lambda *_, **__: there.state_dict())
    shape, name = (3, 32, 32), "fedntk.simulations.models:imagenet_"
    whole, last = (
        build_model(Config(model=name + m), shape, 7) for m in ("resnet18", "last_layer")
    )
    for network in (whole, last):
        assert torch.equal(network.conv1.weight, there.conv1.weight)
        assert network.fc.out_features == 7
    trained = [key for key, p in last.named_parameters() if p.requires_grad]
    assert trained == ["fc.weight", "fc.bias"]
    assert all(p.requires_grad for p in whole.parameters())


def test_mlp_starts_kaiming_normal_with_zero_biases():
    """Standard deviation sqrt(2 / 784) from 78,400 draws: four standard errors are 1.01 %."""
    weights = build_model(Config(), (1, 28, 28), 10).state_dict()
    assert float(weights["1.weight"].std()) == pytest.approx(math.sqrt(2 / 784), rel=0.0102)
    assert not torch.cat([weights["1.bias"], weights["3.bias"]]).any()


@pytest.mark.parametrize("init", ["he", "xavier"])
def test_first_weights_by_a_rule_that_does_not_depend_on_the_layers(init):
    """They follow only the seed; global generators play no part, and stay as they are."""

    def first_weights(init, seed):
        config, state = Config(model="lenet", init=init, seed=seed), torch.get_rng_state()
        drawn = build_model(config, (1, 28, 28), 10).state_dict()
        assert torch.equal(state, torch.get_rng_state())
        torch.rand(1)
        return drawn

    drawn, plain = first_weights(init, 0), first_weights("default", 0)
    same, other = first_weights(init, 0), first_weights(init, 1)
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
    options = {"model": "digits-cnn", "width": 64, "fed_ensemble": {"init": "network"}}
    strategy = make_strategy(load_setup(Config(method="fed-ensemble", **options)))
    first, *others, again = (strategy.init(k).state_dict() for k in (0, 1, 2, 3, 4, 1))
    for name, array in first.items():
        assert torch.equal(others[0][name], again[name])
        for model in (first, *others) if array.ndim > 1 else ():
            assert float(model[name].abs().max()) <= array[0].numel() ** -0.5 + 1e-6
            assert sum(torch.equal(model[name], other[name]) for other in (first, *others)) == 1


@pytest.mark.parametrize("method", ["afl", "fed3r", "fed-ncm", "one-exchange"])
def test_a_last_layer_of_random_features_is_computed_and_read_again(tmp_path, method):
    """The layer changes, and nothing else; the run's predictor makes the same features."""
    options = {"random_features": 60, "width": 20, "out": str(tmp_path)}
    config = Config(method=method, rounds=1, **options)
    result, data = run(config, progress=False), load_data(config)
    before = build_model(config, (1, 8, 8), 10).state_dict()
    after = load_file(result.folder / "model.safetensors")
    changed = {name for name, array in before.items() if not torch.equal(array, after[name])}
    assert changed == {"3.1.weight", "3.1.bias"}
    accuracy = load_predictor(result.folder).evaluate(data.x_test, data.y_test).accuracy
    assert accuracy == pytest.approx(result.summary["accuracy"], abs=1e-3)
    assert accuracy > 0.4  # a tenth by chance


def test_safle_without_limits_learns_the_bits_of_afl(tmp_path):
    """With them the run's predictor has the codes, whose limits lie where the features are."""
    first, second, third = (
        run(Config(rounds=1, width=20, out=str(tmp_path / name), **options), progress=False)
        for name, options in {
            "afl": {"method": "afl"},
            "none": {"method": "safle", "safle": {"limits": 0}},
            "some": {"method": "safle", "safle": {"limits": 2, "ridge": 0.1}},
        }.items()
    )
    afl, none, some = (load_file(r.folder / "model.safetensors") for r in (first, second, third))
    assert afl.keys() == none.keys()
    assert all(torch.equal(afl[name], none[name]) for name in afl)
    assert (some["3.0.limits"].diff(dim=1) > 0).any()
    data = load_data(Config(method="safle"))
    accuracy = load_predictor(third.folder).evaluate(data.x_test, data.y_test).accuracy
    assert accuracy == pytest.approx(third.summary["accuracy"], abs=1e-3)
    assert accuracy > 0.4  # a tenth by chance


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"model": "vgg"}, (3, 32, 32), "model: expected mlp, .*, scattering, or your own as"),
        ({"model": "math:nothing"}, (4,), "math has no nothing"),
        ({"model": "lenet"}, (1, 8, 8), "model = lenet: .* at least 16 x 16"),
        ({"model": "two-patch-cnn"}, (3, 60), r"expected examples of shape \(2, d\) and 2 classes"),
        ({"model": THREE_CLASSES}, (4,), r"outputs of shape \(n, 4\), .* got \('n', 3\)"),
        ({"model": "resnet18", "norm": "group", "groups": 5}, (3, 8, 8), "groups: .* of 64, .* 5"),
        ({"projection": 65}, (1, 8, 8), "projection: expected at most 64, the numbers in an ex"),
        ({"model": "char-lstm", "centre": True}, (5,), "char-lstm: fails .* centred by"),
    ],
)
def test_networks_that_do_not_fit_are_refused(options, shape, message):
    refused(message, build_model, Config(**options), shape, 4)


def test_weights_of_a_centred_run_serve_only_a_centred_network(tmp_path):
    centred = Config(centre=True, width=7, seed=1)
    saved = build_model(centred, (5,), 3).state_dict() | {"centre": torch.ones(5)}
    save_file(saved, tmp_path / "model.safetensors")
    config = centred.replace(weights=str(tmp_path / "model.safetensors"), seed=2)
    built = build_model(config, (5,), 3).state_dict()
    assert not built.pop("centre").any()  # every run asks its own clients
    assert all(torch.equal(array, saved[name]) for name, array in built.items())
    for changes, message in (
        ({"centre": False}, "mean taken off; set centre = true"),
        ({"width": 8}, "not of this network, which has also"),
    ):
        refused(message, build_model, config.replace(**changes), (5,), 3)


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a pattern for each of three classes, and noise a tenth as large: grey, 20 x 20."""
    patterns = np.random.default_rng(0).standard_normal((3, 1, 20, 20))
    noise = np.random.default_rng([1, seed]).standard_normal((count, 1, 20, 20))
    y = np.arange(count) % 3
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
    (x, y), (x_test, y_test) = images(12, 0), images(3, 1)
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
    linear = torch.linalg.pinv(z) @ torch.eye(3).double()[torch.from_numpy(y)]
    torch.testing.assert_close(
        z @ learned["body.fc.weight"].double().T, z @ linear, rtol=0, atol=1e-4
    )
    assert float((batch - z).norm() / z.norm()) > 0.1  # the running statistics matter


class Named(nn.Linear):
    """Returns its scores by name."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)}


def test_a_network_that_returns_no_tensor_is_refused_by_name():
    message = r"one tensor of scores \(n, C\), got a dict; wrap it"
    refused(message, build_model, Config(model=Named(6, 3)), (6,), 3)


def test_scores_of_a_char_lstm_are_those_of_the_last_state():
    model = CharLSTM((5,), 7, width=4)
    x = torch.randint(0, 7, (3, 5))
    _, (last, _) = model.lstm(model.embedding(x))
    assert torch.equal(model(x.float()), model.head(last[1]))


# ------------------------------------------------------------------- tied weights

X = np.random.default_rng(0).normal(size=(150, 6)).astype(np.float32)
Y = X[:, :3].argmax(1)


class Second(nn.Module):
    """A layer with a bias; its weights are another's."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))


class Net(nn.Module):
    """Uses one matrix twice, which is an array of both layers if it is `tied`; one BatchNorm."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.second, self.head = nn.Linear(6, 6) if tied else Second(), nn.Linear(6, 3)
        if tied:
            self.second.weight, self.same_norm = self.first.weight, self.norm

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = nn.functional.linear(hidden, self.first.weight, self.second.bias)
        return self.head(torch.relu(hidden))


def network(*, tied: bool) -> Net:
    made, generator = Net(tied=tied), torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return made


def untied(name: str) -> str:
    """Return the name of an array's only place in the network that is not tied."""
    return name.replace("second.weight", "first.weight").replace("same_norm.", "norm.")


@pytest.mark.parametrize("method", sorted(own_methods()))
def test_a_tied_network_learns_the_bits_of_one_with_a_shared_array(method, tmp_path):
    """All names hold the same numbers, in what is learned and in what is loaded.

    Distances between clients count an array under each of its names; so do the first weights that
    Fed-ensemble draws for each model, which then differ from those of the other network.
    """
    outcomes = []
    for tied in (False, True):
        folder, model = tmp_path / str(tied), network(tied=tied)
        result = run(tiny(method), data=(X, Y), model=model, out=folder, progress=False)
        rounds = measured(result, "seconds|memory|bytes|deviation").to_csv()
        outcomes.append((load_model(folder), rounds, load_predictor(result, client=0).predict(X)))
    (plain, rounds, scores), (model, tied_rounds, tied_scores) = outcomes
    assert {untied(name) for name in model} == plain.keys()
    assert any(untied(name) != name for name in model)
    for name, array in model.items():
        np.testing.assert_array_equal(array, model[untied(name)], err_msg=name)
    if method != "fed-ensemble":
        assert tied_rounds == rounds
        assert torch.equal(tied_scores, scores)
        for name, array in plain.items():
            np.testing.assert_array_equal(model[name], array, err_msg=name)


def test_a_file_may_hold_an_array_under_one_of_its_names(tmp_path):
    """As safetensors writes them, which keeps one name of each array."""
    model, path = network(tied=True), tmp_path / "weights.safetensors"
    save_model(model, str(path))
    config = Config(model=Net(tied=True), weights=str(path))
    built = build_model(config, (6,), 3).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(built[name], tensor)


def test_two_parameters_over_one_memory_are_refused_before_the_run(tmp_path):
    model = network(tied=False)
    model.head.weight.data = model.first.weight.data[:3]
    for form in (model, lambda *_: model):
        options = {"data": (X, Y), "model": form, "out": tmp_path, "progress": False}
        refused(r"but head\.weight shares memory", run, tiny("fedavg"), **options)
