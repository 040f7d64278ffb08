"""Flower's FedAvg, reproducible and safe from a single bad reply; the base of all strategies here.

Flower samples nodes, whose ids are random in every run, with Python's global generator, adds
replies up in the order in which they come, and ends the run on one malformed reply. Here nodes
are sampled by the partition they report, from a generator of (seed, round); replies are sorted by
partition before any sum; and each is checked whole before any of it is used.

Source of the averaging, which is Flower's own: McMahan et al., *Communication-Efficient Learning
of Deep Networks from Decentralized Data*, AISTATS 2017, algorithm 1.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING, getLogger
from typing import Any, TypeVar

import numpy as np
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
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.trust import SEALED_SEED

from .replies import Reply, agreeing, checked_accuracy, checked_weights
from .resumption import EvaluateFn, start_after
from .third_parties import SealedSeeds, SealsSeeds

__all__ = ["SeededFedAvg"]

logger = getLogger("flwr")
T = TypeVar("T")


class SeededFedAvg(FedAvg):
    """Flower's FedAvg: same seed, same bits; a bad reply is dropped, logged and counted.

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
        Seconds to wait for answers to queries: which partition a node holds, and what else a method
        asks between training and aggregation.
    held_out : sequence of int
        Partitions never sampled for training.
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
    train_metrics, evaluate_metrics : dict of int to MetricRecord
        What each round's aggregation returned: weighted means of the clients' metrics and the
        counts ``replies-accepted``, ``replies-rejected`` and ``rejected-<reason>``.
    client_evaluations : dict of int to dict
        Partition -> metrics of each client whose evaluation the newest round accepted.
    server_round : int
        The round at work, or the last one; 0 before the first.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        min_completed: int = 1,
        max_examples: int = 10_000_000,
        query_timeout: float = 600,
        held_out: Sequence[int] = (),
        key_server: SealsSeeds | None = None,
        run: str = "",
        **fedavg_options: Any,
    ) -> None:
        super().__init__(**fedavg_options)
        if min_completed < 1:
            raise ValueError(f"min_completed: expected at least 1, got {min_completed}")
        if seed < 0:
            raise ValueError(f"seed: expected at least 0, got {seed}")
        self.seed = seed
        self.min_completed = min_completed
        self.max_examples = max_examples
        self.query_timeout = query_timeout
        self.held_out = tuple(held_out)
        self.run = run
        if key_server is not None and not run:
            raise ValueError("key_server: name the training run with run=..., as its clients do")
        self._seeds = None if key_server is None else SealedSeeds(key_server, run)
        # metrics are aggregated in round_metrics; Flower's aggregate_train averages weights alone
        self._aggregate_metrics = {
            True: self.train_metrics_aggr_fn,
            False: self.evaluate_metrics_aggr_fn,
        }
        self.train_metrics_aggr_fn = _no_metrics
        self.train_metrics: dict[int, MetricRecord] = {}
        self.evaluate_metrics: dict[int, MetricRecord] = {}
        self.client_evaluations: dict[int, dict[str, Any]] = {}
        self.partitions: dict[int, int] = {}
        self.global_arrays = ArrayRecord()
        self.server_round = 0
        self._rounds_loaded = 0

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
            Name -> array, or what JSON holds. Later rounds do not change it.
        """
        return {
            "strategy": type(self).__name__,
            "seed": self.seed,
            "server-round": self.server_round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned; :meth:`start` then goes on from it.

        Raises
        ------
        ValueError
            If it is the state of another class of strategy, or of another seed.
        """
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(f"state: expected {sorted(own)}, got {sorted(state)}")
        for key in ("strategy", "seed"):
            if state[key] != own[key]:
                raise ValueError(f"state: expected {key} = {own[key]}, got {state[key]}")
        self.server_round = self._rounds_loaded = int(state["server-round"])

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run Flower's ``Strategy.start``; after :meth:`load_state_dict`, the rounds that remain.

        Then `num_rounds` counts the rounds before, too, and `initial_arrays` are the weights that
        belong to the state. If no round changes the model, they are what is returned.
        """
        initial_arrays = self.begin(initial_arrays, num_rounds)
        done, self._rounds_loaded = self._rounds_loaded, 0
        options: dict[str, Any] = {
            "grid": grid,
            "initial_arrays": initial_arrays,
            "num_rounds": num_rounds,
            "timeout": timeout,
            "train_config": train_config,
            "evaluate_config": evaluate_config,
            "evaluate_fn": evaluate_fn,
        }
        result = start_after(self, done, **options) if done else super().start(**options)
        if not len(result.arrays):
            result.arrays = initial_arrays
        return result

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int) -> ArrayRecord:
        """Return the arrays that a run begins with; methods that train more add it here."""
        return initial_arrays

    # ---------------------------------------------------------------- sampling

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the global model to a sample of the partitions that are not held out."""
        self.global_arrays, self.server_round = arrays, server_round
        if self.fraction_train == 0.0:
            return []
        minimum = max(self.min_train_nodes, self.min_completed)
        nodes = self.sample(
            grid, server_round, "train", self.fraction_train, minimum, self.held_out
        )
        return self._instructions(server_round, arrays, config, nodes, MessageType.TRAIN, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the global model to a sample of all partitions."""
        if self.fraction_evaluate == 0.0:
            return []
        nodes = self.sample(
            grid, server_round, "evaluate", self.fraction_evaluate, self.min_evaluate_nodes
        )
        return self._instructions(server_round, arrays, config, nodes, MessageType.EVALUATE, grid)

    def _instructions(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        nodes: list[int],
        message_type: str,
        grid: Grid,
    ) -> Iterable[Message]:
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self.messages(record, nodes, message_type, grid)

    def messages(
        self, record: RecordDict, nodes: list[int], message_type: str, grid: Grid
    ) -> Iterable[Message]:
        """Make a message for each node, with its own sealed seed where there is a key server.

        Parameters
        ----------
        record : RecordDict
            What all of them hold.
        nodes, message_type : list of int, str
            To whom, and of what kind.
        grid : Grid
            Over which nodes that have no seed yet are asked for their public keys.
        """
        if self._seeds is None:
            return self._construct_messages(record, nodes, message_type)
        self._seeds.fetch(nodes, lambda new: self._properties(new, grid))
        messages: list[Message] = []
        for node in nodes:
            config = ConfigRecord(dict(record.config_records[self.configrecord_key]))
            if (sealed := self._seeds.of(node)) is not None:
                config[SEALED_SEED] = sealed
            own = RecordDict({**record, self.configrecord_key: config})
            messages += self._construct_messages(own, [node], message_type)
        return messages

    def _properties(self, nodes: list[int], grid: Grid) -> Iterable[Message]:
        asked = self._construct_messages(RecordDict(), nodes, "query.keys")
        return grid.send_and_receive(asked, timeout=self.query_timeout)

    def sample(
        self,
        grid: Grid,
        server_round: int,
        stage: str,
        fraction: float,
        minimum: int,
        excluded: Sequence[int] = (),
    ) -> list[int]:
        """Node ids of a sample drawn by partition, in the order of their partitions.

        Parameters
        ----------
        grid : Grid
            Waited on until ``min_available_nodes`` are there.
        server_round, stage : int, str
            Seed the draw, together with the strategy's seed.
        fraction, minimum : float, int
            ``max(int(fraction * available), minimum)`` nodes are drawn, or all if they are fewer.
        excluded : sequence of int
            Partitions left out.
        """
        known = self._partitions(grid, max(self.min_available_nodes, minimum))
        candidates = sorted(
            (partition, node) for node, partition in known.items() if partition not in excluded
        )
        size = min(max(int(fraction * len(known)), minimum), len(candidates))
        generator = np.random.default_rng([self.seed, server_round, *stage.encode()])
        chosen = np.sort(generator.choice(len(candidates), size=size, replace=False))
        logger.log(INFO, "configure_%s: sampled %d of %d nodes", stage, size, len(known))
        return [candidates[i][1] for i in chosen]

    def _partitions(self, grid: Grid, minimum: int) -> dict[int, int]:
        """Node id -> partition of the nodes that are there; new ones are asked, once."""
        while len(nodes := sorted(grid.get_node_ids())) < minimum:
            logger.log(INFO, "waiting for nodes: %d of %d are there", len(nodes), minimum)
            time.sleep(1)
        if new := [node for node in nodes if node not in self.partitions]:
            asked = self._construct_messages(RecordDict(), new, "query.partition")
            self.partitions |= {node: node for node in new}
            for reply in grid.send_and_receive(asked, timeout=self.query_timeout):
                if reply.has_error() or len(reply.content.metric_records) != 1:
                    continue
                (record,) = reply.content.metric_records.values()
                partition = record.get("partition-id")
                if isinstance(partition, int):
                    self.partitions[reply.metadata.src_node_id] = partition
        return {node: self.partitions[node] for node in nodes}

    # ------------------------------------------------------------- aggregation

    def accepted(
        self, replies: Iterable[Message], parse: Callable[[Reply], T], *, is_train: bool = True
    ) -> tuple[list[tuple[Reply, T]], Counter[str]]:
        """Parse replies, dropping those that cannot be used.

        Parameters
        ----------
        replies : iterable of Message
            In any order.
        parse : callable
            Turns a reply into what the method needs of it, or raises BadReply.
        is_train : bool
            For the log.

        Returns
        -------
        tuple of list of (Reply, T), Counter
            What was parsed, sorted by partition, and how many were rejected for which reason.
        """
        contents, errors = self._check_and_log_replies(replies, is_train, validate=False)
        rejected: Counter[str] = Counter({"error": len(errors)} if errors else {})
        if self._seeds is not None:
            for error_reply in errors:
                self._seeds.forget(error_reply.metadata.src_node_id)
        parsed: list[tuple[Reply, T]] = []
        for message in contents:
            try:
                reply = Reply(message, self.weighted_by_key, self.max_examples)
                parsed.append((reply, parse(reply)))
            except Exception as error:  # a reply may hold anything; none may end the run
                reason = error.reason if isinstance(error, BadReply) else "malformed"
                rejected[reason] += 1
                logger.log(
                    WARNING, "dropped the reply of node %d: %s", message.metadata.src_node_id, error
                )
        parsed.sort(key=lambda pair: self.order(pair[0]))
        return parsed, rejected

    def order(self, reply: Reply) -> tuple[int, int]:
        """Key by which replies are sorted: the partition that the node told when it was asked."""
        return self.partitions.get(reply.node, reply.node), reply.node

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the accepted weights, in the dtypes of the global model."""
        expected = {name: array.numpy() for name, array in self.global_arrays.items()}
        pairs, rejected = self.accepted(replies, lambda reply: checked_weights(reply, expected))
        metrics = self.round_metrics([reply for reply, _ in pairs], rejected)
        self.train_metrics[server_round] = metrics
        if not self.enough(len(pairs)):
            return None, metrics
        averaged = weighted_mean(
            [arrays for _, arrays in pairs], [reply.num_examples for reply, _ in pairs]
        )
        return like(averaged, expected), metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the metrics of the accepted replies."""
        pairs, rejected = self.accepted(replies, checked_accuracy, is_train=False)
        self.client_evaluations = {
            self.order(reply)[0]: {**reply.metrics, self.weighted_by_key: reply.num_examples}
            for reply, _ in pairs
        }
        if not pairs and not rejected:
            return None
        metrics = self.round_metrics([reply for reply, _ in pairs], rejected, is_train=False)
        self.evaluate_metrics[server_round] = metrics
        return metrics if pairs else None

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
        self, replies: Sequence[Reply], rejected: Counter[str], *, is_train: bool = True
    ) -> MetricRecord:
        """Aggregate the accepted replies' metrics, and count the replies.

        Flower's ``train_metrics_aggr_fn`` and ``evaluate_metrics_aggr_fn`` do the first, by
        default by a mean weighted by examples. Metrics must have the same names in all replies that
        are aggregated, so those whose names differ from most replies' are left out of it.
        """
        metrics = MetricRecord()
        if replies:
            aggregate = self._aggregate_metrics[is_train]
            alike, _ = agreeing([(r, None) for r in replies], lambda r, _: r.metric_names)
            contents = [
                RecordDict(
                    {"metrics": MetricRecord({**r.metrics, self.weighted_by_key: r.num_examples})}
                )
                for r, _ in alike
            ]
            metrics = aggregate(contents, self.weighted_by_key)
        metrics["num-examples"] = sum(reply.num_examples for reply in replies)
        metrics["replies-accepted"] = len(replies)
        metrics["replies-rejected"] = rejected.total()
        for reason, count in sorted(rejected.items()):
            metrics[f"rejected-{reason}"] = count
        return metrics


def _no_metrics(_: list[RecordDict], __: str) -> MetricRecord:
    return MetricRecord()


def weighted_mean(
    replies: Sequence[Mapping[str, NDArray[Any]]], weights: Sequence[int]
) -> dict[str, NDArray[Any]]:
    """Mean of each array over the replies: Flower's, operation by operation and so bit by bit.

    Flower's own would read each array from its bytes again.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    mean = {name: array * shares[0] for name, array in replies[0].items()}
    for arrays, share in zip(replies[1:], shares[1:], strict=True):
        for name in mean:
            mean[name] += arrays[name] * share
    return mean


def like(arrays: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return the arrays under the expected names, in that order, in the expected dtypes."""
    converted = {}
    for name, model in expected.items():
        array = np.asarray(arrays[name])
        if np.issubdtype(model.dtype, np.integer):
            array = np.rint(array)
        converted[name] = Array(np.asarray(array, dtype=model.dtype))
    return ArrayRecord(converted)
