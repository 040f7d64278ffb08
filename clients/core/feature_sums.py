"""What clients share that add up features: sums in the clear, or masked so that only a total opens.

What such a client gives away: sums over all of its examples. Those of one example are its features,
and those of few hold them. The number of examples of each class is among the sums.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.features.target_columns import num_columns, with_targets
from fedntk.ntk.options import Declared, part
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, sums_digest
from fedntk.ntk.payloads.split_statistics import SplitStatistics, draw_held_out
from fedntk.ntk.payloads.sum_task import NoiseOptions

from .base import PROMISED, ModelClient, answer_step
from .disk_store import client_name
from .privacy_ledger import Release
from .secure_sum import Arrays, MaskedSums, SumRequest
from .weights import Config, Fit, NamedArrays, Parameters, set_weights

Sums = FeatureStatistics | SplitStatistics
Records = dict[str, Arrays]
BESIDE = (wire.STEPS, wire.SECURE_SUM, wire.TOTAL)  # records beside the network's


class SumsClient(ModelClient):
    """A client that adds up features in ``step_masked``; `secure` answers the steps beside it."""

    task_kind: ClassVar[type[Declared]]  # of what its strategy asks for

    secure: MaskedSums = part("its share in secure sums", default=MaskedSums)

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Answer a training message: see :meth:`ModelClient.fit`."""
        step = self.step_in(config)
        if not self.secure.answers(step):
            return answer_step(self, step, parameters, config)
        task = self.task_kind.from_config(config)
        message = getattr(parameters, "records", {}).get(wire.SECURE_SUM, {})
        arrays = self.secure.answer(step, self.sum_request(task, config), message)
        return NamedArrays({"arrays": arrays}), self.reported_examples(task), {}

    def load_network(self, parameters: Parameters) -> tuple[Parameters, Records]:
        """Load received weights; return them, and the records that came beside them."""
        records = dict(getattr(parameters, "records", {}))
        beside = {name: records.pop(name, {}) for name in BESIDE}
        named = [array for record in records.values() for array in record.values()]
        weights = named or parameters
        set_weights(self.model, weights)
        return weights, beside

    @property
    def is_private(self) -> bool:
        """Whether the client sends only masked sums, or is private for another reason."""
        return self.secure.is_private or PROMISED.get()

    @abstractmethod
    def reported_examples(self, task: Any) -> int:
        """Return the number of examples that a reply states."""

    def sum_request(self, task: Any, config: Mapping[str, Any]) -> SumRequest:
        """Return what a message asks of this client: noise of a client is of all its examples."""
        release = Release(task.run_key[:64])
        examples = None if self.secure.privacy is None else self.inputs
        if isinstance(task, NoiseOptions):
            if task.epsilon:
                release = release._replace(epsilon=task.epsilon, delta=task.delta)
            examples = None if task.client_examples else examples
        return SumRequest(task, client_name(config, self.seed), release, examples)

    def add_up(
        self,
        features: Callable[[Tensor | slice], Iterable[Tensor]],
        targets: Tensor,
        width: int,
        *,
        share: float = 0.0,
        weights: NDArray[Any] | None = None,
        fixed_point: FixedPoint | None = None,
        as_root: bool = False,
    ) -> Sums:
        """Return sums over examples with targets (n, C); with a share, in two parts.

        Real targets are columns beside the features, of examples that are all of one class.
        `features` makes the features (m, `width`) of the examples chosen, in chunks. `share` is
        that of the examples which are held out. `weights` are of classes. `as_root`: see
        :meth:`.FeatureStatistics.of`.
        """

        def sums(chosen: Tensor | slice = slice(None)) -> FeatureStatistics:
            y = targets[chosen]
            chunks = features(chosen) if len(y) else [torch.empty(0, width)]
            if self.real_targets:
                chunks = with_targets(chunks, y, fixed_point)
            classes = 1 if self.real_targets else targets.shape[1]
            how: Any = {"weights": weights, "fixed_point": fixed_point, "as_root": as_root}
            return FeatureStatistics.of(chunks, self.strata(y), classes, **how)

        if not share:
            return sums()
        held_out = draw_held_out(self.strata(targets), share, [*self.seed, *b"held-out"])
        return SplitStatistics(sums(~held_out), sums(held_out))

    def mask_sums(
        self,
        sums: Sums,
        request: SumRequest,
        message: Arrays,
        *,
        key: str,
        fixed_point: FixedPoint | None,
        weights: NDArray[Any] | None = None,
    ) -> Arrays:
        """Return the masked words of sums; `key` is of the network and the feature map."""
        words = sums.to_words(f"u{int(message['word-bytes'])}")
        about = sums_digest(key, fixed_point, words.dtype, weights)
        return self.secure.mask(words, about, request, message)

    def fixed_point_in(
        self, records: Mapping[str, Arrays], bits: int, width: int
    ) -> FixedPoint | None:
        """Return how p features, and targets beside them, are rounded; None if not."""
        more = num_columns(self.num_outputs, fixed_point=True) if self.real_targets else 0
        return fixed_point_in(records, bits, width + more)


def fixed_point_in(records: Mapping[str, Arrays], bits: int, width: int) -> FixedPoint | None:
    """Return how features are rounded, by the one array of the record "steps"; None if not."""
    if bits == UNQUANTISED:
        return None
    (step,) = records[wire.STEPS].values()
    return FixedPoint.from_arrays(step, bits, width)
