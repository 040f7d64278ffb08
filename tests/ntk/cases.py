"""One table of networks that every representation of the Jacobian is tested on, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Layers, parameters and others by name, and a function that uses them."""

    def __init__(self, use: Callable[..., Tensor], **members: Any) -> None:
        super().__init__()
        self.use = use
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def layer_and_head(width: int, hidden: int, apply: Callable[..., Tensor]) -> Net:
    """A linear layer, applied in some way, and a head."""
    layers = {"layer": nn.Linear(width, hidden), "head": nn.Linear(hidden, 3)}
    return Net(lambda m, x: m.head(m.apply_layer(m.layer, x)), **layers, apply_layer=apply)


def _tied() -> Net:
    """One matrix used by two layers."""
    net = Net(
        lambda m, x: m.head(torch.tanh(m.second(torch.tanh(m.first(x))))),
        first=nn.Linear(5, 5), second=nn.Linear(5, 5), head=nn.Linear(5, 3),
    )  # fmt: skip
    net.second.weight = net.first.weight
    return net


def _folded(layer: nn.Linear, x: Tensor) -> Tensor:
    """Positions folded into the batch, so that a layer has more rows than examples."""
    return torch.tanh(layer(x.reshape(-1, 4))).view(len(x), -1, 6).mean(1)


def _tokens() -> Net:
    """Layers on learned tokens of one and two rows, whatever the batch."""
    return Net(
        lambda m, x: m.head(x * m.first(m.one) + m.second(m.two).sum(0)),
        one=nn.Parameter(torch.rand(1, 4)), two=nn.Parameter(torch.rand(2, 4)),
        first=nn.Linear(4, 5), second=nn.Linear(4, 5), head=nn.Linear(5, 3),
    )  # fmt: skip


def _parameters() -> Net:
    """Parameters outside layers, one a number and one unused; a layer called by keyword."""
    return Net(
        lambda m, x: m.temperature * m.head(input=x * m.scale),
        scale=nn.Parameter(torch.rand(5)), unused=nn.Parameter(torch.rand(2)),
        temperature=nn.Parameter(torch.tensor(0.7)), head=nn.Linear(5, 3),
    )  # fmt: skip


def _tokens_first() -> Net:
    """An encoder over a sequence whose first axis is time and whose second is the examples."""

    def use(m: Any, x: Tensor) -> Tensor:
        h = m.table(x.abs().mul(8).long().clamp(max=29)).transpose(0, 1)
        q, k, v = (layer(h).transpose(0, 1) for layer in (m.query, m.key, m.value))
        mixed = torch.softmax(q @ k.transpose(1, 2), dim=2) @ v
        h = m.norm(h + mixed.transpose(0, 1))
        return m.head(torch.tanh(m.feed(h)).mean(0))

    layers = {"table": nn.Embedding(30, 4, padding_idx=0)}
    layers |= {name: nn.Linear(4, 4) for name in ("query", "key", "value")}
    return Net(use, **layers, norm=nn.LayerNorm(4), feed=nn.Linear(4, 8), head=nn.Linear(8, 3))


def _unrolled() -> Net:
    """A recurrent network of linear layers, each called at every time."""

    def use(m: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 16)
        for step in x.unbind(1):
            state = torch.tanh(m.inner(state) + m.outer(step))
        return m.head(state)

    inner = nn.Linear(16, 16, bias=False)
    return Net(use, inner=inner, outer=nn.Linear(4, 16), head=nn.Linear(16, 3))


def _attention(**options: Any) -> Net:
    """Torch's attention, which uses its layers' weights by function."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
    head = nn.Linear(4, 3)
    return Net(lambda m, x: m.head(m.attention(x, x, x)[0].mean(1)), attention=attention, head=head)


def _cross_attention() -> Net:
    """Queries, keys and values that differ, the examples second; a mask of each kind."""

    def use(m: Any, x: Tensor) -> Tensor:
        query, key = x.transpose(0, 1), torch.tanh(x[:, :3]).transpose(0, 1)
        causal = torch.ones(4, 3, dtype=torch.bool, device=x.device).triu(1)
        mixed, weights = m.attention(
            query, key, key.square(), x[:, :3, 0] > 1, attn_mask=causal, average_attn_weights=False
        )
        return m.head(mixed.mean(0)) + weights.square().sum((1, 2, 3))[:, None]

    attention = nn.MultiheadAttention(8, 2, bias=False, add_bias_kv=True)
    return Net(use, attention=attention, head=nn.Linear(8, 3))


def _vit() -> Net:
    """A small vision transformer with torch's encoder, which does not attend to dark patches."""

    def use(m: Any, x: Tensor) -> Tensor:
        h = m.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([m.token.expand(len(x), -1, -1), h], dim=1)
        dark = h.mean(2) < -0.2
        h = h + m.places(torch.arange(5, device=x.device).expand(len(x), -1))
        return m.head(m.encoder(h, src_key_padding_mask=dark)[:, 0])

    layers = {"patches": nn.Conv2d(1, 8, 3, stride=3), "head": nn.Linear(8, 3)}
    layers |= {"token": nn.Parameter(torch.rand(1, 1, 8)), "places": nn.Embedding(5, 8)}
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    return Net(use, **layers, encoder=nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)))


