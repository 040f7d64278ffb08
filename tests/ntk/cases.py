"""One table of networks that every representation of the Jacobian is tested on, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class TiedWeights(nn.Module):
    """One matrix used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class LayerAndHead(nn.Module):
    """A linear layer, used in some way, and a head."""

    def __init__(self, width: int, hidden: int, use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.use = nn.Linear(width, hidden), nn.Linear(hidden, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self.layer, x))


def _folded(layer: nn.Linear, x: Tensor) -> Tensor:
    """Positions folded into the batch, so that a layer has more rows than examples."""
    return torch.tanh(layer(x.reshape(-1, 4))).view(len(x), -1, 6).mean(1)


class Tokens(nn.Module):
    """Layers on learned tokens of one and two rows, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.rand(1, 4)), nn.Parameter(torch.rand(2, 4))
        self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.first(self.one) + self.second(self.two).sum(0))


class Own(nn.Module):
    """Parameters of its own, one of them a number and one unused; a layer called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(2))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature * self.head(input=x * self.scale)


class TokensFirst(nn.Module):
    """An encoder over a sequence whose first axis is time and whose second is the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4, padding_idx=0)
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.feed, self.head = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.abs().mul(8).long().clamp(max=29)
        h = self.table(tokens).transpose(0, 1)
        q, k, v = (layer(h).transpose(0, 1) for layer in (self.query, self.key, self.value))
        mixed = torch.softmax(q @ k.transpose(1, 2), dim=2) @ v
        h = self.norm(h + mixed.transpose(0, 1))
        return self.head(torch.tanh(self.feed(h)).mean(0))


class Recurrent(nn.Module):
    """Torch's LSTM, which has one fused operation for all its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Unrolled(nn.Module):
    """A recurrent network of linear layers, each called at every time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16, bias=False), nn.Linear(4, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 16)
        for step in x.unbind(1):
            state = torch.tanh(self.inner(state) + self.outer(step))
        return self.head(state)


class Attention(nn.Module):
    """Torch's attention, which uses its layers' weights by function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


class CrossAttention(nn.Module):
    """Queries, keys and values that differ, the examples second; a mask of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, bias=False, add_bias_kv=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key = x.transpose(0, 1), torch.tanh(x[:, :3]).transpose(0, 1)
        causal = torch.ones(4, 3, dtype=torch.bool, device=x.device).triu(1)
        mixed, weights = self.attention(
            query, key, key.square(), x[:, :3, 0] > 1, attn_mask=causal, average_attn_weights=False
        )
        return self.head(mixed.mean(0)) + weights.square().sum((1, 2, 3))[:, None]


class ViT(nn.Module):
    """A small vision transformer with torch's encoder, which does not attend to dark patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(1, 8, 3, stride=3), nn.Linear(8, 3)
        self.token, self.places = nn.Parameter(torch.rand(1, 1, 8)), nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], dim=1)
        dark = h.mean(2) < -0.2
        h = h + self.places(torch.arange(5, device=x.device).expand(len(x), -1))
        return self.head(self.encoder(h, src_key_padding_mask=dark)[:, 0])


class GPTBlock(nn.Module):
    """Causal attention and a feed-forward layer, each after an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.second_norm = nn.RMSNorm(8), nn.RMSNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, h: Tensor) -> Tensor:
        mask = torch.full((3, 3), -torch.inf, dtype=h.dtype, device=h.device).triu(1)
        x = self.norm(x=h)
        h = h + self.attention(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return h + self.feed(self.second_norm(h))


class GPT(nn.Module):
    """A small language model: a logit for each of 4 tokens at each of 3 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(4, 8, padding_idx=0), nn.Embedding(3, 8)
        self.blocks = nn.Sequential(GPTBlock(), GPTBlock())
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.abs().mul(3).long().clamp(max=3)
        places = torch.arange(3, device=x.device).expand(len(x), -1)
        return self.head(self.blocks(self.table(tokens) + self.places(places)))


class ConvTwice(nn.Module):
    """A convolution called twice, and a norm too; another one called without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)
        self.idle, self.head = nn.Conv2d(2, 2, 1), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        h = self.norm(self.conv(torch.relu(self.norm(self.conv(x)))))
        return self.head(h.flatten(1)) + self.idle(x).mean() * 0


class TransposedTwice(nn.Module):
    """A transposed convolution called twice, once with a size for its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.ConvTranspose1d(8, 8, 2, stride=2, padding=1), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x, output_size=(3,)))
        return self.head(self.conv(h)[:, :, :3].flatten(1))


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
    "tied-weights": (TiedWeights, (5,)),
    "called-twice": (lambda: LayerAndHead(5, 5, lambda f, x: f(torch.tanh(f(x)))), (5,)),
    "functional-use": (
        lambda: LayerAndHead(5, 5, lambda f, x: torch.tanh(f(x)) + x @ f.weight),
        (5,),
    ),
    "sequence": (lambda: LayerAndHead(4, 6, lambda f, x: torch.tanh(f(x)).mean(1)), (6, 4)),
    "own-parameters": (Own, (5,)),
    "folded-positions": (lambda: LayerAndHead(4, 6, _folded), (6, 4)),
    "tokens": (Tokens, (5,)),
    "tokens-first": (TokensFirst, (7,)),
    "lstm": (Recurrent, (6, 4)),
    "unrolled": (Unrolled, (3, 4)),
    "attention": (Attention, (5, 4)),
    "attention-sizes": (lambda: Attention(add_zero_attn=True, bias=False), (5, 4)),
    "cross-attention": (CrossAttention, (4, 8)),
    "vit": (ViT, (1, 6, 6)),
    "gpt": (GPT, (3,)),
    "rms-norm": (lambda: _mlp(nn.RMSNorm(7), nn.GELU()), (5,)),
    "positions-out": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), (3, 4)),
    "no-outputs-axis": (lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), (5,)),
    "transposed": (_transposed, (12, 1, 2)),
    "transposed-twice": (TransposedTwice, (8, 2)),
    "frozen-transposed": (lambda: _frozen(TransposedTwice(), "conv.weight", "head.bias"), (8, 2)),
    "conv-twice": (ConvTwice, (2, 4, 4)),
    "shuffled": (lambda: LayerAndHead(5, 6, lambda f, x: torch.tanh(f(x.flip(0))).flip(0)), (5,)),
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


def one_by_one(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The definition of the Jacobian: a backward pass for each example, by itself, and output."""
    parameters = {n: p for n, p in model.eval().named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(
            f, list(parameters.values()), retain_graph=True, materialize_grads=True,
            allow_unused=True,
        )
        for example in x
        for f in model(example[None]).flatten()
    ]  # fmt: skip
    stacked = zip(parameters, map(torch.stack, zip(*rows, strict=True)), strict=True)
    return {name: tensor.unflatten(0, (len(x), -1)) for name, tensor in stacked}
