"""GLM: linear and logistic regression with standard errors, from sums over the clients' examples.

Source: McCullagh and Nelder, *Generalized Linear Models*, 2nd ed. 1989: see
:mod:`fedntk.ntk.convex.glm`. Each exchange is a step of Newton on all clients' examples, so the
model is that of the pooled rows, however they are split. Least squares take one exchange.
"""

import secrets
from collections.abc import Sequence
from logging import getLogger
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedntk.ntk.convex.glm import OTHERS, GLMFit, newton_step
from fedntk.ntk.options import argument, option, part, state
from fedntk.ntk.payloads.feature_statistics import SumStep
from fedntk.ntk.payloads.masked_average import average_digest
from fedntk.ntk.payloads.newton_sums import Family, NewtonFormat, NewtonSums, NewtonTask
from fedntk.ntk.predictors.pooled_moments import Moments, moments_of

from ..core.averaging import named_arrays
from ..core.channel import Rounds
from ..core.replies import Reply, result_of
from ..core.round import Round
from ..core.secure import SecureAggregation, SumPlan, WordFormat
from ..core.uploads import Update, Uploads
from .closed_form import ClosedFormStrategy, Layer

logger = getLogger("flwr")
FLAT = 1e-6  # RSS over the deviance before a step below which RSS is measured once more
ILL = 1e8  # condition number above which estimates have less than 8 digits


