"""Sums over a group's features from which least squares can be solved: they add and subtract.

Source: the sufficient statistics of ridge regression, exchanged between clients by He et al.,
*AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models*, CVPR 2025,
and Fani et al., *Accelerating Heterogeneous Federated Learning with Closed-form Classifiers*
(Fed3R), ICML 2024; there of a network's last features, here of tangent features.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadReply
from ..features.fixed_point import FixedPoint
from ..support.arrays import ArrayDict, Arrays, require_array, require_counts, take_arrays
from ..support.memory import require_memory
from ..support.precision import full_float32

# exchanges of a secure sum, in order, and of one given up: see fedntk.trust.secure_sum
SumStep = Literal["public-key", "shares", "masked", "confirm", "reveal", "void", "free"]
SECURE_STEPS = get_args(SumStep)
ROWS, COLUMNS, BLOCK = 1024, 512, 64  # of a block of products, and of what stays in caches
EXACT = 2**24  # whole numbers up to it are float32's, and so are their sums
MOST_WEIGHT = 10**4  # with it a block of products has no sum beyond 2^53, float64's integers
SLACK = 1e-6  # by which rounding may break an inequality
PROBES = 24  # products with a matrix: see FeatureStatistics
EXACT_SLACK = 1e-12  # the same, where only the check itself rounds
FEWER = "lower num_features"


class SumFormat(NamedTuple):
    """What sums are expected to be: of p features and C classes, weighted or rounded."""

    width: int
    num_classes: int
    weights: NDArray[np.float64] | None = None  # w_c of the classes' examples (C,); None: all 1
    fixed_point: FixedPoint | None = None
    noisy: bool = False  # whole numbers with noise, which are not sums of any examples
    checked: bool = False  # totals of checked sums; rounding may break inequalities of such

    def dtype(self, num_examples: int) -> Any:
        """Return the dtype in which sums over so many examples travel."""
        w = np.ones(1) if self.weights is None else self.weights
        return np.int64 if self.noisy else _wire_dtype(num_examples, w, self.fixed_point)

    def word_dtype(self, num_examples: int) -> np.dtype[Any]:
        """Return uint32 if it holds sums over the examples, else uint64."""
        return np.dtype(f"u{np.dtype(self.dtype(num_examples)).itemsize}")


@dataclass(frozen=True, eq=False)
class FeatureStatistics:
    """Sums over examples with features z (p,), classes c and weights w_c of the classes.

    Gram matrix and class sums are float64, or integers for fixed-point features. A Gram matrix G
    travels as a root F (n, p) with F^T F = G if that has fewer bytes: of float64 features for
    n <= p / 2, which are kept so as well, of integers for n <= p / 4. F is computed from G,
    so it tells what G tells. **Integers come back exactly**: entries of F^T F are sums of n
    products whose magnitudes add up to S = n 127^2 or less (Cauchy-Schwarz), so two machines differ
    in them by 2 n S / 2^53 at most, 1/16 for S < 2^31 and n <= 2^17; more need p > 2^19. A client
    sends F if it finds F^T F within 1/8 of its integers, or if (F^T F - G) v is below 1/64 for 24
    vectors v of normal numbers. With an entry of 1/8 or more in its row, a number of (F^T F - G) v
    is below 1/64 with probability 1/10 at most, so all 24 are with 1e-24. A server then finds F^T F
    within 1/4.
    """

    NAMES: ClassVar = ("gram", "class-sums", "counts")  # of what travels

    gram: NDArray[Any]  # triangle of the sum of w z z^T, by rows: (p (p + 1) / 2,); or F (n, p)
    class_sums: NDArray[Any]  # sum of w z over the examples of each class: (C, p)
    counts: NDArray[np.int64]  # examples of each class: (C,)
    weights: NDArray[np.float64]  # w_c, all 1 if examples count alike: (C,)

    @classmethod
    @full_float32()
    def of(
        cls,
        chunks: Iterable[Tensor],
        labels: Tensor,
        num_classes: int,
        *,
        weights: NDArray[np.float64] | None = None,
        fixed_point: FixedPoint | None = None,
        as_root: bool = False,
    ) -> Self:
        """Add up features, some examples at a time; `fixed_point` rounds them to whole numbers.

        Chunks (m, p), one or more, are on the CPU; labels are int64 (n,) in 0 ... C - 1. Products
        are formed in float64, and of fixed-point numbers without weights in float32; these are
        exact. Sums of such numbers are integers of 32 bits if all such sums fit, else of 64; their
        weights are whole: see :func:`require_whole_weights`. `as_root` keeps the Gram matrix of few
        examples without weights as the F that :meth:`to_arrays` sends, and forms no integers of it.
        """
        w = np.ones(num_classes) if weights is None else weights
        if w.shape != (num_classes,):
            raise ValueError(f"weights: expected those of {num_classes} classes, got {w.tolist()}")
        is_double, exact = fixed_point is None or weights is not None, ROWS
        if fixed_point is not None:
            require_whole_weights(w)
            exact = ROWS if is_double else int(EXACT / fixed_point.largest**2)
        of_example = torch.from_numpy(w)[labels, None]
        dtype = _wire_dtype(len(labels), w, fixed_point)
        chunks = iter(chunks)
        first = next(chunks)
        width = first.shape[1]
        may_be_root = fixed_point is None or (as_root and weights is None)
        few = may_be_root and _are_few(len(labels), width, fixed_point)
        if not few:
            cls.require_memory(width)
        gram = np.zeros(0 if few else packed_size(width), dtype)
        sums = torch.zeros(num_classes, width, dtype=torch.float64)
        roots, start = [torch.zeros(0, width, dtype=torch.float64)], 0
        for features in itertools.chain([first], chunks):
            if start + len(features) > len(labels):
                raise ValueError(f"labels: {len(labels)} of them for more examples")
            if not torch.isfinite(features).all():
                raise ValueError("features: expected finite numbers, got infinity or NaN")
            for part in features.split(min(ROWS, exact)):
                z = part if fixed_point is None else fixed_point(part)
                z = z.double() if is_double else z
                here = slice(start, start + len(z))
                weighted = z if weights is None else z * of_example[here]
                if few:
                    roots.append(z * of_example[here].sqrt())
                else:
                    for total, row in zip(_rows(gram, width), _products(weighted, z), strict=True):
                        total += row.astype(dtype, copy=False)
                sums.index_add_(0, labels[here], weighted.double())
                start += len(z)
        if start != len(labels):
            raise ValueError(f"labels: {len(labels)} of them for {start} examples")
        counts = np.bincount(labels.numpy(), minlength=num_classes).astype(np.int64)
        if few:
            rows = torch.cat(roots).numpy()
            gram = _root(np.square(rows).sum(0), lambda b: rows[:, b].T @ rows, len(rows))
            if fixed_point is not None:
                v = np.random.default_rng(len(rows)).standard_normal((width, PROBES))
                if not (np.abs(rows.T @ (rows @ v) - gram.T @ (gram @ v)) < 1 / 64).all():
                    gram = _whole_product(rows, _most(len(rows), w, fixed_point), 0)
        return cls(gram, sums.numpy().astype(dtype), counts, w)

    @staticmethod
    def require_memory(width: int) -> None:
        """Raise NotEnoughMemory if sums of p features, and a copy, 8 p^2 bytes, would not fit."""
        require_memory(8 * width**2, f"the sums of {width} features", cure=FEWER)

    @property
    def num_examples(self) -> int:
        """Number of examples n."""
        return sum(self.counts.tolist())  # hostile counts may overflow int64

    @property
    def width(self) -> int:
        """Number of features p."""
        return int(self.class_sums.shape[1])

    @property
    def everyone(self) -> Self:
        """The sums; of :class:`SplitStatistics` those over both parts."""
        return self

    @property
    def diagonal(self) -> NDArray[Any]:
        """Diagonal of the Gram matrix, shape (p,)."""
        if self.gram.ndim == 2:
            return np.asarray(np.square(self.gram).sum(0))
        return self.gram[packed_diagonal(self.width)]

    @property
    def size(self) -> float:
        """Root of the examples' mean squared norm, by their weights."""
        total = float(self.counts @ self.weights)
        return math.sqrt(float(self.diagonal.astype(np.float64).sum()) / total)

    def __add__(self, other: "FeatureStatistics") -> "FeatureStatistics":
        return self._with(other, np.add)

    def __sub__(self, other: "FeatureStatistics") -> "FeatureStatistics":
        return self._with(other, np.subtract)

    def _with(self, other: "FeatureStatistics", combine: Any) -> "FeatureStatistics":
        if not np.array_equal(self.weights, other.weights):
            raise ValueError("weights: expected the same for both, got others")
        few = _are_few(self.num_examples + other.num_examples, self.width)
        if few and combine is np.add and self.gram.ndim == other.gram.ndim == 2:
            gram = np.concatenate([self.gram, other.gram])
        else:
            gram = _wide(combine, self._triangle, other._triangle)
        sums = _wide(combine, self.class_sums, other.class_sums)
        counts = _wide(combine, self.counts, other.counts)
        return replace(self, gram=gram, class_sums=sums, counts=counts)

    @property
    def _triangle(self) -> NDArray[Any]:
        return _pack(self.matrix(), np.float64) if self.gram.ndim == 2 else self.gram

    @classmethod
    def join(cls, groups: Iterable["FeatureStatistics"]) -> "FeatureStatistics":
        """Add up one or more groups; integers give the same bits in any order."""
        return functools.reduce(lambda total, group: total + group, groups)

    def scaled(self, fixed_point: FixedPoint) -> "FeatureStatistics":
        """Convert sums of fixed-point numbers to the features' units, float64."""
        step = fixed_point.step.astype(np.float64)
        gram = self.gram.astype(np.float64)
        for i, row in enumerate(_rows(gram, self.width)):
            row *= step[i] * step[i:]
        return replace(self, gram=gram, class_sums=self.class_sums * step)

    def mapped(self, linear: NDArray[np.float64]) -> "FeatureStatistics":
        """Return the sums of features z V in place of z, for V (p, q), in float64."""
        gram = _pack(linear.T @ self.matrix() @ linear, np.float64)
        return replace(self, gram=gram, class_sums=self.class_sums @ linear)

    def rounded(self) -> "FeatureStatistics":
        """Return the sums of features that are whole numbers without a root's rounding."""
        if (self.weights % 1).any():
            return self
        return replace(self, gram=np.rint(self._triangle), class_sums=np.rint(self.class_sums))

    def folded(self, count: int) -> Self:
        """Return the sums with the last `count` features added to as many before them, float64."""
        width, matrix, sums = self.width - count, self.matrix(), self.class_sums.astype(np.float64)
        matrix[:, width - count : width] += matrix[:, width:]
        matrix[width - count : width] += matrix[width:]
        sums[:, width - count : width] += sums[:, width:]
        gram = _pack(matrix[:width, :width], np.float64)
        return replace(self, gram=gram, class_sums=sums[:, :width])

    def matrix(self) -> NDArray[np.float64]:
        """Return the Gram matrix (p, p), both triangles."""
        if self.gram.ndim == 2:
            return np.asarray(self.gram.T @ self.gram)
        full = np.empty((self.width, self.width))
        for i, row in enumerate(_rows(self.gram, self.width)):
            full[i, i:] = row
            full[i:, i] = row
        return full

    def to_arrays(self, fixed_point: FixedPoint | None = None, packed: bool = False) -> ArrayDict:
        """Return the sums by name; integers in int32 if all such sums fit, no root if `packed`."""
        n, most = self.num_examples, _most(self.num_examples, self.weights, fixed_point)
        dtype, is_root = _wire_dtype(n, self.weights, fixed_point), self.gram.ndim == 2
        few = dtype == np.int32 and _are_few(n, self.width, fixed_point)
        gram = whole = self.gram if is_root else self.gram.astype(dtype, copy=False)
        if few and not is_root and not packed:
            rows, at = _rows(whole, self.width), packed_diagonal(self.width) - np.arange(self.width)
            with np.errstate(all="ignore"), contextlib.suppress(BadReply):  # a false G has none
                root = _root(
                    self.diagonal, lambda b: [np.r_[whole[at[:i] + i], rows[i]] for i in b], n
                )
                if np.array_equal(_whole_product(root, most, 1 / 8), whole):
                    gram = root
        sums = gram, self.class_sums.astype(dtype), self.counts
        return dict(zip(self.NAMES, sums, strict=True))

    @classmethod
    def from_arrays(
        cls, arrays: Arrays, expected: SumFormat, num_examples: int | None = None
    ) -> Self:
        """Check what :meth:`to_arrays` made, or raise BadReply.

        The counts must add up to `num_examples` if that is given. The Gram matrix and class sums
        must satisfy the Cauchy-Schwarz inequality; with noise they are int64 up to 2^53.
        """
        gram, class_sums, counts = take_arrays(arrays, *cls.NAMES)
        width, num_classes, weights, fixed_point, noisy, checked = expected
        w = np.ones(num_classes) if weights is None else weights
        n = require_counts(counts, num_classes, num_examples)
        dtype = expected.dtype(n)
        is_root = gram.ndim == 2 and dtype == np.int32
        few = _are_few(n, width, fixed_point) and (fixed_point is None or is_root)
        shape, limit = ((n, width), 1e150) if few else ((packed_size(width),), 1e300)
        limit, of_sums = (2**53, 2**53) if noisy else (limit, np.inf)
        require_array("gram", gram, shape=shape, dtype=np.float64 if few else dtype, limit=limit)
        if few and fixed_point is not None:
            gram = _whole_product(gram, _most(n, w, fixed_point), 1 / 4)
        shape = num_classes, width
        require_array("class sums", class_sums, shape=shape, dtype=dtype, limit=of_sums)
        sums = cls(gram, class_sums, counts, w)
        if noisy or checked:
            return sums
        diagonal = sums.diagonal.astype(np.float64)
        largest = np.inf if fixed_point is None else fixed_point.largest
        most = float(w @ counts) * largest**2 if n else 0
        if diagonal.min() < 0 or diagonal.max() > most:
            raise BadReply(
                "range",
                f"gram: expected a diagonal of 0 ... {most:g}, got {diagonal.min():g} ... "
                f"{diagonal.max():g}",
            )
        slack = SLACK if fixed_point is None else EXACT_SLACK
        root = np.sqrt(diagonal) * (1 + slack)
        for i, row in enumerate([] if gram.ndim == 2 else _rows(gram, width)):
            # in float64: the least integer has no absolute value of its own type
            if (np.abs(row.astype(np.float64)) > root[i] * root[i:]).any():
                raise BadReply("range", f"gram: row {i} is not one of inner products")
        bound = np.sqrt(w * counts)[:, None] * root
        if fixed_point is not None:
            bound = np.minimum(bound, largest * (w * counts)[:, None])
        if (np.abs(class_sums.astype(np.float64)) > bound).any():
            raise BadReply("range", "class sums: too large beside the Gram matrix or the counts")
        return sums

    def require_rows(self, radius: int, most_examples: float = math.inf) -> None:
        """Raise BadReply unless whole numbers can be the sums of so many rows of norm R or less."""
        n, sums, counts = self.num_examples, self.class_sums.tolist(), self.counts.tolist()
        if n > most_examples:
            raise BadReply("num-examples", f"expected at most {most_examples} examples, got {n}")
        squares = sum(self.diagonal.tolist()), *(sum(z * z for z in row) for row in sums)
        most = n * radius**2, *((count * radius) ** 2 for count in counts)
        if any(map(operator.gt, squares, most)):
            raise BadReply("range", f"sums: expected those of rows of norm {radius} or less")

    def require_positive(self) -> None:
        """Raise BadReply unless the Gram matrix is positive semidefinite, but for rounding.

        With a diagonal of 1 + 2 p (p + 2) eps, Cholesky's factor of a semidefinite matrix exists in
        float64: Higham, *Accuracy and Stability of Numerical Algorithms*, 2002, theorem 10.7.
        """
        matrix, scale = self.matrix(), np.sqrt(self.diagonal.astype(np.float64))
        scale[scale == 0] = 1
        matrix /= scale
        matrix /= scale[:, None]
        matrix[np.diag_indices_from(matrix)] += (
            2 * self.width * (self.width + 2) * np.finfo(np.float64).eps
        )
        if torch.linalg.cholesky_ex(torch.from_numpy(matrix)).info.item():
            raise BadReply("range", "gram: expected a positive semidefinite matrix")

    def to_words(self, dtype: Any) -> NDArray[Any]:
        """Return all whole numbers in one array of uint32 or uint64."""
        arrays = (self.gram, self.class_sums.ravel(), self.counts)
        return np.concatenate(arrays, dtype=np.int64).astype(dtype)

    @staticmethod
    def num_words(width: int, num_classes: int) -> int:
        """Count the numbers that :meth:`to_words` returns."""
        return packed_size(width) + num_classes * (width + 1)

    @classmethod
    def from_words(
        cls, words: NDArray[Any], expected: SumFormat, num_examples: int | None = None
    ) -> Self:
        """Check the sum over clients of what :meth:`to_words` made, as in :meth:`from_arrays`."""
        numbers = words.view(np.dtype(f"i{words.itemsize}"))
        shape = (expected.num_classes, expected.width)
        sizes = np.cumsum([packed_size(expected.width), math.prod(shape)])
        gram, class_sums, counts = np.split(numbers, sizes)
        n = require_counts(counts.astype(np.int64), expected.num_classes, num_examples)
        dtype, limits = expected.dtype(n), np.iinfo(np.int32)
        if dtype == np.int32 and (numbers.min() < limits.min or numbers.max() > limits.max):
            raise BadReply("range", f"sums over {n} examples do not fit in int32")
        sums = gram.astype(dtype, copy=False), class_sums.astype(dtype).reshape(shape)
        arrays = dict(zip(cls.NAMES, (*sums, counts.astype(np.int64)), strict=True))
        return cls.from_arrays(arrays, expected, num_examples)


