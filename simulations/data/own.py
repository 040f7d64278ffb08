"""A user's own examples, from objects or files, in the form that runs take."""

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from logging import getLogger
from pathlib import Path
from typing import Any, Literal
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from fedntk.ntk.predictors.inputs import InputTransform, stack_pictures
from fedntk.ntk.predictors.pooled_moments import with_schema
from fedntk.ntk.predictors.schema import Schema, Target, plain_text
from fedntk.ntk.predictors.texts import are_texts, encode_texts
from fedntk.ntk.support.arrays import require_unmasked

from ..config.data import DatasetSettings
from ..config.importing import import_named
from ..config.settings import ConfigError
from ..errors import first_line, naming
from .data import NPZ, Data, Indices, Part, check_examples
from .files import (
    image_column,
    load_splits,
    named_splits,
    plain_rows,
    read_files,
    require_column,
    target_columns,
)
from .schema import columns_of, load_schema

MANY_CLASSES = 20  # up to so many may be of any number of examples
MOST_NUMBERS = 0.1  # different whole numbers among labels; above, they are likely no classes
MOST_WORDS = 0.5  # the same of words
LEARNED = "schema", "moments"  # settings of a table that data of one's own may have themselves
FOR_AMOUNTS = "if they are amounts, set task = regression, or give bins"
DATE = r"(\d{4}[-./]\d{1,2}[-./]\d{1,2}|\d{1,2}[-./]\d{1,2}[-./]\d{2,4})([T ].*)?"
Task = Literal["auto", "classification", "regression"]
logger = getLogger("flwr")


