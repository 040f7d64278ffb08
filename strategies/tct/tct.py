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

import math
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import FeatureMap, Loss, Normaliser, Predictor, TCTModel, require_memory
from fedntk.ntk.features import FeatureKind
from fedntk.ntk.losses import check_loss
from fedntk.ntk.payloads import UNQUANTISED, ConvexTask, Solve, check_compression

from ..core.array_archive import under
from ..core.averaging import named_arrays
from ..core.base import BaseStrategy
from ..core.exchange import Pairs, logger
from ..core.inner import InnerStrategy
from ..core.lost_state import ResendingStrategy
from ..core.trust_protocols import VouchesForKeys
from .control import ControlVariate
from .kept_sums import KeptSums
from .phases import BootstrapRounds, Convexify, ConvexRounds, Phase, ServerSolve
from .secure import SecureStatistics, check_secure
from .statistics import ClassCounts, PooledStatistics, check_statistics

__all__ = ["TCT", "ConvexOptimizer"]

LINEAR, MEAN, SCALE = TCTModel.ARRAYS
PARTS = {"normaliser": (MEAN, SCALE), "linear": (LINEAR,)}  # records beside the network
FEWER = "lower num_features"
BOOTSTRAP = "bootstrap."  # begins the names of the bootstrap strategy's state
ConvexOptimizer = Literal["scaffold", "fedavg", "gd"]
T = TypeVar("T")


