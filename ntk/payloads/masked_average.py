"""Whole numbers of which a server needs only the sum, to average models: what clients mask.

For each number of the model w, client k with n_k examples and new weights w_k sends

    q_k = rint(n_k clip(w_k - w, -R, R) / s),  so that  w + s (sum_k q_k) / (sum_k n_k)

is FedAvg's mean, with range R and step s. If nothing is clipped, the K roundings move it by at most
K s / (2 sum_k n_k), before it is rounded to the model's dtype. Arrays of whole numbers, such as
BatchNorm's counts of batches, have the step 1 and the range R / s. Beside these go n_k, how many
numbers were clipped, and the training loss: the server learns only the sums of them, too.

The masks are those of Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine
Learning*, CCS 2017, which add up modulo 2^32 or 2^64: see :mod:`fedntk.trust.secure_sum`.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import BadReply
from ..options import Declared, option, shared
from .feature_statistics import SumStep

Arrays = Mapping[str, NDArray[Any]]
EXACT = 2**53  # whole numbers up to it are float64's


class AverageOptions(Declared):
    """Options of averages that are taken from masked sums."""

    secure_range: float = option(
        "R: largest change of a weight in a round, for secure_aggregation; a client clips larger "
        "ones, and the metric clipped counts them",
        default=16.0,
        above=0,
    )
    secure_step: float = option(
        "s: step of the changes times the number of examples, for secure_aggregation. Words have "
        "32 bits if K clients with max_examples n and K n R / s < 2^31 take part, else 64",
        default=2.0**-20,
        above=0,
    )


class SummedModels(NamedTuple):
    """What the sum over some clients tells."""

    mean: dict[str, NDArray[np.float64]]  # of the models, by examples
    num_examples: int
    clipped: int  # numbers out of range, in all clients' models
    train_loss: float | None  # mean over the examples of those who told one


class AverageTask(Declared):
    """What one message asks of a client whose weights are averaged under masks."""

    # numbers beside the model's: examples, clipped, examples with a loss, their losses
    BESIDE: ClassVar = 4

    masked_step: SumStep = shared("exchange of the secure sum", default="public-key")
    run_key: str = shared("name of the training run, for what a client keeps", default="")
    most_examples: int = shared("largest number of examples of a client", default=1)
    secure_range: float = AverageOptions.options()["secure_range"].field(to_clients=True)
    secure_step: float = AverageOptions.options()["secure_step"].field(to_clients=True)

    @classmethod
    def of_message(cls, config: Any) -> Self | None:
        """Read a message's configuration; None if it asks for no masked weights."""
        return cls.from_config(config) if "option-masked-step" in config else None

    def check(self) -> None:
        """Refuse numbers that float64 does not hold exactly."""
        if not self.secure_step <= self.secure_range <= EXACT * self._unit:
            raise ValueError(
                "secure_range: expected a range R and a step s = secure_step with 1 <= R / s and "
                f"n R / s <= 2^53, with n = max_examples = {self.most_examples}; got R = "
                f"{self.secure_range:g} and s = {self.secure_step:g}"
            )

    @property
    def _unit(self) -> float:
        return self.secure_step / self.most_examples

    def word_dtype(self, clients: int, size: int) -> np.dtype[Any]:
        """Return the words that hold all sums over so many clients' models of `size` numbers."""
        largest = clients * max(self.secure_range / self._unit + 1, size)
        if largest >= 2**63:
            raise ValueError(f"secure_range: the sums of {clients} clients exceed 64 bits; lower it")
        return np.dtype(np.uint32 if largest < 2**31 else np.uint64)

    def encode(
        self, model: Arrays, own: Arrays, num_examples: int, loss: float | None, dtype: Any
    ) -> NDArray[Any]:
        """Return a client's words, before masks: shape (P + 4,), for P numbers of the model.

        ValueError if there are too many examples, or weights of another model, or not finite.
        """
        if not 1 <= num_examples <= self.most_examples:
            raise ValueError(
                f"num-examples: expected 1 ... {self.most_examples}, the strategy's max_examples, "
                f"got {num_examples}"
            )
        limit, clipped = self.secure_range / self.secure_step, 0
        parts = []
        for name, old in model.items():
            new = own.get(name)
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError(f"weights: {name!r} is missing, or not as it was received")
            if not np.isfinite(new).all():
                raise ValueError(
                    f"weights: expected finite numbers, got others in {name!r}; lower the learning "
                    "rate"
                )
            steps = (new.astype(np.float64) - old) / self._step(old)
            clipped += int((np.abs(steps) > limit).sum())
            parts.append(np.rint(num_examples * steps.clip(-limit, limit)).ravel())
        told = 0 if loss is None else num_examples
        losses = np.rint(told * np.clip((loss or 0.0) / self.secure_step, -limit, limit))
        parts.append(np.array([num_examples, clipped, told, losses]))
        return np.concatenate(parts).astype(np.int64).astype(dtype)

    def decode(self, words: NDArray[Any], model: Arrays, clients: int) -> SummedModels:
        """Return what the sum of so many clients' words tells; BadReply if it is no such sum."""
        numbers = words.view(np.dtype(f"i{words.itemsize}"))
        examples, clipped, told, losses = map(int, numbers[-self.BESIDE :])
        if not clients <= examples <= clients * self.most_examples:
            raise BadReply("num-examples", f"{examples} examples of {clients} clients")
        low, high = int(numbers[: -self.BESIDE].min(initial=0)), int(numbers[: -self.BESIDE].max(initial=0))
        most = examples * self.secure_range / self.secure_step + clients / 2
        sound = 0 <= told <= examples and 0 <= clipped <= clients * len(numbers)
        if max(high, -low, abs(losses)) > most or not sound:
            raise BadReply("range", f"expected sums of {-most:g} ... {most:g}, got {low} ... {high}")
        mean, start = {}, 0
        for name, old in model.items():
            own = numbers[start : start + old.size].reshape(old.shape)
            start += old.size
            mean[name] = old + own * (self._step(old) / examples)
            if name.endswith("running_var"):  # rounding may leave a mean of zeros below 0
                mean[name] = np.maximum(mean[name], 0.0)
        train_loss = losses * self.secure_step / told if told else None
        return SummedModels(mean, examples, clipped, train_loss)

    def digest(self, model: Arrays, server_round: int, dtype: Any) -> bytes:
        """Return a checksum, 16 bytes, of all on which a client's words depend but its data."""
        told = (self.run_key, server_round, self.most_examples, self.secure_range, self.secure_step)
        digest = blake2b(f"{told} {np.dtype(dtype)}".encode(), digest_size=16)
        for name, array in model.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()

    def _step(self, array: NDArray[Any]) -> float:
        return self.secure_step if np.issubdtype(array.dtype, np.floating) else 1.0
