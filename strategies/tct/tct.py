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
from functools import partial
from logging import getLogger
from typing import Any, ClassVar, Literal

import flwr.serverapp.strategy
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
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
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.screening import screen_changes
from fedntk.ntk.robust_averages import DEFENCES
from fedntk.ntk.support.arrays import ArrayDict, require_counts

from ..core.averaging import differing, named_arrays, record_of
from ..core.channel import Parse, Rounds
from ..core.from_flower import FromFlower, ask_everyone
from ..core.kept_sums import KeptSums, require_storage
from ..core.registry import SentParts
from ..core.replies import (
    Reply,
    accuracy_of,
    require_like,
    result_of,
    screen_accuracies,
    screen_own_sizes,
)
from ..core.round import Round
from ..core.rounds import open_run
from ..core.sampling import Sample
from ..core.screening import Screening
from ..core.secure import SecureAggregation
from ..core.strategy import Strategy, architecture_of
from ..core.sums import FeatureSums, Sums, SumsProblem, add_up
from ..core.uploads import Update, Uploads
from .control import ControlVariate

logger = getLogger("flwr")
LINEAR, MEAN, SCALE = TCTModel.ARRAYS
PARTS = {wire.NORMALISER: (MEAN, SCALE), wire.LINEAR: (LINEAR,)}  # records beside the network
CONTROL = "tct.control"
Stage = Literal["bootstrap", "moments", "counts", "linear", "statistics", "solved"]


