"""Feature learning theory of FedAvg: two-patch data, its network, and what its weights hold.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, sections 3 and 4, and appendix C.4.

Data, section 3.2: client k has one of C signals that are orthogonal to each other. Its examples
have two patches, with labels y_ki of -1 or +1, equally probable, eq. (1):

    x_ki = [y_ki mu_k, xi_ki],   xi_ki ~ N(0, sigma_p^2 (I - sum_c mu_c mu_c^T / ||mu_c||^2))

Network, sections 3.3 and 3.4: m filters for each sign j, on both patches, and a second layer that
is fixed, eq. (2):

    f(W, x) = F_{+1}(x) - F_{-1}(x),   F_j(x) = 1/m sum_r [relu(<w_jr, x1>) + relu(<w_jr, x2>)]

Its loss log(1 + exp(-y f)) is the cross-entropy of the logits (F_{-1}, F_{+1}), with class 0 for
y = -1 and class 1 for y = +1: full-batch FedAvg on these two outputs is eq. (4) and (5).

Coefficients, section 4.1 and lemma 4.1: all clients start from the same weights w^0, and by eq. (6)

    w_kjr = w^0_jr + sum_c j gamma_kcjr mu_c / ||mu_c||^2
                   + sum_k'i rho_kk'ijr xi_k'i / ||xi_k'i||^2

with one gamma for each *different* signal c: eq. (7) has one for each client, which would count a
signal that clients share several times. Eq. (6) has no factor j before gamma, but eq. (4) and (11)
need it: for j = -1 the gradient points along -mu while gamma grows. A gradient step of client k
changes only its own coefficients; with l' = -1 / (1 + exp(y f)), eq. (11) to (13) are

    gamma_kc(k)jr -= eta / (n m) sum_i l'_ki relu'(<w_kjr, y_ki mu_k>) ||mu_k||^2
    rho_kkijr     -= eta / (n m) l'_ki relu'(<w_kjr, xi_ki>) ||xi_ki||^2 j y_ki

psi is rho for y_ki = j, and grows; phi is rho for y_ki = -j, and falls. Averaging weights averages
coefficients, eq. (14).

Generalisation, section 4.2, theorem 4.4, for signals (K, d), one mu_k a client, none of them zero:

    chi_k = sum_k' <mu_k, mu_k'> / ||mu_k||^2
    SNR_k = sqrt(chi_k) ||mu_k|| / (sigma_p sqrt(d))
    test error <= exp(-c n chi_k^2 ||mu||^4 / (K sigma_p^4 d)),   c a constant

with n the number of examples *of one client*; the paper's text has the same letter for that of all.

Shapes: K clients with n examples each, C signals, 2 signs in the order j = -1, +1, m filters;
weights (K, 2, m, d), first weights (2, m, d).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from torch import Tensor

from .options import Declared, option

Part = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class TwoPatchExamples:
    """Examples of K clients, n each; all floating point in one dtype."""

    signals: Tensor  # mu_c, orthogonal to each other: (C, d)
    groups: Tensor  # c of each client's own signal: int64 (K,)
    noise: Tensor  # the patches xi_ki: (K, n, d)
    labels: Tensor  # y_ki, -1 or +1: (K, n)

    def __post_init__(self) -> None:
        signals, noise, labels, groups = self.signals, self.noise, self.labels, self.groups
        if noise.ndim != 3 or signals.ndim != 2 or noise.shape[2] != signals.shape[1]:
            raise ValueError(
                "noise: expected shape (K, n, d) with signals of shape (C, d), got "
                f"{tuple(noise.shape)} and {tuple(signals.shape)}"
            )
        if labels.shape != noise.shape[:2] or not bool((labels.abs() == 1).all()):
            raise ValueError(
                f"labels: expected -1 or +1 in shape {tuple(noise.shape[:2])}, got shape "
                f"{tuple(labels.shape)}; class 0 is -1, class 1 is +1"
            )
        of_one = groups.shape == noise.shape[:1] and not groups.is_floating_point()
        if not of_one or not bool(((groups >= 0) & (groups < len(signals))).all()):
            raise ValueError(
                f"groups: expected a whole number from 0 to {len(signals) - 1} for each of "
                f"{len(noise)} clients, got {groups.tolist()}"
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
            labels[i] = torch.from_numpy(2 * generator.integers(0, 2, num_examples) - 1)
            drawn = torch.from_numpy(generator.standard_normal((num_examples, self.dimension)))
            noise[i] = self.noise_std * (drawn - (drawn @ unit.T) @ unit)
        return TwoPatchExamples(signals.to(dtype), self.groups[list(chosen)], noise, labels)


def initial_std(dimension: int) -> float:
    """Return sigma_0, the standard deviation of the first weights: 0.1 / sqrt(d), our choice.

    Assumption 4.2 (3) wants it between n / (sigma_p d) and the smaller of 1 / (sigma_p sqrt(d)) and
    1 / ||mu||, up to constants. For the paper's experiments (n = 100, d = 1,000) there is no such
    number, and the text states none. A tenth of the upper bound keeps the first outputs near 0, as
    in stage 1 of the proof.
    """
    return 0.1 / math.sqrt(dimension)


class Evaluation(NamedTuple):
    """Mean of log(1 + exp(-y f)) and share with y f < 0 of each client's examples, (K,) each."""

    loss: Tensor
    error: Tensor