def _gpt_block() -> Net:
    """Causal attention and a feed-forward layer, each after an RMSNorm."""

    def use(m: Any, h: Tensor) -> Tensor:
        mask = torch.full((3, 3), -torch.inf, dtype=h.dtype, device=h.device).triu(1)
        x = m.norm(x=h)
        h = h + m.attention(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return h + m.feed(m.second_norm(h))

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return Net(use, attention=attention, norm=nn.RMSNorm(8), second_norm=nn.RMSNorm(8), feed=feed)


def _gpt() -> Net:
    """A small language model: a logit for each of 4 tokens at each of 3 positions."""

    def use(m: Any, x: Tensor) -> Tensor:
        places = torch.arange(3, device=x.device).expand(len(x), -1)
        tokens = x.abs().mul(3).long().clamp(max=3)
        return m.head(m.blocks(m.table(tokens) + m.places(places)))

    layers = {"table": nn.Embedding(4, 8, padding_idx=0), "places": nn.Embedding(3, 8)}
    blocks = nn.Sequential(_gpt_block(), _gpt_block())
    return Net(use, **layers, blocks=blocks, head=nn.Linear(8, 4, bias=False))


def _conv_twice() -> Net:
    """A convolution called twice, and a norm too; another one called without effect."""

    def use(m: Any, x: Tensor) -> Tensor:
        m.idle(x)
        h = m.norm(m.conv(torch.relu(m.norm(m.conv(x)))))
        return m.head(h.flatten(1)) + m.idle(x).mean() * 0

    layers = {"conv": nn.Conv2d(2, 2, 3, padding=1), "norm": nn.GroupNorm(1, 2)}
    return Net(use, **layers, idle=nn.Conv2d(2, 2, 1), head=nn.Linear(32, 3))


def _transposed_twice() -> Net:
    """A transposed convolution called twice, once with a size for its outputs."""

    def use(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.conv(x, output_size=(3,)))
        return m.head(m.conv(h)[:, :, :3].flatten(1))

    conv = nn.ConvTranspose1d(8, 8, 2, stride=2, padding=1)
    return Net(use, conv=conv, head=nn.Linear(24, 3))


def _with_head(features: int, *layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))


def _narrow_maps() -> nn.Module:
    """Convolutions with few places and many channels, which are kept in factors."""
    return _with_head(
        20,
        nn.Conv2d(8, 12, 3, stride=2, padding=1, padding_mode="circular", groups=2),
        nn.ReLU(),
        nn.Conv2d(12, 16, (1, 3), padding="same", dilation=(1, 2), bias=False),
        nn.ReLU(),
        nn.Conv2d(16, 20, 2),
    )


