"""A user's own examples, from objects or files, in the form that runs take."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedntk.clients import cache_dir
from fedntk.ntk.support.files import whole

from ..config.importing import import_named
from ..config.settings import ConfigError
from ..errors import first_line
from .hugging_face import image_column, load_splits, require_column, stack_pictures
from .parts import Part
from .settings import DatasetSettings

Indices = NDArray[np.int64]
NPZ = (
    *("x_train", "y_train", "clients_train", "x_test", "y_test", "clients_test"),
    *("columns", "classes", "split", "split_sizes"),
)
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True, eq=False)
class OwnData:
    """Your own examples, with what a run has to know of them.

    Parameters
    ----------
    train : (x, y), data frame, torch dataset or Hugging Face dataset
        Examples (n, ...) and labels (n,), arrays or tensors; or a pandas frame; or pairs. A mapping
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
        Each client's training examples. A partitioner gets the columns ``label`` and, with
        `client_column`, that one.
    test_share, test_seed : float, int
        Share of the examples that become the test set, if there is none, and the draw's seed.

    Examples
    --------
    >>> x, y = np.eye(6, dtype=np.float32), np.arange(6) % 2
    >>> own = OwnData((x, y), split=[[0, 1], [2, 3]], test_share=0.3).read()
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
    def of(cls, data: Any, settings: DatasetSettings, **more: Any) -> "OwnData":
        """Return data as they came, or with the columns and the share that the settings name."""
        if isinstance(data, OwnData):
            return data
        names = ("target", "client_column", "image_column", "test_share", "test_seed")
        return cls(data, **{name: getattr(settings, name) for name in names}, **more)

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

    def _table(self, data: Any, what: str) -> "Table":
        if isinstance(data, Table):
            return data
        if hasattr(data, "to_numpy") and hasattr(data, "columns"):
            return self._frame(data, what)
        if hasattr(data, "column_names"):
            return self._hugging_face(data, what)
        try:
            if not (isinstance(data, tuple | list) and len(data) == 2):
                x, y = zip(*(data[i] for i in range(len(data))), strict=True)
                data = np.stack([_array(own) for own in x]), y
            return Table(_array(data[0]), _array(data[1]))
        except (TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"{what}: expected (x, y), a data frame, a Hugging Face dataset or a torch dataset "
                f"of pairs, with examples of one shape, got {type(data).__name__}: {error}"
            ) from error

    def _require_columns(self, columns: Iterable[str], what: str) -> list[str]:
        """Return the columns of labels and owners, which must be there."""
        own = {"target": self.target, "client-column": self.client_column or self.target}
        return [require_column(key, name, columns, f"the {what}") for key, name in own.items()]

    def _frame(self, frame: Any, what: str) -> "Table":
        own = self._require_columns(frame.columns, what)
        index = [c for c in frame.columns if str(c).startswith("__index_level_")]  # of pandas
        inputs = frame.drop(columns=[*own, *index])
        odd = [str(c) for c in inputs.columns if inputs[c].dtype.kind not in "biuf"]
        if words := ", ".join(odd[:10]):
            raise ConfigError(
                f"{what}: expected numbers in all columns but the target, got others in {words}; "
                "encode them first, such as with pandas.get_dummies, or leave them out"
            )
        owners = np.array(frame[self.client_column].tolist()) if self.client_column else None
        x, y = inputs.to_numpy(dtype=np.float64), frame[self.target].to_numpy()
        return Table(x, y, owners, tuple(map(str, inputs.columns)))

    def _hugging_face(self, data: Any, what: str) -> "Table":
        picture = self.image_column or image_column(data)
        self._require_columns(data.features, what)
        names = tuple(getattr(data.features[self.target], "names", ()))
        if not picture:
            return self._frame(data.to_pandas(), what)._replace(classes=names)
        require_column("image-column", picture, data.features, f"the {what}")
        owners = np.asarray(data[self.client_column]) if self.client_column else None
        x, y = stack_pictures(data[picture], what), np.asarray(data[self.target])
        return Table(x, y, owners, classes=names)


class Table(NamedTuple):
    """Raw examples of one set."""

    x: NDArray[Any]
    y: NDArray[Any]  # numbers or words
    owners: NDArray[Any] | None = None
    columns: tuple[str, ...] = ()
    classes: tuple[str | int, ...] = ()  # names of the labels 0 ... C - 1, if they are known


