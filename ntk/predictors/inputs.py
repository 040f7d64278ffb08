"""What is done to raw examples before a model sees them: part of what was learned."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..support.arrays import require_unmasked
from .schema import Schema
from .targets import FAR, WIDE, TargetTransform
from .texts import as_bytes, encode_texts

PLAIN_MODES = {  # of modes whose numbers are no shades of light
    **dict.fromkeys(("P", "CMYK", "YCbCr", "LAB", "HSV", "RGBX"), "RGB"),
    **{"1": "L", "La": "LA", "PA": "RGBA", "RGBa": "RGBA"},
}

Kind = Literal["0 or 1", "whole", "real"]

# a node's mean this far off, with a spread below 1 / WIDE of the pooled one, is another unit
SHIFTED = 2.0
NARROW_PICTURES = 20.0  # pooled standard deviation of pictures over a node's
EXTREME = 30.0  # deviations of one value from the pooled mean, or sqrt(N - 1) if that is more


@dataclass(frozen=True, eq=False)
class InputTransform:
    """Turns raw examples into the tensors that a network was trained on.

    Numbers are standardised to ``(x - mean) / std``; texts become positions in an alphabet, or
    bytes (n, length) of UTF-8 if `shape` is ().

    `shape` is that of one raw example. `mean` and `std` are moments of the training examples, which
    broadcast over an example: per channel of images, per column of tables; float64, or float32 for
    examples near 0, of a dtype that float32 holds, that are no tables. A table, which may come as a
    data frame, has the names of its `columns`, and their `kinds`: ``"0 or 1"``, ``"whole"`` or
    ``"real"`` numbers, or ``"text"``. With a `schema` these are of the numbers that it makes of a
    data frame's columns. `alphabet` has the characters of texts. `classes` are the names of the C
    classes, or the numbers that were labels in the data, such as 1 ... C; with `targets`, which
    standardises real targets, those of the C targets. `frozen` is the part of a network that is not
    trained, and takes the standardised tensor; `project` is a random projection of what then comes.
    Neither is saved: the seed of a projection is a secret.

    Examples
    --------
    >>> inputs = InputTransform((2,), np.float32([1, 10]), np.float32([2, 5]))
    >>> inputs([[3, 0]])
    tensor([[ 1., -2.]])
    """

    FILE: ClassVar = "inputs.json"

    shape: tuple[int, ...]
    mean: NDArray[Any]
    std: NDArray[Any]
    columns: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    alphabet: str = ""
    classes: tuple[str | int, ...] = ()
    targets: TargetTransform | None = None
    schema: Schema | None = None
    project: Callable[[Tensor], Tensor] | None = None
    frozen: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def fit(
        cls,
        x: NDArray[Any],
        *,
        standardise: bool = True,
        columns: tuple[str, ...] = (),
        **more: Any,
    ) -> Self:
        """Take the moments of training examples (n, ...); not standardised, they are 0 and 1.

        Images (n, channels, height, width) have moments for each channel, tables (n, columns) for
        each column, and other examples one mean and deviation of all their values. A channel or
        column that is constant is only centred. Encoded texts (n,), dtype S, have no moments.
        """
        if x.dtype.kind == "S":
            return cls((), np.zeros(1), np.ones(1), **more)
        how: Any = {"axis": {4: (0, 2, 3), 2: (0,)}.get(x.ndim), "keepdims": True}
        mean, std, precise = np.zeros(1), np.ones(1), x.ndim == 2
        if standardise:
            low, high = x.min(**how)[0], x.max(**how)[0]
            varies = ~_is_constant(low, high)
            with np.errstate(over="ignore", invalid="ignore"):  # which is refused below
                mean = np.where(varies, x.mean(**how, dtype=np.float64)[0], low)
                std = np.where(varies, x.std(**how, dtype=np.float64)[0], 1.0)
            near = (np.abs(mean) <= 16 * std) & (std > 1e-30) & (std < 1e30)
            precise = precise or not near.all()
        if not np.can_cast(x.dtype, np.float32):
            precise = precise or standardise
            _require_resolved(x, mean, std, standardise=standardise)
        dtype = np.float64 if precise else np.float32
        kinds: tuple[str, ...] = _column_kinds(x) if columns else ()
        if (schema := more.get("schema")) is not None:
            declared = zip(schema.outputs.values(), kinds, strict=True)
            kinds = tuple(seen if kind == "real" else kind for kind, seen in declared)
        names: Any = {"columns": columns, "kinds": kinds}
        return cls(x.shape[1:], mean.astype(dtype), std.astype(dtype), **names, **more)

    def __call__(
        self, x: Any, *, check_ranges: bool = True, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return examples (n, ...) as a network takes them, by default float32.

        `x` is an array, a tensor, nested lists, a data frame with the columns, a sequence of texts,
        or a picture of PIL or a list of them. Arrays of pictures may also have their channels last,
        or none if grey. ValueError if the examples are not of the kind that was trained on. With
        `check_ranges` a warning names what is far from the training examples.
        """
        if self.shape:
            rows = self._scaled(x, check_ranges=check_ranges)
        else:
            rows = as_bytes(encode_texts(x))
        ready = torch.from_numpy(rows).to(dtype if self.frozen is None else torch.float32)
        for function in (self.frozen, self.project):
            ready = ready if function is None else function(ready)
        return ready.to(dtype)

    def _scaled(self, x: Any, *, check_ranges: bool) -> NDArray[Any]:
        raw = self._encode(x) if self.alphabet else self._numbers(x)
        if raw.shape[1:] != self.shape:
            sizes = ", ".join(map(str, self.shape))
            is_picture = len(self.shape) == 3
            cure = "; resize pictures, or convert their mode, first" if is_picture else ""
            raise ValueError(f"expected examples of shape (n, {sizes}), got {raw.shape}{cure}")
        if not np.isfinite(raw).all():
            raise ValueError("expected finite numbers, got NaN or infinity")
        scaled: NDArray[Any] = (raw.astype(self.mean.dtype) - self.mean) / self.std
        if check_ranges:
            doubt = self._other_scale(raw, scaled) or "; ".join(self._other_columns(raw))
            if doubt:
                warnings.warn(doubt, stacklevel=3)
        return scaled

    @property
    def standardises(self) -> bool:
        """Whether it knows moments of the training examples."""
        return bool(self.mean.any() or (self.std != 1).any())

    def _other_scale(self, raw: NDArray[Any], scaled: NDArray[Any]) -> str:
        top, mean, kind = raw.max(initial=0), self.mean.max(), raw.dtype.kind
        too_small = kind == "f" and 0 < top <= 1 < mean  # as torchvision's ToTensor makes them
        too_large = kind in "iu" and scaled.max(initial=0) > 100
        if len(self.shape) != 3 or not self.standardises or not (too_small or too_large):
            return ""
        return (
            f"pictures have values up to {top:g}, but the training examples have the mean "
            f"{mean:g}; pass all as they were in training: 0 ... 255, or 0 ... 1"
        )

    def _other_columns(self, raw: NDArray[Any], num_train: int | None = None) -> list[str]:
        """Describe the columns of a table, or all else, that are not as in training."""
        if not len(raw) or self.alphabet or (num_train is None and not self.columns):
            return []
        return self._other_kinds(raw) + self._out_of_range(raw, num_train)

    def _other_kinds(self, raw: NDArray[Any]) -> list[str]:
        doubts = []
        of_columns = zip(self.kinds, _column_kinds(raw), raw.T, strict=True) if self.kinds else ()
        for name, (expected, actual, column) in zip(self.columns, of_columns, strict=False):
            fits = {"0 or 1": ("0 or 1",), "whole": ("0 or 1", "whole")}.get(expected, (actual,))
            if actual not in fits:
                numbers = {"0 or 1": "0 and 1", "whole": "whole numbers"}[expected]
                examples = ", ".join(f"{value:g}" for value in np.unique(column)[:3])
                doubts.append(f"{name} has values such as {examples}, and {numbers} in training")
        return doubts

    def _out_of_range(self, raw: NDArray[Any], num_train: int | None) -> list[str]:
        """Describe the columns, or channels, that are far from the pooled moments.

        These cannot bound one example's values, as columns may have long tails: a column is judged
        by its mean and spread, as by Chebyshev's inequality at most 1 of 25 pooled values is 5
        standard deviations or more from the pooled mean. A single value is judged only if
        `num_train`, the number N of pooled examples, is known: none of these lies sqrt(N - 1)
        deviations off.
        """
        if not self.standardises:
            return []
        mean, std, last = self.mean, self.std, raw.ndim - 1
        axes = (0, *(i for i in range(1, raw.ndim) if mean.ndim < last or mean.shape[i - 1] == 1))
        scaled = (raw - mean.astype(np.float64)) / std
        shift = scaled.mean(axes).reshape(-1)
        constant = _is_constant(raw.min(axes), raw.max(axes))  # its rounded spread may be above 0
        spread = np.where(constant, 0, scaled.std(axes)).reshape(-1)
        farthest = np.abs(scaled).max(axes).reshape(-1)
        outside = (np.abs(shift) > FAR) | (spread > WIDE)
        outside |= (spread > 0) & (spread < 1 / WIDE) & (np.abs(shift) > SHIFTED)
        if raw.ndim == 4:
            outside |= (spread > 0) & (spread < 1 / NARROW_PICTURES)
        if num_train is not None:
            outside |= farthest > max(EXTREME, float(np.sqrt(num_train - 1)))
        if self.kinds:  # a rare 1 is far from the mean, and other values are of another kind
            outside &= np.array([kind not in ("0 or 1", "text") for kind in self.kinds])
        pooled_mean, pooled_std = mean.reshape(-1), std.reshape(-1)
        doubts = []
        for i in np.flatnonzero(outside).tolist():
            channel = "the set" if len(outside) == 1 else f"channel or column {i}"
            there = pooled_mean[i] + shift[i] * pooled_std[i]
            doubts.append(
                f"{self.columns[i] if self.columns else channel} has mean {there:.4g}, deviation "
                f"{spread[i] * pooled_std[i]:.4g} and a value {farthest[i]:.3g} deviations off, in "
                f"training mean {pooled_mean[i]:.4g} and deviation {pooled_std[i]:.4g}"
            )
        return doubts

    def require_alike(self, x: NDArray[Any], num_train: int) -> None:
        """Refuse examples (n, ...) of another kind, unit or scale than the N pooled ones.

        ValueError names each column that holds fractions where training had whole numbers, or
        whose mean, spread or farthest value is far from the pooled moments.
        """
        if not self.shape:
            return
        raw = self._numbers(x)
        scale = self._other_scale(raw, (raw - self.mean) / self.std)
        if doubts := [scale] if scale else self._other_columns(raw, num_train):
            more = f"; and {len(doubts) - 5} more" if len(doubts) > 5 else ""
            raise ValueError(
                f"expected numbers as in training, in the same units: {'; '.join(doubts[:5])}{more}"
                "; correct them, or, if they are right, leave this check out: check-ranges=false"
            )

    def arrange_columns(self, x: NDArray[Any], names: Sequence[str]) -> NDArray[Any]:
        """Return the columns of a table x (n, len(names)) in the order of training, by name.

        ValueError if a name is missing, unknown or there twice, or if only one side has names.
        """
        if not self.columns and not len(names):
            return x
        expected = ", ".join(self.columns) or "no names"
        if not self.columns or not len(names):
            raise ValueError(
                f"expected columns = {expected}, as in training, got "
                f"{', '.join(names) or 'no names of the columns'}; name the columns of both"
            )
        if sorted(names) != sorted(self.columns) or x.shape[1:] != (len(names),):
            missing = ", ".join(sorted(set(self.columns) - set(names))) or "none"
            unknown = ", ".join(sorted(set(names) - set(self.columns))) or "none"
            raise ValueError(
                f"expected the columns {expected}, each once, got {len(names)} names of an array "
                f"of shape {x.shape}; missing: {missing}; unknown: {unknown}"
            )
        return x[:, [list(names).index(name) for name in self.columns]]

    @property
    def digest(self) -> str:
        """What two machines must agree on: columns, kinds, classes, schema, moments to 3 digits."""
        moments = [[f"{value:.2e}" for value in part.flat] for part in (self.mean, self.std)]
        names = self.columns, self.kinds, self.alphabet, self.classes
        facts: list[Any] = [self.shape, *names, moments]
        if self.targets is not None:
            of_targets = *self.targets.mean, *self.targets.std
            facts.append([f"{value:.2e}" for value in of_targets])
        if self.schema is not None:
            facts.append(self.schema.tables)
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def _numbers(self, x: Any) -> NDArray[Any]:
        if self.schema is not None and hasattr(x, "columns"):
            x = self.schema.encode(x)
        elif self.columns and hasattr(x, "columns"):
            x = x.rename(columns=str)  # names may be numbers
            if missing := ", ".join(name for name in self.columns if name not in x.columns):
                named = ", ".join(self.columns)
                raise ValueError(f"expected the columns {named}; missing: {missing}")
            x = x[list(self.columns)].to_numpy(dtype=np.float64)
        x = [x] if hasattr(x, "getbands") else x
        if isinstance(x, list | tuple) and x and hasattr(x[0], "getbands"):
            return stack_pictures(x)
        require_unmasked(x)
        raw = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
        if raw.dtype.kind not in "iuf":
            cure = "; open pictures with PIL.Image.open" if len(self.shape) == 3 else ""
            raise ValueError(f"expected numbers, got {raw.dtype}{cure}")
        last = (*self.shape[1:], *self.shape[:1])
        is_last = len(self.shape) == 3 and raw.shape[1:] in {last, last[:2]} - {self.shape}
        return channels_first(raw) if is_last else raw

    def _encode(self, x: Any) -> NDArray[Any]:
        if not len(x) or not isinstance(x[0], str):
            return self._numbers(x)
        position = {letter: i for i, letter in enumerate(self.alphabet)}
        if unknown := "".join(sorted(set("".join(x)) - position.keys())):
            raise ValueError(
                f"expected characters of the training texts, got {unknown!r}; replace them"
            )
        if wrong := {len(text) for text in x} - {self.shape[0]}:
            raise ValueError(f"expected texts of length {self.shape[0]}, got {min(wrong)}")
        return np.array([[position[letter] for letter in text] for text in x])

    def labels(self, y: Any) -> Tensor:
        """Return labels 0 ... C - 1, int64 (n,), of names of `classes`; ValueError if unknown.

        If classes have words as names, a number is none of them: whose numbering is it? Real
        targets (n, C), or (n,) if C is 1, are standardised, float32 (n, C).
        """
        if self.targets is not None:
            return self.targets(y)
        number: dict[Any, int] = {name: i for i, name in enumerate(self.classes)}
        labels = y.tolist() if hasattr(y, "tolist") else list(y)
        if any(isinstance(label, list | tuple) for label in labels):
            raise ValueError(
                "expected labels of shape (n,), got rows; give y.ravel() or .argmax(1)"
            )
        labels = [str(label) if isinstance(label, bool) else label for label in labels]
        if unknown := ", ".join(sorted(map(repr, set(labels) - number.keys()))[:5]):
            classes = ", ".join(map(repr, self.classes[:20]))
            cure = ""
            if not any(isinstance(label, str) for label in labels):
                cure = "; give names, [classes[i] for i in labels], with classes in your numbering"
            raise ValueError(f"expected the classes {classes}, got {unknown}{cure}")
        return torch.tensor([number[label] for label in labels], dtype=torch.int64)

    def describe(self) -> str:
        """Say in a few words what is done, for a run's summary."""
        if self.alphabet or not self.shape:
            return "texts as positions in an alphabet" if self.alphabet else "texts"
        unit = {4: "channel", 2: "column"}.get(len(self.shape) + 1, "set")
        by_schema = "encoded by a schema, " * (self.schema is not None)
        return by_schema + (f"standardised by {unit}" if self.standardises else "as they are")

    def save(self, folder: str | Path) -> None:
        """Write ``inputs.json`` into a folder; ValueError if more follows, which is not saved."""
        if self.project is not None:
            raise ValueError(
                "inputs: expected no projection, whose seed is a secret; set predictor.inputs = "
                "None to save the model for inputs that are standardised and projected already"
            )
        if self.frozen is not None:
            raise ValueError(
                "inputs: expected no frozen network, which is not saved with them; keep the run's "
                "folder for load_predictor, or set predictor.inputs = None to save what was trained"
            )
        moments = {"mean": self.mean.tolist(), "std": self.std.tolist()}
        targets = self.targets and {name: a.tolist() for name, a in vars(self.targets).items()}
        tables = self.schema and self.schema.tables
        beside = {"targets": targets, "schema": tables, "project": None, "frozen": None}
        text = json.dumps({**vars(self), **moments, **beside})
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / self.FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Self | None:
        """Read what :meth:`save` wrote; None if there is none."""
        path = Path(folder) / cls.FILE
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            names = ("shape", "columns", "kinds", "classes")
            tuples = {name: tuple(content.get(name, ())) for name in names}
            moments = {name: np.asarray(content[name], np.float64) for name in ("mean", "std")}
            values = np.concatenate([array.ravel() for array in moments.values()])
            if len(tuples["shape"]) > 1 and (values == values.astype(np.float32)).all():
                moments = {name: array.astype(np.float32) for name, array in moments.items()}
            if of_targets := content.get("targets"):
                targets = {name: np.asarray(of_targets[name]) for name in ("mean", "std")}
                content["targets"] = TargetTransform(**targets)
            if (tables := content.get("schema")) is not None:
                content["schema"] = Schema.parse(tables)
            return cls(**{**content, **tuples, **moments})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no inputs that can be read: {error!r}") from error


