"""The base of all strategies here: options, state, rounds and what a run returns.

Flower's FedAvg lends its options and two helpers. :mod:`.exchange` sends and checks,
:mod:`.sampling` draws clients, :mod:`.rounds` is the loop.
"""

import contextlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import NetworkPredictor, Predictor
from fedntk.ntk.averages import Arrays
from fedntk.ntk.features.centred_inputs import CENTRE
from fedntk.ntk.noise import Noise
from fedntk.ntk.options import argument, option, refuse_first, state
from fedntk.ntk.payloads.screening import screen_changes
from fedntk.ntk.robust_averages import least_models, robust_mean, screen_by_loss
from fedntk.ntk.support.files import claimed
from fedntk.ntk.support.threads import warn_of_spinning
from fedntk.trust.secure_sum import FEWEST

from .averaged_model import AveragedModel
from .averaging import Learned, cast_like, named_arrays
from .centred_inputs import centre_by_clients
from .checkpoint import RunCheckpoints
from .exchange import Accepted, Pairs, logger
from .replies import INCOMPLETE, Aggregate, Reply, accuracy_of, check_weights, screen_accuracies
from .rounds import EvaluateFn, ShouldStop, run_rounds
from .sampling import Sampling, await_nodes, patience_with
from .saved_state import pack, unpack
from .trust_protocols import MaskOptions

T = TypeVar("T")


