"""What a decentralised client keeps: weights by round, and what it has done within a round."""

import os
from collections.abc import Mapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
from torch import nn

from fedntk.ntk.first_weights import draw_weights
from fedntk.ntk.payloads import wire
from fedntk.ntk.support.arrays import ArrayDict, Arrays
from fedntk.ntk.support.shared_arrays import unify

from ..core.disk_store import PersonalStore
from ..core.weights import get_weights

logger = getLogger("flwr")


class RelayMemory:
    """What a client keeps of a run; `seed` draws first weights unless all begin with the same."""

    def __init__(
        self,
        cache: str | os.PathLike[str] | None,
        model: nn.Module,
        seed: Sequence[int],
        config: Mapping[str, Any],
        *,
        same_weights: bool,
    ) -> None:
        self.cache, self.model, self.seed, self.config = cache, model, seed, config
        self.same_weights = same_weights
        self.round = int(config.get("server-round", 0))
        self.counted = int(config.get(wire.ROUND, 0))

    def store(self, what: str = "") -> PersonalStore:
        """Return the folder of the client's weights, or of something else that it keeps."""
        return PersonalStore(self.cache, self.config, self.seed, what)

    def keep_first(self, parameters: Sequence[Any]) -> None:
        """Keep first weights, which come once; after round 1 they are the newest mean model."""
        first = dict(getattr(parameters, "records", {}).get("arrays", {}))
        if not first or self.counted:
            return
        if not self._of_network(first):
            raise ValueError(f"arrays: expected those of the network, got {sorted(first)[:5]}")
        self.store().save(0, first if self.round > 1 else self._draw_first(first))

    def current(self) -> tuple[ArrayDict, bool]:
        """Return the weights, and whether they are lost: then the first ones, or the model's."""
        if weights := self._of_network(self.store().load(self.counted)):
            return weights, False
        if not self.counted:
            raise ValueError(
                f"{self.store().folder}: the first weights of this run are lost; the strategy "
                "sends them again"
            )
        logger.warning("a client lost its weights, and begins with the first ones again")
        if first := self._of_network(self.store().load(0)):
            return first, True
        return self._draw_first(
            dict(zip(self.model.state_dict(), get_weights(self.model), strict=True))
        ), True

    def _draw_first(self, weights: ArrayDict) -> ArrayDict:
        if self.same_weights:
            return weights
        generator = np.random.default_rng([*self.seed, *b"first-weights"])
        return unify(self.model, draw_weights(weights, "he", generator))

    def _of_network(self, arrays: ArrayDict | None) -> ArrayDict:
        """Return the network's arrays among others, in its order; empty if some are missing."""
        names = list(self.model.state_dict())
        return {n: arrays[n] for n in names} if arrays and arrays.keys() >= set(names) else {}

    def keep(self, weights: Arrays) -> None:
        """Keep the current round's weights, and those that count until that round does."""
        self.store().save(self.round, weights, needed=self.counted)

    def keep_within(self, part: str, arrays: Mapping[str, Any]) -> None:
        """Keep a part of the round's work: ``weights``, ``metrics``, or the weights ``before``."""
        self._within(part).save(self.round, arrays)

    def keep_before(self, weights: Arrays) -> None:
        """Keep weights from before the last thing done in a round, for evaluation."""
        if self.config.get(wire.KEEP_BOTH):
            self.keep_within(wire.BEFORE, weights)

    def before(self) -> ArrayDict:
        """Return those weights; empty if the client took no part in the round that counts."""
        if not self.config.get(wire.KEEP_BOTH) or self.counted != self.round:
            return {}
        return self._of_network(self._within(wire.BEFORE).load(self.round))

    def metrics_within(self) -> dict[str, Any]:
        """Return the metrics that were kept in earlier steps of the round, if any."""
        metrics = self._within("metrics").load(self.round) or {}
        return {name: array.item() for name, array in metrics.items()}

    def weights_within(self) -> ArrayDict:
        """Return the weights that were kept in earlier steps of the round."""
        weights = self._of_network(self._within("weights").load(self.round))
        if not weights:
            raise ValueError(
                f"{self.store().folder}: the weights of this round are lost; the client goes on "
                "with the next round"
            )
        return weights

    def _within(self, part: str) -> PersonalStore:
        return self.store(f"-{part}-within-round")
