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

import secrets
from collections.abc import Iterable, Mapping, Sequence
from logging import getLogger
from typing import Any, ClassVar, Literal

import flwr.serverapp.strategy
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import BadReply, Moments, NetworkPredictor, Normaliser, Predictor, TCTModel
from fedntk.ntk.convex.local_steps import best_bias
from fedntk.ntk.convex.pooled_statistics import NormalEquations, class_weights, normaliser_of
from fedntk.ntk.options import argument, option, part, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.ntk.payloads.convex_task import (
    ConvexOptions,
    ConvexTask,
    MessageTask,
    SolveOptions,
    Step,
)
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumStep
from fedntk.ntk.payloads.screening import screen_changes
from fedntk.ntk.robust_averages import DEFENCES
from fedntk.ntk.support.arrays import ArrayDict, require_counts

from ..core.averaging import differing, named_arrays, record_of
from ..core.channel import Parse, Rounds
from ..core.from_flower import FromFlower, ask_everyone
from ..core.kept_sums import KeptSums, require_storage
from ..core.registry import SentParts
from ..core.replies import Reply, accuracy_of, require_like, screen_accuracies, screen_own_sizes
from ..core.round import Round
from ..core.rounds import open_run
from ..core.sampling import Sample
from ..core.screening import Screening
from ..core.secure import SecureAggregation
from ..core.solving import result_of
from ..core.strategy import Strategy, architecture_of
from ..core.sums import FeatureSums, Sums, SumsProblem, add_up
from ..core.uploads import Update, Uploads
from .control import ControlVariate

logger = getLogger("flwr")
LINEAR, MEAN, SCALE = TCTModel.ARRAYS
PARTS = {wire.NORMALISER: (MEAN, SCALE), wire.LINEAR: (LINEAR,)}  # records beside the network
CONTROL = "tct.control"
# clients' replies, arrays that a round changed, if any, and its metrics
Changed = tuple[Uploads[Any] | None, ArrayDict | None, dict[str, Any]]
Stage = Literal["bootstrap", "moments", "counts", "linear", "statistics", "solved"]


