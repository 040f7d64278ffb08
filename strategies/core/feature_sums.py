"""What strategies share whose clients send sums over features: options, kept sums, secure sums.

Beyond the papers: a model that is a function of sums over the clients is, without a client's sums,
exactly the model of a run that never had that client.
"""

import contextlib
import copy
import functools
import operator
import secrets
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import Normaliser, NotEnoughMemory, require_disk
from fedntk.ntk.convex.pooled_statistics import RIDGES, NormalEquations, best_ridge
from fedntk.ntk.features.fixed_point import MOST_BITS, FixedPoint
from fedntk.ntk.options import argument, option, refuse_first, state
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_statistics import (
    FeatureStatistics,
    SumFormat,
    packed_size,
    sums_digest,
)
from fedntk.ntk.payloads.split_statistics import SplitStatistics
from fedntk.ntk.payloads.sum_task import SumOptions
from fedntk.ntk.predictors.network import load_arrays

from .averaging import named_arrays
from .exchange import logger
from .kept_sums import KeptSums, clients_left
from .lost_state import ResendingStrategy
from .replies import Reply
from .secure_sums import SecureSums, WordFormat

Sums = FeatureStatistics | SplitStatistics
Arrays = dict[str, NDArray[Any]]
CHUNK_BYTES = 128 * 2**20  # of the validation examples' features


