"""Whole numbers of which a server needs only the sum, to average models: what clients mask.

For each number of the model w, client k with n_k examples and new weights w_k sends

    q_k = rint(n_k clip(w_k - w, -R, R) / s),  so that  w + s (sum_k q_k) / (sum_k n_k)

is FedAvg's mean. R is 256 and s is 2^-20, of whole numbers 2^28 and 1. Roundings of K clients move
the mean by at most K s / (2 sum_k n_k); what all leave as it was stays so, to the bit. Sums over
fewer than 2^35 examples fit in 64 bits; n_k is at most 2^24, with which float64 holds q_k exactly.
"""

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..averages import all_alike, put_back
from ..errors import BadReply
from ..options import Declared, shared
from ..support.arrays import Arrays
from .feature_statistics import SumStep

STEP, LIMIT = 2.0**-20, 2.0**28  # s, and R / s
MOST_EXAMPLES = 2**24
BESIDE = 4  # numbers beside the model's: examples, clipped, examples with a loss, their losses


class AverageTask(Declared):
    """What one message asks of a client that masks its weights."""

    masked_step: SumStep = shared("exchange of the secure sum", default="public-key")
    run_key: str = shared("name of the training run, for what a client keeps", default="")


def average_words(
    model: Arrays, weights: Arrays, num_examples: int, loss: float | None
) -> NDArray[np.uint64]:
    """Return a client's numbers before masks: (P + 4,) for P numbers of the model."""
    if not 1 <= num_examples <= MOST_EXAMPLES:
        raise ValueError(f"num-examples: expected 1 ... {MOST_EXAMPLES}, got {num_examples}")
    clipped, parts = 0, []
    for name, old in model.items():
        new = weights[name]
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ValueError(f"weights: {name!r} has another shape or dtype than was received")
        changed = ~all_alike([new, old])  # what stays may be infinite, such as a mask
        if not np.isfinite(new[changed]).all():
            raise ValueError(f"weights: expected finite numbers in {name!r}; lower the step size")
        wide = np.float64 if old.dtype.kind == "f" else np.int64  # whose differences wrap around
        steps = np.zeros(old.shape)
        if changed.any():
            steps[changed] = (new[changed].astype(wide) - old[changed].astype(wide)) / _step(old)
        clipped += int((np.abs(steps) > LIMIT).sum())
        parts.append(np.rint(num_examples * steps.clip(-LIMIT, LIMIT)).ravel())
    with_loss = 0 if loss is None else num_examples
    losses = np.rint(with_loss * np.clip((loss or 0.0) / STEP, -LIMIT, LIMIT))
    parts.append(np.array([num_examples, clipped, with_loss, losses]))
    return np.concatenate(parts).astype(np.int64).view(np.uint64)


def average_of(
    words: NDArray[Any], model: Arrays, clients: int
) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
    """Return the mean of the models, and metrics, from the sum of so many clients' numbers.

    BadReply if it is no such sum. ``clipped`` counts the numbers out of range in all models.
    """
    numbers = words.view(np.int64)
    examples, clipped, with_loss, losses = map(int, numbers[-BESIDE:])
    low, high = (int(end(numbers[:-BESIDE], initial=0)) for end in (np.min, np.max))
    most = examples * LIMIT + clients / 2
    sound = clients <= examples and most < 2**63 and 0 <= with_loss <= examples and clipped >= 0
    if not sound or max(high, -low, abs(losses)) > most:
        raise BadReply("range", f"{examples} examples and {low} ... {high} are no sums of models")
    mean, start = {}, 0
    for name, old in model.items():
        total = numbers[start : start + old.size].reshape(old.shape)
        start += old.size
        if old.dtype.kind in "iu":  # as a shift of an even number: see fedntk.ntk.averages
            remainder = old % 2
            shift = np.rint(total / examples + remainder).astype(np.int64)
            mean[name] = np.asarray(np.add(old - remainder, shift.astype(old.dtype)))
        elif total.any() and old.dtype.kind in "bf":
            with np.errstate(invalid="ignore"):
                new = np.asarray(old + total * (_step(old) / examples))
            mean[name] = put_back(new, old, total == 0)
        else:
            mean[name] = np.array(old)
        if name.endswith("running_var"):  # rounding may leave a mean of zeros below 0
            mean[name] = np.maximum(mean[name], 0.0)
    loss = {"train-loss": losses * STEP / with_loss} if with_loss else {}
    return mean, {"num-examples": examples, "clipped": clipped, **loss}


def average_digest(model: Arrays, run_key: str, server_round: int) -> bytes:
    """Return a checksum, 16 bytes, of what all clients of a sum must be sent alike."""
    digest = blake2b(f"{run_key} {server_round}".encode(), digest_size=16)
    for name, array in model.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _step(array: NDArray[Any]) -> float:
    return STEP if np.issubdtype(array.dtype, np.floating) else 1.0
