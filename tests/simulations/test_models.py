"""The papers' networks."""

import math
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedntk.simulations import Config, ConfigError, load_predictor, run
from fedntk.simulations.data.load import load_data
from fedntk.simulations.models import build_model


@pytest.mark.parametrize(
    ("options", "shape", "parameters"),
    [
        ({"model": "mlp"}, (1, 28, 28), 784 * 100 + 100 + 100 * 10 + 10),
        ({"model": "mlp", "width": 7}, (5,), 5 * 7 + 7 + 7 * 10 + 10),
        (
            {"model": "simple-cnn"},
            (1, 28, 28),
            32 * 9 + 32 + 64 * 32 * 9 + 64 + 3136 * 128 + 128 + 1290,
        ),
        ({"model": "lenet"}, (1, 28, 28), 156 + 2416 + 400 * 120 + 120 + 120 * 84 + 84 + 850),
        ({"model": "lenet"}, (3, 32, 32), 456 + 2416 + 576 * 120 + 120 + 120 * 84 + 84 + 850),
        (
            {"model": "lenet-bn"},
            (3, 32, 32),
            456 + 2416 + 2 * (6 + 16) + 576 * 120 + 120 + 120 * 84 + 84 + 850,
        ),
        (
            {"model": "digits-cnn", "width": 512},
            (3, 28, 28),
            (75 + 1) * 64
            + (1600 + 1) * 64
            + (1600 + 1) * 128
            + (3200 + 1) * 128
            + (6272 + 1) * 2048
            + (2048 + 1) * 512
            + 5130
            + 2 * (64 + 64 + 128 + 128 + 2048 + 512),
        ),
        ({"model": "resnet18"}, (3, 32, 32), 11_173_962),
        ({"model": "resnet18", "norm": "group"}, (1, 28, 28), 11_173_962 - 2 * 64 * 9),
    ],
)
def test_networks_have_their_size_and_one_output_for_each_class(options, shape, parameters):
    """ResNet-18 for CIFAR-10 (3 x 3 stem, 10 classes) is known to have 11,173,962 parameters."""
    model = build_model(Config(**options), shape, 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.randn(2, *shape)).shape == (2, 10)


def test_norm_of_the_resnet():
    kinds = {}
    for norm in ("batch", "group"):
        model = build_model(Config(model="resnet18", norm=norm), (3, 32, 32), 10)
        kinds[norm] = {type(module) for module in model.modules()}
    assert nn.BatchNorm2d in kinds["batch"]
    assert nn.GroupNorm not in kinds["batch"]
    assert nn.GroupNorm in kinds["group"]
    assert nn.BatchNorm2d not in kinds["group"]