@dataclass(frozen=True, eq=False)
class OwnData:
    """Your own examples, with what a run has to know of them.

    Parameters
    ----------
    train : (x, y), data frame, torch dataset or Hugging Face dataset
        Examples (n, ...) and labels (n,), arrays or tensors; or a pandas frame; or pairs. Examples
        may be texts: a list of them, or the only column of a frame beside the others. A mapping
        with ``"train"`` and perhaps ``"test"``, such as a ``DatasetDict``, has both.
    test : the same, optional
        Test set. Without one, `test_share` of the examples of each class are kept for it.
    target, client_column, image_column : str
        Columns of the labels, which may be words, or of real targets, with commas between several;
        of whose a row is, for ``partition = "natural"``;
        and of the images of a Hugging Face dataset, by default its first one.
    schema : path or Schema, optional
        What the columns of a table mean, or a file of it as ``fedntk schema`` writes. Its target
        and client column count if `target` and `client_column` have their defaults.
    moments : path, optional
        Folder with the ``inputs.json`` of a run of GLM, whose pooled means and deviations count in
        place of these examples'.
    split : sequence of index arrays, or partitioner of flwr-datasets, optional
        Each client's training examples. A partitioner gets the columns ``label`` and, with
        `client_column`, that one.
    task : {"auto", "classification", "regression"}
        Whether there are labels of classes, or real targets (n,) or (n, C). By default they are
        real if they are more than 20 different numbers, some of them not whole, and several in a
        row do not add up to 1; other floats are refused, as they leave a doubt.
    test_share, test_seed : float, int
        Share of the examples that become the test set, if there is none, and the draw's seed. Each
        client keeps at least one example.

    Examples
    --------
    >>> x, y = np.eye(6, dtype=np.float32), np.arange(6) % 2
    >>> data = OwnData((x, y), split=[[0, 1], [2, 3]], test_share=0.3).read()
    >>> len(data.y_train), len(data.y_test), data.classes
    (4, 2, ())
    """

    train: Any
    test: Any = None
    target: str = "label"
    client_column: str = ""
    image_column: str = ""
    schema: str | Path | Schema | None = None
    moments: str | Path = ""
    split: Any = None
    task: Task = "auto"
    test_share: float = 0.2
    test_seed: int = 0

    def __post_init__(self) -> None:
        if not self.schema:
            object.__setattr__(self, "schema", None)
            return
        schema = self.schema if isinstance(self.schema, Schema) else load_schema(self.schema)
        target, client = columns_of(schema, self.target, self.client_column)
        for name, value in (("schema", schema), ("target", target), ("client_column", client)):
            object.__setattr__(self, name, value)

    @property
    def _schema(self) -> Schema | None:
        return self.schema if isinstance(self.schema, Schema) else None

    @classmethod
    def of(cls, data: Any, settings: DatasetSettings, **more: Any) -> "OwnData":
        """Return data as they came, or with the columns and the share that the settings name.

        The settings' schema counts if the data have none.
        """
        if isinstance(data, OwnData):
            more = {name: getattr(data, name) or getattr(settings, name) for name in LEARNED}
            return replace(data, **more)
        names = ("task", "target", "client_column", "image_column", "test_share", "test_seed")
        named = {name: getattr(settings, name) for name in (*names, *LEARNED)}
        return cls(data, **{**named, **more})

    def read(self, *, standardise: bool = True) -> Data:
        """Return the examples as arrays; ConfigError says what does not fit."""
        first, second = self.train, self.test
        if isinstance(first, Mapping):
            first = {split: first[name] for split, name in named_splits(first).items()}
            if "train" not in first:
                raise ConfigError(f"data: expected train among the splits, got {', '.join(first)}")
            if unused := ", ".join(sorted(first.keys() - {"train", "test"})):
                cure = "pass it as test=..., or to tune set validation-examples"
                logger.warning("data: not used: %s; %s", unused, cure)
            first, second = first["train"], first.get("test", second)
        train = self._table(first, "train set")
        is_real = train.y.ndim == 2
        if not is_real and (number := len(np.unique(train.y))) < 2:
            raise ConfigError(f"train set: expected two classes or more, got {number}")
        test = None
        if second is not None:
            task = replace(self, task="regression" if is_real else "classification")
            train, test = self._match(train, task._table(second, "test set"))
        if not is_real:
            _require_classes(train, 0 if test is None else len(test.y))
        split, tested = self._split(train), None
        if test is None:
            tested = self._draw_test(train, split)
            if split is not None:
                numbers = np.cumsum(~tested) - 1
                split = tuple(numbers[indices[~tested[indices]]] for indices in split)
            train, test = train.select(~tested), train.select(tested)
        classes, columns = train.classes, train.columns
        options: Any = {"standardise": standardise, "columns": columns, "split": split}
        pooled = self._pooled(train) if self.moments else None
        if pooled is not None and not standardise:
            raise ConfigError("moments: expected standardise = true, got false")
        if self._schema is not None:
            with naming("train set", ValueError, OverflowError):
                learned = None if pooled is None else pooled.schema
                options["schema"] = schema = learned or self._schema.fit(train.x)
            if schema != self._schema and not standardise:
                raise ConfigError(
                    "schema: gap = mean is learned from the examples, and standardise = false says "
                    "that nothing is; give a number"
                )
            train, test = (part._replace(x=schema.fill(part.x)) for part in (train, test))
        if classes != (*range(len(classes)),):
            options["classes"] = classes
        data = Data.of(train, test, len(classes), **options)
        with naming("train set", ValueError):
            inputs = data.inputs  # refuses values whose differences are lost
        if pooled is None:
            return data
        moments: Any = {name: getattr(pooled, name) for name in ("mean", "std", "kinds", "targets")}
        return replace(data, elsewhere=replace(inputs, **moments))

    def _pooled(self, train: Part) -> InputTransform:
        """Return what is done to a table by moments from elsewhere."""
        with naming(f"moments: {self.moments}", ValueError):
            inputs, pooled = InputTransform.load(self.moments), Path(self.moments) / "details"
            if (pooled / InputTransform.FILE).exists():
                raise ConfigError(f"a run's folder, with the moments before it; name {pooled}")
            if inputs is None:
                raise ConfigError(f"expected a folder with {InputTransform.FILE}, as of glm's run")
            if (train.y.ndim == 2) != (inputs.targets is not None):
                raise ConfigError("expected the targets of that run, real ones or classes")
            if inputs.targets is not None and inputs.classes != train.classes:
                raise ConfigError(f"expected the targets {', '.join(map(str, inputs.classes))}")
            return with_schema(inputs, self._schema, train.columns)

    def _table(self, data: Any, what: str) -> Part:
        """Read one set; its labels become 0 ... C - 1."""
        kind = type(data)
        with naming(what):
            if any(base.__name__ == "IterableDataset" for base in kind.__mro__):
                raise ConfigError(
                    f"expected a dataset of known length, got {kind.__name__}; read its examples "
                    "first: list(dataset), or load it with streaming=False"
                )
            try:
                part = self._read(data)
                targets, owners = self._real_targets(part.y), part.owners
                y = plain_values(part.y, "labels") if targets is None else targets
                if owners is not None:
                    owners = plain_values(owners, "owners")
                    _say_alike(np.unique(owners).tolist(), f"{what}: owners")
            except ConfigError:
                raise
            except (TypeError, ValueError, LookupError) as error:
                raise ConfigError(
                    "expected (x, y), a data frame, a Hugging Face dataset or a torch dataset of "
                    "pairs, with examples of one shape, or dataset='csv:...' instead of data, got "
                    f"{kind.__name__}: {error}"
                ) from error
            x, classes = part.x, part.classes
            if targets is not None and self._class_names:
                raise ConfigError("expected the classes of the schema, got real targets")
            if targets is not None:
                number = targets.shape[1]
                named = (self.target,) if number == 1 else [f"target {i}" for i in range(number)]
                classes = classes if len(classes) == number else tuple(named)
            elif y.dtype.kind not in ("iu" if classes else "iubU"):
                words, cure = ("", "") if classes else (" or words", "; " + FOR_AMOUNTS)
                raise ConfigError(f"expected whole numbers{words} as labels, got {y.dtype}{cure}")
            if targets is None and not classes and (classes := self._class_names):
                y = _positions([plain_text(label) for label in y], classes)
            elif targets is None and not classes:
                names, y = np.unique(y, return_inverse=True)
                classes = tuple(names.tolist() if names.dtype.kind in "iu" else map(str, names))
                _say_alike(classes, f"{what}: classes")
            check_examples(x if self.schema is None else np.nan_to_num(x), y, len(classes))
            if x.ndim == 4 and x.shape[3] in (1, 3, 4) and min(x.shape[1:3]) > 4:
                sizes = " x ".join(map(str, x.shape[1:]))
                message = f"expected pictures as (n, channels, height, width), got {sizes}"
                cure = "give x.transpose(0, 3, 1, 2)"
                if x.dtype == np.uint8:
                    raise ConfigError(f"{message}; {cure}")
                logger.warning("%s: %s; if channels are last, %s", what, message, cure)
        y = y.astype(np.int64) if targets is None else targets
        return part._replace(y=y, classes=classes, owners=owners)

    @property
    def _class_names(self) -> tuple[str, ...]:
        """Names of the classes by the schema, if it has them."""
        target = None if self._schema is None else self._schema.columns.get(self.target)
        return tuple(map(plain_text, target.categories)) if isinstance(target, Target) else ()

    def _real_targets(self, y: Any) -> NDArray[np.float64] | None:
        """Return real targets (n, C); None if the labels are classes, or if that is in doubt."""
        if self.task == "classification":
            return None
        try:
            array = _array(y)
        except (TypeError, ValueError):
            if self.task == "auto":
                return None
            raise
        if array.dtype == object and not any(isinstance(v, str | bytes) for v in array.flat):
            with suppress(TypeError, ValueError):  # numbers, and gaps, of several types
                array = array.astype(np.float64)
        array = array[:, None] if array.ndim == 1 else array
        if array.dtype.kind not in "iuf" or array.ndim != 2 or not array.shape[1]:
            if self.task == "auto":
                return None
            got = f"{array.dtype} of shape {array.shape}"
            raise ConfigError(f"expected numbers as targets, (n,) or (n, C), got {got}")
        targets = array.astype(np.float64)
        finite = targets[np.isfinite(targets).all(1)]
        if self.task == "auto":
            are_shares = array.shape[1] > 1 and np.allclose(finite.sum(1), 1)
            are_many = len(np.unique(finite)) > MANY_CLASSES and (finite % 1).any()
            if are_shares or not are_many:
                return None
        if gaps := len(targets) - len(finite):
            raise ConfigError(
                f"{gaps} of {len(targets)} targets are NaN or infinite; leave these rows out"
            )
        return targets

    def _read(self, data: Any) -> Part:
        """Read one set in any of its forms, with labels as they are."""
        if isinstance(data, Part):
            return data._replace(x=_examples(data.x))
        if hasattr(data, "to_numpy") and hasattr(data, "columns"):
            return self._frame(data)
        if hasattr(data, "column_names"):
            picture = self.image_column or image_column(data)
            data = plain_rows(data, picture)
            self._require_columns(data.features)
            stacked = None
            if picture:
                require_column("image-column", picture, data.features)
                self._require_no_schema("pictures")
                stacked, data = stack_pictures(data[picture]), data.remove_columns(picture)
            names = tuple(getattr(data.features.get(self.target), "names", ()))
            part = self._frame(data.to_pandas(), stacked)
            return part._replace(classes=names) if names else part
        if not (isinstance(data, tuple | list) and len(data) == 2):
            data = _columns([data[i] for i in range(len(data))])
        if hasattr(data[0], "to_numpy") and hasattr(data[0], "columns"):
            y, names = data[1], tuple(map(str, getattr(data[1], "columns", ())))
            if len(names) == 1:
                y = y.iloc[:, 0]
            names = () if self._real_targets(y) is None else names
            return self._frame(data[0].assign(**{self.target: 0}))._replace(y=y, classes=names)
        self._require_no_schema("arrays")
        return Part(_examples(data[0]), data[1])

    def _require_no_schema(self, got: str) -> None:
        if self.schema is not None:
            raise ConfigError(f"schema: expected a table, whose columns have names, got {got}")

    def _require_columns(self, columns: Iterable[Any]) -> list[str]:
        """Return the columns of labels and owners, which must be there."""
        columns = [*columns]
        names = [("target", name) for name in target_columns(self.target, columns)]
        if self.client_column in columns or (self.client_column and self.schema is None):
            names.append(("client-column", self.client_column))
        return [require_column(key, name, columns) for key, name in names]

    def _frame(self, frame: Any, x: NDArray[Any] | None = None) -> Part:
        """Read a data frame; of examples `x`, if given, it has only labels and owners."""
        name_of = str if self.schema is None else plain_text
        frame = frame.rename(columns=name_of).infer_objects()
        if twice := ", ".join(frame.columns[frame.columns.duplicated()]):
            raise ConfigError(f"expected columns of different names, got twice {twice}")
        required = self._require_columns(frame.columns)
        index = ("__index_level_", "Unnamed: 0")  # of pandas, in parquet and csv
        names = [c for c in frame if c not in required and not c.startswith(index)]
        columns: tuple[str, ...] = ()
        if self._schema is not None and x is None:
            columns, x = tuple(self._schema.outputs), _encode(frame, self._schema, names)
        inputs = frame[names if x is None else []]
        others = [c for c, kind in inputs.dtypes.items() if len(frame) and kind.kind not in "biuf"]
        is_text = others == [*inputs.columns] and len(others) == 1 and _holds_texts(inputs)
        others = [] if is_text else others
        if others:
            shown = ", ".join(f"{name} ({_first_other(inputs[name])})" for name in others[:10])
            raise ConfigError(
                f"expected numbers in all columns but the target, got others in {shown}; say in a "
                "schema what words and dates mean (fedntk schema proposes one), or make numbers of "
                "them, such as of lists with numpy.stack, or leave them out; numbers in csv have "
                "the mark that decimal says, and an empty cell stands for a missing one; "
                "for model = text-e5 give one column of texts, and no other"
            )
        gaps = frame[[*dict.fromkeys(required), *inputs.columns]].isna().sum()
        if lacking := ", ".join(f"{name} ({n})" for name, n in gaps[gaps > 0][:10].items()):
            raise ConfigError(
                f"expected a value in each row, got columns with gaps (rows): {lacking}; say in a "
                "schema what a gap becomes (fedntk schema), or leave these rows out, as "
                "frame.dropna() does"
            )
        for name in inputs.columns[[kind.kind in "iu" for kind in inputs.dtypes]]:
            low, high = int(inputs[name].min()), int(inputs[name].max())
            if low < high < low + max(-low, high) / 2**43:  # float64 would hardly tell them apart
                raise ConfigError(
                    f"expected numbers that float64 tells apart, got {low} ... {high} in {name}; "
                    "subtract an offset, or leave the column out"
                )
        if is_text:
            inputs, x = inputs[[]], encode_texts(inputs)
        owners = frame[self.client_column].to_numpy() if self.client_column in frame else None
        targets = target_columns(self.target, frame.columns)
        columns = columns or tuple(inputs.columns)
        y = frame[targets if targets[1:] else targets[0]].to_numpy()
        x = inputs.to_numpy(dtype=np.float64) if x is None else x
        return Part(x, y, owners, columns, tuple(targets) if targets[1:] else ())

    def _match(self, train: Part, test: Part) -> tuple[Part, Part]:
        """Return both with the columns, and the numbers of the classes, of the training set."""
        if differing := ", ".join(sorted(set(train.columns) ^ set(test.columns))[:10]):
            raise ConfigError(f"test set: other columns than the train set: {differing}")
        order = [test.columns.index(name) for name in train.columns]
        x = test.x[:, order] if order else test.x
        if train.y.ndim == 2:
            if train.y.shape[1:] != test.y.shape[1:]:
                raise ConfigError(
                    f"test set: expected {train.y.shape[1]} targets, got {test.y.shape[1]}"
                )
            if set(train.classes) != set(test.classes):
                expected, got = (", ".join(map(str, p.classes)) for p in (train, test))
                raise ConfigError(f"test set: expected the targets {expected}, got {got}")
            y = test.y[:, [test.classes.index(name) for name in train.classes]]
            classes, columns = train.classes, train.columns
            return train, test._replace(x=x, y=y, classes=classes, columns=columns)
        if isinstance(train.classes[0], str) != isinstance((*test.classes, "")[0], str):
            train, test = (p._replace(classes=(*map(str, p.classes),)) for p in (train, test))
        kinds = {part.owners.dtype.kind == "U" for part in (train, test) if part.owners is not None}
        if len(kinds) > 1:
            train, test = (p._replace(owners=np.array(p.owners, str)) for p in (train, test))
        names = [
            {part.classes[i] for i in np.unique(part.y)} if self._class_names else {*part.classes}
            for part in (test, train)
        ]
        if differing := ", ".join(sorted(map(str, names[0] - names[1]))[:10]):
            raise ConfigError(f"test set: no training example has the labels {differing}")
        numbers = np.array([train.classes.index(name) for name in test.classes])
        return train, test._replace(x=x, y=numbers[test.y], columns=train.columns)

    def _draw_test(self, train: Part, split: tuple[Indices, ...] | None) -> NDArray[np.bool_]:
        """Draw the test set: what no client has, or a share of each class, and not all of it."""
        share, tested = self.test_share, np.zeros(len(train.y), bool)
        if not share:
            raise ConfigError("test-share: the data have no test set; give one, or a share above 0")
        generator = np.random.default_rng([self.test_seed, *b"test set"])
        for label in np.unique(train.strata):
            members = generator.permutation(np.flatnonzero(train.strata == label))
            tested[members[: min(max(1, round(share * len(members))), len(members) - 1)]] = True
        if split is not None:
            free = ~np.isin(np.arange(len(tested)), np.concatenate(split))
            tested = free if free.mean() >= share else tested
            firsts = [indices[0] for indices in split if tested[indices].all()]
        elif train.owners is not None:
            _, first_of, number = np.unique(train.owners, return_index=True, return_inverse=True)
            firsts = first_of[np.bincount(number, ~tested) == 0]
        else:
            firsts = []
        tested[firsts] = False  # each client keeps an example
        if not tested.any():
            cure = "as each client keeps one; give a test set"
            raise ConfigError(f"test-share: no example is left for a test set, {cure}")
        return tested

    def _split(self, train: Part) -> tuple[Indices, ...] | None:
        """Return each client's indices by the user's own split, if there is one."""
        if self.split is None:
            return None
        split, most = self.split, len(train.y)
        if hasattr(split, "load_partition"):
            from datasets import Dataset

            columns: dict[str, Any] = {"index": np.arange(most), "label": train.strata}
            if train.owners is not None:
                columns[self.client_column] = train.owners
            split.dataset = Dataset.from_dict(columns)
            split = [split.load_partition(i)["index"] for i in range(split.num_partitions)]
        split = split.values() if isinstance(split, Mapping) else split
        clients = tuple(np.asarray(list(indices)) for indices in split)
        for i, ids in enumerate(clients):
            repeated = len(ids) - len(np.unique(ids))
            wrong = ids[(ids < 0) | (ids >= most)] if ids.dtype.kind in "iu" else ids
            if not len(ids) or repeated or len(wrong):
                raise ConfigError(
                    f"split: expected indices 0 ... {most - 1} for client {i}, each once, got "
                    f"{len(ids)} of {ids.dtype}, {repeated} repeated, {len(wrong)} no such index: "
                    f"{', '.join(map(str, wrong[:5]))}"
                )
        return clients


