"""Features of a convexified network against the paper's algorithm 3, one example at a time."""

import copy

import pytest
import torch
from torch import nn

from fedntk.ntk import FeatureMap
from fedntk.simulations.models import SimpleCNN, resnet18

from ..arithmetic import normal

CLASSES = 10


def network(name):
    """In float64, with running statistics and norms' weights that are not those it began with."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        if name == "simple-cnn":
            model = SimpleCNN((3, 8, 8), CLASSES)
        elif name == "mlp":
            model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        elif name == "batch-norm":
            model = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
            )
        else:
            model = resnet18((3, 8, 8), CLASSES, name.removeprefix("resnet18-"))
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.normal_(0, 0.1)
            if name in ("batch-norm", "resnet18-batch"):
                model.train()(2 * torch.randn(4, 3, 8, 8) + 1)
    return model.double()


def examples(name, n=3):
    return normal(n, *((6,) if name == "mlp" else (3, 8, 8)), seed=7)


def algorithm_3(model, x, num_params, subsample_size, seed):
    """Appendix A of the paper, its pseudocode; the subsample in the coordinates' own order."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    random_index = torch.randperm(num_params, generator=generator)[:subsample_size].sort().values
    rows = torch.zeros(len(x), len(random_index), dtype=torch.float64)
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1])[0].backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
        rows[i] = torch.cat(gradients)[random_index]
    return rows


def close(actual, expected, digits=1e-6):
    """As float32 rounds: relative to the largest of each example."""
    assert actual.dtype == torch.float32
    largest = expected.abs().amax(1, keepdim=True)
    assert bool((largest > 0).all())
    assert float(((actual.double() - expected) / largest).abs().max()) < digits


