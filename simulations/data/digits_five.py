"""Five sets of digits as the domains of one: MNIST, SVHN, USPS, SynthDigits and MNIST-M.

Sources: Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*,
ICLR 2021, section 5; Huang et al., *Understanding Convergence and Generalization in Federated
Learning through Feature Learning Theory*, ICLR 2024, section 6.2, Table 2.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config.settings import ConfigError
from .domains import Domain, Joined, Part, chosen, joined
from .hugging_face import HuggingFaceSet, pictures

__all__ = ["DIGIT_SETS", "SIDE", "digits_five"]

SIDE = 28  # pixels to which all pictures are resized, as by Li et al.


class HubSet(NamedTuple):
    """Where a set is on Hugging Face's hub; no name: nowhere that we know of."""

    name: str = ""
    subset: str = ""


DIGIT_SETS = {
    "mnist": HubSet("ylecun/mnist"),
    "svhn": HubSet("ufldl-stanford/svhn", "cropped_digits"),
    "usps": HubSet("flwrlabs/usps"),
    "synth-digits": HubSet(),
    "mnist-m": HubSet("Mike0307/MNIST-M"),
}


def digits_five(folder: str, num_examples: int = 0, num_test_examples: int = 0) -> Joined:
    """Load the five sets in the order of ``DIGIT_SETS``, as RGB pictures of 28 x 28.

    Parameters
    ----------
    folder : str
        With a folder of Parquet files for each set, by its name in ``DIGIT_SETS``. Sets that are
        not there, and all if `folder` is empty, come from the hub.
    num_examples, num_test_examples : int
        Of each set, as many of each class, its first ones; 0: all.

    Raises
    ------
    ConfigError
        If a set cannot be had, has other labels than 0 ... 9, or fewer examples.
    """
    place = Path(folder).expanduser()
    if folder and not place.is_dir():
        raise ConfigError(f"dataset = digits-five: expected a folder, got {place}")
    found = {}
    for name, hub in DIGIT_SETS.items():
        own = place / name
        if folder and own.is_dir():
            found[name] = HuggingFaceSet(str(own))
        elif hub.name:
            found[name] = HuggingFaceSet(hub.name, hub.subset)
        else:
            raise ConfigError(
                f"dataset = digits-five: {name} is on no hub that we know of; set "
                f"dataset = digits-five:<folder>, with its Parquet files in <folder>/{name}"
            )
    counts = {
        "train": ("examples-per-domain", num_examples),
        "test": ("test-examples-per-domain", num_test_examples),
    }
    return joined(
        [
            Domain(*(_part(own, name, part, *count) for part, count in counts.items()))
            for name, own in found.items()
        ]
    )


def _part(source: HuggingFaceSet, name: str, part: str, key: str, count: int) -> Part:
    split = source.split(part)
    y = np.asarray(split[source.class_column(split)], dtype=np.int64)
    if len(y) and (y.min() < 0 or y.max() > 9):
        raise ConfigError(
            f"dataset = digits-five: {name} has {part} labels {y.min()} ... {y.max()}, expected "
            "digits 0 ... 9"
        )
    if count:
        own = chosen(y, count, key=key, whose=name)
        split, y = split.select(own), y[own]
    return Part(pictures(split, source.image_column(split), _resized), y)


def _resized(picture: Any) -> Any:
    from PIL import Image

    return picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
