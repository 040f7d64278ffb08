"""Linear and logistic regression from sums over clients: estimates, and how certain they are.

Source: McCullagh and Nelder, *Generalized Linear Models*, 2nd ed. 1989, sections 2.5 and 5.4. A
step of Newton, which for canonical links is one of iteratively reweighted least squares,

    B <- B + (X^T V X)^-1 X^T (Y - mu),

needs only sums over examples. Least squares are solved by one, from any B; a logistic regression by
a few. The covariance of the estimates is phi (X^T V X)^-1, with phi = RSS / (n - q) of least
squares, and 1 of the logistic regression, which may have more than two classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..payloads.newton_sums import Family, NewtonSums

COLLINEAR = 1e-11  # least eigenvalue, beside the largest, of columns of length 1
SHARE = 1e-4  # of a column in a direction without length, above which it is linked
SEPARATED = 1e-6  # deviance of an example


@dataclass(frozen=True, eq=False)
class GLMFit:
    """Coefficients of q columns for C targets, after a step of Newton, float64.

    Attributes
    ----------
    coefficients : ndarray, shape (q, C)
        Estimates; the last column is the constant if there is one.
    inverse : ndarray, shape (q, q), or (C q, C q) by classes
        (X^T V X)^-1, at the coefficients before the step.
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
    collinear : tuple of str
        Columns that are 0, or linear combinations of each other: their coefficients are those of
        least norm for columns of one length, and have no standard errors.
    """

    coefficients: NDArray[np.float64]
    inverse: NDArray[np.float64]
    deviance: NDArray[np.float64]
    null_deviance: NDArray[np.float64]
    num_examples: int
    family: Family
    decrement: float
    rank: int
    collinear: tuple[str, ...] = ()

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
) -> GLMFit:
    """Take a step of Newton from coefficients (q, C), by the sums over all examples at them.

    ValueError if there is no estimate: too few examples, targets of one class or without variance,
    or classes that the columns separate. `names` are of the columns.
    """
    n, width, size = sums.num_examples, len(coefficients), len(sums.hessian)
    named = np.array([*names] or [f"column {i}" for i in range(width)])
    if n <= size:
        raise ValueError(f"expected more examples than the {size} estimates, got {n}")
    null = _null_deviance(sums, family, constant=constant)
    if family == "multinomial" and (sums.deviance < SEPARATED * n).any():
        raise ValueError(
            "perfect separation: the columns tell the classes apart without error, so the "
            "likelihood has no maximum; leave out the column that does, or use a ridge"
        )
    diagonal = sums.hessian.diagonal()
    length = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    values, vectors = np.linalg.eigh(sums.hessian / np.outer(length, length))
    held = values > COLLINEAR * values[-1]
    inverse = (vectors[:, held] / values[held]) @ vectors[:, held].T / np.outer(length, length)
    share = np.abs(vectors[:, ~held]).max(1, initial=0.0)
    is_linked = (share > SHARE) | (diagonal <= 0)
    gradient = sums.gradient
    if family == "gaussian":
        step = inverse @ gradient
        lowered = (gradient * step).sum(0)
        deviance = sums.deviance - lowered
    else:
        step = _as_coefficients(inverse @ gradient.T.ravel(), gradient.shape)
        lowered, deviance = np.array([(gradient * step).sum()]), sums.deviance
    inverse[is_linked] = np.nan  # for the columns that other ones tell
    return GLMFit(
        coefficients + step,
        inverse,
        np.maximum(deviance, 0.0),
        null,
        n,
        family,
        float(lowered.max()),
        int(held.sum()),
        tuple(named[is_linked.reshape(-1, width).any(0)].tolist()),
    )


def _null_deviance(sums: NewtonSums, family: Family, *, constant: bool) -> NDArray[np.float64]:
    n, total = sums.num_examples, sums.targets
    if family == "gaussian":
        null = sums.squares - (np.square(total) / n if constant else 0.0)
        if not (null > 1e-12 * sums.squares).all():
            raise ValueError("targets that do not vary have no regression")
        return np.asarray(null)
    counts = np.append(n - total.sum(), total).round()
    if (counts > 0).sum() < 2:
        raise ValueError(f"expected examples of two classes or more, got {counts.max():.0f} of one")
    shares = np.maximum(counts, 1) / n if constant else np.full(len(counts), 1 / len(counts))
    return np.array([-2 * float(counts @ np.log(shares))])


def _as_coefficients(numbers: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return (q, C) of numbers by targets (C q, 1), or of (q, C) itself."""
    width, number = shape
    return numbers if numbers.shape == shape else numbers.reshape(number, width).T