def require_whole_weights(weights: Sequence[float] | NDArray[Any]) -> None:
    """Refuse weights of classes with which sums of whole numbers would not be exact."""
    if any(w % 1 or not 1 <= w <= MOST_WEIGHT for w in weights):
        raise ValueError(
            f"class_weights: expected whole numbers of 1 ... {MOST_WEIGHT}, as only those give "
            f"exact sums, got {[*map(float, weights)]}; only their ratios count: for 1, 2.5 take "
            "2, 5"
        )


def sums_digest(
    key: str, fixed_point: FixedPoint | None, dtype: Any, weights: NDArray[np.float64] | None = None
) -> bytes:
    """Return a checksum, 16 bytes, of what sums are of, and of the dtype of their words.

    Clients with other class weights have other checksums: else the weights that a server tells
    one of them would mark its part of a masked total.

    `key` is of network and feature map: :meth:`.convex_task.ConvexTask.key_of`.
    """
    digest = hashlib.blake2b(f"{key} {np.dtype(dtype)}".encode(), digest_size=16)
    if fixed_point is not None:
        digest.update(f" {fixed_point.bits} ".encode() + fixed_point.step.tobytes())
    if weights is not None:
        digest.update(b" weights " + weights.tobytes())
    return digest.digest()


def packed_size(width: int) -> int:
    """Count the numbers in the upper triangle of a (p, p) matrix."""
    return width * (width + 1) // 2