class SumsStrategy(SumOptions, ResendingStrategy):
    """A strategy that solves least squares from sums over the clients' features.

    Attributes
    ----------
    summed : tuple of int
        Clients whose kept sums make up the solution.
    steps : ndarray, shape (p,)
        Of fixed-point numbers; empty if features are not rounded.
    secure : SecureSums or None
        The exchanges of a secure sum, if clients mask theirs.
    """

    masks = True

    ridge: float = option(
        "ridge over the mean of the diagonal of Z Z^T; one too small for a Cholesky factor is "
        "raised tenfold",
        default=1e-2,
        above=0,
    )
    auto_ridge: bool = option(
        "whether the ridge is the one of 1e-4 ... 10 with the least squared error on validation "
        "examples, or on what clients hold out (validation_share)",
        default=False,
    )
    keep_sums: str | Path | None = argument(
        "folder on the server's disk in which each client's sums are kept, as many bytes as it "
        "sent, so that `without` can take a client out again; each run has a folder in it, which "
        "nothing removes",
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

    run_key: str = state(lambda: secrets.token_hex(8))  # names the run for the clients' folders
    summed: tuple[int, ...] = state(tuple)
    steps: NDArray[np.float32] = state(lambda: np.zeros(0, np.float32))
    _keyed: tuple[ArrayRecord | None, str] = state(lambda: (None, ""), saved=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.secure = SecureSums(self) if self.secure_aggregation else None

    def check(self) -> None:
        """Refuse what does not go with sums, or with masks."""
        super().check()
        quantised, steps = self.bits != UNQUANTISED, f"2 ... {MOST_BITS}"
        rules = {
            "validation_share: goes with auto_ridge = True, got False": (
                self.validation_share and not self.auto_ridge
            ),
            "secure_aggregation: masks are added to whole numbers; expected bits = "
            f"{steps}, got {self.bits}": self.secure_aggregation and not quantised,
            "secure_aggregation: the server has no client's sums to keep; leave out keep_sums": (
                self.secure_aggregation and self.keep_sums
            ),
        }
        refuse_first(rules)

    @property
    @abstractmethod
    def sum_format(self) -> SumFormat:
        """What all clients' sums have to be."""

    @abstractmethod
    def normal_equations(
        self, sums: FeatureStatistics, normaliser: Normaliser | None = None
    ) -> tuple[Normaliser, NormalEquations]:
        """Return the problem that sums are of, with the normaliser given or one of their own."""

    @abstractmethod
    def solve_again(self, sums: Sums, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays of a run that learned from these sums."""

    # ------------------------------------------------------------------ validation

    @classmethod
    def validated(cls, options: Any) -> str:
        """Return the option for which the server needs validation examples; empty if none does."""
        return "auto_ridge" if options.auto_ridge and not options.validation_share else ""

    def check_validation(self) -> None:
        """Refuse to lack the examples that an option needs, or to have unfit ones.

        The problem's format is known by now.
        """
        if self.validation is None:
            if name := self.validated(self):
                other = ", or set validation_share" if name == "auto_ridge" else ""
                given = f"{name} = {getattr(self, name)}"
                raise ValueError(f"{given}: pass validation, examples on the server{other}")
            return
        if self._seeds is not None:
            raise ValueError("validation: expected no key_server, which projects examples, got one")
        x, labels = self.validation
        if not 0 < len(x) == len(labels):
            raise ValueError(
                f"validation: expected examples and as many labels, got {len(x)} and {len(labels)}"
            )
        low, high = map(int, labels.aminmax())
        last = self.sum_format.num_classes - 1
        if low < 0 or high > last:
            raise ValueError(f"validation: expected labels 0 ... {last}, got {low} ... {high}")

    def validation_features(self, arrays: ArrayRecord) -> tuple[Iterator[Tensor], Tensor]:
        """Return the validation examples' features, some at a time, and their labels."""
        if self.validation is None:
            raise ValueError("validation: expected the server's validation examples, got none")
        x, labels = self.validation
        own: Any = self  # each such strategy has a network and a feature map
        network: nn.Module = copy.deepcopy(own.network)
        load_arrays(network, named_arrays(self.network_of(arrays)))
        extract = own.feature_map.extractor(network.to(self.device))
        size = max(1, CHUNK_BYTES // (4 * self.sum_format.width))
        return map(extract, x.split(size)), labels

    @property
    def fixed_point(self) -> FixedPoint | None:
        """How features are rounded, if they are."""
        return FixedPoint(self.steps, self.bits) if len(self.steps) else None

    def choose_steps(self, arrays: ArrayRecord) -> NDArray[np.float32]:
        """Choose the steps of fixed-point numbers; none if features are not to be rounded.

        They are chosen by the validation examples, or by the largest magnitude of a feature, if the
        network says one; else ValueError.
        """
        if self.bits == UNQUANTISED:
            return np.zeros(0, np.float32)
        if self.validation is not None:
            return FixedPoint.of(next(self.validation_features(arrays)[0]), self.bits).step
        own: Any = self
        if (bound := own.feature_map.bound(own.network)) is None:
            raise ValueError(
                f"bits = {self.bits}: pass validation, examples on the server, or a network with "
                "features of known size before its last layer, such as random Fourier features"
            )
        return FixedPoint.within(bound, self.sum_format.width, self.bits).step

    # ---------------------------------------------------------------- what is sent

    def parse_sums(
        self, arrays: Arrays, num_examples: int | None = None, *, checked: bool = False
    ) -> Sums:
        """Check a client's sums, or read a total of some that were `checked`."""
        expected = self.sum_format._replace(checked=checked)
        return self._kind.from_arrays(arrays, expected, num_examples)

    @property
    def _kind(self) -> type[FeatureStatistics] | type[SplitStatistics]:
        return SplitStatistics if self.validation_share else FeatureStatistics

    def upload_bytes(self) -> int:
        """Most bytes of one client's sums, of at most 133,144 examples if they are integers."""
        width, classes, *_ = self.sum_format
        gram = packed_size(width)
        if self.bits != UNQUANTISED:
            one = 4 * (gram + classes * width)
        else:
            one = 8 * (min(gram, self.max_examples * width) + classes * width)
        return (one + 8 * classes) * (2 if self.validation_share else 1)

    def network_key(self, arrays: ArrayRecord) -> str:
        """Return the key of the network among the arrays, which is computed once for them."""
        own: Any = self
        if arrays is not self._keyed[0]:
            network = [arrays[name].numpy() for name in own.network.state_dict()]
            self._keyed = (arrays, ConvexTask.key_of(own.feature_map, network))
        return self._keyed[1]

    def complete_sum(
        self, secure: SecureSums, replies: Iterable[Message]
    ) -> tuple[Sums | None, list[Reply], Counter[str]]:
        """Go through a secure sum: return it, None if it stays closed, and who is in it.

        `replies` are those with public keys.
        """
        expected, kind = self.sum_format, self._kind
        key = self.network_key(self.global_arrays)

        def format_for(num_examples: int) -> WordFormat:
            dtype = expected.word_dtype(num_examples)
            size = kind.num_words(expected.width, expected.num_classes)
            return WordFormat(size, dtype, sums_digest(key, self.fixed_point, dtype))

        found = self.answers(replies, secure.public_part, MessageType.TRAIN)
        total, last = secure.complete(
            found,
            format_for,
            lambda words, n: kind.from_words(words, expected, None if expected.noisy else n),
        )
        return total, last, found.rejected

    # -------------------------------------------------------------------- what is kept

    @property
    def kept_folder(self) -> Path:
        """Where this run's sums are kept; ValueError if they are not."""
        if self.keep_sums is None:
            raise ValueError("keep_sums: set a folder before the run; no client's sums were kept")
        return Path(self.keep_sums) / f"run-{self.run_key}"

    def kept(self, clients: Sequence[int]) -> KeptSums[Sums]:
        """Return the kept sums of clients."""
        return KeptSums(self.kept_folder, clients, self.parse_sums)

    def require_disk(self, num_clients: int) -> None:
        """Raise NotEnoughMemory if the sums of so many clients could not be kept."""
        require_disk(
            self.upload_bytes() * num_clients,
            f"the sums of {num_clients} clients",
            self.kept_folder,
            cure="lower num_features, or set no keep_sums",
        )

    def keep(self, sums: Mapping[int, Sums]) -> None:
        """Write clients' sums where they are to be kept; a full disk is logged."""
        if self.keep_sums is None:
            return
        kept = self.kept((*self.summed, *sums))
        try:
            self.require_disk(len(sums))
            for client, own in sums.items():
                kept.write(self.server_round, client, own.to_arrays(self.fixed_point))
        except (NotEnoughMemory, OSError) as error:
            logger.warning("the clients' sums are not kept: %s", error)
            with contextlib.suppress(OSError):
                kept.remove(kept)
            self.summed = ()
            return
        self.summed += tuple(sums)

    def kept_without(self, clients: Sequence[int], restored: Sequence[int] = ()) -> KeptSums[Sums]:
        """Return the kept sums of all but some clients.

        Those `restored` are among them, though the solution lacks them.
        """
        folder = self.kept_folder
        if not self.summed:
            raise ValueError(
                f"keep_sums: no sums were kept in {folder} by this run yet; they "
                "come with the round of sums, and the log says if the disk was too small"
            )
        return self.kept(clients_left(sorted({*self.summed, *restored}), clients))

    def without(self, clients: Sequence[int], arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays of the model that never had some clients' examples.

        It is solved anew from the kept sums of the others, one client's in memory at a time, with
        `auto_ridge` with a ridge chosen anew; steps of fixed-point numbers stay. So it has the bits
        of a run that never had these clients, on the same network and machine, if the server
        accepts the same replies.

        Parameters
        ----------
        clients : sequence of int
            Ids: partitions, if nodes report them. With no id it is the same model again.
        arrays : ArrayRecord
            Result of :meth:`start`, of this object or of one whose state this one has loaded.
        """
        return self.solve_again(add_up(self.kept_without(clients).values()), arrays)

    def forget_kept(self, clients: Sequence[int]) -> None:
        """Remove kept sums of some clients, which `without` must leave out from then on."""
        if self.keep_sums is not None:
            self.kept(clients).remove(clients)

    # ------------------------------------------------------------------------ solution

    def solve_sums(
        self, sums: Sums, arrays: ArrayRecord
    ) -> tuple[Normaliser, NDArray[np.float32], float]:
        """Return the normaliser, the linear model (q, C) of the sums over all, and its ridge.

        `arrays` are those of the network.
        """
        if self.fixed_point is not None:
            sums = sums.scaled(self.fixed_point)
        ridge = self.ridge
        if isinstance(sums, SplitStatistics):
            ridge, sums = self._ridge_of_held_out(sums), sums.everyone
        normaliser, equations = self.normal_equations(sums)
        if self.auto_ridge and not self.validation_share:
            features, labels = self.validation_features(arrays)
            _, classes, weights, *_ = self.sum_format
            held = FeatureStatistics.of(features, labels, classes, weights=weights)
            ridge = best_ridge(equations, self.normal_equations(held, normaliser)[1])
        linear, ridge = ridge_solution(equations, ridge)
        return normaliser, linear, ridge

    def _ridge_of_held_out(self, sums: SplitStatistics) -> float:
        """Choose the ridge on held-out examples; the normaliser is from the others as well."""
        if not (sums.fitting.num_examples and sums.held_out.num_examples):
            raise ValueError(
                f"validation_share: {sums.held_out.num_examples} examples are held out and "
                f"{sums.fitting.num_examples} are not; expected some of both"
            )
        normaliser, equations = self.normal_equations(sums.fitting)
        return best_ridge(equations, self.normal_equations(sums.held_out, normaliser)[1])


def ridge_solution(equations: NormalEquations, ridge: float) -> tuple[NDArray[np.float32], float]:
    """Return the linear model and its ridge, raised tenfold while it is too small."""
    try:
        linear = equations.solve(ridge).float()
    except ValueError as error:
        if ridge >= RIDGES[-1]:
            raise
        logger.warning("%s: it is raised to %g", error, 10 * ridge)
        return ridge_solution(equations, 10 * ridge)
    if not bool(linear.isfinite().all()):
        raise ArithmeticError("the solution is not finite")
    return linear.numpy(), ridge


def add_up(sums: Iterable[Sums]) -> Sums:
    """Add up one or more sums, one after the other."""
    return functools.reduce(operator.add, sums)
