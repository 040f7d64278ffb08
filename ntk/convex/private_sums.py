"""Noise in the sums of least squares, added once: differential privacy of an example or a client.

Sources: Agarwal, Kairouz and Liu, *The Skellam Mechanism for Differentially Private Federated
Learning*, NeurIPS 2021; Balle and Wang, *Improving the Gaussian Mechanism for Differential
Privacy*, ICML 2018; Canonne, Kamath and Steinke, *The Discrete Gaussian for Differential Privacy*,
NeurIPS 2020.

**Sensitivity.** Neighbours differ by one example, added or removed. Its row z is of whole numbers,
p of them, and of norm ||z|| <= R after rounding (:func:`bound_rows`). It moves

1. the triangle of Z^T Z by z_i z_j. With noise of variance V on the diagonal and V / 2 off it, the
   squared moves over their variances add up to (sum_i z_i^4 + 2 sum_(i<j) z_i^2 z_j^2) / V =
   ||z||^4 / V <= R^4 / V;
2. one row of the class sums Z^T Y by z: with variance S that is ||z||^2 / S <= R^2 / S.

The classes' counts are not released. For V = s^2 R^4 / a and S = s^2 R^2 / (1 - a) the sum is at
most 1 / s^2, and rows of norm R attain it: the joint L2 sensitivity is 1 / s standard deviations of
the noise. s is the noise multiplier; a is the Gram matrix's part of the budget.

Skellam noise needs more norms of the moves D_i with variances v_i. ||z||_1 is at most
L = sqrt(p) R, sum_i z_i^2 + 2 sum_(i<j) |z_i z_j| is its square, and 1 / v_i^2 is 4 / V^2 off the
diagonal. So, by release,

    sum |D_i| / v_i    <=  L^2 / V        L / S
    sum |D_i| / v_i^2  <=  2 L^2 / V^2    L / S^2
    sum D_i^2 / v_i^2  <=  2 R^4 / V^2    R^2 / S^2

**A client's whole contribution** of at most E examples moves them E times as far, by the triangle
inequality, so standard deviations are multiplied by E.

**Assumed.** A row depends on its own example only: pooled moments would need noise of their own.
The sums are released once. It is public which clients take part, not how many examples they have. A
client knows its own share of the noise: leave it, and those who collude with it, out of
`survivors`. NumPy's generators are not cryptographic, and their numbers are rounded to float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..features.fixed_point import MOST_BITS
from ..noise import Noise
from ..payloads.feature_statistics import FEWER, FeatureStatistics, packed_diagonal, packed_size
from ..payloads.sum_task import NoiseOptions
from ..support.memory import require_memory

ORDERS = np.arange(2, 1025)  # of Renyi divergences; whole, as theorem 3.5 wants them
LARGEST_MEAN = 2.0**32  # of a Poisson number that is drawn at once
MOST_DRAWS = 256  # for one number
WHOLE = tuple(range(2, MOST_BITS + 1))  # bits of whole numbers, to which noise is added
LARGEST_DEVIATION = 2.0**42  # of Gaussian noise, whose numbers have 53 bits, that is rounded


def bound_rows(features: Tensor, radius: int) -> Tensor:
    """Scale rows (n, p) to norm R, round them, and shrink them until their norm is at most R.

    Returns whole numbers in float32. A row that is zero or not finite becomes zero.
    """
    if not 1 <= radius <= 2**24:
        raise ValueError(f"radius: expected 1 ... 2^24, got {radius}")
    z = features.double()
    factor = radius / z.norm(dim=1, keepdim=True)
    usable = factor.isfinite() & (factor > 0)
    z, factor = z.where(usable, 0.0), factor.where(usable, 0.0)
    rows, left = torch.zeros_like(z), torch.arange(len(z))
    while len(left):
        rows[left] = (z[left] * factor[left]).round_()
        norms = rows[left].square().sum(1).sqrt()
        left, norms = left[norms > radius], norms[norms > radius]
        factor[left] *= radius / norms[:, None]
    return rows.float()


@dataclass(frozen=True, kw_only=True)
class SumNoise(Noise):
    """Noise for sums of rows that :func:`bound_rows` made, and the epsilon that it gives.

    With `fewest` clients each adds a share of Skellam noise; else a trusted server adds Gaussian
    noise, rounded.
    """

    protects: ClassVar = "one training example, or a client with all of its own, added or removed"
    covers: ClassVar = frozenset({"noise", "sums.ridge", "sums.device", "secure"})
    needs: ClassVar = {
        "sums.bits": WHOLE,
        "sums.auto_ridge": (False,),  # the noise sets the ridge
        "sums.validation_share": (0.0,),
    }
    metrics: ClassVar = frozenset({"num-examples", "epsilon", "delta", "model-updated"})
    releases: ClassVar = ("the sums Z^T Z and Z^T Y with noise, once", "which clients took part")

    radius: int  # R
    width: int  # p
    num_classes: int  # C
    noise_multiplier: float = 1.0  # s, standard deviations of the noise over the sensitivity
    gram_part: float = 0.5  # a, the Gram matrix's part of the budget
    examples: int = 1  # E, most of what is protected: 1, or more for a client's whole data
    fewest: int = 0  # m, least clients that may survive, with whose shares the noise is made

    def __post_init__(self) -> None:
        numbers = (self.radius, self.width, self.num_classes, self.noise_multiplier, self.examples)
        if not (all(n > 0 for n in numbers) and self.fewest >= 0 and 0 < self.gram_part < 1):
            raise ValueError(f"expected numbers above 0 and a gram_part below 1, got {self}")

    def require_exact(self) -> None:
        """Refuse noise that is too large to be drawn exactly."""
        variance = float(self.variances()[0])
        if self.fewest:
            fits = variance / (2 * self.fewest) <= MOST_DRAWS * LARGEST_MEAN
        else:
            fits = math.sqrt(variance) <= LARGEST_DEVIATION
        if not fits:
            raise ValueError(
                f"radius: noise of variance {variance:.1e} cannot be drawn exactly; expected a "
                f"smaller radius, client_examples or noise, got {self.radius} and {self.examples}"
            )

    @classmethod
    def of(cls, options: NoiseOptions, width: int, num_classes: int, quorum: int = 0) -> Self:
        """Return the noise that options ask for; `quorum`: fewest clients of a secure sum, or 0."""
        if quorum and quorum <= options.colluding:
            raise ValueError(
                f"colluding: expected fewer than the {quorum} clients that a secure sum needs, got "
                f"{options.colluding}; raise secure.threshold, or have more clients"
            )
        noise = cls(
            radius=options.radius,
            width=width,
            num_classes=num_classes,
            examples=max(1, options.client_examples),
            fewest=max(0, quorum - options.colluding),
        )
        noise = noise.calibrated(options.epsilon, options.delta)
        noise.require_exact()
        return noise

    @property
    def sensitivity(self) -> float:
        """1 / s, of all sums together, with the fewest clients' shares."""
        return 1 / self.noise_multiplier

    def variances(self, survivors: int | None = None) -> NDArray[np.float64]:
        """Return V and S with `survivors` clients, else the fewest."""
        if survivors is not None and not (self.fewest and survivors > 0):
            raise ValueError(f"survivors: expected clients with shares of noise, got {survivors}")
        shares = survivors / self.fewest if survivors else 1.0
        scale = shares * (self.noise_multiplier * self.examples) ** 2
        a, square = self.gram_part, float(self.radius**2)
        return scale * np.array([square**2 / a, square / (1 - a)])

    def renyi(self, survivors: int | None = None) -> NDArray[np.float64]:
        """Bound the Renyi divergences of the ORDERS, by Agarwal et al., theorem 3.5.

        For order a: the sum of a D^2 / (2 v) + min(((2 a - 1) D^2 + 6 |D|) / (4 v^2),
        3 |D| / (2 v)) over all numbers, which are independent.
        """
        v, r, e = self.variances(survivors), float(self.radius), self.examples
        one_norm = math.sqrt(self.width) * r
        ones, squares = e * np.array([one_norm**2, one_norm]), e**2 * np.array([r**4, r**2])
        a, twice = ORDERS[:, None], np.array([2, 1])
        more = twice * ((2 * a - 1) * squares + 6 * ones) / (4 * v) / v
        return np.asarray((a * squares / (2 * v) + np.minimum(more, 1.5 * ones / v)).sum(1))

    def epsilon(self, delta: float, survivors: int | None = None) -> float:
        """Epsilon at `delta` of what `survivors` clients' shares make; by default the fewest.

        It is exact for Gaussian noise. For Skellam noise it is the least over the orders, converted
        by Canonne et al., proposition 12 (also Balle et al., AISTATS 2020, theorem 21).
        """
        if not 0 < delta < 1:
            raise ValueError(f"delta: expected a number between 0 and 1, got {delta}")
        if not self.fewest:
            self.variances(survivors)
            return _smallest(lambda x: gaussian_delta(x, self.noise_multiplier) <= delta)
        bounds = self.renyi(survivors) + np.log1p(-1 / ORDERS)
        return max(0.0, float((bounds - np.log(delta * ORDERS) / (ORDERS - 1)).min()))

    def calibrated(self, epsilon: float, delta: float) -> Self:
        """Return the least noise with at most this epsilon when the fewest clients survive."""
        multiplier = _smallest(
            lambda s: replace(self, noise_multiplier=s).epsilon(delta) <= epsilon
        )
        return replace(self, noise_multiplier=multiplier)

    def add(self, sums: FeatureStatistics, generator: np.random.Generator) -> FeatureStatistics:
        """Return whole-number sums with noise: a client's with its share, or a server's with all.

        The counts become 0. Seed the generator from :mod:`secrets`, anew for each call. Only the
        result may be sent.
        """
        shape, dtype = sums.class_sums.shape, sums.gram.dtype
        expected = self.num_classes, self.width
        if dtype.kind != "i" or shape != expected:
            raise ValueError(f"sums: expected integers of {expected}, got {dtype} of {shape}")
        limited = self.fewest and self.examples > 1  # the sums are then one client's
        sums.require_rows(self.radius, self.examples if limited else math.inf)
        self.require_exact()
        v, s = self.variances().tolist()
        require_memory(16 * self.width**2, f"noise for {self.width} features", cure=FEWER)

        def draw(variance: float, count: int) -> NDArray[np.int64]:
            if not self.fewest:
                return np.rint(generator.normal(0, math.sqrt(variance), count)).astype(np.int64)
            mean = variance / (2 * self.fewest)  # of either Poisson number
            draws = math.ceil(mean / LARGEST_MEAN)
            noise = np.zeros(count, np.int64)
            for _ in range(draws):
                noise += generator.poisson(mean / draws, count)
                noise -= generator.poisson(mean / draws, count)
            return noise

        gram = draw(v / 2, packed_size(self.width))
        gram[packed_diagonal(self.width)] = draw(v, self.width)
        gram += sums.gram
        class_sums = sums.class_sums + draw(s, math.prod(shape)).reshape(shape)
        none = np.zeros_like(sums.counts)
        return replace(sums, gram=gram, class_sums=class_sums, counts=none)


