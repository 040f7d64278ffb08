"""What clients share that add up features: sums in the clear, or masked so that only a total opens.

What such a client gives away: sums over all of its examples. Those of one example are its features,
and those of few hold them. The number of examples of each class is among the sums.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk.features import FixedPoint
from fedntk.ntk.options import argument
from fedntk.ntk.payloads import (
    UNQUANTISED,
    FeatureStatistics,
    SplitStatistics,
    draw_held_out,
    sums_digest,
)
from fedntk.trust import ParcelKeys

from .adapter import CLIENT_ID
from .base import ModelClient
from .disk_store import cache_dir, client_folder, remove_stale
from .secure_sum import SecureSum, load_or_draw_key

Arrays = Mapping[str, NDArray[Any]]
Sums = FeatureStatistics | SplitStatistics


class SumsClient(ModelClient):
    """A client that adds up features, and can mask the sums."""

    cache_name: ClassVar[str] = "sums"  # of the default folder

    cache: Path | str | None = argument(
        "folder for what a client keeps, with a folder for each run and client in it; one in "
        "fedntk in $XDG_CACHE_HOME or ~/.cache by default",
        default=None,
    )
    parcel_keys: ParcelKeys | None = argument(
        "the client's key pair for secure_aggregation, and who vouches for the others' public "
        "keys; by default it draws a key for the run, and keeps it beside the cache's folders",
        default=None,
    )
    only_masked: bool = argument(
        "whether the client sends nothing about its features except masked sums: no other sums, "
        "moments, counts or features, and no model from which they could be computed. Nor does it "
        "evaluate such models on its training examples",
        default=False,
    )

    def folder(self, task: Any, config: Mapping[str, Any], ending: str = "") -> Path:
        """Return the folder of what this client keeps in a run; with a new one stale ones go.

        Its name has the client's id in the federation, or its seed if the message does not come
        through :func:`~fedntk.clients.client_app`.
        """
        cache = cache_dir() / self.cache_name if self.cache is None else Path(self.cache)
        folder = client_folder(cache, task.run_key, self._name(config) + ending)
        if not folder.exists():
            remove_stale(folder)
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _name(self, config: Mapping[str, Any]) -> str:
        return str(config.get(CLIENT_ID, "-".join(map(str, self.seed))))

    def require_masked(self, step: str, masked: Iterable[str]) -> None:
        """Refuse a step that is none of a secure sum, if the client sends only masked sums."""
        if self.only_masked and step not in masked:
            raise ValueError(
                f"this client sends only masked sums, and was asked for {step}; have the "
                "strategy set secure_aggregation, or make the client without only_masked"
            )

    def refuse_evaluation(self, *, private: bool = False) -> None:
        """Refuse to evaluate on the examples of the sums, if those are masked or `private`."""
        if (self.only_masked or private) and self.test_inputs is self.inputs:
            raise ValueError(
                "this client sends only masked or noisy sums, and losses of models on its training "
                "examples would reveal its sums; give it examples for evaluation (x_test, "
                "y_test), or set fraction_evaluate = 0"
            )

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

    def answer_sum(self, task: Any, records: Mapping[str, Arrays], config: Any) -> Arrays:
        """Return what a secure sum needs before and after the numbers themselves."""
        own = self._secure_sum(task, config)
        if task.step == "public-key":
            return own.public_key()
        answers = {"shares": own.shares, "confirm": own.confirm, "reveal": own.reveal}
        return answers[task.step](records["secure-sum"])

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
        return {"masked": self._secure_sum(task, config).mask(message, words, about)}

    def _secure_sum(self, task: Any, config: Mapping[str, Any]) -> SecureSum:
        folder = self.folder(task, config, "-secure")
        return SecureSum(folder, self.parcel_keys or ParcelKeys(load_or_draw_key(folder)))


def fixed_point_in(records: Mapping[str, Arrays], bits: int, width: int) -> FixedPoint | None:
    """Return how features are rounded, by the one array of the record "steps"; None if not."""
    if bits == UNQUANTISED:
        return None
    (step,) = records["steps"].values()
    return FixedPoint.from_arrays(step, bits, width)