class Examples(NamedTuple):
    """A training and a test set that runs take; `split` has indices of each client's examples."""

    train: Part
    test: Part
    num_classes: int
    columns: tuple[str, ...] = ()
    classes: tuple[str | int, ...] = ()  # numbers if the data had these as labels
    split: tuple[Indices, ...] | None = None

    def write(self) -> dict[str, Any]:
        """Write them into the cache, named by content; return the settings that follow."""
        split, sizes, settings = None, None, dict[str, Any]()
        if self.split is not None:
            split, sizes = np.concatenate(self.split), np.array([len(own) for own in self.split])
            settings = {"partition": "given", "num_clients": len(sizes)}
        elif self.train.owners is not None:
            settings = {"partition": "natural", "num_clients": len(np.unique(self.train.owners))}
        texts = np.array(self.columns, str), np.array(self.classes or np.array((), str))
        every = (*self.train, *self.test, *texts, split, sizes)
        arrays = {n: array for n, array in zip(NPZ, every, strict=True) if array is not None}
        digest = checksum_of(np.array(list(arrays)), *arrays.values())
        path = cache_dir() / "data" / f"own-{digest[:16]}.npz"
        if not path.exists():
            with whole(path) as file:
                np.savez(file, allow_pickle=False, **arrays)
        return {"dataset": f"npz:{path}", **settings}


