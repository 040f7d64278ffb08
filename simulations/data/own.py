"""A user's own examples, from objects or files, in the form that runs take."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedntk.clients import cache_dir
from fedntk.ntk.support.files import whole

from ..config.settings import ConfigError
from .hugging_face import image_column, picture_array, require_column
from .parts import Part
from .settings import DatasetSettings

Indices = NDArray[np.int64]
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True, eq=False)
class OwnData:
    """Your own examples, with what a run has to know of them.

    Parameters
    ----------
    train : (x, y), data frame, torch dataset or Hugging Face dataset
        Examples (n, ...) and labels (n,) as arrays or tensors; or a pandas frame with a column of
        labels, `target`; or a dataset of torch with pairs; or a Hugging Face ``Dataset``. A mapping
        with ``"train"`` and perhaps ``"test"``, such as a ``DatasetDict``, has both.
    test : the same, optional
        Test set. Without one, `test_share` of the examples of each class are kept for it.
    target : str
        Column of the labels, which may be words.
    client_column : str
        Column that says whose a row is, for ``partition = "natural"``.
    image_column : str
        Column of the images of a Hugging Face dataset; its first one by default.
    split : sequence of index arrays, or partitioner of flwr-datasets, optional
        Each client's training examples, for ``partition = "given"``. The partitioner gets the
        columns ``label`` and, with `client_column`, that one.
    test_share, test_seed : float, int
        Share of the examples that become the test set, if there is none, and the seed of their
        draw, which is the same for all seeds of a run.

    Examples
    --------
    >>> x, y = np.eye(6, dtype=np.float32), np.arange(6) % 2
    >>> own = OwnData((x, y), split=[[0, 1], [2, 3]], test_share=0.34).read()
    >>> len(own.train.y), len(own.test.y), own.classes
    (4, 2, ())
    """

    train: Any
    test: Any = None
    target: str = "label"
    client_column: str = ""
    image_column: str = ""
    split: Any = None
    test_share: float = 0.2
    test_seed: int = 0

    @classmethod
    def of(cls, data: Any, settings: DatasetSettings) -> "OwnData":
        """Return data as they came, or with the columns and the share that the settings name."""
        if isinstance(data, OwnData):
            return data
        names = ("target", "client_column", "image_column", "test_share", "test_seed")
        return cls(data, **{name: getattr(settings, name) for name in names})

    def read(self) -> "Examples":
        """Return the examples as arrays; ConfigError says what does not fit."""
        train, test = self.train, self.test
        if isinstance(train, Mapping):
            if "train" not in train:
                raise ConfigError(f"data: expected train among the splits, got {', '.join(train)}")
            train, test = train["train"], train.get("test", test)
        first = self._table(train, "train set")
        second = None if test is None else self._table(test, "test set")
        return _assemble(self, first, second)

    def settings(self, examples: "Examples") -> dict[str, Any]:
        """Return the settings that follow from whose the examples are."""
        if examples.split is not None:
            return {"partition": "given", "num_clients": len(examples.split)}
        if self.client_column and examples.train.owners is not None:
            return {
                "partition": "natural",
                "num_clients": len(np.unique(examples.train.owners)),
            }
        return {}

    def _table(self, data: Any, what: str) -> "Table":
        if isinstance(data, Table):
            return data
        if isinstance(data, tuple | list) and len(data) == 2:
            return Table(_array(data[0], what), _array(data[1], what))
        if hasattr(data, "to_numpy") and hasattr(data, "columns"):
            return self._frame(data, what)
        if hasattr(data, "features") and hasattr(data, "column_names"):
            return self._hugging_face(data, what)
        if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not _is_array(data):
            try:
                x, y = zip(*(data[i] for i in range(len(data))), strict=True)
                return Table(np.stack([_array(own, what) for own in x]), _array(y, what))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{what}: expected pairs of one shape (x, y), got {type(data).__name__}: "
                    f"{error}"
                ) from error
        raise ConfigError(
            f"{what}: expected (x, y), a data frame, a torch dataset or a Hugging Face dataset, "
            f"got {_describe(data)}"
        )

    def _frame(self, frame: Any, what: str) -> "Table":
        own = [require_column("target", self.target, frame.columns, f"the {what}")]
        if self.client_column:
            own += [
                require_column("client-column", self.client_column, frame.columns, f"the {what}")
            ]
        inputs = frame.drop(columns=own)
        words = [str(c) for c in inputs.columns if inputs[c].dtype.kind not in "biuf"]
        if words:
            raise ConfigError(
                f"{what}: expected numbers in all columns but the target, got words in "
                f"{', '.join(words[:10])}; encode them first, such as with "
                "pandas.get_dummies, or leave them out"
            )
        if not len(inputs.columns):
            raise ConfigError(f"{what}: expected columns besides the target, got none")
        owners = frame[self.client_column].to_numpy() if self.client_column else None
        columns = tuple(map(str, inputs.columns))
        x = inputs.to_numpy(dtype=np.float32)
        return Table(x, frame[self.target].to_numpy(), owners, columns)

    def _hugging_face(self, data: Any, what: str) -> "Table":
        from datasets import ClassLabel

        picture = self.image_column or image_column(data)
        if not picture:
            return self._frame(data.to_pandas(), what)
        require_column("image-column", picture, data.features, f"the {what}")
        kind = data.features[require_column("target", self.target, data.features, f"the {what}")]
        names = tuple(kind.names) if isinstance(kind, ClassLabel) else ()
        owners = None
        if self.client_column:
            require_column("client-column", self.client_column, data.features, f"the {what}")
            owners = np.asarray(data[self.client_column])
        y = np.asarray(data[self.target])
        return Table(picture_array(data[picture], what), y, owners, classes=names)


class Table(NamedTuple):
    """Raw examples of one set."""

    x: NDArray[Any]
    y: NDArray[Any]  # numbers or words
    owners: NDArray[Any] | None = None
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # names of the labels 0 ... C - 1, if they are known


class Examples(NamedTuple):
    """A training and a test set that runs take; `split` has indices of each client's examples."""

    train: Part
    test: Part
    num_classes: int
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    split: tuple[Indices, ...] | None = None

    def write(self) -> Path:
        """Write the examples into the cache, under a name that their content gives."""
        arrays = {
            "x_train": self.train.x, "y_train": self.train.y,
            "x_test": self.test.x, "y_test": self.test.y,
            "clients_train": self.train.owners, "clients_test": self.test.owners,
            "columns": np.array(self.columns) if self.columns else None,
            "classes": np.array(self.classes) if self.classes else None,
        }  # fmt: skip
        if self.split is not None:
            arrays["split"] = np.concatenate(self.split)
            arrays["split_sizes"] = np.array([len(own) for own in self.split])
        found = {name: array for name, array in arrays.items() if array is not None}
        digest = hashlib.sha256()
        for name, array in found.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        path = cache_dir() / "data" / f"own-{digest.hexdigest()[:16]}.npz"
        if not path.exists():
            with whole(path) as file:
                np.savez(file, allow_pickle=False, **found)
        return path