class TCT(ConvexOptions, Strategy):
    """Train, convexify, train (Yu et al. 2022). Clients are :class:`~fedntk.clients.TCTClient`.

    The first `bootstrap_rounds` rounds are stage 1, one is for the moments of the features (none
    with ``normalise=False``), and the others are stage 2. The arrays that :meth:`start`
    returns, and ``evaluate_fn`` is given, are the network's, ``tct.linear``, ``tct.mean`` and
    ``tct.scale``; :meth:`predictor` makes a model of them. Until stage 2 has changed the linear
    model, clients evaluate the network. All nodes are asked for moments or sums.

    Beyond the paper, the server can solve the problem in one exchange. With `sums` clients send
    4 p^2 bytes up, or 8 n p if less: Z^T Z and Z^T Y of raw features and the classes' counts, from
    which the server normalises, centres and solves, with the same result for every split of the
    examples. With ``sums.bits`` the sums are exact whole numbers, 2 p^2 bytes or 8 n p, in steps of
    powers of two that the server chooses by examples (``sums.validation``).

    A client is sent the network and the normaliser once, then only linear models. One that lost
    what it keeps says so and is sent it again in the same round; if its own c_k is lost, the
    corrections of all start again from zero. All clients that were ever seen count in c, each with
    the number of examples that it reported first, whatever it says later. A node that reports no
    partition is known by its node id and is a new client after it registers anew, so give nodes a
    partition-id. The moments are those of the clients that answered in that one round: see
    ``min_completed``.

    With three clients or more, models that moved over 100 times as far as the median client's are
    dropped, as are moments and sums of over 100 times its size. Other valid-looking malicious
    replies are not detected: a false model stays in c, and false moments in the normaliser; a
    client that says again and again that its c_k is lost has all corrections start again; and false
    sums can leave a run without a solution, round after round.

    Attributes
    ----------
    width, shape : int, tuple of int
        Number of features p, and the shape (p, C) of the linear model, with the bias if any.
    stage : str
        What the next round does.

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
    rules = (*DEFENCES, "validation")
    combined_by: ClassVar = {wire.RATE_TIMES_LAMBDA: max}
    nested_parts = ("sums", "storage")

    network: nn.Module = argument("the clients' architecture; its weights do not matter")
    bootstrap: flwr.serverapp.strategy.Strategy | None = argument(
        "strategy of stage 1, Flower's or one of those here, with one set of weights as replies; "
        "it chooses among the clients that this strategy samples. None: stage 2 begins with the "
        "initial weights, such as those of a pre-trained network",
        default=None,
    )
    bootstrap_rounds: int = option(
        "T_1, rounds of the bootstrap; without one there are none", default=100, at_least=0
    )
    normalise: bool = option("whether features get mean 0 and variance 1", default=True)
    sums: FeatureSums | None = part(
        "clients send sums over their features, from which the server solves in one round; else "
        "they take local steps",
        default=None,
    )
    storage: KeptSums | None = part(
        "each client's sums are kept, so that `without` can take a client out again", default=None
    )
    secure: SecureAggregation | None = part("clients mask their sums", default=None)

    stages_done: int = state(int)  # how many of the stages are over
    linear_rounds: int = state(int)  # rounds so far that changed the linear model
    class_weights: NDArray[Any] = state(lambda: np.ones(0))  # (C,), float64; empty before counts
    control: ControlVariate = state(ControlVariate)
    sent: SentParts = state(SentParts)
    inner: Strategy | None = state(lambda: None, reset=False)
    run_key: str = state(lambda: secrets.token_hex(8))
    keyed: tuple[ArrayRecord | None, str] = state(lambda: (None, ""), saved=False)

    def prepare(self) -> None:
        """Say what the features and their sums are, and make the strategy of stage 1."""
        _, last = self.feature_map.last_layer(self.network)
        self.width = self.feature_map.width(self.network)
        self.shape = (self.width + self.bias, last.out_features)
        if self.bootstrap is None:
            self.bootstrap_rounds = 0
        else:
            self.inner = self._bootstrapping(self.bootstrap)
        if self.sums is not None:
            problem = SumsProblem(
                self.network,
                self.feature_map,
                num_classes=self.shape[1],
                max_examples=self.max_examples,
                equations=self.normal_equations,
                weights=lambda: self.class_weights if self.balanced else None,
            )
            needed_by = f"sums.bits = {self.sums.bits}" if self.sums.is_exact else ""
            projected = self.key_server is not None
            self.sums.attach(problem, projected=projected, needed_by=needed_by)
            if self.storage is not None:
                self.storage.attach(self.sums)

    def _bootstrapping(self, bootstrap: flwr.serverapp.strategy.Strategy) -> Strategy:
        """Return the strategy of stage 1 as one that works within this one."""
        waits_for = int(getattr(bootstrap, "min_available_nodes", 0))
        most = self.screening.outlier_factor
        self.min_available_nodes = max(self.min_available_nodes, waits_for)
        if isinstance(bootstrap, Strategy):
            if bootstrap.replies != wire.WEIGHTS:
                raise ValueError(
                    "bootstrap: expected a strategy whose replies are one set of weights, such as "
                    f"FedAvg, got {type(bootstrap).__name__}"
                )
            inner = bootstrap
        else:
            screening = Screening(outlier_factor=most)
            inner = FromFlower(bootstrap, name="bootstrap", chooses=True, screening=screening)
        judges = self.screening.rule == "validation"
        chosen = self.screening if judges else inner.screening
        inner.screening = chosen.copy(outlier_factor=min(most, chosen.outlier_factor))
        inner.require_nested("TCT", everyone=False)
        inner.min_completed, inner.max_examples = self.min_completed, self.max_examples
        return inner

    def check(self) -> None:
        """Refuse what does not go with the way in which the problem is solved."""
        _ = self.feature_map  # has rules of its own
        if self.sums is None:
            for name in ("balanced", "storage", "secure"):
                if getattr(self, name):
                    raise ValueError(f"{name}: goes with sums, got sums = None")
            return
        if self.loss != "mse":
            raise ValueError(f"loss: expected mse with sums, got {self.loss}")
        if self.balanced and self.sums.is_exact:
            raise ValueError(
                "balanced: sums of weighted examples are no whole numbers; expected sums.bits = "
                f"{UNQUANTISED}, got {self.sums.bits}"
            )
        if self.screening.is_robust:
            raise ValueError(f"screening.rule: expected none with sums, got {self.screening.rule}")
        if self.balanced and self.storage is not None:
            raise ValueError(
                "storage: expected balanced = False, as its weights come from all clients' "
                "counts, got True"
            )
        if self.secure is not None and not self.sums.is_exact:
            raise ValueError(
                "secure: masks are added to whole numbers; expected sums.bits = 2 ... 8, got "
                f"{self.sums.bits}"
            )
        if self.secure is not None and self.storage is not None:
            raise ValueError("secure: the server has no client's sums to keep; leave out storage")

    @staticmethod
    def rounds_before_stage_2(options: Any) -> int:
        """Count the rounds of stage 1, of the classes' counts and of the features' moments."""
        moments = not options.sums and options.normalise
        return int(options.bootstrap_rounds + options.balanced + moments)

    @property
    def stages(self) -> list[Stage]:
        """The stages of a run, in order."""
        stages: list[Stage] = []
        if self.bootstrap_rounds:
            stages.append("bootstrap")
        if self.sums is None and self.normalise:
            stages.append("moments")
        if self.balanced:
            stages.append("counts")
        stages.append("linear" if self.sums is None else "statistics")
        return stages

    @property
    def stage(self) -> Stage:
        """What the next round does."""
        stages = self.stages
        return stages[self.stages_done] if self.stages_done < len(stages) else "solved"

    @property
    def learned(self) -> str:
        """``"linear-model"`` once a round has changed it, ``"network"`` before."""
        return "linear-model" if self.linear_rounds else "network"

    # ---------------------------------------------------------------------------- a run

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Add the linear model and the normaliser to the network's arrays.

        After :meth:`load_state_dict` `initial_arrays` are all that the run had returned by then.
        """
        network = self.network_of(initial_arrays)
        if names := differing(network, self.network.state_dict()):
            raise ValueError(f"initial_arrays: not those of the network, differing in {names[:5]}")
        if self.inner is not None:
            open_run(self.inner, network, num_rounds, done)
        if self.storage is not None and not done:
            self.storage.require_disk(self.min_available_nodes)
        if num_rounds <= self.rounds_before_stage_2(self):
            logger.warning(
                "num_rounds = %d end before stage 2, which begins after %d of stage 1",
                num_rounds,
                self.bootstrap_rounds,
            )
        if done and set(TCTModel.ARRAYS) <= initial_arrays.keys():
            return initial_arrays
        if done > self.bootstrap_rounds:
            raise ValueError(
                f"initial_arrays: expected {', '.join(TCTModel.ARRAYS)} as well, since the loaded "
                "state goes with them; pass all arrays that were returned with it"
            )
        zero, identity = np.zeros(self.shape, np.float32), Normaliser.identity(self.width)
        return _with(network, arrays_of(identity, zero))

    def train_round(self, r: Round) -> Rounds[Update]:
        """Do the round of the current stage, and go on to the next one if it is over."""
        stage = self.stage
        if stage == "solved":
            return Update(None)
        do = {
            "bootstrap": self._train_network,
            "moments": self._standardise,
            "counts": self._count_classes,
            "linear": self._step_linear,
            "statistics": self._solve_sums,
        }
        uploads, changed, metrics = yield from do[stage](r)
        if stage == "bootstrap":
            is_over = r.number >= self.bootstrap_rounds
        else:
            is_over = changed is not None and stage != "linear"
        self.stages_done += is_over
        if changed is None:
            return Update(uploads, None, metrics)
        if stage in ("linear", "statistics"):
            self.linear_rounds += 1
        return Update(uploads, _with(r.arrays, changed), metrics)

    # -------------------------------------------------------------- stage 1 (section 4.1)

    def _train_network(self, r: Round) -> Rounds[Changed]:
        """Do a round of the bootstrap strategy on the network.

        The task travels along, so that clients say in round 1 if they could not do stage 2.
        """
        if self.inner is None:
            raise RuntimeError("bootstrap: expected a strategy, got none")
        task = MessageTask(step="bootstrap", run_key=self.run_key).to_config()
        sample = _choose(r, r.sample(), self.inner)
        network = self.network_of(r.arrays)
        within = r.within(self.inner, network, sample, speaker=self, config=task)
        update = yield from self.inner.train_round(within)
        arrays = None if update.arrays is None else named_arrays(update.arrays)
        return update.uploads, arrays, dict(update.metrics)

    # ------------------------------------------------------------- convexify (section 4.3)

    def _standardise(self, r: Round) -> Rounds[Changed]:
        """Join the moments of all clients' features to the normaliser, and start the bias.

        The classes' counts come with them if there is a bias, which starts by these.
        """
        num_classes = self.bias * self.shape[1]

        def parse(reply: Reply) -> Moments:
            return Moments.from_arrays(reply.arrays(), reply.num_examples, self.width, num_classes)

        uploads = yield from self._ask_all(r, "moments", parse)
        uploads = self.screening.drop(uploads, screen_own_sizes)
        if not self.enough(uploads):
            return uploads, None, {}
        self.control.know(dict(zip(uploads.clients, uploads.counts, strict=True)))
        joint = Moments.join(uploads.values)
        normaliser, linear = Normaliser.of(joint), np.zeros(self.shape, np.float32)
        if self.bias:
            linear[-1] = best_bias(joint.class_counts, self.loss)
        metrics = {"features-constant": int((normaliser.inv_std == 0).sum())}
        return uploads, arrays_of(normaliser, linear), metrics

    def _count_classes(self, r: Round) -> Rounds[Changed]:
        """Add up the classes' counts, from which all clients get the same weights."""

        def parse(reply: Reply) -> NDArray[np.int64]:
            (counts,) = reply.ordered_arrays(wire.COUNTS)
            require_counts(counts, self.shape[1], reply.num_examples)
            return counts

        uploads = yield from self._ask_all(r, "counts", parse, needs=())
        if not self.enough(uploads):
            return uploads, None, {}
        self.class_weights = class_weights(np.sum(uploads.values, axis=0))
        return uploads, {}, {}

    def _ask_all(
        self, r: Round, step: Step, parse: Parse[Any], *, needs: Sequence[str] = (wire.NETWORK,)
    ) -> Rounds[Uploads[Any]]:
        """Ask all clients for something of their features; they then have what this `needs`."""
        uploads = yield from r.ask(
            parse,
            clients=r.everyone(),
            contents=lambda client, config: self._task_message(
                r, step, self.sent.lacks(client, *needs), config
            ),
            sent=self.sent,
        )
        self._mark(uploads, *needs)
        return uploads

    # ----------------------------------------------------------------- stage 2 (algorithm 1)

    def _step_linear(self, r: Round) -> Rounds[Changed]:
        """Average the clients' linear models, and take the changes of the c_k into c."""
        theta = r.arrays[LINEAR].numpy()
        uploads = yield from r.ask(
            lambda reply: _parse_linear(reply, theta),
            contents=lambda client, config: self._linear_message(r, client, config),
            sent=self.sent,
        )
        lost = uploads.lost
        self._mark(uploads, wire.NETWORK, wire.NORMALISER, wire.LINEAR)
        uploads = self.screening.drop(
            uploads, lambda models, most: screen_changes({LINEAR: theta}, models, most)
        )
        counts = dict(zip(uploads.nodes, map(self._count_of, uploads), strict=True))
        uploads = self.screening.drop_harmful(
            uploads, r.model, lambda weights: weights, [*counts.values()]
        )
        metrics = _rates(uploads)
        reset = any(self.control.rounds.get(client, 0) for client in lost)
        if reset:  # c still includes the c_k that was lost
            logger.warning("a client lost its state: all corrections start again from zero")
            self.control.reset_state()
        if not self.enough(uploads):
            return uploads, None, metrics
        weights = [counts[node] for node in uploads.nodes]
        robust = self.screening.mean(uploads, {LINEAR: theta}, weights)
        mean = np.asarray(robust[LINEAR], np.float32)
        if self.corrected and not reset:
            replies = {
                upload.client: (weight, upload.value[LINEAR])
                for upload, weight in zip(uploads, weights, strict=True)
            }
            self.control.update(r.number, theta, mean, replies, r.clients, self.span)
        return uploads, {LINEAR: mean}, metrics

    def _linear_message(self, r: Round, client: int, config: ConfigRecord) -> RecordDict:
        """Return M steps as the task, what the client lacks, the linear model, and c if sent."""
        source = self.control.source(client, r.number)
        if source == "last" and self.sent.lacks(client, wire.LINEAR):
            source = "sent"  # it lost the last model
        parts = [*self.sent.lacks(client, wire.NETWORK, wire.NORMALISER), wire.LINEAR]
        state_round = self.control.rounds.get(client, 0)
        content = self._task_message(
            r, "linear", parts, config, state_round=state_round, control=source
        )
        if source == "sent":
            content[wire.CONTROL] = record_of({CONTROL: self.control.value})
        return content

    def _count_of(self, upload: Any) -> int:
        """Return the examples that a client counts with: as many as it first said."""
        first = self.control.examples.get(upload.client, upload.num_examples)
        if first != upload.num_examples:
            logger.warning(
                "stage 2: client %d had %d examples before and has %d now; it counts with %d",
                upload.client,
                first,
                upload.num_examples,
                first,
            )
        return int(first)

    # ------------------------------------------------------- stage 2 from sums (beyond the paper)

    def _solve_sums(self, r: Round) -> Rounds[Changed]:
        """Add up sums over all clients' features, masked if wanted, and solve."""
        sums = self._require_sums()
        network = self.network_of(r.arrays)
        try:
            sums.steps = sums.choose_steps(network)
        except ValueError as error:
            logger.warning("no steps of fixed-point numbers: %s", error)
            return Uploads(r.channel), None, {}
        by_client: dict[int, Sums] = {}
        total: Sums | None = None
        uploads: Uploads[Any]
        if self.secure is not None:
            plan = sums.secure_plan(
                network,
                lambda step: {},
                contents=lambda step, client, config: self._sums_message(r, step, client, config),
                sent=self.sent,
            )
            total, uploads, _ = yield from self.secure.sum(r, plan, self.enough, r.everyone())
            self._mark(uploads, wire.NETWORK)
        else:
            uploads = yield from r.ask(
                lambda reply: sums.parse(reply.arrays(), reply.num_examples),
                clients=r.everyone(),
                contents=lambda client, config: self._sums_message(r, None, client, config),
                sent=self.sent,
            )
            self._mark(uploads, wire.NETWORK)
            uploads = self.screening.drop(uploads, screen_own_sizes)
            if self.enough(uploads):
                total = add_up(uploads.values)
                by_client = dict(zip(uploads.clients, uploads.values, strict=True))
        if total is None:
            return uploads, None, {}
        joint = total
        solution = result_of(lambda: sums.solve(joint, network))
        if solution is None:
            return uploads, None, {}
        normaliser, linear, ridge = solution
        if self.storage is not None:
            self.storage.keep(by_client)
        metrics = {"ridge": ridge, "features-constant": int((normaliser.inv_std == 0).sum())}
        return uploads, arrays_of(normaliser, linear), metrics

    def _sums_message(
        self, r: Round, step: SumStep | None, client: int, config: ConfigRecord
    ) -> RecordDict:
        """Return the task, the network, and what features are rounded or weighted by."""
        if step not in (None, "masked"):  # an exchange that needs no network
            return self._task_message(r, step, (), config)
        parts = self.sent.lacks(client, wire.NETWORK)
        content = self._task_message(r, step or "statistics", parts, config)
        steps = self._require_sums().steps
        if len(steps):
            content[wire.STEPS] = record_of({"tct.step": steps})
        if self.balanced:
            content[wire.CLASS_WEIGHTS] = record_of({"tct.class-weights": self.class_weights})
        return content

    def _require_sums(self) -> FeatureSums:
        if self.sums is None:
            raise ValueError("sums: expected FeatureSums(...), got None")
        return self.sums

    def normal_equations(
        self, sums: FeatureStatistics, normaliser: Normaliser | None = None
    ) -> tuple[Normaliser, NormalEquations]:
        """Return the problem of normalised features, with a normaliser or the sums' own."""
        if normaliser is None:
            identity = Normaliser.identity(self.width)
            normaliser = normaliser_of(sums) if self.normalise else identity
        return normaliser, NormalEquations.of(sums, normaliser, bias=self.bias, free_bias=True)

    def without(self, clients: Sequence[int], arrays: ArrayRecord) -> ArrayRecord:
        """Return the model that never had some clients: see :meth:`.OneExchange.without`.

        The normaliser is that of the others. The network stays: it was trained with these clients
        if stage 1 asked them.
        """
        sums = self._require_sums()
        total = add_up(require_storage(self.storage).without(clients).values())
        normaliser, linear, _ = sums.solve(total, self.network_of(arrays))
        return _with(arrays, arrays_of(normaliser, linear))

    # --------------------------------------------------------------------------- messages

    def told_options(self) -> dict[str, Any]:
        """Return the options that clients read as a ConvexTask."""
        options = {name: getattr(self, name) for name in ConvexOptions.options()}
        solving = SolveOptions()
        if self.sums is not None:
            solving = SolveOptions(
                solve="statistics", bits=self.sums.bits, validation_share=self.sums.validation_share
            )
        return {**ConvexOptions(**options).to_config(), **solving.to_config()}

    def _task_message(
        self, r: Round, step: Step, parts: Iterable[str], config: ConfigRecord, **task: Any
    ) -> RecordDict:
        """Return a MessageTask and some parts of the arrays.

        Each part, ``"network"``, ``"normaliser"`` or ``"linear"``, is a record of that name.
        """
        key = self._network_key(r.arrays)
        run_key = self.run_key
        message = MessageTask(step=step, network_key=key, run_key=run_key, **task)
        told = ConfigRecord({**config, **message.to_config()})
        content = RecordDict({r.owner.configrecord_key: told})
        for name in parts:
            names = PARTS.get(name, tuple(self.network.state_dict()))
            content[name] = ArrayRecord({n: r.arrays[n] for n in names})
        return content

    def _network_key(self, arrays: ArrayRecord) -> str:
        """Return the key of the network among the arrays, which is computed once for them."""
        if arrays is not self.keyed[0]:
            network = [arrays[name].numpy() for name in self.network.state_dict()]
            self.keyed = (arrays, ConvexTask.key_of(self.feature_map, network))
        return self.keyed[1]

    def _mark(self, uploads: Uploads[Any], *parts: str) -> None:
        for client in uploads.clients:
            self.sent.mark(client, *parts)

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate the network, or the linear model once there is one."""
        if self.learned == "network":
            uploads = yield from r.ask(
                accuracy_of, arrays=self.network_of(r.arrays), sent=self.sent
            )
            return self.screening.drop(uploads, screen_accuracies)

        def contents(client: int, config: ConfigRecord) -> RecordDict:
            parts = [*self.sent.lacks(client, wire.NETWORK, wire.NORMALISER), wire.LINEAR]
            return self._task_message(r, "linear", parts, config)

        uploads = yield from r.ask(accuracy_of, contents=contents, sent=self.sent)
        uploads = self.screening.drop(uploads, screen_accuracies)
        self._mark(uploads, wire.NETWORK, wire.NORMALISER)
        return uploads

    # ------------------------------------------------------------------- what it has learned

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays without the linear model and the normaliser."""
        return ArrayRecord({n: a for n, a in arrays.items() if n not in TCTModel.ARRAYS})

    def predictor(
        self, arrays: ArrayRecord | Mapping[str, NDArray[Any]], network: nn.Module | None = None
    ) -> Predictor:
        """Make the predictor of the newest arrays: a TCTModel, or before stage 2 the network.

        `network` is the strategy's own by default.
        """
        whole, named = architecture_of(self, network), named_arrays(arrays)
        if self.learned == "network":
            return NetworkPredictor.from_arrays(whole, named, loss="cross-entropy")
        return TCTModel.from_arrays(whole, self.feature_map, named, loss=self.loss)

    def require_nested(self, owner: str, *, everyone: bool) -> None:
        """Refuse if stage 2 begins with one exchange with all clients, and some are not shown."""
        if not everyone and (self.normalise or self.sums is not None):
            raise ValueError(
                f"normalise, sums: within a {owner} a round shows only some of the clients, and "
                "moments of features, or a solution, would be only theirs; expected normalise = "
                f"False and sums = None, got {self.normalise} and {self.sums!r}"
            )
        super().require_nested(owner, everyone=everyone)
        if self.bootstrap is not None:
            ask_everyone(self.bootstrap)

    def further_settings(self) -> dict[str, Any]:
        """Return the bootstrap's, and the number of validation examples."""
        validation = None if self.sums is None else self.sums.validation
        return {
            "bootstrap": {} if self.inner is None else self.inner.settings(),
            "validation": 0 if validation is None else len(validation[1]),
        }

    def require_memory(self) -> None:
        """Refuse sums of ``min_available_nodes`` clients that would not fit."""
        if self.sums is not None:
            self.sums.require_memory(self.min_available_nodes)


