"""Data sets by name, standardised, as tensors; nothing here depends on how they are split."""

import gzip
import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.clients import cache_dir
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.ntk.support.files import whole

from ..config.importing import import_named
from ..config.settings import ConfigError, nearest
from ..errors import first_line
from .digit_domains import digit_domains
from .digits_five import digits_five
from .femnist import femnist
from .hugging_face import HuggingFaceSet, channels_first
from .kept_examples import Own
from .leaf import load_leaf
from .own import Examples, OwnData, Table, check_numbers, read_file
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
    as `inputs` makes them: standardised, unless their values have a meaning as they are, such as
    positions in an alphabet, or signals of a stated strength. A `split` that comes with the data
    has indices of each client's training examples.
    """

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    num_classes: int
    natural_ids: NDArray[Any] | None = None
    natural_ids_test: NDArray[Any] | None = None
    standardise: bool = True
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    alphabet: str = ""
    split: tuple[NDArray[np.int64], ...] | None = None

    def __post_init__(self) -> None:
        for part, x, y in (
            ("train", self.x_train, self.y_train),
            ("test", self.x_test, self.y_test),
        ):
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
    def inputs(self) -> InputTransform:
        """What is done to raw examples before a network sees them."""
        classes = self.classes or tuple(self.alphabet) or tuple(map(str, range(self.num_classes)))
        return InputTransform.fit(
            self.x_train,
            standardise=self.standardise and not self.alphabet,
            columns=self.columns,
            classes=classes,
            alphabet=self.alphabet,
        )

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
        """Return training examples as a network takes them, float32, with their labels."""
        return self.inputs(self.x_train[indices]), torch.from_numpy(self.y_train[indices])

    def test(self, indices: NDArray[np.int64] | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return test examples, by default all, as :meth:`train` does."""
        y = np.ascontiguousarray(self.y_test[indices])
        return self.inputs(self.x_test[indices]), torch.from_numpy(y)

    def convert_examples(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Return other raw examples of this kind, checked, as :meth:`train` does."""
        if not np.issubdtype(y.dtype, np.integer) and y.dtype.kind != "U":
            raise ConfigError(f"expected whole numbers or names as labels, got {y.dtype}")
        try:
            labels = self.inputs.labels(y).to(torch.int64)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._require_kind(check_numbers(x), labels.numpy())
        return self.inputs(x), labels


def _arrays(key: str, path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read the arrays of an npz file, which has at least those that are named."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            found = dict(file)
    except FileNotFoundError:
        raise ConfigError(f"{key}: no file at {path.absolute()}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {first_line(error)}") from None
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"{key}: {path} must hold {' and '.join(names)}; it lacks {', '.join(missing)} and "
            f"has {', '.join(found) or 'nothing'}"
        )
    return found


def load_own(path: str, data: Data, max_examples: int) -> Own:
    """Load a node's own examples, of the kind of the run's data set and prepared as these.

    `path` is an npz file, or a folder with one. It holds x and y, and may hold x_test and y_test.
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.npz")) if place.is_dir() else [place]
    if len(files) != 1 or not files[0].is_file():
        raise ConfigError(f"data-path: expected an npz file, or a folder with one, got {place}")
    found = _arrays("data-path", files[0], "x", "y")
    x, y = found["x"], found["y"]
    if not 0 < len(y) <= max_examples:
        raise ConfigError(
            f"data-path: expected 1 ... {max_examples} examples, got {len(y)} in {files[0]}; "
            "max-examples says how many a client may have"
        )
    test = found.get("x_test", x[:0]), found.get("y_test", y[:0])
    try:
        return Own(data.convert_examples(x, y), data.convert_examples(*test))
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
    if name in ("csv", "parquet", "folder") and rest:
        return _own(read_file(name, rest, settings), settings)
    if name.endswith(".py") and rest:
        made = import_named("dataset", settings.dataset)
        return _own(OwnData.of(made() if callable(made) else made, settings).read(), settings)
    if name == "npz" and rest:
        return _own(_npz(Path(rest).expanduser(), settings), settings)
    if name == "leaf" and rest:
        train, test, num_classes, alphabet = load_leaf(Path(rest).expanduser())
        return _data(train, test, num_classes, settings, alphabet=alphabet)
    if name == "two-patch":
        return _data(*draw_two_patch(TwoPatchOptions.read(rest)), 2)
    if name == "hf" and rest:
        parts = HuggingFaceSet(rest).splits()
        return _own(OwnData.of(parts, settings).read(), settings)
    if name in ("femnist", "femnist-digits"):
        return _data(*femnist(rest, digits=name == "femnist-digits"), settings)
    if name == "digits-five":
        return _data(*digits_five(rest, *per_domain), 10, settings)
    if settings.dataset == "digit-domains":
        mnist, digits = (Domain(*_BY_NAME[own](folder)[:2]) for own in ("mnist", "digits"))
        return _data(*digit_domains(mnist, digits, *per_domain), 10, settings)
    if settings.dataset in _BY_NAME:
        return _data(*_BY_NAME[settings.dataset](folder), settings)
    names = (*_BY_NAME, "femnist", "femnist-digits", "digit-domains", "digits-five")
    raise ConfigError(
        f"dataset: expected {', '.join(names)}, digits-five:<folder>, femnist:<folder>, "
        "two-patch:<options>; or your own: csv:<file>, parquet:<file>, folder:<class folders>, "
        "hf:<name or folder>, leaf:<folder>, npz:<file>, <file>.py:<function>; got "
        f"{settings.dataset!r}{_meant(settings.dataset, (*names, 'two-patch'))}"
    )


def _meant(given: str, names: Sequence[str]) -> str:
    """Say which form of a path, or which name, is meant by one that is none."""
    place = Path(given.removeprefix("hf:")).expanduser()
    kind = "folder" if place.is_dir() else place.suffix.removeprefix(".")
    if place.exists() and kind in ("csv", "parquet", "npz", "folder"):
        return f"; did you mean {f'{kind}:{place}'!r}?"
    if place.exists() and kind == "py":
        return f"; name a function in it, such as '{place}:load'"
    return nearest(given, names)


def _data(
    train: Part, test: Part, num_classes: int, settings: DatasetSettings | None = None, **more: Any
) -> Data:
    """Make a data set; without settings it is not standardised."""
    standardise = settings is not None and settings.standardise
    owners = train.owners, test.owners
    return Data(train.x, train.y, test.x, test.y, num_classes, *owners, standardise, **more)


def _own(own: Examples, settings: DatasetSettings) -> Data:
    train, test, num_classes, columns, classes, split = own
    return _data(train, test, num_classes, settings, columns=columns, classes=classes, split=split)


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
    return _npz(path, DatasetSettings())[:3]


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


NPZ = (
    *("x_train", "y_train", "x_test", "y_test", "clients_train", "clients_test"),
    *("columns", "classes", "split", "split_sizes"),
)


def _npz(path: Path, settings: DatasetSettings) -> Examples:
    """Read arrays of a user's own file.

    They are x_train (n, ...) and y_train (n,), and perhaps x_test and y_test, clients_train and
    clients_test (whose an example is), columns and classes (names), and a split: the indices of
    each client's training examples, one client after the other, and split_sizes.
    """
    found = _arrays("dataset", path, "x_train", "y_train")
    if odd := sorted(found.keys() - set(NPZ)):
        raise ConfigError(
            f"dataset: {path} has {', '.join(odd)}; expected some of {', '.join(NPZ)}"
        )
    if ("x_test" in found) != ("y_test" in found):
        raise ConfigError(f"dataset: {path} must hold both x_test and y_test, or neither")
    names = {key: tuple(found.get(key, np.zeros(0)).tolist()) for key in ("columns", "classes")}

    def side(part: str) -> Table:
        x, y = (found[f"{axis}_{part}"] for axis in "xy")
        return Table(x, y, found.get(f"clients_{part}"), names["columns"], names["classes"])

    own = OwnData.of(side("train"), settings)
    split = None
    if "split" in found:
        split = np.split(found["split"], np.cumsum(found["split_sizes"])[:-1])
    test = side("test") if "x_test" in found else None
    try:
        return replace(own, test=test, split=split).read()
    except ConfigError as error:
        raise ConfigError(f"dataset: {path}: {error}") from None


_BY_NAME: dict[str, Callable[[Path], Loaded]] = {
    "digits": _digits,
    "mnist": partial(_torchvision, "MNIST", "MNIST"),
    "fashion-mnist": partial(_torchvision, "FashionMNIST", "FashionMNIST"),
    "cifar10": partial(_torchvision, "CIFAR10", ""),
}
