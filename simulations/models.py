"""The papers' networks, by name."""

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedntk.ntk import (
    AdaptedNetwork,
    CentredInputs,
    TangentLoRA,
    with_fourier_features,
    with_lora,
    with_scattering_frequencies,
)
from fedntk.ntk.feature_learning import initial_std
from fedntk.ntk.features.centred_inputs import CENTRE
from fedntk.ntk.features.feature_map import FeatureMap
from fedntk.ntk.features.frozen import (
    EvaluationMode,
    FrozenPart,
    LastInputs,
    UnitLength,
    last_block,
    probe_outputs,
    split_network,
)
from fedntk.ntk.features.scattering import LogStandardise, Scattering
from fedntk.ntk.first_weights import draw_weights, seed_for
from fedntk.ntk.losses import require_scores
from fedntk.ntk.predictors.network import dtype_of
from fedntk.ntk.support.files import DamagedFile
from fedntk.ntk.support.shared_arrays import first_names, require_separate
from fedntk.strategies.core.array_archive import OldFormat, load_tensors

from .config.config import BaseConfig
from .config.importing import import_named
from .config.settings import ConfigError, nearest
from .errors import first_line, naming
from .pretrained import EXAMPLE, PLACE, load_pretrained

InputShape = tuple[int, ...]


def mlp(
    input_shape: InputShape, num_classes: int, width: int = 100, *, batch_norm: bool = False
) -> nn.Module:
    """Two-layer perceptron: Kaiming-normal weights, zero biases (Yue et al. 2022, section 6)."""
    layers = _dense(math.prod(input_shape), width, num_classes, batch_norm=batch_norm)
    for layer in (layers[0], layers[-1]):
        nn.init.kaiming_normal_(layer.get_parameter("weight"))
        nn.init.zeros_(layer.get_parameter("bias"))
    return nn.Sequential(nn.Flatten(), *layers)