def gaussian_delta(epsilon: float, noise_multiplier: float) -> float:
    """Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s): Balle and Wang, theorem 8."""
    half, moved = 0.5 / noise_multiplier, epsilon * noise_multiplier
    arguments = torch.tensor([half - moved, -half - moved], dtype=torch.float64)
    first, second = torch.special.log_ndtr(arguments).tolist()
    return -math.exp(first) * math.expm1(epsilon + second - first)


def solve_noisy(gram: Tensor, cross: Tensor, variance: float, fraction: float = 0.15) -> Tensor:
    """Return W (p, C) = (G_+ + rho I)^{-1} Z^T Y in float64, regularised by the noise only.

    G_+ is the noisy Gram matrix without its negative eigenvalues, and rho = `fraction` times
    sqrt(2 p V), the noise's largest eigenvalue (Wigner's semicircle law) for a `variance` V.
    """
    if not (variance > 0 and fraction > 0):
        raise ValueError(f"expected variance, fraction above 0, got {variance}, {fraction}")
    values, vectors = torch.linalg.eigh(gram.double())
    shifted = values.clamp_min(0) + fraction * math.sqrt(2 * len(gram) * variance)
    linear: Tensor = vectors @ ((vectors.T @ cross.double()) / shifted[:, None])
    return linear


def _smallest(holds: Callable[[float], bool]) -> float:
    """Return the number from which on a condition holds, or a hair more."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
        if high > 1e100:
            raise ValueError("epsilon: expected more, no noise makes it as small")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
