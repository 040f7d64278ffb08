"""Least squares from sums over clients' features: their options, their checks, their solution.

Beyond the papers: sums of whole numbers have the same bits for every split and order of the
examples; the ridge is chosen on examples that clients hold out, whose sums travel beside the
others'; and sums may be masked.
"""

import copy
import functools
import math
import operator
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import FeatureMap, Normaliser, require_memory
from fedntk.ntk.convex.pooled_statistics import RIDGES, NormalEquations, best_ridge
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.features.target_columns import FEWEST_BITS, num_columns, target_steps, with_targets
from fedntk.ntk.options import argument, option, state
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_statistics import (
    FEWER,
    FeatureStatistics,
    SumFormat,
    SumStep,
    packed_size,
    sums_digest,
)
from fedntk.ntk.payloads.split_statistics import SplitStatistics
from fedntk.ntk.payloads.sum_task import SumOptions
from fedntk.ntk.predictors.network import load_arrays
from fedntk.ntk.predictors.targets import real_targets

from .averaging import named_arrays
from .secure import SumPlan, WordFormat

logger = getLogger("flwr")
Sums = FeatureStatistics | SplitStatistics
Solution = tuple[Normaliser, NDArray[np.float32], float]  # linear model (q, C), and its ridge
CHUNK_BYTES = 128 * 2**20  # of the validation examples' features


@dataclass(frozen=True)
class SumsProblem:
    """The problem of which sums are: what a strategy says of it once, when it is made."""

    network: nn.Module  # the clients' architecture
    feature_map: FeatureMap
    num_classes: int
    max_examples: int  # of a client
    # sums over some examples, normaliser or None -> that normaliser, or one of the sums' own, and
    # the normal equations of features that it normalises
    equations: Callable[[FeatureStatistics, Normaliser | None], tuple[Normaliser, NormalEquations]]
    weights: Callable[[], NDArray[np.float64] | None] = lambda: None  # of classes (C,); None: 1
    noisy: bool = False  # whether totals have noise, and are sums of no examples
    real_targets: bool = False  # C of them; `equations` take them as last features

    @property
    def width(self) -> int:
        """Number of features p."""
        return self.feature_map.width(self.network)

    @property
    def num_targets(self) -> int:
        """Number C of real targets; 0 if there are classes."""
        return self.num_classes if self.real_targets else 0


