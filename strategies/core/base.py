"""The base of all strategies here: reproducible sampling, clients by name, checked replies, state.

Flower samples nodes, whose ids are random in every run, with Python's global generator, adds
replies up in the order in which they come, and ends the run on one malformed reply. Here clients
are sampled by the partition that they report, from a generator of (seed, round); replies are sorted
by client before any sum; and each is checked whole before any of it is used.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import BadReply, NetworkPredictor, Predictor
from fedntk.ntk.features import CENTRE
from fedntk.ntk.payloads import OUTLIER_FACTOR, Agreement
from fedntk.ntk.support.files import claimed
from fedntk.ntk.support.threads import warn_of_spinning
from fedntk.trust import SEALED_SEED

from .array_archive import under
from .averaged_model import AveragedModel
from .averaging import named_arrays
from .centred_inputs import centred_by_clients
from .checkpoint import RunCheckpoints
from .registry import ClientRegistry, Exchange, SentParts
from .replies import (
    NoUsableReply,
    Reply,
    accuracy_of,
    is_like,
    kinds_of,
    largest_group,
    screen_accuracies,
)
from .rounds import EvaluateFn, ShouldStop, run_rounds
from .trust_protocols import SealedSeeds, SealsSeeds

__all__ = ["BaseStrategy"]

logger = getLogger("flwr")
T = TypeVar("T")
Pairs = list[tuple[Reply, T]]


class BaseStrategy(FedAvg):
    """What all strategies of this package share; Flower's FedAvg lends its options.

    A method overrides what it needs of three things: :meth:`content_for`, what one client is sent
    (the global arrays, as it stands); ``aggregate_train``, what becomes of the replies, which
    :meth:`accepted` checks; and the state. :meth:`exchange` is one more exchange within a round.

    Parameters
    ----------
    seed : int
        Of the sampling of clients.
    min_completed : int
        Fewer valid replies than this leave the model unchanged in a round. At least as many clients
        are sampled.
    max_examples : int
        A reply that claims more examples is dropped. Set it to what a client can hold: examples
        are the weight of a client's reply.
    query_timeout : float
        Seconds to wait for the answers of further exchanges: which partition a node holds, and what
        a method asks between training and aggregation.
    held_out : sequence of int
        Partitions never sampled for training.
    evaluate_without : sequence of int
        Partitions never sampled for evaluation.
    evaluate_every : int
        Clients evaluate in every so many rounds, and in the last one.
    outlier_factor : float
        With three clients or more, a reply that is so many times larger than the median client's is
        dropped: its change of the weights, or what else a method compares. Raise it where clients
        take very different numbers of steps; infinity drops none.
    average_decay : float
        Decay of an exponential mean of the weights over the rounds that changed them, which is then
        what is evaluated and returned; clients train from the newest weights all the same. 0: the
        newest weights are. See :class:`~fedntk.strategies.core.averaged_model.AveragedModel`. Not
        for methods that learn different things in different rounds or clients.
    centre_inputs : bool
        Before the first round all clients are asked for the sum of their inputs, projected where
        there is a projection, and the model's array ``centre`` becomes their mean: see
        :class:`~fedntk.ntk.CentredInputs`, which the model has to be. More than half of them must
        give one that can be used. For methods of one network that all clients train.
    key_server : SealsSeeds, optional
        Seals the seed of the random projection for each client, such as
        :class:`fedntk.trust.KeyServer` or ``RemoteKeyServer``. The strategy never learns the seed;
        clients have ``projection=SealedProjection(...)``.
    run : str
        Name of the training run, for the trusted third parties: a seed of one run opens in no
        other. A run that goes on after a restart keeps its name.
    **fedavg_options
        Of ``flwr.serverapp.strategy.FedAvg``.

    Attributes
    ----------
    registry : ClientRegistry
        Which node is which client.
    sent : SentParts
        What each client has been sent.
    global_arrays : ArrayRecord
        What the round at work, or the last one, began with.
    train_metrics, evaluate_metrics : dict of int to MetricRecord
        What each round's aggregation returned: weighted means of the clients' metrics and the
        counts ``replies-accepted``, ``replies-rejected`` and ``rejected-<reason>``.
    client_evaluations : dict of int to dict
        Client -> metrics of each client whose evaluation the newest round accepted.
    server_round : int
        The round at work, or the last one; 0 before the first.
    learned : str
        What the newest global arrays hold: ``"network"``, or another name that the method gives
        to what it has learned by then.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    client: ClassVar[str] = "SGDClient"  # class of the clients that go with it
    replies: ClassVar[str] = "weights"  # what these reply with: see Agreement
    averages: ClassVar[bool] = True  # whether what it learns has a mean over rounds
    centres: ClassVar[bool] = False  # whether it can centre the inputs of what it learns
    # how metrics of several such strategies in one round are put together, by the name's beginning;
    # means, weighted by examples, are the rule
    combined_by: ClassVar[Mapping[str, Callable[[Sequence[float]], float]]] = {}

    def __init__(
        self,
        *,
        seed: int = 0,
        min_completed: int = 1,
        max_examples: int = 10_000_000,
        query_timeout: float = 600,
        held_out: Sequence[int] = (),
        evaluate_without: Sequence[int] = (),
        evaluate_every: int = 1,
        outlier_factor: float = OUTLIER_FACTOR,
        average_decay: float = 0.0,
        centre_inputs: bool = False,
        key_server: SealsSeeds | None = None,
        run: str = "",
        **fedavg_options: Any,
    ) -> None:
        super().__init__(**fedavg_options)
        if min_completed < 1:
            raise ValueError(f"min_completed: expected at least 1, got {min_completed}")
        if seed < 0:
            raise ValueError(f"seed: expected at least 0, got {seed}")
        if not outlier_factor > 1:
            raise ValueError(f"outlier_factor: expected more than 1, got {outlier_factor}")
        if average_decay and not self.averages:
            raise ValueError(
                f"average_decay: expected 0 for {type(self).__name__}, whose arrays have no "
                f"mean over rounds, got {average_decay}"
            )
        if centre_inputs and not self.centres:
            raise ValueError(
                f"centre_inputs: expected False for {type(self).__name__}, which cannot take a "
                "mean off its clients' inputs"
            )
        if key_server is not None and not run:
            raise ValueError("key_server: name the training run with run=..., as its clients do")
        self.seed = seed
        self.min_completed = min_completed
        self.max_examples = max_examples
        self.query_timeout = query_timeout
        self.held_out = tuple(held_out)
        if evaluate_every < 1:
            raise ValueError(f"evaluate_every: expected at least 1, got {evaluate_every}")
        self.evaluate_without = tuple(evaluate_without)
        self.evaluate_every = evaluate_every
        self.outlier_factor = outlier_factor
        self.averaged = AveragedModel(average_decay) if average_decay else None
        self.centre_inputs = centre_inputs
        self.run = run
        self.registry = ClientRegistry()
        self.sent = SentParts()
        self.global_arrays = ArrayRecord()
        self.train_metrics: dict[int, MetricRecord] = {}
        self.evaluate_metrics: dict[int, MetricRecord] = {}
        self.client_evaluations: dict[int, dict[str, Any]] = {}
        self.server_round = 0
        self._seeds = None if key_server is None else SealedSeeds(key_server, run)
        self._exchanges: dict[str, Exchange] = {}  # stage -> what its replies answer
        self._configs: dict[str, ConfigRecord] = {}  # stage -> of its last messages
        self._claimants: set[int] = set()  # nodes whose newest replies told their partitions
        self._grid: Grid | None = None
        self._owner: BaseStrategy | None = None
        self._rounds_loaded: int | None = None  # before start, of a state
        self._last_round = 0
        self._centred = False  # whether the weights that belong to the state have their mean
        self.last_refusal = ""
        self.last_failure = ""  # of a strategy that works within this one
        self._timeout: float = 3600

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        logger.log(INFO, "\t└──> Seed %d, at least %d valid replies", self.seed, self.min_completed)

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return what later rounds depend on besides the global weights and the settings.

        A strategy made with the same settings that loads it, and is started from the same weights,
        goes on bit for bit as this one would. There is no generator in it: draws are seeded by
        (seed, round). Methods add what they keep from round to round.

        Returns
        -------
        dict
            Name -> array, or what JSON holds. Later rounds do not change it. A name with a dot is
            one of a varying number, such as ``controls.<client>``.
        """
        own = {} if self.averaged is None else self.averaged.state_dict()
        averaged = {f"averaged.{name}": value for name, value in own.items()}
        centred = {"centred": self._centred} if self.centre_inputs else {}
        return {
            "settings": self.settings(),
            "server-round": self.server_round,
            **averaged,
            **centred,
        }

    def settings(self) -> dict[str, Any]:
        """Return what a run's outcome depends on besides data and weights, as JSON holds it.

        A checkpoint goes with one set of them. Methods add their own.
        """
        return {
            "strategy": type(self).__name__,
            "seed": self.seed,
            "fraction_train": self.fraction_train,
            "min_train_nodes": self.min_train_nodes,
            "min_completed": self.min_completed,
            "held_out": list(self.held_out),
            "outlier_factor": self.outlier_factor,
            "run": self.run,
            **({} if self.averaged is None else {"average_decay": self.averaged.decay}),
            **({"centre_inputs": True} if self.centre_inputs else {}),
        }

    def agreement(self) -> Agreement:
        """Return what clients must agree with; each message tells it."""
        return Agreement(
            strategy=type(self).__name__,
            client=self.client,
            replies=self.replies,
            projected=self._seeds is not None,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned; :meth:`start` then goes on from it.

        Raises
        ------
        ValueError
            If it is the state of another class of strategy, or of other settings.
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
        self.server_round = self._rounds_loaded = int(state["server-round"])
        self._centred = bool(state.get("centred", False))
        if self.averaged is not None:
            self.averaged.load_state_dict(under("averaged.", state))

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

        After :meth:`load_state_dict` `num_rounds` counts the rounds before, too, and
        `initial_arrays` are the weights that belong to the state, or their mean (`average_decay`),
        as the state then has the weights. If no round changes the model, they are what is returned.

        Parameters
        ----------
        checkpoint : path, optional
            Folder of this run. Its state is written there after each round, whole or not at all.
            If there is one already, the run goes on from it, to the same bits as if it had never
            been cut off: make the same call again after a crash. `initial_arrays` then only have to
            be of the same network, and the Result holds all rounds. `evaluate_fn` is called once
            more for the last of the rounds that were run.
        should_stop : callable, optional
            (round, Result so far) -> whether that round is the last one. Newer versions of Flower
            have this argument, too.
        grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            Flower's.
        **options
            Arguments that a newer Flower adds.

        Raises
        ------
        ValueError
            If the checkpoint is of other settings, another `train_config` or another network.
        BlockingIOError
            If another process is at work with the checkpoint.
        OSError
            If the first checkpoint cannot be written.
        NoUsableReply
            At the end, if in none of the rounds a reply to a training message could be used; before
            the first round, if too few clients tell what `centre_inputs` needs.
        RuntimeError
            At the end, if a strategy within this one failed and no round changed the model.
        """
        warn_of_spinning(torch.get_num_threads())
        options |= {
            "grid": grid,
            "timeout": timeout,
            "train_config": train_config,
            "evaluate_config": evaluate_config,
            "evaluate_fn": evaluate_fn,
            "should_stop": should_stop,
        }
        self._timeout = timeout
        if checkpoint is None:
            return self._run(initial_arrays, num_rounds, None, **options)
        folder = Path(checkpoint)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"checkpoint: expected a folder, got the file {folder}")
        network = self.network_of(initial_arrays)
        checkpoints = RunCheckpoints(folder, network, train_config or {})
        with claimed(folder, "checkpoint"):
            return self._run(initial_arrays, num_rounds, checkpoints, **options)

    def _run(
        self,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        checkpoints: RunCheckpoints | None,
        **options: Any,
    ) -> Result:
        """Run the rounds that remain, from the newest checkpoint if there is one."""
        before: Result | None = None
        if checkpoints is not None:
            found = checkpoints.newest(self.network_of)
            if found is not None:
                initial_arrays, before = found.arrays, found.result
                self._go_on_from(checkpoints.folder, found.strategy, num_rounds)
        loaded, self._rounds_loaded = self._rounds_loaded, None
        done, self._centred = loaded or 0, self._centred and loaded is not None
        initial_arrays = self.begin(initial_arrays, num_rounds, done)
        if self.averaged is not None and done and self.averaged.count:
            initial_arrays = self.averaged.newest
        if self.centre_inputs and self.fraction_train and not self._centred:
            initial_arrays = centred_by_clients(initial_arrays, self, options["grid"])
            self._centred = True

        def save(server_round: int, arrays: ArrayRecord, result: Result) -> None:
            if checkpoints is not None:
                checkpoints.save(server_round, arrays, self.state_dict(), result)

        result = run_rounds(
            self,
            done,
            initial_arrays=initial_arrays,
            num_rounds=num_rounds,
            after_round=None if checkpoints is None else save,
            before=before,
            averaged=self.averaged,
            **options,
        )
        if not len(result.arrays):
            result.arrays = initial_arrays
            if self.last_failure and done == 0:
                raise RuntimeError(
                    f"in {num_rounds} rounds the model never changed: {self.last_failure}"
                )
        if self.server_round > done == 0:
            self._require_success()
        return result

    def _go_on_from(self, folder: Path, state: Mapping[str, Any], num_rounds: int) -> None:
        """Take over the state of a checkpoint, and say so."""
        try:
            self.load_state_dict(state)
        except ValueError as error:
            raise ValueError(
                f"checkpoint: {folder} holds another run ({error}); use the same settings, or "
                "another folder"
            ) from error
        if self.server_round >= num_rounds:
            logger.log(
                WARNING,
                "%s: all %d rounds have been run before, and none is run now; choose another "
                "folder for another run",
                folder,
                self.server_round,
            )
        else:
            logger.log(INFO, "%s: going on after round %d", folder, self.server_round)

    def _require_success(self) -> None:
        """Refuse to end as if all were well where no client ever replied with what can be used."""
        trained = [m for m in self.train_metrics.values() if "replies-accepted" in m]
        if trained and not any(metrics["replies-accepted"] for metrics in trained):
            raise NoUsableReply(
                f"in {len(trained)} rounds no client's reply could be used; the last refused: "
                f"{self.last_refusal or 'none came at all'}"
            )

    @property
    def learned(self) -> str:
        """What the newest global arrays hold."""
        return "network"

    def predictor(
        self, arrays: ArrayRecord | Mapping[str, NDArray[Any]], network: nn.Module
    ) -> Predictor:
        """Make the predictor of what :meth:`start` returned, or ``evaluate_fn`` was given.

        Parameters
        ----------
        arrays : ArrayRecord or dict of str to ndarray
            The newest global arrays.
        network : nn.Module
            Of the clients' architecture; it is copied, its weights do not matter.
        """
        return NetworkPredictor.from_arrays(network, named_arrays(arrays))

    def without(self, clients: Sequence[int], arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays of a model that some clients never had a part in, where a method can.

        Parameters
        ----------
        clients : sequence of int
            Their ids: partitions, where nodes report them.
        arrays : ArrayRecord
            That :meth:`start` returned.

        Raises
        ------
        ValueError
            If the method cannot; it says what else it refuses.
        """
        del clients, arrays
        raise ValueError(f"{type(self).__name__} cannot take a client out of what it learned")

    def forget_kept(self, clients: Sequence[int]) -> None:
        """Remove what the server kept of some clients for :meth:`without`, if anything."""

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Return the arrays that a run begins with, `done` rounds of it run before.

        With none, what is left of an earlier run of this object is forgotten. Methods that learn
        more than a network add it here.
        """
        self._last_round = num_rounds
        if not done:
            self.train_metrics, self.evaluate_metrics = {}, {}
            self.client_evaluations = {}
            if self.averaged is not None:
                self.averaged.reset()
        return initial_arrays

    # ----------------------------------------------------------------- sending

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send :meth:`content_for` to a sample of the clients that are not held out."""
        self.global_arrays, self.server_round = arrays, server_round
        if self.fraction_train == 0.0:
            return []
        minimum = max(self.min_train_nodes, self.min_completed)
        nodes = self.sample(
            grid, server_round, "train", self.fraction_train, minimum, self.held_out
        )
        return self.instruct(server_round, nodes, arrays, config, grid)

    def instruct(
        self,
        server_round: int,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Make the training messages for the nodes that were sampled."""
        del grid
        return self.messages(server_round, nodes, MessageType.TRAIN, arrays, config)

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
        return self.messages(server_round, nodes, MessageType.EVALUATE, arrays, config)

    def evaluates_in(self, server_round: int) -> bool:
        """Whether clients evaluate in a round."""
        return server_round % self.evaluate_every == 0 or server_round == self._last_round

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what one client is sent.

        Parameters
        ----------
        client : int
            Its id in the registry.
        stage : str
            Type of the message: ``"train"``, ``"evaluate"``, or what :meth:`exchange` is given.
        arrays : ArrayRecord
            The global arrays, or those of the exchange.
        config : ConfigRecord
            With ``"server-round"``. All clients share it: add to a copy.
        """
        return RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})

    def messages(
        self,
        server_round: int,
        nodes: Sequence[int],
        stage: str,
        arrays: ArrayRecord,
        config: ConfigRecord,
    ) -> list[Message]:
        """Make a message for each node; the replies of this stage will have to answer these."""
        self.prepare_config(config, server_round)
        self._configs[stage] = config
        contents = [
            self.content_for(self.registry.client(node), stage, arrays, config) for node in nodes
        ]
        return self.addressed(nodes, contents, stage)

    def work_within(self, owner: "BaseStrategy", *, everyone: bool) -> None:
        """Share the clients of another strategy, which samples them.

        Then :meth:`sample` returns all nodes of the grid that the owner shows. Clients held out,
        sealed seeds and the names of records and weights are the owner's.

        Parameters
        ----------
        owner : BaseStrategy
            The other strategy.
        everyone : bool
            Whether it shows all clients that it samples, and not some of them.

        Raises
        ------
        ValueError
            If the method cannot work so, averages its weights over rounds, which is the owner's, or
            centres inputs.
        """
        del everyone
        if self.averaged is not None:
            raise ValueError(
                f"average_decay: expected 0 within a {type(owner).__name__}, which may have one "
                f"itself, got {self.averaged.decay}"
            )
        if self.centre_inputs:
            raise ValueError(
                f"centre_inputs: expected False within a {type(owner).__name__}, which shows it "
                "some of the clients; leave it out"
            )
        self._owner, self.registry, self.held_out = owner, owner.registry, owner.held_out
        self._seeds = owner._seeds
        for name in ("weighted_by_key", "arrayrecord_key", "configrecord_key"):
            setattr(self, name, getattr(owner, name))

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add what all messages of a round tell: its number, and what must agree."""
        config["server-round"] = server_round
        for key, value in self.agreement().to_config().items():
            config[key] = value

    def addressed(
        self, nodes: Sequence[int], contents: Sequence[RecordDict], stage: str
    ) -> list[Message]:
        """Address contents to nodes, with their sealed seeds where there is a key server."""
        if self._seeds is not None:
            self._seeds.fetch(nodes, self._public_keys)
        messages: list[Message] = []
        for node, content in zip(nodes, contents, strict=True):
            sealed = None if self._seeds is None else self._seeds.of(node)
            if sealed is not None:
                own = dict(content.config_records.get(self.configrecord_key, {}))
                config = ConfigRecord({**own, SEALED_SEED: sealed})
                content = RecordDict({**content, self.configrecord_key: config})
            messages += self._construct_messages(content, [node], stage)
        self._exchanges[stage] = Exchange(messages)
        return messages

    def _public_keys(self, nodes: list[int]) -> Iterable[Message]:
        return self._ask(nodes, "query.keys")

    def _ask(self, nodes: Sequence[int], kind: str) -> list[Message]:
        """Return the replies to a question without content that answer it."""
        if self._grid is None:
            raise RuntimeError("call configure_train first, which sets the grid")
        asked = list(self._construct_messages(RecordDict(), list(nodes), kind))
        sent, answers = Exchange(asked), []
        for reply in self._grid.send_and_receive(asked, timeout=self.query_timeout):
            try:
                sent.take(reply)
                answers.append(reply)
            except BadReply as error:
                logger.log(WARNING, "dropped an answer to %s: %s", kind, error)
        return answers

    def exchange(
        self,
        nodes: Sequence[int],
        stage: str,
        arrays: ArrayRecord,
        parse: Callable[[Reply], T],
    ) -> tuple[Pairs[T], Counter[str]]:
        """Make one more exchange within a round; parameters as above, result as :meth:`accepted`.

        A stage that was sent before has its configuration again. In a deployment an exchange costs
        seconds: prefer one a round.
        """
        if self._grid is None:
            raise RuntimeError("exchange: call configure_train first, which sets the grid")
        config = self._configs.get(stage, ConfigRecord())
        messages = self.messages(self.server_round, nodes, stage, arrays, config)
        asked_again = stage in (MessageType.TRAIN, MessageType.EVALUATE)
        timeout = (self._owner or self)._timeout if asked_again else self.query_timeout
        answers = self._grid.send_and_receive(messages, timeout=timeout)
        return self.accepted(answers, parse, stage)

    # ---------------------------------------------------------------- sampling

    def sample(
        self,
        grid: Grid,
        server_round: int,
        stage: str,
        fraction: float,
        minimum: int,
        excluded: Collection[int] = (),
    ) -> list[int]:
        """Node ids of a sample drawn by client, in the order of the clients.

        Parameters
        ----------
        grid : Grid
            Waited on until ``min_available_nodes`` are there.
        server_round, stage : int, str
            Seed the draw, together with the strategy's seed.
        fraction, minimum : float, int
            ``max(int(fraction * available), minimum)`` nodes are drawn, or all if they are fewer.
        excluded : collection of int
            Partitions left out.
        """
        if self._owner is not None:
            self._grid = grid
            return sorted(grid.get_node_ids(), key=lambda node: (self.registry.client(node), node))
        candidates, size = self._candidates(grid, stage, fraction, minimum, excluded)
        generator = np.random.default_rng([self.seed, server_round, *stage.encode()])
        chosen = np.sort(generator.choice(len(candidates), size=size, replace=False))
        return [candidates[i][1] for i in chosen]

    def _candidates(
        self,
        grid: Grid,
        stage: str,
        fraction: float,
        minimum: int,
        excluded: Collection[int],
        *,
        sent_alike: bool = True,
    ) -> tuple[list[tuple[int, int]], int]:
        """Return (client, node) of all that may be sampled, in order, and how many are to be.

        `sent_alike`: in the first round it does not matter who is who, if all are sampled.
        """
        nodes = self._wait_for_nodes(grid, max(self.min_available_nodes, minimum))
        everyone = max(int(fraction * len(nodes)), minimum) >= len(nodes) and not excluded
        told = everyone and sent_alike and self._is_first_sample
        live = self._identified(nodes, with_reply=told)
        candidates = sorted(
            (self.registry.client(node), node)
            for node in live
            if self.registry.partitions[node] not in excluded
        )
        size = min(max(int(fraction * len(live)), minimum), len(candidates))
        logger.log(INFO, "configure_%s: sampled %d of %d nodes", stage, size, len(live))
        return candidates, size

    def _wait_for_nodes(self, grid: Grid, minimum: int) -> list[int]:
        self._grid = grid
        while len(nodes := sorted(grid.get_node_ids())) < minimum:
            logger.log(INFO, "waiting for nodes: %d of %d are there", len(nodes), minimum)
            time.sleep(1)
        return nodes

    @property
    def _is_first_sample(self) -> bool:
        """Whether no client has a past, so that what it is sent is the same whoever it is."""
        return not self.registry.partitions and self.server_round <= 1

    def _identified(self, nodes: list[int], *, with_reply: bool) -> list[int]:
        """Have each node's partition: ask new ones, once, or have it with their first replies."""
        if new := self.registry.unknown(nodes):
            if with_reply:
                self.registry.expect(new)
            else:
                self.registry.add(dict.fromkeys(new) | self._ask_partitions(new))
        self.registry.set_present(nodes)
        return nodes

    def _ask_partitions(self, nodes: Sequence[int]) -> dict[int, int | None]:
        return _reported_partitions(self._ask(nodes, "query.partition"))

    def _identify(self, replies: Iterable[Message], sent: Exchange) -> None:
        """Take the partitions from the first replies of nodes that were not asked beforehand.

        Until the replies are accepted these are claims: see :meth:`_remaining`.
        """
        first: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if self.registry.unknown([node]) and sent.node_asked(reply) == node:
                first.setdefault(node, reply)
        reported = _reported_partitions(first.values())
        self._claimants = set(reported)
        if silent := [node for node in first if node not in reported]:  # such as a user's own reply
            reported |= dict.fromkeys(silent) | self._ask_partitions(silent)
        if reported:
            self.registry.add(reported)

    def _remaining(self, pairs: Pairs[T], dropped: Collection[int]) -> Pairs[T]:
        """Sort replies by client, after the dropped nodes' claims to a partition are given up.

        These nodes are asked for their partitions when clients are sampled next.
        """
        self.registry.expect(self._claimants & set(dropped))
        for reply, _ in pairs:
            reply.client = self.registry.client(reply.node)
        return sorted(pairs, key=lambda pair: (pair[0].client, pair[0].node))

    # ------------------------------------------------------------- aggregation

    def accepted(
        self, replies: Iterable[Message], parse: Callable[[Reply], T], stage: str
    ) -> tuple[Pairs[T], Counter[str]]:
        """Parse the replies of a stage, dropping those that cannot be used.

        Each message is answered once, by the node that was asked. A client whose reply is an error
        is sent again all that it may have lost. Only replies that are used claim a partition.

        Parameters
        ----------
        replies : iterable of Message
            In any order.
        parse : callable
            Turns a reply into what the method needs of it, or raises BadReply. It must not change
            anything: the reply may yet be dropped.
        stage : str
            As :meth:`content_for` was given.

        Returns
        -------
        tuple of list of (Reply, T), Counter
            What was parsed, sorted by client, and how many were rejected for which reason.
        """
        sent = self._exchanges.get(stage, Exchange())
        is_train = not stage.startswith(MessageType.EVALUATE)
        contents, errors = self._check_and_log_replies(replies, is_train, validate=False)
        rejected: Counter[str] = Counter({"error": len(errors)} if errors else {})
        self._identify(contents, sent)
        for message in errors:
            self.last_refusal = f"{message.error.reason}"
            if (node := sent.node_asked(message)) is not None:
                self.forget_sent(self.registry.client(node))
                if self._seeds is not None:
                    self._seeds.forget(node)
        parsed: Pairs[T] = []
        for message in contents:
            try:
                client = self.registry.client(sent.take(message))
                reply = Reply(message, client, self.weighted_by_key, self.max_examples)
                self._require_kind(message, stage)
                parsed.append((reply, parse(reply)))
            except Exception as error:  # a reply may hold anything; none may end the run
                bad = error if isinstance(error, BadReply) else BadReply("malformed", str(error))
                self.drop(message.metadata.src_node_id, bad, rejected)
        return self._remaining(
            parsed, self._claimants - {reply.node for reply, _ in parsed}
        ), rejected

    def forget_sent(self, client: int) -> None:
        """Have a client sent all parts again."""
        self.sent.forget(client)

    def _require_kind(self, message: Message, stage: str) -> None:
        """Refuse weights where something else is taken, with what to do."""
        if stage != MessageType.TRAIN or self.takes_weights:
            return
        if is_like(message, self.network_of(self.global_arrays)):
            raise BadReply(
                "weights", f"weights came, not {self.replies}: is the client a {self.client}?"
            )

    @property
    def untrained(self) -> tuple[str, ...]:
        """Names of the model's arrays that clients must return as they were sent."""
        return (CENTRE,) if self.centre_inputs else ()

    @property
    def takes_weights(self) -> bool:
        """Whether clients reply to the round at work with weights."""
        return self.replies == BaseStrategy.replies

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the network's own arrays among the global ones."""
        return arrays

    def drop(self, node: int, bad: BadReply, rejected: Counter[str]) -> None:
        """Count a reply that is not used, and log why."""
        rejected[bad.reason] += 1
        self.last_refusal = f"node {node}: {bad}"
        logger.log(WARNING, "dropped the reply of node %d: %s", node, bad)

    def screened(
        self,
        pairs: Pairs[T],
        rejected: Counter[str],
        screen: Callable[[Sequence[T], float], Sequence[BadReply | None]],
    ) -> Pairs[T]:
        """Drop the replies that a rule over all of them refuses.

        `screen` gives its verdicts on what was parsed, with the `outlier_factor`.
        """
        kept: Pairs[T] = []
        verdicts = screen([parsed for _, parsed in pairs], self.outlier_factor)
        for pair, bad in zip(pairs, verdicts, strict=True):
            if bad is None:
                kept.append(pair)
            else:
                self.drop(pair[0].node, bad, rejected)
        used = {reply.node for reply, _ in kept}
        return self._remaining(kept, {reply.node for reply, _ in pairs} - used)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the metrics of the accepted replies."""
        pairs, rejected = self.evaluations(replies)
        self.client_evaluations = {
            reply.client: {**reply.metrics, self.weighted_by_key: reply.num_examples}
            for reply, _ in pairs
        }
        if not pairs and not rejected:
            return None
        replied = [reply for reply, _ in pairs]
        metrics = self.round_metrics(replied, rejected, self.evaluate_metrics_aggr_fn)
        self.evaluate_metrics[server_round] = metrics
        return metrics if pairs else None

    def evaluations(self, replies: Iterable[Message]) -> tuple[Pairs[Any], Counter[str]]:
        """Return the accepted evaluations, and how many were rejected for which reason."""
        pairs, rejected = self.accepted(replies, accuracy_of, MessageType.EVALUATE)
        return self.screened(pairs, rejected, screen_accuracies), rejected

    def enough(self, completed: int) -> bool:
        """Whether so many valid replies may change the model; says so where they may not."""
        if completed < self.min_completed:
            logger.log(
                WARNING,
                "%d valid replies and at least %d are needed: the model stays as it was",
                completed,
                self.min_completed,
            )
        return completed >= self.min_completed

    def round_metrics(
        self,
        replies: Sequence[Reply],
        rejected: Counter[str],
        aggregate: Callable[[list[RecordDict], str], MetricRecord] | None = None,
    ) -> MetricRecord:
        """Aggregate the accepted replies' metrics, and count the replies.

        Parameters
        ----------
        replies : sequence of Reply
            Accepted. Metrics must have the same names in all replies that are aggregated, so those
            whose names differ from most replies' are left out of it.
        rejected : Counter
            Reason -> number of replies dropped.
        aggregate : callable, optional
            Flower's ``train_metrics_aggr_fn`` by default: a mean weighted by examples.
        """
        metrics = MetricRecord()
        if replies:
            alike = largest_group([(r, None) for r in replies], lambda r, _: kinds_of(r.metrics))
            contents = [
                RecordDict(
                    {"metrics": MetricRecord({**r.metrics, self.weighted_by_key: r.num_examples})}
                )
                for r, _ in alike
            ]
            metrics = (aggregate or self.train_metrics_aggr_fn)(contents, self.weighted_by_key)
        metrics["num-examples"] = sum(reply.num_examples for reply in replies)
        metrics["replies-accepted"] = len(replies)
        metrics["replies-rejected"] = rejected.total()
        for reason, count in sorted(rejected.items()):
            metrics[f"rejected-{reason}"] = count
        return metrics


def _reported_partitions(replies: Iterable[Message]) -> dict[int, int | None]:
    """Return the partition that each node reports, None for one that says that it has none."""
    reported: dict[int, int | None] = {}
    for reply in replies:
        if reply.has_error() or len(reply.content.metric_records) != 1:
            continue
        (record,) = reply.content.metric_records.values()
        partition = record.get("partition-id")
        if isinstance(partition, int) and -1 <= partition < 2**63:  # below 0: placeholders
            reported[reply.metadata.src_node_id] = None if partition == -1 else partition
    return reported