def arrays_of(normaliser: Normaliser, linear: NDArray[Any]) -> ArrayDict:
    """Return the arrays of a normaliser and a linear model by name."""
    return {LINEAR: linear, MEAN: normaliser.mean, SCALE: normaliser.inv_std}


def _with(arrays: ArrayRecord, changed: ArrayDict) -> ArrayRecord:
    """Return arrays with some others in place of, or beside, their own."""
    return ArrayRecord({**arrays, **record_of(changed)})


def _choose(r: Round, sample: Sample, strategy: Strategy) -> Sample:
    """Return the clients that the strategy of stage 1 samples; Flower's does it itself."""
    nodes = sample.nodes
    fewest = max(strategy.min_train_nodes, strategy.fewest_replies)
    size = min(max(int(strategy.fraction_train * len(nodes)), fewest), len(nodes))
    if isinstance(strategy, FromFlower) or size == len(nodes):
        return sample
    generator = np.random.default_rng([strategy.sampling.seed, r.number, *r.stage.encode()])
    chosen = np.sort(generator.choice(len(nodes), size=size, replace=False))
    return sample._replace(nodes=tuple(nodes[i] for i in chosen))


def _parse_linear(reply: Reply, theta: NDArray[Any]) -> ArrayDict:
    if wire.DIVERGED in reply.metrics:
        rate = str(reply.metrics.get(wire.RATE_TIMES_LAMBDA))[:20]
        raise BadReply("diverged", f"its steps overflow; rate-times-lambda is {rate}")
    (linear,) = reply.ordered_arrays(LINEAR)
    require_like(LINEAR, linear, theta)
    return {LINEAR: linear}


def _rates(uploads: Uploads[Any]) -> dict[str, float]:
    """Return the largest rate as a metric; log rates too large and examples that changed."""
    told = [upload.metrics.get(wire.RATE_TIMES_LAMBDA) for upload in uploads]
    rates = [rate for rate in told if isinstance(rate, int | float) and rate >= 0]
    if any(rate > 2 for rate in rates):
        logger.warning(
            "stage 2: learning rate times largest eigenvalue over n is %.3g on a client; "
            "above 2 its steps diverge: lower the learning rate",
            max(rates),
        )
    if changed := [u.client for u in uploads if u.metrics.get(wire.EXAMPLES_CHANGED) == 1]:
        logger.warning(
            "stage 2: %d clients have other examples than before (%s ...), and compute their "
            "features anew; a client_fn must return the same examples in all rounds",
            len(changed),
            changed[0],
        )
    return {wire.RATE_TIMES_LAMBDA: max(rates)} if rates else {}
