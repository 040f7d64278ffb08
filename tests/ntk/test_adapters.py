"""Adapters against their equations, and tangent LoRA against whole gradients, in float64."""

import copy
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, linear, pad
from torch.nn.utils.parametrizations import weight_norm

from fedntk.ntk import (
    AdaptedNetwork,
    FeatureMap,
    NetworkPredictor,
    TangentLoRA,
    merge_adapters,
    with_lora,
)
from fedntk.ntk.features.frozen import BATCH, FrozenPart
from fedntk.ntk.first_weights import seed_for
from fedntk.ntk.jacobian.attention import no_fast_path

from ..conftest import refused
from .arithmetic import normal
from .cases import Net

pytestmark = pytest.mark.xdist_group("peft")  # which takes seconds to import
RANK, ALPHA = 2, 6.0


class Pointwise(nn.Conv2d):
    """A user's own class, with other arguments than its base."""

    def __init__(self, sizes):
        super().__init__(*sizes, 1)

    def forward(self, x):
        return super().forward(pad(x, (0, 0, 0, 0)))


def convolutions():
    layers = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), Pointwise((6, 4))
    grouped = nn.Conv2d(4, 4, 3, groups=4, padding=1)
    return nn.Sequential(*layers, grouped, nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))


def transformer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Net(
        lambda m, x: m.head(m.encoder(m.embed(x)).mean(1)),
        embed=nn.Linear(5, 4), encoder=nn.TransformerEncoder(layer, 2), head=nn.Linear(4, 3),
    )  # fmt: skip


def shared():
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 3))


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "convolutions": (convolutions, (3, 5, 5)),
    "transformer": (transformer, (7, 5)),
    "shared": (shared, (5,)),
}
each = pytest.mark.parametrize("name", CASES)


def make(name, **options):
    """Return a network, its adapted copy with a random B, and examples, in float64."""
    build, shape = CASES[name]
    torch.manual_seed(1)
    network, x = build().double().eval(), normal(4, *shape, seed=2)
    adapted = with_lora(network, x[:1], RANK, alpha=ALPHA, **options)
    torch.testing.assert_close(adapted(x), network(x), rtol=1e-12, atol=1e-12)
    state = {n: normal(*t.shape, seed=i) for i, (n, t) in enumerate(adapted.state_dict().items())}
    adapted.load_state_dict({n: t for n, t in state.items() if "lora_B" in n}, strict=False)
    return network, adapted, x


def factors(adapted):
    """Name of a layer -> A (r, ...) and B (d_out, r)."""
    every = dict(adapted.network.named_parameters())
    names = [n.partition(".lora_A.")[0] for n in every if ".lora_A." in n]
    a, b = (
        [every[f"{n}.lora_{side}.default.weight"].detach() for n in names] for side in ("A", "B")
    )
    return {n: (a, b.flatten(1)) for n, a, b in zip(names, a, b, strict=True)}


def product(a, b):
    return ALPHA / RANK * torch.einsum("or,r...->o...", b, a)


@each
def test_outputs_are_those_of_the_weights_with_the_products_added(name):
    """Also without gradients, where torch's attention layers would read their own weights."""
    network, adapted, x = make(name)
    merged = copy.deepcopy(network)
    for layer, (a, b) in factors(adapted).items():
        merged.get_submodule(layer).weight.data += product(a, b)
    expected = merged(x)
    assert not torch.allclose(network(x), expected, rtol=0.01)
    for outputs in (adapted(x), copy.deepcopy(adapted).train()(x)):
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(adapted(x), expected, rtol=1e-12, atol=1e-12)