def stack_pictures(pictures: Iterable[Any]) -> NDArray[Any]:
    """Return pictures of PIL, all of one size and mode, as (n, channels, height, width).

    They are turned as their EXIF data say. Modes whose numbers are no shades of light become RGB,
    with an alpha channel if they have one, or grey.
    """
    arrays, kinds = [], set()
    for i, picture in enumerate(pictures):
        if not hasattr(picture, "getbands"):
            raise ValueError(
                f"expected pictures of PIL, got {type(picture).__name__} at position {i}; leave "
                "out examples without a picture"
            )
        from PIL import ImageOps

        upright = ImageOps.exif_transpose(picture)
        upright = upright.convert(PLAIN_MODES.get(upright.mode, upright.mode))
        arrays.append(np.asarray(upright))
        kinds.add((arrays[-1].shape, upright.mode))
    if len(kinds) > 1:
        (first, mode), (second, other) = sorted(kinds)[:2]
        raise ValueError(
            f"expected pictures of one size and mode, got shapes {first} ({mode}) and {second} "
            f"({other}); resize or convert them first"
        )
    return channels_first(np.stack(arrays))


def channels_first(pictures: NDArray[Any]) -> NDArray[Any]:
    """Return grey (n, h, w) or coloured (n, h, w, c) pictures as (n, c, h, w)."""
    moved = pictures[:, None] if pictures.ndim == 3 else pictures.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(moved)