class TCT(ResendingStrategy):
    """Train, convexify, train (Yu et al. 2022). Clients are :class:`~fedntk.clients.TCTClient`.

    Of ``num_rounds`` rounds, `bootstrap_rounds` are stage 1, one is for the moments of the features
    (none with ``normalise=False``), and the others are stage 2. The arrays that :meth:`start`
    returns, and that ``evaluate_fn`` is given, are the network's and ``tct.linear``, ``tct.mean``
    and ``tct.scale``; :meth:`predictor` makes a model of them. Until stage 2 has changed the linear
    model, clients evaluate the network.

    A client is sent the network and the normaliser once, then only linear models. One that lost
    what it keeps says so and is sent it again in the same round; if its own c_k is lost, the
    corrections of all start again from zero. All clients that were ever seen count in c, each with
    the number of examples that it reported first, whatever it says later. A node that reports no
    partition goes by its node id and is a new client after it registers anew, so give nodes a
    partition-id. The moments are those of the clients that answered in that one round: see
    ``min_completed``. With three clients or more, models that moved over 100 times as far as the
    median client's are dropped, as are moments and features of over 100 times its size. Other
    well-formed lies are not defended against: within that limit a false model stays in c, and false
    moments in the normaliser; a client that says time and again that its c_k is lost has the
    corrections of all start again each time; and false sums can leave ``solve="statistics"``
    without a solution, round after round.

    Parameters
    ----------
    network : nn.Module
        The clients' architecture; its weights do not matter.
    bootstrap : Strategy, optional
        Flower strategy of stage 1, whose replies are one set of weights. None: stage 2 begins with
        the initial weights, such as those of a pre-trained network. It chooses among the nodes that
        this strategy samples. What a bad reply holds never reaches it.
    bootstrap_rounds : int
        T_1; without a bootstrap there are none.
    num_features : int
        p; 0 or more than the network has: all coordinates.
    features : {"entk", "entk-sketch", "last-layer", "fourier"}
        Tangent features: p coordinates, or a sketch of all in p numbers; or the last layer's inputs
        (Table 12), or p random Fourier features of these. See :class:`~fedntk.ntk.FeatureMap`.
    feature_seed : int
        Of the last layer's new weights, and of the coordinates, the sketch or the frequencies.
    head : str
        Name of the last linear layer; the last ``nn.Linear`` by default.
    normalise : bool
        Whether features get mean 0 and variance 1.
    bias : bool
        Whether the linear model has one (algorithm 2's b; eq. (1) has none).
    loss : {"mse", "cross-entropy"}
        Of stage 2; cross-entropy is TCT-CE (Table 11). Targets of least squares are one-hot minus
        1/C.
    optimizer : {"scaffold", "fedavg", "gd"}
        Of stage 2: SCAFFOLD; the same without a correction; gradient descent, one step a round.
    learning_rate : float
        eta of stage 2, of L_k = ||Z W - Y||^2 / (2 n_k). Steps diverge if eta times the largest
        eigenvalue of Z Z^T / n_k is above 2; the metric ``rate-times-lambda`` is the largest of
        the clients'. Without normalisation features are much smaller and larger rates fit: 0.01
        to 0.5 in the paper.
    local_steps : int
        M.
    solve : {"clients", "server", "statistics"}
        ``"server"``, beyond the paper: clients send their features and labels in one exchange,
        float16 or compressed, and the server solves the ridge regression exactly. About 2 n p bytes
        up, and the server sees features from which inputs can be computed, and labels.
        ``"statistics"``, beyond the paper: clients send sums alone, Z^T Z and Z^T Y of the raw
        features and the classes' counts, in one exchange; the server normalises, centres and solves
        by these. 4 p^2 bytes up, whatever n, the same result for every split of the examples.
    ridge : float or "auto"
        Of ``solve="server"`` and ``"statistics"``: see :func:`fedntk.ntk.ridge_regression`.
        ``"auto"``, for ``"statistics"``: the one of 1e-4 ... 10 with the least squared error on
        `validation`, or on what clients hold out (`validation_share`). A ridge too small for a
        Cholesky factor is raised tenfold.
    sparsity, bits : float, int
        Compression of the features for ``solve="server"``, as in CP-NTK-FL; 0 and 32: none. For
        ``"statistics"`` there is no sparsity, and with 2 ... 8 bits features are fixed-point
        numbers: sums are exact whole numbers, in every grouping and order, 2 p^2 bytes up. Their
        steps are powers of two, chosen by the server from the features of `validation`.
    balanced : bool
        For ``solve="statistics"``: weigh examples so that all classes have the same weight, which
        takes one more exchange before, of the classes' counts. Not with fixed-point numbers.
    secure_aggregation : bool
        For ``solve="statistics"`` with fixed-point numbers: clients mask their sums, and the server
        sees the sum over all of them alone (Bonawitz et al., CCS 2017), the same to the bit. It
        takes four exchanges more in the round, and three clients at least. No client's sums can
        be checked by themselves then; the joint ones are.
    secure_threshold : float
        Share of the clients who must stay to the end of that, above 1/2.
    vouching : VouchesForKeys, optional
        Vouches for the clients' public keys in the run `run`, such as
        :class:`fedntk.trust.KeyServer`. Without it a server that breaks the protocol could name
        keys of its own for the clients: see :class:`fedntk.trust.ParcelKeys`.
    validation_share : float
        For ``ridge="auto"`` of ``solve="statistics"`` where the server has no examples: a share,
        up to 0.5, that each client holds out of its own, by class. It sends the sums of these and
        of the others, twice the bytes. The ridge has the least squared error on the joint sums of
        what is held out; then all examples count. 0: none.
    keep_sums : path, optional
        For ``solve="statistics"``: folder on the server's disk in which each client's sums are
        kept, as many bytes as it sent, so that :meth:`without` can take a client out again. There
        is a folder for each run in it, which nothing removes. Not with `balanced`, whose weights
        are of all clients' counts. None: sums are not kept.
    validation : tuple of Tensor and Tensor, optional
        Examples x (m, ...) on the server, as the network takes them, that nobody trains on, and
        their labels (m,), int64: for ``ridge="auto"``, and for `bits`, which uses x alone.
    device : torch.device or str
        Where the server solves from features, and computes features of validation examples; it
        solves from sums on the CPU.
    **options
        Of :class:`~fedntk.strategies.BaseStrategy` (seed, min_completed) and of Flower's
        FedAvg. All nodes are asked for moments or features, whatever ``fraction_train``.

    Attributes
    ----------
    phase : Phase or None
        What is done in the next round: bootstrap, convexify, convex-rounds, server-solve,
        class-counts, pooled-statistics or secure-statistics; None once the server has solved the
        problem.
    class_weights : ndarray of float64, shape (C,)
        Of the classes' examples in sums; all 1 unless `balanced`.
    linear_rounds : int
        Rounds so far that changed the linear model.
    summed : tuple of int
        Clients whose sums the linear model is of and are kept, in the order in which they add up.
    run_key : str
        Names the run for the clients' folders; drawn at random when it begins.

    Raises
    ------
    ValueError
        If an argument is out of range or two do not fit together.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> strategy = TCT(network=network, bootstrap=FedAvg(), bootstrap_rounds=20)
    >>> strategy.shape
    (49, 3)
    """

    client = "TCTClient"
    replies = "weights, then linear models"
    averages = False
    combined_by: ClassVar = {"rate-times-lambda": max}

    def __init__(
        self,
        *,
        network: nn.Module,
        bootstrap: Strategy | None = None,
        bootstrap_rounds: int = 100,
        num_features: int = 100_000,
        features: FeatureKind = "entk",
        feature_seed: int = 123,
        head: str = "",
        normalise: bool = True,
        bias: bool = False,
        loss: Loss = "mse",
        optimizer: ConvexOptimizer = "scaffold",
        learning_rate: float = 5e-5,
        local_steps: int = 500,
        solve: Solve = "clients",
        ridge: float | Literal["auto"] = 1e-2,
        sparsity: float = 0.0,
        bits: int = UNQUANTISED,
        balanced: bool = False,
        secure_aggregation: bool = False,
        secure_threshold: float = 2 / 3,
        vouching: VouchesForKeys | None = None,
        validation_share: float = 0.0,
        keep_sums: str | os.PathLike[str] | None = None,
        validation: tuple[Tensor, Tensor] | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        for name, value, known in (
            ("optimizer", optimizer, get_args(ConvexOptimizer)),
            ("solve", solve, get_args(Solve)),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
        for name, number, least in (
            ("bootstrap_rounds", bootstrap_rounds, 0),
            ("local_steps", local_steps, 1),
        ):
            if number < least or number != int(number):
                raise ValueError(f"{name}: expected a whole number from {least}, got {number}")
        self.auto_ridge = ridge == "auto"
        self.ridge = 1.0 if ridge == "auto" else ridge  # not looked at with "auto"
        for name, positive in (("learning_rate", learning_rate), ("ridge", self.ridge)):
            if not isinstance(positive, int | float) or not 0 < positive < math.inf:
                raise ValueError(f"{name}: expected a finite number above 0, got {positive}")
        check_compression(sparsity, bits)
        if solve != "clients" and loss != "mse":
            raise ValueError(f"solve={solve!r} is for loss='mse', got loss='cross-entropy'")
        if solve == "clients" and (sparsity, bits) != (0.0, UNQUANTISED):
            raise ValueError("sparsity and bits go with solve='server', got solve='clients'")
        needing = check_statistics(
            solve,
            sparsity,
            bits,
            auto_ridge=self.auto_ridge,
            balanced=balanced,
            validation_share=validation_share,
        )
        if keep_sums is not None and (solve != "statistics" or balanced):
            raise ValueError(
                "keep_sums: goes with solve='statistics' and without balanced, whose weights are "
                f"of all clients' counts; got solve={solve!r} and balanced={balanced}"
            )
        self.keep_sums = None if keep_sums is None else KeptSums(Path(keep_sums))
        if needing and validation is None:
            raise ValueError(f"{needing}: pass validation, examples on the server; got none")
        if validation is not None:
            if solve != "statistics" or self._seeds is not None:
                raise ValueError(
                    "validation: goes with solve='statistics' and no key_server, got "
                    f"{'a key_server' if self._seeds is not None else f'solve={solve!r}'}"
                )
            if not 0 < len(validation[0]) == len(validation[1]):
                raise ValueError(
                    "validation: expected examples and as many labels, got "
                    f"{len(validation[0])} and {len(validation[1])}"
                )
        if secure_aggregation:
            check_secure(solve, bits, kept=keep_sums is not None, split=validation_share > 0)
        if not 0.5 < secure_threshold <= 1:
            raise ValueError(f"secure_threshold: expected above 0.5 to 1, got {secure_threshold}")
        if vouching is not None and not (secure_aggregation and self.run):
            raise ValueError(
                "vouching: expected secure_aggregation=True and the name of the run, run=..., as "
                "clients have it"
            )
        self.network = network
        self.bootstrap = None if bootstrap is None else InnerStrategy("bootstrap", bootstrap, self)
        self.bootstrap_rounds = bootstrap_rounds if bootstrap is not None else 0
        self.feature_map = FeatureMap(features, num_features, feature_seed, head)
        _, last = self.feature_map.last_layer(network)
        self.width = self.feature_map.width(network)
        self.shape = (self.width + bias, last.out_features)
        if validation is not None:
            low, high = (int(label) for label in validation[1].aminmax())
            if low < 0 or high >= self.shape[1]:
                raise ValueError(
                    f"validation: expected labels 0 ... {self.shape[1] - 1}, got {low} ... {high}"
                )
        self.normalise, self.solve = normalise, solve
        self.secure_aggregation = secure_aggregation
        self.secure_threshold, self._vouching = secure_threshold, vouching
        self.validation, self.device = validation, device
        self.task = ConvexTask(
            step="linear",
            key="",
            feature_map=self.feature_map,
            bias=bias,
            loss=check_loss(loss),
            learning_rate=learning_rate,
            local_steps=1 if optimizer == "gd" else local_steps,
            corrected=optimizer == "scaffold",
            solve=solve,
            balanced=balanced,
            validation_share=validation_share,
            sparsity=sparsity,
            bits=bits,
        )
        if self.bootstrap is not None:  # which must not wait for more nodes than it is shown
            self.min_available_nodes = max(self.min_available_nodes, self.bootstrap.waits_for)
        self.phases = self._planned()
        self._begin()

    def _planned(self) -> list[Phase]:
        """Return the phases of a run, in order."""
        planned: list[Phase] = []
        if self.bootstrap is not None and self.bootstrap_rounds:
            planned.append(BootstrapRounds(self, self.bootstrap, self.bootstrap_rounds))
        if self.solve == "server":
            return [*planned, ServerSolve(self)]
        if self.solve == "statistics":
            counted = [ClassCounts(self)] if self.task.balanced else []
            if self.secure_aggregation:
                return [*planned, SecureStatistics(self, self.secure_threshold, self._vouching)]
            return [*planned, *counted, PooledStatistics(self)]
        if self.normalise:
            planned.append(Convexify(self))
        return [*planned, ConvexRounds(self)]

    def _begin(self) -> None:
        """Forget all rounds."""
        self.phase: Phase | None = self.phases[0]
        self.linear_rounds = 0
        self.run_key = ""
        self.class_weights = np.ones(self.shape[1])
        self.summed: tuple[int, ...] = ()
        self.control = ControlVariate(self.task.local_steps * self.task.learning_rate)
        self.sent.forget_all()

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        logger.log(
            INFO,
            "\t└──> TCT: %d rounds of %s, then %s on %d x %d weights (%s, eta %g, M %d)",
            self.bootstrap_rounds,
            type(self.bootstrap.strategy).__name__ if self.bootstrap else "a bootstrap",
            "steps" if self.solve == "clients" else "a solution on the server",
            *self.shape,
            self.task.loss,
            self.task.learning_rate,
            self.task.local_steps,
        )

    @property
    def learned(self) -> str:
        """``"linear-model"`` once a round has changed that, ``"network"`` before."""
        return "linear-model" if self.linear_rounds else "network"

    def predictor(
        self, arrays: ArrayRecord | Mapping[str, NDArray[Any]], network: nn.Module | None = None
    ) -> Predictor:
        """Make the predictor of the newest arrays: a TCTModel, or before stage 2 the network.

        `network` is the strategy's own by default.
        """
        network = self.network if network is None else network
        if self.learned == "network":
            return super().predictor(arrays, network)
        named = named_arrays(arrays)
        return TCTModel.from_arrays(network, self.feature_map, named, loss=self.task.loss)

    def without(self, clients: Sequence[int], arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays of the model that never had some clients' examples.

        It is solved anew from the kept sums of the others, one client's in memory at a time, with
        a normaliser of theirs, and with ``ridge="auto"`` a ridge chosen anew; steps of fixed-point
        numbers stay. So it has the bits of a run that never had these clients, given the same
        network, the same machine, and that the server accepts the others' replies there, too. The
        network stays: it was trained with these clients where stage 1 asked them.

        Parameters
        ----------
        clients : sequence of int
            Their ids: partitions, where nodes report them. None: the same model again.
        arrays : ArrayRecord
            That :meth:`start` returned, of this object or of one whose state this one has loaded.

        Raises
        ------
        ValueError
            If sums were not kept, or have not come yet; if a client is unknown, or none is left; if
            the kept sums of another one are gone, or have no solution.
        NotEnoughMemory
            If solving would not fit.
        """
        phase = self.phases[-1]
        if not isinstance(phase, PooledStatistics):
            raise ValueError(f"without: goes with solve='statistics', got solve={self.solve!r}")
        changed = {name: Array(array) for name, array in phase.without(clients, arrays).items()}
        return ArrayRecord({**arrays, **changed})

    def forget_kept(self, clients: Sequence[int]) -> None:
        """Remove kept sums of some clients from the disk.

        :meth:`without` then has to leave these clients out, too.
        """
        if self.keep_sums is not None:
            for client in clients:
                self.keep_sums.remove(self.run_key, client)

    def work_within(self, owner: BaseStrategy, *, everyone: bool) -> None:
        """Share another strategy's clients; its bootstrap asks whoever is shown.

        Raises
        ------
        ValueError
            If stage 2 begins with one exchange with all clients, and some are not shown.
        """
        if not everyone and (self.normalise or self.solve != "clients"):
            raise ValueError(
                f"normalise, solve: within a {type(owner).__name__} one round shows some of the "
                "clients alone, and moments of features, or a solution, would be theirs; expected "
                f"normalise = False and solve = 'clients', got {self.normalise} and {self.solve!r}"
            )
        super().work_within(owner, everyone=everyone)
        if self.bootstrap is not None:
            self.bootstrap.ask_whoever_is_shown()

    # ------------------------------------------------------------------- state

    def settings(self) -> dict[str, Any]:
        """Add the bootstrap and what stage 2 is."""
        return {
            **super().settings(),
            "bootstrap": {} if self.bootstrap is None else self.bootstrap.settings(),
            "bootstrap_rounds": self.bootstrap_rounds,
            "normalise": self.normalise,
            "solve": self.solve,
            "ridge": "auto" if self.auto_ridge else self.ridge,
            "secure_aggregation": self.secure_aggregation,
            "secure_threshold": self.secure_threshold,
            "validation": 0 if self.validation is None else len(self.validation[1]),
            **self.task.to_config(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Add the phase, c and which c_k count, and what clients were sent; they keep the rest."""
        inner = {} if self.bootstrap is None else self.bootstrap.state_dict()
        return {
            **super().state_dict(),
            "phase": "" if self.phase is None else self.phase.name,
            "linear-rounds": self.linear_rounds,
            "run-key": self.run_key,
            "sent": self.sent.state_dict(),
            "class-weights": self.class_weights,
            "summed": list(self.summed),
            **self.control.state_dict(),
            **{BOOTSTRAP + name: value for name, value in inner.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        by_name: dict[str, Phase | None] = {phase.name: phase for phase in self.phases}
        if state["phase"] not in {"", *by_name}:
            raise ValueError(
                f"state: expected phase = {' or '.join(by_name)}, got {state['phase']!r}; it is of "
                "other settings"
            )
        self.phase = by_name.get(state["phase"])
        self.linear_rounds = int(state["linear-rounds"])
        self.run_key = str(state["run-key"])
        self.sent.load_state_dict(state["sent"])
        self.class_weights = np.asarray(state["class-weights"], np.float64)
        self.summed = tuple(int(client) for client in state["summed"])
        self.control.load_state_dict(state)
        if self.bootstrap is not None:
            self.bootstrap.load_state_dict(under(BOOTSTRAP, state))

    def require_memory(self) -> None:
        """Refuse sums of all clients that would not fit, for ``solve="statistics"``."""
        clients = self.min_available_nodes
        for phase in self.phases:
            if isinstance(phase, PooledStatistics):
                require_memory(  # uploads as they came, and as arrays
                    phase.memory + 2 * phase.upload_bytes * clients,
                    f"{phase.name} of {self.width} features from {clients} clients",
                    cure=FEWER,
                )

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Add the linear model and the normaliser to the network's arrays.

        After :meth:`load_state_dict` `initial_arrays` are all that the run had returned by then;
        otherwise others than the network's are not looked at, and a second run of one strategy
        object begins anew, but for what its bootstrap keeps.

        Raises
        ------
        ValueError
            If they are not those of the network, or not all that the state goes with.
        NotEnoughMemory
            If what ``solve="statistics"`` takes of ``min_available_nodes`` clients would not fit in
            memory, or what it keeps of them on the disk.
        """
        expected = {k: tuple(t.shape) for k, t in self.network.state_dict().items()}
        found = {k: tuple(a.shape) for k, a in initial_arrays.items()}
        if {k: v for k, v in found.items() if k not in TCTModel.ARRAYS} != expected:
            odd = [k for k in {**found, **expected} if found.get(k) != expected.get(k)]
            raise ValueError(f"initial_arrays: not those of the network, differing in {odd[:5]}")
        initial_arrays = super().begin(initial_arrays, num_rounds, done)
        for phase in self.phases:
            if isinstance(phase, PooledStatistics) and self.keep_sums is not None and not done:
                self.keep_sums.require_disk(phase.upload_bytes, self.min_available_nodes)
        exchanges = sum(p.asks_everyone and not p.changes_linear for p in self.phases)
        if num_rounds <= self.bootstrap_rounds + exchanges:
            logger.log(
                WARNING,
                "num_rounds = %d end before stage 2, which begins after %d of stage 1",
                num_rounds,
                self.bootstrap_rounds,
            )
        if not done:
            self._begin()
            self.run_key = secrets.token_hex(8)
        elif set(TCTModel.ARRAYS) <= initial_arrays.keys():
            return initial_arrays
        elif done > self.bootstrap_rounds:
            raise ValueError(
                f"initial_arrays: the loaded state goes with {', '.join(TCTModel.ARRAYS)}, too; "
                "pass all arrays that were returned with it"
            )
        zero, identity = np.zeros(self.shape, np.float32), Normaliser.identity(self.width)
        own = zip(TCTModel.ARRAYS, (zero, identity.mean, identity.inv_std), strict=True)
        return ArrayRecord({**self.network_of(initial_arrays), **{k: Array(a) for k, a in own}})

    # ----------------------------------------------------------------- sending

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the phase ask a sample of the clients, or all of them."""
        self.global_arrays, self.server_round = arrays, server_round
        if self.fraction_train == 0.0 or self.phase is None:
            return []
        fraction = 1.0 if self.phase.asks_everyone else self.fraction_train
        minimum = max(self.min_train_nodes, self.min_completed)
        nodes = self.sample(grid, server_round, "train", fraction, minimum, self.held_out)
        return self.phase.messages(server_round, nodes, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the network, or the linear model once there is one."""
        self.global_arrays = arrays
        return super().configure_evaluate(server_round, arrays, config, grid)

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what the phase asks of one client, or what it is to evaluate."""
        if stage == MessageType.TRAIN and self.phase is not None:
            return self.phase.content_for(client, arrays, config)
        if self.learned == "network":
            return super().content_for(client, stage, self.network_of(arrays), config)
        parts = [*self.sent.lacks(client, "network", "normaliser"), "linear"]
        return self.asked(self.task, parts, arrays, config)

    def asked(
        self, task: ConvexTask, parts: Iterable[str], arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return a task of stage 2 and some parts of the arrays, each a record of its name."""
        task = replace(task, key=self._key(arrays), run=self.run_key)
        content = RecordDict({self.configrecord_key: ConfigRecord({**config, **task.to_config()})})
        for part in parts:
            names = PARTS.get(part, tuple(self.network.state_dict()))
            content[part] = ArrayRecord({name: arrays[name] for name in names})
        return content

    @property
    def takes_weights(self) -> bool:
        """In stage 1, from clients of the bootstrap."""
        return isinstance(self.phase, BootstrapRounds)

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays without the linear model and the normaliser."""
        own = {name: array for name, array in arrays.items() if name not in TCTModel.ARRAYS}
        return ArrayRecord(own)

    def _key(self, arrays: ArrayRecord) -> str:
        if arrays is not self._keyed[0]:
            network = [array.numpy() for array in self.network_of(arrays).values()]
            self._keyed = (arrays, ConvexTask.key_of(self.feature_map, network))
        return self._keyed[1]

    _keyed: tuple[ArrayRecord | None, str] = (None, "")

    # ------------------------------------------------------------- aggregation

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Have the phase aggregate, and go on to the next one where it is over."""
        phase = self.phase
        if phase is None:
            return None, None
        arrays, metrics = phase.aggregate(server_round, replies)
        self.train_metrics[server_round] = metrics
        self.linear_rounds += phase.changes_linear and arrays is not None
        if phase.is_over(server_round, updated=arrays is not None):
            following = self.phases.index(phase) + 1
            self.phase = self.phases[following] if following < len(self.phases) else None
        if arrays is None:
            return None, metrics
        changed = {name: Array(array) for name, array in arrays.items()}
        return ArrayRecord({**self.global_arrays, **changed}), metrics

    def evaluations(self, replies: Iterable[Message]) -> tuple[Pairs[Any], Counter[str]]:
        """Check evaluations, and note who has the network."""
        pairs, rejected = super().evaluations(replies)
        if self.learned == "linear-model":
            for reply, _ in pairs:
                self.sent.mark(reply.client, "network", "normaliser")
        return pairs, rejected
