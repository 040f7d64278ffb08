"""Digits in five domains: the same classes, and other pictures in each.

``digit-domains`` is made of MNIST and scikit-learn's digits, without a download. ``digits-five`` is
MNIST, SVHN, USPS, SynthDigits and MNIST-M; accuracies on the two are not comparable.

Sources: Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*,
ICLR 2021, section 5; Huang et al., *Understanding Convergence and Generalization in Federated
Learning through Feature Learning Theory*, ICLR 2024, section 6.2, Table 2.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedntk.ntk.predictors.inputs import stack_pictures

from ..config.settings import ConfigError
from .data import Indices, Part
from .files import class_column, existing_folder, image_column, load_splits

Pixels = NDArray[np.uint8]
Halves = tuple[Part, Part]  # training and test examples
SIDE = 28  # pixels of all pictures, as by Li et al.


def invert(x: Pixels) -> Pixels:
    """Turn white on black into black on white: 255 - x."""
    return 255 - x


def rotate(x: Pixels) -> Pixels:
    """Turn by 90 degrees, counter-clockwise: 180 degrees would turn a 6 into a 9."""
    return np.ascontiguousarray(np.rot90(x, axes=(-2, -1)))


def blur(x: Pixels) -> Pixels:
    """Blur by binomial weights of 17 pixels in each direction: a deviation of 2 pixels."""
    from scipy.ndimage import convolve1d

    weights = [math.comb(16, k) for k in range(17)]  # sum 2^16, variance 16 / 4
    smooth: NDArray[np.int64] = x.astype(np.int64)
    for axis in (-2, -1):
        smooth = convolve1d(smooth, weights, axis, mode="constant")
    return ((smooth + 2**31) >> 32).astype(np.uint8)


def enlarge(x: NDArray[Any]) -> Pixels:
    """Enlarge pictures (n, 1, 8, 8) of 0 ... 16 to (n, 1, 28, 28) of 0 ... 255, bilinear."""
    from PIL import Image

    grey = np.rint(x[:, 0] * (255 / 16)).astype(np.uint8)
    return np.stack([np.asarray(_resize(Image.fromarray(picture))) for picture in grey])[:, None]


def _resize(picture: Any) -> Any:
    from PIL import Image

    return picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR)


# no two domains have the same picture of MNIST
_OF_MNIST: dict[str, Callable[[Pixels], Pixels]] = {
    "mnist": lambda x: x,
    "inverted": invert,
    "rotated": rotate,
    "blurred": blur,
}
DOMAINS = (*_OF_MNIST, "enlarged")


def digit_domains(mnist: Halves, digits: Halves, *counts: int) -> Halves:
    """Make the five domains, in the order of ``DOMAINS``, all of one size and balanced.

    `mnist` is uint8 (n, 1, 28, 28), white on black, and `digits` (n, 1, 8, 8) of 0 ... 16. `counts`
    are of a domain's training and test examples; 0: ten times the smallest class of digits.
    """
    smallest = (10 * int(np.bincount(part.y, minlength=10).min()) for part in digits)
    sizes = [count or default for count, default in zip(counts, smallest, strict=True)]

    def make(name: str, source: Halves, change: Callable[[Any], Pixels], block: int) -> Halves:
        train, test = (
            part.select(_balanced(part.y, size, half, name, block))
            for part, size, half in zip(source, sizes, ("train", "test"), strict=True)
        )
        return train._replace(x=change(train.x)), test._replace(x=change(test.x))

    domains = [make("MNIST", mnist, change, i) for i, change in enumerate(_OF_MNIST.values())]
    return _join([*domains, make("scikit-learn's set of digits", digits, enlarge, 0)])


# name and subset on Hugging Face's hub; none if the set is on no hub that we know of
DIGIT_SETS: dict[str, tuple[str, ...]] = {
    "mnist": ("ylecun/mnist",),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    "usps": ("flwrlabs/usps",),
    "synth-digits": (),
    "mnist-m": ("Mike0307/MNIST-M",),
}


def digits_five(folder: str, *counts: int) -> Halves:
    """Load the five sets in the order of ``DIGIT_SETS``, as RGB pictures of 28 x 28.

    `folder` has a folder of Parquet files for a set, by its name; others come from the hub.
    `counts` are of the training and the test examples of a set, the first of each class; 0: all.
    """
    place = existing_folder(folder, "digits-five")
    sources = dict(DIGIT_SETS)
    for name, hub in DIGIT_SETS.items():
        if place is not None and (place / name).is_dir():
            sources[name] = (f"{place}/{name}",)
        elif not hub:
            raise ConfigError(
                f"dataset = digits-five: {name} is on no hub that we know of; set "
                f"dataset = digits-five:<folder>, with its Parquet files in <folder>/{name}"
            )
    return _join(_read_set(name, source, counts) for name, source in sources.items())


def _read_set(name: str, source: tuple[str, ...], counts: tuple[int, ...]) -> Halves:
    splits, parts = load_splits(*source), list[Part]()
    for half, count in zip(("train", "test"), counts, strict=True):
        if half not in splits:
            raise ConfigError(f"dataset = digits-five: {name} has no {half} split")
        split = splits[half]
        y = np.asarray(split[class_column(split, name)], dtype=np.int64)
        if count:
            indices = _balanced(y, count, half, name)
            split, y = split.select(indices), y[indices]
        pictures = (_resize(picture.convert("RGB")) for picture in split[image_column(split)])
        parts.append(Part(stack_pictures(pictures), y))
    return parts[0], parts[1]


def _join(domains: Iterable[Halves]) -> Halves:
    """Put domains together, one after the other; they own their examples, by their numbers."""
    halves = []
    for parts in zip(*domains, strict=True):
        owners = np.repeat(np.arange(len(parts)), [len(part.y) for part in parts])
        x, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        halves.append(Part(x, y, owners))
    return halves[0], halves[1]


def _balanced(y: Indices, count: int, half: str, name: str, block: int = 0) -> Indices:
    """Return as many indices of each of ten classes, after `block` times as many."""
    key = "examples-per-domain" if half == "train" else "test-examples-per-domain"
    if count % 10:
        raise ConfigError(f"{key}: expected a multiple of 10, for ten classes, got {count}")
    some = slice(block * count // 10, (block + 1) * count // 10)
    most = int(np.bincount(y, minlength=10).min())
    if some.stop > most:
        largest = 10 * (most // (block + 1))
        raise ConfigError(
            f"{key}: expected at most {largest}, as {name} has {most} of a class, got {count}"
        )
    return np.sort(np.concatenate([np.flatnonzero(y == k)[some] for k in range(10)]))
