"""One exchange of sums over features: the last layer by ridge regression, and nothing is trained.

Beyond He et al., CVPR 2025 (AFL): the sums Z^T Z and Z^T Y that solve the joint problem

    min over W of  ||Z W - Y||^2 + rho ||W||^2,  Y one-hot minus 1/C, with a bias,

are added up as whole numbers, so that the model has the same bits for every split of the examples
and every order of the replies; rho is chosen on examples that the clients hold out, whose sums
travel beside the others', and the model is then solved from all; sums may be masked, so that the
server opens only the total; and, kept on its disk, they can be taken out again, one client at a
time. What an example's features are is a property of the network, all of which but the last layer
stays as it was: see :class:`~fedntk.ntk.features.scattering.Scattering`, and
:func:`~fedntk.ntk.with_fourier_features`.
"""

import functools
import math
import operator
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import BadReply, Normaliser, require_memory
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.convex.private_sums import SumNoise, solve_noisy
from fedntk.ntk.features.fixed_point import MOST_BITS
from fedntk.ntk.noise import Noise
from fedntk.ntk.options import option, refuse_first, state
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumFormat
from fedntk.ntk.payloads.sum_task import NoiseOptions, SumOptions, SumTask
from fedntk.trust.secure_sum import FEWEST

from ..core.asynchronous import AsynchronousStrategy
from ..core.averaging import record_of
from ..core.client_ledger import LedgerStrategy
from ..core.exchange import Aggregated, in_parts
from ..core.feature_sums import Sums, SumsStrategy, add_up
from ..core.replies import Reply, screen_own_sizes
from .closed_form import ClosedFormStrategy, Layer

AT_ONCE = 2**26  # bytes of replies in memory, if they can be added as they come


