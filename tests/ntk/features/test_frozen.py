import pytest
import timm
import torch
import torchvision
from efficientnet_lite_pytorch import EfficientNet
from torch import nn

from fedntk.ntk.features.frozen import (
    BATCH,
    EvaluationMode,
    FrozenPart,
    LastInputs,
    SquareImages,
    UnitLength,
    last_block,
    split_network,
)

SIZE = 32


def network_of(name):
    torch.manual_seed(0)
    if name == "efficientnet-lite0":
        return EfficientNet.from_name(name, image_size=SIZE, drop_connect_rate=0.0)
    if name.startswith("vit"):
        return timm.create_model(name, img_size=SIZE, depth=3)
    return torchvision.models.get_model(name, weights=None, num_classes=10)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("efficientnet-lite0", "_blocks.15"),
        ("resnet18", "layer4.1"),
        ("mobilenet_v3_small", "features.11"),
        ("vit_tiny_patch16_224", "blocks.2"),
    ],
)
def test_the_two_parts_make_the_network(name, block):
    """No bit changes: the operations are the same, on the same layers."""
    network, x = network_of(name).eval(), torch.randn(3, 3, SIZE, SIZE)
    assert last_block(network) == block
    before, after = split_network(network, block)
    with torch.no_grad():
        assert torch.equal(after(before(x)), network(x))
    names = {*dict(before.named_parameters()), *dict(after.named_parameters())}
    assert names == set(dict(network.named_parameters()))
    assert not {*dict(before.named_parameters())} & {*dict(after.named_parameters())}


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden) + hidden.relu() if self.training else self.second(hidden) + x


class LeavesOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.first(x)


def test_a_cut_that_two_tensors_cross_is_refused():
    with pytest.raises(ValueError, match="expected one tensor to enter second, got 2"):
        split_network(TwoWays().eval(), "second")
    with pytest.raises(ValueError, match="such as first, second, got 'third'"):
        split_network(TwoWays(), "third")
    with pytest.raises(ValueError, match="expected a module that the network calls, got 'last'"):
        split_network(LeavesOut(), "last")


def test_a_network_without_repeated_blocks_has_no_last_one():
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="name the first layer to train, one of 0, 1, 2"):
        last_block(network)


@pytest.mark.parametrize("layer", ["4", ""])
def test_last_inputs_are_those_of_the_layer(layer):
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Tanh(), nn.Linear(5, 2))
    network, expected = (network, network[:4]) if layer else (network[1], nn.Identity())
    part, x = LastInputs(network, layer), torch.randn(3, 4)
    assert torch.equal(part(x), expected(x))
    names = [name for name, _ in part.named_parameters()]
    assert names == (["network.1.weight", "network.1.bias"] if layer else [])


def test_a_network_that_leaves_out_its_last_layer_is_refused():
    part = LastInputs(LeavesOut(), "last")
    with pytest.raises(ValueError, match="a network that calls its last layer"):
        part(torch.zeros(1, 2))


def frozen_resnet():
    network = network_of("resnet18").eval()
    return FrozenPart(LastInputs(network, "fc"), torch.zeros(1, 3, SIZE, SIZE))


def test_features_have_the_same_bits_in_any_batch_and_with_any_threads():
    frozen, x = frozen_resnet(), torch.randn(BATCH + 9, 3, SIZE, SIZE)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([frozen(x[i : i + 1]) for i in (0, 20, BATCH, BATCH + 8)])
        torch.set_num_threads(3)
        together = frozen(x)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together[[0, 20, BATCH, BATCH + 8]], alone)
    assert frozen(x[:0]).shape == (0, 512)
    assert frozen.shape == (512,)


class Hidden(nn.Module):
    """Shows nothing of its number, which is not in the state dict."""

    def __init__(self, number, plain=0.0):
        super().__init__()
        self.register_buffer("number", torch.tensor(number), persistent=False)
        self.plain = plain

    def forward(self, x):
        return x * self.number + self.plain

    def extra_repr(self):
        return ""