def evaluate(weights: Tensor, examples: TwoPatchExamples) -> Evaluation:
    """Evaluate each client's weights (K, 2, m, d) on its own examples."""
    margin = _margins(*_inner_products(weights, examples), examples.labels)
    losses = torch.nn.functional.softplus(-margin)
    return Evaluation(losses.mean(1), (margin < 0).to(margin).mean(1))


def signal_similarity(signals: Tensor) -> Tensor:
    """Return chi_k, shape (K,): the number of clients' signals that client k's own is worth.

    K if all signals are the same, 1 if all are orthogonal.
    """
    products = signals @ signals.T
    if bool((products.diagonal() == 0).any()):
        raise ValueError("signals: expected none that is zero; leave out clients without a signal")
    return products.sum(1) / products.diagonal()


def effective_snr(signals: Tensor, *, noise_std: float) -> Tensor:
    """Return SNR_k of FedAvg among the clients with these signals, shape (K,)."""
    similarity = signal_similarity(signals)
    if bool((similarity < 0).any()):
        raise ValueError(
            "signals: expected signals that are the same or orthogonal, got some with a negative "
            "sum of products"
        )
    snr: Tensor = signals.norm(dim=1) / (noise_std * math.sqrt(signals.shape[1]))
    return similarity.sqrt() * snr


def generalisation_exponent(signals: Tensor, *, num_examples: int, noise_std: float) -> Tensor:
    """Return n chi_k^2 ||mu_k||^4 / (K sigma_p^4 d) of theorem 4.4, shape (K,).

    The paper does not state the constant c. For local training give one client's signal, for
    averages within a group that group's: then it is n ||mu||^4 / (sigma_p^4 d), times the number of
    clients in the group.
    """
    clients, dimension = signals.shape
    return num_examples * dimension * effective_snr(signals, noise_std=noise_std) ** 4 / clients


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Coefficients of all clients' weights in signals and noise."""

    signal: Tensor  # gamma of client k in signal c: (K, C, 2, m)
    noise: Tensor  # rho of client k in the noise of client k' and its example i: (K, K, n, 2, m)

    @classmethod
    def zeros(cls, examples: TwoPatchExamples, width: int) -> Self:
        """Return those of the first weights, eq. (10); `width` is m."""
        clients, n, _ = examples.noise.shape
        signal = examples.noise.new_zeros(clients, len(examples.signals), 2, width)
        return cls(signal, examples.noise.new_zeros(clients, clients, n, 2, width))

    def weights(self, initial: Tensor, examples: TwoPatchExamples) -> Tensor:
        """Return the weights (K, 2, m, d) with these coefficients, eq. (8)."""
        mu, xi = examples.signals, examples.noise
        learned = torch.einsum("kcjr,cd->kjrd", self.signal, mu / _squared_norms(mu))
        memorised = torch.einsum("klijr,lid->kjrd", self.noise, xi / _squared_norms(xi))
        return initial + _second_layer(mu)[:, None, None] * learned + memorised

    def mixed(self, mixing: Tensor) -> "Coefficients":
        """Return those of averaged weights, eq. (14); row k of (K, K) has client k's shares."""
        mixing = mixing.to(self.signal)
        return Coefficients(*(torch.tensordot(mixing, c, 1) for c in (self.signal, self.noise)))


def coefficient_step(
    coefficients: Coefficients, initial: Tensor, examples: TwoPatchExamples, *, learning_rate: float
) -> Coefficients:
    """Take one gradient step of every client, by the rules (11) to (13)."""
    products = _inner_products(coefficients.weights(initial, examples), examples)
    gamma, rho = _increments(*products, examples, learning_rate)
    signal, noise = coefficients.signal.clone(), coefficients.noise.clone()
    models = torch.arange(len(signal))
    signal[models, examples.groups] += gamma
    noise[models, models] += rho
    return Coefficients(signal, noise)


def decompose(weights: Tensor, initial: Tensor, examples: TwoPatchExamples) -> Coefficients:
    """Find the coefficients of weights (K, 2, m, d), by projection; best in float64."""
    clients, n, d = examples.noise.shape
    room = d - len(examples.signals)
    if clients * n > room:
        raise ValueError(
            f"examples: expected at most d - C = {room} noise patches, got {clients * n}: their "
            "coefficients are not unique; take fewer, a larger d, or follow coefficient_step"
        )
    change = weights - initial
    signal = torch.einsum("kjrd,cd->kcjr", change, examples.signals)
    noise = examples.noise.reshape(-1, d)
    targets = noise @ change.reshape(-1, d).T
    solved = torch.linalg.solve(noise @ noise.T, targets) * _squared_norms(noise)
    by_client = solved.reshape(clients, n, *change.shape[:3]).permute(2, 0, 1, 3, 4)
    return Coefficients(signal * _second_layer(change)[:, None], by_client)


