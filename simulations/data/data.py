"""Examples as a run takes them; nothing here depends on how they are split."""

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk.features.frozen import FrozenPart
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.ntk.predictors.schema import Schema
from fedntk.ntk.predictors.targets import TargetTransform
from fedntk.ntk.predictors.texts import are_texts, encode_texts
from fedntk.ntk.support.files import whole
from fedntk.strategies.core.array_archive import checksum

from ..config.settings import ConfigError
from .features import StoredFeatures

Indices = NDArray[np.int64]
# arrays of an npz file: clients_... say whose an example is; split has the indices of each client's
# training examples, one client after the other, of split_sizes
NPZ = (
    *("x_train", "y_train", "clients_train", "x_test", "y_test", "clients_test"),
    *("columns", "classes", "schema", "split", "split_sizes"),
)
PASSED = "passed"  # begins the name of examples that were passed as an object
MOST_KEPT = 4
MOST_BYTES = 2**28
_passed: "OrderedDict[str, Data]" = OrderedDict()


class Part(NamedTuple):
    """Examples x (n, ...), labels y (n,) and, if the set has owners, the owner of each (n,).

    A table has names of its columns; `classes` are names of the labels 0 ... C - 1, or of C real
    targets y (n, C), float64.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    owners: NDArray[Any] | None = None
    columns: tuple[str, ...] = ()
    classes: tuple[str | int, ...] = ()

    @property
    def strata(self) -> NDArray[Any]:
        """Class of each example (n,), 0 for real targets: splits keep the classes' shares."""
        return strata_of(self.y)

    def select(self, chosen: NDArray[Any] | slice) -> "Part":
        """Return some of the examples, by a mask or by indices."""
        owners = None if self.owners is None else self.owners[chosen]
        return self._replace(x=self.x[chosen], y=self.y[chosen], owners=owners)


