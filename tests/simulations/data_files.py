"""Small data sets in the files' forms of real ones."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np


def write_mnist(folder: Path, train: int, test: int, shape: tuple[int, int] = (28, 28)) -> Path:
    """Write noise in MNIST's form, so many pictures of each class, in mixed order."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for part, each in (("train", train), ("t10k", test)):
        labels = generator.permutation(np.repeat(np.arange(10, dtype=np.uint8), each))
        pixels = generator.integers(0, 256, (10 * each, *shape), dtype=np.uint8)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return folder


def write_parquet(folder: Path, part: str, features: dict[str, Any], **columns: Any) -> None:
    """Write one split in Hugging Face's form."""
    folder.mkdir(parents=True, exist_ok=True)
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    made.to_parquet(folder / f"{part}-00000-of-00001.parquet")