def _assemble(own: OwnData, train: Table, test: Table | None) -> Examples:
    """Give the classes numbers, and the test set its examples."""
    names, known = train.classes, {}
    labels = [np.unique(table.y) for table in (train, test) if table is not None and len(table.y)]
    if not names:
        every = np.unique(np.concatenate(labels)) if labels else np.zeros(0, np.int64)
        if every.dtype.kind not in "iubUSO":
            raise ConfigError(f"expected whole numbers or words as labels, got {every.dtype}")
        if len(new := np.setdiff1d(every, labels[0])):
            few = ", ".join(map(str, new[:5]))
            raise ConfigError(f"test set: no training example has the labels {few}")
        if not np.array_equal(every, np.arange(len(every))):
            names = tuple(map(str, every))
            known = {name: i for i, name in enumerate(names)}

    def part(table: Table, what: str) -> Part:
        y = np.array([known.get(str(v), v) for v in table.y.tolist()]) if known else table.y
        x = check_numbers(table.x, f"{what}: ")
        if y.shape != (len(x),):
            raise ConfigError(
                f"{what}: expected examples and one label each, got shapes {x.shape} and {y.shape}"
            )
        return Part(x, y.astype(np.int64), _plain(table.owners))

    whole_set = part(train, "train set")
    num_classes = len(names) or int(max(values.max() for values in labels)) + 1
    given = _split(own, whole_set)
    if test is not None:
        first, second = whole_set, part(test, "test set")
    else:
        kept = _draw_test(whole_set.y, own.test_share, own.test_seed)
        if given is not None:  # only what no client has been given can be tested on
            free = np.ones(len(whole_set.y), bool)
            free[np.concatenate(given)] = False
            kept = free if free.any() else kept
            numbers = np.cumsum(~kept) - 1
            given = tuple(numbers[indices[~kept[indices]]] for indices in given)
        first, second = whole_set.select(~kept), whole_set.select(kept)
    return Examples(first, second, num_classes, train.columns, names, given)