def _is_constant(low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether numbers from `low` to `high` are the same, or differ by float64's rounding only."""
    if low.dtype.kind != "f":
        return np.asarray(low == high)
    low, high = low.astype(np.float64), high.astype(np.float64)
    return np.asarray(high - low <= 8 * np.spacing(np.maximum(np.abs(low), np.abs(high))))


def _require_resolved(
    x: NDArray[Any], mean: NDArray[Any], std: NDArray[Any], *, standardise: bool
) -> None:
    """Refuse examples whose differences are lost by rounding, to float64 or after to float32.

    10 bits must stay: in each column of a table, and in other examples on average.
    """
    low, high = x.min(0), x.max(0)
    varies, rounded = ~_is_constant(low, high), (low != high).any()
    low, high = low.astype(np.float64), high.astype(np.float64)
    spread, largest = (high - low) * varies, np.maximum(np.abs(low), np.abs(high))
    after = np.maximum(np.abs(low - mean), np.abs(high - mean))
    if not (standardise and x.ndim == 2):
        spread, largest, after = (array.mean(keepdims=True) for array in (spread, largest, after))
        varies = np.array([varies.any()])
    if standardise or x.dtype.kind == "f":
        lost = (spread < after / 2**14) | (spread < largest / 2**43) | ~np.isfinite(std).all()
    else:  # such as numbers of words
        lost = np.maximum(-low, high).max(keepdims=True) > 2**24
    if (lost & varies).any() or (rounded and not varies.any()):
        raise ValueError(
            f"expected examples whose differences float32 can hold, got {x.dtype} of about "
            f"{largest.max():g} that differ by {spread.min():g}; subtract an offset, or scale them"
        )


def _column_kinds(x: NDArray[Any]) -> tuple[Kind, ...]:
    whole, binary = (x == np.floor(x)).all(0), ((x == 0) | (x == 1)).all(0)
    return tuple(
        "0 or 1" if is_binary else "whole" if is_whole else "real"
        for is_whole, is_binary in zip(whole, binary, strict=True)
    )