@dataclass(frozen=True, eq=False)
class Data:
    """A labelled data set with its test set.

    Examples (n, channels, height, width) or (n, ...) are raw values, as stored, or texts (n,) in
    UTF-8, dtype S. They have labels (n,), 0 ... num_classes - 1, or real targets (n, num_classes),
    float64, and the owner of each (n,), if the set names owners. A network gets them as `inputs`
    makes them: standardised, unless their values have a meaning as they are, such as positions in
    an alphabet; then as `frozen` makes them, if part of the network is. `split` has the indices of
    each client's training examples, if it came with the data, and `schema` says what a table's
    numbers were made of. `elsewhere` is what is done to them if that is not learned from these
    rows. A node without a copy of them has no rows, only their number `num_elsewhere`.
    """

    x_train: NDArray[Any]
    y_train: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    num_classes: int
    natural_ids: NDArray[Any] | None = None
    natural_ids_test: NDArray[Any] | None = None
    standardise: bool = True
    columns: tuple[str, ...] = ()
    classes: tuple[str | int, ...] = ()  # numbers if the data had these as labels
    alphabet: str = ""
    schema: Schema | None = None
    split: tuple[Indices, ...] | None = None
    frozen: FrozenPart | None = None
    elsewhere: InputTransform | None = None
    num_elsewhere: int = 0

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            x, y = (getattr(self, f"{axis}_{part}") for axis in "xy")
            if not len(x) and self.elsewhere is None:
                raise ConfigError(f"{part} set: expected examples, got none")
            self._require_kind(x, y, f"{part} set: ")

    @classmethod
    def of(cls, train: Part, test: Part, num_classes: int, **more: Any) -> Self:
        """Make it from its parts."""
        owners = train.owners, test.owners
        return cls(train.x, train.y, test.x, test.y, num_classes, *owners, **more)

    @classmethod
    def of_inputs(cls, inputs: InputTransform, num_train: int) -> Self:
        """Make it for a node that has no copy of the N training examples."""
        x: NDArray[Any] = np.zeros((0, *inputs.shape), np.float64 if inputs.shape else "S1")
        y: NDArray[Any] = np.zeros(0, np.int64)
        if inputs.targets is not None:
            y = np.zeros((0, len(inputs.classes)))
        facts: Any = {"columns": inputs.columns, "classes": inputs.classes}
        facts |= {"alphabet": inputs.alphabet, "elsewhere": inputs, "num_elsewhere": num_train}
        return cls(x, y, x, y, len(inputs.classes), **facts)

    @property
    def num_train(self) -> int:
        """Number of training examples, here or elsewhere."""
        return self.num_elsewhere or len(self.y_train)

    def _require_kind(self, x: NDArray[Any], y: NDArray[Any], what: str = "") -> None:
        check_examples(x, y, self.num_classes, what)
        if x.shape[1:] != self.input_shape:
            sizes = ", ".join(map(str, self.input_shape))
            raise ConfigError(f"{what}expected examples of shape (n, {sizes}), got {x.shape}")

    @property
    def has_real_targets(self) -> bool:
        """Whether there are real targets, no labels."""
        return self.y_train.ndim == 2

    @cached_property
    def inputs(self) -> InputTransform:
        """What is done to raw examples before a network, or its frozen part, sees them."""
        if self.elsewhere is not None:
            return self.elsewhere
        classes = self.classes or tuple(self.alphabet) or tuple(range(self.num_classes))
        targets = None
        if self.has_real_targets:
            targets = TargetTransform.fit(self.y_train, standardise=self.standardise)
        if self.frozen is not None and self.frozen.moments is not None:
            white = largest_value(self.x_train)
            mean, std = (
                (white * np.reshape(m, (-1, 1, 1))).astype(np.float32) for m in self.frozen.moments
            )
            return InputTransform(self.input_shape, mean, std, classes=classes, targets=targets)
        return InputTransform.fit(
            self.x_train,
            standardise=self.standardise and not self.alphabet,
            columns=self.columns,
            classes=classes,
            alphabet=self.alphabet,
            targets=targets,
            schema=self.schema,
        )

    @cached_property
    def digest(self) -> str:
        """What server and clients must agree on of the examples, as a digest."""
        return self.inputs.digest + ("" if self.frozen is None else self.frozen.digest[:16])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.x_train.shape[1:])

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of all examples and labels, and of the names of columns and classes."""
        arrays = [self.x_train, self.y_train, self.x_test, self.y_test]
        arrays += self._moments
        names = [*self.columns, *map(repr, self.classes), self.alphabet, *self._tables]
        if any(names):
            arrays.append(np.array(names))
        return checksum(*arrays)

    def train(self, indices: Indices, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return training examples as a network takes them, with labels or targets."""
        x = self._network_inputs("x_train", indices, dtype)
        return x, self._labels(self.y_train[indices], dtype)

    def test(
        self, indices: Indices | slice = slice(None), dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return test examples, by default all, as :meth:`train` does."""
        x = self._network_inputs("x_test", indices, dtype)
        return x, self._labels(self.y_test[indices], dtype)

    def _labels(self, y: NDArray[Any], dtype: torch.dtype) -> Tensor:
        targets = self.inputs.targets
        return torch.from_numpy(y.copy()) if targets is None else targets(y, dtype)

    def _network_inputs(self, name: str, indices: Indices | slice, dtype: torch.dtype) -> Tensor:
        if self._is_divided:
            return self._features(name).rows(indices).to(dtype)
        return self.inputs(getattr(self, name)[indices], check_ranges=False, dtype=dtype)

    def compute_features(self, indices: Indices) -> None:
        """Compute the frozen network's features of training examples, with all threads."""
        if self._is_divided:
            self._features("x_train").compute(indices)

    @property
    def _is_divided(self) -> bool:
        return self.frozen is not None and self.frozen.network is not None

    def _features(self, name: str) -> StoredFeatures:
        if name not in self._stored:
            self._stored[name] = self._features_of(getattr(self, name))
        return self._stored[name]

    @cached_property
    def _stored(self) -> dict[str, StoredFeatures]:
        return {}

    def _features_of(self, x: NDArray[Any]) -> StoredFeatures:
        assert self.frozen is not None  # noqa: S101
        prepare = partial(self.inputs, check_ranges=False)
        moments = self.inputs.mean.tobytes() + self.inputs.std.tobytes()
        return StoredFeatures(x, prepare, self.frozen, moments)

    def convert_examples(
        self,
        x: NDArray[Any],
        y: NDArray[Any],
        *,
        columns: Sequence[str] = (),
        classes: Sequence[str | int] = (),
        check_ranges: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Return raw examples from elsewhere as :meth:`train` does; ValueError if they differ.

        Labels are names of classes, or positions in `classes`. Real targets are in their units, and
        `classes` are their names.
        """
        if self.has_real_targets and tuple(classes) not in ((), self.inputs.classes):
            expected = ", ".join(map(str, self.inputs.classes))
            raise ConfigError(
                f"expected the targets {expected}, got {', '.join(map(str, classes))}"
            )
        if len(classes) and not self.has_real_targets:
            check_examples(x, y, len(classes))
            y = np.asarray(classes)[y]
        if bool(self.input_shape) == are_texts(x):
            expected, got = ("numbers", "texts") if self.input_shape else ("texts", "numbers")
            raise ConfigError(f"expected {expected} as examples, as in training, got {got}")
        x = x if self.input_shape else encode_texts(x)
        x, targets = self.inputs.arrange_columns(x, columns), self.inputs.targets
        labels = self.inputs.labels(y) if targets is None else targets(y, dtype)
        self._require_kind(x, labels.numpy())
        if check_ranges:
            self.inputs.require_alike(x, self.num_train)
            if targets is not None and len(y):
                targets.require_alike(y)
        if self._is_divided:
            return self._features_of(x).rows().to(dtype), labels
        return self.inputs(x, check_ranges=False, dtype=dtype), labels

    def describe(self) -> str:
        """Say in a line what was read, with each class's share of the training examples."""
        owners, classes = self.natural_ids, self.inputs.classes
        return describe_rows(self.x_train, self.y_train, len(self.y_test), classes, owners)

    def keep(self, name_of: Callable[[str], str] = str) -> dict[str, Any]:
        """Keep a copy in memory, named by its checksum; return the settings that follow."""
        settings: dict[str, Any] = {}
        if self.split is not None:
            settings = {"partition": "given", "num_clients": len(self.split)}
        elif self.natural_ids is not None:
            settings = {"partition": "natural", "num_clients": len(np.unique(self.natural_ids))}
        arrays = self._arrays()
        content = name_of(checksum(np.array(list(arrays)), *arrays.values(), *self._moments))
        if self.has_real_targets:
            settings["task"] = "regression"
        name = f"{PASSED}:{content[:16]}"
        _passed.pop(name, None)
        _passed[name] = copy.deepcopy(self)
        while len(_passed) > MOST_KEPT:
            _passed.popitem(last=False)
        return {"dataset": name, **settings}

    def write(self, path: Path) -> None:
        """Write them into a file that only its owner can read: see `NPZ`."""
        with whole(path) as file:
            Path(file.name).chmod(0o600)
            np.savez(file, allow_pickle=False, **self._arrays())

    @property
    def _tables(self) -> list[str]:
        return [] if self.schema is None else [json.dumps(self.schema.tables)]

    @property
    def _moments(self) -> list[NDArray[Any]]:
        """Those that are not learned from these examples."""
        parts = [] if self.elsewhere is None else [self.elsewhere, self.elsewhere.targets]
        return [a for part in parts if part is not None for a in (part.mean, part.std)]

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays = [self.x_train, self.y_train, self.natural_ids]
        arrays += [self.x_test, self.y_test, self.natural_ids_test]
        arrays += [np.array(self.columns, str), np.array(self.classes or np.array((), str))]
        arrays += [np.array(self._tables[0]) if self._tables else None]
        if self.split is not None:
            arrays += [np.concatenate(self.split), np.array([len(part) for part in self.split])]
        named = zip(NPZ, arrays, strict=False)
        return {name: array for name, array in named if array is not None}


def passed_data(name: str) -> Data | None:
    """Return examples that were passed in this process, by the name that :meth:`Data.keep` gave."""
    return _passed.get(name)


def strata_of(y: NDArray[Any]) -> NDArray[Any]:
    """Return labels (n,) as they are; of real targets (n, C) zeros."""
    return y if y.ndim == 1 else np.zeros(len(y), np.int64)


def largest_value(pictures: NDArray[Any]) -> float:
    """Return what stands for white, 255 or 1; ConfigError if it is neither."""
    low, high = float(pictures.min()), float(pictures.max())
    if low >= 0 and 32 <= high <= 255:
        return 255.0
    if low >= 0 and 0 < high <= 1 and pictures.dtype != np.uint8:
        return 1.0
    raise ConfigError(
        "a pre-trained network takes pictures with values 0 ... 255 or 0 ... 1, as they are "
        f"stored; got {low:g} ... {high:g} ({pictures.dtype}); scale them to one of these"
    )


def check_examples(x: NDArray[Any], y: NDArray[Any], num_classes: int, what: str = "") -> None:
    """Refuse examples that are not finite numbers (n, ...), or lack one label each of C classes.

    Real targets are finite numbers (n, C).
    """
    is_text = x.dtype.kind == "S" and x.ndim == 1
    if not is_text and (x.dtype.kind not in "iuf" or x.ndim < 2 or 0 in x.shape[1:]):
        raise ConfigError(f"{what}expected numbers of shape (n, ...), got {x.dtype} of {x.shape}")
    if not is_text and not np.isfinite(x).all():
        raise ConfigError(f"{what}expected finite numbers, got NaN or infinity")
    if y.dtype.kind == "f" and y.shape == (len(x), num_classes):
        if not np.isfinite(y).all():
            raise ConfigError(f"{what}expected finite targets, got NaN or infinity")
        return
    if y.shape != (len(x),):
        shapes = f"got shapes {x.shape} and {y.shape}"
        raise ConfigError(f"{what}expected examples and one label each, {shapes}")
    if len(y) and (y.min() < 0 or y.max() >= num_classes):
        labels = f"got {y.min()} ... {y.max()}"
        raise ConfigError(f"{what}expected labels 0 ... {num_classes - 1}, {labels}")


def describe_rows(
    x: Any, y: Any, num_test: int, classes: Sequence[str | int], owners: Any = None, shown: int = 10
) -> str:
    """Say how many rows, columns and owners there are, and the shares of the first classes.

    Of real targets there are the first names.
    """
    rows = f"rows {len(y)}" + f" and {num_test} to test" * bool(num_test)
    of = "" if owners is None else f", owners {len(np.unique(owners))}"
    kind, named = "targets", ", ".join(map(str, classes[:shown]))
    if y.ndim == 1:
        shares = (np.bincount(y, minlength=len(classes)) / len(y)).tolist()
        pairs = zip(classes[:shown], shares, strict=False)
        kind, named = "classes", ", ".join(f"{name} {share:.1%}" for name, share in pairs)
    more = f" and {len(classes) - shown} more" * (len(classes) > shown)
    form = f"columns {' x '.join(map(str, x.shape[1:]))}" if x.shape[1:] else "texts"
    return f"{rows}, {form}{of}, {kind} {named}{more}"


class LocalData(NamedTuple):
    """A client's examples (n, ...) and labels (n,), for training and for its own evaluations.

    A file's are `raw` as they stand there; `owner` has arguments of clients that mask, and `rows`
    names the folder of which rows count.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    raw: NDArray[Any] | None = None
    owner: Mapping[str, Any] = MappingProxyType({})
    rows: str = ""

    def describe(self, classes: Sequence[str | int]) -> str:
        """Say in a line what was read, with each class's share."""
        (x, y), (_, y_test) = self.train, self.test
        return describe_rows(x, y.numpy(), len(y_test), classes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for pair in self[:2] for part in pair)

    @property
    def versions(self) -> list[int]:
        """Numbers of changes in place to each tensor."""
        return [part._version for pair in self[:2] for part in pair]


class KeptExamples:
    """Examples of the partitions that were used last, up to `most_bytes`; for one thread.

    Examples that a network changed in place are made anew.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._examples: OrderedDict[int, tuple[LocalData, list[int]]] = OrderedDict()

    def of(self, partition: int, make: Callable[[], LocalData]) -> LocalData:
        """Return a partition's kept examples, or make them."""
        examples, versions = self._examples.pop(partition, (None, []))
        if examples is not None:
            self.nbytes -= examples.nbytes
        if examples is None or examples.versions != versions:
            examples = make()
        self._examples[partition] = examples, examples.versions
        self.nbytes += examples.nbytes
        while self.nbytes > self.most_bytes:
            _, (oldest, _) = self._examples.popitem(last=False)
            self.nbytes -= oldest.nbytes
        return examples
