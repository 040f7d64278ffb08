"""TCT: train a network with any strategy, then solve a convex problem in its tangent features.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4 and algorithms 1 and 2:

    stage 1     T_1 rounds of a bootstrap strategy (FedAvg) on the network
    convexify   z = tangent features of the first logit, the last layer drawn anew; one exchange
                of their moments makes each of mean 0 and variance 1 over all clients' examples
    stage 2     T_2 rounds of SCAFFOLD on sum_k (n_k / n) L_k(W):
                client   theta_k = M steps of theta - eta (grad L_k(theta) - h_k)          eq. (3)
                server   theta = sum_k (n_k / n) theta_k

The correction is h_k = c_k - c (the invariant of appendix A.1), with c_k the mean gradient along
client k's last steps. When all clients took part in the last round, c is the difference of its
model and this one over M eta, and only models travel: algorithm 1. The paper does not treat partial
participation; here it is SCAFFOLD's own, and c travels down with theta: see
:mod:`fedntk.strategies.tct.control`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import Normaliser, Predictor, TCTModel, require_memory
from fedntk.ntk.options import state
from fedntk.ntk.payloads.feature_statistics import FEWER
from fedntk.ntk.robust_averages import DEFENCES
from fedntk.ntk.support.arrays import ArrayDict

from ..core.averaging import differing, named_arrays, record_of
from ..core.base import BaseStrategy
from ..core.exchange import Pairs, logger
from ..core.feature_sums import Sums
from ..core.inner import InnerStrategy
from .convex_strategy import ConvexStrategy
from .phases import BootstrapRounds, Convexify, ConvexRounds, Phase, ServerSolve
from .statistics import ClassCounts, PooledStatistics


class TCT(ConvexStrategy):
    """Train, convexify, train (Yu et al. 2022). Clients are :class:`~fedntk.clients.TCTClient`.

    The first `bootstrap_rounds` rounds are stage 1, one is for the moments of the features (none
    with ``normalise=False``), and the others are stage 2. The arrays that :meth:`start`
    returns, and ``evaluate_fn`` is given, are the network's, ``tct.linear``, ``tct.mean`` and
    ``tct.scale``; :meth:`predictor` makes a model of them. Until stage 2 has changed the linear
    model, clients evaluate the network. All nodes are asked for moments, features or sums.

    Beyond the paper, the server can solve the problem in one exchange. ``solve="server"`` takes
    about 2 n p bytes up, and the server sees features, from which inputs can be computed, and
    labels. ``solve="statistics"`` takes 4 p^2 bytes up, or 8 n p if less: Z^T Z and Z^T Y of raw
    features and the classes' counts, from which the server normalises, centres and solves, with the
    same result for every split of the examples. With `bits` the sums are exact whole numbers, 2 p^2
    bytes or 8 n p, in steps of powers of two that the server chooses by examples (`validation`).

    A client is sent the network and the normaliser once, then only linear models. One that lost
    what it keeps says so and is sent it again in the same round; if its own c_k is lost, the
    corrections of all start again from zero. All clients that were ever seen count in c, each with
    the number of examples that it reported first, whatever it says later. A node that reports no
    partition is known by its node id and is a new client after it registers anew, so give nodes a
    partition-id. The moments are those of the clients that answered in that one round: see
    ``min_completed``.

    With three clients or more, models that moved over 100 times as far as the median client's are
    dropped, as are moments and features of over 100 times its size. Other valid-looking malicious
    replies are not detected: a false model stays in c, and false moments in the normaliser; a
    client that says again and again that its c_k is lost has all corrections start again; and false
    sums can leave ``solve="statistics"`` without a solution, round after round.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> strategy = TCT(network=network, bootstrap=FedAvg(), bootstrap_rounds=20)
    >>> strategy.shape
    (50, 3)
    """

    client = "TCTClient"
    replies = "weights, then linear models"
    averages = False
    defences = (*DEFENCES, "validation")
    combined_by: ClassVar = {"rate-times-lambda": max}

    phases_done: int = state(int)  # how many of the phases are over
    inner: InnerStrategy | None = state(lambda: None, reset=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.phases: list[Phase] = []  # of a run, in order
        if self.bootstrap is None:
            self.bootstrap_rounds = 0
        else:  # it must not wait for more nodes than it is shown
            self.inner = InnerStrategy("bootstrap", self.bootstrap, self)
            self.min_available_nodes = max(self.min_available_nodes, self.inner.waits_for)
            if self.bootstrap_rounds:
                self.phases.append(BootstrapRounds(self, self.inner))
        if self.solve == "clients" and self.normalise:
            self.phases.append(Convexify(self))
        if self.balanced:
            self.phases.append(ClassCounts(self))
        last: Mapping[str, Callable[[ConvexStrategy], Phase]]
        last = {"clients": ConvexRounds, "server": ServerSolve, "statistics": PooledStatistics}
        self.phases.append(last[self.solve](self))

    @staticmethod
    def rounds_before_stage_2(options: Any) -> int:
        """Count the rounds of stage 1, of the classes' counts and of the features' moments."""
        moments = options.solve == "clients" and options.normalise
        return int(options.bootstrap_rounds + options.balanced + moments)

    @property
    def phase(self) -> Phase | None:
        """What is done in the next round; None once the server has solved the problem."""
        return self.phases[self.phases_done] if self.phases_done < len(self.phases) else None

    @property
    def learned(self) -> str:
        """``"linear-model"`` once a round has changed it, ``"network"`` before."""
        return "linear-model" if self.linear_rounds else "network"

    def predictor(
        self, arrays: ArrayRecord | Mapping[str, NDArray[Any]], network: nn.Module | None = None
    ) -> Predictor:
        """Make the predictor of the newest arrays: a TCTModel, or before stage 2 the network.

        `network` is the strategy's own by default.
        """
        if self.learned == "network":
            return super().predictor(arrays, network)
        whole = self.architecture(network)
        return TCTModel.from_arrays(whole, self.feature_map, named_arrays(arrays), loss=self.loss)

    def without(self, clients: Sequence[int], arrays: ArrayRecord) -> ArrayRecord:
        """Return the model that never had some clients: see :meth:`.SumsStrategy.without`.

        The normaliser is that of the others. The network stays: it was trained with these clients
        if stage 1 asked them.
        """
        if self.solve != "statistics":
            raise ValueError(f"without: goes with solve = statistics, got solve = {self.solve}")
        what = f"pooled-statistics of {self.width} features"
        require_memory(self._memory, what, cure=FEWER)
        return super().without(clients, arrays)

    def solve_again(self, sums: Sums, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays with the solution of these sums in its place."""
        normaliser, linear, _ = self.solve_sums(sums, arrays)
        return _with(arrays, self.arrays_of(normaliser, linear))

    def work_within(self, owner: BaseStrategy, *, everyone: bool) -> None:
        """Refuse if stage 2 begins with one exchange with all clients, and some are not shown."""
        if not everyone and (self.normalise or self.solve != "clients"):
            raise ValueError(
                f"normalise, solve: within a {type(owner).__name__} a round shows only some of the "
                "clients, and moments of features, or a solution, would be only theirs; expected "
                f"normalise = False and solve = 'clients', got {self.normalise} and {self.solve!r}"
            )
        super().work_within(owner, everyone=everyone)
        if self.inner is not None:
            self.inner.disable_sampling()

    def settings(self) -> dict[str, Any]:
        """Add the bootstrap's, and the number of validation examples."""
        return {
            **super().settings(),
            "bootstrap": {} if self.inner is None else self.inner.settings(),
            "validation": 0 if self.validation is None else len(self.validation[1]),
        }

    @property
    def _memory(self) -> int:
        """Bytes on the server beside replies to sum up: sums, two normal equations, a factor."""
        return int((40 if self.validation_share else 36) * self.width**2)

    def require_memory(self) -> None:
        """Refuse sums of ``min_available_nodes`` clients that would not fit."""
        if self.solve == "statistics":
            clients = self.min_available_nodes
            require_memory(  # uploads as they came, and as arrays
                self._memory + 2 * self.upload_bytes() * clients,
                f"pooled-statistics of {self.width} features from {clients} clients",
                cure=FEWER,
            )

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Add the linear model and the normaliser to the network's arrays.

        After :meth:`load_state_dict` `initial_arrays` are all that the run had returned by then.
        A second run of one strategy object begins anew, except for what its bootstrap keeps.
        """
        if odd := differing(self.network_of(initial_arrays), self.network.state_dict()):
            raise ValueError(f"initial_arrays: not those of the network, differing in {odd[:5]}")
        initial_arrays = super().begin(initial_arrays, num_rounds, done)
        if self.keep_sums is not None and not done:
            self.require_disk(self.min_available_nodes)
        if num_rounds <= self.rounds_before_stage_2(self):
            said = "num_rounds = %d end before stage 2, which begins after %d of stage 1"
            logger.warning(said, num_rounds, self.bootstrap_rounds)
        if done and set(TCTModel.ARRAYS) <= initial_arrays.keys():
            return initial_arrays
        if done > self.bootstrap_rounds:
            raise ValueError(
                f"initial_arrays: expected {', '.join(TCTModel.ARRAYS)} as well, since the loaded "
                "state goes with them; pass all arrays that were returned with it"
            )
        zero, identity = np.zeros(self.shape, np.float32), Normaliser.identity(self.width)
        return _with(self.network_of(initial_arrays), self.arrays_of(identity, zero))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the phase ask a sample of the clients, or all of them."""
        self.global_arrays, self.server_round = arrays, server_round
        if self.fraction_train == 0.0 or self.phase is None:
            return []
        fraction = 1.0 if self.phase.asks_everyone else self.fraction_train
        minimum = self.fewest_sampled
        nodes = self.sample(grid, server_round, "train", fraction, minimum, self.held_out)
        return self.phase.messages(nodes, config, grid)

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what the phase asks of one client, or what it is to evaluate."""
        if stage == MessageType.TRAIN and self.phase is not None:
            return self.phase.content_for(client, arrays, config)
        if self.learned == "network":
            return super().content_for(client, stage, self.network_of(arrays), config)
        parts = [*self.sent.lacks(client, "network", "normaliser"), "linear"]
        return self.task_message("linear", parts, arrays, config)

    @property
    def takes_weights(self) -> bool:
        """In stage 1, from clients of the bootstrap."""
        return isinstance(self.phase, BootstrapRounds)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Have the phase aggregate, and go on to the next one if it is over."""
        if (phase := self.phase) is None:
            return None, None
        arrays, metrics = phase.aggregate(replies)
        self.train_metrics[server_round] = metrics
        self.linear_rounds += phase.changes_linear and arrays is not None
        self.phases_done += phase.is_over(updated=arrays is not None)
        if arrays is None:
            return None, metrics
        self.global_arrays = _with(self.global_arrays, arrays)
        return self.global_arrays, metrics

    def evaluations(self, replies: Iterable[Message]) -> tuple[Pairs[Any], Counter[str]]:
        """Note who has the network."""
        pairs, rejected = super().evaluations(replies)
        if self.learned == "linear-model":
            for reply, _ in pairs:
                self.sent.mark(reply.client, "network", "normaliser")
        return pairs, rejected


def _with(arrays: ArrayRecord, changed: ArrayDict) -> ArrayRecord:
    """Return arrays with some others in place of, or beside, their own."""
    return ArrayRecord({**arrays, **record_of(changed)})