def _draw_test(y: Indices, share: float, seed: int) -> NDArray[np.bool_]:
    """Draw the test set: a share of each class, at least one and not all of it."""
    if not share:
        raise ConfigError(
            "test-share: the data have no test set; expected a share of the examples to keep for "
            "it, such as 0.2, got 0"
        )
    generator = np.random.default_rng([seed, *b"test set"])
    kept = np.zeros(len(y), bool)
    for label in np.unique(y):
        members = generator.permutation(np.flatnonzero(y == label))
        kept[members[: min(max(1, round(share * len(members))), len(members) - 1)]] = True
    return kept


def _split(own: OwnData, whole_set: Part) -> tuple[Indices, ...] | None:
    """Return each client's indices by the user's own split, if there is one."""
    if own.split is None:
        return None
    split, most = own.split, len(whole_set.y)
    if hasattr(split, "load_partition"):
        from datasets import Dataset

        columns: dict[str, Any] = {"index": np.arange(most), "label": whole_set.y}
        if whole_set.owners is not None:
            columns[own.client_column] = whole_set.owners
        split.dataset = Dataset.from_dict(columns)
        split = [split.load_partition(i)["index"] for i in range(split.num_partitions)]
    clients = tuple(np.asarray(indices, np.int64).reshape(-1) for indices in split)
    for i, indices in enumerate(clients):
        if not len(indices) or indices.min() < 0 or indices.max() >= most:
            raise ConfigError(
                f"split: expected indices 0 ... {most - 1} for client {i}, at least one, got "
                f"{_range(indices)}"
            )
    return clients


def _range(indices: Indices) -> str:
    return f"{indices.min()} ... {indices.max()}" if len(indices) else "none"


def check_numbers(x: NDArray[Any], what: str = "") -> NDArray[Any]:
    """Refuse examples that are not finite numbers of shape (n, ...)."""
    if not np.issubdtype(x.dtype, np.number) or np.iscomplexobj(x) or x.ndim < 2:
        raise ConfigError(f"{what}expected numbers of shape (n, ...), got {x.dtype} of {x.shape}")
    if not np.isfinite(x).all():
        raise ConfigError(f"{what}expected finite numbers, got NaN or infinity")
    return x


def _plain(owners: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return owners as numbers or text, which a file holds without pickling."""
    return owners.astype(str) if owners is not None and owners.dtype.kind == "O" else owners


def _is_array(data: Any) -> bool:
    return isinstance(data, np.ndarray) or hasattr(data, "detach")


def _array(data: Any, what: str) -> NDArray[Any]:
    """Return an array of a tensor, a picture, a sequence of labels, or an array."""
    if hasattr(data, "detach"):
        data = data.detach().cpu()
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise ConfigError(f"{what}: expected examples of one shape, got {error}") from error
    return array


def _describe(data: Any) -> str:
    """Say what an object is without printing its numbers."""
    shape = getattr(data, "shape", None)
    return type(data).__name__ if shape is None else f"{type(data).__name__} of {tuple(shape)}"


# -------------------------------------------------------------------------- files


def read_file(kind: str, rest: str, settings: DatasetSettings) -> Examples:
    """Read ``csv:``, ``parquet:`` or ``folder:``; a folder may hold a train and a test part."""
    place = Path(rest).expanduser()
    if not place.exists():
        raise ConfigError(f"dataset: no file or folder at {place.absolute()}")
    read = _read_class_folders if kind == "folder" else partial(_read_table, kind)
    parts = {
        path.stem: read(path)
        for path in sorted(place.iterdir() if place.is_dir() else ())
        if path.stem in ("train", "test")
    }
    return OwnData.of(parts if "train" in parts else read(place), settings).read()


def _read_table(kind: str, path: Path) -> Any:
    import pandas as pd

    if path.is_dir():
        raise ConfigError(
            f"dataset: expected a {kind} file, or a folder with train.{kind}, got the folder "
            f"{path}; did you mean folder:{path}?"
        )
    return pd.read_csv(path) if kind == "csv" else pd.read_parquet(path)


def _read_class_folders(place: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read pictures of a folder for each class, all of one size and mode; labels are its name."""
    from PIL import Image

    pictures, labels = [], []
    for folder in sorted(path for path in place.iterdir() if path.is_dir()):
        for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES):
            with Image.open(path) as picture:
                pictures.append(np.asarray(picture))
            labels.append(folder.name)
    if not pictures:
        raise ConfigError(
            f"dataset: expected a folder for each class with pictures in it, got none in {place}"
        )
    return picture_array(pictures, str(place)), np.array(labels)