class GLM(ClosedFormStrategy):
    """Fit a linear regression of real targets, or a logistic regression of classes.

    Clients are :class:`~fedntk.clients.GLMClient`. The columns are what the last layer is given:
    the inputs themselves, if the network is a linear layer. It begins at 0, and its bias is the
    constant. Give a network in float64. A step that raises the deviance of the same rows is halved.
    Collinear columns are logged, and clients that are not in the sums; what has no estimate, such
    as separated classes, is as well, and the model stays as it was. If all clients were in the
    sums, no more are then asked for.

    Attributes
    ----------
    fit : GLMFit or None
        Coefficients in the units of the columns, and their covariance; None before the first step,
        and if there is no estimate.

    Examples
    --------
    >>> from torch import nn
    >>> strategy = GLM(network=nn.Linear(4, 2).double())
    >>> strategy.family, strategy.shape
    ('multinomial', (2, 4))
    """

    client = "GLMClient"
    replies = "sums of a step of Newton"
    takes_real_targets = True

    real_targets: bool = argument(
        "whether clients have real targets, for a linear regression; else classes", default=False
    )
    columns: Sequence[str] = argument("names of the p columns, for errors", default=())
    tolerance: float = option(
        "decrement of the deviance by a step of Newton, over the number of examples, below which "
        "a logistic regression is solved",
        default=1e-16,
        above=0,
    )
    secure: SecureAggregation | None = part(
        "clients mask their sums, rounded to 2^-30; columns must be standardised", default=None
    )
    run_key: str = state(lambda: secrets.token_hex(8))
    before: NDArray[np.float64] = state(lambda: np.zeros((0, 0)))  # the step before's coefficients
    deviance: float = state(float)  # at these
    rows: tuple[int, ...] = state(tuple)  # number of examples then, and the clients that had them
    # of the columns in the first step, as weights of examples that are told without error become 0
    length: NDArray[np.float64] = state(lambda: np.zeros(0))
    # means and deviations of columns (2, p) and of real targets (2, C), by the same sums
    of_columns: NDArray[np.float64] = state(lambda: np.zeros((0, 0)))
    of_targets: NDArray[np.float64] = state(lambda: np.zeros((0, 0)))
    stopped: bool = state(bool)  # whether all clients' sums have no estimate
    fitted: dict[str, NDArray[Any]] = state(dict)  # the numbers of `fit`

    @property
    def family(self) -> Family:
        """Distribution of the targets."""
        return "gaussian" if self.real_targets else "multinomial"

    @property
    def fit(self) -> GLMFit | None:
        """The newest step's fit."""
        if not self.fitted:
            return None
        return GLMFit.from_arrays(self.fitted, self.family, self.names)

    @property
    def moments(self) -> list[Moments]:
        """Means and standard deviations of the columns (p,), and of real targets (C,).

        They are of the rows of the first sums; empty before these, and without a constant. A
        deviation that sums do not tell from rounding is 0.
        """
        return [(pair[0], pair[1]) for pair in (self.of_columns, self.of_targets) if len(pair)]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, and of the constant."""
        return (*self.columns, *["the constant"] * bool(self.bias))

    def prepare_method(self) -> None:
        """Refuse a single class, and names of other columns."""
        width = self.shape[1]
        self.columns = self.columns or [f"column {i}" for i in range(width)]
        if len(self.columns) != width:
            raise ValueError(f"columns: expected {width} names, got {len(self.columns)}")
        if not self.real_targets and self.shape[0] < 2:
            raise ValueError(
                "network: expected an output for each class of a logistic regression, got 1; for "
                "real targets set real_targets = True"
            )

    def first_arrays(self, arrays: ArrayRecord) -> ArrayRecord:
        """Begin with coefficients of 0, unless a run goes on."""
        number, width = self.shape
        if len(self.before) or self.solved:
            return arrays
        return self.with_layer(arrays, (np.zeros((number, width)), np.zeros(number)))

    def last_layer(self, sums: Sequence[Any]) -> Layer:
        """Return the layer after a step from the newest arrays."""
        return self._layer_of(self._fit(self.global_arrays, NewtonSums.join(sums)).coefficients)

    # ------------------------------------------------------------------------ rounds

    def train_round(self, r: Round) -> Rounds[Update]:
        """Ask all clients for their sums at the coefficients, and take a step of Newton."""
        if self.solved or self.stopped:
            return Update(None)
        uploads: Uploads[Any]
        words: tuple[NDArray[Any], int] | None = None
        if self.secure is not None:
            words, uploads, _ = yield from self.secure.sum(
                r, self._plan(r), self.enough, r.everyone()
            )
            is_there = words is not None
        else:
            uploads = yield from self.ask_sums(r)
            is_there = self.enough(uploads)
        if not is_there:
            return Update(uploads)

        def stepped() -> ArrayRecord:
            if words is None:
                sums = NewtonSums.join(uploads.values)
            else:
                sums = NewtonSums.from_words(words[0], self.format, words[1], len(uploads))
            return self._stepped(r, sums, (sums.num_examples, *sorted(uploads.clients)))

        missing = uploads.sampled - len(uploads)
        if missing:
            logger.warning(
                "%d of %d clients are not in the sums: the fit is of the others' rows",
                *(missing, uploads.sampled),
            )
        arrays = result_of(stepped, "step of Newton")
        if arrays is None:
            self.fitted, self.stopped = {}, not missing
        metrics = {"clients-missing": float(missing)}
        if self.fit is not None:
            metrics["decrement"] = self.fit.decrement
        return Update(uploads, arrays, metrics)

    def _stepped(self, r: Round, sums: NewtonSums, rows: tuple[int, ...]) -> ArrayRecord:
        coefficients = self._coefficients_of(r.arrays)
        deviance = float(sums.deviance.sum())
        is_second = len(self.before) > 0
        is_same = rows == self.rows
        if is_second and not is_same:
            logger.warning("the rows are others than in the step before: the fit is of the new")
        if is_second and is_same and deviance > self.deviance * (1 + 1e-9):
            halved = (coefficients + self.before) / 2
            return self.with_layer(r.arrays, self._layer_of(halved))
        if not is_second:
            self._measure(sums)
        fit, last = self._fit(r.arrays, sums), self.fit
        if self.family == "multinomial" and last is not None and is_same and fit.rank < last.rank:
            raise ValueError(
                "separation: some examples' classes are told without error, so the likelihood has "
                f"no maximum; leave out the column that does, or {OTHERS}"
            )
        arrays = self.with_layer(r.arrays, self._layer_of(fit.coefficients))
        self.before, self.deviance, self.rows = coefficients, deviance, rows
        if fit.collinear and (last is None or not last.collinear):
            named = ", ".join(fit.collinear)
            logger.warning("collinear columns, without standard errors: %s; leave one out", named)
        if fit.condition > ILL and not is_second:
            logger.warning(
                "nearly collinear columns, of condition %.1g: the fit has about %d digits",
                *(fit.condition, max(0, round(16 - np.log10(fit.condition)))),
            )
        self.fitted = fit.to_arrays()
        if self.family == "gaussian":  # RSS has the rounding of the deviance before the step
            is_exact = (fit.deviance > FLAT * sums.deviance).all()
            self.solved = bool(is_exact) or (is_second and is_same)
        else:
            self.solved = fit.decrement <= self.tolerance * fit.num_examples
        return arrays

    def _measure(self, sums: NewtonSums) -> None:
        """Take moments from sums at coefficients of 0, where all weights V are alike."""
        squares, width = sums.hessian.diagonal(), self.shape[1]
        self.length = np.sqrt(np.maximum(squares, 0.0))
        if self.bias:
            row = sums.hessian[width, :width]
            pair = moments_of(row, squares[:width], squares[width], sums.rounding)
            self.of_columns = np.stack(pair)
        if self.bias and self.real_targets:
            pair = moments_of(sums.targets, sums.squares, sums.num_examples, sums.rounding)
            self.of_targets = np.stack(pair)

    def _fit(self, arrays: ArrayRecord, sums: NewtonSums) -> GLMFit:
        coefficients, constant = self._coefficients_of(arrays), bool(self.bias)
        length = self.length if len(self.length) else None
        options: Any = {"constant": constant, "names": self.names, "length": length}
        return newton_step(sums, coefficients, self.family, **options)

    def _coefficients_of(self, arrays: ArrayRecord) -> NDArray[np.float64]:
        """Return the coefficients (q, C) of a model's arrays, as its clients read them."""
        named = named_arrays(arrays)
        coefficients = named[self.weight].T.astype(np.float64)
        if self.bias:
            coefficients = np.concatenate([coefficients, named[self.bias][None].astype(np.float64)])
        if self.family == "multinomial":
            return coefficients[:, 1:] - coefficients[:, :1]
        return coefficients

    def _layer_of(self, coefficients: NDArray[np.float64]) -> Layer:
        """Return the layer of coefficients; the first class has the score 0."""
        if self.family == "multinomial":
            coefficients = np.concatenate([np.zeros_like(coefficients[:, :1]), coefficients], 1)
        width = self.shape[1]
        bias = coefficients[width] if self.bias else np.zeros(self.shape[0])
        return coefficients[:width].T, bias

    # ------------------------------------------------------------------------ asking

    @property
    def format(self) -> NewtonFormat:
        """What sums have to be."""
        number, width = self.shape
        number -= not self.real_targets  # the first class has the score 0
        return NewtonFormat(width + bool(self.bias), number, self.family)

    def task(self, step: Literal["newton", SumStep] = "newton") -> dict[str, Any]:
        """Return what messages tell."""
        task = NewtonTask(step=step, family=self.family, run_key=self.run_key)
        return {**self.feature_map.to_config(), **task.to_config()}

    def parse(self, reply: Reply) -> NewtonSums:
        """Check a client's sums."""
        return NewtonSums.from_arrays(reply.arrays(), self.format, reply.num_examples)

    def _plan(self, r: Round) -> SumPlan[tuple[NDArray[Any], int]]:
        model = named_arrays(r.arrays)

        def words_of(_: int) -> WordFormat:
            about = average_digest(model, self.run_key, r.number)
            return WordFormat(self.format.num_words, np.dtype(np.uint64), about)

        return SumPlan(self.task, words_of, lambda words, num_examples: (words, num_examples))

    def require_memory(self) -> None:
        """Refuse nothing: the sums of a table are small."""