def mixing_matrix(groups: Tensor) -> Tensor:
    """Return the shares (K, K), float64, of averages over each group's clients with equal weight.

    Groups (K,) that are all the same give FedAvg, all different local training, those of the
    signals the weighted FedAvg of appendix C.4.
    """
    same = (groups[:, None] == groups).double()
    return same / same.sum(1, keepdim=True)


def train(
    examples: TwoPatchExamples,
    initial: Tensor,
    mixing: Tensor,
    *,
    rounds: int,
    local_steps: int,
    learning_rate: float,
) -> Iterator[Tensor]:
    """Yield all clients' weights after each round, shape (K, 2, m, d): full-batch FedAvg.

    All clients begin with the first weights (2, m, d); :func:`mixing_matrix` gives (K, K). Gradient
    steps of a round stay in the span of the client's own n patches, so that they need only the
    products of these, (n, n) instead of (n, d).
    """
    clients = len(examples.noise)
    if mixing.shape != (clients, clients) or bool(((mixing.sum(1) - 1).abs() > 1e-5).any()):
        raise ValueError(
            f"mixing: expected shape {(clients, clients)} with rows that add up to 1, got shape "
            f"{tuple(mixing.shape)}; mixing_matrix makes one"
        )
    mu, xi = examples.client_signals, examples.noise
    unit_noise = xi / _squared_norms(xi)
    within = xi @ unit_noise.transpose(1, 2)  # <xi_i, xi_i'> / ||xi_i'||^2, (K, n, n)
    signs = _second_layer(mu)[:, None]
    weights = initial.expand(len(xi), *initial.shape)
    for _ in range(rounds):
        signal, noise = _inner_products(weights, examples)
        gammas, rhos = torch.zeros_like(signal), torch.zeros_like(noise)
        for _ in range(local_steps):
            gamma, rho = _increments(signal, noise, examples, learning_rate)
            signal = signal + signs * gamma
            noise = noise + (within @ rho.flatten(2)).view_as(noise)
            gammas, rhos = gammas + gamma, rhos + rho
        learned = (signs * gammas)[..., None] * (mu / _squared_norms(mu))[:, None, None]
        memorised = rhos.flatten(2).transpose(1, 2) @ unit_noise
        weights = weights + learned + memorised.view_as(weights)
        weights = torch.tensordot(mixing.to(weights), weights, 1)
        yield weights


def _inner_products(weights: Tensor, examples: TwoPatchExamples) -> tuple[Tensor, Tensor]:
    """Return <w_kjr, mu_k> (K, 2, m) and <w_kjr, xi_ki> (K, n, 2, m)."""
    filters = weights.flatten(1, 2)  # (K, 2 m, d)
    signal = torch.einsum("kfd,kd->kf", filters, examples.client_signals)
    noise = examples.noise @ filters.transpose(1, 2)
    return signal.unflatten(1, weights.shape[1:3]), noise.unflatten(2, weights.shape[1:3])


def _margins(signal: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
    """Return y f of each example, (K, n), from the inner products."""
    of_signal = torch.stack([torch.relu(-signal), torch.relu(signal)], 1).mean(3)  # y = -1, +1
    both = torch.relu(noise).mean(3)
    both = both + torch.where(labels[..., None] > 0, of_signal[:, 1:], of_signal[:, :1])
    return labels * (both[..., 1] - both[..., 0])


def _increments(
    signal: Tensor, noise: Tensor, examples: TwoPatchExamples, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """Return a step's increments of the clients' own gamma (K, 2, m) and rho (K, n, 2, m)."""
    labels = examples.labels
    n, width = labels.shape[1], signal.shape[2]
    slopes = learning_rate / (n * width) * torch.sigmoid(-_margins(signal, noise, labels))  # -l'
    right, left = (slopes * (labels == sign) for sign in (1, -1))
    active = (signal > 0) * right.sum(1)[:, None, None] + (signal < 0) * left.sum(1)[:, None, None]
    gamma = active * _squared_norms(examples.client_signals)[..., None]
    scale = slopes * labels * _squared_norms(examples.noise)[..., 0]
    return gamma, (noise > 0) * (scale[..., None] * _second_layer(noise))[..., None]


def _second_layer(dtype_of: Tensor) -> Tensor:
    """Return the fixed weights j of the second layer, shape (2,), in the dtype of a tensor."""
    return dtype_of.new_tensor([-1.0, 1.0])


def _squared_norms(vectors: Tensor) -> Tensor:
    """Return ||v||^2 of vectors (..., d), shape (..., 1)."""
    return vectors.square().sum(-1, keepdim=True)
