"""Image sets in Hugging Face's form, from the hub or a folder of their files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..config.settings import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class HuggingFaceSet:
    """An image set with train and test splits.

    `name` is its name on the hub, or a folder of Parquet files; `subset` one of several there.
    """

    name: str
    subset: str = ""

    def split(self, part: str) -> "Dataset":
        """Return the train or the test split."""
        from datasets import load_dataset

        try:
            return load_dataset(self.name, self.subset or None, split=part)
        except Exception as error:
            raise ConfigError(
                f"dataset: {self.name!r} has no readable {part} split: {error}"
            ) from error

    def image_column(self, split: "Dataset", given: str = "") -> str:
        """Return the column of the images: the given one, or the first that has images."""
        from datasets import Image

        images = [key for key, feature in split.features.items() if isinstance(feature, Image)]
        return self.column(split, "image-column", given or (images[0] if images else ""))

    def column(self, split: "Dataset", setting: str, given: str) -> str:
        """Return the given column, if the split has it."""
        if given not in split.features:
            raise ConfigError(
                f"{setting}: {self.name!r} has the columns {', '.join(split.features)}, "
                f"got {given!r}"
            )
        return given

    def class_column(self, split: "Dataset") -> str:
        """Return the only column of class labels; without one, the only column of whole numbers."""
        from datasets import ClassLabel

        features = split.features.items()
        labels = [key for key, feature in features if isinstance(feature, ClassLabel)]
        numbers = [key for key, feature in features if "int" in str(getattr(feature, "dtype", ""))]
        found: list[str] = labels or numbers
        if len(found) != 1:
            raise ConfigError(
                f"dataset: {self.name!r} has the columns {', '.join(split.features)}; expected one "
                f"of class labels, or one of whole numbers, got {', '.join(found) or 'none'}"
            )
        return found[0]


def existing_folder(folder: str, dataset: str) -> Path | None:
    """Return the folder of a data set's files; None if none is named."""
    place = Path(folder).expanduser()
    if folder and not place.is_dir():
        raise ConfigError(f"dataset = {dataset}: expected a folder, got {place}")
    return place if folder else None


def pictures(
    split: "Dataset", column: str, convert: Callable[[Any], Any] = np.asarray
) -> NDArray[Any]:
    """Return a column of pictures, all of one size and mode, as (n, channels, height, width)."""
    return channels_first(np.stack([np.asarray(convert(picture)) for picture in split[column]]))


def channels_first(pictures: NDArray[Any]) -> NDArray[Any]:
    """Return grey (n, h, w) or coloured (n, h, w, c) pictures as (n, c, h, w)."""
    moved = pictures[:, None] if pictures.ndim == 3 else pictures.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(moved)