@each
@pytest.mark.parametrize("train_a", [True, False])
def test_merged_adapters_are_a_plain_network(name, train_a):
    """With the layers and names of the first, also inside another module; float64 rounds."""
    network, adapted, x = make(name, train_a=train_a)
    expected, state = adapted(x), copy.deepcopy(adapted.state_dict())
    merged = merge_adapters(adapted)
    inside = merge_adapters(nn.Sequential(nn.Identity(), adapted))
    plain = copy.deepcopy(network)
    plain.load_state_dict(merged.state_dict())  # refuses other names
    for other in (merged, inside, plain):
        torch.testing.assert_close(other(x), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(plain(x), expected, rtol=1e-12, atol=1e-12)
    assert [type(m) for m in merged.modules()] == [type(m) for m in network.modules()]
    assert all(parameter.requires_grad for parameter in merged.parameters())
    assert torch.equal(adapted(x), expected)  # as it was
    assert all(torch.equal(tensor, state[n]) for n, tensor in adapted.state_dict().items())
    refused("expected a network with adapters, got none", merge_adapters, network)


x = normal(3, 3, 5, 5, seed=4).float()


def networks():
    torch.manual_seed(1)
    network = convolutions().eval()
    tangent = TangentLoRA(network, x[:1], RANK)
    whole = nn.Sequential(tangent, nn.Linear(tangent.num_features, 3))
    return [*(with_lora(network, x[:1], RANK, train_a=train_a) for train_a in (True, False)), whole]


def test_a_saved_predictor_gives_the_same_bits_with_a_network_made_anew(tmp_path):
    """LoRA, FFA-LoRA and tangent LoRA; A and features are drawn again from their seeds."""
    outputs = list[torch.Tensor]()
    for network, anew in zip(networks(), networks(), strict=True):
        for k, tensor in enumerate(network.state_dict().values()):
            if tensor.is_floating_point():
                tensor.copy_(normal(*tensor.shape, seed=k) / 10)
        predictor = NetworkPredictor(network)
        predictor.save(tmp_path)
        outputs.append(predictor.predict(x))
        assert torch.equal(NetworkPredictor.load(tmp_path, anew).predict(x), outputs[-1])
    assert not torch.equal(outputs[0], outputs[1])


def test_weights_that_layers_share_are_merged_each_with_its_adapter():
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    network[2].weight = network[0].weight
    adapted, x = with_lora(network, torch.zeros(1, 4).double(), 2), normal(3, 4, seed=9)
    adapted.load_state_dict({n: normal(*t.shape, seed=i)
                             for i, (n, t) in enumerate(adapted.state_dict().items())})  # fmt: skip
    torch.testing.assert_close(merge_adapters(adapted)(x), adapted(x), rtol=1e-12, atol=1e-12)
    adapted.network[0].lora_B["default"].weight.data[0] = torch.nan
    refused("NaNs detected", merge_adapters, adapted)
    tangent = nn.Sequential(TangentLoRA(network, torch.zeros(1, 4).double(), 1), nn.Linear(9, 3))
    refused("tangent LoRA: .* cannot be merged", merge_adapters, tangent)


@each
@pytest.mark.parametrize("train_a", [True, False])
def test_only_what_is_trained_is_in_the_state_dict(name, train_a):
    network, adapted, x = make(name, train_a=train_a)
    every = adapted.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in every if parameter.requires_grad}
    state, expected = adapted.state_dict(), adapted(x)
    assert set(state) == trained
    assert any("lora_A" in name for name in state) == train_a
    head, _ = FeatureMap("last-layer").last_layer(network)
    assert {f"network.{head}.weight", f"network.{head}.bias"} <= trained
    copied = copy.deepcopy(adapted)
    copied.load_state_dict({name: 0 * array for name, array in state.items()})
    assert not torch.equal(copied(x), expected)
    copied.load_state_dict(state)
    assert torch.equal(copied(x), adapted(x))
    refused("Missing key", copied.load_state_dict, dict([*state.items()][1:]), error=RuntimeError)
    before = {n: t.clone() for n, t in adapted.frozen_state().items()}
    optimiser = torch.optim.SGD(adapted.parameters(), lr=0.1)
    adapted.train()(x).square().sum().backward()
    optimiser.step()
    assert all(torch.equal(t, before[n]) for n, t in adapted.frozen_state().items())
    assert not torch.equal(adapted(x), expected)


