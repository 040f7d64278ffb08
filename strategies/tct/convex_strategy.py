"""What TCT's phases share: its options, its state, and what clients are sent in stage 2."""

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import Normaliser, TCTModel
from fedntk.ntk.features.fixed_point import MOST_BITS
from fedntk.ntk.options import argument, option, state
from fedntk.ntk.payloads import (
    UNQUANTISED,
    ConvexOptions,
    ConvexTask,
    MessageTask,
    check_compression,
)
from fedntk.ntk.payloads.convex_task import Step

from ..core.lost_state import ResendingStrategy
from ..core.registry import SentParts
from ..core.trust_protocols import VouchesForKeys
from .control import ControlVariate
from .kept_sums import KeptSums

LINEAR, MEAN, SCALE = TCTModel.ARRAYS
PARTS = {"normaliser": (MEAN, SCALE), "linear": (LINEAR,)}  # records beside the network
OF_STATISTICS = (
    "auto_ridge", "balanced", "validation_share", "keep_sums", "secure_aggregation", "validation"
)  # fmt: skip


class ConvexStrategy(ConvexOptions, ResendingStrategy):
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
    ridge: float = option(
        "ridge of solve = server and statistics, over the mean of the diagonal; one too small for "
        "a Cholesky factor is raised tenfold: see fedntk.ntk.ridge_regression",
        default=1e-2,
        above=0,
    )
    auto_ridge: bool = option(
        "for solve = statistics: the ridge of 1e-4 ... 10 with the least squared error on "
        "validation examples, or on what clients hold out (validation_share)",
        default=False,
    )
    secure_aggregation: bool = option(
        "for solve = statistics with bits = 2 ... 8: clients mask their sums, and the server "
        "learns only the sum over all of them (Bonawitz et al., CCS 2017), the same to the bit; "
        "four more exchanges in the round, and at least three clients",
        default=False,
    )
    secure_threshold: float = option(
        "share of the clients who must stay to the end of that", default=2 / 3, above=0.5, at_most=1
    )
    vouching: VouchesForKeys | None = argument(
        "vouches for the clients' public keys in the run `run`, such as fedntk.trust.KeyServer; "
        "without it a server that breaks the protocol could name keys of its own for the clients",
        default=None,
    )
    keep_sums: str | Path | None = argument(
        "for solve = statistics: folder on the server's disk in which each client's sums are "
        "kept, as many bytes as it sent, so that `without` can take a client out again; each run "
        "has a folder in it, which nothing removes",
        default=None,
    )
    validation: tuple[Tensor, Tensor] | None = argument(
        "examples x (m, ...) on the server, as the network takes them, that nobody trains on, and "
        "their labels (m,), int64: for auto_ridge, and for bits, which uses only x",
        default=None,
    )
    device: torch.device | str = argument(
        "where the server solves from features, and computes features of validation examples; it "
        "solves from sums on the CPU",
        default="cpu",
    )

    linear_rounds: int = state(int)  # rounds so far that changed the linear model
    run_key: str = state(lambda: secrets.token_hex(8))  # names the run for the clients' folders
    class_weights: NDArray[Any] = state(lambda: np.ones(0))  # (C,), float64; empty before counts
    summed: tuple[int, ...] = state(tuple)  # clients whose kept sums make up the linear model
    control: ControlVariate = state(ControlVariate)
    sent: SentParts = state(SentParts)

    def __post_init__(self) -> None:
        super().__post_init__()
        _, last = self.feature_map.last_layer(self.network)
        self.width = self.feature_map.width(self.network)
        self.shape = (self.width + self.bias, last.out_features)
        self.kept_sums = None if self.keep_sums is None else KeptSums(Path(self.keep_sums))
        self._check_validation()

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
            "keep_sums: expected balanced = False, as its weights come from all clients' counts, "
            "got True": self.balanced and self.keep_sums,
            "validation_share: goes with auto_ridge = True, got False": (
                self.validation_share and not self.auto_ridge
            ),
            "secure_aggregation: masks are added to whole numbers; expected bits = "
            f"{steps}, got {self.bits}": self.secure_aggregation and not quantised,
            "secure_aggregation: the server has no client's sums to keep, nor of what clients hold "
            "out; leave out keep_sums and validation_share": (
                self.secure_aggregation and (self.keep_sums or self.validation_share)
            ),
            "vouching: expected secure_aggregation = True and the name of the run, run=..., as "
            "clients have it": self.vouching and not (self.secure_aggregation and self.run),
        }
        if broken := next((said for said, found in rules.items() if found), ""):
            raise ValueError(broken)

    @staticmethod
    def validated(options: Any) -> str:
        """Return the option for which the server needs validation examples; empty if none does."""
        if options.solve == "statistics" and options.bits != UNQUANTISED:
            return "bits"
        return "auto_ridge" if options.auto_ridge and not options.validation_share else ""

    def _check_validation(self) -> None:
        if self.validation is None:
            if name := self.validated(self):
                value = getattr(self, name)
                raise ValueError(f"{name} = {value}: pass validation, examples on the server")
            return
        if self._seeds is not None:
            raise ValueError("validation: expected no key_server, which projects examples, got one")
        x, labels = self.validation
        if not 0 < len(x) == len(labels):
            raise ValueError(
                f"validation: expected examples and as many labels, got {len(x)} and {len(labels)}"
            )
        low, high, last = *map(int, labels.aminmax()), self.shape[1] - 1
        if low < 0 or high > last:
            raise ValueError(f"validation: expected labels 0 ... {last}, got {low} ... {high}")

    def task_message(
        self,
        step: Step,
        parts: Iterable[str],
        arrays: ArrayRecord,
        config: ConfigRecord,
        **task: Any,
    ) -> RecordDict:
        """Return a :class:`~fedntk.ntk.payloads.MessageTask` and some parts of the arrays.

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
    def arrays_of(
        normaliser: Normaliser, linear: NDArray[Any] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the arrays of a normaliser and a linear model, if there is one, by name."""
        own = {MEAN: normaliser.mean, SCALE: normaliser.inv_std}
        return own if linear is None else {LINEAR: linear, **own}

    def network_key(self, arrays: ArrayRecord) -> str:
        """Return the key of the network among the arrays, which is computed once for them."""
        if arrays is not self._keyed[0]:
            network = [arrays[name].numpy() for name in self.network.state_dict()]
            self._keyed = (arrays, ConvexTask.key_of(self.feature_map, network))
        return self._keyed[1]

    _keyed: tuple[ArrayRecord | None, str] = state(lambda: (None, ""), saved=False)
