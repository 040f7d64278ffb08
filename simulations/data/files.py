"""Tables and pictures as they lie on disks, with one schema for all files, or on a hub."""

import codecs
import math
import os
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedntk.ntk.predictors.inputs import stack_pictures
from fedntk.ntk.predictors.schema import MISSING, Number, Schema, plain_text

from ..config.data import DatasetSettings
from ..config.settings import ConfigError, nearest
from ..errors import first_line

if TYPE_CHECKING:
    import pandas as pd
    from datasets import Dataset

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"}
HIDDEN = {"__macosx", "@eadir", "thumbs.db", "desktop.ini", "$recycle.bin"}  # and what begins "."
SPLITS = {
    **dict.fromkeys(("train", "training", "trainset"), "train"),
    **dict.fromkeys(("test", "testing", "testset"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "valset", "dev"), "validation"),
}
FILLERS = {"set", "data", "dataset", "split", "image", "images", "img", "imgs", "pictures"}
# a number that no leading zero, and no more digits than a float64 has, mark as a name
NUMBER = re.compile(r"[+-]?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)")
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
DECIMALS = {"point": ".", "comma": ","}
WITH_EXPONENT = re.compile(NUMBER.pattern + r"(e[+-]?\d+)?", re.IGNORECASE)
logger = getLogger("flwr")


def split_of(name: str) -> str:
    """Return the split that a name means, in any case: train, test or validation; else empty."""
    words = [word for word in re.findall(r"[a-z]+", name.lower()) if word not in FILLERS]
    return SPLITS.get(words[0], "") if len(words) == 1 else ""


def named_splits(names: Iterable[Any]) -> dict[str, Any]:
    """Return the name of each split; what means none keeps its name."""
    splits = defaultdict[str, list[Any]](list)
    for name in names:
        splits[split_of(str(name)) or str(name)].append(name)
    if twice := [", ".join(map(str, paths)) for paths in splits.values() if len(paths) > 1]:
        raise ConfigError(
            f"dataset: expected one part for each of train, test and validation, got {twice[0]}; "
            "join these, or rename one"
        )
    return {split: paths[0] for split, paths in splits.items()}


def kind_of(path: Path) -> str:
    """Return csv, parquet or npz by the end of a file's name, such as .csv.gz; else empty."""
    ends = [end.lower().removeprefix(".") for end in path.suffixes[-2:]]
    return next((kind for kind in ("csv", "parquet", "npz") if kind in ends), "")


def read_files(
    kind: str, place: Path, settings: DatasetSettings, schema: Schema | None = None
) -> Any:
    """Read a csv or parquet file, a folder of classes, or a folder's parts train and test.

    With a schema the cells of a csv file stay text.
    """
    places = {"": place}
    entries = _visible(place)
    if kind == "folder":
        parts = {path.name: path for path in entries if path.is_dir()}
    else:  # train.csv, and train.csv.gz
        parts = {path.name.split(".")[0]: path for path in entries if kind_of(path) == kind}
    if place.is_dir() and (kind != "folder" or any(map(split_of, parts))):
        places = {split: parts[name] for split, name in named_splits(parts).items()}
        if "train" not in places:
            cure = f"did you mean folder:{place}?"
            if kind == "folder":
                cure = "a class cannot have the name of a split, such as test"
            raise ConfigError(
                f"dataset: expected a {kind} file, or a folder with train, got the folder {place} "
                f"of {', '.join(parts) or 'none'}; {cure}"
            )
    used = {split: part for split, part in places.items() if split in ("", "train", "test")}
    if kind == "folder":
        data: Mapping[str, Any] = {split: _pictures(part) for split, part in used.items()}
    else:
        data = read_tables(kind, used, settings, schema)
    return data[""] if "" in data else {split: data.get(split) for split in places}


# ------------------------------------------------------------------------- tables


def read_tables(
    kind: str, paths: Mapping[str, Path], settings: DatasetSettings, schema: Schema | None = None
) -> "dict[str, pd.DataFrame]":
    """Read the tables of one data set, csv or parquet, with one schema.

    In csv files labels and owners are text as written; numbers only if all cells of all files are.
    Names such as 001 or None stay as they are; an empty cell is a gap.
    """
    import pandas as pd

    if kind == "parquet":
        return {split: pd.read_parquet(path) for split, path in paths.items()}
    columns = {settings.target, *settings.target.split(",")}
    text = dict.fromkeys(map(str.strip, columns), WITH_EXPONENT)  # 1e5 is a label 100000
    text[settings.client_column] = NUMBER  # or an owner
    first = [settings.target, *text]
    as_text = schema is not None
    frames = {s: _read_csv(path, first, settings, as_text=as_text) for s, path in paths.items()}
    pointed = pointing(settings.decimal)
    for name, number in text.items():
        having = [frame for frame in frames.values() if name in frame]
        cells = {cell: cell.strip() for frame in having for cell in frame[name].unique()}
        values = [value for value in cells.values() if value.lower() not in MISSING]
        names: dict[str, Any] = {cell: cell for cell in cells.values() if cell not in ("", "?")}
        numbers = [value.translate(pointed) for value in values]
        if values and all(map(number.fullmatch, numbers)):
            names = dict(zip(values, pd.to_numeric(numbers).tolist(), strict=True))
        for frame in having:
            frame[name] = frame[name].map({cell: names.get(v) for cell, v in cells.items()})
    for name, column in () if schema is None else schema.columns.items():
        for frame in (frame for frame in frames.values() if name in frame):
            if isinstance(column, Number) and name not in text:
                cells = {c: with_point(column, settings.decimal, c) for c in frame[name].unique()}
                frame[name] = frame[name].map(cells)
    return frames