@pytest.mark.parametrize("train_a", [True, False])
def test_the_mean_of_b_is_the_mean_of_the_products_only_if_a_is_frozen(train_a):
    """Sun et al. 2024, section 4; with LoRA the mean of products has up to twice the rank."""
    _, adapted, _ = make("mlp", train_a=train_a)
    clients = []
    for seed in (10, 11):
        client = copy.deepcopy(adapted)
        state = {n: normal(*t.shape, seed=seed) for n, t in client.state_dict().items()}
        client.load_state_dict(state)
        clients.append(client)
    pairs = zip(*(client.state_dict().items() for client in clients), strict=True)
    adapted.load_state_dict({n: 0.25 * a + 0.75 * b for (n, a), (_, b) in pairs})
    ((layer, pair),) = factors(adapted).items()
    first, second = (product(*factors(client)[layer]) for client in clients)
    error = float((product(*pair) - (0.25 * first + 0.75 * second)).norm())
    assert error > 0.1 if train_a else error < 1e-12


@each
def test_tangent_features_are_the_whole_gradient_times_a(name):
    """df/dB = (alpha / r) df/dW A^T, by autograd of the network that has no adapters."""
    network, _, x = make(name)
    features = TangentLoRA(network, x[:1], RANK, alpha=ALPHA, seed=3)
    pairs = factors(with_lora(network, x[:1], RANK, alpha=ALPHA, seed=3, train_a=False))
    assert len(pairs) == {"mlp": 1, "convolutions": 2, "transformer": 5, "shared": 1}[name]
    plain = FeatureMap("entk", seed=seed_for(3, "tangents")).convexify(network).eval()
    layer = FeatureMap("last-layer").last_layer(plain)[1]
    weights = [*(plain.get_submodule(n).weight for n in pairs), layer.weight, layer.bias]
    rows = []
    for example in x:
        *slopes, weight, bias = torch.autograd.grad(plain(example[None]).sum(), weights)
        parts = [
            ALPHA / RANK * slope.flatten(1) @ a.flatten(1).T
            for slope, (a, _) in zip(slopes, pairs.values(), strict=True)
        ]
        rows.append(torch.cat([part.flatten() for part in (*parts, weight, bias)]))
    expected = torch.stack(rows)
    assert features.num_features == expected.shape[1]
    with torch.no_grad():
        actual = features.requires_grad_(False)(x)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_tangent_features_have_the_same_bits_beside_any_others():
    network = convolutions()
    x = torch.randn(BATCH + 5, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    part = FrozenPart(TangentLoRA(network, x[:1], RANK), x[:1])
    every = part(x)
    for rows in (slice(3, 9), slice(BATCH - 1, BATCH + 4)):
        assert torch.equal(part(x[rows]), every[rows])
    other = FrozenPart(TangentLoRA(network, x[:1], RANK, seed=1), x[:1])
    assert other.digest != part.digest


def functional():
    return Net(
        lambda m, x: m.head(linear(x, m.layer.weight).tanh()),
        layer=nn.Linear(5, 5), head=nn.Linear(5, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (transformer, {"targets": ["out_proj"]}, "layers to adapt, such as embed, .*got out_proj"),
        (convolutions, {"targets": ["0", "3"]}, "layers to adapt, such as 0, 2; got 3"),
        (shared, {"targets": ["linear1"]}, "got linear1"),
        (lambda: nn.Linear(5, 3), {}, "such as none besides the last linear layer"),
        (shared, {"rank": 6}, "rank: expected at most 5 with 0, a matrix of 5 x 5, got 6"),
        (shared, {"rank": 0}, "rank: expected a whole number above 0"),
        (functional, {}, "such as none besides the last linear layer"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Tanh()), {}, "last nn.Linear"),
    ],
)
def test_networks_without_layers_to_adapt_are_refused(build, options, message):
    shapes = {transformer: (7, 5), convolutions: (3, 5, 5)}
    example = torch.zeros(1, *shapes.get(build, (5,)))
    refused(message, with_lora, build(), example, **options)