class FeatureSums(SumOptions):
    """Sums over the clients' features, from which least squares are solved.

    A strategy calls :meth:`attach` when it is made, tells clients ``to_config()`` with each
    message, sets `steps` to :meth:`choose_steps` before it asks for sums, reads replies by
    :meth:`parse`, and solves the total by :meth:`solve`. Masked sums are those of
    :meth:`secure_plan`.

    Attributes
    ----------
    steps : ndarray, shape (p,)
        Of fixed-point numbers; empty if features are not rounded.
    run_key : str
        Names the run for what clients and the server keep of it.
    """

    bits: int = SumOptions.options()["bits"].field(default=8)
    validation_share: float = SumOptions.options()["validation_share"].field(default=0.1)
    ridge: float = option(
        "ridge over the mean of the diagonal of Z Z^T; one too small for a Cholesky factor is "
        "raised tenfold",
        default=1e-2,
        above=0,
    )
    auto_ridge: bool = option(
        "whether the ridge is the one of 1e-4 ... 10 with the least squared error on validation "
        "examples, or on what clients hold out (validation_share)",
        default=True,
    )
    validation: tuple[Tensor, Tensor] | None = argument(
        "examples x (m, ...) on the server, as the network takes them, that nobody trains on, and "
        "their labels (m,), int64, or real targets (m, C): for auto_ridge, and for bits, by x",
        default=None,
    )
    device: torch.device | str = argument(
        "where the server computes features of validation examples; it solves on the CPU",
        default="cpu",
    )
    run_key: str = state(lambda: secrets.token_hex(8))
    steps: NDArray[np.float32] = state(lambda: np.zeros(0, np.float32))
    problem: SumsProblem = state(lambda: None, saved=False, reset=False)

    def check(self) -> None:
        """Refuse to hold out examples that nothing is chosen by."""
        if self.validation_share and not self.auto_ridge:
            raise ValueError("validation_share: goes with auto_ridge = True, got False")

    def attach(self, problem: SumsProblem, *, projected: bool = False, needed_by: str = "") -> None:
        """Say of which problem these sums are, and refuse validation examples that do not fit.

        `projected`: clients project their inputs, which the server cannot. `needed_by` is an option
        of the strategy for which it needs such examples, with its value.
        """
        self.problem = problem
        if problem.real_targets and self.bits < FEWEST_BITS:
            raise ValueError(
                f"sums.bits: expected {FEWEST_BITS} or 8 with real targets, or 32, got {self.bits}"
            )
        if self.validation is None:
            cure = ""
            if self.needs_validation:
                needed_by, cure = "sums.auto_ridge = True", ", or set validation_share"
            if needed_by:
                raise ValueError(f"{needed_by}: pass sums.validation, examples on the server{cure}")
            return
        if projected:
            raise ValueError(
                "sums.validation: expected no key_server, which projects examples, got one"
            )
        x, labels = self.validation
        if not 0 < len(x) == len(labels):
            sizes = f"{len(x)} and {len(labels)}"
            raise ValueError(f"sums.validation: expected examples and as many labels, got {sizes}")
        if problem.real_targets:
            targets = real_targets(labels, problem.num_targets, name="sums.validation")
            self.validation = x, targets
            return
        low, high = map(int, labels.aminmax())
        last = problem.num_classes - 1
        if low < 0 or high > last:
            raise ValueError(f"sums.validation: expected labels 0 ... {last}, got {low} ... {high}")

    @property
    def needs_validation(self) -> bool:
        """Whether the ridge is chosen on examples of the server."""
        return self.auto_ridge and not self.validation_share

    # ---------------------------------------------------------------- what is sent

    @property
    def is_exact(self) -> bool:
        """Whether sums are of whole numbers."""
        return self.bits != UNQUANTISED

    @property
    def fixed_point(self) -> FixedPoint | None:
        """How features are rounded, if they are."""
        return FixedPoint(self.steps, self.bits) if len(self.steps) else None

    @property
    def format(self) -> SumFormat:
        """What all clients' sums have to be."""
        problem = self.problem
        weights, noisy = problem.weights(), problem.noisy
        return SumFormat(self.width, self.num_classes, weights, self.fixed_point, noisy)

    @property
    def width(self) -> int:
        """Number of features that are summed, with the columns of real targets."""
        return self.problem.width + num_columns(self.problem.num_targets, self.is_exact)

    @property
    def num_classes(self) -> int:
        """Number of classes; 1 with real targets."""
        return 1 if self.problem.real_targets else self.problem.num_classes

    @property
    def _kind(self) -> type[FeatureStatistics] | type[SplitStatistics]:
        return SplitStatistics if self.validation_share else FeatureStatistics

    def choose_steps(self, network: ArrayRecord) -> NDArray[np.float32]:
        """Choose the steps of fixed-point numbers; none if features are not to be rounded.

        They are chosen by the validation examples, or by the largest magnitude of a feature, if the
        network says one; else ValueError.
        """
        if not self.is_exact:
            return np.zeros(0, np.float32)
        problem = self.problem
        of_targets = target_steps(problem.num_targets, self.bits)
        if self.validation is not None:
            chosen = FixedPoint.of(next(self.validation_features(network)[0]), self.bits)
            return np.concatenate([chosen.step, of_targets])
        if (bound := problem.feature_map.bound(problem.network)) is None:
            raise ValueError(
                f"bits = {self.bits}: pass validation, examples on the server, or a network with "
                "features of known size before its last layer, such as random Fourier features"
            )
        chosen = FixedPoint.within(bound, problem.width, self.bits)
        return np.concatenate([chosen.step, of_targets])

    def validation_features(self, network: ArrayRecord) -> tuple[Iterator[Tensor], Tensor]:
        """Return the validation examples' features, some at a time, and their labels."""
        if self.validation is None:
            raise ValueError("sums.validation: expected the server's validation examples, got none")
        (x, labels), problem = self.validation, self.problem
        module: nn.Module = copy.deepcopy(problem.network)
        load_arrays(module, named_arrays(network))
        extract = problem.feature_map.extractor(module.to(self.device))
        size = max(1, CHUNK_BYTES // (4 * problem.width))
        return map(extract, x.split(size)), labels

    def parse(
        self,
        arrays: dict[str, NDArray[Any]],
        num_examples: int | None = None,
        *,
        checked: bool = False,
    ) -> Sums:
        """Check a client's sums, or read a total of some that were `checked`."""
        expected = self.format._replace(checked=checked)
        return self._kind.from_arrays(arrays, expected, num_examples)

    def to_arrays(self, sums: Sums) -> dict[str, NDArray[Any]]:
        """Return what :meth:`parse` reads."""
        return sums.to_arrays(self.fixed_point)

    def num_words(self) -> int:
        """Count the whole numbers of sums in one array."""
        return self._kind.num_words(self.width, self.num_classes)

    def from_words(self, words: NDArray[Any], num_examples: int | None = None) -> Sums:
        """Check sums of whole numbers in one array, uint32 or uint64, as in :meth:`parse`."""
        return self._kind.from_words(words, self.format, num_examples)

    def upload_bytes(self) -> int:
        """Most bytes of one client's sums, of at most 133,144 examples if they are integers."""
        width, classes = self.width, self.num_classes
        gram = packed_size(width)
        if self.is_exact:  # with weights, sums may be beyond 32 bits
            one = (4 if self.problem.weights() is None else 8) * (gram + classes * width)
        else:
            one = 8 * (min(gram, self.problem.max_examples * width) + classes * width)
        return (one + 8 * classes) * (2 if self.validation_share else 1)

    def require_memory(
        self, num_clients: int, *, held: float = math.inf, cure: str = FEWER
    ) -> None:
        """Refuse uploads, `held` bytes at a time, and their solution, if they do not fit."""
        width = self.width
        uploads = min(num_clients * self.upload_bytes(), held)
        require_memory(
            round((40 if self.validation_share else 36) * width**2 + 2 * uploads),
            f"sums of {width} features from {num_clients} clients",
            cure=cure,
        )

    def secure_plan(
        self, arrays: ArrayRecord, task: Callable[[SumStep], Mapping[str, Any]], **more: Any
    ) -> SumPlan[Sums]:
        """Return what a secure sum of these is of; `more` are further fields of the plan."""
        expected, problem = self.format, self.problem
        network = [arrays[name].numpy() for name in problem.network.state_dict()]
        key = ConvexTask.key_of(problem.feature_map, network)

        def words_of(num_examples: int) -> WordFormat:
            dtype = expected.word_dtype(num_examples)
            about = sums_digest(key, expected.fixed_point, dtype, expected.weights)
            return WordFormat(self.num_words(), dtype, about)

        def read(words: NDArray[Any], num_examples: int) -> Sums:
            return self.from_words(words, None if expected.noisy else num_examples)

        return SumPlan(task, words_of, read, **more)

    # -------------------------------------------------------------------- solution

    def solve(self, total: Sums, network: ArrayRecord) -> Solution:
        """Return the normaliser, the linear model (q, C) of the sums over all, and its ridge."""
        sums, ridge = total, self.ridge
        problem = self.problem
        if self.fixed_point is not None:
            sums = sums.scaled(self.fixed_point)
            sums = sums.folded(problem.num_targets) if problem.real_targets else sums
        equations_of = problem.equations
        if isinstance(sums, SplitStatistics):  # the ridge is chosen on held-out examples
            fitting, held_out, sums = sums.fitting, sums.held_out, sums.everyone
            if not (fitting.num_examples and held_out.num_examples):
                raise ValueError(
                    f"validation_share: {held_out.num_examples} examples are held out and "
                    f"{fitting.num_examples} are not; expected some of both"
                )
            normaliser, equations = equations_of(fitting, None)
            ridge = best_ridge(equations, equations_of(held_out, normaliser)[1])
        normaliser, equations = equations_of(sums, None)
        if self.needs_validation:
            features, labels = self.validation_features(network)
            if problem.real_targets:
                features, labels = with_targets(features, labels, None), torch.zeros(len(labels))
            _, classes, weights, *_ = self.format
            held_out = FeatureStatistics.of(features, labels.long(), classes, weights=weights)
            ridge = best_ridge(equations, equations_of(held_out, normaliser)[1])
        linear, ridge = ridge_solution(equations, ridge)
        return normaliser, linear, ridge


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


def subtract(total: Sums, sums: Iterable[Sums]) -> Sums:
    """Take sums out of a total, one after the other."""
    return functools.reduce(operator.sub, sums, total)