def linear(input_shape: InputShape, num_classes: int) -> nn.Module:
    """One linear layer with a bias, on all numbers of an example."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def simple_cnn(input_shape: InputShape, num_classes: int) -> nn.Module:
    """Two convolutions with max-pooling, two linear layers (Yu et al. 2022, for FMNIST)."""
    channels, height, width = _image(input_shape, "simple-cnn", at_least=8)
    convolutions = *_convolution(channels, 32, 3), *_convolution(32, 64, 3)
    dense = _dense(64 * (height // 4) * (width // 4), 128, num_classes)
    return nn.Sequential(*convolutions, nn.Flatten(), *dense)


def lenet(input_shape: InputShape, num_classes: int, *, batch_norm: bool = False) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling (LeCun et al., *Gradient-based learning*, 1998)."""
    name = "lenet-bn" if batch_norm else "lenet"
    channels, *size = _image(input_shape, name, at_least=16)
    flat = 16 * math.prod((side // 2 - 4) // 2 for side in size)
    return nn.Sequential(
        *_convolution(channels, 6, 5, batch_norm=batch_norm),
        *_convolution(6, 16, 5, padding=0, batch_norm=batch_norm),
        nn.Flatten(),
        *_dense(flat, 120, 84, num_classes),
    )


def digits_cnn(input_shape: InputShape, num_classes: int, width: int = 100) -> nn.Module:
    """Four convolutions and three linear layers with BatchNorm, for digits of several domains.

    After Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*,
    ICLR 2021, appendix, whose network has three convolutions: 5 x 5, max-pooling after the first
    and the second, BatchNorm after each layer but the last. With width W = 512 its layers are as
    wide: W/8, W/8, W/4 and W/4 filters, then 4 W and W hidden units.
    """
    channels, *size = _image(input_shape, "digits-cnn", at_least=8)
    if width < 8:
        raise ConfigError(f"width: expected at least 8 with model = digits-cnn, got {width}")
    filters = [channels, width // 8, width // 8, width // 4, width // 4]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(filters)):
        layers += _convolution(before, after, 5, batch_norm=True)[: None if i < 2 else -1]
    flat = filters[-1] * (size[0] // 4) * (size[1] // 4)
    dense = _dense(flat, 4 * width, width, num_classes, batch_norm=True)
    return nn.Sequential(*layers, nn.Flatten(), *dense)


class CharLSTM(nn.Module):
    """Two LSTM layers on characters; the last state gives the next one (LEAF's Shakespeare).

    Examples of `input_shape` (length,) are positions in the alphabet, as integers or whole floats.
    """

    def __init__(self, input_shape: InputShape, num_classes: int, width: int = 256) -> None:
        if len(input_shape) != 1:
            raise ConfigError(
                f"model = char-lstm: expected text of shape (length,), got {input_shape}"
            )
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 8)
        self.lstm = nn.LSTM(8, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (n, num_classes) of texts (n, length)."""
        states, _ = self.lstm(self.embedding(x.long()))
        scores: Tensor = self.head(states[:, -1])
        return scores


class TwoPatchCNN(nn.Module):
    """Two-layer ReLU CNN with a fixed second layer (Huang et al. 2024, section 3.3).

    Output j is 1/m times the sum of relu(<w, patch>) over its m filters w and both patches. The
    paper's f is the second output minus the first, and its logistic loss their cross-entropy: class
    1 is y = +1. Weights are Gaussian with the standard deviation 0.1 / sqrt(d): see
    :func:`~fedntk.ntk.feature_learning.initial_std`. `input_shape` is (2, d), and `width` is m.
    """

    def __init__(self, input_shape: InputShape, num_classes: int, width: int = 50) -> None:
        if len(input_shape) != 2 or input_shape[0] != 2 or num_classes != 2:
            raise ConfigError(
                "model = two-patch-cnn: expected examples of shape (2, d) and 2 classes, such as "
                f"dataset = two-patch has, got {input_shape} and {num_classes}"
            )
        super().__init__()
        dimension = input_shape[1]
        drawn = torch.randn(2, width, dimension)
        self.weight = nn.Parameter(initial_std(dimension) * drawn)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, 2) for examples (n, 2, d)."""
        activations = torch.relu(x @ self.weight.flatten(0, 1).T).sum(1)
        outputs: Tensor = activations.unflatten(1, self.weight.shape[:2]).mean(2)
        return outputs


class ScatteringNetwork(nn.Sequential):
    """A linear layer on the standardised logarithms of an image's scattering coefficients.

    Nothing before the last layer is trained or sent.
    """

    def __init__(self, input_shape: InputShape, num_classes: int) -> None:
        channels, *size = _image(input_shape, "scattering", at_least=8)
        scattering = Scattering(size)
        width = channels * scattering.num_channels * math.prod(scattering.map_size)
        super().__init__(scattering, LogStandardise(), nn.Linear(width, num_classes))


def resnet18(
    input_shape: InputShape, num_classes: int, norm: str = "batch", groups: int = 32
) -> nn.Module:
    """Torchvision's ResNet-18 with a stem for small images: 3 x 3, stride 1, no pooling.

    `norm` is "batch", or "group" for GroupNorm with `groups` groups. Its layers have 64, 128, 256
    and 512 channels.
    """
    from torchvision.models import resnet18 as torchvision_resnet18

    channels, _, _ = _image(input_shape, "resnet18", at_least=8)
    if norm == "group" and 64 % groups:
        raise ConfigError(
            f"groups: expected a divisor of 64, resnet18's fewest channels of a layer, got {groups}"
        )
    layer = partial(nn.GroupNorm, groups) if norm == "group" else None
    model: nn.Module = torchvision_resnet18(num_classes=num_classes, norm_layer=layer)
    model.conv1 = nn.Conv2d(channels, 64, 3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def imagenet_resnet18(input_shape: InputShape, num_classes: int) -> nn.Module:
    """Torchvision's ResNet-18, trained on ImageNet, with a new last layer; downloads weights."""
    from torchvision.models import ResNet18_Weights
    from torchvision.models import resnet18 as torchvision_resnet18

    _image(input_shape, "imagenet_resnet18", at_least=32)
    model: nn.Module = torchvision_resnet18(weights=ResNet18_Weights.IMAGENET1K_V1)
    model.fc = nn.Linear(512, num_classes)
    return model


def imagenet_last_layer(input_shape: InputShape, num_classes: int) -> nn.Module:
    """:func:`imagenet_resnet18` with all layers frozen but the last."""
    model = imagenet_resnet18(input_shape, num_classes).requires_grad_(False)
    model.get_submodule("fc").requires_grad_(True)
    return model


def _convolution(
    before: int, after: int, kernel: int, *, padding: int | None = None, batch_norm: bool = False
) -> list[nn.Module]:
    """Return a convolution, which by default keeps the size, and pooling to half of it."""
    layer = nn.Conv2d(before, after, kernel, padding=kernel // 2 if padding is None else padding)
    norm = [nn.BatchNorm2d(after)] if batch_norm else []
    return [layer, *norm, nn.ReLU(), nn.MaxPool2d(2)]


def _dense(*widths: int, batch_norm: bool = False) -> list[nn.Module]:
    """Return linear layers of these widths, with ReLU between them."""
    *hidden, last = pairwise(widths)
    layers: list[nn.Module] = []
    for before, after in hidden:
        norm = [nn.BatchNorm1d(after)] if batch_norm else []
        layers += [nn.Linear(before, after), *norm, nn.ReLU()]
    return [*layers, nn.Linear(*last)]


def _image(input_shape: InputShape, name: str, *, at_least: int) -> InputShape:
    if len(input_shape) != 3 or min(input_shape[1:]) < at_least:
        raise ConfigError(
            f"model = {name}: expected images (channels, height, width) of at least "
            f"{at_least} x {at_least}, got examples of shape {input_shape}"
        )
    return input_shape


def network_checksum(network: nn.Module) -> str:
    """Return a checksum of what a network shows of itself: layers and shapes."""
    digest = hashlib.sha256(repr(network).encode())
    digest.update(repr([(k, tuple(t.shape)) for k, t in network.state_dict().items()]).encode())
    return digest.hexdigest()


def sample_outputs(network: nn.Module, input_shape: InputShape) -> list[float]:
    """Return some outputs, and the norm of all, for a fixed example at fixed weights.

    Networks that differ in what they do not show, such as an activation, differ here.
    """
    probe, generator = copy.deepcopy(network).cpu().eval(), np.random.default_rng(0)
    trained = {name for name, _ in probe.named_parameters()}
    with torch.no_grad():
        for name, tensor in probe.state_dict().items():
            if tensor.is_floating_point():  # buffers may be variances
                low, width = (-1, tensor[:1].numel() ** 0.5) if name in trained else (0.5, 1)
                drawn = generator.uniform(low, 1, tuple(tensor.shape)) / width
                tensor.copy_(torch.from_numpy(drawn))
        drawn = generator.normal(size=(1, *input_shape)).astype(np.float32)
        example = torch.from_numpy(drawn).to(dtype_of(probe))
        try:
            outputs = probe(example)
        except Exception:
            outputs = probe(torch.zeros_like(example))
    return [*map(float, outputs.flatten()[:8]), float(outputs.norm())]


def build_model(config: BaseConfig, input_shape: InputShape, num_classes: int) -> nn.Module:
    """Make what is trained of the network that `config` names: see :func:`build_networks`."""
    return build_networks(config, input_shape, num_classes)[0]


def build_networks(
    config: BaseConfig, input_shape: InputShape, num_classes: int
) -> tuple[nn.Module, FrozenPart | None]:
    """Make the network that `config` names: what is trained of it, and what comes before.

    Its weights are drawn from the configured seed; torch's generator is not changed. With a random
    projection the trained part takes the projected features. The second is None if all is trained
    and inputs are standardised by the training examples' moments.
    """
    is_split, is_centred = config.trained_part != "all", config.centre is not None
    if not input_shape and not config.takes_texts:
        raise ConfigError(
            f"model = {config.model}: expected numbers, got texts; set model = text-e5, or encode "
            "words first, as with pandas.get_dummies"
        )
    if config.is_pretrained:
        network_shape = (3, *input_shape[1:]) if input_shape else ()
    else:
        network_shape = _projected(config, input_shape) if not is_split else input_shape
    moments = None
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(config.seed)
            if config.is_pretrained:
                pretrained = load_pretrained(config, input_shape, num_classes)
                model, head, moments = pretrained.network, pretrained.head, pretrained.moments
            else:
                model, head = _by_name(config, network_shape, num_classes), ""
            probe = torch.full((1, *network_shape), -1.5 * (is_centred and not is_split))
            probe = probe.to(dtype_of(model)) if input_shape else EXAMPLE
            with torch.enable_grad():
                outputs = model.eval()(probe)
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's factory or network raises
        centred = "" if config.centre is None else ", centred by centre"
        raise ConfigError(
            f"model = {config.model}: fails for examples of shape {network_shape}{centred}: "
            f"{first_line(error)}"
        ) from error
    with naming(f"model = {config.model}", ValueError):
        require_separate(model)
        if not isinstance(outputs, Tensor):
            raise ConfigError(
                f"expected one tensor of scores (n, C), got a {type(outputs).__name__}; wrap it in "
                "a network whose forward returns only the scores"
            )
        if outputs.shape != (1, num_classes):
            raise ConfigError(
                f"expected outputs of shape (n, {num_classes}), one for each class, got "
                f"{('n', *outputs.shape[1:])}"
            )
        require_scores(outputs, config.loss)
    weights = Path(config.weights) if config.weights else None
    if weights is not None and _is_whole(weights, model):
        _load_weights(model, weights, centred=is_centred)
        weights = None
    frozen = None
    is_adapted = config.adapters != "none" or isinstance(model, AdaptedNetwork)
    if is_split or config.is_pretrained or is_adapted:
        model, before = _divide(config, model, head, probe) if is_split else (model, None)
        if config.adapters != "none":
            with naming(f"adapters = {config.adapters}", ValueError):
                model, before = _adapt(config, model, before, probe)
        fixed = model.frozen_state() if isinstance(model, AdaptedNetwork) else {}
        with naming(f"model = {config.model}", ValueError):
            device = device_of(config.device)
            frozen = FrozenPart(before, probe, moments=moments, device=device, frozen_arrays=fixed)
        network_shape = _projected(config, frozen.shape)
        method = config.chosen_method
        if isinstance(model, AdaptedNetwork) and method.strategy_class.learns_only_head:
            raise ConfigError(
                f"model = {config.model}: {method.name} learns only the last layer, and the "
                "network's adapters would stay as they are; set trained = head, or choose a method "
                "that trains weights"
            )
    if config.init != "default":
        arrays = {n: p.detach().numpy() for n, p in model.named_parameters() if p.requires_grad}
        generator = np.random.default_rng([config.seed, *b"first weights"])
        drawn = draw_weights(arrays, config.init, generator)
        tensors = {name: torch.from_numpy(array) for name, array in drawn.items()}
        model.load_state_dict(tensors, strict=False)
    if weights is not None:
        if is_adapted and frozen is not None:
            _require_same_frozen(weights, frozen)
        _load_weights(model, weights, centred=is_centred)
    num_features, bandwidth = config.chosen_method.random_features(config, network_shape)
    if num_features:
        expansions: dict[str, Callable[[nn.Module, int, int], nn.Module]] = {
            "fourier": partial(with_fourier_features, bandwidth=bandwidth),
            "frequencies": with_scattering_frequencies,
        }
        with naming("random-features", ValueError):
            model = expansions[config.expand](model, num_features, config.seed)
    model = config.chosen_method.adapt(model, config)
    return CentredInputs(model, network_shape) if is_centred else model, frozen


def _projected(config: BaseConfig, input_shape: InputShape) -> InputShape:
    """Return the shape that a random projection, if there is one, makes of examples."""
    if config.projection > math.prod(input_shape):
        raise ConfigError(
            f"projection: expected at most {math.prod(input_shape)}, the numbers in an example, "
            f"got {config.projection}"
        )
    return (config.projection,) if config.projection else input_shape


def _divide(
    config: BaseConfig, model: nn.Module, head: str, probe: Tensor
) -> tuple[nn.Module, nn.Module]:
    """Return the part of a network that `trained` names, and a copy of what comes before."""
    trained, inner, prefix = config.trained_part, model, ""
    if config.is_pretrained:
        inner, prefix = model.get_submodule(PLACE), f"{PLACE}."
    with naming(f"trained = {trained}", ValueError):
        if trained == "head":
            first = head or FeatureMap("last-layer").last_layer(model)[0]
        else:
            first = prefix + (last_block(inner) if trained == "last-block" else trained)
        if trained != "head" and first not in dict(model.named_modules()):
            children = ", ".join(name for name, _ in inner.named_children())
            raise ValueError(f"expected a module of the network, such as {children}")
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        before: nn.Module
        try:
            if trained == "head":
                before, after = LastInputs(model, first), model.get_submodule(first)
                inside = [n for n in names if not first or n.startswith(f"{first}.")]
            else:
                parts = split_network(model, first)
                before, after = copy.deepcopy(parts[0]), parts[1]
                inside = [name for name, _ in after.named_parameters()]
            _require_separate_parts(model, inside)
            _require_same_outputs(model.eval(), before.eval(), after.eval(), probe)
        except ValueError:
            raise
        except Exception as error:  # whatever a user's forward does with a part of its network
            raise ValueError(f"the network cannot be divided there: {first_line(error)}") from error
        if not any(p.requires_grad for p in after.parameters()):
            raise ValueError("expected weights to train there, got none")
        if config.projection:
            layer = after[-1] if isinstance(after, nn.Sequential) else after
            if trained != "head" or not isinstance(layer, nn.Linear):
                raise ValueError("projection is of vectors; expected trained = head with it")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                drawn = nn.Linear(config.projection, layer.out_features, layer.bias is not None)
            after = nn.Sequential(UnitLength(), drawn) if config.is_pretrained else drawn
    return EvaluationMode(after) if config.is_pretrained and trained != "head" else after, before


def _adapt(
    config: BaseConfig, model: nn.Module, before: nn.Module | None, probe: Tensor
) -> tuple[nn.Module, nn.Module | None]:
    """Return what is trained with adapters, and what is before: features, with tangents."""
    with torch.no_grad():
        example = probe if before is None else probe_outputs(before.eval(), 1, probe)[1]
    how: dict[str, Any] = {
        "rank": config.adapter_rank,
        "alpha": config.adapter_alpha,
        "targets": [name.strip() for name in config.adapter_targets.split(",") if name.strip()],
        "seed": config.seed,
    }
    if config.adapters != "tangent-lora":
        return with_lora(model, example, **how, train_a=config.adapters == "lora"), before
    features = TangentLoRA(model, example, **how)
    num_classes = FeatureMap("last-layer").last_layer(model)[1].out_features
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "linear model"))
        layer = nn.Linear(features.num_features, num_classes)
    before = features if before is None else nn.Sequential(before, features)
    return nn.Sequential(UnitLength(), layer), before


def _require_separate_parts(model: nn.Module, inside: Sequence[str]) -> None:
    """Refuse an array that is trained and frozen."""
    places: dict[int, set[bool]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(name in inside)
    if any(len(sides) > 1 for sides in places.values()):
        raise ValueError("expected no array that is in the trained and in the frozen part as well")


def _require_same_outputs(
    model: nn.Module, before: nn.Module, after: nn.Module, probe: Tensor
) -> None:
    """Refuse parts that are not the network, also with large weights in the second one."""
    state = {name: tensor.clone() for name, tensor in after.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in after.parameters():
            size = max(1, parameter[:1].numel()) ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / size)
        for num in (1, 3):
            example, whole = probe_outputs(model, num, probe)
            parts = after(before(example))
            error = 1e-4 * float(whole.abs().max())
            if parts.shape != whole.shape or not torch.allclose(parts, whole, atol=error):
                raise ValueError(
                    f"expected a network whose outputs are those of the trained part; in "
                    f"{type(model).__name__} more follows, or depends on other inputs; end its "
                    "forward there, or set trained = all"
                )
        after.load_state_dict(state)


def device_of(name: str) -> str:
    """Return where networks run; ``auto`` is a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = {name}: cannot be used: {reason}") from error
    return name


def _is_whole(path: Path, model: nn.Module) -> bool:
    """Whether a file has all arrays of a whole network, not only those of a trained part."""
    with naming(f"weights = {path}: cannot be read", OSError, SafetensorError):
        names = {*load_file(path)}
    if CENTRE in names:
        names = {name.removeprefix("network.") for name in names}
    return names >= {*first_names(model).values()}


def _require_same_frozen(path: Path, frozen: FrozenPart) -> None:
    """Refuse a run's weights that were trained with other frozen ones."""
    try:
        _, described = load_tensors(path)
    except (DamagedFile, OldFormat):  # no run's file, whose names and shapes are compared later
        return
    if described.get("frozen", frozen.digest) != frozen.digest:
        raise ConfigError(
            f"weights = {path}: trained with another frozen network, or other adapters; set the "
            "model, seed, adapters and adapter settings of that run, or start from a whole network"
        )


def _load_weights(model: nn.Module, path: Path, *, centred: bool) -> None:
    """Load a network's weights from a file that may hold others; `centred`: wrapped later."""
    with naming(f"weights = {path}: cannot be read", OSError, SafetensorError):
        tensors = load_file(path)
    state, first = model.state_dict(), first_names(model)
    if CENTRE in tensors and CENTRE not in state:
        if not centred:
            raise ConfigError(
                f"weights = {path}: of a network for inputs with their mean taken off; set "
                "centre = true, or give weights of a run without it"
            )
        tensors = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
    for name, place in first.items():  # a file may hold an array under one of its names
        if place not in tensors and name in tensors:
            tensors[place] = tensors[name]
    fixed = model.frozen_state() if isinstance(model, AdaptedNetwork) else {}
    frozen = {name: tensor for name, tensor in tensors.items() if name in fixed}
    tensors = frozen | {name: tensors[place] for name, place in first.items() if place in tensors}
    missing = [k for k, t in state.items() if k not in tensors or tensors[k].shape != t.shape]
    if missing:
        raise ConfigError(f"weights = {path}: not of this network, which has also {missing[:5]}")
    with naming(f"weights = {path}", RuntimeError):  # of arrays that are frozen here
        model.load_state_dict(tensors)


def _by_name(config: BaseConfig, input_shape: InputShape, num_classes: int) -> nn.Module:
    networks: dict[str, Callable[..., nn.Module]] = {
        "mlp": partial(mlp, width=config.width, batch_norm=config.chosen_method.batch_norm),
        "simple-cnn": simple_cnn,
        "lenet": lenet,
        "lenet-bn": partial(lenet, batch_norm=True),
        "digits-cnn": partial(digits_cnn, width=config.width),
        "resnet18": partial(resnet18, norm=config.norm, groups=config.groups),
        "char-lstm": partial(CharLSTM, width=config.width),
        "linear": linear,
        "two-patch-cnn": partial(TwoPatchCNN, width=config.width),
        "scattering": ScatteringNetwork,
    }
    if config.model in networks:
        return networks[config.model](input_shape, num_classes)
    passed = config.passed(config.model)
    if isinstance(passed, nn.Module):
        with naming(f"model = {type(passed).__name__}", ValueError):
            require_separate(passed)  # copies of it would not share memory
        return copy.deepcopy(passed)
    if passed is None and "()" in config.model:
        raise ConfigError(
            f"model = {config.model}: a module or function that was passed to the run; pass it "
            "again with model=..., or put a function into a file and pass model='mynet.py:build'"
        )
    if ":" not in config.model:
        raise ConfigError(
            f"model: expected {', '.join(networks)}, or your own as <file>.py:<function>, "
            f"got {config.model!r}{nearest(config.model, networks)}"
        )
    model: Any = (passed or import_named("model", config.model))(input_shape, num_classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model = {config.model}: expected a torch.nn.Module, got {type(model).__name__}"
        )
    return model
