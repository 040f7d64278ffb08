"""Data sets by name, standardised, as tensors; nothing here depends on how they are split."""

import gzip
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.clients import cache_dir
from fedntk.ntk.support.files import whole

from ..config.config import Config
from ..config.settings import ConfigError, nearest
from .digit_domains import digit_domains
from .digits_five import digits_five
from .domains import Domain, Joined, Part
from .femnist import femnist
from .hugging_face import HuggingFaceSet, channels_first, pictures
from .kept_examples import Own
from .leaf import load_leaf
from .two_patch import TwoPatchOptions, draw_two_patch

if TYPE_CHECKING:
    from ..methods.method import Setup

__all__ = ["Data", "load_data", "load_own"]

IDX_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


@dataclass(frozen=True, eq=False)
class Data:
    """A labelled data set with its test set.

    Attributes
    ----------
    x_train, x_test : ndarray, shape (n, channels, height, width) or (n, ...)
        Raw values, as stored.
    y_train, y_test : ndarray of int64, shape (n,)
        Labels 0 ... num_classes - 1.
    num_classes : int
        C.
    natural_ids : ndarray or None, shape (n,)
        Whose training example it is, where the set tells.
    standardise : bool
        Whether a network gets examples of mean 0 and variance 1. Not so where their values have a
        meaning as they are: positions in an alphabet, or signals of a stated strength.
    natural_ids_test : ndarray or None, shape (m,)
        Whose test example it is, where the set tells.
    """

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    num_classes: int
    natural_ids: NDArray[Any] | None = None
    standardise: bool = True
    natural_ids_test: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        """Check shapes and labels.

        Raises
        ------
        ConfigError
            If examples and labels do not match, or labels are not 0 ... C - 1.
        """
        for part in ("train", "test"):
            x, y = getattr(self, f"x_{part}"), getattr(self, f"y_{part}")
            if not np.issubdtype(x.dtype, np.number) or np.iscomplexobj(x) or x.ndim < 2:
                raise ConfigError(
                    f"{part} set: expected numbers of shape (n, ...), got {x.dtype} of {x.shape}"
                )
            if len(x) == 0 or y.shape != (len(x),):
                raise ConfigError(
                    f"{part} set: expected examples and one label each, got shapes {x.shape} and "
                    f"{y.shape}"
                )
            if y.min() < 0 or y.max() >= self.num_classes:
                raise ConfigError(
                    f"{part} set: expected labels 0 ... {self.num_classes - 1}, "
                    f"got {y.min()} ... {y.max()}"
                )
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ConfigError(
                f"expected one shape of examples, got {self.x_train.shape[1:]} for training and "
                f"{self.x_test.shape[1:]} for testing"
            )
        if not self.standardise:
            object.__setattr__(self, "_mean", np.zeros(1))
            object.__setattr__(self, "_std", np.ones(1))
            return
        axes = (0, *range(2, self.x_train.ndim)) if self.x_train.ndim == 4 else None
        mean = self.x_train.mean(axis=axes, keepdims=True, dtype=np.float64)
        std = self.x_train.std(axis=axes, keepdims=True, dtype=np.float64)
        object.__setattr__(self, "_mean", mean)
        object.__setattr__(self, "_std", np.where(std > 0, std, 1.0))

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
        """Return training examples standardised by the training set, with their labels.

        Mean 0 and variance 1 per channel (over all values where there are no channels), float32.
        """
        return self._tensors(self.x_train[indices], self.y_train[indices])

    def test(self, indices: NDArray[np.int64] | None = None) -> tuple[Tensor, Tensor]:
        """Return test examples, by default all, standardised by the training set, with labels."""
        if indices is None:
            return self._tensors(self.x_test, self.y_test)
        return self._tensors(self.x_test[indices], self.y_test[indices])

    def standardised(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Return other examples of this kind, standardised by the training set.

        Raises
        ------
        ConfigError
            If they are not of this set's shape, hold what is no number, or have labels that are
            none of its classes.
        """
        if x.shape[1:] != self.input_shape or y.shape != (len(x),):
            raise ConfigError(
                f"expected examples of shape (n, {', '.join(map(str, self.input_shape))}) and "
                f"n labels, got {x.shape} and {y.shape}"
            )
        if not np.issubdtype(x.dtype, np.number) or np.iscomplexobj(x):
            raise ConfigError(f"expected numbers, got {x.dtype}")
        if not np.isfinite(x).all():
            raise ConfigError("expected finite numbers, got NaN or infinity")
        if not np.issubdtype(y.dtype, np.integer):
            raise ConfigError(f"expected whole numbers as labels, got {y.dtype}")
        if len(y) and (y.min() < 0 or y.max() >= self.num_classes):
            raise ConfigError(
                f"expected labels 0 ... {self.num_classes - 1}, got {y.min()} ... {y.max()}"
            )
        return self._tensors(x, y.astype(np.int64))

    def _tensors(self, x: NDArray[Any], y: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        mean, std = self.__dict__["_mean"], self.__dict__["_std"]
        standardised = (x.astype(np.float32) - mean.astype(np.float32)) / std.astype(np.float32)
        return torch.from_numpy(standardised), torch.from_numpy(np.ascontiguousarray(y))


def load_own(path: str, setup: "Setup") -> Own:
    """Load a node's own examples; they are of the run's data set's kind, and standardised by it.

    Parameters
    ----------
    path : str
        An npz file, or a folder with one. It holds x and y, and may hold x_test and y_test.
    setup : Setup
        Of the run: the data set says the shape of an example, the classes, mean and deviation.

    Raises
    ------
    ConfigError
        If it cannot be read, or does not fit.
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.npz")) if place.is_dir() else [place]
    if len(files) != 1 or not files[0].is_file():
        raise ConfigError(f"data-path: expected an npz file, or a folder with one, got {place}")
    try:
        with np.load(files[0], allow_pickle=False) as file:
            x, y = file["x"], file["y"]
            tested = "x_test" in file
            x_test, y_test = (file["x_test"], file["y_test"]) if tested else (x[:0], y[:0])
    except (KeyError, ValueError, OSError) as error:
        raise ConfigError(f"data-path: {files[0]} must hold x and y ({error})") from None
    if not 0 < len(y) <= setup.max_examples:
        raise ConfigError(
            f"data-path: expected 1 ... {setup.max_examples} examples, got {len(y)} in "
            f"{files[0]}; max-examples says how many a client may have"
        )
    try:
        return Own(setup.data.standardised(x, y), setup.data.standardised(x_test, y_test))
    except ConfigError as error:
        raise ConfigError(f"data-path: {files[0]}: {error}") from None


def load_data(config: Config) -> Data:
    """Load the data set that `config` names; later calls in a process share it.

    Raises
    ------
    ConfigError
        If the name is unknown, a file is missing, or the content does not fit.
    """
    file = Path(config.dataset.partition(":")[2])
    try:
        return _load(
            config.dataset,
            config.data_dir or str(cache_dir() / "data"),
            config.image_column,
            config.label_column,
            config.natural_column,
            (config.examples_per_domain, config.test_examples_per_domain),
            file.stat().st_mtime_ns if file.is_file() else 0,
        )
    except ConfigError:
        raise
    except Exception as error:  # what a damaged file makes a library raise
        lines = str(error).splitlines() or [""]
        raise ConfigError(
            f"dataset = {config.dataset}: cannot be read: {type(error).__name__}: {lines[0]}"
        ) from error


@lru_cache(maxsize=2)
def _load(
    dataset: str,
    data_dir: str,
    image_column: str,
    label_column: str,
    natural_column: str,
    per_domain: tuple[int, int],
    _modified: int,
) -> Data:
    name, _, rest = dataset.partition(":")
    folder = Path(data_dir).expanduser()
    if name == "npz" and rest:
        return _npz(Path(rest))
    if name == "leaf" and rest:
        train, test, num_classes, is_text = load_leaf(Path(rest).expanduser())
        return Data(
            train.x, train.y, test.x, test.y, num_classes, train.users, not is_text, test.users
        )
    if name == "two-patch":
        return _two_patch(rest)
    if name == "hf" and rest:
        return _hugging_face(rest, image_column, label_column, natural_column)
    if name in ("femnist", "femnist-digits"):
        own = femnist(rest, digits=name == "femnist-digits")
        return Data(
            *own.train, *own.test, own.num_classes, own.writers,
            natural_ids_test=own.writers_test,
        )  # fmt: skip
    if name == "digits-five":
        return _of_domains(digits_five(rest, *per_domain))
    if dataset == "digit-domains":
        mnist, digits = (_as_domain(_BY_NAME[own](folder)) for own in ("mnist", "digits"))
        return _of_domains(digit_domains(mnist, digits, *per_domain))
    if dataset in _BY_NAME:
        return _BY_NAME[dataset](folder)
    names = (*_BY_NAME, "femnist", "femnist-digits", "digit-domains", "digits-five")
    raise ConfigError(
        f"dataset: expected {', '.join(names)}, digits-five:<folder>, femnist:<folder>, "
        f"hf:<name or folder>, leaf:<folder>, npz:<file> or two-patch:<options>, got {dataset!r}"
        f"{nearest(dataset, (*names, 'two-patch'))}"
    )


def _digits(_: Path) -> Data:
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


def _torchvision(class_name: str, folder: str) -> Callable[[Path], Data]:
    def load(data_dir: Path) -> Data:
        root = _unpacked(data_dir, folder) if folder else data_dir
        if folder and all((root / folder / "raw" / name).is_file() for name in IDX_FILES):
            return _idx_set(root / folder / "raw")
        import torchvision

        kind = getattr(torchvision.datasets, class_name)
        try:
            parts = [kind(root=str(root), train=train, download=False) for train in (True, False)]
        except RuntimeError:
            try:
                parts = [kind(root=str(root), train=t, download=True) for t in (True, False)]
            except Exception as error:
                raise ConfigError(
                    f"{class_name} is not in {data_dir} and cannot be downloaded ({error}); set "
                    "data-dir to a folder in torchvision's layout"
                ) from error
        (x_train, y_train), (x_test, y_test) = (
            (channels_first(np.asarray(part.data)), np.asarray(part.targets, dtype=np.int64))
            for part in parts
        )
        return Data(x_train, y_train, x_test, y_test, num_classes=len(parts[0].classes))

    return load


def _idx_set(folder: Path) -> Data:
    """Read the unpacked files of MNIST and its like; importing torchvision takes a second."""
    x_train, y_train, x_test, y_test = (_idx(folder / name) for name in IDX_FILES)
    return Data(
        channels_first(x_train),
        y_train.astype(np.int64),
        channels_first(x_test),
        y_test.astype(np.int64),
        num_classes=10,
    )


def _idx(path: Path) -> NDArray[np.uint8]:
    """Read unsigned bytes after a header: two zeros, type, dimensions, and the size of each."""
    raw = np.fromfile(path, np.uint8)
    if raw[:3].tolist() != [0, 0, 8]:
        raise ValueError(f"{path} is no file of unsigned bytes in the format IDX")
    start = 4 + 4 * int(raw[3])
    return raw[start:].reshape(raw[4:start].view(">u4").tolist())


def _unpacked(data_dir: Path, folder: str) -> Path:
    """Root that holds ``folder/raw`` unpacked: `data_dir`, or a cache where it has gzip files."""
    packed = sorted((data_dir / folder / "raw").glob("*ubyte.gz"))
    missing = [path for path in packed if not path.with_suffix("").exists()]
    if not missing:
        return data_dir
    stamp = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in packed]
    cache = cache_dir() / "data" / hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]
    for path in packed:
        target = cache / folder / "raw" / path.stem
        if not target.exists():
            with gzip.open(path) as source, whole(target) as sink:
                shutil.copyfileobj(source, sink)
    return cache