class BaseStrategy(MaskOptions, Sampling):
    """What all strategies of this package share.

    A method declares its options and its state as fields, and overrides :meth:`content_for`, what
    one client is sent (the global arrays, as it stands), and ``aggregate_train``, what becomes of
    the replies, which :meth:`accepted` checks. :meth:`exchange` is one more exchange within a
    round.

    Attributes
    ----------
    registry : ClientRegistry
        Which node is which client.
    sent : SentParts
        What each client has been sent.
    global_arrays : ArrayRecord
        What the current round, or the last one, began with.
    train_metrics, evaluate_metrics : dict of int to MetricRecord
        What each round's aggregation returned: weighted means of the clients' metrics, none if no
        reply was accepted, and the counts ``num-examples``, ``replies-accepted``,
        ``replies-rejected`` and ``rejected-<reason>``. Rounds that ask nobody have none.
    client_evaluations : dict of int to dict
        Client -> metrics of its evaluation, for those that the newest round accepted.
    server_round : int
        The current round, or the last one; 0 before the first.
    """

    averages: ClassVar[bool] = True  # whether what it learns has a mean over rounds
    centres: ClassVar[bool] = False  # whether it can centre the inputs of what it learns
    masks: ClassVar[bool] = False  # whether sums over the clients are all that it needs of them
    key_option: ClassVar[str] = "secure_aggregation"  # for which clients have public keys
    # how metrics of several such strategies in one round are put together, by the name's beginning;
    # means, weighted by examples, are the rule
    combined_by: ClassVar[Mapping[str, Callable[[Sequence[float]], float]]] = {}

    evaluate_every: int = option(
        "rounds from one evaluation by clients to the next; the last round always has one",
        default=1,
        at_least=1,
        compared=False,
    )
    average_decay: float = option(
        "decay of an exponential mean of the weights over the rounds that changed them, evaluated "
        "and returned in their place, while clients train from the newest weights; 0: no mean",
        default=0.0,
        at_least=0,
        below=1,
    )
    centre_inputs: bool = option(
        "before the first round all clients are asked for the sum of their inputs, projected if "
        "they are, and the model's array 'centre' becomes the mean, for a model that is a "
        "fedntk.ntk.CentredInputs; more than half of them must answer",
        default=False,
    )

    network: nn.Module | None = argument(
        "the clients' architecture, for `predictor`; its weights do not matter", default=None
    )

    validation_loss: Callable[[ArrayRecord], float] | None = argument(
        "the network's loss on the server's validation examples, for defence='validation' and "
        "NTK-FL's selection='validation'",
        default=None,
    )

    train_metrics: dict[int, MetricRecord] = state(dict, saved=False)
    evaluate_metrics: dict[int, MetricRecord] = state(dict, saved=False)
    client_evaluations: dict[int, dict[str, Any]] = state(dict, saved=False)
    averaged: AveragedModel | None = state(lambda: None, reset=False)
    _centred: bool = state(bool)  # whether the weights that belong to the state have their mean

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.defence == "validation" and self.validation_loss is None:
            raise ValueError("validation_loss: expected one with defence='validation', got None")
        if self.average_decay:
            self.averaged = AveragedModel(self.average_decay)
        self.rounds_loaded: int | None = None  # of a state, until a run goes on from it
        self._last_round = 0

    @property
    def mechanism(self) -> type[Noise] | None:
        """The mechanism of differential privacy by which the options ask for noise, if any."""
        return self.mechanism_of(self)

    @classmethod
    def mechanism_of(cls, options: Any) -> type[Noise] | None:
        """Return :attr:`mechanism` for an object that has the options as attributes."""
        return None

    def check(self) -> None:
        """Refuse options that do not go together."""
        super().check()
        name, masked = type(self).__name__, self.secure_aggregation
        if self.mechanism is not None:
            self.mechanism.require_covered(self)
        rules = {
            f"average_decay: expected 0 for {name}, whose arrays have no mean over rounds, got "
            f"{self.average_decay}": self.average_decay and not self.averages,
            f"centre_inputs: expected False for {name}{' with secure_aggregation' * masked}, which "
            "cannot take a mean off its clients' inputs": (
                self.centre_inputs and (masked or not self.centres)
            ),
            f"secure_aggregation: expected False for {name}, which needs what each client sends, "
            "and not only the sum over all of them": masked and not self.masks,
            "defence: the server sees no client's weights under secure_aggregation; expected none, "
            f"got {self.defence}": masked and self.defence != "none",
            f"vouching: expected {self.key_option} = True and the name of the run, run=..., as "
            "clients have it": (
                self.vouching is not None and not (getattr(self, self.key_option) and self.run)
            ),
        }
        refuse_first(rules)

    def summary(self) -> None:
        """Log the options that differ from their defaults."""
        given = [
            f"{name} = {value}"
            for name, own in self.options().items()
            if own.compared and (value := getattr(self, name)) != own.default
        ]
        logger.info("\t└──> Options: %s", ", ".join(given) or "all at their defaults")

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return what later rounds depend on besides the global weights: arrays, and JSON's values.

        A strategy with the same settings that loads it, and starts from the same weights, goes on
        bit for bit as this one would. A name with a dot is one of a varying number, such as
        ``controls.<client>``. Later rounds do not change what was returned.
        """
        saved: dict[str, Any] = {"settings": self.settings(), "server-round": self.server_round}
        for name in self.states():
            saved |= pack(name, getattr(self, name))
        return saved

    def settings(self) -> dict[str, Any]:
        """Return what a run's outcome depends on besides data and weights, as JSON holds it.

        A checkpoint goes with one set of them.
        """
        return {"strategy": type(self).__name__, **self.compared_options()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned; :meth:`start` then goes on from it.

        ValueError if it is of another class of strategy, or of other settings.
        """
        own = self.state_dict()
        if not {name for name in own if "." not in name} <= state.keys():
            raise ValueError(f"state: expected {sorted(own)}, got {sorted(state)}")
        expected, found = (json.loads(json.dumps(s["settings"])) for s in (own, state))
        for name in {**expected, **found}:
            if expected.get(name) != found.get(name):
                raise ValueError(
                    f"state: expected {name} = {expected.get(name)}, got {found.get(name)}; it is "
                    "of a strategy with other settings"
                )
        self.reset_state()
        for name, kind in self.states().items():
            setattr(self, name, unpack(name, kind, getattr(self, name), state))
        self.server_round = self.rounds_loaded = int(state["server-round"])

    # -------------------------------------------------------------------- runs

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
        are the weights of the state, or their mean (`average_decay`). They are returned if no round
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
            the first round, if too few clients tell what `centre_inputs` needs.
        """
        if odd := options.keys() - inspect.signature(Strategy.start).parameters.keys():
            raise TypeError(f"start: unknown arguments {', '.join(sorted(odd))}")
        self.require_nodes(grid)
        warn_of_spinning(torch.get_num_threads())
        self._timeout = timeout
        train_config = ConfigRecord(dict(train_config or {}))  # strategies write into it
        with contextlib.ExitStack() as stack:
            checkpoints = None
            if checkpoint is not None:
                folder = Path(checkpoint)
                if folder.exists() and not folder.is_dir():
                    raise ValueError(f"checkpoint: expected a folder, got the file {folder}")
                stack.enter_context(claimed(folder, "checkpoint"))
                network = self.network_of(initial_arrays)
                checkpoints = RunCheckpoints(folder, network, train_config)
            return run_rounds(
                self,
                grid,
                initial_arrays,
                num_rounds,
                checkpoints,
                train_config=train_config,
                evaluate_config=evaluate_config or ConfigRecord(),
                evaluate_fn=evaluate_fn,
                should_stop=should_stop,
            )

    def require_nodes(self, grid: Grid) -> None:
        """Refuse, before any work, what wants more nodes than the grid will ever have."""
        if patience_with(grid) == float("inf"):
            return
        wanted = dict[str, int]()
        if self.fraction_train:
            wanted["min_train_nodes"] = self.min_train_nodes
            fewest = {
                "min_completed": int(self.min_completed),
                f"defence = {self.defence}": least_models(self.defence, self.liars_expected),
                "secure_aggregation": FEWEST * self.secure_aggregation,
            }
            held_out = sum(partition >= 0 for partition in set(self.held_out))
            beside = f" beside {held_out} held out" if held_out else ""
            wanted |= {f"{name}{beside}": n + held_out for name, n in fewest.items() if n > 1}
        if self.fraction_evaluate:
            wanted["min_evaluate_nodes"] = self.min_evaluate_nodes
        if wanted:
            await_nodes(grid, {"min_available_nodes": self.min_available_nodes} | wanted)

    def centre(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Ask for the mean of the inputs, unless it is there or not to be taken off."""
        if self.centre_inputs and self.fraction_train and not self._centred:
            arrays = centre_by_clients(arrays, self, grid)
            self._centred = True
        return arrays

    def choose_evaluated(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return what is evaluated and returned: the mean over rounds, or the newest arrays."""
        if self.averaged is None or not self.averaged.count:
            return arrays
        return self.averaged.mean

    @property
    def learned(self) -> str:
        """What the newest global arrays hold: ``"network"``, or a name that the method gives."""
        return "network"

    def predictor(self, arrays: Learned, network: nn.Module | None = None) -> Predictor:
        """Make the predictor of what :meth:`start` returned, or ``evaluate_fn`` was given.

        The network has the clients' architecture, and is the strategy's own by default. It is
        copied; its weights do not matter.
        """
        loss = self.agreement().loss or "cross-entropy"
        own = self.architecture(network)
        return NetworkPredictor.from_arrays(own, named_arrays(arrays), loss=loss)

    def architecture(self, network: nn.Module | None) -> nn.Module:
        """Return a given network, or the strategy's own; TypeError if there is neither."""
        if (own := self.network if network is None else network) is None:
            raise TypeError(
                "predictor: expected the clients' network as second argument, or as network=... of "
                f"{type(self).__name__}"
            )
        return own

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Return the arrays that a run begins with; methods that learn more than a network add it.

        If no round is `done`, what is left of an earlier run of this object is forgotten.
        """
        self.require_memory()
        self._last_round = num_rounds
        self.reset_state(saved_too=self.rounds_loaded is None)
        self.rounds_loaded = None
        if not done and self.averaged is not None:
            self.averaged.reset()
        return initial_arrays

    def require_memory(self) -> None:
        """Raise NotEnoughMemory unless a run with `min_available_nodes` clients fits."""

    # ------------------------------------------------------------------- hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send :meth:`content_for` to a sample of the clients that are not held out."""
        self.global_arrays, self.server_round = arrays, server_round
        if self.fraction_train == 0.0:
            return []
        fraction, minimum = self.fraction_train, self.fewest_sampled
        nodes = self.sample(grid, server_round, "train", fraction, minimum, self.held_out)
        self.prepare_round(server_round, nodes, grid)
        return self.messages(nodes, MessageType.TRAIN, arrays, config)

    def prepare_round(self, server_round: int, nodes: list[int], grid: Grid) -> None:
        """Do what a round needs between the choice of its nodes and their messages."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send :meth:`content_for` to a sample of the clients that may evaluate."""
        if self.fraction_evaluate == 0.0 or not self.evaluates_in(server_round):
            return []
        fraction, minimum = self.fraction_evaluate, self.min_evaluate_nodes
        nodes = self.sample(
            grid, server_round, "evaluate", fraction, minimum, self.evaluate_without
        )
        return self.messages(nodes, MessageType.EVALUATE, arrays, config)

    def evaluates_in(self, server_round: int) -> bool:
        """Whether clients, and a run's server, evaluate in a round; round 0 is before the first."""
        is_last = self.finished or server_round == self._last_round
        return is_last or server_round % self.evaluate_every == 0

    @property
    def finished(self) -> bool:
        """Whether a run ends with this round, whatever rounds remain."""
        return False

    @property
    def gives_up(self) -> bool:
        """Whether a run ends if its first rounds bring no reply that can be used."""
        return True

    def work_within(self, owner: "BaseStrategy", *, everyone: bool) -> None:
        """Share the clients of another strategy, which samples them, and shows all or some of them.

        Then :meth:`sample` returns all nodes of the grid that the owner shows. Clients held out,
        sealed seeds and the names of records and weights are the owner's. ValueError if the method
        cannot work so, such as one that must ask `everyone` at once.
        """
        if self.mechanism is not None:
            raise ValueError(
                f"{type(self).__name__}: epsilon is of one model by itself, so noise is refused "
                f"within a {type(owner).__name__}; leave it out"
            )
        defaults = {"average_decay": 0, "centre_inputs": False, "secure_aggregation": False}
        for name, none in defaults.items():
            if (value := getattr(self, name)) != none:
                raise ValueError(
                    f"{name}: expected {none} within a {type(owner).__name__}, got {value}; leave "
                    "it out, or set it on that"
                )
        self._owner, self.registry, self.held_out = owner, owner.registry, owner.held_out
        self._seeds = owner._seeds
        for name in ("weighted_by_key", "arrayrecord_key", "configrecord_key"):
            setattr(self, name, getattr(owner, name))

    @property
    def untrained(self) -> tuple[str, ...]:
        """Names of the model's arrays that clients must return as they were sent."""
        return (CENTRE,) if self.centre_inputs else ()

    def accept_weights(
        self, replies: Iterable[Message], model: Mapping[str, NDArray[Any]]
    ) -> tuple[Pairs[dict[str, NDArray[Any]]], MetricRecord]:
        """Return the training replies that are weights of a model, none far off, and metrics."""
        pairs, rejected = self.accepted(
            replies,
            lambda reply: check_weights(reply.arrays(), model, self.untrained),
            MessageType.TRAIN,
        )
        pairs = self.apply_screen(pairs, rejected, partial(screen_changes, model))
        pairs = self.judged(pairs, rejected, model, lambda own: own)
        return pairs, self.round_metrics([reply for reply, _ in pairs], rejected)

    def judged(
        self,
        pairs: Pairs[T],
        rejected: Counter[str],
        model: Arrays,
        weights: Callable[[T], Arrays],
        counts: Sequence[int] = (),
    ) -> Pairs[T]:
        """Drop the clients whose weights raise the validation loss, if that is the defence.

        They have some or all of the model's arrays, and count as their replies' examples, or as
        `counts`.
        """
        loss = self.validation_loss
        if loss is None or self.defence != "validation" or not pairs:
            return pairs
        counts = counts or [reply.num_examples for reply, _ in pairs]
        return self.apply_screen(
            pairs,
            rejected,
            lambda own, _: screen_by_loss(
                [*map(weights, own)],
                counts,
                lambda arrays: loss(cast_like({**model, **arrays}, model)),
                self.liars_expected,
            ),
        )

    def robust_mean_of(
        self, before: Mapping[str, NDArray[Any]], pairs: Pairs[Any], counts: Sequence[int] = ()
    ) -> dict[str, NDArray[Any]]:
        """Return the mean of accepted models by `defence`.

        `before` is what they started from; they count as their replies' examples, or as `counts`.
        """
        counts = counts or [reply.num_examples for reply, _ in pairs]
        models = [own for _, own in pairs]
        return robust_mean(before, models, counts, self.defence, self.liars_expected)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the metrics of the accepted replies."""
        pairs, rejected = self.evaluations(replies)
        self.client_evaluations = {
            reply.client: {**reply.metrics, self.weighted_by_key: reply.num_examples}
            for reply, _ in pairs
        }
        asked = self.fraction_evaluate and self.evaluates_in(server_round)
        if not (asked or pairs or rejected):
            return None
        replied = [reply for reply, _ in pairs]
        metrics = self.round_metrics(replied, rejected, self.evaluate_metrics_aggr_fn)
        self.evaluate_metrics[server_round] = metrics
        return metrics

    def evaluations(self, replies: Iterable[Message]) -> Accepted[Any]:
        """Return the accepted evaluations, and how many were rejected for which reason."""
        pairs, rejected = self.accepted(replies, accuracy_of, MessageType.EVALUATE)
        return self.apply_screen(pairs, rejected, screen_accuracies), rejected

    def round_metrics(
        self, replies: Sequence[Reply], rejected: Counter[str], aggregate: Aggregate | None = None
    ) -> MetricRecord:
        """Aggregate the accepted replies' metrics, and count the replies.

        Lists with infinite numbers are left out of the aggregation, which is
        ``train_metrics_aggr_fn`` by default: see :func:`~.replies.mean_metrics`.
        """
        metrics, contents = MetricRecord(), []
        for reply in replies:
            told = {name: v for name, v in reply.metrics.items() if np.isfinite(v).all()}
            if self.mechanism is not None and aggregate is None:
                told = self.mechanism.filtered(told)
            record = MetricRecord({**told, self.weighted_by_key: reply.num_examples})
            contents.append(RecordDict({"metrics": record}))
        if contents:
            metrics = (aggregate or self.train_metrics_aggr_fn)(contents, self.weighted_by_key)
        if incomplete := [reply for reply in replies if reply.left_out]:
            metrics[INCOMPLETE] = len(incomplete)
            names = sorted({name[:80] for reply in incomplete for name in reply.left_out})
            logger.warning(
                "metrics of %d clients are NaN or infinite, and left out: %s",
                *(len(incomplete), str(names[:5])[:200]),
            )
        metrics["num-examples"] = sum(reply.num_examples for reply in replies)
        metrics["replies-accepted"] = len(replies)
        metrics["replies-rejected"] = rejected.total()
        for reason, count in sorted(rejected.items()):
            metrics[f"rejected-{reason}"] = count
        return metrics
