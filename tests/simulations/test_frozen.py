import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.simulations import Config, OwnData, load_model, load_predictor, run
from fedntk.simulations.config.settings import ConfigError
from fedntk.simulations.data.data import Data
from fedntk.simulations.data.features import StoredFeatures, features_folder
from fedntk.simulations.data.load import load_own
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.models import build_networks

SIZE, CLASSES, NUM = 12, 3, 60
RIDGE = 1.0
SMALL = {
    "dataset": "digits",
    "num_clients": 4,
    "clients_per_round": 4,
    "clients_per_evaluation": 4,
    "partition": "iid",
    "train_examples": 80,
    "test_examples": 40,
    "rounds": 2,
}
LITE = {"model": "efficientnet-lite0", "image_size": 32}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pictures(num=NUM, channels=3, seed=0, *, high=256, dtype=np.uint8):
    rng = np.random.default_rng(seed)
    y = np.arange(num) % CLASSES
    x = rng.integers(0, high // 2, (num, channels, SIZE, SIZE))
    x += (y * (high // 8))[:, None, None, None]
    return x.astype(dtype), y


def made(num_test=30, **options):
    return OwnData(pictures(**options), test=pictures(num_test, seed=1, **options))


def own_network(input_shape, num_classes):
    size = int(np.prod(input_shape))
    hidden = [nn.Linear(size, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(16, num_classes))


def arrays_of(folder):
    return load_predictor(folder).network.state_dict()


def test_afl_solves_in_features_of_the_frozen_network(tmp_path):
    """An independent float64 solution from the whole network's own last inputs."""
    config = Config(method="afl", afl={"ridge": RIDGE}, out=str(tmp_path / "run"), **SMALL | LITE)
    x, y = pictures()
    result = run(config, data=made(), progress=False, train_examples=0)
    setup = load_setup(result.config)
    whole, _ = build_networks(result.config.replace(trained="all"), x.shape[1:], CLASSES)
    scaled = (torch.from_numpy(x).float() - 127) / 128
    with torch.no_grad():
        lite = whole.eval().network[1]
        square = whole.network[0](scaled)
        maps = lite.extract_features(square)
    h = nn.functional.normalize(maps.mean((2, 3))).double()
    stored, labels = setup.data.train(np.arange(NUM))
    assert torch.equal(labels, torch.from_numpy(y))
    assert torch.allclose(nn.functional.normalize(stored).double(), h, atol=1e-5)
    targets = nn.functional.one_hot(labels, CLASSES).double()
    weights = arrays_of(result.folder)["1.weight"].double()
    # the examples' mean squared norm is 1
    expected = torch.linalg.solve(h.T @ h + RIDGE * torch.eye(h.shape[1]), h.T @ targets).T
    # features of length 1 are 1e-5 apart, and the system's condition is at most NUM / RIDGE + 1
    error = 2e-5 * (NUM / RIDGE + 1)
    assert torch.allclose(weights, expected, atol=error * float(expected.norm()))


@pytest.mark.parametrize("method", ["fedavg", "ntk-fl", "tct", "one-exchange", "fed3r"])
def test_training_a_head_equals_training_on_features_as_data(method, tmp_path):
    """The same bits as a run on the features, with the head as its network."""
    (x, y), (_, y_test) = pictures(channels=1), pictures(30, seed=1, channels=1)
    options = SMALL | {"train_examples": 0, "learning_rate": 0.1, "method": method}
    options |= {"tct": {"rounds": 4, "tct.bootstrap_rounds": 1}}.get(method, {})
    options |= {"one-exchange": {"validation_examples": 9}}.get(method, {})
    config = Config(model=own_network, trained="head", out=str(tmp_path / "a"), **options)
    first = run(config, data=made(channels=1), progress=False)
    data = load_setup(first.config).data
    (h, _), (h_test, _) = data.train(np.arange(NUM)), data.test()
    assert h.shape == (NUM, 16)

    def head(input_shape, num_classes):
        return own_network(x.shape[1:], num_classes)[-1]

    config = Config(model=head, standardise=False, out=str(tmp_path / "b"), **options)
    own = OwnData((h.numpy(), y), test=(h_test.numpy(), y_test))
    second = run(config, data=own, progress=False)
    for metric in ("accuracy", "loss"):
        assert first.curve(metric).tolist() == second.curve(metric).tolist()
    a, b = (load_model(r.folder) for r in (first, second))
    assert all(np.array_equal(*pair) for pair in zip(a.values(), b.values(), strict=True))


def test_training_all_that_has_weights_equals_training_all(tmp_path):
    weights = []
    for trained in ("all", "1"):
        config = Config(
            method="fedavg", model=own_network, trained=trained, out=str(tmp_path / trained),
            **SMALL | {"train_examples": 0, "learning_rate": 0.1},
        )  # fmt: skip
        result = run(config, data=made(channels=1), progress=False)
        weights.append([*arrays_of(result.folder).values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("trained", ["head", "last-block", "_conv_head", "all"])
def test_a_predictor_takes_raw_pictures_through_the_frozen_part(trained, tmp_path):
    x_test, y_test = pictures(30, seed=1)
    options = SMALL | LITE | {"train_examples": 0, "trained": trained, "rounds": 1}
    config = Config(method="fedavg", learning_rate=0.01, out=str(tmp_path / "run"), **options)
    result = run(config, data=made(), progress=False)
    names = {"head": 2, "all": 149}.get(trained)
    weights = load_model(result.folder)
    trained_names = [n for n in weights if "running" not in n and "num_" not in n]
    assert names in (None, len(trained_names))
    predictor = load_predictor(result.folder)
    evaluated = predictor.evaluate(x_test, y_test)
    assert evaluated.accuracy == result.summary["accuracy"]
    assert evaluated.loss == pytest.approx(result.summary["loss"], rel=1e-4)
    channels_last = predictor.predict(x_test.transpose(0, 2, 3, 1))
    assert np.array_equal(channels_last, predictor.predict(x_test))
    if trained != "all":
        with pytest.raises(ValueError, match="expected no frozen network, which is not saved"):
            predictor.save(tmp_path / "saved")


def test_statistics_of_a_pretrained_network_are_not_trained(tmp_path):
    options = SMALL | LITE | {"train_examples": 0, "trained": "last-block", "rounds": 1}
    config = Config(method="fedavg", learning_rate=0.1, out=str(tmp_path / "run"), **options)
    first = load_setup_with(config, made()).network.state_dict()
    result = run(config, data=made(), progress=False)
    last = load_model(result.folder)
    changed = {n for n, t in first.items() if not np.array_equal(t.numpy(), last[n])}
    assert any("_conv_head.weight" in n for n in changed)
    assert not any("running" in n or "num_batches" in n for n in changed)


def load_setup_with(config, data):
    return load_setup(config.replace(**data.read().keep()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image_size": 32}, "image-size goes with a pre-trained network"),
        ({"pretrained_weights": "w.pth"}, "pretrained-weights goes with a pre-trained network"),
        ({**LITE, "init": "he"}, "init = he would draw a pre-trained network's weights anew"),
        ({**LITE, "standardise": False}, "standardise = false: a pre-trained network takes"),
        ({"model": "torchvision"}, "expected efficientnet-lite0, torchvision:<name>"),
        ({"model": "efficientnet-lite0:x"}, "expected efficientnet-lite0, torchvision:<name>"),
        ({"model": "timm:"}, "expected efficientnet-lite0, torchvision:<name>"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Config(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "torchvision:resnet81"}, "torchvision:resnet81: cannot be loaded"),
        ({"model": "timm:resnet81"}, "timm:resnet81: cannot be loaded"),
        (
            {**LITE, "pretrained_weights": "/nowhere.pth"},
            "pretrained-weights = /nowhere.pth: cannot",
        ),
        ({**LITE, "trained": "blocks"}, "trained = blocks: expected a module of the network"),
        ({"model": "mlp", "trained": "last-block"}, "got none that repeats"),
        ({"model": "mlp", "trained": "2", "projection": 5}, "expected trained = head with it"),
        (
            {"model": "two-patch-cnn", "dataset": "two-patch:d=10", "trained": "head"},
            "last nn.Linear",
        ),
    ],
)
def test_networks_and_parts_that_are_not_there_are_refused(options, said):
    if "dataset" not in options:
        options = {**options, "dataset": "digits"}
    config = Config(**options)
    with pytest.raises(ConfigError, match=said):
        build_networks(config, (3, 32, 32) if "two" not in config.model else (2, 10), 2)


def test_a_network_that_goes_on_after_its_last_layer_has_no_head():
    def build(input_shape, num_classes):
        return nn.Sequential(own_network(input_shape, num_classes), nn.Tanh())

    with pytest.raises(ConfigError, match="trained = head: expected a network whose outputs are"):
        build_networks(Config(model=build, trained="head"), (1, 8, 8), CLASSES)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.float32([-1.0, 1.0]), r"got -1 ... 1 \(float32\)"),
        (np.uint16([0, 60000]), r"got 0 ... 60000 \(uint16\)"),
        (np.float64([0, 16]), r"got 0 ... 16 \(float64\)"),
        (np.int16([0, 0]), r"got 0 ... 0 \(int16\)"),
    ],
)
def test_pictures_of_another_scale_are_refused(x, said):
    x = np.broadcast_to(x[:, None, None, None], (2, 3, 8, 8)).copy()
    config = Config(**LITE)
    _, frozen = build_networks(config, x.shape[1:], 2)
    data = Data(x, np.arange(2), x, np.arange(2), 2, frozen=frozen)
    with pytest.raises(ConfigError, match=said):
        _ = data.inputs


def test_scale_and_grey_change_nothing_that_is_seen():
    """Bytes, fractions and a grey picture in three channels give the same features."""
    _, frozen = build_networks(Config(**LITE), (1, SIZE, SIZE), CLASSES)
    x, y = pictures(6, channels=1)
    forms = (x, x.astype(np.int64), (x / 255).astype(np.float32), np.repeat(x, 3, axis=1))
    first, *others = (
        Data(form, y, form, y, CLASSES, frozen=frozen).train(np.arange(6))[0] for form in forms
    )
    assert first.shape == (6, 1280)
    assert all(torch.allclose(first, other, atol=1e-4) for other in others)


def test_a_node_with_other_weights_or_pictures_is_told_apart(tmp_path):
    x, y = pictures()
    setups = []
    for seed in (0, 1):
        _network, frozen = build_networks(
            Config(model="resnet18", trained="head", seed=seed), (3, SIZE, SIZE), CLASSES
        )
        setups.append(Data(x, y, x, y, CLASSES, frozen=frozen))
    assert setups[0].digest != setups[1].digest
    assert setups[0].digest == replace(setups[0]).digest
    np.savez(tmp_path / "own.npz", x=(x / 255).astype(np.float32), y=y)
    _, frozen = build_networks(Config(**LITE), (3, SIZE, SIZE), CLASSES)
    with pytest.raises(ConfigError, match=r"pictures have values up to 0\.749"):
        load_own(str(tmp_path / "own.npz"), replace(setups[0], frozen=frozen), 100)


class Counting:
    """A frozen part that counts the examples it computes."""

    key, shape, network, moments = "k", (2,), True, None

    def __init__(self):
        self.count = 0

    def __call__(self, x):
        self.count += len(x)
        return torch.stack([x.sum(1), x.prod(1)], 1)


def stored(x, frozen, **options):
    return StoredFeatures(x, torch.from_numpy, frozen, b"", **options)


def test_features_are_computed_once_whichever_are_asked_for():
    x, frozen = np.random.default_rng(0).normal(size=(700, 3)).astype(np.float32), Counting()
    expected = torch.stack([torch.from_numpy(x).sum(1), torch.from_numpy(x).prod(1)], 1)
    chosen = np.array([5, 699, 5, 0])
    assert torch.equal(stored(x, frozen).rows(chosen), expected[chosen])
    assert frozen.count == 3
    stored(x, frozen).compute(np.arange(600))
    assert frozen.count == 601
    assert torch.equal(stored(x, frozen).rows(), expected)
    assert torch.equal(stored(x, frozen).rows(slice(10, 20)), expected[10:20])
    assert frozen.count == 700
    assert stored(x, frozen).rows(np.arange(0)).shape == (0, 2)
    changed = x.copy()
    changed[0, 0] += 1
    assert torch.equal(stored(changed, frozen).rows()[1:], expected[1:])
    assert frozen.count == 1400


def test_stored_features_are_their_owners_and_may_be_removed_at_any_time(tmp_path):
    x, frozen = np.eye(4, 3, dtype=np.float32), Counting()
    first = stored(x, frozen)
    rows = first.rows()
    files = sorted(features_folder().iterdir())
    assert all(os.stat(path).st_mode & 0o077 == 0 for path in (features_folder(), *files))
    for path in files:
        path.unlink()
        assert torch.equal(first.rows(), rows)
    first.path.write_bytes(b"half")  # cut off: counts as not there
    assert torch.equal(first.rows(), rows)
    features_folder().rename(tmp_path / "elsewhere")
    features_folder().write_text("no folder")
    before = frozen.count
    assert torch.equal(first.rows(), rows)
    first.compute(np.arange(4))
    assert frozen.count == before + 4


def test_the_oldest_features_go_first(monkeypatch):
    frozen = Counting()
    sets = [np.full((512, 3), i, np.float32) for i in range(4)]
    for i, x in enumerate(sets):
        part = stored(x, frozen, most=3 * 8192)
        part.rows()
        os.utime(part.path, (i, i))
    paths = [stored(x, frozen).path.exists() for x in sets]
    assert paths == [False, True, True, True]
    part = stored(np.zeros((4096, 3), np.float32), frozen, most=4096)
    assert len(part.rows()) == 4096
    assert not part.path.exists()


def test_noise_covers_a_pretrained_network_without_a_word_of_its_moments(tmp_path):
    sums = {"validation_share": 0.0, "auto_ridge": False}
    noise = {f"one_exchange.sums.{name}": value for name, value in sums.items()} | {
        "method": "one-exchange",
        "one_exchange.noise.epsilon": 4.0,
        "public": "schema",
        "test_share": 0.0,
    }
    base = SMALL | LITE | noise | {"clients_per_evaluation": 0}
    config = Config(**base | {"train_examples": 0})
    assert config.mechanism is not None
    with pytest.raises(ConfigError, match="pretrained-weights: the noise does not cover"):
        Config(**base | {"train_examples": 0, "pretrained_weights": "w.pth"})
    strategy = make_strategy(load_setup_with(config, made()))
    assert strategy.noise is not None


def test_weights_of_an_earlier_run_are_of_the_whole_network_or_of_its_trained_part(tmp_path):
    """The predictor computes features with them; another file at the place is noticed."""
    options = SMALL | {"train_examples": 0, "learning_rate": 0.1, "method": "fedavg"}
    options |= {"model": own_network, "rounds": 1}
    first = run(options, data=made(channels=1), out=tmp_path / "all", progress=False)
    whole = first.folder / "model.safetensors"
    config = Config(options, trained="head", weights=str(whole))
    second = run(config, data=made(channels=1), out=tmp_path / "head", progress=False)
    evaluated = load_predictor(second).evaluate(*pictures(30, seed=1, channels=1))
    assert evaluated.loss == pytest.approx(second.summary["loss"], rel=1e-5)
    setup = load_setup(second.config)
    before = setup.frozen.network.state_dict()["network.1.weight"]
    assert np.array_equal(before, load_model(first.folder)["1.weight"])
    part = config.replace(weights=str(second.folder / "model.safetensors"))
    layer, _ = build_networks(part, (1, SIZE, SIZE), CLASSES)
    assert np.array_equal(layer.weight.detach(), load_model(second.folder)["weight"])
    other = run(options, data=made(channels=1), out=tmp_path / "other", seed=1, progress=False)
    whole.write_bytes((other.folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="frozen part of the network has changed"):
        load_predictor(second)


def test_a_pretrained_network_that_is_trained_as_a_whole_is_saved(tmp_path):
    options = SMALL | LITE | {"train_examples": 0, "trained": "all", "rounds": 0}
    result = run(options, data=made(), method="fedavg", out=tmp_path / "run", progress=False)
    predictor = load_predictor(result)
    predictor.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "inputs.json").exists()


class Tail(nn.Module):
    """What follows the last layer shows only if its outputs are not small."""

    def __init__(self, *_):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        return self.fc(x.flatten(1)).tanh() * 10


class Tied(nn.Module):
    def __init__(self, *_):
        super().__init__()
        self.a, self.fc = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.fc.weight = self.a.weight

    def forward(self, x):
        return self.fc(self.a(x.flatten(1)).relu())


class Functional(nn.Module):
    def __init__(self, *_):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return nn.functional.linear(x.flatten(1), self.fc.weight, self.fc.bias)


class Recurrent(nn.Module):
    def __init__(self, *_):
        super().__init__()
        self.gru, self.fc = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(self.gru(x.flatten(1).unflatten(1, (2, 2)))[0][:, -1])


@pytest.mark.parametrize(
    ("build", "trained", "num_classes", "said"),
    [
        (Tail, "head", 2, "in Tail more follows"),
        (Tied, "head", 4, "no array that is in the trained and in the frozen part"),
        (Tied, "fc", 4, "no array that is in the trained and in the frozen part"),
        (Functional, "head", 2, "the network cannot be divided there"),
    ],
)
def test_networks_that_their_parts_do_not_make_are_refused(build, trained, num_classes, said):
    config = Config(model=build, trained=trained)
    with pytest.raises(ConfigError, match=f"trained = {trained}: .*{said}"):
        build_networks(config, (1, 2, 2), num_classes)


@pytest.mark.parametrize("trained", ["head", "gru"])
def test_a_recurrent_network_has_a_head(trained):
    layer, frozen = build_networks(Config(model=Recurrent, trained=trained), (1, 2, 2), 2)
    whole, _ = build_networks(Config(model=Recurrent), (1, 2, 2), 2)
    x = torch.randn(3, 1, 2, 2)
    with torch.no_grad():
        assert torch.allclose(layer(frozen(x)), whole.eval()(x), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**LITE, "trained": "all", "projection": 5}, "projection: a pre-trained network takes"),
        ({**LITE, "attack": "backdoor", "liars": 1}, "attack = backdoor marks pictures"),
        ({**LITE, "trained": ""}, "trained: expected head, last-block"),
        (
            {**LITE, "projection": 4, "projection_kind": "low-frequency"},
            "projection-kind = low-frequency is of pictures",
        ),
    ],
)
def test_settings_that_need_pictures_are_refused_with_features(options, said):
    with pytest.raises(ConfigError, match=said):
        Config(**options)


