"""Labelled examples in the forms in which people have them: see ``ModelClient``.

The result is the same for all: every example once, in the order of the dataset, as two tensors.
"""

import copy
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import DataLoader

from fedntk.ntk.support.arrays import require_unmasked

from .model_probe import dtype_name, one_line
from .randomness import seeded_generators

Data = Any  # Tensor, ndarray, Dataset or DataLoader: all that torch's DataLoader takes has no type
Columns = tuple[str, str] | tuple[int, int]

BATCH_SIZE = 256  # examples put together at a time, if no loader says how many
IMAGE_NAMES = (
    "img", "image", "images", "x", "input", "inputs", "features", "data", "pixel_values",
    "input_values", "input_ids",
)  # fmt: skip
LABEL_NAMES = ("label", "labels", "target", "targets", "y")
CURE = "give the dataset a transform to tensors of floating point, all of one shape"
ONCE = (
    "every example must come out of the dataset and of collate_fn once; leave out others before, "
    "with torch.utils.data.Subset"
)


class LabelledExamples:
    """Examples with their labels, in memory; in a subclass, made by a dataset when read."""

    name: str  # of the argument that held the labels, for errors
    may_change = False  # whether another seed may give other examples, such as augmented ones

    def __init__(self, names: tuple[str, str], x: Tensor, y: Tensor) -> None:
        name, self.name = names
        if len(x) == 0 or len(x) != len(y):
            counts = f"{len(x)} and {len(y)}"
            raise ValueError(
                f"{name}: expected one example or more and as many labels, got {counts}"
            )
        self.x, self.y = _finite(name, x), y

    def __len__(self) -> int:
        return len(self.x)

    def read(self, seed: Sequence[int], chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the `chosen` examples (m, ...), by default all, and their labels."""
        del seed
        return (self.x, self.y) if chosen is None else (self.x[chosen], self.y[chosen])


class _FromDataset(LabelledExamples):
    may_change = True

    def __init__(
        self,
        name: str,
        dataset: Any,
        positions: Sequence[int],
        collate: Callable[[list[Any]], Any],
        batch_size: int,
        columns: Columns | None,
    ) -> None:
        if len(positions) == 0:
            raise ValueError(f"{name}: expected at least one example, got an empty dataset")
        self.name, self.dataset, self.positions = name, dataset, positions
        self.collate, self.batch_size, self.columns = collate, batch_size, columns
        self._first: list[tuple[Any, Any]] | None = None  # arrays of an item, and copies

    def __len__(self) -> int:
        return len(self.positions)

    def read(self, seed: Sequence[int], chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        wanted = range(len(self)) if chosen is None else chosen.tolist()
        positions = [int(self.positions[i]) for i in wanted]
        starts = range(0, len(positions), self.batch_size)
        with seeded_generators(seed):
            batches = [self._batch(positions[start : start + self.batch_size]) for start in starts]
        x, y = zip(*batches, strict=True)
        return _finite(self.name, _join(self.name, x)), _join(f"{self.name}'s labels", y)

    def _batch(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        if callable(getattr(self.dataset, "__getitems__", None)):  # as torch's DataLoader does
            items = self.dataset.__getitems__(positions)
        else:
            items = [self.dataset[position] for position in positions]
        self._require_unchanged(items[0] if items else None)
        own_collate = self.collate is not torch_data.default_collate
        cure = ONCE if own_collate or any(item is None for item in items) else CURE
        try:
            # of a copy, since a user's function may write over what it is given
            batch = self.collate(copy.deepcopy(items) if own_collate else items)
        except Exception as error:  # whatever a user's function raises
            raise ValueError(
                f"{self.name}: its examples cannot be put into a batch, from {positions[0]} on "
                f"({type(error).__name__}: {one_line(error)}); {cure}"
            ) from error
        if batch is None or (isinstance(batch, Sized) and len(batch) == 0):
            raise ValueError(f"{self.name}: expected a batch, got {batch!r} of collate_fn; {cure}")
        parts = _columns(self.name, batch, self.columns)
        cures = {"examples": CURE, "labels": "number the classes from 0"}
        for part, (what, cure) in zip(parts, cures.items(), strict=True):
            if not isinstance(part, Tensor | np.ndarray):
                got = _a(part)
                raise ValueError(f"{self.name}: expected {what} as one tensor, got {got}; {cure}")
        x, y = (_tensor(self.name, part) for part in parts)
        if not len(x) == len(y) == len(positions):
            raise ValueError(
                f"{self.name}: expected {len(positions)} examples and labels in a batch, got "
                f"{len(x)} and {len(y)}; {ONCE}"
            )
        return x, y

    def _require_unchanged(self, item: Any) -> None:
        """Refuse a dataset that changes what it returned: each reading would change it again."""
        if self._first is None:
            parts = item.values() if isinstance(item, Mapping) else item
            parts = parts if isinstance(item, Mapping | tuple | list) else [item]
            arrays = [part for part in parts if isinstance(part, Tensor | np.ndarray)]
            self._first = [(array, copy.deepcopy(array)) for array in arrays]
        for array, before in self._first:
            equal = torch.equal if isinstance(array, Tensor) else np.array_equal
            if not equal(array, before):
                raise ValueError(
                    f"{self.name}: expected a dataset that returns the same example each time, got "
                    "one that changes in place what it returned; have it return a new tensor"
                )


def labelled_examples(
    x: Data, y: Any = None, *, columns: Columns | None = None, name: str = "x"
) -> LabelledExamples:
    """Take examples in any of the forms that clients take; `name` names them in errors."""
    labels = name.replace("x", "y")
    if isinstance(x, tuple) and len(x) == 2 and y is None and all(map(_is_array, x)):
        raise TypeError(
            f"{name}: expected a Tensor, array, Dataset or DataLoader, got a tuple of two arrays; "
            f"give them as two arguments, {name} and {labels}"
        )
    if columns is not None and len(columns) != 2:
        raise ValueError(
            f"columns: expected two names or positions, such as ('img', 'label'), got {columns!r}"
        )
    if not _is_array(x):
        if y is not None:
            raise ValueError(
                f"{labels}: expected none, as {name} is {_a(x)} and holds the labels, got {_a(y)}; "
                f"leave {labels} out, or give {name} as a Tensor or array"
            )
        if isinstance(x, DataLoader):
            return _from_loader(name, x, columns)
        _require_map_style(name, x)
        return _FromDataset(name, x, range(len(x)), torch_data.default_collate, BATCH_SIZE, columns)
    if columns is not None:
        raise ValueError(f"columns: expected none, as {name} is {_a(x)}, got {columns!r}")
    if y is None:
        raise ValueError(
            f"{labels}: expected a label for each of the {len(x)} examples in {name}, got none; "
            f"give {labels}, or a Dataset or DataLoader of pairs as {name}"
        )
    if not hasattr(y, "__array__") and not isinstance(y, list | tuple):
        raise TypeError(
            f"{labels}: expected a Tensor or array of labels, got {_a(y)}; a Dataset or DataLoader "
            f"that holds examples and labels goes into {name}"
        )
    return LabelledExamples((name, labels), _tensor(name, x), _tensor(labels, y))


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and getattr(value, "ndim", 1) > 0


def _from_loader(name: str, loader: DataLoader[Any], columns: Columns | None) -> LabelledExamples:
    dataset: Any = loader.dataset
    batches: Any = loader.batch_sampler
    _require_map_style(name, dataset)
    if batches is None:
        raise ValueError(
            f"{name}: expected a DataLoader with a batch_size, got batch_size=None; give it one, "
            "or give the dataset itself"
        )
    sampler: Any = batches.sampler if type(batches) is torch_data.BatchSampler else batches
    kind, size = type(sampler), len(dataset)
    positions: Sequence[int] = range(size)
    if kind is torch_data.SubsetRandomSampler:
        positions = sorted({int(i) for i in sampler.indices})
    elif (
        kind not in (torch_data.SequentialSampler, torch_data.RandomSampler)
        or not len(sampler) == len(sampler.data_source) == size
        or getattr(sampler, "replacement", False)
    ):
        raise ValueError(
            f"{name}: expected a DataLoader that reads each example once, got one with "
            f"{_a(sampler)}; give the dataset itself, or a Subset of it"
        )
    return _FromDataset(name, dataset, positions, loader.collate_fn, batches.batch_size, columns)


def _require_map_style(name: str, dataset: Any) -> None:
    if isinstance(dataset, torch_data.IterableDataset):
        raise ValueError(
            f"{name}: expected a dataset with a length, got the IterableDataset "
            f"{type(dataset).__name__}; give a list, as by list(itertools.islice(dataset, 1000))"
        )
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, str | bytes | Mapping) or not sized:
        raise TypeError(
            f"{name}: expected a Tensor, NumPy array, Dataset or DataLoader, got {_a(dataset)}; "
            "give one of these, such as a list of pairs (example, label)"
        )


def _columns(name: str, batch: Any, columns: Columns | None) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        example, label = columns or _guess_columns(name, batch)
        if missing := [str(key) for key in (example, label) if key not in batch]:
            raise ValueError(
                f"{name}: expected the columns {example}, {label}, got "
                f"{', '.join(map(str, batch))} without {', '.join(missing)}; name them with "
                "columns=(example, label)"
            )
        return batch[example], batch[label]
    if not isinstance(batch, tuple | list):
        raise ValueError(
            f"{name}: expected batches of pairs (example, label) or of dicts, got {_a(batch)}; "
            "have the dataset return the label as well"
        )
    if columns is None and len(batch) != 2:
        raise ValueError(
            f"{name}: expected pairs (example, label), got {len(batch)} parts; say which two with "
            "columns=(0, 1)"
        )
    first, second = columns or (0, 1)
    if not all(isinstance(i, int) and -len(batch) <= i < len(batch) for i in (first, second)):
        raise ValueError(
            f"{name}: expected columns = two positions from 0 to {len(batch) - 1}, as its examples "
            f"are tuples, got {columns}"
        )
    return batch[first], batch[second]  # type: ignore[index]


def _guess_columns(name: str, batch: Mapping[Any, Any]) -> tuple[Any, Any]:
    labels = [key for key in batch if key in LABEL_NAMES]
    inputs = [key for key in batch if key in IMAGE_NAMES]
    if len(labels) == 1 and len(batch) == 2:
        inputs = [key for key in batch if key not in labels]
    if len(labels) != 1 or len(inputs) != 1:
        raise ValueError(
            f"{name}: expected dicts with one example and one label, such as img and label, got "
            f"the keys {', '.join(map(str, batch))}; say which two with columns=('img', 'label')"
        )
    return inputs[0], labels[0]


def _tensor(name: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        if values.ndim:
            return values.detach()
        raise ValueError(f"{name}: expected one entry per example, got a single number")
    try:
        require_unmasked(values)
        array: NDArray[Any] = np.asarray(values)
        if array.ndim == 0:
            raise TypeError("a single number")
        if not array.flags.writeable or not array.dtype.isnative or min(array.strides) < 0:
            array = array.astype(array.dtype.newbyteorder("="))
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: expected an array of numbers, got {_a(values)} that torch cannot take "
            f"({one_line(error)}); convert it to numbers, in one array"
        ) from error


def _join(name: str, parts: Sequence[Tensor]) -> Tensor:
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) > 1:
        raise ValueError(
            f"{name}: expected one shape, got {shapes[0]} and {shapes[1]}; resize, crop or pad "
            "each example in the dataset's transform"
        )
    return torch.cat(list(parts))


def _finite(name: str, x: Tensor) -> Tensor:
    """Refuse what is not finite; the sum shows it, unless it is too large itself."""
    if x.is_floating_point() and not bool(torch.isfinite(x.sum())):
        finite = torch.isfinite(x).reshape(len(x), -1).all(1)
        if spoilt := torch.nonzero(~finite).flatten().tolist():
            raise ValueError(
                f"{name}: expected finite numbers, got NaN or infinity in {len(spoilt)} of "
                f"{len(x)} examples, the first at {spoilt[0]}; remove or repair them"
            )
    return x


def class_numbers(labels: Tensor, num_classes: int, *, name: str = "y") -> Tensor:
    """Return integers of shape (n,) or (n, 1), or one-hot rows (n, C), as int64 (n,)."""
    shape = tuple(labels.shape)
    if shape[1:] == (num_classes,) != (1,):
        values = labels.double()
        if not bool((((values == 0) | (values == 1)).all(1) & (values.sum(1) == 1)).all()):
            raise ValueError(
                f"{name} labels: expected one-hot rows, a single 1 and otherwise 0, got other "
                "numbers; take the most probable class with .argmax(1)"
            )
        return values.argmax(1)
    if shape[1:] not in ((), (1,)) or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"{name} labels: expected integers of shape (n,), or one-hot rows (n, {num_classes}) "
            f"for the model's {num_classes} outputs, got {dtype_name(labels.dtype)} of shape "
            f"{shape}; convert class numbers with .long(), or give the model an output per class"
        )
    numbers = labels.to(torch.int64).flatten()
    low, high = int(numbers.min()), int(numbers.max())
    if not 0 <= low <= high < num_classes:
        raise ValueError(
            f"{name} labels: expected 0 ... {num_classes - 1}, got {low} ... {high}; number the "
            "classes from 0, and give the model as many outputs as there are classes"
        )
    return numbers


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' or name == 'ndarray' else 'a'} {name}"