@pytest.mark.parametrize(("model", "after"), [("lenet-bn", 2), ("digits-cnn", 4)])
def test_batch_norm_follows_each_convolution(model, after):
    """Without it, lenet-bn is lenet, from the same first weights."""
    network = build_model(Config(model=model), (3, 28, 28), 10)
    layers = list(network)
    behind = [layers[i + 1] for i, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    assert len(behind) == after
    assert all(isinstance(layer, nn.BatchNorm2d) for layer in behind)
    assert sum(isinstance(layer, nn.Linear) for layer in layers) == 3
    if model == "lenet-bn":
        plain = build_model(Config(model="lenet"), (3, 28, 28), 10)
        without = [layer for layer in layers if not isinstance(layer, nn.BatchNorm2d)]
        x = torch.randn(2, 3, 28, 28)
        assert torch.equal(nn.Sequential(*without)(x), plain(x))


def test_digits_cnn_trains_where_the_last_batch_has_one_example(tmp_path):
    """It joins the batch before: BatchNorm after a linear layer has no variance of one example."""
    config = Config(
        method="fedavg", model="digits-cnn", width=8, num_clients=5, clients_per_round=5, rounds=1,
        partition="iid", train_examples=5 * 17, batch_size=16, clients_per_evaluation=0,
        out=tmp_path,
    )  # fmt: skip
    result = run(config, progress=False)
    assert result.curve("replies-accepted")[1] == 5


def test_mlp_starts_kaiming_normal_with_zero_biases():
    """Standard deviation sqrt(2 / 784) from 78,400 draws: four standard errors are 1.01 %."""
    model = build_model(Config(), (1, 28, 28), 10)
    model.requires_grad_(requires_grad=False)
    first, second = (m for m in model.modules() if isinstance(m, nn.Linear))
    assert float(first.weight.std()) == pytest.approx(math.sqrt(2 / 784), rel=0.0102)
    assert abs(float(first.weight.mean())) < 4 * math.sqrt(2 / 784 / 78_400)
    assert not first.bias.any()
    assert not second.bias.any()


def test_first_weights_follow_the_seed_alone():
    def weights(seed: int) -> bytes:
        torch.rand(1)  # global state plays no part
        return build_model(Config(seed=seed), (4,), 3)[1].weight.detach().numpy().tobytes()

    before = torch.get_rng_state()
    assert weights(0) == weights(0) != weights(1)
    torch.set_rng_state(before)
    build_model(Config(), (4,), 3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("init", ["he", "xavier"])
def test_first_weights_by_a_rule_that_does_not_depend_on_the_layers(init):
    model = build_model(Config(model="lenet", init=init), (1, 28, 28), 10)
    plain = build_model(Config(model="lenet"), (1, 28, 28), 10).state_dict()
    for name, array in model.state_dict().items():
        if array.ndim < 2:
            assert torch.equal(array, plain[name])
            continue
        fan_out, fan_in = (array.shape[i] * array[0, 0].numel() for i in (0, 1))
        variance = 2 / fan_in if init == "he" else 2 / (fan_in + fan_out)
        # four standard deviations of the sample variance of normal draws, which uniform ones
        # vary less than
        assert float(array.var()) == pytest.approx(variance, rel=4 * math.sqrt(2 / array.numel()))
    same = build_model(Config(model="lenet", init=init), (1, 28, 28), 10).state_dict()
    other = build_model(Config(model="lenet", init=init, seed=1), (1, 28, 28), 10).state_dict()
    assert all(torch.equal(array, same[name]) for name, array in model.state_dict().items())
    assert not torch.equal(other["0.weight"], same["0.weight"])


def test_rules_leave_fixed_layers_alone():
    drawn = build_model(Config(model="two-patch-cnn", width=3, init="he"), (2, 20), 2)
    plain = build_model(Config(model="two-patch-cnn", width=3), (2, 20), 2)
    fixed = {name for name, p in plain.named_parameters() if not p.requires_grad}
    changed = {
        n for n, a in drawn.state_dict().items() if not torch.equal(a, plain.state_dict()[n])
    }
    assert changed
    assert not changed & (fixed | dict(plain.named_buffers()).keys())


def test_weights_and_a_rule_for_first_weights_do_not_go_together():
    with pytest.raises(ConfigError, match="init = he draws first weights, and weights = "):
        Config(init="he", weights="model.safetensors")


def wrong_outputs(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes + 1))


def own(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def test_a_users_own_network(monkeypatch):
    module = types.ModuleType("own_models")
    module.own, module.wrong_outputs = own, wrong_outputs
    monkeypatch.setitem(sys.modules, "own_models", module)
    model = build_model(Config(model="own_models:own"), (2, 3), 4)
    assert model(torch.zeros(1, 2, 3)).shape == (1, 4)
    with pytest.raises(ConfigError, match=r"outputs of shape \(n, 3\), .* got \('n', 4\)"):
        build_model(Config(model="own_models:wrong_outputs"), (4,), 3)


@pytest.mark.parametrize("method", ["afl", "fed3r", "fed-ncm"])
def test_a_last_layer_of_random_features_is_computed_and_read_again(method, tmp_path):
    """The layer changes, and nothing else; the run's predictor makes the same features."""
    config = Config(method=method, rounds=1, random_features=60, width=20, out=str(tmp_path / "a"))
    done = run(config, progress=False)
    before = build_model(config, (1, 8, 8), 10).state_dict()
    after = load_file(done.folder / "model.safetensors")
    changed = {name for name, own in before.items() if not torch.equal(own, after[name])}
    assert changed == {"3.1.weight", "3.1.bias"}
    assert after["3.1.weight"].shape == (10, 60)
    x, y = load_data(config).test()
    network = build_model(config, (1, 8, 8), 10).eval()
    network.load_state_dict(after)
    accuracy = float((network(x).argmax(1) == y).double().mean())
    assert accuracy == pytest.approx(done.summary["accuracy"], abs=1e-3)
    assert load_predictor(done.folder).evaluate(x, y).accuracy == pytest.approx(accuracy, abs=1e-3)
    assert done.summary["accuracy"] > 0.7


def test_a_projection_gives_the_network_its_features():
    assert build_model(Config(projection=20), (1, 8, 8), 10)[1].in_features == 20
    with pytest.raises(ConfigError, match="projection: expected at most 64, the numbers in an ex"):
        build_model(Config(projection=65), (1, 8, 8), 10)
    with pytest.raises(ConfigError, match=r"images .* got examples of shape \(20,\)"):
        build_model(Config(projection=20, model="simple-cnn"), (1, 28, 28), 10)


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (
            "vgg",
            (3, 32, 32),
            "model: expected mlp, .* lenet-bn, digits-cnn, resnet18, char-lstm, two-patch-cnn or",
        ),
        ("no.such:thing", (4,), "cannot be imported"),
        (":thing", (4,), "cannot be imported"),
        ("math:gcd", (4,), "fails for examples of shape .*TypeError"),
        ("builtins:max", (4,), "fails for examples|expected a torch.nn.Module"),
        ("operator:eq", (4,), "expected a torch.nn.Module, got bool"),
        ("math:nothing", (4,), "cannot be imported"),
        ("digits-cnn", (1, 7, 8), "images .* of at least 8 x 8"),
        ("lenet-bn", (1, 8, 8), "model = lenet-bn: .* at least 16 x 16"),
        ("lenet", (1, 8, 8), "images .* of at least 16 x 16, got examples of shape"),
        ("simple-cnn", (5,), "images .* of at least 8 x 8"),
    ],
)
def test_networks_that_do_not_fit_are_refused(model, shape, message):
    with pytest.raises(ConfigError, match=message):
        build_model(Config(model=model), shape, 3)


def test_weights_of_a_centred_run_serve_a_centred_network_alone(tmp_path):
    centred = Config(centre_inputs=True, width=7, seed=1)
    kept = build_model(centred, (5,), 3).state_dict() | {"centre": torch.ones(5)}
    save_file(kept, tmp_path / "model.safetensors")
    given = {"weights": str(tmp_path / "model.safetensors"), "seed": 2}
    found = build_model(centred.replace(**given), (5,), 3).state_dict()
    assert not found.pop("centre").any()  # every run asks its own clients
    assert all(torch.equal(array, kept[name]) for name, array in found.items())
    with pytest.raises(ConfigError, match="mean taken off; set centre-inputs = true"):
        build_model(centred.replace(**given, centre_inputs=False), (5,), 3)


def test_text_has_no_mean_that_could_be_taken_off():
    build_model(Config(model="char-lstm"), (5,), 7)
    with pytest.raises(ConfigError, match="centre-inputs: model = char-lstm fails for inputs"):
        build_model(Config(model="char-lstm", centre_inputs=True), (5,), 7)