def two(**attributes):
    """A network of two layers, and what it holds besides."""

    def build(forward):
        network = Net(forward, first=nn.Linear(5, 5), head=nn.Linear(5, 3))
        for name, make in attributes.items():
            object.__setattr__(network, name, make(network))
        return network

    return build


def listed():
    return two(layers=lambda m: [m.first])(lambda m, x: m.head(m.layers[0](x).tanh()))


def listed_once():
    forward = lambda m, x: m.head(m.layers[0](m.first(x)).tanh())  # noqa: E731
    return two(layers=lambda m: [m.first])(forward)


def by_class():
    def forward(m, x):
        for layer in (m.first, m.head):
            x = layer(x).tanh() if type(layer) is nn.Linear else x[:, :3] if layer is m.head else x
        return x

    return two()(forward)


def reading():
    return Net(
        lambda m, x: m.head(m.conv(x)[:, :, :: m.conv.output_padding[0] + 1].flatten(1)),
        conv=nn.Conv2d(1, 2, 1), head=nn.Linear(8, 3),
    )  # fmt: skip


def random():
    return Net(
        lambda m, x: m.head(dropout(m.first(x), training=True)),
        first=nn.Linear(5, 50), head=nn.Linear(50, 3),
    )  # fmt: skip


def tied_head():
    network = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    network[2].weight = network[0].weight
    return network


def normed(place):
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    weight_norm(network[place])
    return network


def adapted_before():
    return with_lora(shared(), torch.zeros(1, 5), 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (listed, "reaches first past their adapters"),
        (listed_once, "reaches first past their adapters"),
        (by_class, "same outputs with adapters at B = 0|past their adapters"),
        (reading, "fails .* with adapters; .*output_padding"),
        (random, "or draws at random"),
        (tied_head, "the last layer 2 shares its weight with 0"),
        (lambda: normed(0), "such as none besides the last linear layer"),
        (lambda: normed(2), "last layer 2: expected a weight of its own"),
        (adapted_before, "without adapters, got some in it"),
        (lambda: adapted_before().network, "without adapters, got some in 0"),
        (lambda: shared().bfloat16(), "float32 or float64, got 0.weight in torch.bfloat16"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "fails for an example of shape"),
    ],
)
@pytest.mark.parametrize("make", [with_lora, TangentLoRA])
def test_networks_that_adapters_would_not_train_are_refused(make, build, message):
    shape = (1, 1, 2, 2) if build is reading else (1, 5)
    refused(message, make, build(), torch.zeros(shape), 1)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_is_a_finite_number_above_0(alpha):
    refused("alpha: expected a finite", with_lora, shared(), torch.zeros(1, 5), alpha=alpha)


def test_convolutions_that_pad_with_other_numbers_have_no_adapters():
    """Their A would pad with 0."""
    layers = (nn.Conv2d(2, 2, 1, padding=1, padding_mode=mode) for mode in ("circular", "zeros"))
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * 49, 3))
    assert [*factors(with_lora(network, torch.zeros(1, 2, 3, 3), 1))] == ["1"]


def test_draws_of_one_seed_have_no_numbers_in_common():
    """The network's first weights, A, and the last layer that tangents have."""
    torch.manual_seed(7)
    network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    tangent = TangentLoRA(network, torch.zeros(1, 5), 2, seed=7)
    a = next(p for n, p in tangent.named_parameters() if ".lora_A." in n)
    bounded = [
        set((p * p.shape[1] ** 0.5).flatten().abs().mul(1e4).round().int().tolist())
        for p in (network[0].weight, a, tangent.network.network[2].weight)
    ]
    assert all(len(one & other) <= 1 for one, other in combinations(bounded, 2))