def checksum_of(*arrays: NDArray[Any]) -> str:
    """Return the SHA-256 of arrays with their dtypes and shapes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _assemble(own: OwnData, train: Table, test: Table | None) -> Examples:
    """Give the classes numbers, and the test set its examples."""
    if test is not None:
        test = _match(train, test)
    names, every = train.classes, None
    if not names:
        tables = (train, test) if test is not None else (train,)
        try:
            labels = [np.unique(table.y) for table in tables]
            every = np.unique(np.concatenate(labels))
        except TypeError as error:
            raise ConfigError(
                f"expected labels of one kind, all words or all numbers, without gaps: {error}"
            ) from None
        if every.dtype.kind == "f" and not (every % 1).any():  # whole, from a column with gaps
            every = every.astype(np.int64)
        if every.dtype.kind not in "iubUSO":
            raise ConfigError(f"expected whole numbers or words as labels, got {every.dtype}")
        if new := ", ".join(map(str, np.setdiff1d(every, labels[0])[:5])):
            raise ConfigError(f"test set: no training example has the labels {new}")
        if every.dtype.kind not in "iu" or not np.array_equal(every, np.arange(len(every))):
            names = tuple(every.tolist() if every.dtype.kind in "iu" else map(str, every))

    def part(table: Table, what: str) -> Part:
        y = table.y if every is None else np.searchsorted(every, table.y.astype(every.dtype))
        check_examples(table.x, y, f"{what}: ")
        return Part(table.x, y.astype(np.int64), table.owners)

    whole_set = part(train, "train set")
    given = _split(own, whole_set)
    more = len(names if every is None else every), train.columns, names
    if test is not None:
        return Examples(whole_set, part(test, "test set"), *more, given)
    kept = _draw_test(whole_set.y, own.test_share, own.test_seed)
    if given is not None:  # only what no client has been given can be tested on
        free = ~np.isin(np.arange(len(kept)), np.concatenate(given))
        kept = free if free.mean() >= own.test_share else kept
        numbers = np.cumsum(~kept) - 1
        given = tuple(numbers[indices[~kept[indices]]] for indices in given)
        if empty := [i for i, indices in enumerate(given) if not len(indices)]:
            raise ConfigError(
                f"split: all examples of client {empty[0]} were drawn for the test set; give a "
                "test set, or leave rows for it out of the split"
            )
    return Examples(whole_set.select(~kept), whole_set.select(kept), *more, given)


def _match(train: Table, test: Table) -> Table:
    """Return a test set with the columns, and the numbers of the classes, of the training set."""
    if sorted(train.columns) != sorted(test.columns):
        odd = sorted(set(train.columns) ^ set(test.columns))
        raise ConfigError(f"test set: other columns than the train set: {', '.join(odd[:10])}")
    order = [test.columns.index(name) for name in train.columns]
    test = test._replace(x=test.x[:, order] if order else test.x, columns=train.columns)
    if train.classes == test.classes:
        return test
    if odd := sorted(map(str, set(test.classes) - set(train.classes))):
        raise ConfigError(f"test set: no training example has the classes {', '.join(odd[:10])}")
    numbers = np.array([train.classes.index(name) for name in test.classes], np.int64)
    return test._replace(y=numbers[test.y], classes=train.classes)


def _draw_test(y: Indices, share: float, seed: int) -> NDArray[np.bool_]:
    """Draw the test set: a share of each class, at least one and not all of it."""
    if not share:
        raise ConfigError("test-share: the data have no test set; expected a share, such as 0.2")
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
    split = split.values() if isinstance(split, Mapping) else split
    clients = tuple(np.asarray(list(indices)) for indices in split)
    for i, indices in enumerate(clients):
        repeated = len(indices) - len(np.unique(indices))
        if len(indices) and (repeated or indices.dtype.kind not in "iu"):
            raise ConfigError(
                f"split: expected the numbers of client {i}'s examples, each once, got "
                f"{indices.dtype} with {repeated} repeated"
            )
        wrong = indices[(indices < 0) | (indices >= most)]
        if len(wrong) or not len(indices):
            raise ConfigError(
                f"split: expected indices 0 ... {most - 1} for client {i}, at least one, got "
                f"{', '.join(map(str, wrong[:5])) or 'none'}"
            )
    return clients


def check_examples(x: NDArray[Any], y: NDArray[Any], what: str = "") -> None:
    """Refuse examples that are not finite numbers of shape (n, ...), or lack one label each."""
    is_number = np.issubdtype(x.dtype, np.number) and not np.iscomplexobj(x)
    if not is_number or x.ndim < 2 or 0 in x.shape[1:]:
        raise ConfigError(f"{what}expected numbers of shape (n, ...), got {x.dtype} of {x.shape}")
    if not np.isfinite(x).all():
        raise ConfigError(f"{what}expected finite numbers, got NaN or infinity")
    if y.shape != (len(x),):
        raise ConfigError(
            f"{what}expected examples and one label each, got shapes {x.shape} and {y.shape}"
        )


def _array(data: Any) -> NDArray[Any]:
    return np.asarray(data.detach().cpu() if hasattr(data, "detach") else data)


# -------------------------------------------------------------------------- files


def read_own(settings: DatasetSettings) -> Examples | None:
    """Read the examples that the setting names; None if it is not of a kind of one's own.

    A folder may hold a train and a test part, each a file of the kind, or a folder of classes.
    """
    kind, _, rest = settings.dataset.partition(":")
    place = Path(rest).expanduser()
    data: Any
    if kind.endswith(".py"):
        made = import_named("dataset", settings.dataset)
        data = made() if callable(made) else made
    elif kind == "hf":
        data = load_splits(rest)
    elif kind not in ("csv", "parquet", "folder", "npz"):
        return None
    elif not place.exists():
        cure = "; pass data=... again" if place.parent == cache_dir() / "data" else ""
        raise ConfigError(f"dataset: no file or folder at {place.absolute()}{cure}")
    elif kind == "npz":
        data = _read_npz(place, settings)
    else:
        parts = place.iterdir() if place.is_dir() else ()
        suffix = "" if kind == "folder" else f".{kind}"
        named = ("train", "test")
        data = {own.stem: own for own in parts if own.stem in named and own.suffix == suffix}
        if "train" in data:
            data = {part: _read(kind, own) for part, own in data.items()}
        else:
            data = _read(kind, place)
    return OwnData.of(data, settings).read()


def _read(kind: str, place: Path) -> Any:
    """Read a table, or pictures in a folder for each class, whose name is their label."""
    if kind == "folder":
        from PIL import Image

        paths = sorted(path for path in place.glob("*/**/*") if path.suffix.lower() in IMAGES)
        if not paths:
            raise ConfigError(
                f"dataset: expected a folder of pictures for each class, got none in {place}"
            )
        labels = [path.relative_to(place).parts[0] for path in paths]

        def convert(path: Path) -> NDArray[Any]:
            with Image.open(path) as picture:
                return np.asarray(picture.convert("RGB") if picture.mode == "P" else picture)

        return stack_pictures(paths, str(place), convert), np.array(labels)
    if place.is_dir():
        raise ConfigError(
            f"dataset: expected a {kind} file, or a folder with train.{kind}, got the folder "
            f"{place}; did you mean folder:{place}?"
        )
    import pandas as pd

    return pd.read_csv(place) if kind == "csv" else pd.read_parquet(place)


def _read_npz(path: Path, settings: DatasetSettings) -> OwnData:
    """Read some of the arrays ``NPZ``.

    clients_... say whose an example is; columns and classes are names; split has the indices of
    each client's training examples, one client after the other, of split_sizes.
    """
    found: dict[str, Any] = read_arrays("dataset", path, "x_train", "y_train")
    if odd := ", ".join(sorted(found.keys() - set(NPZ))):
        raise ConfigError(f"dataset: {path} has {odd}; expected some of {', '.join(NPZ)}")
    if ("x_test" in found) != ("y_test" in found):
        raise ConfigError(f"dataset: {path} must hold both x_test and y_test, or neither")
    names = {key: tuple(found.get(key, np.zeros(0)).tolist()) for key in ("columns", "classes")}
    parts = {
        part: Table(found[f"x_{part}"], found[f"y_{part}"], found.get(f"clients_{part}"), **names)
        for part in ("train", "test")
        if f"x_{part}" in found
    }
    split = None
    if "split" in found:
        split = np.split(found["split"], np.cumsum(found["split_sizes"])[:-1])
    return OwnData.of(parts, settings, split=split)


def read_arrays(key: str, path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read the arrays of an npz file, which has at least those that are named."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            found = dict(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {first_line(error)}") from None
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"{key}: {path} must hold {' and '.join(names)}; it lacks {', '.join(missing)} and "
            f"has {', '.join(found) or 'nothing'}"
        )
    return found
