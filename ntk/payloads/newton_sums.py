"""Sums over a client's examples from which a generalised linear model takes a step of Newton.

Source: McCullagh and Nelder, *Generalized Linear Models*, 2nd ed. 1989, sections 2.5 and 5.4, for
canonical links. Examples x (q,) have targets y (C,), and eta = x B is their linear predictor:

    gaussian:     mu = eta,               V = I,                     deviance (y - mu)^2 each
    multinomial:  mu = softmax (0, eta),  V = diag(mu) - mu mu^T,    deviance -2 log mu_class

The targets of a multinomial model are indicators of all classes but the first, so that with two
classes it is the logistic regression.

Masked, each number is rounded to 2^-30: a sum over K clients is off by K 2^-31 at most, beside n
for standardised features. A client's numbers are up to 256 times its number of examples, or 2^20 if
that is more; so they fit in 64 bits for n + 4,096 K < 2^25.
"""

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadReply
from ..options import Declared, shared
from ..support.arrays import ArrayDict, Arrays, require_array, take_arrays
from .feature_statistics import SLACK, SumStep, packed_size

Family = Literal["gaussian", "multinomial"]
STEP, LIMIT = 2.0**-30, 256.0  # of whole numbers; largest number of an example
FEW = 2**12  # examples: of fewer, one far from the mean may be much of a sum
MOST_EXAMPLES = 2**25 - 1  # with FEW more for each client


class NewtonTask(Declared):
    """What one message asks of a client."""

    step: Literal["newton", SumStep] = shared("sums, or a step of a secure sum", default="newton")
    family: Family = shared("gaussian: real targets; multinomial: classes", default="gaussian")
    run_key: str = shared("name of the run, for what a client keeps", default="")


class NewtonFormat(NamedTuple):
    """What sums are expected to be: of q columns and C targets."""

    width: int
    number: int
    family: Family

    @property
    def num_deviances(self) -> int:
        """One for each real target, or one for all classes."""
        return self.number if self.family == "gaussian" else 1

    @property
    def size(self) -> int:
        """Rows of the Hessian: those of real targets are alike, and there once."""
        return self.width * (1 if self.family == "gaussian" else self.number)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the arrays that travel."""
        targets = (self.number,)
        beside = (self.num_deviances,), targets, targets
        return [(packed_size(self.size),), (self.width, self.number), *beside]

    @property
    def num_words(self) -> int:
        """Count the numbers of :meth:`NewtonSums.to_words`."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, eq=False)