def test_digest_and_key_tell_networks_apart():
    """Two machines agree on weights and buffers; a file on one machine on the outputs as well."""
    example = torch.zeros(1, 3)

    def part(*arguments, **more):
        return FrozenPart(Hidden(*arguments), example, **more)

    assert part(1.0).digest == part(1.0).digest
    assert part(1.0).key == part(1.0).key
    assert part(1.0).digest != part(2.0).digest
    assert part(1.0).digest != part(1.0, moments=((0.5,) * 3, (0.5,) * 3)).digest
    assert part(1.0).digest == part(1.0, 0.5).digest
    assert part(1.0).key != part(1.0, 0.5).key
    resnet = frozen_resnet()
    digests = {resnet.digest}
    for name in ("network.layer1.0.conv1.weight", "network.bn1.running_var"):
        changed = frozen_resnet()
        with torch.no_grad():
            changed.network.state_dict()[name].view(-1)[0] += 1e-3
        digests.add(changed.digest)
    assert len(digests) == 3


@pytest.mark.parametrize("name", ["resnet18", "timm"])
def test_statistics_stay_as_they_were_in_training(name):
    """Those of timm's BatchNorm with an activation as well; nothing drops at random."""
    network = (
        timm.create_model("resnetv2_18", num_classes=4) if name == "timm" else network_of(name)
    )
    fixed = EvaluationMode(nn.Sequential(network, nn.Dropout(0.5))).train()
    before = {k: v.clone() for k, v in fixed.state_dict().items() if "running" in k or "num_b" in k}
    assert before
    x = torch.randn(4, 3, SIZE, SIZE)
    fixed(x).sum().backward()
    assert torch.equal(fixed(x), fixed(x))
    after = fixed.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())


@pytest.mark.parametrize(
    ("shape", "top", "left"), [((8, 8), 0, 0), ((8, 12), 0, 2), ((12, 8), 2, 0)]
)
def test_pictures_of_the_size_are_cut_and_not_resized(shape, top, left):
    x = torch.randn(2, 3, *shape)
    assert torch.allclose(SquareImages(8)(x), x[..., top : top + 8, left : left + 8], atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 7), (16, 9), (1, 1), (33, 8)])
def test_pictures_become_square_and_keep_a_constant(shape):
    resized = SquareImages(8)(torch.full((1, 3, *shape), 0.25))
    assert resized.shape == (1, 3, 8, 8)
    assert torch.allclose(resized, torch.tensor(0.25), atol=1e-5)


def test_unit_length():
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0], [1e-3, 0.0]])
    assert torch.allclose(UnitLength()(x), torch.tensor([[0.6, -0.8], [0.0, 0.0], [1.0, 0.0]]))
    wide = torch.tensor([[1.0, 2.0]], dtype=torch.float64)  # in which a network's rows are checked
    assert torch.allclose(UnitLength()(wide), wide / 5**0.5, rtol=0, atol=1e-15)


class Moody(nn.Module):
    """Drops by a function, which no module shows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.first(x), 0.5, self.training))


def test_a_part_that_is_written_otherwise_for_training_is_refused():
    before, _ = split_network(Moody(), "last")  # what comes before may be
    x = torch.randn(3, 2)
    assert torch.equal(before(x), before(x))
    with pytest.raises(ValueError, match="what follows first does something else in training"):
        split_network(Moody(), "first")


class Keeps(nn.Module):
    """Keeps its input on the way, as some residual networks do."""

    def forward(self, x):
        self.skip = x
        y = torch.linalg.matrix_power(torch.eye(40) + 0 * x.sum(), 3).sum() * x
        return y + self.skip


def test_networks_that_keep_their_activations_are_not_shared_by_threads():
    before, x = torch.get_num_threads(), torch.randn(20 * BATCH, 4)
    try:
        torch.set_num_threads(4)
        features = FrozenPart(Keeps(), torch.zeros(1, 4))(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(features, 40 * x + x)


class TimeFirst(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1)


def test_features_whose_first_axis_is_another_are_refused():
    with pytest.raises(ValueError, match=r"expected features \(1, ...\) of one example"):
        FrozenPart(TimeFirst(), torch.zeros(1, 7, 4))
    same = FrozenPart(TimeFirst(), torch.zeros(1, 1, 4))
    with pytest.raises(ValueError, match="the first axis is not that of the examples"):
        same(torch.zeros(5, 1, 4))
