"""Linear and logistic regression from sums over clients: estimates, and how certain they are.

Source: McCullagh and Nelder, *Generalized Linear Models*, 2nd ed. 1989, sections 2.5 and 5.4. A
step of Newton, which for canonical links is one of iteratively reweighted least squares,

    B <- B + (X^T V X)^-1 X^T (Y - mu),

needs only sums over examples. Least squares are solved by one, from any B; a logistic regression by
a few. The covariance of the estimates is phi (X^T V X)^-1, with phi = RSS / (n - q) of least
squares, and 1 of the logistic regression, which may have more than two classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..payloads.newton_sums import Family, NewtonSums

COLLINEAR = 1e-11  # least eigenvalue, beside the largest, of columns of length 1
SHARE = 1e-4  # of a column in a direction without length, above which it is linked
SEPARATED = 1e-6  # deviance of an example
FLAT = 1e-14  # variance over the mean square, below which sums tell none
OTHERS = "use one exchange or FedAvg, which have no standard errors"


@dataclass(frozen=True, eq=False)
class GLMFit:
    """Coefficients of q columns for C targets, after a step of Newton, float64.

    Attributes
    ----------
    coefficients : ndarray, shape (q, C)
        Estimates; the last column is the constant if there is one.
    inverse : ndarray, shape (q, q), or (C q, C q) by classes
        (X^T V X)^-1, at the coefficients before the step; a pseudo-inverse if `linked` has any.
    linked : ndarray of bool, shape (q,), or (C q,) by classes
        Coefficients of columns that are 0, or linear combinations of each other: of least norm for
        columns of one length, without standard errors.
    deviance, null_deviance : ndarray, shape (C,), or (1,) of classes
        Of the model, and of one with only a constant, or with no column if there is no constant.
        Of least squares they are RSS and the total sum of squares.
    num_examples : int
        Number n of examples.
    family : {"gaussian", "multinomial"}
        Least squares, or logistic regression: its C targets are all classes but the first.
    decrement : float
        Largest g^T (X^T V X)^-1 g, by which the step lowers a deviance.
    rank : int
        Number of estimates that are not linear combinations of others.
    condition : float
        Largest eigenvalue of X^T V X over the least one that is not 0, for columns of length 1.
    names : tuple of str
        Names of the q columns.
    """

    coefficients: NDArray[np.float64]
    inverse: NDArray[np.float64]
    linked: NDArray[np.bool_]
    deviance: NDArray[np.float64]
    null_deviance: NDArray[np.float64]
    num_examples: int
    family: Family
    decrement: float
    rank: int
    condition: float
    names: tuple[str, ...]

    @property
    def collinear(self) -> tuple[str, ...]:
        """Names of the columns that are linked."""
        is_linked: list[bool] = np.any(self.linked.reshape(-1, len(self.names)), axis=0).tolist()
        return tuple(name for name, linked in zip(self.names, is_linked, strict=True) if linked)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the numbers by name."""
        others = ("family", "names")
        return {k: np.asarray(value) for k, value in vars(self).items() if k not in others}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], family: Family, names: tuple[str, ...]
    ) -> Self:
        """Return the fit that :meth:`to_arrays` made the numbers of."""
        numbers: dict[str, Any] = {k: a if a.ndim else a.item() for k, a in arrays.items()}
        return cls(**numbers, family=family, names=names)

    @property
    def df_resid(self) -> int:
        """Degrees of freedom of the residuals, n - rank."""
        return self.num_examples - self.rank

    @property
    def scale(self) -> NDArray[np.float64]:
        """Dispersion phi: the residual variances (C,), or 1 (1,)."""
        return np.ones(1) if self.family == "multinomial" else self.deviance / self.df_resid

    @property
    def standard_errors(self) -> NDArray[np.float64]:
        """Standard errors of the coefficients, shape (q, C)."""
        errors = np.sqrt(np.outer(self.inverse.diagonal(), self.scale))
        errors[self.linked] = np.nan
        return np.asarray(_as_coefficients(errors, self.coefficients.shape))

    @property
    def r2(self) -> NDArray[np.float64]:
        """1 - deviance / null deviance: R^2 (C,), or McFadden's pseudo-R^2 (1,)."""
        return 1 - self.deviance / self.null_deviance

    def in_units(
        self,
        mean: NDArray[np.float64],
        std: NDArray[np.float64],
        target_mean: NDArray[np.float64] | float = 0.0,
        target_std: NDArray[np.float64] | float = 1.0,
    ) -> Self:
        """Return the fit for x and y that were standardised to this one's, which has a constant.

        `mean` and `std` are of the q - 1 other columns, the others of the C targets.
        """
        linear = np.diag(np.append(1 / std, 1.0))
        linear[-1, :-1] = -mean / std
        coefficients = linear @ self.coefficients * target_std
        coefficients[-1] += target_mean
        squared = np.square(target_std)
        each = np.kron(np.eye(len(self.inverse) // len(linear)), linear)
        return replace(
            self,
            coefficients=coefficients,
            inverse=each @ self.inverse @ each.T,
            linked=(each != 0) @ self.linked,
            deviance=self.deviance * squared,
            null_deviance=self.null_deviance * squared,
        )


def newton_step(
    sums: NewtonSums,
    coefficients: NDArray[np.float64],
    family: Family,
    *,
    constant: bool = True,
    names: Sequence[str] = (),
    length: NDArray[np.float64] | None = None,
) -> GLMFit:
    """Take a step of Newton from coefficients (q, C), by the sums over all examples at them.

    ValueError if there is no estimate: too few examples, targets without variance, a class without
    examples, or classes that the columns separate. `names` are of the columns; `length`, by default
    the root of X^T V X's diagonal, is what they are divided by to compare them.

    A direction v of columns of length 1 is taken for 0 if its eigenvalue is below what rounding of
    the sums by r may make of one: |v^T E v| <= r (sum_i |v_i| / length_i)^2.
    """
    n, width, size = sums.num_examples, len(coefficients), len(sums.hessian)
    named = tuple(names) or tuple(f"column {i}" for i in range(width))
    if n <= size:
        raise ValueError(f"expected more examples than the {size} estimates, got {n}")
    _require_targets(sums, family, constant=constant)
    if family == "multinomial" and (sums.deviance < SEPARATED * n).any():
        raise ValueError(
            "perfect separation: the columns tell the classes apart without error, so the "
            f"likelihood has no maximum; leave out the column that does, or {OTHERS}"
        )
    diagonal = sums.hessian.diagonal()
    is_zero = diagonal <= sums.rounding
    length = np.sqrt(diagonal) if length is None else length
    length = np.where(is_zero | (length <= 0), 1.0, length)
    hessian = np.where(np.logical_or.outer(is_zero, is_zero), 0.0, sums.hessian)
    values, vectors = np.linalg.eigh(hessian / np.outer(length, length))
    rounding = sums.rounding * np.square((np.abs(vectors) / length[:, None]).sum(0))
    held = values > np.maximum(COLLINEAR * values[-1], rounding)
    inverse = (vectors[:, held] / values[held]) @ vectors[:, held].T / np.outer(length, length)
    share = np.abs(vectors[:, ~held]).max(1, initial=0.0)
    is_linked = (share > SHARE) | is_zero
    gradient = sums.gradient
    if family == "gaussian":
        step = inverse @ gradient
        lowered = (gradient * step).sum(0)
        deviance = np.maximum(sums.deviance - lowered, 0.0)
        null = sums.squares
        if constant:  # the sum of squares around the means, without the means' cancellation
            slopes, ones = (coefficients + step)[:-1], sums.hessian[:-1, -1]
            around = sums.hessian[:-1, :-1] - np.outer(ones, ones) / n
            null = deviance + (slopes * (around @ slopes)).sum(0)
    else:
        step = _as_coefficients(inverse @ gradient.T.ravel(), gradient.shape)
        lowered, deviance = np.array([(gradient * step).sum()]), sums.deviance
        counts = _class_counts(sums)
        shares = counts / n if constant else np.full(len(counts), 1 / len(counts))
        null = np.array([-2 * float(counts @ np.log(shares))])
    return GLMFit(
        coefficients + step,
        inverse,
        is_linked,
        deviance,
        null,
        n,
        family,
        float(lowered.max()),
        int(held.sum()),
        float(values[-1] / values[held].min(initial=np.inf)),
        named,
    )


def _class_counts(sums: NewtonSums) -> NDArray[np.float64]:
    return np.append(sums.num_examples - sums.targets.sum(), sums.targets).round()


def _require_targets(sums: NewtonSums, family: Family, *, constant: bool) -> None:
    """Refuse targets that do not vary, and classes without examples."""
    n = sums.num_examples
    if family == "gaussian":
        mean = np.square(sums.targets) / n if constant else 0.0
        if not (sums.squares - mean > FLAT * sums.squares).all():
            raise ValueError("targets that do not vary have no regression")
        return
    counts = _class_counts(sums)
    if (counts > 0).sum() < 2:
        raise ValueError(f"expected examples of two classes or more, got {counts.max():.0f} of one")
    if empty := np.flatnonzero(counts <= 0).tolist():
        raise ValueError(
            f"separation: the classes of numbers {empty} have no examples, so the likelihood has "
            f"no maximum; leave them out, or {OTHERS}"
        )


def _as_coefficients(numbers: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return (q, C) of numbers by targets (C q, 1), or of (q, C) itself."""
    width, number = shape
    return numbers if numbers.shape == shape else numbers.reshape(number, width).T