@pytest.mark.parametrize(
    "name", ["mlp", "simple-cnn", "batch-norm", "resnet18-batch", "resnet18-group"]
)
def test_features_are_the_papers_algorithm_3(name):
    """Running statistics are used, and are not moved: each example's row depends on it alone."""
    model, x = network(name), examples(name, n=2)
    before = copy.deepcopy(model.state_dict())
    for count in (1000, 0) if name in ("mlp", "batch-norm") else (1000,):
        feature_map = FeatureMap(num_features=count, seed=5)
        width = feature_map.width(model)
        total = FeatureMap(num_features=0).width(model)
        features = feature_map.extractor(model.train())(x)
        assert features.shape == (2, width)
        assert width == (min(count, total) or total)
        expected = algorithm_3(feature_map.convexified(model), x, total, count or total, 5)
        close(features, expected)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_resnet18_has_the_papers_number_of_coordinates():
    """Appendix B.7: 11,169,345. 11,173,962 with ten outputs, less nine rows of 512 and biases."""
    model = resnet18((3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    assert 11_173_962 - 9 * (512 + 1) == 11_169_345
    assert FeatureMap(num_features=0).width(model) == 11_169_345
    assert FeatureMap().width(model) == 100_000
    convexified = FeatureMap().convexified(model)
    assert sum(p.numel() for p in convexified.parameters()) == 11_169_345


def test_the_seed_alone_fixes_head_and_coordinates():
    """Same seed, same bits, whatever torch's global generator holds; and that is left as it was."""
    model, x = network("simple-cnn"), examples("simple-cnn")
    features, heads = [], []
    for seed, global_seed in ((3, 0), (3, 1), (4, 0)):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(global_seed)
            before = torch.get_rng_state()
            feature_map = FeatureMap(num_features=500, seed=seed)
            features.append(feature_map.extractor(model)(x))
            heads.append(feature_map.convexified(model)[-1].weight)
            assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(features[0], features[1])
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert not torch.equal(features[0], features[2])


def test_another_seed_takes_other_coordinates():
    """A linear network's gradient is 2, 3, 4, 5 and 1 for the bias: three of them, in order.

    20 seeds choose among 10 sets; fewer than 4 of them have a chance of (0.3)^20 times 120.
    """
    model, x = nn.Linear(4, 2), torch.tensor([[2.0, 3, 4, 5]])
    maps = [FeatureMap(num_features=3, seed=seed) for seed in range(20)]
    sets = {tuple(feature_map.extractor(model)(x)[0].int().tolist()) for feature_map in maps}
    order = [2, 3, 4, 5, 1]
    assert all(sorted(set(chosen), key=order.index) == list(chosen) for chosen in sets)
    assert {len(chosen) for chosen in sets} == {3}
    assert len(sets) > 3


def test_the_head_is_drawn_as_linear_layers_draw_theirs():
    """Uniform within 1/sqrt(4,096) = 1/64: of 4,096 the largest is over 0.99, the variance b^2/3.

    The variance's relative standard deviation is sqrt(0.8 / 4,096) = 1.4 %: five of these.
    """
    head = FeatureMap(seed=8).convexified(nn.Linear(4096, 3))
    weight = head.weight.detach() * 64
    assert 0.99 < float(weight.abs().max()) <= 1
    assert float(weight.var()) * 3 == pytest.approx(1, abs=0.07)
    assert abs(head.bias.item()) <= 1 / 64
    assert FeatureMap().convexified(nn.Linear(5, 3, bias=False)).bias is None
    assert FeatureMap().convexified(nn.Linear(5, 3).double()).weight.dtype == torch.float64


def test_the_network_is_copied():
    """Training it afterwards changes neither the function nor, the other way, the network."""
    model, x = network("mlp"), examples("mlp")
    for feature_map in (FeatureMap(), FeatureMap("last-layer")):
        before = copy.deepcopy(model.state_dict())
        extract = feature_map.extractor(model)
        first = extract(x)
        assert model[2].out_features == 4
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        with torch.no_grad():
            model[0].weight.add_(1)
        assert torch.equal(extract(x), first)


@pytest.mark.parametrize("count", [0, 10**9])
def test_no_number_or_more_than_there_are_give_all_coordinates_in_order(count):
    """For a linear network of one output the gradient is x, then 1 for the bias."""
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    feature_map = FeatureMap(num_features=count)
    assert feature_map.width(nn.Linear(3, 7)) == 4
    expected = torch.cat([x, torch.ones(2, 1)], 1)
    assert torch.equal(feature_map.extractor(nn.Linear(3, 7))(x), expected)
    no_bias = nn.Linear(3, 7, bias=False)
    assert torch.equal(feature_map.extractor(no_bias)(x), x)


def test_frozen_parameters_are_left_out():
    """MLP 6-5-4: 35 in the first layer, 6 in the new head; frozen ones are columns that go."""
    model, x = network("mlp"), examples("mlp")
    every = FeatureMap().extractor(model)(x)
    assert every.shape == (3, 41)
    model[0].weight.requires_grad_(requires_grad=False)
    assert FeatureMap().width(model) == 11
    assert torch.equal(FeatureMap().extractor(model)(x), every[:, 30:])
    model[0].requires_grad_(requires_grad=True)
    model[2].weight.requires_grad_(requires_grad=False)
    expected = torch.cat([every[:, :35], every[:, 40:]], 1)
    assert torch.equal(FeatureMap().extractor(model)(x), expected)
    model[2].requires_grad_(requires_grad=False)
    assert FeatureMap().width(model) == 35


class TiedHead(nn.Module):
    """A head that shares its weight with another layer."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


def test_a_weight_that_the_head_shares_stays_in_the_other_layer():
    """9 + 3 of the first layer, 3 + 1 of the new head."""
    model = TiedHead()
    assert FeatureMap().width(model) == 16
    x = normal(2, 3, seed=0).float()
    expected = algorithm_3(FeatureMap().convexified(model).double(), x.double(), 16, 16, 0)
    close(FeatureMap().extractor(model)(x), expected, 1e-5)


def test_features_are_the_gradient_of_the_first_of_many_logits():
    """With the new head as the first row of the old one: the other rows' gradient is zero."""
    model, x = network("simple-cnn"), examples("simple-cnn", n=2)
    feature_map = FeatureMap(num_features=0)
    head = feature_map.convexified(model)[-1]
    with torch.no_grad():
        model[-1].weight[0], model[-1].bias[0] = head.weight[0], head.bias[0]
    features = feature_map.extractor(model)(x)
    whole = sum(p.numel() for p in model.parameters()) - 10 * 129
    for row, example in zip(features, x, strict=True):
        gradients = torch.autograd.grad(model(example[None])[0, 0], list(model.parameters()))
        *body, weight, bias = gradients
        expected = torch.cat([*(g.flatten() for g in body), weight[0], bias[:1]])
        close(row[None], expected[None])
        assert len(row) == whole + 129
        assert not weight[1:].any()
        assert not bias[1:].any()


@pytest.mark.parametrize("name", ["simple-cnn", "batch-norm", "resnet18-batch"])
def test_last_layer_features_are_what_the_head_is_given(name):
    """Features are float64's rounded to float32, 6e-8 of each: no sum of them is further off."""
    model, x = network(name), examples(name)
    feature_map = FeatureMap("last-layer", num_features=3)  # p is not theirs
    head = model.fc if name.startswith("resnet") else model[-1]
    features = feature_map.extractor(model.train())(x)
    assert features.shape == (3, feature_map.width(model)) == (3, head.in_features)
    with torch.no_grad():
        sizes = features.abs().double() @ head.weight.abs().T
        assert ((head(features.double()) - model.eval()(x)).abs() <= 2**-23 * sizes).all()


def test_last_layer_features_are_not_the_examples_themselves():
    """A linear network's head is given x; writing to the features must leave the data alone."""
    x = torch.ones(2, 4)
    features = FeatureMap("last-layer").extractor(nn.Linear(4, 3))(x)
    assert torch.equal(features, x)
    features.zero_()
    assert torch.equal(x, torch.ones(2, 4))


@pytest.mark.parametrize("kind", ["last-layer", "fourier"])
def test_one_pass_gives_features_and_outputs(kind):
    """The network's own outputs, whatever comes after the head, and the extractor's features."""
    model, x = nn.Sequential(network("batch-norm"), nn.Softmax(1)), examples("batch-norm")
    passes: list[int] = []
    hook = model.register_forward_hook(lambda _, inputs, __: passes.append(len(inputs[0])))
    feature_map = FeatureMap(kind, 20)
    features, outputs = feature_map.extractor_with_outputs(model.train())(x)
    assert passes == [len(x)]
    hook.remove()
    assert torch.equal(features, feature_map.extractor(model)(x))
    assert torch.equal(outputs, model.eval()(x))
    assert not outputs.requires_grad


class HeadFirst(nn.Module):
    """The layer of the logits is not the last that is registered; another one is not used."""

    def __init__(self):
        super().__init__()
        self.logits, self.body, self.idle = nn.Linear(5, 4), nn.Linear(6, 5), nn.Linear(2, 2)

    def forward(self, x):
        return self.logits(torch.tanh(self.body(x)))


def test_the_head_is_found_by_name():
    """4 outputs become one: 35 of the body, 6 of the head, 6 that no output depends on."""
    model, x = HeadFirst(), normal(3, 6, seed=0).float()
    feature_map = FeatureMap(head="logits")
    convexified = feature_map.convexified(model)
    assert convexified(x).shape == (3, 1)
    assert feature_map.width(model) == 47
    features = feature_map.extractor(model)(x)
    assert torch.equal(features[:, 41:], torch.zeros(3, 6))
    assert bool((features[:, :41] != 0).all())
    with pytest.raises(ValueError, match=r"gives \(1, 4\) for an example.*with head"):
        FeatureMap().extractor(model)(x)
    with pytest.raises(ValueError, match=r"network fails \(.*\); name the layer .* with head"):
        FeatureMap(head="body").extractor(model)(x)
    with pytest.raises(ValueError, match=r"expected one input of shape \(3, 2\), got \[\]"):
        FeatureMap("last-layer").extractor(model)(x)
    assert FeatureMap("last-layer", head="logits").extractor(model)(x).shape == (3, 5)


def test_networks_without_a_head_are_refused():
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    for use in (FeatureMap().width, FeatureMap().convexified, FeatureMap().extractor):
        with pytest.raises(ValueError, match=r"last nn\.Linear, got ''; linear layers are none"):
            use(conv)
    for name in ("9", "1", "0.weight"):
        with pytest.raises(ValueError, match=f"got {name!r}; linear layers are 0, 2"):
            FeatureMap(head=name).width(network("mlp"))
    frozen = network("mlp").requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match="expected parameters that require gradients, got none"):
        FeatureMap().extractor(frozen)
    assert FeatureMap("last-layer").extractor(frozen)(examples("mlp")).shape == (3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "ntk"}, "features: expected one of entk, .*, last-layer, fourier, got 'ntk'"),
        ({"num_features": -1}, "num_features: expected at least 0, got -1"),
        ({"seed": -1}, "feature seed: expected at least 0, got -1"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        FeatureMap(**change)


def test_damaged_examples_and_tangent_features_in_one_pass_are_refused():
    with pytest.raises(ValueError, match="expected last-layer or fourier, got 'entk', which are"):
        FeatureMap().extractor_with_outputs(network("mlp"))
    with pytest.raises(ValueError, match="features: some are not finite"):
        FeatureMap().extractor(network("mlp"))(torch.full((2, 6), torch.nan).double())


def test_any_chunks_give_the_same_features():
    model, x = network("batch-norm"), examples("batch-norm", n=7)
    whole = FeatureMap(num_features=100).extractor(model)(x)
    for size in (1, 3):
        extract = FeatureMap(num_features=100).extractor(model, chunk_size=size)
        torch.testing.assert_close(extract(x), whole, rtol=1e-6, atol=1e-7)


def test_config_names_all_of_the_map():
    feature_map = FeatureMap("last-layer", 77, 9, "fc")
    assert FeatureMap.from_config(feature_map.to_config()) == feature_map
    assert {type(v) for v in feature_map.to_config().values()} == {str, int}
