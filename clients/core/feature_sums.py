"""What clients share that add up features: sums in the clear, or masked so that only a total opens.

What such a client gives away: sums over all of its examples. Those of one example are its features,
and those of few hold them. The number of examples of each class is among the sums.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, sums_digest
from fedntk.ntk.payloads.split_statistics import SplitStatistics, draw_held_out

from .base import ModelClient
from .masking import Arrays, Masking
from .privacy_ledger import Release

Sums = FeatureStatistics | SplitStatistics


class SumsClient(Masking, ModelClient):
    """A client that adds up features, and can mask the sums."""

    def release_of(self, task: Any, config: Mapping[str, Any]) -> Release:
        """Return the exact sums of a run."""
        return Release(task.run_key[:64])

    def owned_examples(self, task: Any) -> Any:
        """Return the training examples (n, ...)."""
        return self.inputs

    def add_up(
        self,
        features: Callable[[Tensor | slice], Iterable[Tensor]],
        targets: Tensor,
        width: int,
        *,
        share: float = 0.0,
        weights: NDArray[Any] | None = None,
        fixed_point: FixedPoint | None = None,
    ) -> Sums:
        """Return sums over examples with one-hot targets (n, C); with a share, in two parts.

        `features` makes the features (m, p) of the examples chosen, in chunks; p is `width`.
        `share` is that of the examples which are held out. Features are rounded if there is a fixed
        point, and weighted by class if there are weights.
        """

        def sums(own: Tensor | slice = slice(None)) -> FeatureStatistics:
            labels = targets[own].argmax(1)
            chunks = features(own) if len(labels) else [torch.empty(0, width)]
            return FeatureStatistics.of(
                chunks, labels, targets.shape[1], weights=weights, fixed_point=fixed_point
            )

        if not share:
            return sums()
        held = draw_held_out(targets.argmax(1), share, [*self.seed, *b"held-out"])
        return SplitStatistics(sums(~held), sums(held))

    def mask(
        self,
        sums: Sums,
        task: Any,
        message: Arrays,
        config: Any,
        *,
        key: str,
        fixed_point: FixedPoint | None,
    ) -> Arrays:
        """Return the masked words of sums; `key` is of the network and the feature map."""
        words = sums.to_words(f"u{int(message['word-bytes'])}")
        about = sums_digest(key, fixed_point, words.dtype)
        return self.mask_words(words, about, message, task, config)


def fixed_point_in(records: Mapping[str, Arrays], bits: int, width: int) -> FixedPoint | None:
    """Return how features are rounded, by the one array of the record "steps"; None if not."""
    if bits == UNQUANTISED:
        return None
    (step,) = records["steps"].values()
    return FixedPoint.from_arrays(step, bits, width)