class OneExchange(NoiseOptions, LedgerStrategy, AsynchronousStrategy, ClosedFormStrategy):
    """Solve for the last layer from one exchange of sums.

    Clients are :class:`~fedntk.clients.ClosedFormClient`. With `bits` a reply is added to the total
    when it comes, so that the server holds few of them at a time; without, sums are float64, and
    features of over 100 times the median client's size are dropped.

    With `epsilon` the model is differentially private, as :mod:`fedntk.ntk.convex.private_sums`
    derives: it follows from one release of the sums with noise, and it has no bias. Each reply
    counts as one example.

    Examples
    --------
    >>> from torch import nn
    >>> from fedntk.ntk import with_fourier_features
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> strategy = OneExchange(network=with_fourier_features(network, 50, seed=0), bits=8)
    >>> strategy.shape
    (3, 50)
    """

    bits: int = SumOptions.options()["bits"].field(default=8)
    validation_share: float = SumOptions.options()["validation_share"].field(default=0.1)
    auto_ridge: bool = SumsStrategy.options()["auto_ridge"].field(default=True)
    personal: bool = option(
        "whether clients evaluate models of their own, in which their examples count more, by a "
        "weight that each chooses on what it holds out; they are sent the sums over all clients",
        default=False,
    )
    ridge_used: float = state(float)
    total_sent: dict[str, NDArray[Any]] = state(dict)  # sums over all clients, if `personal`
    released: bool = state(bool, reset=False)  # whether there are sums with noise
    epsilon_of_survivors: float = state(float)
    total: dict[str, NDArray[Any]] = state(dict)  # sums over all counted clients, if asynchronous
    changed: bool = state(bool)  # whether clients were taken out of it since the last solution

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_validation()
        self._survivors: int | None = None

    def check(self) -> None:
        """Refuse what does not go with a client's own model, noise, or sums in any order."""
        super().check()
        whole, late = self.bits != UNQUANTISED, self.asynchronous
        rules = {
            "personal: clients that send only masked sums evaluate no model of their own, which "
            "would show these; expected secure_aggregation = False, got True": (
                self.personal and self.secure_aggregation
            ),
            "personal: expected a validation_share above 0, got 0": (
                self.personal and not self.validation_share
            ),
            f"asynchronous: sums in any order need bits = 2 ... {MOST_BITS}, got {self.bits}": (
                late and not whole
            ),
            "asynchronous: the masks of a secure sum cancel only if all answer in one round; "
            "expected secure_aggregation = False, got True": late and self.secure_aggregation,
            "asynchronous: expected a round_deadline, the seconds after which a round goes on with "
            "what has come, such as 60, got 0": late and not self.round_deadline,
            "asynchronous: clients are judged when all have answered; expected remove_harmful = "
            f"0, got {self.remove_harmful}": late and self.remove_harmful,
        }
        refuse_first(rules)

    @classmethod
    def mechanism_of(cls, options: Any) -> type[Noise] | None:
        """Return what adds noise if there is an epsilon."""
        return SumNoise if options.epsilon else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count sums with noise as released: a run that was cut off may have sent the model out."""
        super().load_state_dict(state)
        self.released = self.released or bool(self.epsilon)

    def evaluates_in(self, server_round: int) -> bool:
        """Whether a round is evaluated; before the first exchange the last layer is random."""
        return server_round > 0 and super().evaluates_in(server_round)

    @property
    def sum_format(self) -> SumFormat:
        """What all clients' sums have to be."""
        num_classes, width = self.shape
        noisy = bool(self.epsilon and self.secure_aggregation)
        return SumFormat(width, num_classes, None, self.fixed_point, noisy)

    def normal_equations(
        self, sums: FeatureStatistics, normaliser: Normaliser | None = None
    ) -> tuple[Normaliser, NormalEquations]:
        """Return the problem of the features as they are."""
        identity = Normaliser.identity(self.width)
        return identity, NormalEquations.of(sums, identity, bias=bool(self.bias))

    def require_memory(self) -> None:
        """Refuse a layer that the server lacks the memory to solve for."""
        one = self.upload_bytes()
        held = self.min_available_nodes * one
        if self.bits != UNQUANTISED and self.secure is None:  # replies are added as they come
            held = min(held, max(one, AT_ONCE))
        require_memory(
            (36 + 4 * bool(self.validation_share)) * self.width**2 + 2 * held,
            f"{self.width} features from {self.min_available_nodes} clients",
            cure="use fewer features, or bits = 8, with which replies are added as they come",
        )
        if self.epsilon:
            shares = math.ceil(self.secure_threshold * self.min_available_nodes)
            self.noise_of(max(FEWEST, shares) if self.secure_aggregation else 0)

    # -------------------------------------------------------------------------- asking

    def choose_steps(self, arrays: ArrayRecord) -> NDArray[np.float32]:
        """Choose the steps of fixed-point numbers: 1 for rows that clients scale to the radius."""
        return np.ones(self.width, np.float32) if self.epsilon else super().choose_steps(arrays)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all clients for their sums, or for the public keys of a secure sum."""
        if self.asynchronous:
            self.solved = False
        elif not self.solved:
            if self.released:
                raise ValueError(
                    "epsilon: this strategy has released sums with noise, or may have before its "
                    "run was cut off, and a second release adds to epsilon; make a new strategy, "
                    "in another folder, and add up the epsilons of both"
                )
            self.summed, self.removed = (), ()
        if not (self.solved or self.total):
            self.steps = self.choose_steps(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Add the task, the steps of fixed-point numbers, and what of a secure sum is for it."""
        evaluating = stage != MessageType.TRAIN
        if evaluating and not (self.total_sent or self.epsilon):
            return super().content_for(client, stage, arrays, config)
        secure = None if evaluating else self.secure
        options = (*SumOptions.options(), *NoiseOptions.options())
        task = SumTask(
            step="statistics" if secure is None else secure.step,
            run_key=self.run_key,
            ridge=self.ridge_used,
            **{name: getattr(self, name) for name in options},
        )
        own = ConfigRecord({**config, **task.to_config()})
        if task.step not in ("statistics", "masked"):  # the exchanges that need no network
            arrays = ArrayRecord()
        content = super().content_for(client, stage, arrays, own)
        if evaluating and self.total_sent:
            content["total"] = record_of(self.total_sent)
        if len(self.steps) and arrays and (self.total_sent or not evaluating):
            content["steps"] = record_of({"step": self.steps})
        if secure is not None:
            secure.add_to(content, client)
        return content

    # ---------------------------------------------------------------------- adding up

    def parse(self, reply: Reply) -> Sums:
        """Check a client's sums; with noise to come, of rows within the radius, and how many.

        A client with more than `client_examples` would not have the privacy that epsilon claims.
        """
        if not self.epsilon:
            return self.parse_sums(reply.arrays(), reply.num_examples)
        if reply.num_examples != 1:
            raise BadReply("num-examples", f"expected 1 with noise, got {reply.num_examples}")
        sums = self.parse_sums(reply.arrays())
        most = min(self.max_examples, self.client_examples or self.max_examples)
        sums.everyone.require_rows(self.radius, most)
        return sums

    def collect(self, replies: Iterable[Message]) -> tuple[Sequence[Sums], MetricRecord]:
        """Return the sums over all clients, in one or more parts, and the round's metrics."""
        if self.secure is not None:
            total, added, rejected = self.complete_sum(self.secure, replies)
            self.released = self.released or bool(self.epsilon and total is not None)
            self._survivors = len(added)
            return [] if total is None else [total], self.round_metrics(added, rejected)
        totals = [self.parse_sums(self.total, checked=True)] if self.total else []
        added, rejected = list[Reply](), Counter[str]()
        for part in in_parts(replies, self.replies_at_once if len(self.steps) else None):
            added += self._add_up(part, totals, rejected)
        added.sort(key=lambda reply: (reply.client, reply.node))
        metrics, counted = self.round_metrics(added, rejected), len(added)
        if self.asynchronous:
            counted, metrics["clients"] = len(self.counted), len(self.counted)
            if not added and not self.changed:
                return [], metrics
            self.total = totals[0].to_arrays(self.fixed_point) if totals else {}
            self.changed = False
        if not self.enough(counted):
            return [], metrics
        return self.without_harmful(metrics) if self.remove_harmful else totals, metrics

    @property
    def replies_at_once(self) -> int:
        """Number of replies in memory, if they are added as they come."""
        return max(1, AT_ONCE // self.upload_bytes())

    def _add_up(
        self, part: list[Message], totals: list[Sums], rejected: Counter[str]
    ) -> list[Reply]:
        """Add some replies to the one total, or begin it; return those that are in it."""
        pairs, refused = self.accepted(part, self.parse, MessageType.TRAIN)
        if not len(self.steps):
            pairs = self.apply_screen(pairs, refused, screen_own_sizes)
        if self.asynchronous:
            pairs = self.count_once(pairs, refused)
        rejected += refused
        self.keep({reply.client: own for reply, own in pairs})
        if pairs:
            totals[:] = [add_up([*totals, *(own for _, own in pairs)])]
        for reply, _ in pairs:
            reply.release()
        return [reply for reply, _ in pairs]

    def leave(self, clients: Collection[int]) -> None:
        """Take what some clients sent out of the sum, and ask them no more.

        It needs keep_sums; of a node that is gone, what it sent stays otherwise, as does what a
        full disk did not keep. Call it between rounds of an asynchronous run, such as in
        `evaluate_fn`. Remove clients from `left` to let them back. After a run, and in others,
        there is `without`.
        """
        self.left |= set(clients)
        if not (counted := self.counted & set(clients)):
            return
        kept = self.kept(sorted(counted & set(self.summed)))
        if not kept:
            return
        self.counted -= set(kept)
        total = self.parse_sums(self.total, checked=True)
        total = functools.reduce(operator.sub, kept.values(), total)
        self.total = total.to_arrays(self.fixed_point) if self.counted else {}
        self.summed = tuple(client for client in self.summed if client not in kept.clients)
        self.changed = True

    def last_layer(self, sums: Sequence[Sums]) -> Layer:
        """Return weights (C, p) and biases (C,) of the joint solution."""
        total = add_up(sums)
        self.total_sent = total.to_arrays(self.fixed_point) if self.personal else {}
        if self.epsilon:
            return self._layer_with_noise(total.everyone), np.zeros(self.shape[0])
        _, linear, self.ridge_used = self.solve_sums(total, self.global_arrays)
        bias = linear[self.width] if self.bias else np.zeros(self.shape[0])
        return linear[: self.width].T.astype(np.float64), bias.astype(np.float64)

    def noise_of(self, quorum: int) -> SumNoise:
        """Return the noise; `quorum` is the fewest clients of a secure sum, else 0."""
        num_classes, width = self.shape
        return SumNoise.of(self, width, num_classes, quorum)

    def _layer_with_noise(self, sums: FeatureStatistics) -> NDArray[np.float64]:
        """Return weights (C, p) from sums with noise, which a trusted server adds here.

        They are those for rows of norm R, times R: for features of norm 1 scores are near one-hot.
        """
        quorum = 0 if self.secure is None else self.secure.quorum
        noise, counted = self.noise_of(quorum), None
        if not quorum:
            sums = noise.add(sums, np.random.default_rng(secrets.randbits(256)))
            self.released = True  # whatever becomes of them; what `add` refuses has had no noise
        elif self._survivors is not None:
            counted = self._survivors - self.colluding
        self.epsilon_of_survivors = noise.epsilon(self.delta, counted)
        variance = noise.variances(self._survivors if quorum else None)[0]
        gram, cross = torch.from_numpy(sums.matrix()), torch.from_numpy(sums.class_sums.T)
        return self.radius * solve_noisy(gram, cross, float(variance)).T.numpy()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Compute the last layer from the accepted sums."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None and metrics is not None:
            if self.epsilon:
                metrics["epsilon"], metrics["delta"] = self.epsilon_of_survivors, self.delta
            else:
                metrics["ridge"] = self.ridge_used
        return arrays, metrics

    def solve_again(self, sums: Sums, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays with the layer of these sums in its place."""
        self.global_arrays = arrays
        self.require_memory()
        return self.with_layer(arrays, [sums])
