"""Features of a convexified network against the paper's algorithm 3, one example at a time."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.ntk import FeatureMap
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.simulations.models import resnet18, simple_cnn

from ...conftest import refused
from ..arithmetic import normal


def tied_head():
    """A head that shares its weight with another layer."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def mlp(*frozen):
    """A network 6-5-4, with 35 numbers in the first layer and 6 in the new head."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    for name in frozen:
        model.get_parameter(name).requires_grad_(requires_grad=False)
    return model


NETWORKS = {  # and the number of coordinates, where it is known without counting
    "mlp": (mlp, 41),
    "frozen-weight": (lambda: mlp("0.weight"), 11),
    "frozen-head-weight": (lambda: mlp("2.weight"), 36),
    "frozen-head": (lambda: mlp("2.weight", "2.bias"), 35),
    "tied-head": (tied_head, 36 + 6 + 6 + 1),
    "simple-cnn": (lambda: simple_cnn((3, 8, 8), 10), None),
    "batch-norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
        ),
        None,
    ),
    "resnet18-batch": (lambda: resnet18((3, 8, 8), 10, "batch"), None),
    "resnet18-group": (lambda: resnet18((3, 8, 8), 10, "group"), None),
}


def network(name):
    """In float64, with running statistics and norms' weights that are not those it began with."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        model = NETWORKS[name][0]()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.normal_(0, 0.1)
            if name in ("batch-norm", "resnet18-batch"):
                model.train()(2 * torch.randn(4, 3, 8, 8) + 1)
    return model.double()


def examples(name, n=3):
    return normal(n, *((6,) if NETWORKS[name][1] else (3, 8, 8)), seed=7)


def algorithm_3(model, x, num_params, subsample_size, seed):
    """Appendix A of the paper, its pseudocode; the subsample in the coordinates' own order."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    random_index = torch.randperm(num_params, generator=generator)[:subsample_size].sort().values
    rows = []
    for example in x:
        model.zero_grad()
        model(example[None])[0, 0].backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    return torch.stack(rows)[:, random_index]


def close(actual, expected):
    """As float32 rounds: relative to the largest of each example."""
    assert actual.dtype == torch.float32
    largest = expected.abs().amax(1, keepdim=True)
    assert bool((largest > 0).all())
    assert float(((actual.double() - expected) / largest).abs().max()) < 1e-6


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "resnet18-batch"])
def test_features_are_the_papers_algorithm_3(name):
    """Running statistics are used, not moved. 0 means all; small networks have under 1,000."""
    model, x = network(name), examples(name, n=2)
    before = copy.deepcopy(model.state_dict())
    total = FeatureMap(num_features=0).width(model)
    assert total == NETWORKS[name][1] or NETWORKS[name][1] is None
    for count in (1000,) if name.startswith("resnet") else (20, 1000, 0):
        feature_map = FeatureMap(num_features=count, seed=5)
        width = feature_map.width(model)
        features = feature_map.extractor(model.train(), chunk_size=1)(x)
        assert features.shape == (2, width)
        assert width == (min(count, total) or total)
        expected = algorithm_3(feature_map.convexify(model), x, total, count or total, 5)
        close(features, expected)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_resnet18_has_the_papers_number_of_coordinates():
    """Appendix B.7: 11,169,345. 11,173,962 with ten outputs, less nine rows of 512 and biases."""
    model = resnet18((3, 32, 32), 10)
    for network, count in ((model, 11_173_962), (FeatureMap().convexify(model), 11_169_345)):
        assert sum(p.numel() for p in network.parameters()) == count
    assert FeatureMap(num_features=0).width(model) == 11_169_345
    assert FeatureMap().width(model) == 100_000


def test_the_seed_alone_fixes_head_and_coordinates():
    """Same seed, same bits, whatever torch's global generator holds; and that is left as it was."""
    model, x = network("simple-cnn"), examples("simple-cnn")
    results = []
    for seed, global_seed in ((3, 0), (3, 1), (4, 0)):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(global_seed)
            before = torch.get_rng_state()
            feature_map = FeatureMap(num_features=500, seed=seed)
            head = feature_map.convexify(model)[-1].weight
            results.append((feature_map.extractor(model)(x), head))
            assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, results[0], results[1]))
    assert not any(map(torch.equal, results[0], results[2]))


def test_the_head_is_drawn_as_linear_layers_draw_theirs():
    """Uniform within 1/sqrt(4,096) = 1/64: of 4,096 the largest is over 0.99, the variance b^2/3.

    The variance's relative standard deviation is sqrt(0.8 / 4,096) = 1.4 %: five of these.
    """
    head = FeatureMap(seed=8).convexify(nn.Linear(4096, 3))
    weight = head.weight.detach() * 64
    assert 0.99 < float(weight.abs().max()) <= 1
    assert float(weight.var()) * 3 == pytest.approx(1, abs=0.07)
    assert abs(head.bias.item()) <= 1 / 64
    assert FeatureMap().convexify(nn.Linear(5, 3, bias=False)).bias is None
    assert FeatureMap().convexify(nn.Linear(5, 3).double()).weight.dtype == torch.float64


@pytest.mark.parametrize("kind", ["entk", "last-layer"])
def test_training_the_network_does_not_change_its_features(kind):
    """Nor does writing to features the examples, which a linear network's head is given."""
    model, x = network("mlp"), examples("mlp")
    extract = FeatureMap(kind).extractor(model)
    first = extract(x)
    assert model[2].out_features == 4
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(extract(x), first)
    x = torch.ones(2, 4)
    FeatureMap(kind).extractor(nn.Linear(4, 3))(x).zero_()
    assert torch.equal(x, torch.ones(2, 4))