def _columns(pairs: Sequence[Any]) -> list[list[Any]]:
    """Return the examples and the labels of pairs."""
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            size = f" of {len(pair)}" if isinstance(pair, Sized) else ""
            raise TypeError(f"example {i} is a {type(pair).__name__}{size}, not a pair (x, y)")
    return [list(column) for column in zip(*pairs, strict=True)]


def _encode(frame: Any, schema: Schema, names: Sequence[str]) -> NDArray[Any]:
    """Return the numbers of a data frame whose columns `names` the schema knows."""
    if unknown := [name for name in names if name not in schema.columns]:
        raise ConfigError(
            f"expected the columns of the schema, got also {', '.join(unknown[:10])}; leave "
            "them out, or have the schema give them the kind ignored"
        )
    with naming("schema", ValueError):
        return schema.encode(frame, lambda doubt: logger.warning("data: %s", doubt))


def _positions(labels: Sequence[str], classes: tuple[str, ...]) -> NDArray[np.int64]:
    if unknown := sorted({*labels} - {*classes}):
        raise ConfigError(
            f"expected the classes of the schema, {', '.join(classes)}, got "
            f"{', '.join(map(repr, unknown[:5]))}; correct them, or the schema"
        )
    return np.array([classes.index(label) for label in labels], np.int64)


