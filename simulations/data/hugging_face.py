"""Image sets in Hugging Face's form, from the hub or a folder of their files."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.settings import ConfigError, nearest
from ..errors import first_line
from .files import split_of

if TYPE_CHECKING:
    from datasets import Dataset


def load_splits(name: str, subset: str = "") -> Any:
    """Return the splits of a set on the hub, or of a folder, which is never looked for there."""
    place = Path(name).expanduser()
    kind = place.suffix.removeprefix(".")
    if kind in ("csv", "parquet", "npz"):
        raise ConfigError(
            f"dataset: hf: takes a name on the hub, or a folder, got the file {place}; did you "
            f"mean {kind}:{place}?"
        )
    if not place.is_dir() and (place.exists() or name.startswith((".", "/", "~"))):
        raise ConfigError(f"dataset: no folder at {place.absolute()}")
    if tables := [path for path in place.rglob("*.csv") if path.stem != "metadata"]:  # of pictures
        raise ConfigError(
            f"dataset: hf: would read the numbers of names such as 001 in {tables[0]}; use csv:"
        )
    from datasets import load_dataset

    try:
        if not place.is_dir():
            splits = load_dataset(str(place), subset or None)
        else:
            with tempfile.TemporaryDirectory(prefix="fedntk-") as cache:  # users' files stay theirs
                options = {"cache_dir": cache, "keep_in_memory": True}
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


def plain_rows(split: "Dataset", picture: str, what: str) -> "Dataset":
    """Return a set without the format in which rows are shown; the columns shown stay.

    A transform cannot be left out, and is refused. Pictures that are kept as bytes are decoded.
    """
    from datasets import Image

    if split.format["type"] == "custom":
        raise ConfigError(
            f"{what}: expected examples as they are stored, got a set with a transform; apply it "
            "with dataset.map, or give pairs: [(row['image'], row['label']) for row in dataset]"
        )
    if not split.format["output_all_columns"]:
        split = split.select_columns(split.format["columns"])
    split = split.with_format(None)
    if isinstance(split.features.get(picture), Image) and not split.features[picture].decode:
        split = split.cast_column(picture, Image(mode=split.features[picture].mode))
    return split


def require_column(setting: str, column: str, columns: Iterable[str], whose: str) -> str:
    """Return a column that a setting names, if it is there."""
    names = [str(name) for name in columns]
    if column not in names:
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" * (len(names) > 10))
        raise ConfigError(
            f"{setting}: {whose} has the columns {shown}, got {column!r}{nearest(column, names)}"
        )
    return column


def existing_folder(folder: str, dataset: str) -> Path | None:
    """Return the folder of a data set's files; None if none is named."""
    place = Path(folder).expanduser()
    if folder and not place.is_dir():
        raise ConfigError(f"dataset = {dataset}: expected a folder, got {place}")
    return place if folder else None