class NewtonSums:
    """Sums over n examples at coefficients B (q, C), float64."""

    NAMES: ClassVar = ("hessian", "gradient", "deviance", "targets", "squares")

    hessian: NDArray[np.float64]  # X^T V X, symmetric: (q, q), or (C q, C q) by classes
    gradient: NDArray[np.float64]  # X^T (Y - mu), (q, C)
    deviance: NDArray[np.float64]  # (C,), or (1,) of classes
    targets: NDArray[np.float64]  # sum of y, (C,)
    squares: NDArray[np.float64]  # sum of y^2, (C,)
    num_examples: int
    rounding: float = 0.0  # largest error of a number by which clients rounded

    @classmethod
    def of(cls, x: Tensor, y: Tensor, coefficients: Tensor, family: Family) -> Self:
        """Add up over examples x (n, q) with targets y (n, C)."""
        x, y = x.double(), y.double()
        eta = x @ coefficients.double()
        if family == "gaussian":
            mu, hessian, deviance = eta, x.T @ x, (y - eta).square()
        else:
            log_p = torch.cat([torch.zeros(len(x), 1), eta], 1).log_softmax(1)
            mu, first = log_p[:, 1:].exp(), 1 - y.sum(1, keepdim=True)
            v = torch.diag_embed(mu) - mu.unsqueeze(2) * mu.unsqueeze(1)
            size = x.shape[1] * y.shape[1]
            hessian = torch.einsum("na,njk,nb->jakb", x, v, x).reshape(size, size)
            deviance = -2 * (torch.cat([first, y], 1) * log_p).sum(1, keepdim=True)
        return cls(
            hessian.numpy(),
            (x.T @ (y - mu)).numpy(),
            deviance.sum(0).numpy(),
            y.sum(0).numpy(),
            y.square().sum(0).numpy(),
            len(x),
        )

    @property
    def size(self) -> float:
        """Root of the examples' mean squared weighted norm."""
        return float(np.sqrt(np.trace(self.hessian) / self.num_examples))

    @classmethod
    def join(cls, groups: Iterable["NewtonSums"]) -> "NewtonSums":
        """Add up one or more groups' sums."""
        return functools.reduce(operator.add, groups)

    def __add__(self, other: "NewtonSums") -> "NewtonSums":
        return NewtonSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_arrays(self) -> ArrayDict:
        """Return the sums by name, of the Hessian its upper triangle by rows."""
        arrays = {name: getattr(self, name) for name in self.NAMES}
        return {**arrays, "hessian": self.hessian[np.triu_indices(len(self.hessian))]}

    @classmethod
    def from_arrays(cls, arrays: Arrays, expected: NewtonFormat, num_examples: int) -> Self:
        """Check what :meth:`to_arrays` made, or raise BadReply.

        The Hessian's entries must satisfy the Cauchy-Schwarz inequality.
        """
        width, parts = expected.size, take_arrays(arrays, *cls.NAMES)
        for name, array, shape in zip(cls.NAMES, parts, expected.shapes, strict=True):
            low = None if name in ("hessian", "gradient", "targets") else 0.0
            require_array(name, array, shape=shape, dtype=np.float64, limit=1e150, low=low)
        hessian = np.zeros((width, width))
        hessian[np.triu_indices(width)] = parts[0]
        hessian += np.triu(hessian, 1).T
        diagonal = hessian.diagonal()
        root = np.sqrt(np.maximum(diagonal, 0))
        rounding = SLACK * (root.max() ** 2 + 1)
        if diagonal.min() < 0 or (np.abs(hessian) > np.outer(root, root) + rounding).any():
            raise BadReply("range", "hessian: expected one of inner products")
        _, gradient, deviance, targets, squares = parts
        return cls(hessian, gradient, deviance, targets, squares, num_examples)

    def to_words(self) -> NDArray[np.uint64]:
        """Return the sums as whole numbers of 2^-30; ValueError if they are too large."""
        numbers = np.concatenate([array.ravel() for array in self.to_arrays().values()])
        most = max(self.num_examples, FEW) * LIMIT
        if not np.abs(numbers).max() <= most:
            raise ValueError(
                f"features: masked sums of {self.num_examples} examples take numbers of up to "
                f"{most:g}; standardise features and targets, and look for values far from the mean"
            )
        return np.rint(numbers / STEP).astype(np.int64).view(np.uint64)

    @classmethod
    def from_words(
        cls, words: NDArray[Any], expected: NewtonFormat, num_examples: int, num_clients: int
    ) -> Self:
        """Check the sum over K clients of what :meth:`to_words` made."""
        if num_examples > (most := MOST_EXAMPLES - FEW * num_clients):
            raise BadReply(
                "range",
                f"expected up to {most} examples of {num_clients} clients, got {num_examples}",
            )
        ends = np.cumsum([math.prod(shape) for shape in expected.shapes])[:-1]
        parts = np.split(words.view(np.int64) * STEP, ends)
        parts = [part.reshape(s) for part, s in zip(parts, expected.shapes, strict=True)]
        for k in (2, 4):  # rounding may leave a sum of zeros below 0
            parts[k] = np.maximum(parts[k], 0.0)
        arrays = dict(zip(cls.NAMES, parts, strict=True))
        sums = cls.from_arrays(arrays, expected, num_examples)
        return replace(sums, rounding=num_clients * STEP / 2)