def test_a_projection_of_features_has_a_head_of_its_size():
    config = Config(model=own_network, trained="head", projection=5, init="he")
    layer, frozen = build_networks(config, (1, SIZE, SIZE), CLASSES)
    plain, _ = build_networks(config.replace(init="default"), (1, SIZE, SIZE), CLASSES)
    assert (layer.in_features, frozen.shape) == (5, (16,))
    assert not torch.equal(layer.weight, plain.weight)
    with pytest.raises(ConfigError, match="projection: expected at most 16"):
        build_networks(config.replace(projection=17), (1, SIZE, SIZE), CLASSES)


def test_with_noise_only_bytes_have_a_scale_that_no_example_decides(tmp_path):
    sums = {"validation_share": 0.0, "auto_ridge": False}
    noise = {f"one_exchange.sums.{name}": value for name, value in sums.items()}
    noise |= {"one_exchange.noise.epsilon": 4.0, "public": "schema", "test_share": 0.0}
    noise |= {"method": "one-exchange", "clients_per_evaluation": 0, "train_examples": 0}
    config = Config(**SMALL | LITE | noise)
    fractions = made(dtype=np.float32)
    with pytest.raises(ConfigError, match="the noise does not cover whether float32 pictures"):
        load_setup_with(config, fractions)
    load_setup_with(config.replace(public="schema, moments"), fractions)


def test_a_reader_has_its_file_although_another_process_removes_it():
    x, frozen = np.eye(4, 3, dtype=np.float32), Counting()
    part = stored(x, frozen)
    with part._complete(np.arange(4)) as file:
        part.path.unlink()
        stored(x, frozen).path.touch()
        shape = (4, *frozen.shape)
        assert np.array_equal(
            np.memmap(file, np.float32, "r", shape=shape), frozen(torch.tensor(x))
        )
