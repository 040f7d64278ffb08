"""Data sets by name, standardised, as tensors; nothing here depends on how they are split."""

import gzip
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedntk.clients import cache_dir
from fedntk.ntk.predictors.inputs import InputTransform, channels_first

from ..config.data import DatasetSettings
from ..config.settings import ConfigError, nearest
from ..errors import first_line, naming
from .data import PASSED, Data, LocalData, Part, passed_data
from .domains import digit_domains, digits_five
from .files import kind_of
from .own import Task, read_arrays, read_own, read_parts
from .two_patch import TwoPatchOptions, draw_two_patch
from .writers import femnist, load_leaf

PASSED_FILE = "passed.npz"  # in a run's folder, while processes of Ray's need it
IDX_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


def load_own(
    path: str,
    data: Data,
    max_examples: int,
    *,
    check_ranges: bool = True,
    settings: DatasetSettings | None = None,
    dtype: torch.dtype = torch.float32,
) -> LocalData:
    """Load a node's own examples, of the kind of the run's data set and prepared as these.

    `path` is a csv or parquet file, which is read by `settings` as a run's own table is; an npz
    file of x and y, perhaps x_test and y_test, ``columns``, and ``classes``, the names of numbers
    as labels; or a folder with one of these, or with tables train and test. Numbers of another
    kind, unit or scale than the run's are refused if `check_ranges`.
    """
    kind, place = _own_file(Path(path).expanduser())
    if kind == "npz":
        parts = _own_arrays(place)
    else:
        with naming(f"data-path: {place}", ValueError, OSError):
            task: Task = "regression" if data.has_real_targets else "classification"
            how = settings or DatasetSettings()
            parts = read_parts(kind, place, how, task, data.inputs.schema)
        if isinstance(data.inputs.classes[0], str):  # a table may lack the classes that are words
            parts = {
                name: part._replace(classes=(*map(str, part.classes),))
                for name, part in parts.items()
            }
    train = parts["train"]
    if not 0 < len(train.y) <= max_examples:
        raise ConfigError(
            f"data-path: expected 1 ... {max_examples} examples, got {len(train.y)} in {place}; "
            "max-examples says how many a client may have"
        )
    convert = partial(data.convert_examples, check_ranges=check_ranges, dtype=dtype)
    with naming(f"data-path: {place}", ValueError):
        own, test = (
            convert(part.x, part.y, columns=part.columns, classes=part.classes)
            for part in (train, parts.get("test", train.select(slice(0))))
        )
    return LocalData(own, test, train.x)


def _own_file(place: Path) -> tuple[str, Path]:
    """Return the kind of a node's examples, and their file, or the folder of train and test."""
    if not place.exists():
        raise ConfigError(f"data-path: no file or folder at {place.absolute()}")
    entries = sorted(place.iterdir()) if place.is_dir() else [place]
    files = [path for path in entries if path.is_file() and kind_of(path)]
    kinds = {*map(kind_of, files)}
    if len(files) == 1 or (len(kinds) == 1 and kinds != {"npz"}):
        return kinds.pop(), files[0] if len(files) == 1 else place
    raise ConfigError(
        "data-path: expected a csv, parquet or npz file, or a folder with one, or with tables "
        f"train and test, got {place}"
    )


def _own_arrays(path: Path) -> dict[str, Part]:
    arrays = read_arrays("data-path", path, "x", "y")
    names = [tuple(arrays.get(key, np.zeros(0)).tolist()) for key in ("columns", "classes")]
    train = Part(arrays["x"], arrays["y"], None, *names)
    x, y = (arrays.get(f"{axis}_test", getattr(train, axis)[:0]) for axis in "xy")
    return {"train": train, "test": train._replace(x=x, y=y)}


def load_data(settings: DatasetSettings) -> Data:
    """Load the data set that `settings` name; later calls in a process share it."""
    kind, _, rest = settings.dataset.partition(":")
    place = Path(kind if kind.endswith(".py") else rest).expanduser()
    files = sorted(place.rglob("*")) if rest and place.is_dir() else [place]
    files += [Path(settings.schema)] if settings.schema else []
    files += [Path(settings.moments) / InputTransform.FILE] if settings.moments else []
    states = [(str(file), file.stat()) for file in files if file.is_file()]
    modified = tuple((name, s.st_mtime_ns, s.st_ctime_ns, s.st_size) for name, s in states)
    options = {name: getattr(settings, name) for name in DatasetSettings.options()}
    if kind == PASSED and passed_data(settings.dataset) is None:  # in another process
        file = getattr(settings, "folder", place) / PASSED_FILE
        if not file.exists():
            raise ConfigError(
                f"dataset = {settings.dataset}: examples that were passed to a run in another "
                "process, or long ago, and are not kept; pass them again as data=..."
            )
        options["dataset"] = f"npz:{file}"
    options["data_dir"] = settings.data_dir or str(cache_dir() / "data")
    try:
        return _load(DatasetSettings(**options), modified)
    except ConfigError:
        raise
    except Exception as error:  # what a damaged file makes a library raise
        raise ConfigError(
            f"dataset = {settings.dataset}: cannot be read: {first_line(error)}"
        ) from error


def forget_loaded(dataset: str) -> None:
    """Load a data set anew if it is a user's function, which may return another than before."""
    if ".py:" in dataset:
        _load.cache_clear()