class TCT(ConvexOptions, Strategy):
    """Train, convexify, train (Yu et al. 2022). Clients are :class:`~fedntk.clients.TCTClient`.

    The first `bootstrap_rounds` rounds are stage 1, one is for the moments of the features (none
    with ``normalise=False``), and the others are stage 2. The arrays that :meth:`start` returns,
    and ``evaluate_fn`` is given, are the network's, ``tct.linear``, ``tct.mean`` and ``tct.scale``;
    :meth:`predictor` makes a model of them. Until stage 2 has changed the linear model, clients
    evaluate the network. All nodes are asked for moments, and those that answer make them.

    Beyond the paper, the server can solve the problem in one exchange. With `sums` clients send
    4 p^2 bytes up, or 8 n p if less: Z^T Z and Z^T Y of raw features and the classes' counts, from
    which the server normalises, centres and solves, with the same result for every split of the
    examples. With ``sums.bits`` the sums are exact whole numbers, 2 p^2 bytes or 8 n p, in steps of
    powers of two that the server chooses by examples (``sums.validation``).

    A client is sent the network and the normaliser once, then only linear models. One that lost
    them is sent them again in the same round; if its c_k is lost, the corrections of all start
    again from zero. All clients that were ever seen count in c, each with the number of examples
    that it reported first. A node without a partition-id is a new client after it registers anew.

    With three clients or more, models that moved over 100 times as far as the median client's are
    dropped, as are moments and sums of over 100 times its size. Other valid-looking malicious
    replies are not detected: a false model stays in c, and false moments in the normaliser; false
    claims that a c_k is lost reset all corrections; and false sums can leave a run unsolved.

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

    takes_real_targets = True

    real_targets: bool = argument(
        "whether clients have real targets, standardised, not classes; for the loss mse",
        default=False,
    )
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
        "clients send sums over their features, from which the server solves", default=None
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
    _keyed: tuple[ArrayRecord | None, str] = state(lambda: (None, ""), saved=False)

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
                equations=self._normal_equations,
                weights=lambda: self.class_weights if self.balanced else None,
                real_targets=self.real_targets,
            )
            needed_by = f"sums.bits = {self.sums.bits}" if self.sums.is_exact else ""
            projected = self.key_server is not None
            self.sums.attach(problem, projected=projected, needed_by=needed_by)
            if self.storage is not None:
                self.storage.attach(self.sums)

    def _bootstrapping(self, bootstrap: flwr.serverapp.strategy.Strategy) -> Strategy:
        """Return the strategy of stage 1 as one that works within this one."""
        waits_for = int(getattr(bootstrap, "min_available_nodes", 0))
        self.min_available_nodes = max(self.min_available_nodes, waits_for)
        most = self.screening.outlier_factor
        if not isinstance(bootstrap, Strategy):
            screening = Screening(outlier_factor=most)
            bootstrap = FromFlower(bootstrap, name="bootstrap", chooses=True, screening=screening)
        elif bootstrap.replies != wire.WEIGHTS:
            raise ValueError(
                "bootstrap: expected a strategy whose replies are one set of weights, such as "
                f"FedAvg, got {type(bootstrap).__name__}"
            )
        judges = self.screening.rule == "validation"
        chosen = self.screening if judges else bootstrap.screening
        bootstrap.screening = chosen.copy(outlier_factor=min(most, chosen.outlier_factor))
        bootstrap.require_nested("TCT", everyone=False)
        bootstrap.min_completed, bootstrap.max_examples = self.min_completed, self.max_examples
        return bootstrap

    def check(self) -> None:
        """Refuse what does not go with the way in which the problem is solved."""
        _ = self.feature_map  # has rules of its own
        if self.real_targets and (self.balanced or self.loss != "mse"):
            got = f"got {self.loss} and {self.balanced}"
            raise ValueError(f"real_targets: expected the loss mse and balanced = False, {got}")
        if self.sums is None:
            for name in ("balanced", "storage", "secure"):
                if getattr(self, name):
                    raise ValueError(f"{name}: goes with sums, got sums = None")
            return
        if self.loss != "mse":
            raise ValueError(f"loss: expected mse with sums, got {self.loss}")
        if self.balanced and self.sums.is_exact:
            got = f"expected sums.bits = {UNQUANTISED}, got {self.sums.bits}"
            raise ValueError(f"balanced: sums of weighted examples are no whole numbers; {got}")
        if self.screening.is_robust:
            raise ValueError(f"screening.rule: expected none with sums, got {self.screening.rule}")
        if self.balanced and self.storage is not None:
            raise ValueError("storage: expected balanced = False, whose weights come from counts")
        if self.secure is not None and not self.sums.is_exact:
            got = f"expected sums.bits = 2 ... 8, got {self.sums.bits}"
            raise ValueError(f"secure: masks are added to whole numbers; {got}")
        if self.secure is not None and self.storage is not None:
            raise ValueError("secure: the server has no client's sums to keep; leave out storage")

    @staticmethod
    def rounds_before_stage_2(options: Any) -> int:
        """Count the rounds of stage 1, of the classes' counts and of the features' moments."""
        moments = not options.sums and options.normalise
        return int(options.bootstrap_rounds + options.balanced + moments)

    @property
    def stage(self) -> Stage:
        """What the next round does."""
        sums = self.sums is not None
        rounds: dict[Stage, int] = {
            "bootstrap": self.bootstrap_rounds,
            "moments": self.normalise and not sums,
            "counts": self.balanced,
            "statistics": sums,
            "linear": not sums,
        }
        stages = [stage for stage, number in rounds.items() if number]
        return [*stages, "solved"][self.stages_done]

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
                f"initial_arrays: expected {', '.join(TCTModel.ARRAYS)} as well; pass all arrays "
                "that were returned with the loaded state"
            )
        zero, identity = np.zeros(self.shape, np.float32), Normaliser.identity(self.width)
        return _with_model(network, identity, zero)

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
        update = yield from do[stage](r)
        is_changed = update.arrays is not None
        if stage == "bootstrap":
            self.stages_done += r.number >= self.bootstrap_rounds
        elif stage != "linear":
            self.stages_done += is_changed
        self.linear_rounds += is_changed and stage in ("linear", "statistics")
        return update

    # -------------------------------------------------------------- stage 1 (section 4.1)

    def _train_network(self, r: Round) -> Rounds[Update]:
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
        arrays = None if update.arrays is None else ArrayRecord({**r.arrays, **update.arrays})
        return Update(update.uploads, arrays, update.metrics)

    # ------------------------------------------------------------- convexify (section 4.3)

    def _standardise(self, r: Round) -> Rounds[Update]:
        """Join the moments of all clients' features to the normaliser, and start the bias.

        The classes' counts come with them if there is a bias, which starts by these.
        """
        num_classes = 0 if self.real_targets else self.bias * self.shape[1]

        def parse(reply: Reply) -> Moments:
            return Moments.from_arrays(reply.arrays(), reply.num_examples, self.width, num_classes)

        uploads = yield from self._ask_all(r, "moments", parse, wire.NETWORK)
        uploads = self.screening.drop(uploads, screen_own_sizes)
        if not self.enough(uploads):
            return Update(uploads)
        self.control.know(dict(zip(uploads.clients, uploads.counts, strict=True)))
        joint = Moments.join(uploads.values)
        normaliser, linear = Normaliser.of(joint), np.zeros(self.shape, np.float32)
        if num_classes:
            linear[-1] = best_bias(joint.class_counts, self.loss)
        metrics = {"features-constant": int((normaliser.inv_std == 0).sum())}
        return Update(uploads, _with_model(r.arrays, normaliser, linear), metrics)

    def _count_classes(self, r: Round) -> Rounds[Update]:
        """Add up the classes' counts, from which all clients get the same weights."""

        def parse(reply: Reply) -> NDArray[np.int64]:
            (counts,) = reply.ordered_arrays(wire.COUNTS)
            require_counts(counts, self.shape[1], reply.num_examples)
            return counts

        uploads = yield from self._ask_all(r, "counts", parse)
        if not self.enough(uploads):
            return Update(uploads)
        self.class_weights = class_weights(np.sum(uploads.values, axis=0))
        return Update(uploads, ArrayRecord({**r.arrays}))  # the round counts as one that changed

    def _ask_all(
        self, r: Round, step: Step, parse: Parse[Any], *needs: str
    ) -> Rounds[Uploads[Any]]:
        """Ask all clients for something of their features; they then have what this `needs`."""
        uploads = yield from r.ask(
            parse,
            clients=r.everyone(),
            contents=partial(self._features_message, r, step),
            sent=self.sent,
        )
        self._mark(uploads, *needs)
        return uploads

    def _features_message(
        self, r: Round, step: Step, client: int, config: ConfigRecord
    ) -> RecordDict:
        """Return the task, the network, and what features are rounded or weighted by."""
        if step not in ("moments", "statistics", "masked"):  # others need no network
            return self._task_message(r, step, (), config)
        content = self._task_message(r, step, self.sent.lacks(client, wire.NETWORK), config)
        if self.sums is not None and len(self.sums.steps):
            content[wire.STEPS] = record_of({"tct.step": self.sums.steps})
        if self.balanced:
            content[wire.CLASS_WEIGHTS] = record_of({"tct.class-weights": self.class_weights})
        return content

    # ----------------------------------------------------------------- stage 2 (algorithm 1)

    def _step_linear(self, r: Round) -> Rounds[Update]:
        """Average the clients' linear models, and take the changes of the c_k into c."""
        theta = r.arrays[LINEAR].numpy()
        before = {LINEAR: theta}
        uploads = yield from r.ask(
            lambda reply: _parse_linear(reply, theta),
            contents=partial(self._linear_message, r),
            sent=self.sent,
        )
        lost = uploads.lost
        self._mark(uploads, wire.NETWORK, wire.NORMALISER, wire.LINEAR)
        uploads = self.screening.drop(uploads, partial(screen_changes, before))
        first = self.control.examples  # by which clients count, whatever they say later
        counts = {u.node: first.get(u.client, u.num_examples) for u in uploads}
        if changed := [u.client for u in uploads if u.num_examples != counts[u.node]]:
            logger.warning("stage 2: clients %s count with the examples they had", changed[:5])
        uploads = self.screening.drop_harmful(
            uploads, r.model, lambda weights: weights, [*counts.values()]
        )
        metrics = _rates(uploads)
        reset = any(self.control.rounds.get(client, 0) for client in lost)
        if reset:  # c still includes the c_k that was lost
            logger.warning("a client lost its state: all corrections start again from zero")
            self.control.reset_state()
        if not self.enough(uploads):
            return Update(uploads, None, metrics)
        weights = [counts[node] for node in uploads.nodes]
        mean = np.asarray(self.screening.mean(uploads, before, weights)[LINEAR], np.float32)
        if self.corrected and not reset:
            models = [upload.value[LINEAR] for upload in uploads]
            replies = zip(uploads.clients, zip(weights, models, strict=True), strict=True)
            self.control.update(r.number, theta, mean, dict(replies), r.clients, self.span)
        return Update(uploads, ArrayRecord({**r.arrays, LINEAR: Array(mean)}), metrics)

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

    # ------------------------------------------------------- stage 2 from sums (beyond the paper)

    def _solve_sums(self, r: Round) -> Rounds[Update]:
        """Add up sums over all clients' features, masked if wanted, and solve."""
        sums, network = self._require_sums(), self.network_of(r.arrays)
        try:
            sums.steps = sums.choose_steps(network)
        except ValueError as error:
            logger.warning("no steps of fixed-point numbers: %s", error)
            return Update(Uploads(r.channel))
        total: Sums | None = None
        uploads: Uploads[Any]
        if self.secure is not None:
            plan = sums.secure_plan(
                network,
                lambda step: {},
                contents=partial(self._features_message, r),
                sent=self.sent,
            )
            total, uploads, _ = yield from self.secure.sum(r, plan, self.enough, r.everyone())
            self._mark(uploads, wire.NETWORK)
        else:

            def parse(reply: Reply) -> Sums:
                return sums.parse(reply.arrays(), reply.num_examples)

            uploads = yield from self._ask_all(r, "statistics", parse, wire.NETWORK)
            uploads = self.screening.drop(uploads, screen_own_sizes)
            if self.enough(uploads):
                total = add_up(uploads.values)
        if total is None:
            return Update(uploads)
        joint = total
        solution = result_of(lambda: sums.solve(joint, network))
        if solution is None:
            return Update(uploads)
        normaliser, linear, ridge = solution
        if self.storage is not None:  # so nothing is masked
            self.storage.keep(dict(zip(uploads.clients, uploads.values, strict=True)))
        metrics = {"ridge": ridge, "features-constant": int((normaliser.inv_std == 0).sum())}
        return Update(uploads, _with_model(r.arrays, normaliser, linear), metrics)

    def _require_sums(self) -> FeatureSums:
        if self.sums is None:
            raise ValueError("sums: expected FeatureSums(...), got None")
        return self.sums

    def _normal_equations(
        self, sums: FeatureStatistics, normaliser: Normaliser | None = None
    ) -> tuple[Normaliser, NormalEquations]:
        """Return the problem of normalised features, with a normaliser or the sums' own."""
        targets = self.shape[1] if self.real_targets else 0
        if normaliser is None:
            identity = Normaliser.identity(self.width)
            normaliser = normaliser_of(sums, targets) if self.normalise else identity
        return normaliser, NormalEquations.of(
            sums, normaliser, bias=self.bias, free_bias=True, num_targets=targets
        )

    def without(self, clients: Sequence[int], arrays: ArrayRecord) -> ArrayRecord:
        """Return the model that never had some clients: see :meth:`.OneExchange.without`.

        The normaliser is that of the others. The network stays: it was trained with these clients
        if stage 1 asked them.
        """
        sums = self._require_sums()
        total = add_up(require_storage(self.storage).without(clients).values())
        normaliser, linear, _ = sums.solve(total, self.network_of(arrays))
        return _with_model(arrays, normaliser, linear)

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
        """Return a MessageTask and some parts of the arrays, each a record of that name."""
        if r.arrays is not self._keyed[0]:  # the network's key is computed once for them
            network = [r.arrays[name].numpy() for name in self.network.state_dict()]
            self._keyed = (r.arrays, ConvexTask.key_of(self.feature_map, network))
        key = self._keyed[1]
        message = MessageTask(step=step, network_key=key, run_key=self.run_key, **task)
        content = RecordDict(
            {r.owner.configrecord_key: ConfigRecord({**config, **message.to_config()})}
        )
        for name in parts:
            names = PARTS.get(name, tuple(self.network.state_dict()))
            content[name] = ArrayRecord({n: r.arrays[n] for n in names})
        return content

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
                f"normalise, sums: within a {owner} a round shows only some of the clients; "
                f"expected False and None, got {self.normalise} and {self.sums!r}"
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


def _with_model(
    arrays: ArrayRecord, normaliser: Normaliser, linear: NDArray[np.float32]
) -> ArrayRecord:
    """Return arrays with a normaliser and a linear model in place of, or beside, their own."""
    model = {LINEAR: linear, MEAN: normaliser.mean, SCALE: normaliser.inv_std}
    return ArrayRecord({**arrays, **record_of(model)})


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
    reported = [upload.metrics.get(wire.RATE_TIMES_LAMBDA) for upload in uploads]
    rates = [rate for rate in reported if isinstance(rate, int | float) and rate >= 0]
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