def test_features_are_the_gradient_of_the_first_of_many_logits():
    """With the new head as the first row of the old one: the other rows' gradient is zero."""
    model, x = network("simple-cnn"), examples("simple-cnn", n=2)
    feature_map = FeatureMap(num_features=0)
    head = feature_map.convexify(model)[-1]
    with torch.no_grad():
        model[-1].weight[0], model[-1].bias[0] = head.weight[0], head.bias[0]
    total = sum(p.numel() for p in model.parameters())
    every = algorithm_3(model, x, total, total, 0)
    body, weight, bias = every.split([total - 1290, 1280, 10], 1)
    expected = torch.cat([body, weight[:, :128], bias[:, :1]], 1)
    close(feature_map.extractor(model)(x), expected)
    assert not weight[:, 128:].any()
    assert not bias[:, 1:].any()


@pytest.mark.parametrize("name", ["simple-cnn", "batch-norm", "resnet18-batch"])
def test_last_layer_features_are_what_the_head_is_given(name):
    """Features are float64's rounded to float32, 6e-8 of each: no sum of them is further off.

    No parameter needs a gradient.
    """
    model, x = network(name).requires_grad_(requires_grad=False), examples(name)
    feature_map = FeatureMap("last-layer", num_features=3)  # p is not theirs
    head = model.fc if name.startswith("resnet") else model[-1]
    features = feature_map.extractor(model.train())(x)
    assert features.shape == (3, feature_map.width(model)) == (3, head.in_features)
    with torch.no_grad():
        sizes = features.abs().double() @ head.weight.abs().T
        assert ((head(features.double()) - model.eval()(x)).abs() <= 2**-23 * sizes).all()


@pytest.mark.parametrize("kind", ["last-layer", "fourier"])
def test_one_pass_gives_features_and_outputs(kind):
    """The network's own outputs, whatever comes after the head, and the extractor's features."""
    model, x = nn.Sequential(network("batch-norm"), nn.Softmax(1)), examples("batch-norm")
    passes: list[int] = []
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    feature_map = FeatureMap(kind, 20)
    extract = feature_map.extractor_with_outputs(model.train())
    extract(x)  # which also examines the network
    passes.clear()
    features, outputs = extract(x)
    hook.remove()
    assert passes == [1]
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
    convexified = feature_map.convexify(model)
    assert convexified(x).shape == (3, 1)
    assert feature_map.width(model) == 47
    features = feature_map.extractor(model)(x)
    assert torch.equal(features[:, 41:], torch.zeros(3, 6))
    assert bool((features[:, :41] != 0).all())
    for wrong, words in (
        (FeatureMap(), r"gives \(1, 4\) for an example.*with head"),
        (FeatureMap(head="body"), r"network fails \(.*\); name the layer .* with head"),
        (FeatureMap("last-layer"), r"expected one input of shape \(3, 2\), got \[\]"),
    ):
        refused(words, wrong.extractor(model), x)
    assert FeatureMap("last-layer", head="logits").extractor(model)(x).shape == (3, 5)


FROZEN = mlp().requires_grad_(requires_grad=False)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: FeatureMap("ntk"), "expected one of entk, .*, last-layer, fourier, got 'ntk'"),
        (lambda: FeatureMap(num_features=-1), "num_features: expected at least 0 for entk, got -1"),
        (lambda: FeatureMap(seed=-1), "feature seed: expected at least 0, got -1"),
        (lambda: FeatureMap().width(nn.Flatten()), r"nn\.Linear, got ''; linear layers are none"),
        (lambda: FeatureMap(head="1").width(mlp()), "got '1'; linear layers are 0, 2"),
        (lambda: FeatureMap().extractor(FROZEN), "parameters that require gradients, got none"),
        (lambda: FeatureMap().extractor_with_outputs(mlp()), "last-layer or fourier, got 'entk',"),
        (lambda: FeatureMap().extractor(mlp())(torch.full((2, 6), torch.nan)), "some are not fin"),
    ],
)
def test_what_has_no_features_is_refused(use, message):
    refused(message, use)


def test_config_names_all_of_the_map():
    feature_map = FeatureMap("last-layer", 77, 9, "fc")
    assert FeatureMap.from_config(feature_map.to_config()) == feature_map
    assert {type(v) for v in feature_map.to_config().values()} == {str, int}


def test_a_key_names_network_and_map():
    """The same for the same bytes, in whatever memory; another for any change in them."""
    state = [np.arange(6.0).reshape(2, 3), np.array(3), np.zeros((0, 2), np.float32)]
    key = ConvexTask.key_of(FeatureMap(), state)
    assert ConvexTask.key_of(FeatureMap(), [np.array(a, order="F") for a in state]) == key
    first, *rest = state
    changed = (first.reshape(3, 2), np.nextafter(first, 9), first.view(np.int64))
    others = {ConvexTask.key_of(FeatureMap(), [other, *rest]) for other in changed}
    others |= {ConvexTask.key_of(FeatureMap(), arrays) for arrays in (state[::-1], state[:2])}
    assert len({key, ConvexTask.key_of(FeatureMap(seed=1), state), *others}) == 7
