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
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .features.feature_map import FeatureMap, require_one_output, with_layer
from .features.frozen import BATCH, EvaluationMode, probe_outputs
from .features.tangent import TangentFeatures
from .first_weights import seed_for
from .jacobian.attention import no_fast_path


class AdaptedNetwork(EvaluationMode):
    """A network whose state dict has only what is trained; it stays in evaluation mode.

    What is frozen comes from the same weights on all machines, and is not sent. It may be any
    network with parameters that require no gradient, such as one of peft's; those that do not when
    it is passed stay frozen. The buffer `scalings` has each adapter's alpha / r.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 3))
    >>> list(AdaptedNetwork(network).state_dict())
    ['network.1.weight', 'network.1.bias']
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        scalings = [getattr(module, "scaling", None) for module in network.modules()]
        factors = [v for each in scalings if isinstance(each, dict) for v in each.values()]
        self.register_buffer("scalings", torch.tensor(factors, dtype=torch.float64))
        state = self.state_dict(keep_vars=True)
        self._frozen = [name for name, tensor in state.items() if not tensor.requires_grad]
        self.register_state_dict_post_hook(_leave_out_frozen)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_frozen)  # type: ignore[no-untyped-call]
        for module in network.modules():  # without gradients torch reads their layers' own weights
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False

    def frozen_state(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that are not trained, by name."""
        state = self.network.state_dict(prefix="network.") | {"scalings": self.scalings}
        return {name: state[name] for name in self._frozen}