@lru_cache(maxsize=2)
def _load(settings: DatasetSettings, _modified: object) -> Data:
    if (passed := passed_data(settings.dataset)) is not None:
        return replace(passed, standardise=settings.standardise)
    name, _, rest = settings.dataset.partition(":")
    folder = Path(settings.data_dir).expanduser()
    counts = settings.examples_per_domain, settings.test_examples_per_domain
    options: dict[str, Any] = {"standardise": settings.standardise}
    num_classes = 10
    if rest and (data := read_own(settings)) is not None:
        return data
    for key in ("schema", "moments"):
        if getattr(settings, key):
            raise ConfigError(f"{key}: expected a table, got dataset = {settings.dataset}")
    if name == "leaf" and rest:
        train, test, num_classes, options["alphabet"] = load_leaf(Path(rest).expanduser())
    elif name == "two-patch":
        (train, test), num_classes = draw_two_patch(TwoPatchOptions.read(rest)), 2
        options["standardise"] = False
    elif name in ("femnist", "femnist-digits"):
        train, test, num_classes = femnist(rest, digits=name == "femnist-digits")
    elif name == "digits-five":
        train, test = digits_five(rest, *counts)
    elif settings.dataset == "digit-domains":
        train, test = digit_domains(_BY_NAME["mnist"](folder), _BY_NAME["digits"](folder), *counts)
    elif settings.dataset in _BY_NAME:
        train, test = _BY_NAME[settings.dataset](folder)
        num_classes = 100 if settings.dataset == "cifar100" else num_classes
    else:
        raise _unknown(settings.dataset)
    return Data.of(train, test, num_classes, **options)


def _unknown(dataset: str) -> ConfigError:
    """Return the error about no data set, with the name, or the form of a path, that is meant."""
    names = (*_BY_NAME, "femnist", "femnist-digits", "digit-domains", "digits-five")
    place = Path(dataset).expanduser()
    kind = "folder" if place.is_dir() else place.suffix.removeprefix(".")
    meant = nearest(dataset, (*names, "two-patch"))
    if place.exists() and kind in ("csv", "parquet", "npz", "folder"):
        meant = f"; did you mean {f'{kind}:{place}'!r}?"
    elif place.exists() and kind == "py":
        meant = f"; name a function in it, such as '{place}:load'"
    return ConfigError(
        f"dataset: expected {', '.join(names)}, digits-five:<folder>, femnist:<folder>, "
        "two-patch:<options>; or your own: csv:<file>, parquet:<file>, folder:<class folders>, "
        "hf:<name or folder>, leaf:<folder>, npz:<file>, <file>.py:<function>; got "
        f"{dataset!r}{meant}"
    )


Halves = tuple[Part, Part]  # training and test set


def _digits(_: Path) -> Halves:
    """Scikit-learn's 1,797 digits, from its file: importing it takes seconds in each worker."""
    home = Path(str(find_spec("sklearn").origin)).parent  # type: ignore[union-attr]
    rows = np.loadtxt(home / "datasets" / "data" / "digits.csv.gz", np.float32, delimiter=",")
    every = Part(rows[:, :64].reshape(-1, 1, 8, 8), rows[:, 64].astype(np.int64))
    is_test = np.arange(len(rows)) % 5 == 0
    return every.select(~is_test), every.select(is_test)


def _torchvision(class_name: str, folder: str, data_dir: Path) -> Halves:
    raw = data_dir / folder / "raw"
    files = [path for name in IDX_FILES for path in sorted(raw.glob(f"{name}*"))[:1]]
    if len(files) == len(IDX_FILES):
        x_train, y_train, x_test, y_test = map(_idx, files)
        return _images(x_train, y_train), _images(x_test, y_test)
    import torchvision  # takes a second

    kind = getattr(torchvision.datasets, class_name)
    try:  # nothing is downloaded that is there
        parts = [kind(root=str(data_dir), train=train, download=True) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"{class_name} is not in {data_dir} and cannot be downloaded ({error}); set data-dir "
            "to a folder in torchvision's layout"
        ) from error
    train, test = (_images(np.asarray(part.data), np.asarray(part.targets)) for part in parts)
    return train, test


def _images(x: NDArray[Any], y: NDArray[Any]) -> Part:
    return Part(channels_first(x), y.astype(np.int64))


def _idx(path: Path) -> NDArray[np.uint8]:
    """Read unsigned bytes after a header: two zeros, type, dimensions, and the size of each."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        raw = np.frombuffer(bytearray(file.read()), np.uint8)
    if raw[:3].tolist() != [0, 0, 8]:
        raise ValueError(f"{path} is no file of unsigned bytes in the format IDX")
    start = 4 + 4 * int(raw[3])
    return raw[start:].reshape(raw[4:start].view(">u4").tolist())


_BY_NAME: dict[str, Callable[[Path], Halves]] = {  # ten classes each, but for cifar100
    "digits": _digits,
    "mnist": partial(_torchvision, "MNIST", "MNIST"),
    "fashion-mnist": partial(_torchvision, "FashionMNIST", "FashionMNIST"),
    "cifar10": partial(_torchvision, "CIFAR10", ""),
    "cifar100": partial(_torchvision, "CIFAR100", ""),
}