def packed_diagonal(width: int) -> NDArray[np.int64]:
    """Return where the diagonal is in the upper triangle of a (p, p) matrix."""
    return _starts(width)[:-1]


def _starts(width: int) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.arange(width, 0, -1))])


def _rows(packed: NDArray[Any], width: int) -> list[NDArray[Any]]:
    return [packed[a:b] for a, b in itertools.pairwise(_starts(width))]


def _pack(matrix: NDArray[np.float64], dtype: Any) -> NDArray[Any]:
    packed = np.empty(packed_size(len(matrix)), dtype)
    for i, row in enumerate(_rows(packed, len(matrix))):
        row[:] = matrix[i, i:]
    return packed


def _are_few(n: int, width: int, fixed_point: FixedPoint | None = None) -> bool:
    return (2 if fixed_point is None else 4) * n <= width


def _root(diagonal: NDArray[Any], rows: Callable[[Any], Any], n: int) -> NDArray[np.float64]:
    """Return F (n, p) with F^T F = G of rank n or less: Cholesky's rows, pivoted, from only G.

    `rows` gives some of G's. A pivot is the largest of a block of columns, which ends once another
    column is twice as large: so most work is in products of matrices.
    """
    root, scale = np.zeros((n, len(diagonal))), np.where(diagonal > 0, diagonal, 1.0)
    left, k, least = diagonal / scale, 0, 8 * n * np.finfo(np.float64).eps
    while k < n and left.max() > least:
        block, first = np.argsort(-left, kind="stable")[:BLOCK], k
        rest = rows(block) - root[:k, block].T @ root[:k]
        while k < n:
            j = int(left[block].argmax())
            i = block[j]
            if left[i] < max(least, left.max() / 2):
                break
            row = rest[j] - root[first:k, i] @ root[first:k]
            root[k] = row / np.sqrt(row[i])
            left -= np.square(root[k]) / scale
            k += 1
    return root