def _leave_out_frozen(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name in module._frozen:
        state.pop(prefix + name, None)


def _add_frozen(module: Any, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
    *_, errors = others
    for name, tensor in module.frozen_state().items():
        passed = state.setdefault(prefix + name, tensor)
        if not torch.equal(passed.to(tensor), tensor):
            errors.append(
                f"{prefix + name} is frozen: expected its own numbers or none, got others"
            )


def with_lora(
    network: nn.Module,
    example: Tensor,
    rank: int = 4,
    *,
    alpha: float = 8.0,
    targets: Sequence[str] = (),
    seed: int = 0,
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
        and ``nn.Conv2d`` but the last linear layer, convolutions that are grouped, dilated or pad
        with other numbers than 0, layers with a parametrised weight, and layers that are not
        called, such as those in ``nn.MultiheadAttention``.
    seed : int
        Seed of A.
    train_a : bool
        Whether A is trained; False: FFA-LoRA.

    Raises
    ------
    ValueError
        If no layer is adapted, the rank is above a layer's, the network has adapters, its last
        layer shares its weight, or it does not call all adapters or has other outputs with them.
    """
    if find_spec("peft") is None:
        raise ValueError("peft is not installed; install fedntk[adapters]")
    if not isinstance(rank, Integral) or rank < 1:
        raise ValueError(f"rank: expected a whole number above 0, got {rank!r}")
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha: expected a finite number above 0, got {alpha}")
    _require_plain(network)
    network = copy.deepcopy(network).eval()
    inputs, before, _ = _outputs(network, example, [])
    head, last = FeatureMap("last-layer").last_layer(network)
    if not _has_weight(last):
        raise ValueError(
            f"the last layer {head}: expected a weight of its own, got one that a parametrisation "
            "computes; remove that before"
        )
    for name, module in network.named_modules():
        if module is not last and {*last.parameters()} & {*module.parameters(recurse=False)}:
            raise ValueError(
                f"the last layer {head} shares its weight with {name}, which is frozen; give it a "
                "copy of that weight"
            )
    layers, counts = _layers(network, inputs, targets, head)
    for name, layer in layers.items():
        height, width = layer.get_parameter("weight").flatten(1).shape
        if rank > min(height, width):
            raise ValueError(
                f"rank: expected at most {min(height, width)} with {name}, a matrix of {height} x "
                f"{width}, got {rank}; lower it, or leave that layer out of the targets"
            )
    _inject(network, layers, int(rank), alpha, seed)
    for name, parameter in network.named_parameters():
        in_head = name.startswith(f"{head}.")
        in_a, in_b = ".lora_A." in name, ".lora_B." in name
        parameter.requires_grad_(in_head or in_b or (in_a and train_a))
    _require_used(network, inputs, before, {name: counts[layer] for name, layer in layers.items()})
    return AdaptedNetwork(network)


def merge_adapters(network: nn.Module) -> nn.Module:
    """Return a copy in which each adapter's (alpha / r) B A is added to its layer's weight.

    It has the layers and names of the network without adapters, and the outputs of the one with
    them, to rounding. It is in evaluation mode, and all its parameters can be trained. A weight
    that several layers share becomes their own. ValueError if there are no adapters, if they are
    not finite, or with :class:`TangentLoRA`: its model is linear in the adapters, which no weights
    of the network are.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    every = [*network.modules()]
    if any(isinstance(module, TangentLoRA) for module in every):
        raise ValueError(
            "tangent LoRA: a model that is linear in adapters cannot be merged into weights; use "
            "its predictor as it is, or train with lora or ffa-lora"
        )
    if not any(isinstance(module, BaseTunerLayer) for module in every):
        raise ValueError("expected a network with adapters, got none")
    network = copy.deepcopy(network)
    for name, module in [*network.named_modules()]:
        if isinstance(module, PeftModel):
            network = with_layer(network, name, module.merge_and_unload(safe_merge=True))
    for name, module in [*network.named_modules(remove_duplicate=False)]:
        if isinstance(module, BaseTunerLayer):
            layer: Any = module.get_base_layer()
            if not module.merged:
                layer.weight = nn.Parameter(layer.weight.detach().clone())
                module.merge(safe_merge=True)
            network = with_layer(network, name, layer)
    for name, module in [*network.named_modules(remove_duplicate=False)]:
        if isinstance(module, AdaptedNetwork):
            network = with_layer(network, name, module.network)
    return network.eval().requires_grad_(True)


def _require_plain(network: nn.Module) -> None:
    """Refuse a network with adapters, or of numbers in which these cannot be trained or sent."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in network.named_modules():
        if isinstance(module, BaseTunerLayer | AdaptedNetwork):
            raise ValueError(
                f"expected a network without adapters, got some in {name or 'it'}; wrap it in "
                "AdaptedNetwork as it is, or pass the network without them"
            )
    for name, parameter in network.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"expected weights in float32 or float64, got {name} in {parameter.dtype}; convert "
                "them with network.float()"
            )


def _outputs(
    network: nn.Module, example: Tensor, layers: Sequence[nn.Module], cure: str = ""
) -> tuple[Tensor, Tensor, Counter[nn.Module]]:
    """Return inputs, outputs, and how often the network calls each of some layers."""
    counts = Counter[nn.Module]()
    hooks = [
        layer.register_forward_pre_hook(lambda module, _: counts.update([module]))
        for layer in layers
    ]
    try:
        with torch.no_grad(), no_fast_path(network):
            probe, outputs = probe_outputs(network, 1, example)
    except Exception as error:  # whatever a user's forward raises
        raise ValueError(
            f"the network fails for an example of shape {tuple(example.shape)} in {example.dtype}"
            f"{cure}: {type(error).__name__}: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(outputs, Tensor):
        raise ValueError(f"expected one tensor of outputs, got a {type(outputs).__name__}")
    return probe, outputs, counts


def _require_used(
    network: nn.Module, example: Tensor, before: Tensor, counts: Mapping[str, int]
) -> None:
    """Refuse adapters that the network passes by, or that change it at B = 0."""
    parts = {name: network.get_submodule(f"{name}.lora_B.default") for name in counts}
    reads = " with adapters; its forward may read what only the layers have"
    _, after, calls = _outputs(network, example, [*parts.values()], reads)
    passed = [name for name, part in parts.items() if calls[part] != counts[name]]
    if passed:
        raise ValueError(
            f"targets: the network reaches {', '.join(passed)} past their adapters, as by a list "
            "of layers or by their class; hold layers in nn.ModuleList, or leave those out"
        )
    scale = 1e-5 * float(before.abs().max())
    if before.shape != after.shape or not torch.allclose(
        after, before, rtol=0, atol=scale, equal_nan=True
    ):
        raise ValueError(
            "expected the same outputs with adapters at B = 0, got others: the network's forward "
            "asks for the class of a layer, or draws at random"
        )


def _layers(
    network: nn.Module, example: Tensor, targets: Sequence[str], head: str
) -> tuple[dict[str, nn.Module], Counter[nn.Module]]:
    """Return the layers to adapt, and how often the network calls each."""
    possible = dict[str, nn.Module]()
    for name, module in network.named_modules():
        fits = isinstance(module, nn.Linear)
        if isinstance(module, nn.Conv2d):
            fits = type(module) is nn.Conv2d or module.kernel_size == (1, 1)
            fits = fits and module.padding_mode == "zeros" and module.groups == 1
            fits = fits and module.dilation == (1, 1)
        if fits and _has_weight(module) and name != head:
            possible[name] = module
    _, _, counts = _outputs(network, example, [*possible.values()])
    possible = {name: layer for name, layer in possible.items() if counts[layer]}
    chosen = dict(possible)
    if targets:
        chosen = {n: m for n, m in possible.items() if any(_is_named(n, t) for t in targets)}
    unmatched = [t for t in targets if not any(_is_named(name, t) for name in chosen)]
    if not chosen or unmatched:
        names = ", ".join(possible) or "none besides the last linear layer, which is trained whole"
        what = ", ".join(unmatched) or "none"
        raise ValueError(f"targets: expected layers to adapt, such as {names}; got {what}")
    return chosen, counts


def _has_weight(layer: nn.Module) -> bool:
    """Whether a layer's weight is a parameter, and not computed of others."""
    return "weight" in dict(layer.named_parameters(recurse=False))


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
        torch.manual_seed(seed_for(seed, "adapters"))
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
        place = FeatureMap("entk", 0, seed_for(options.get("seed", 0), "tangents"))
        inputs, outputs = probe_outputs(adapted, 1, example)
        place.require_outputs(adapted, outputs.shape[-1])
        self.network = place.convexify(adapted)
        require_one_output(self.network, inputs)
        self.num_features = place.width(adapted)
        self._names = [n for n, p in self.network.named_parameters() if p.requires_grad]

    def forward(self, x: Tensor) -> Tensor:
        """Return the features on the CPU, in the network's dtype."""
        for name in self._names:  # what holds this module may have frozen it
            self.network.get_parameter(name).requires_grad_(True)
        dtype = self.network.get_parameter(self._names[0]).dtype
        if not len(x):
            return torch.zeros(0, self.num_features, dtype=dtype)
        extract = TangentFeatures(self.network, self.num_features, 0, dtype=dtype, chunk_size=BATCH)
        with torch.enable_grad():
            return extract(x)
