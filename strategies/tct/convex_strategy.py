"""What TCT's phases share: its options, its state, and what clients are sent in stage 2."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import Normaliser, TCTModel
from fedntk.ntk.convex.pooled_statistics import NormalEquations, normaliser_of
from fedntk.ntk.features.fixed_point import MOST_BITS
from fedntk.ntk.options import argument, option, refuse_first, state
from fedntk.ntk.payloads.compression import UNQUANTISED, check_compression
from fedntk.ntk.payloads.convex_task import ConvexOptions, MessageTask, Step
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumFormat
from fedntk.ntk.support.arrays import ArrayDict

from ..core.feature_sums import SumsStrategy
from ..core.registry import SentParts
from .control import ControlVariate

LINEAR, MEAN, SCALE = TCTModel.ARRAYS
PARTS = {"normaliser": (MEAN, SCALE), "linear": (LINEAR,)}  # records beside the network
OF_STATISTICS = (
    "auto_ridge", "balanced", "validation_share", "keep_sums", "secure_aggregation", "validation"
)  # fmt: skip


class ConvexStrategy(ConvexOptions, SumsStrategy):
    """A strategy on a linear model of a network's features, from clients that keep these.

    Attributes
    ----------
    width, shape : int, tuple of int
        Number of features p, and the shape (p, C) of the linear model, with the bias if any.
    """

    network: nn.Module = argument("the clients' architecture; its weights do not matter")
    bootstrap: Strategy | None = argument(
        "Flower strategy of stage 1 with one set of weights as replies, which chooses among the "
        "nodes that this strategy samples. None: stage 2 begins with the initial weights, such as "
        "those of a pre-trained network",
        default=None,
    )
    bootstrap_rounds: int = option(
        "T_1, rounds of the bootstrap; without one there are none", default=100, at_least=0
    )
    normalise: bool = option("whether features get mean 0 and variance 1", default=True)
    linear_rounds: int = state(int)  # rounds so far that changed the linear model
    class_weights: NDArray[Any] = state(lambda: np.ones(0))  # (C,), float64; empty before counts
    control: ControlVariate = state(ControlVariate)
    sent: SentParts = state(SentParts)

    def __post_init__(self) -> None:
        super().__post_init__()
        _, last = self.feature_map.last_layer(self.network)
        self.width = self.feature_map.width(self.network)
        self.shape = (self.width + self.bias, last.out_features)
        self.check_validation()

    def check(self) -> None:
        """Refuse what does not go with the way in which the problem is solved."""
        super().check()
        check_compression(self.sparsity, self.bits)
        _ = self.feature_map  # has rules of its own
        solve, quantised = f"solve = {self.solve}", self.bits != UNQUANTISED
        sums, steps = self.solve == "statistics", f"2 ... {MOST_BITS}"
        misplaced = [name for name in OF_STATISTICS if not sums and getattr(self, name)]
        rules = {
            f"loss: expected mse for {solve}, got {self.loss}": (
                self.solve != "clients" and self.loss != "mse"
            ),
            f"sparsity, bits: go with solve = server, got {solve}": (
                self.solve == "clients" and (self.sparsity or quantised)
            ),
            f"{', '.join(misplaced)}: goes with solve = statistics, got {solve}": misplaced,
            f"sparsity: expected 0 for {solve}, got {self.sparsity}": sums and self.sparsity,
            f"bits: expected {steps}, or {UNQUANTISED}, got {self.bits}, with {solve}": (
                sums and quantised and not 2 <= self.bits <= MOST_BITS
            ),
            "balanced: sums of weighted examples are no whole numbers; expected bits = "
            f"{UNQUANTISED}, got {self.bits}": self.balanced and quantised,
            f"defence: expected none for {solve}, got {self.defence}": (
                self.solve != "clients" and self.defence != "none"
            ),
            "keep_sums: expected balanced = False, as its weights come from all clients' counts, "
            "got True": self.balanced and self.keep_sums,
        }
        refuse_first(rules)

    @classmethod
    def validated(cls, options: Any) -> str:
        """Add whole numbers, whose steps the server chooses by its examples."""
        whole = options.solve == "statistics" and options.bits != UNQUANTISED
        return "bits" if whole else super().validated(options)

    @property
    def sum_format(self) -> SumFormat:
        """What all clients' sums have to be."""
        weights = self.class_weights if self.balanced else None
        return SumFormat(self.width, self.shape[1], weights, self.fixed_point)

    def normal_equations(
        self, sums: FeatureStatistics, normaliser: Normaliser | None = None
    ) -> tuple[Normaliser, NormalEquations]:
        """Return the problem of normalised features, with the normaliser given or the sums' own."""
        if normaliser is None:
            identity = Normaliser.identity(self.width)
            normaliser = normaliser_of(sums) if self.normalise else identity
        return normaliser, NormalEquations.of(sums, normaliser, bias=self.bias, free_bias=True)

    def task_message(
        self,
        step: Step,
        parts: Iterable[str],
        arrays: ArrayRecord,
        config: ConfigRecord,
        **task: Any,
    ) -> RecordDict:
        """Return a MessageTask and some parts of the arrays.

        Each part, ``"network"``, ``"normaliser"`` or ``"linear"``, is a record of that name.
        """
        key = self.network_key(arrays)
        asked = MessageTask(step=step, network_key=key, run_key=self.run_key, **task)
        content = RecordDict({self.configrecord_key: ConfigRecord({**config, **asked.to_config()})})
        for part in parts:
            names = PARTS.get(part, tuple(self.network.state_dict()))
            content[part] = ArrayRecord({name: arrays[name] for name in names})
        return content

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays without the linear model and the normaliser."""
        own = {name: array for name, array in arrays.items() if name not in TCTModel.ARRAYS}
        return ArrayRecord(own)

    @staticmethod
    def arrays_of(normaliser: Normaliser, linear: NDArray[Any] | None = None) -> ArrayDict:
        """Return the arrays of a normaliser and a linear model, if there is one, by name."""
        own = {MEAN: normaliser.mean, SCALE: normaliser.inv_std}
        return own if linear is None else {LINEAR: linear, **own}
