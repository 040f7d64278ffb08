"""From a trained network to features in which it is linear.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4.1 and algorithms 2 and 3: z = S(d f_1(x; phi^B o omega^r) / d theta), the
gradient of the first logit at p coordinates that a seed chooses, with the last linear layer of the
bootstrapped network phi^B o omega^B drawn anew. The other logits' weights have no gradient, so the
layer has one output: that gives ResNet-18 the 11,169,345 coordinates of appendix B.7.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from ..jacobian.one_example import check_once
from .layers import BANDWIDTH, FourierFeatures, OverlapCodes, ResidualFeatures
from .scattering import Scattering, ScatteringFrequencies
from .tangent import Method, TangentFeatures

FeatureKind = Literal["entk", "entk-sketch", "last-layer", "fourier"]
REPRESENTATIONS = ("last-layer", "fourier")  # kinds made of the last layer's inputs


@dataclass(frozen=True)
class FeatureMap:
    """A map from examples to features; all with the same network and map get the same features.

    Attributes
    ----------
    kind : {"entk", "entk-sketch", "last-layer", "fourier"}
        Coordinates of the gradient; a sketch of all of it, in p numbers; the inputs of the last
        linear layer (appendix B.7, Table 12); or random Fourier features of these.
    num_features : int
        p; of coordinates 0, or more than there are, means all of them.
    seed : int
        Seed of the last layer's new weights, and of the chosen coordinates, sketch or frequencies.
    head : str
        Name of the last linear layer; empty: the network's last ``nn.Linear``.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> FeatureMap(num_features=10).width(network)
    10
    >>> FeatureMap().width(network)  # 40 + 9: the head has one output
    49
    """

    kind: FeatureKind = "entk"
    num_features: int = 100_000
    seed: int = 123
    head: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(FeatureKind):
            raise ValueError(
                f"features: expected one of {', '.join(get_args(FeatureKind))}, got {self.kind!r}"
            )
        fewest = int(self.kind in ("entk-sketch", "fourier"))  # which have any number of them
        if self.num_features < fewest:
            raise ValueError(
                f"num_features: expected at least {fewest} for {self.kind}, got {self.num_features}"
            )
        if self.seed < 0:
            raise ValueError(f"feature seed: expected at least 0, got {self.seed}")

    def width(self, network: nn.Module) -> int:
        """Return p, the number of features of an example."""
        _, head = self.last_layer(network)
        if self.kind == "last-layer":
            return head.in_features
        if self.kind == "fourier":
            return self.num_features
        trained = {  # one that the head shares with another layer stays there
            (id(p), module is head): p.numel() // (head.out_features if module is head else 1)
            for module in network.modules()
            for p in module.parameters(recurse=False)
            if p.requires_grad
        }
        total = sum(trained.values())
        if not total:
            raise ValueError("network: expected parameters that require gradients, got none")
        if self.kind == "entk-sketch":
            return self.num_features
        return min(self.num_features or total, total)

    def last_layer(self, network: nn.Module) -> tuple[str, nn.Linear]:
        """Return name and module of the last linear layer."""
        linear = {n: m for n, m in network.named_modules() if isinstance(m, nn.Linear)}
        name = self.head or next(reversed(linear), "")
        if name not in linear:
            raise ValueError(
                f"head: expected the name of the network's last nn.Linear, got {self.head!r}; "
                f"linear layers are {', '.join(linear) or 'none'}"
            )
        return name, linear[name]

    def bound(self, network: nn.Module) -> float | None:
        """Return the largest magnitude that a feature can have; None if it is not known.

        It is that of the last layer's inputs, if the module before has a `bound`.
        """
        if self.kind != "last-layer":
            return None
        name, head = self.last_layer(network)
        beside = list(network.get_submodule(name.rpartition(".")[0]).children())
        before = beside[: beside.index(head)] if head in beside else []
        return getattr(before[-1], "bound", None) if before else None

    def require_outputs(self, network: nn.Module, num_classes: int) -> None:
        """Refuse a last linear layer that lacks an output for each class."""
        _, head = self.last_layer(network)
        if head.out_features != num_classes:
            raise ValueError(
                f"head: the last linear layer has {head.out_features} outputs and the network "
                f"{num_classes}; name the layer that gives the logits with head"
            )

    def convexify(self, network: nn.Module) -> nn.Module:
        """Return a copy of the network with a new last layer of one output, drawn on the CPU."""
        network = copy.deepcopy(network)
        name, old = self.last_layer(network)
        return with_layer(network, name, _draw_layer(old, old.in_features, 1, self.seed))

    def extractor(
        self, network: nn.Module, *, chunk_size: int | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return x (n, ...) -> z (n, p), float32 on the CPU, of a copy in evaluation mode.

        `chunk_size` is that of :func:`~fedntk.ntk.entk_features`.
        """
        if self.kind in REPRESENTATIONS:
            both = self.extractor_with_outputs(network)
            return lambda x: both(x)[0]
        width, convexified = self.width(network), self.convexify(network)
        device, check = next(convexified.parameters()).device, check_once(convexified)
        method: Method = "sketch" if self.kind == "entk-sketch" else "subsample"
        extract = TangentFeatures(
            convexified, width, self.seed, method=method, chunk_size=chunk_size
        )

        def features(x: Tensor) -> Tensor:
            x = x.to(device)
            require_one_output(convexified, x, check)
            return extract(_channels_last(convexified, x))

        return features

    def extractor_with_outputs(
        self, network: nn.Module
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return x (n, ...) -> z (n, p) and f(x) (n, C), by one forward pass.

        As :meth:`extractor`, but not for tangent features, which would need two passes.
        """
        if self.kind not in REPRESENTATIONS:
            raise ValueError(
                f"features: expected {' or '.join(REPRESENTATIONS)}, got {self.kind!r}, which are "
                "no by-product of the outputs; use extractor"
            )
        network = copy.deepcopy(network)
        _, head = self.last_layer(network)
        device = head.weight.device
        cosines: nn.Module = nn.Identity()
        if self.kind == "fourier":
            cosines = FourierFeatures(head.in_features, self.num_features, self.seed)
            cosines.to(device)
        check = check_once(network)

        def features(x: Tensor) -> tuple[Tensor, Tensor]:
            check(x.to(device))
            with torch.no_grad():
                with record_input(head, len(x)) as seen:
                    outputs = network.eval()(x.to(device, copy=True)).cpu()
                result = cosines(seen[0])
            return result.to("cpu", torch.float32), outputs

        return features

    def to_config(self) -> dict[str, str | int]:
        """Return its entries in a message's configuration."""
        return {
            "feature-kind": self.kind,
            "num-features": self.num_features,
            "feature-seed": self.seed,
            "feature-head": self.head,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_config` returned."""
        keys = ("feature-kind", "num-features", "feature-seed", "feature-head")
        return cls(*(config[key] for key in keys))


def require_one_output(
    convexified: nn.Module, x: Tensor, check: Callable[[Tensor], None] | None = None
) -> None:
    """Refuse a convexified network that fails, or has several outputs for one of examples (n, ...).

    `check` is of all of them, and comes first.
    """
    try:
        if check is not None:
            check(x)
        with torch.no_grad():
            shape = tuple(convexified.eval()(x[:1].clone()).shape)
        fault = "" if shape == (1, 1) else f"gives {shape} for an example, expected (1, 1)"
    except RuntimeError as error:
        fault = f"fails ({error})"
    if fault:
        raise ValueError(
            f"head: with a last layer of one output the network {fault}; name the layer that gives "
            "the logits with head"
        )


@contextlib.contextmanager
def record_input(head: nn.Linear, num_examples: int) -> Iterator[list[Tensor]]:
    """Yield a list that a forward pass fills with the layer's one input, (`num_examples`, p)."""
    seen: list[Tensor] = []
    # of a copy, which no later operation of the network changes
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    try:
        yield seen
    finally:
        hook.remove()
    expected, shapes = (num_examples, head.in_features), [tuple(tensor.shape) for tensor in seen]
    if shapes != [expected]:
        raise ValueError(f"head: expected one input of shape {expected}, got {shapes}")


def with_fourier_features(
    network: nn.Module,
    num_features: int,
    seed: int,
    head: str = "",
    *,
    bandwidth: float = BANDWIDTH,
) -> nn.Module:
    """Return a copy of a network with a new last layer, of p random Fourier features of its inputs.

    So methods that compute only the last layer have any number of features, as in Fani et al., ICML
    2024 (Fed3R-RF). The seed gives the features and the layer's first weights. `head` is that of
    :class:`FeatureMap`, `bandwidth` that of :class:`~fedntk.ntk.features.layers.FourierFeatures`.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> {k: tuple(v.shape) for k, v in with_fourier_features(network, 50, 0).state_dict().items()}
    {'0.weight': (8, 4), '0.bias': (8,), '2.1.weight': (3, 50), '2.1.bias': (3,)}
    """
    make = partial(FourierFeatures, bandwidth=bandwidth)
    return _expand(network, make, num_features, seed, head)


def with_scattering_frequencies(
    network: nn.Module, num_features: int, seed: int, head: str = ""
) -> nn.Module:
    """As :func:`with_fourier_features`, of scattering coefficients' p lowest frequencies.

    :class:`~fedntk.ntk.features.scattering.ScatteringFrequencies` are for sums with noise.
    """
    scattering = next((m for m in network.modules() if isinstance(m, Scattering)), None)
    if scattering is None:
        raise ValueError("low frequencies: expected a network with Scattering, got one without")
    make = partial(ScatteringFrequencies, scattering)
    return _expand(network, lambda size, p, _: make(size, p), num_features, seed, head)


def _expand(
    network: nn.Module,
    make: Callable[[int, int, int], nn.Module],
    num_features: int,
    seed: int,
    head: str,
) -> nn.Module:
    network = copy.deepcopy(network)
    name, old = FeatureMap("fourier", num_features, seed, head).last_layer(network)
    features = make(old.in_features, num_features, seed).to(old.weight.device)
    layer = _draw_layer(old, num_features, old.out_features, seed)
    return with_layer(network, name, nn.Sequential(features, layer))


def with_residual_features(
    network: nn.Module, num_layers: int, width: int, seed: int, head: str = ""
) -> nn.Module:
    """Return a copy of a network with residual blocks of m random features before its last layer.

    They change nothing until a method such as :class:`~fedntk.strategies.DeepAFL` has computed
    them. `head` is that of :class:`FeatureMap`.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))
    >>> deep = with_residual_features(network, num_layers=2, width=5, seed=0)
    >>> {k: tuple(v.shape) for k, v in deep[2].state_dict().items()}
    {'0.omegas.0': (5, 8), '0.omegas.1': (5, 8), '1.weight': (3, 8)}
    """
    network = copy.deepcopy(network)
    name, old = FeatureMap("last-layer", head=head).last_layer(network)
    blocks = ResidualFeatures(old.in_features, num_layers, width, seed).to(old.weight.device)
    return with_layer(network, name, nn.Sequential(blocks, old))


def with_overlap_codes(
    network: nn.Module, num_limits: int, group_size: int, seed: int, head: str = ""
) -> nn.Module:
    """Return a copy of a network with a new last layer, of overlap codes of its inputs.

    L = `num_limits` and G = `group_size` are those of
    :class:`~fedntk.ntk.features.layers.OverlapCodes`. :class:`~fedntk.strategies.SAFLe` moves the
    limits to where the inputs are. The seed gives the permutation and the layer's first weights.
    `head` is that of :class:`FeatureMap`.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> coded = with_overlap_codes(network, num_limits=2, group_size=5, seed=0)
    >>> {k: tuple(v.shape) for k, v in coded[2].state_dict().items()}
    {'0.limits': (8, 2), '1.weight': (3, 98), '1.bias': (3,)}
    """
    network = copy.deepcopy(network)
    name, old = FeatureMap("last-layer", head=head).last_layer(network)
    codes = OverlapCodes(old.in_features, num_limits, group_size, seed).to(old.weight.device)
    layer = _draw_layer(old, codes.num_features, old.out_features, seed)
    return with_layer(network, name, nn.Sequential(codes, layer))


def _draw_layer(old: nn.Linear, size: int, num_outputs: int, seed: int) -> nn.Linear:
    """Return a linear layer drawn as ``nn.Linear`` draws its own, from a seed, on the CPU."""
    # not by its own initialisation, which would advance torch's global generator
    layer = nn.Linear(size, num_outputs, bias=old.bias is not None, device="meta")
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(size)
    for name, parameter in old.named_parameters(recurse=False):
        new = torch.empty(getattr(layer, name).shape).uniform_(-bound, bound, generator=generator)
        setattr(layer, name, nn.Parameter(new, requires_grad=parameter.requires_grad))
    return layer.to(old.weight)


def with_layer(network: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Return a network with a layer put in place of that of a name; it is changed."""
    if not name:
        return layer
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, layer)
    return network


def _channels_last(network: nn.Module, x: Tensor) -> Tensor:
    """Move network and images to the memory order in which a CPU convolves faster."""
    if x.ndim != 4 or x.device.type != "cpu":
        return x
    moved = x.contiguous(memory_format=torch.channels_last)
    network.to(memory_format=torch.channels_last)
    try:
        with torch.no_grad():
            network.eval()(moved[:1].clone())
    except RuntimeError:  # it views its activations in their usual order
        network.to(memory_format=torch.contiguous_format)
        return x
    return moved