@pytest.mark.parametrize("freeze", [False, True])
def test_what_is_frozen_is_fixed_when_the_network_is_made(freeze):
    _, adapted, _ = make("mlp")
    names = [*adapted.state_dict()]
    adapted.requires_grad_(not freeze)
    assert [*adapted.state_dict()] == names
    whole = adapted.state_dict() | adapted.frozen_state()
    adapted.load_state_dict(whole)
    name = "network.0.base_layer.weight"
    other = whole | {name: whole[name] + 1}
    refused(f"{name} is frozen", adapted.load_state_dict, other, error=RuntimeError)


def test_digests_depend_on_alpha():
    x, network = torch.zeros(1, 5), shared()
    for part in (
        lambda alpha: FrozenPart(TangentLoRA(network, x, RANK, alpha=alpha), x),
        lambda alpha: FrozenPart(
            None, x, frozen_arrays=with_lora(network, x, RANK, alpha=alpha).frozen_state()
        ),
    ):
        assert part(1.0).digest == part(1.0).digest != part(2.0).digest


def test_no_examples_have_no_tangents():
    features = TangentLoRA(shared(), torch.zeros(1, 5), RANK)
    assert features(torch.zeros(0, 5)).shape == (0, features.num_features)


def test_tangents_need_one_output():
    """A head that is called twice gives the logits from its own outputs."""
    last = nn.Linear(5, 5)
    network = nn.Sequential(nn.Linear(5, 5), last, nn.Tanh(), last)
    refused("with a last layer of one output the network", TangentLoRA, network, torch.zeros(1, 5))


def test_tangents_need_the_layer_that_gives_the_outputs():
    network = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Unflatten(1, (2, 2)))
    last = nn.Sequential(network, nn.Flatten(), nn.AvgPool1d(2))
    refused("has 4 outputs and the network 2", TangentLoRA, last, torch.zeros(1, 5), 1)


def test_ends_of_names_choose_layers_and_never_the_last_one():
    """An end such as 0 is not that of 10, and a name in full is not the end of another."""
    inner = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    network = nn.Sequential(*(nn.Linear(5, 5) for _ in range(11)), inner, nn.Linear(5, 3))
    adapted = with_lora(network, torch.zeros(1, 5), 1, targets=["0", "11.1"])
    assert list(factors(adapted)) == ["0", "11.0", "11.1"]
    every = with_lora(network, torch.zeros(1, 5), 1)
    assert len(factors(every)) == 13
    assert isinstance(every, AdaptedNetwork)


def test_a_network_of_peft_itself_is_read_with_its_adapters():
    """Torch's path without gradients reads weights that the adapters are not in."""
    from peft import LoraConfig, inject_adapter_in_model

    options = {"target_modules": ["linear1"], "init_lora_weights": False}
    network = inject_adapter_in_model(LoraConfig(r=2, **options), transformer().eval())
    x = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0))
    with no_fast_path(network), torch.no_grad():
        expected = network(x)
    adapted = AdaptedNetwork(network)
    with torch.no_grad():
        torch.testing.assert_close(adapted(x), expected, rtol=1e-5, atol=1e-5)
    assert [name for name in adapted.state_dict() if "lora_" not in name] == []


def test_a_model_of_peft_itself_is_merged_into_a_plain_network():
    """Also with a layer that peft trains whole, beside the frozen one; A is drawn by peft."""
    from peft import LoraConfig, get_peft_model

    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    config = LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"], lora_dropout=0.5)
    adapted = get_peft_model(copy.deepcopy(network), config)
    for k, parameter in enumerate(p for p in adapted.parameters() if p.requires_grad):
        parameter.data = normal(*parameter.shape, seed=k)
    inputs = normal(3, 4, seed=9)
    for whole in (AdaptedNetwork(adapted), adapted.eval()):
        merged = merge_adapters(whole)
        assert list(merged.state_dict()) == list(network.state_dict())
        torch.testing.assert_close(merged(inputs), whole(inputs), rtol=1e-12, atol=1e-12)


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("fedntk.ntk.adapters.find_spec", lambda name: None)
    refused("install fedntk.adapters.", with_lora, shared(), torch.zeros(1, 5))