def _transposed() -> nn.Module:
    """Transposed convolutions with overlapping patches, few places and many channels."""
    return _with_head(
        108,
        nn.ConvTranspose2d(12, 8, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(8, 4, (1, 2), dilation=(2, 3), output_padding=(1, 2), bias=False),
    )


def _frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(requires_grad=False)
    return model


def _normed(norm: nn.Module) -> nn.Module:
    model = _with_head(64, nn.Conv2d(2, 4, 3), norm, nn.ReLU())
    model(torch.randn(8, 2, 6, 6))  # running statistics other than 0 and 1
    return model


def _mlp(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), *middle, nn.Linear(7, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "mlp": (lambda: _mlp(nn.ReLU()), (5,)),
    "in-place": (lambda: _mlp(nn.ReLU(inplace=True)), (5,)),
    "single-output": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), (5,)),
    "frozen-layer": (
        lambda: _frozen(
            _mlp(nn.Tanh(), nn.Linear(7, 7), nn.Tanh()), "2.weight", "2.bias", "0.bias", "4.weight"
        ),
        (5,),
    ),
    "tied-weights": (_tied, (5,)),
    "called-twice": (lambda: layer_and_head(5, 5, lambda f, x: f(torch.tanh(f(x)))), (5,)),
    "functional-use": (
        lambda: layer_and_head(5, 5, lambda f, x: torch.tanh(f(x)) + x @ f.weight),
        (5,),
    ),
    "sequence": (lambda: layer_and_head(4, 6, lambda f, x: torch.tanh(f(x)).mean(1)), (6, 4)),
    "own-parameters": (_parameters, (5,)),
    "folded-positions": (lambda: layer_and_head(4, 6, _folded), (6, 4)),
    "tokens": (_tokens, (5,)),
    "tokens-first": (_tokens_first, (7,)),
    "lstm": (
        lambda: Net(
            lambda m, x: m.head(m.lstm(x)[0][:, -1]),
            lstm=nn.LSTM(4, 5, batch_first=True),
            head=nn.Linear(5, 3),
        ),
        (6, 4),
    ),
    "unrolled": (_unrolled, (3, 4)),
    "attention": (_attention, (5, 4)),
    "attention-sizes": (lambda: _attention(add_zero_attn=True, bias=False), (5, 4)),
    "cross-attention": (_cross_attention, (4, 8)),
    "vit": (_vit, (1, 6, 6)),
    "gpt": (_gpt, (3,)),
    "rms-norm": (lambda: _mlp(nn.RMSNorm(7), nn.GELU()), (5,)),
    "positions-out": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), (3, 4)),
    "no-outputs-axis": (lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), (5,)),
    "transposed": (_transposed, (12, 1, 2)),
    "transposed-twice": (_transposed_twice, (8, 2)),
    "frozen-transposed": (lambda: _frozen(_transposed_twice(), "conv.weight", "head.bias"), (8, 2)),
    "conv-twice": (_conv_twice, (2, 4, 4)),
    "shuffled": (lambda: layer_and_head(5, 6, lambda f, x: torch.tanh(f(x.flip(0))).flip(0)), (5,)),
    "narrow-maps": (_narrow_maps, (8, 4, 4)),
    "frozen-convolution": (
        lambda: _frozen(
            _with_head(4, nn.Conv1d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 7)),
            "0.weight",
            "2.bias",
        ),
        (3, 7),
    ),
    "conv-3d": (lambda: _with_head(12, nn.Conv3d(4, 6, 2), nn.Tanh()), (4, 2, 3, 2)),
    "depthwise": (lambda: _with_head(8, nn.Conv2d(4, 8, 3, groups=4), nn.ReLU()), (4, 3, 3)),
    "cnn": (
        lambda: _with_head(4, nn.Conv2d(2, 4, 3, groups=2, dilation=2), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 7, 7),
    ),
    "batch-norm": (lambda: _normed(nn.BatchNorm2d(4)), (2, 6, 6)),
    "group-norm": (lambda: _normed(nn.GroupNorm(2, 4)), (2, 6, 6)),
    "layer-norm": (lambda: _mlp(nn.LayerNorm(7), nn.GELU()), (5,)),
    "dropout": (lambda: _mlp(nn.Dropout(0.5), nn.ReLU()), (5,)),
}


def make(name: str, num_examples: int = 6) -> tuple[nn.Module, Tensor]:
    """Network and examples of a case, in float64."""
    build, shape = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(sum(map(ord, name)))
        model = build().double()
        x = torch.randn(num_examples, *shape, dtype=torch.float64)
    return model, x


def one_by_one(
    model: nn.Module, x: Tensor, value: Callable[[Tensor, int], Tensor] = lambda f, _: f
) -> dict[str, Tensor]:
    """The definition of the Jacobian: a backward pass for each example, by itself, and output.

    `value` may make other outputs of the network's and the example's number.
    """
    parameters = {n: p for n, p in model.eval().named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(
            f, list(parameters.values()), retain_graph=True, materialize_grads=True,
            allow_unused=True,
        )
        for i, example in enumerate(x)
        for f in value(model(example[None]), i).flatten()
    ]  # fmt: skip
    stacked = zip(parameters, map(torch.stack, zip(*rows, strict=True)), strict=True)
    return {name: tensor.unflatten(0, (len(x), -1)) for name, tensor in stacked}