def _two_patch(options: str) -> Data:
    train, test = draw_two_patch(TwoPatchOptions.read(options))
    return Data(
        train.x, train.y, test.x, test.y, 2, train.clients,
        standardise=False, natural_ids_test=test.clients,
    )  # fmt: skip


def _npz(path: Path) -> Data:
    """Arrays x_train, y_train, x_test and y_test of a user's own file."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            x_train, y_train, x_test, y_test = (
                file[name] for name in ("x_train", "y_train", "x_test", "y_test")
            )
    except FileNotFoundError:
        raise ConfigError(f"dataset: no file at {path}") from None
    except (KeyError, ValueError, OSError) as error:
        raise ConfigError(
            f"dataset: {path} must hold x_train, y_train, x_test and y_test ({error})"
        ) from None
    labels = []
    for name, y in (("y_train", y_train), ("y_test", y_test)):
        if not np.issubdtype(y.dtype, np.integer):
            raise ConfigError(f"dataset: {name} in {path} must be whole numbers, got {y.dtype}")
        labels.append(y.astype(np.int64))
    for name, x in (("x_train", x_train), ("x_test", x_test)):
        if not np.isfinite(x).all():
            raise ConfigError(f"dataset: {name} in {path} holds NaN or infinity")
    num_classes = int(max(y.max(initial=-1) for y in labels)) + 1
    if num_classes > labels[0].size:
        raise ConfigError(
            f"dataset: {path} has labels up to {num_classes - 1} and {labels[0].size} training "
            "examples; number the classes 0 ... C - 1"
        )
    return Data(x_train, labels[0], x_test, labels[1], num_classes=num_classes)


def _hugging_face(name: str, image_column: str, label_column: str, natural_column: str) -> Data:
    """Any image set with train and test splits, from the hub or a folder of its files."""
    source = HuggingFaceSet(name)
    loaded: dict[str, tuple[NDArray[Any], NDArray[np.int64]]] = {}
    natural_ids: dict[str, NDArray[Any]] = {}
    num_classes = 0
    for part in ("train", "test"):
        split = source.split(part)
        images = source.image_column(split, image_column)
        labels = np.asarray(
            split[source.column(split, "label-column", label_column)], dtype=np.int64
        )
        loaded[part] = pictures(split, images), labels
        feature = split.features[label_column]
        num_classes = getattr(feature, "num_classes", max(num_classes, int(labels.max()) + 1))
        if natural_column and (part == "train" or natural_column in split.features):
            ids = source.column(split, "natural-column", natural_column)
            natural_ids[part] = np.asarray(split[ids])
    return Data(
        *loaded["train"],
        *loaded["test"],
        num_classes,
        natural_ids.get("train"),
        natural_ids_test=natural_ids.get("test"),
    )


def _of_domains(domains: Joined) -> Data:
    """Digits of several domains, which are the owners of the examples."""
    return Data(
        *domains.train,
        *domains.test,
        num_classes=10,
        natural_ids=domains.ids,
        natural_ids_test=domains.ids_test,
    )


def _as_domain(data: Data) -> Domain:
    return Domain(Part(data.x_train, data.y_train), Part(data.x_test, data.y_test))


_BY_NAME: dict[str, Callable[[Path], Data]] = {
    "digits": _digits,
    "mnist": _torchvision("MNIST", "MNIST"),
    "fashion-mnist": _torchvision("FashionMNIST", "FashionMNIST"),
    "cifar10": _torchvision("CIFAR10", ""),
}
