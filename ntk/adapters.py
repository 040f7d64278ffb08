"""Low-rank adapters (LoRA) of a frozen network: they and its last layer are trained and sent.

Sources: Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, ICLR 2022, eq. (3):
W x + (alpha / r) B A x, with A random and B = 0 at the start. Sun et al., *Improving LoRA in
Privacy-preserving Federated Learning*, ICLR 2024 (FFA-LoRA), section 4: A stays as it was drawn, so
that the mean of the clients' B is that of their B A. Tangent LoRA is this package's: at B = 0 the
gradient at A is 0, and that at B is (alpha / r) (df/dW) A^T, so that a network's linearisation in
its adapters is linear in these features, and sums over them solve for it.

Layers are those of peft, which takes seconds to import, so that it is imported when it is needed.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from .features.feature_map import FeatureMap, with_layer
from .features.frozen import BATCH, EvaluationMode, probe_outputs
from .features.tangent import TangentFeatures


class AdaptedNetwork(EvaluationMode):
    """A network whose state dict has only what is trained; it stays in evaluation mode.

    What is frozen comes from the same weights on all machines, and is not sent. It may be any
    network with parameters that require no gradient, such as one of peft's.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 3))
    >>> list(AdaptedNetwork(network).state_dict())
    ['network.1.weight', 'network.1.bias']
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.register_state_dict_post_hook(_leave_out_frozen)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_frozen)  # type: ignore[no-untyped-call]
        for module in network.modules():  # without gradients torch reads their layers' own weights
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False

    def frozen_state(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that are not trained, by name."""
        state = self.network.state_dict(prefix="network.", keep_vars=True)
        return {name: tensor for name, tensor in state.items() if not tensor.requires_grad}


def _leave_out_frozen(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name in module.frozen_state():
        state.pop(prefix + name, None)


def _add_frozen(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    state.update({prefix + name: tensor for name, tensor in module.frozen_state().items()})


def with_lora(
    network: nn.Module,
    example: Tensor,
    rank: int = 4,
    *,
    alpha: float = 8.0,
    targets: Sequence[str] = (),
    seed: int = 0,
    head: str = "",
    train_a: bool = True,
) -> AdaptedNetwork:
    """Return a copy of a network in which adapters and the last linear layer are trained.

    Its outputs are the network's, until B is trained. Layers that drop at random drop nothing, and
    BatchNorm keeps its statistics.

    Parameters
    ----------
    network : nn.Module
        Map from (n, ...) to (n, C).
    example : Tensor, shape (1, ...)
        One example, to see which layers the network calls.
    rank : int
        r, of A (r, d_in) and B (d_out, r).
    alpha : float
        Adapters are multiplied by alpha / r.
    targets : sequence of str
        Names of the layers that are adapted, or ends of names after a dot. Empty: all ``nn.Linear``
        and ``nn.Conv2d`` but the last linear layer, grouped or dilated convolutions, and layers
        that are not called, such as those in ``nn.MultiheadAttention``.
    seed : int
        Seed of A.
    head : str
        Name of the layer that is trained in full; by default the last ``nn.Linear``.
    train_a : bool
        Whether A is trained; False: FFA-LoRA.

    Raises
    ------
    ValueError
        If no layer is adapted, or the rank is above a layer's.
    """
    if find_spec("peft") is None:
        raise ValueError("peft is not installed; install fedntk[adapters]")
    if rank < 1 or alpha <= 0:
        raise ValueError(f"expected a rank and an alpha above 0, got {rank} and {alpha}")
    network = copy.deepcopy(network)
    head, _ = FeatureMap("last-layer", head=head).last_layer(network)
    layers = _layers(network, example, targets, head)
    for name, layer in layers.items():
        height, width = layer.get_parameter("weight").flatten(1).shape
        if rank > min(height, width):
            raise ValueError(
                f"rank: expected at most {min(height, width)} with {name}, a matrix of {height} x "
                f"{width}, got {rank}; lower it, or leave that layer out of the targets"
            )
    _inject(network, layers, rank, alpha, seed)
    for name, parameter in network.named_parameters():
        in_head = name.startswith(f"{head}.")
        in_a, in_b = ".lora_A." in name, ".lora_B." in name
        parameter.requires_grad_(in_head or in_b or (in_a and train_a))
    return AdaptedNetwork(network)


def _layers(
    network: nn.Module, example: Tensor, targets: Sequence[str], head: str
) -> dict[str, nn.Module]:
    """Return the layers to adapt; the network has to call them, not only to read their weights."""
    possible, called = dict[str, nn.Module](), set[nn.Module]()
    for name, module in network.named_modules():
        fits = isinstance(module, nn.Linear)
        if isinstance(module, nn.Conv2d):
            plain = type(module) is nn.Conv2d and module.padding_mode == "zeros"
            fits = (plain or module.kernel_size == (1, 1)) and module.groups == 1
            fits = fits and module.dilation == (1, 1)
        if fits and name != head:
            possible[name] = module
    hooks = [
        layer.register_forward_pre_hook(lambda module, _: called.add(module))
        for layer in possible.values()
    ]
    with torch.no_grad():
        probe_outputs(network.eval(), 1, example)
    for hook in hooks:
        hook.remove()
    possible = {name: layer for name, layer in possible.items() if layer in called}
    chosen = dict(possible)
    if targets:
        chosen = {n: m for n, m in possible.items() if any(_is_named(n, t) for t in targets)}
    unmatched = [t for t in targets if not any(_is_named(name, t) for name in chosen)]
    if not chosen or unmatched:
        names = ", ".join(possible) or "none besides the last linear layer, which is trained whole"
        what = ", ".join(unmatched) or "none"
        raise ValueError(f"targets: expected layers to adapt, such as {names}; got {what}")
    return chosen


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _inject(
    network: nn.Module, layers: Mapping[str, Any], rank: int, alpha: float, seed: int
) -> None:
    """Put adapters around layers, under all names that these have."""
    from peft import LoraConfig, inject_adapter_in_model

    every = dict(network.named_modules(remove_duplicate=False))
    for name, layer in layers.items():
        if isinstance(layer, nn.Conv2d):  # peft would make A and B of a user's own class
            how: Any = {name: getattr(layer, name) for name in ("kernel_size", "stride", "padding")}
            how |= {"bias": False, "device": "meta"}
            twin = nn.Conv2d(layer.in_channels, layer.out_channels, **how)
            twin.weight = layer.weight
            with_layer(network, name, twin)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules="|".join(map(re.escape, layers)),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, network)
    for name, layer in layers.items():
        adapted: Any = network.get_submodule(name)
        adapted.base_layer = layer
        for other, module in every.items():
            if module is layer:
                with_layer(network, other, adapted)


class TangentLoRA(nn.Module):
    """Tangent features x (n, ...) -> (n, p): the gradient of one logit at B and the last layer.

    The last layer has one output and is drawn anew, as in :class:`~fedntk.ntk.FeatureMap`. With L
    adapted layers p is r times the sum of their d_out, and the number of the last layer's weights.
    Arguments are those of :func:`with_lora`; the seed also gives the new layer.
    """

    def __init__(self, network: nn.Module, example: Tensor, rank: int = 4, **options: Any) -> None:
        super().__init__()
        adapted = with_lora(network, example, rank, **options, train_a=False)
        head = f"network.{options['head']}" if options.get("head") else ""
        place = FeatureMap("entk", 0, options.get("seed", 0), head)
        place.require_outputs(adapted, probe_outputs(adapted, 1, example)[1].shape[-1])
        self.network = place.convexify(adapted)
        self.num_features = place.width(adapted)
        self._names = [n for n, p in self.network.named_parameters() if p.requires_grad]

    def forward(self, x: Tensor) -> Tensor:
        """Return the features on the CPU, in the network's dtype."""
        for name in self._names:  # what holds this module may have frozen it
            self.network.get_parameter(name).requires_grad_(True)
        dtype = self.network.get_parameter(self._names[0]).dtype
        extract = TangentFeatures(
            self.network, self.num_features, 0, dtype=dtype, chunk_size=max(len(x), BATCH)
        )
        with torch.enable_grad():
            return extract(x)
