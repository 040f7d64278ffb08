"""Data sets by name, standardised, as tensors; nothing here depends on how they are split."""

import gzip
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.clients import cache_dir
from fedntk.ntk.support.files import whole

from ..config.settings import ConfigError, nearest
from .digit_domains import digit_domains
from .digits_five import digits_five
from .femnist import femnist
from .hugging_face import HuggingFaceSet, channels_first, pictures
from .kept_examples import Own
from .leaf import load_leaf
from .parts import Domain, Part
from .settings import DatasetSettings
from .two_patch import TwoPatchOptions, draw_two_patch

IDX_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


@dataclass(frozen=True, eq=False)
class Data:
    """A labelled data set with its test set.

    Examples (n, channels, height, width) or (n, ...) are raw values, as stored, with labels (n,),
    0 ... num_classes - 1, and the owner of each (n,), if the set names owners. A network gets them
    standardised unless their values have a meaning as they are: positions in an alphabet, or
    signals of a stated strength.
    """

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    num_classes: int
    natural_ids: NDArray[Any] | None = None
    natural_ids_test: NDArray[Any] | None = None
    standardise: bool = True

    def __post_init__(self) -> None:
        parts = {"train": (self.x_train, self.y_train), "test": (self.x_test, self.y_test)}
        for part, (x, y) in parts.items():
            if not len(x):
                raise ConfigError(f"{part} set: expected examples, got none")
            self._require_kind(x, y, f"{part} set: ")

    def _require_kind(self, x: NDArray[Any], y: NDArray[Any], what: str = "") -> None:
        if y.shape != (len(x),):
            raise ConfigError(
                f"{what}expected examples and one label each, got shapes {x.shape} and {y.shape}"
            )
        if x.shape[1:] != self.input_shape:
            sizes = ", ".join(map(str, self.input_shape))
            raise ConfigError(f"{what}expected examples of shape (n, {sizes}), got {x.shape}")
        if len(y) and (y.min() < 0 or y.max() >= self.num_classes):
            raise ConfigError(
                f"{what}expected labels 0 ... {self.num_classes - 1}, got {y.min()} ... {y.max()}"
            )

    @cached_property
    def _mean_and_std(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Mean and deviation per channel, or over all values of examples without channels."""
        if not self.standardise:
            return np.zeros(1, np.float32), np.ones(1, np.float32)
        axes = (0, *range(2, self.x_train.ndim)) if self.x_train.ndim == 4 else None
        mean = self.x_train.mean(axis=axes, keepdims=True, dtype=np.float64)
        std = self.x_train.std(axis=axes, keepdims=True, dtype=np.float64)
        return mean.astype(np.float32), np.where(std > 0, std, 1.0).astype(np.float32)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.x_train.shape[1:])

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of all examples and labels."""
        digest = hashlib.sha256()
        for array in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def train(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return training examples, float32 standardised by the training set, with their labels."""
        return self._tensors(self.x_train[indices], self.y_train[indices])

    def test(self, indices: NDArray[np.int64] | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return test examples, by default all, as :meth:`train` does."""
        return self._tensors(self.x_test[indices], self.y_test[indices])

    def convert_examples(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Return other examples of this kind, checked, as :meth:`train` does."""
        part = _check_own(x, y)
        self._require_kind(part.x, part.y)
        return self._tensors(part.x, part.y)

    def _tensors(self, x: NDArray[Any], y: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        mean, std = self._mean_and_std
        standardised = (x.astype(np.float32) - mean) / std
        return torch.from_numpy(standardised), torch.from_numpy(np.ascontiguousarray(y))


def _check_own(x: NDArray[Any], y: NDArray[Any], what: str = "") -> Part:
    """Return a user's examples with labels in int64, if they are finite and whole numbers."""
    if not np.issubdtype(x.dtype, np.number) or np.iscomplexobj(x) or x.ndim < 2:
        raise ConfigError(f"{what}expected numbers of shape (n, ...), got {x.dtype} of {x.shape}")
    if not np.isfinite(x).all():
        raise ConfigError(f"{what}expected finite numbers, got NaN or infinity")
    if not np.issubdtype(y.dtype, np.integer):
        raise ConfigError(f"{what}expected whole numbers as labels, got {y.dtype}")
    return Part(x, y.astype(np.int64))


def _arrays(key: str, path: Path, *names: str, optional: tuple[str, ...] = ()) -> Any:
    """Read arrays of an npz file; the optional ones if it has the first of them."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            wanted = names + optional if optional and optional[0] in file else names
            return [file[name] for name in wanted]
    except FileNotFoundError:
        raise ConfigError(f"{key}: no file at {path}") from None
    except (KeyError, ValueError, OSError) as error:
        needed = f"{', '.join(names[:-1])} and {names[-1]}"
        raise ConfigError(f"{key}: {path} must hold {needed} ({error})") from None


def load_own(path: str, data: Data, max_examples: int) -> Own:
    """Load a node's own examples, of the kind of the run's data set and standardised by it.

    `path` is an npz file, or a folder with one. It holds x and y, and may hold x_test and y_test.
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.npz")) if place.is_dir() else [place]
    if len(files) != 1 or not files[0].is_file():
        raise ConfigError(f"data-path: expected an npz file, or a folder with one, got {place}")
    x, y, *test = _arrays("data-path", files[0], "x", "y", optional=("x_test", "y_test"))
    if not 0 < len(y) <= max_examples:
        raise ConfigError(
            f"data-path: expected 1 ... {max_examples} examples, got {len(y)} in {files[0]}; "
            "max-examples says how many a client may have"
        )
    try:
        return Own(data.convert_examples(x, y), data.convert_examples(*(test or (x[:0], y[:0]))))
    except ConfigError as error:
        raise ConfigError(f"data-path: {files[0]}: {error}") from None


def load_data(settings: DatasetSettings) -> Data:
    """Load the data set that `settings` name; later calls in a process share it."""
    file = Path(settings.dataset.partition(":")[2])
    modified = file.stat().st_mtime_ns if file.is_file() else 0
    options = {name: getattr(settings, name) for name in DatasetSettings.options()}
    options["data_dir"] = settings.data_dir or str(cache_dir() / "data")
    try:
        return _load(DatasetSettings(**options), modified)
    except ConfigError:
        raise
    except Exception as error:  # what a damaged file makes a library raise
        lines = str(error).splitlines() or [""]
        raise ConfigError(
            f"dataset = {settings.dataset}: cannot be read: {type(error).__name__}: {lines[0]}"
        ) from error


@lru_cache(maxsize=2)
def _load(settings: DatasetSettings, _modified: int) -> Data:
    name, _, rest = settings.dataset.partition(":")
    folder = Path(settings.data_dir).expanduser()
    per_domain = settings.examples_per_domain, settings.test_examples_per_domain
    if name == "npz" and rest:
        return _data(*_npz(Path(rest)))
    if name == "leaf" and rest:
        train, test, num_classes, is_text = load_leaf(Path(rest).expanduser())
        return _data(train, test, num_classes, standardise=not is_text)
    if name == "two-patch":
        return _data(*draw_two_patch(TwoPatchOptions.read(rest)), 2, standardise=False)
    if name == "hf" and rest:
        return _data(*_hugging_face(rest, settings))
    if name in ("femnist", "femnist-digits"):
        return _data(*femnist(rest, digits=name == "femnist-digits"))
    if name == "digits-five":
        return _data(*digits_five(rest, *per_domain), 10)
    if settings.dataset == "digit-domains":
        mnist, digits = (Domain(*_BY_NAME[own](folder)[:2]) for own in ("mnist", "digits"))
        return _data(*digit_domains(mnist, digits, *per_domain), 10)
    if settings.dataset in _BY_NAME:
        return _data(*_BY_NAME[settings.dataset](folder))
    names = (*_BY_NAME, "femnist", "femnist-digits", "digit-domains", "digits-five")
    raise ConfigError(
        f"dataset: expected {', '.join(names)}, digits-five:<folder>, femnist:<folder>, hf:<name "
        f"or folder>, leaf:<folder>, npz:<file> or two-patch:<options>, got {settings.dataset!r}"
        f"{nearest(settings.dataset, (*names, 'two-patch'))}"
    )


def _data(train: Part, test: Part, num_classes: int, *, standardise: bool = True) -> Data:
    return Data(
        train.x, train.y, test.x, test.y, num_classes, train.owners, test.owners, standardise
    )


Loaded = tuple[Part, Part, int]  # training and test set, number of classes


def _digits(_: Path) -> Loaded:
    """Scikit-learn's 1,797 handwritten digits, 8 x 8: every fifth is for testing.

    Kept in the cache, since importing scikit-learn takes seconds in each worker.
    """
    path = cache_dir() / "data" / "digits.npz"
    if not path.exists():
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = digits.images.astype(np.float32)[:, None], digits.target.astype(np.int64)
        test = np.arange(len(y)) % 5 == 0
        with whole(path) as file:
            np.savez(file, x_train=x[~test], y_train=y[~test], x_test=x[test], y_test=y[test])
    return _npz(path)


def _torchvision(class_name: str, folder: str, data_dir: Path) -> Loaded:
    root = _unpack(data_dir, folder) if folder else data_dir
    raw = root / folder / "raw"
    if folder and all((raw / name).is_file() for name in IDX_FILES):
        x_train, y_train, x_test, y_test = (_idx(raw / name) for name in IDX_FILES)
        return _images(x_train, y_train), _images(x_test, y_test), 10
    import torchvision  # takes a second

    kind = getattr(torchvision.datasets, class_name)
    try:  # nothing is downloaded that is there
        parts = [kind(root=str(root), train=train, download=True) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"{class_name} is not in {data_dir} and cannot be downloaded ({error}); set data-dir "
            "to a folder in torchvision's layout"
        ) from error
    train, test = (_images(np.asarray(own.data), np.asarray(own.targets)) for own in parts)
    return train, test, len(parts[0].classes)


def _images(x: NDArray[Any], y: NDArray[Any]) -> Part:
    return Part(channels_first(x), y.astype(np.int64))


def _idx(path: Path) -> NDArray[np.uint8]:
    """Read unsigned bytes after a header: two zeros, type, dimensions, and the size of each."""
    raw = np.fromfile(path, np.uint8)
    if raw[:3].tolist() != [0, 0, 8]:
        raise ValueError(f"{path} is no file of unsigned bytes in the format IDX")
    start = 4 + 4 * int(raw[3])
    return raw[start:].reshape(raw[4:start].view(">u4").tolist())


def _unpack(data_dir: Path, folder: str) -> Path:
    """Root that holds ``folder/raw`` unpacked: `data_dir`, or a cache if it has gzip files."""
    packed = sorted((data_dir / folder / "raw").glob("*ubyte.gz"))
    if all(path.with_suffix("").exists() for path in packed):
        return data_dir
    stamp = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in packed]
    cache = cache_dir() / "data" / hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]
    for path in packed:
        target = cache / folder / "raw" / path.stem
        if not target.exists():
            with gzip.open(path) as source, whole(target) as sink:
                shutil.copyfileobj(source, sink)
    return cache


def _npz(path: Path) -> Loaded:
    """Arrays x_train, y_train, x_test and y_test of a user's own file."""
    x, y, x_test, y_test = _arrays("dataset", path, "x_train", "y_train", "x_test", "y_test")
    train = _check_own(x, y, f"dataset: train set in {path}: ")
    test = _check_own(x_test, y_test, f"dataset: test set in {path}: ")
    num_classes = 1 + max(int(part.y.max(initial=-1)) for part in (train, test))
    if num_classes > train.y.size:
        raise ConfigError(
            f"dataset: {path} has labels up to {num_classes - 1} and {train.y.size} "
            "training examples; number the classes 0 ... C - 1"
        )
    return train, test, num_classes


def _hugging_face(name: str, settings: DatasetSettings) -> Loaded:
    """Any image set with train and test splits, from the hub or a folder of its files."""
    source, parts = HuggingFaceSet(name), []
    num_classes = 0
    for side in ("train", "test"):
        split = source.split(side)
        images = source.image_column(split, settings.image_column)
        label = source.column(split, "label-column", settings.label_column)
        y = np.asarray(split[label], dtype=np.int64)
        found = max(num_classes, int(y.max()) + 1)
        num_classes = getattr(split.features[label], "num_classes", found)
        ids, owners = settings.natural_column, None
        if ids and (side == "train" or ids in split.features):
            owners = np.asarray(split[source.column(split, "natural-column", ids)])
        parts.append(Part(pictures(split, images), y, owners))
    return parts[0], parts[1], num_classes


_BY_NAME: dict[str, Callable[[Path], Loaded]] = {
    "digits": _digits,
    "mnist": partial(_torchvision, "MNIST", "MNIST"),
    "fashion-mnist": partial(_torchvision, "FashionMNIST", "FashionMNIST"),
    "cifar10": partial(_torchvision, "CIFAR10", ""),
}
