"""The two-patch data of feature learning theory.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, section 3.2. Client k has one of C signals that are orthogonal
to each other. Its examples have two patches, eq. (1):

    x_ki = [y_ki mu_k, xi_ki],   xi_ki ~ N(0, sigma_p^2 (I - sum_c mu_c mu_c^T / ||mu_c||^2))

with labels y_ki of -1 or +1, equally probable. The noise is orthogonal to all signals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..options import Declared, option

Part = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class TwoPatchExamples:
    """Examples of K clients, n each; all floating point in one dtype."""

    signals: Tensor  # mu_c, orthogonal to each other: (C, d)
    groups: Tensor  # c of each client's own signal: int64 (K,)
    noise: Tensor  # the patches xi_ki: (K, n, d)
    labels: Tensor  # y_ki, -1 or +1: (K, n)

    def __post_init__(self) -> None:
        d = self.signals.shape[-1]
        if self.noise.ndim != 3 or self.noise.shape[2] != d or self.signals.ndim != 2:
            raise ValueError(
                "noise: expected shape (K, n, d) with signals of shape (C, d), got "
                f"{tuple(self.noise.shape)} and {tuple(self.signals.shape)}"
            )
        if self.labels.shape != self.noise.shape[:2] or not bool((self.labels.abs() == 1).all()):
            raise ValueError(
                f"labels: expected -1 or +1 in shape {tuple(self.noise.shape[:2])}, got shape "
                f"{tuple(self.labels.shape)}; class 0 is -1, class 1 is +1"
            )
        of_one = self.groups.shape == self.noise.shape[:1] and not self.groups.is_floating_point()
        if not of_one or not bool(((self.groups >= 0) & (self.groups < len(self.signals))).all()):
            raise ValueError(
                f"groups: expected a whole number from 0 to {len(self.signals) - 1} for each of "
                f"{len(self.noise)} clients, got {self.groups.tolist()}"
            )

    @property
    def client_signals(self) -> Tensor:
        """Each client's own signal mu_k, shape (K, d)."""
        return self.signals[self.groups]

    def patches(self) -> Tensor:
        """Return the examples x_ki of eq. (1) as a network takes them, shape (K, n, 2, d)."""
        signal = self.labels[..., None] * self.client_signals[:, None]
        return torch.stack([signal, self.noise], dim=2)

    def classes(self) -> Tensor:
        """Return the labels as classes, int64, shape (K, n): 0 for -1, 1 for +1."""
        return (self.labels > 0).long()


class TwoPatchDistribution(Declared, frozen=True, eq=True):
    """The distribution of all clients' examples; draws depend only on the seed.

    A client's examples do not depend on the other clients' number or examples. Clients are
    numbered by their groups; ``group_sizes=(1, 3, 6, 10)`` is the paper's figure 4.
    """

    group_sizes: tuple[int, ...] = option(
        "clients that share each signal; (20,) is IID", default=(20,), at_least=1, kw_only=False
    )
    dimension: int = option("d of a patch", default=1000, kw_only=False)
    signal_norm: float = option("||mu||_2 of all signals", default=2.0, above=0, kw_only=False)
    noise_std: float = option("sigma_p", default=1.0, above=0)
    seed: int = option("seed of all draws", default=0, at_least=0)

    def check(self) -> None:
        """Refuse no signal, and patches without room for noise."""
        super().check()
        if not 1 <= (count := len(self.group_sizes)) < self.dimension:
            raise ValueError(
                f"dimension: expected more than the {count} signals, at least one, so that there "
                f"is room for noise, got {self.dimension}"
            )

    @property
    def num_clients(self) -> int:
        """K."""
        return sum(self.group_sizes)

    @property
    def groups(self) -> Tensor:
        """Group of each client, int64, shape (K,)."""
        return torch.repeat_interleave(torch.tensor(self.group_sizes))

    def signals(self) -> Tensor:
        """Draw the C signals: orthogonal, of one norm, uniform in direction; float64, (C, d)."""
        shape = (self.dimension, len(self.group_sizes))
        drawn = torch.from_numpy(np.random.default_rng([self.seed, 0]).standard_normal(shape))
        basis, triangle = torch.linalg.qr(drawn)
        unit: Tensor = (basis * triangle.diagonal().sign()).T.contiguous()
        return self.signal_norm * unit

    def draw(
        self,
        num_examples: int,
        *,
        part: Part = "train",
        clients: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> TwoPatchExamples:
        """Draw n examples of eq. (1) for each of some clients, by default all, in float64."""
        if num_examples < 1:
            raise ValueError(f"num_examples: expected at least 1, got {num_examples}")
        if part not in get_args(Part):
            raise ValueError(f"part: expected one of {', '.join(get_args(Part))}, got {part!r}")
        every = range(self.num_clients)
        chosen = every if clients is None else clients
        if unknown := [k for k in chosen if k not in every]:
            raise ValueError(f"clients: expected 0 ... {len(every) - 1}, got {unknown}")
        signals = self.signals()
        unit = signals / self.signal_norm
        noise = torch.empty(len(chosen), num_examples, self.dimension, dtype=dtype)
        labels = torch.empty(len(chosen), num_examples, dtype=dtype)
        for i, k in enumerate(chosen):
            generator = np.random.default_rng([self.seed, 1 + get_args(Part).index(part), k])
            signs = 2 * generator.integers(0, 2, num_examples) - 1
            drawn = torch.from_numpy(generator.standard_normal((num_examples, self.dimension)))
            labels[i] = torch.from_numpy(signs)
            noise[i] = self.noise_std * (drawn - (drawn @ unit.T) @ unit)
        return TwoPatchExamples(signals.to(dtype), self.groups[list(chosen)], noise, labels)