def _holds_texts(column: Any) -> bool:
    """Whether a frame of one column has words that are no dates, and perhaps gaps."""
    values = column.iloc[:, 0].dropna()
    is_text = all(isinstance(value, str) for value in values)
    return is_text and not values.astype(str).str.fullmatch(DATE).all()


def _examples(data: Any) -> NDArray[Any]:
    """Return examples as one array, texts as UTF-8."""
    return encode_texts(data) if are_texts(data) else _array(data)


def _array(data: Any) -> NDArray[Any]:
    """Return examples as one array; pictures of PIL have their channels first."""
    if hasattr(data, "toarray"):
        raise TypeError("a sparse matrix; give data.toarray()")
    require_unmasked(data)
    if isinstance(data, list | tuple) and data:
        if any(hasattr(example, "getbands") for example in data):
            return stack_pictures(data)
        if hasattr(data[0], "__array__"):
            return np.stack([_array(example) for example in data])
    return np.asarray(data.detach().cpu() if hasattr(data, "detach") else data)


def plain_values(values: Any, name: str) -> NDArray[Any]:
    """Return labels or owners (n,) or (n, 1) of a set as whole numbers or words; refuse gaps.

    Words and numbers are never mixed, and whole numbers of floating point are integers.
    """
    import pandas as pd

    if isinstance(values, list | tuple):
        array: NDArray[Any] = np.empty(len(values), object)
        array[:] = [_array(v).item() if getattr(v, "ndim", 1) == 0 else v for v in values]
    else:
        array = _array(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    words = [isinstance(v, str | bytes) for v in array] if array.dtype == object else []
    several = any(isinstance(v, Sized) and not word for v, word in zip(array, words, strict=False))
    if array.ndim != 1 or several:
        cure = "of one-hot rows, give y.argmax(1)"
        raise ConfigError(f"expected one of the {name} for each example, got several; {cure}")
    if gaps := np.count_nonzero(pd.isna(array)):
        raise ConfigError(f"{gaps} of {len(array)} {name} are NaN; leave these rows out")
    if len(set(words)) > 1:
        raise ConfigError(f"expected {name} of one kind, all words or all numbers, got both")
    if array.dtype == object:
        array = np.array(array.tolist())
        array = array.astype(str) if array.dtype == object else array  # dates, say
    elif array.dtype.kind in "ST":
        texts = np.strings.decode(array, "utf-8") if array.dtype.kind == "S" else array
        array = np.array(texts.tolist())
    if array.dtype.kind == "f" and (np.abs(array) < 2**53).all() and not (array % 1).any():
        return array.astype(np.int64)
    return array


def _say_alike(names: Sequence[Any], what: str) -> None:
    """Say which names differ only in case, blanks or the form of a number: likely mistakes."""
    seen: dict[str, Any] = {}
    for name in names:
        key = " ".join(normalize("NFKC", str(name)).split()).casefold()
        with suppress(ArithmeticError):  # 1, 1.0 and 01
            key = str(Decimal(key).normalize(Context(prec=100)))
        if seen.setdefault(key, name) != name:
            logger.warning("data: %s %r and %r are taken for two", what, seen[key], name)


def _require_classes(train: Part, num_test: int) -> None:
    """Refuse labels of which nearly each example has its own."""
    number, total = len(np.unique(train.y)), len(train.y) + num_test
    kind, most, cure = "words", MOST_WORDS, "name the column of classes as target"
    if not isinstance(train.classes[0], str):
        kind, most = "numbers", MOST_NUMBERS
        cure = f"if these are classes, give them as words, such as 'c7' for 7; {FOR_AMOUNTS}"
    if number > max(MANY_CLASSES, total * most):
        raise ConfigError(
            f"train set: expected classes as labels, got {number} different {kind} in {total} "
            f"examples; {cure}"
        )


def _first_other(column: Any) -> str:
    """Return the first value of a column that is no number, to be shown."""
    import pandas as pd

    if column.dtype.kind in "mM":
        return str(column.dtype)
    others = column[[not isinstance(v, int | float) for v in column]]
    words = others[pd.to_numeric(others.astype(str), errors="coerce").isna()]
    return " ".join(repr([*words, *others, *column][0]).split())[:30]


def read_own(settings: DatasetSettings) -> Data | None:
    """Read the examples that the setting names; None if it is not of a kind of one's own."""
    kind, _, rest = settings.dataset.partition(":")
    place = Path(rest).expanduser()
    data: Any
    if kind.endswith(".py"):
        made = import_named("dataset", settings.dataset)
        data = made() if callable(made) else made
    elif kind == "hf":
        data = load_splits(rest)
    elif kind not in ("csv", "parquet", "folder", "npz"):
        if settings.schema:
            raise ConfigError(f"schema: expected a table of your own, got {settings.dataset}")
        return None
    elif not place.exists():
        raise ConfigError(f"dataset: no file or folder at {place.absolute()}")
    elif kind == "npz":
        data = _read_npz(place, settings)
    else:
        table = OwnData.of(None, settings)
        named = replace(settings, target=table.target, client_column=table.client_column)
        data = read_files(kind, place, named, table._schema)
    return OwnData.of(data, settings).read(standardise=settings.standardise)


def read_parts(
    kind: str,
    place: Path,
    settings: DatasetSettings,
    task: Task = "auto",
    schema: Schema | None = None,
) -> dict[str, Part]:
    """Read a client's table, or a folder's train and test, as a run's own tables are read.

    A column of owners is left out: all rows are the client's.
    """
    own = OwnData(None, target=settings.target, task=task, schema=schema)
    settings = replace(settings, target=own.target)
    frames = read_files(kind, place, settings, schema)
    if hasattr(frames, "columns"):
        frames = {"train": frames}
    drop = {settings.client_column, own.client_column} - {own.target}
    return {
        split: own._table(frame.drop(columns=[*drop], errors="ignore"), f"{split} set")
        for split, frame in frames.items()
        if frame is not None
    }


def _read_npz(path: Path, settings: DatasetSettings) -> OwnData:
    arrays: dict[str, Any] = read_arrays("dataset", path, "x_train", "y_train")
    if unread := ", ".join(sorted(arrays.keys() - set(NPZ))):
        raise ConfigError(f"dataset: {path} has {unread}; expected some of {', '.join(NPZ)}")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise ConfigError(f"dataset: {path} must hold both x_test and y_test, or neither")
    names = [tuple(arrays.get(key, np.zeros(0)).tolist()) for key in ("columns", "classes")]
    tables = str(arrays.get("schema", ""))
    parts = {
        part: Part(arrays[f"x_{part}"], arrays[f"y_{part}"], arrays.get(f"clients_{part}"), *names)
        for part in ("train", "test")
        if f"x_{part}" in arrays
    }
    split = None
    if "split" in arrays:
        split = np.split(arrays["split"], np.cumsum(arrays["split_sizes"])[:-1])
    if settings.schema and not tables:
        raise ConfigError(f"schema: expected a table, whose cells are as written, got {path}")
    schema = Schema.parse(json.loads(tables)) if tables else None
    return OwnData.of(parts, settings, split=split, schema=schema)


def read_arrays(key: str, path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read the arrays of an npz file, which has at least those that are named."""
    if path.is_file() and not zipfile.is_zipfile(path):
        wanted = f"an npz file of {' and '.join(names)}, as numpy.savez writes it"
        raise ConfigError(f"{key}: expected {wanted}, got {path}")
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, OSError) as error:
        reason = first_line(error)
        if "allow_pickle" in reason:
            reason = "expected arrays of numbers or texts, got Python objects, as of dtype object"
        raise ConfigError(f"{key}: {path} cannot be read: {reason}") from None
    if missing := [name for name in names if name not in arrays]:
        raise ConfigError(
            f"{key}: {path} must hold {' and '.join(names)}; it lacks {', '.join(missing)} and "
            f"has {', '.join(arrays) or 'nothing'}"
        )
    return arrays