def _products(left: Any, right: Any) -> Iterator[NDArray[Any]]:
    """Yield the rows of the upper triangle of A^T B, for arrays or tensors (n, p)."""
    for first in range(0, left.shape[1], COLUMNS):
        product = np.asarray(left[:, first : first + COLUMNS].T @ right[:, first:])
        yield from (row[i:] for i, row in enumerate(product))


def _whole_product(root: NDArray[Any], most: float, tolerance: float) -> NDArray[Any]:
    """Return the triangle of F^T F, in int32; BadReply unless it is near integers up to `most`."""
    width = root.shape[1]
    packed = np.empty(packed_size(width), np.int32)
    for whole, row in zip(_rows(packed, width), _products(root, root), strict=True):
        near = np.abs(row - np.rint(row)) <= tolerance
        if not (near & (np.abs(row) < most + 0.5)).all():
            raise BadReply("range", "gram: expected the root of a matrix of whole numbers in range")
        whole[:] = np.rint(row)
    return packed


def _wide(combine: Any, first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(combine(first, second, dtype=np.promote_types(first.dtype, np.int64)))


def _most(num_examples: int, weights: NDArray[Any], fixed_point: FixedPoint | None) -> float:
    """Return the largest magnitude of sums over so many examples."""
    largest = math.inf if fixed_point is None else fixed_point.largest**2
    return num_examples * float(weights.max()) * largest


def _wire_dtype(num_examples: int, weights: NDArray[Any], fixed_point: FixedPoint | None) -> Any:
    if fixed_point is None:
        return np.float64
    return np.int32 if _most(num_examples, weights, fixed_point) < 2**31 else np.int64