def with_point(column: Number, decimal: str, cell: str) -> str:
    """Return a cell of a column with a decimal point; what is a gap as it is written stays so.

    A number with a point where the mark is a comma, such as 1.234, becomes 1,234, which is none.
    """
    text = plain_text(cell)
    pointed = text.translate(pointing(decimal))
    is_number = any(math.isfinite(column.number(form)) for form in (text, pointed))
    is_gap = text in column.missing or text.lower() in MISSING
    return pointed if is_number and not is_gap else text


def pointing(decimal: str) -> dict[int, int]:
    """Return what gives numbers a decimal point in place of their mark, and marks for points."""
    mark = DECIMALS[decimal]
    return str.maketrans(f".{mark}", f"{mark}.")


def _read_csv(
    path: Path, text: Sequence[str], settings: DatasetSettings, *, as_text: bool = False
) -> "pd.DataFrame":
    import pandas as pd

    encoding, separator = settings.encoding, SEPARATORS[settings.separator]
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"  # without the mark that spreadsheets put first
    options: Any = {"index_col": False, "skipinitialspace": True, "encoding": encoding}
    options |= {"sep": separator, "decimal": DECIMALS[settings.decimal]}
    if as_text:
        options["na_filter"] = False
    try:
        first = pd.read_csv(
            path, header=None, nrows=1, dtype=str, **{**options, "na_filter": False}
        )
        plain = plain_text if as_text else str.strip
        names = [plain(name) or f"Unnamed: {i}" for i, name in enumerate(first.iloc[0])]
        if twice := ", ".join(dict.fromkeys(n for n in names if names.count(n) > 1)):
            raise ConfigError(f"{path}: expected columns of different names, got twice {twice}")
        marks = [name for name, mark in SEPARATORS.items() if mark in names[0]]
        if marks and text[0] not in names:
            more = ", and decimal = comma if numbers have commas" * (marks[0] != "comma")
            raise ConfigError(
                f"{path}: expected cells with a {settings.separator} between them, got "
                f"{names[0]!r}; set separator = {marks[0]}{more}"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame: pd.DataFrame = pd.read_csv(
                path,
                header=0,
                names=names,
                low_memory=False,  # one type for a column, not one for each chunk
                # a blank before it keeps the name NA from being read as a gap
                converters=dict.fromkeys({*text} & {*names}, " ".__add__),
                dtype=dict.fromkeys({*names} - {*text}, str) if as_text else None,
                **options,
            )
    except UnicodeError as error:
        raise ConfigError(
            f"{path}: expected text in {settings.encoding}, got another encoding; set encoding, "
            "such as to cp1252, or save it as UTF-8"
        ) from error
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise ConfigError(
            f"{path}: expected as many cells in each row as there are names in the first line "
            f"({first_line(error)}); put text with a {settings.separator} in quotes, or set "
            "separator and decimal"
        ) from error
    unnamed = frame[[c for c in names if c.startswith("Unnamed: ")]]
    empty = unnamed.columns[(unnamed.isna() | (unnamed == "")).all()]
    return frame.drop(columns=empty)  # of a comma at the end of each line


# ----------------------------------------------------------------------- pictures


def _visible(place: Path) -> list[Path]:
    """Return what a folder holds, without the entries that systems and editors hide."""
    entries = sorted(place.iterdir()) if place.is_dir() else []
    return [entry for entry in entries if entry.name[0] != "." and entry.name.lower() not in HIDDEN]


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGES and not path.is_dir()


def _pictures(place: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read pictures (n, channels, height, width), labelled by their folders' names."""
    classes = [folder for folder in _visible(place) if folder.is_dir()]
    files = {folder.name: [*_files(folder)] for folder in classes}
    paths = sorted(path for members in files.values() for path in members if _is_picture(path))
    if not paths:
        raise ConfigError(
            f"dataset: expected a folder of pictures for each class, got none in {place}"
        )
    if empty := [name for name, members in files.items() if not any(map(_is_picture, members))]:
        raise ConfigError(
            f"dataset: expected pictures in each class, got none in {', '.join(empty)} of {place}; "
            f"remove the folder, or convert its files to {', '.join(sorted(IMAGES))}"
        )
    inside = [{sub.name for sub in _visible(folder) if sub.is_dir()} for folder in classes]
    if len(inside) > 1 and len(common := set.intersection(*inside)) > 1:  # cat and dog in each
        raise ConfigError(
            f"dataset: expected a folder for each class, got {', '.join(files)}, which all hold "
            f"{', '.join(sorted(common)[:5])}; name them train and test if they are parts of the "
            "set, or put the pictures of a class into its folder itself"
        )
    unused = {*filterfalse(Path.is_dir, _visible(place)), *chain(*files.values())} - {*paths}
    if unused:
        shown = ", ".join(str(path.relative_to(place)) for path in sorted(unused)[:5])
        logger.warning("data: %d files of %s are not used: %s", len(unused), place, shown)
    labels = [path.relative_to(place).parts[0] for path in paths]
    return stack_pictures(map(_open, paths)), np.array(labels)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without hidden ones, and links to folders, unfollowed."""
    for root, folders, _ in os.walk(folder):
        entries = _visible(Path(root))
        folders[:] = [entry.name for entry in entries if entry.is_dir()]
        yield from (entry for entry in entries if not entry.is_dir() or entry.is_symlink())


def _open(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.copy()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(
            f"dataset: {path} cannot be read as a picture: {first_line(error)}; remove or repair it"
        ) from error


# ------------------------------------------------------- in Hugging Face's form


def load_splits(name: str, subset: str = "") -> Any:
    """Return the splits of a set on the hub, or of a folder, which is never looked for there."""
    place = Path(name).expanduser()
    kind = place.suffix.removeprefix(".")
    if kind in ("csv", "parquet", "npz"):
        cure = f"did you mean {kind}:{place}?"
        raise ConfigError(f"dataset: hf: takes a name on the hub, or a folder, got {place}; {cure}")
    if not place.is_dir() and (place.exists() or name.startswith((".", "/", "~"))):
        raise ConfigError(f"dataset: no folder at {place.absolute()}")
    if tables := [path for path in place.rglob("*.csv") if path.stem != "metadata"]:  # of pictures
        raise ConfigError(
            f"dataset: hf: would read the numbers of names such as 001 in {tables[0]}; use csv:"
        )
    from datasets import load_dataset

    try:
        with tempfile.TemporaryDirectory(prefix="fedntk-") as cache:  # users' files stay theirs
            options = {"cache_dir": cache, "keep_in_memory": True} if place.is_dir() else {}
            splits = load_dataset(str(place), subset or None, **options)
    except Exception as error:
        raise ConfigError(
            f"dataset: {name!r} cannot be read: {first_line(error)}; for a folder with a folder "
            "of pictures for each class use folder:"
        ) from error
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    if unread := [name for name in names if split_of(name) not in ("", *splits)]:
        raise ConfigError(
            f"dataset: {unread[0]} of {place} is not read as a split, as it is by the names train, "
            "test and validation; rename it, or use folder: or csv:"
        )
    return splits


def class_column(split: "Dataset", name: str) -> str:
    """Return the only column of class labels; without one, the only column of whole numbers."""
    from datasets import ClassLabel

    features = split.features.items()
    labels = [key for key, feature in features if isinstance(feature, ClassLabel)]
    numbers = [key for key, feature in features if "int" in str(getattr(feature, "dtype", ""))]
    columns: list[str] = labels or numbers
    if len(columns) != 1:
        raise ConfigError(
            f"dataset: {name!r} has the columns {', '.join(split.features)}; expected one of class "
            f"labels, or one of whole numbers, got {', '.join(columns) or 'none'}"
        )
    return columns[0]


def image_column(split: "Dataset") -> str:
    """Return the first column that has images; empty if there is none."""
    from datasets import Image

    images = (key for key, feature in split.features.items() if isinstance(feature, Image))
    return next(images, "")


def plain_rows(split: "Dataset", picture: str) -> "Dataset":
    """Return a set without the format in which rows are shown, and with pictures decoded."""
    from datasets import Image

    if split.format["type"] == "custom":
        raise ConfigError(
            "expected examples as they are stored, got a set with a transform; apply it with "
            "dataset.map, or give pairs: [(row['image'], row['label']) for row in dataset]"
        )
    if not split.format["output_all_columns"]:
        split = split.select_columns(split.format["columns"])
    split = split.with_format(None)
    if isinstance(split.features.get(picture), Image) and not split.features[picture].decode:
        split = split.cast_column(picture, Image(mode=split.features[picture].mode))
    return split


def target_columns(target: str, columns: Iterable[str]) -> list[str]:
    """Return the columns that the setting names: one, or several with commas between them."""
    if target in columns:
        return [target]
    return [name.strip() for name in target.split(",") if name.strip()] or [target]


def require_column(setting: str, column: str, columns: Iterable[str]) -> str:
    """Return a column that a setting names, if it is there."""
    names = [str(name) for name in columns]
    if column not in names:
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if names[10:] else "")
        meant = nearest(column, names)
        raise ConfigError(f"{setting}: the set has the columns {shown}, got {column!r}{meant}")
    return column


def existing_folder(folder: str, dataset: str) -> Path | None:
    """Return the folder of a data set's files; None if none is named."""
    place = Path(folder).expanduser()
    if folder and not place.is_dir():
        raise ConfigError(f"dataset = {dataset}: expected a folder, got {place}")
    return place if folder else None
