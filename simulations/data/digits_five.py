"""Five sets of digits as the domains of one: MNIST, SVHN, USPS, SynthDigits and MNIST-M.

Sources: Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*,
ICLR 2021, section 5; Huang et al., *Understanding Convergence and Generalization in Federated
Learning through Feature Learning Theory*, ICLR 2024, section 6.2, Table 2.
"""

from typing import Any

import numpy as np

from fedntk.ntk.predictors.inputs import stack_pictures

from ..config.settings import ConfigError
from .hugging_face import class_column, existing_folder, image_column, load_splits
from .parts import Domain, Part, join_domains, select_balanced

SIDE = 28  # pixels to which all pictures are resized, as by Li et al.


# name and subset on Hugging Face's hub; none if the set is on no hub that we know of
DIGIT_SETS: dict[str, tuple[str, ...]] = {
    "mnist": ("ylecun/mnist",),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    "usps": ("flwrlabs/usps",),
    "synth-digits": (),
    "mnist-m": ("Mike0307/MNIST-M",),
}


def digits_five(folder: str, num_examples: int = 0, num_test_examples: int = 0) -> Domain:
    """Load the five sets in the order of ``DIGIT_SETS``, as RGB pictures of 28 x 28.

    `folder` has a folder of Parquet files for each set, by its name in ``DIGIT_SETS``; missing
    sets, and all if `folder` is empty, come from the hub. Numbers of examples are of each set, as
    many of each class, its first ones; 0: all.
    """
    place = existing_folder(folder, "digits-five")
    sources = {}
    for name, hub in DIGIT_SETS.items():
        is_local = place is not None and (place / name).is_dir()
        if not is_local and not hub:
            raise ConfigError(
                f"dataset = digits-five: {name} is on no hub that we know of; set "
                f"dataset = digits-five:<folder>, with its Parquet files in <folder>/{name}"
            )
        sources[name] = (f"{place}/{name}",) if is_local else hub
    numbers = {"train": num_examples, "test": num_test_examples}
    return join_domains(
        Domain(*(_part(load_splits(*source), name, *number) for number in numbers.items()))
        for name, source in sources.items()
    )


def _part(splits: Any, name: str, part: str, count: int) -> Part:
    if part not in splits:
        raise ConfigError(f"dataset = digits-five: {name} has no {part} split")
    split = splits[part]
    y = np.asarray(split[class_column(split, name)], dtype=np.int64)
    if count:
        indices = select_balanced(y, count, part, name)
        split, y = split.select(indices), y[indices]
    return Part(stack_pictures(map(_resize, split[image_column(split)])), y)


def _resize(picture: Any) -> Any:
    from PIL import Image

    return picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
