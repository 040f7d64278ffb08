"""The base of all strategies: a round of a method is one generator.

A method derives from :class:`Strategy`, declares its options and its state as fields, and writes
:meth:`Strategy.train_round`, from top to bottom::

    class FedAvg(Strategy):
        def train_round(self, r: Round) -> Rounds[Update]:
            uploads = yield from r.ask(r.weights)
            uploads = self.screening.drop_outliers(uploads, r.model)
            if not self.enough(uploads):
                return Update(uploads)
            return Update(uploads, cast_like(self.screening.mean(uploads, r.model), r.model))

How clients are sampled, how replies are screened, masks, averaging over rounds are parts.
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import flwr.serverapp.strategy
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import nn

from fedntk.ntk import NetworkPredictor, Predictor
from fedntk.ntk.noise import Noise
from fedntk.ntk.options import Declared, argument, option, part, parts_of, saved_state, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.agreement import Agreement

from .asynchrony import Asynchrony
from .averaging import Learned, named_arrays
from .centre import CentreInputs
from .channel import Channel, Rounds
from .checkpoint import open_checkpoints
from .replies import accuracy_of, mean_metrics, of_most, screen_accuracies
from .round import Round
from .rounds import EvaluateFn, ShouldStop, require_nodes, run_rounds
from .sampling import Population, Sampling
from .saved_state import pack_state, require_same, unpack_state
from .screening import Screening
from .secure import SecureAggregation
from .trust_protocols import SealedSeeds, SealsSeeds
from .uploads import Update, Uploads

logger = getLogger("flwr")


class Strategy(Declared, flwr.serverapp.strategy.Strategy):
    """What all methods share: options, state, Flower's hooks, and what a run returns.

    Attributes
    ----------
    channel : Channel
        What messages and replies go through; its ``registry`` says which node is which client.
    global_arrays : ArrayRecord
        What the current round, or the last one, began with.
    server_round : int
        The current round, or the last one; 0 before the first.
    train_metrics, evaluate_metrics : dict of int to MetricRecord
        What each round's aggregation returned: weighted means of the clients' metrics, and the
        counts ``num-examples``, ``replies-accepted``, ``replies-rejected`` and
        ``rejected-<reason>``. Rounds that ask nobody have none.
    client_evaluations : dict of int to dict
        Client -> metrics of its evaluation, for those that the newest round accepted.
    """

    client: ClassVar[str] = "SGDClient"  # class of the clients that go with it
    takes_real_targets: ClassVar[bool] = False  # whether its clients may have such
    replies: ClassVar[str] = wire.WEIGHTS  # what these reply with: see Agreement
    learns_only_head: ClassVar[bool] = False  # whether nothing but the last layer is learned
    rules: ClassVar[tuple[str, ...]] = ("none",)  # of screening, that it can follow
    # where it may work within another strategy: among any of its clients, only among all, nowhere
    nests: ClassVar[Literal["anywhere", "with everyone", "nowhere"]] = "anywhere"
    nested_parts: ClassVar[tuple[str, ...]] = ()  # optional ones that it may then have
    # how metrics of several such strategies in one round are put together, by the name's beginning;
    # means, weighted by examples, are the rule
    combined_by: ClassVar[Mapping[str, Callable[[Sequence[float]], float]]] = {}

    fraction_train: float = option(
        "fraction of the available nodes that train in a round", default=1.0, at_least=0, at_most=1
    )
    fraction_evaluate: float = option(
        "fraction of them that evaluate", default=1.0, at_least=0, at_most=1, compared=False
    )
    min_train_nodes: int = option("fewest nodes that train", default=2, at_least=0)
    min_evaluate_nodes: int = option(
        "fewest nodes that evaluate", default=2, at_least=0, compared=False
    )
    min_available_nodes: int = option(
        "nodes to wait for before a round", default=2, at_least=0, compared=False
    )
    weighted_by_key: str = argument("metric that counts examples", default="num-examples")
    arrayrecord_key: str = argument("name of the record of arrays", default="arrays")
    configrecord_key: str = argument("name of the configuration's record", default="config")
    train_metrics_aggr_fn: Any = argument(
        "how metrics of training are aggregated: by default, each is averaged over the clients "
        "that report it, weighted by their examples; a function is given the replies that have "
        "all metrics that most have",
        default=None,
    )
    evaluate_metrics_aggr_fn: Any = argument("the same, for evaluation", default=None)
    min_completed: float = option(
        "fewer valid replies leave the model unchanged in a round: a number, and at least so many "
        "clients are sampled, or below 1 a fraction of the clients sampled, rounded up; "
        "asynchronous rounds, and strategies within others, know no fraction",
        default=0.5,
        above=0,
    )
    max_examples: int = option(
        "examples that a client may hold: a reply that claims more is dropped, as examples are the "
        "weight of a reply",
        default=10_000_000,
        at_least=1,
        at_most=2**32,
        compared=False,
    )
    query_timeout: float = option(
        "seconds to wait for answers to a method's questions between training and aggregation",
        default=600,
        above=0,
        compared=False,
    )
    round_deadline: float = option(
        "seconds after which each exchange of a round goes on with the replies that have come; "
        "late replies are dropped; 0: as long as the run's timeout",
        default=0.0,
        at_least=0,
        compared=False,
    )
    evaluate_every: int = option(
        "rounds from one evaluation by clients to the next; the last round always has one",
        default=1,
        at_least=1,
        compared=False,
    )
    run: str = option(
        "name of the training run for the trusted third parties: a seed of one run opens in no "
        "other; a run that goes on after a restart keeps its name",
        default="",
    )
    schema: str = argument(
        "name or digest of what examples look like: columns, classes, units; clients with "
        "another one refuse to train and to evaluate",
        default="",
    )
    key_server: SealsSeeds | None = argument(
        "seals the seed of the random projection for each client, such as "
        "fedntk.trust.KeyServer or RemoteKeyServer: the strategy never learns the seed; clients "
        "have projection=SealedProjection(...)",
        default=None,
    )
    network: nn.Module | None = argument(
        "the clients' architecture, for `predictor`; its weights do not matter", default=None
    )
    sampling: Sampling = part("which clients take part in a round", default=Sampling)
    screening: Screening = part("how false replies are dropped", default=Screening)

    train_metrics: dict[int, MetricRecord] = state(dict, saved=False)
    evaluate_metrics: dict[int, MetricRecord] = state(dict, saved=False)
    client_evaluations: dict[int, dict[str, Any]] = state(dict, saved=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fraction_train == 0:
            self.min_train_nodes = 0
        if self.fraction_evaluate == 0:
            self.min_evaluate_nodes = 0
        self.train_metrics_aggr_fn = _aggregation_of(self.train_metrics_aggr_fn)
        self.evaluate_metrics_aggr_fn = _aggregation_of(self.evaluate_metrics_aggr_fn)
        self.channel = Channel(
            weighted_by_key=self.weighted_by_key,
            configrecord_key=self.configrecord_key,
            seeds=None if self.key_server is None else SealedSeeds(self.key_server, self.run),
            query_timeout=self.query_timeout,
        )
        self.global_arrays, self.server_round = ArrayRecord(), 0
        self.rounds_loaded: int | None = None  # of a state, until a run goes on from it
        self.last_round = 0  # of the run
        self.prepare()

    def check(self) -> None:
        """Refuse options that do not go together."""
        if (mechanism := self.mechanism_of(self)) is not None:
            mechanism.require_covered(self)
        fewest, rule, rules = self.min_completed, self.screening.rule, " or ".join(self.rules)
        if fewest >= 1 and fewest != int(fewest):
            raise ValueError(
                f"min_completed: expected a whole number, or a fraction below 1, got {fewest}"
            )
        if rule not in self.rules:
            name = type(self).__name__
            raise ValueError(f"screening.rule: expected {rules} for {name}, got {rule}")
        if self.key_server is not None and not self.run:
            raise ValueError("key_server: name the training run with run=..., as its clients do")
        if (secure := self.part_of(SecureAggregation)) is None:
            return
        if self.screening.is_robust:
            raise ValueError(
                "screening.rule: the server sees no client's weights under secure aggregation; "
                f"expected none, got {rule}"
            )
        if self.part_of(CentreInputs) is not None:
            raise ValueError(
                "centre: expected None with secure aggregation, under which the server sees no "
                "client's sum of inputs"
            )
        if secure.vouching is not None and not self.run:
            raise ValueError(
                "secure.vouching: expected the name of the run, run=..., as clients have it"
            )

    # ---------------------------------------------------------------- what a method writes

    @abstractmethod
    def train_round(self, r: Round) -> Rounds[Update]:
        """Do one round of training.

        Everything about clients goes through `r`, and so a strategy works within another one.
        State changes after :meth:`enough`. A round that asks nobody returns ``Update(None)``.
        """

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate the arrays; return their replies."""
        uploads = yield from r.ask(accuracy_of)
        return self.screening.drop(uploads, screen_accuracies)

    def prepare(self) -> None:
        """Do what follows from the options, once these are checked."""

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Return the arrays that a run begins with; methods that learn more than a network add it.

        `done` is the number of rounds that were run before.
        """
        return initial_arrays

    def require_memory(self) -> None:
        """Raise NotEnoughMemory unless a run with `min_available_nodes` clients fits."""

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the network's own arrays among the global ones."""
        return arrays

    def predictor(self, arrays: Learned, network: nn.Module | None = None) -> Predictor:
        """Make the predictor of what :meth:`start` returned, or ``evaluate_fn`` was given.

        The network has the clients' architecture, and is the strategy's own by default. It is
        copied; its weights do not matter.
        """
        loss = self.agreement().loss or "cross-entropy"
        return NetworkPredictor.from_arrays(
            architecture_of(self, network), named_arrays(arrays), loss=loss
        )

    @property
    def learned(self) -> str:
        """What the newest global arrays hold: ``"network"``, or a name that the method gives."""
        return "network"

    @property
    def agreed_loss(self) -> str:
        """The loss that clients must have; empty if any will do."""
        return ""

    @property
    def finished(self) -> bool:
        """Whether a run ends with this round, whatever rounds remain."""
        asynchrony = self.part_of(Asynchrony)
        return asynchrony is not None and asynchrony.is_complete

    @classmethod
    def mechanism_of(cls, options: Any) -> type[Noise] | None:
        """Return the mechanism of differential privacy for which the options ask, if any."""
        return None

    # ----------------------------------------------------------------------- what it has

    @property
    def fewest_replies(self) -> int:
        """Number of valid replies without which no round changes the model."""
        return max(int(self.min_completed), self.screening.fewest)

    def enough(self, uploads: Uploads[Any] | int, *, sampled: int = 0) -> bool:
        """Whether these replies may change the model; logs it if they may not.

        Those of the exchange that the screening's rule dropped as false count: it bears them. A
        number of replies counts out of as many as were `sampled`.
        """
        if isinstance(uploads, Uploads):
            completed, sampled = len(uploads) + self.screening.bears(uploads), uploads.sampled
        else:
            completed = uploads
        fraction = self.min_completed if self.min_completed < 1 else 0
        needed = max(self.fewest_replies, math.ceil(fraction * sampled))
        if completed < needed:
            logger.warning(
                "%d valid replies and at least %d are needed: the model stays as it was",
                completed,
                needed,
            )
        return completed >= needed

    def agreement(self) -> Agreement:
        """Return what clients must agree with; each message has it."""
        return Agreement(
            strategy=type(self).__name__,
            client=self.client,
            replies=self.replies,
            loss=self.agreed_loss,
        )

    def told_options(self) -> dict[str, Any]:
        """Return the options that are sent to clients, as a configuration holds them."""
        return self.to_config()

    def evaluates_in(self, server_round: int) -> bool:
        """Whether clients, and a run's server, evaluate in a round; round 0 is before the first."""
        is_last = self.finished or server_round == self.last_round
        return is_last or server_round % self.evaluate_every == 0

    def require_nested(self, owner: str, *, everyone: bool) -> None:
        """Refuse to work within another strategy, which shows all of a round's clients or some.

        `owner` is its name. Clients held out, sealed seeds, and the names of records are its.
        """
        name = type(self).__name__
        if self.nests == "nowhere":
            raise ValueError(
                f"{name} cannot work within a {owner}: models are the clients' own, and the server "
                "has none to predict with"
            )
        if self.nests == "with everyone" and not everyone:
            raise ValueError(
                f"{name}: expected a strategy that shows all clients in a round, got a {owner}, "
                "which would leave out some of them"
            )
        if self.mechanism_of(self) is not None:
            raise ValueError(
                f"{name}: epsilon is of one model by itself, so noise is refused within a {owner}; "
                "leave it out"
            )
        for key, declared in parts_of(type(self)).items():
            refused = declared.optional and key not in self.nested_parts
            if refused and getattr(self, key) is not None:
                raise ValueError(f"{key}: expected None within a {owner}; set it on that")

    # ------------------------------------------------------------------------ the hooks

    @final
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round of training: return its first messages."""
        self.global_arrays, self.server_round = arrays, server_round
        self.channel.conversation = None
        if self.fraction_train == 0.0:
            return []
        r = round_of(self, server_round, MessageType.TRAIN, arrays, config)
        return self.channel.begin(self.train_round(r), grid)

    @final
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Finish a round of training: return the new arrays, if any, and its metrics."""
        if self.channel.conversation is None:
            return None, None
        update = self.channel.finish(replies)
        if not isinstance(update, Update):
            raise TypeError(
                f"{type(self).__name__}.train_round: expected an Update, got "
                f"{type(update).__name__}; end it by return Update(uploads, arrays)"
            )
        metrics = metrics_of(self, update)
        if metrics is not None:
            self.train_metrics[server_round] = metrics
        return update.arrays, metrics

    @final
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round of evaluation: return its first messages."""
        self.channel.conversation = None
        if self.fraction_evaluate == 0.0 or not self.evaluates_in(server_round):
            return []
        r = round_of(self, server_round, MessageType.EVALUATE, arrays, config)
        return self.channel.begin(self.evaluate_round(r), grid)

    @final
    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Finish a round of evaluation: average the metrics of the accepted replies."""
        self.client_evaluations = {}
        if self.channel.conversation is None:
            return None
        uploads: Uploads[Any] = self.channel.finish(replies)
        key = self.weighted_by_key
        self.client_evaluations = {
            upload.client: {**upload.metrics, key: upload.num_examples} for upload in uploads
        }
        metrics = uploads.metrics(self.evaluate_metrics_aggr_fn, key)
        self.evaluate_metrics[server_round] = metrics
        return metrics

    # ---------------------------------------------------------------------------- runs

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        should_stop: ShouldStop | None = None,
        checkpoint: str | Path | None = None,
        **options: Any,
    ) -> Result:
        """Run Flower's ``Strategy.start``, or the rounds of it that remain.

        After :meth:`load_state_dict` `num_rounds` includes the rounds before, and `initial_arrays`
        are the weights of the state, or their mean (`average`). They are returned if no round
        changes the model.

        Parameters
        ----------
        checkpoint : path, optional
            Folder of this run. Its state is written there after each round. After a crash make the
            same call again: the run goes on to the same bits as if it had never been cut off.
            `initial_arrays` then only have to be of the same network, the Result holds all rounds,
            and `evaluate_fn` is called once more for the last round that was run.
        should_stop : callable, optional
            (round, Result so far) -> whether that round is the last one, as in newer Flower.
        **options
            Arguments that a newer Flower adds; they are not used. The others are Flower's.

        Raises
        ------
        BlockingIOError
            If another process uses the checkpoint.
        NoUsableReply
            At the end, if in none of the rounds a reply to a training message could be used; before
            the first round, if too few clients tell what `centre` needs.
        """
        supported = inspect.signature(flwr.serverapp.strategy.Strategy.start).parameters
        if unknown := options.keys() - supported.keys():
            raise TypeError(f"start: unknown arguments {', '.join(sorted(unknown))}")
        require_nodes(self, grid)
        self.channel.timeout = timeout
        configs = ConfigRecord(dict(train_config or {})), evaluate_config or ConfigRecord()
        network = self.network_of(initial_arrays)
        with open_checkpoints(checkpoint, network, configs[0]) as saved:
            return run_rounds(
                self, grid, initial_arrays, num_rounds, saved, configs, evaluate_fn, should_stop
            )

    def summary(self) -> None:
        """Log the options that differ from their defaults."""
        changed = [
            f"{name} = {value}"
            for name, declared in self.options().items()
            if declared.compared and (value := getattr(self, name)) != declared.default
        ]
        logger.info("\t└──> Options: %s", ", ".join(changed) or "all at their defaults")

    # --------------------------------------------------------------------------- state

    def settings(self) -> dict[str, Any]:
        """Return what an outcome depends on besides data and weights: checkpoints compare it."""
        options, further = self.compared_options(), self.further_settings()
        return {"strategy": type(self).__name__, **options, **further}

    def further_settings(self) -> dict[str, Any]:
        """Return settings of a method that are no options."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what later rounds depend on besides the global weights: arrays, and JSON's values.

        A strategy with the same settings that loads it, and starts from the same weights, goes on
        bit for bit as this one would. A name with a dot is one of a varying number, such as
        ``controls.<client>``. Later rounds do not change what was returned.
        """
        settings = {"settings": self.settings(), "server-round": self.server_round}
        return {**settings, **pack_state(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned; :meth:`start` then goes on from it.

        ValueError if it is of another class of strategy, or of other settings.
        """
        current = self.state_dict()
        fixed = {name for name in current if "." not in name or name in saved_state(self)}
        if "settings" in state:
            require_same(current["settings"], state["settings"])
        if not fixed <= state.keys():
            raise ValueError(f"state: expected {sorted(current)}, got {sorted(state)}")
        self.reset_state()
        unpack_state(self, state)
        self.server_round = self.rounds_loaded = int(state["server-round"])


def round_of(
    strategy: Strategy,
    server_round: int,
    stage: str,
    arrays: ArrayRecord,
    config: Mapping[str, Any],
) -> Round:
    """Return a strategy's round of training or of evaluation, by which clients are asked."""
    available, sampling = strategy.min_available_nodes, strategy.sampling
    if stage == MessageType.TRAIN:
        minimum = max(strategy.min_train_nodes, int(strategy.min_completed))
        needed, held_out = strategy.fewest_replies, sampling.held_out
        population = Population(strategy.fraction_train, minimum, needed, available, held_out)
    else:
        minimum, held_out = strategy.min_evaluate_nodes, sampling.evaluate_without
        population = Population(strategy.fraction_evaluate, minimum, 0, available, held_out)
    return Round(strategy, server_round, stage, arrays, config, population)


def metrics_of(strategy: Strategy, update: Update) -> MetricRecord | None:
    """Return a round's metrics: the clients' means, counts of replies, and the method's."""
    if update.record is not None or update.uploads is None:
        return update.record
    metrics = update.uploads.metrics(
        strategy.train_metrics_aggr_fn, strategy.weighted_by_key, permitted_by(strategy)
    )
    for name, value in update.metrics.items():
        metrics[name] = value
    return metrics


def permitted_by(strategy: Strategy) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return what keeps the metrics of training that clients may report; all, without noise."""
    mechanism = strategy.mechanism_of(strategy)
    return dict if mechanism is None else mechanism.filtered


def architecture_of(strategy: Strategy, network: nn.Module | None) -> nn.Module:
    """Return a network, or else the strategy's; TypeError if there is neither."""
    chosen = strategy.network if network is None else network
    if chosen is None:
        raise TypeError(
            "predictor: expected the clients' network as second argument, or as network=... of "
            f"{type(strategy).__name__}"
        )
    return chosen


def _aggregation_of(function: Any) -> Callable[[list[RecordDict], str], MetricRecord]:
    return mean_metrics if function is None else partial(of_most, function)
