"""Server of Fed-ensemble: K models; each client trains one of them a round.

Source: Shi et al., *Fed-ensemble: Improving Generalization through Model Ensembling in Federated
Learning*, 2021, section 3.1, algorithm 1 and remarks 3.1 and 3.2:

    divide the clients into Q strata
    for t = 1 ... T                                   training ages of K rounds each
        P[q] = a random permutation of the K models   for each stratum q
        for r = 1 ... K
            clients of stratum q train model P[q, r]
            each model is updated only from the replies of its clients
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

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
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import BadReply, EnsemblePredictor
from fedntk.ntk.first_weights import Initialisation, draw_weights
from fedntk.ntk.options import argument, option, state
from fedntk.ntk.payloads.agreement import Agreement
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.ntk.payloads.screening import change_size, screen_sizes
from fedntk.ntk.robust_averages import DEFENCES

from ..core.averaging import Learned, differing, named_arrays
from ..core.base import BaseStrategy
from ..core.exchange import Aggregated, logger
from ..core.inner import CheckedStrategy, GridSubset
from ..core.registry import Exchange
from ..core.replies import Aggregate, check_weights, read_arrays
from .strata import Schedule, Strata, permutations


class FedEnsemble(BaseStrategy):
    """Fed-ensemble: K models by any strategy; the mean of their predictions is the ensemble's.

    Each client gets one model a round, so it receives, computes and sends what it would in a run of
    the inner strategy. A model without a client, or without a valid reply, stays as it was.

    Clients are those of the inner strategy. To have them evaluate the ensemble, which all models
    are sent to them for, wrap them in :class:`~fedntk.clients.FedEnsembleClient`; or set
    ``fraction_evaluate=0.0``.

    What is learned travels, and is returned, as
    :class:`~fedntk.ntk.payloads.ensemble_arrays.EnsembleArrays`:
    ``EnsembleArrays.from_arrays(result.arrays).models`` are the K models' own arrays.
    ``members`` are the strategies of the models, ``strata`` says which client is in which stratum.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = FedEnsemble(inner=FedAdam, num_models=3, min_train_nodes=6)
    >>> len(strategy.members)
    3
    """

    client = "FedEnsembleClient"
    defences = (*DEFENCES, "validation")

    inner: Callable[[], Strategy] = argument(
        "makes the strategy of one model, a new one at each call: one of Flower's with replies of "
        "weights (FedAvg, FedAdam, Krum, ...), or one of those here (NTKFL, TCT, SCAFFOLD, ...); "
        "they must differ only in their seeds. Their sampling options are ignored; clients that "
        "they hold out are held out of the ensemble. max_examples and outlier_factor of the "
        "ensemble hold for Flower's; those here have their own. If a model has fewer than three "
        "replies of weights, the changes of all models are compared by the ensemble's "
        "outlier_factor",
        default=FedAvg,
    )
    num_models: int = option("K", default=5, at_least=1)
    num_strata: int = option(
        "Q, number of groups of clients; at least Q clients are sampled in a round; 0: as many "
        "as models",
        default=0,
        at_least=0,
    )
    schedule: Schedule = option(
        "permutations of the models: independent: each stratum's by itself, as by Shi et al. 2021; "
        "balanced: in each round the models have as many strata, or one more",
        default="independent",
    )
    init: Initialisation | Callable[[int], nn.Module] = argument(
        "first weights of all K models. he or xavier: all arrays of floating point with two axes "
        "or more are drawn, (outputs, inputs, ...) (He et al. 2015, eq. (10); Glorot and Bengio "
        "2010, eq. (16)), biases are 0, and other arrays, such as BatchNorm's, are those given to "
        "start. Or a function that makes the module of model k, for k = 0 ... K - 1: for "
        "networks with other matrices, such as buffers, frozen layers or transposed convolutions. "
        "To begin with weights of your own, give start those of all K models, as EnsembleArrays",
        default="he",
    )
    members: tuple[BaseStrategy, ...] = state(tuple, reset=False)
    strata: Strata = state(Strata, reset=False)
    _model_of: dict[int, int] = state(dict, saved=False)  # node -> model that it trains now
    _reported: list[RecordDict] = state(list, saved=False)  # clients' metrics of a round

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strata = Strata(self.num_strata or self.num_models, self.seed)
        made = [self.inner() for _ in range(self.num_models)]
        if len({id(strategy) for strategy in made}) < self.num_models:
            raise ValueError("inner: expected a new strategy at each call, got the same one twice")
        if any(isinstance(strategy, FedEnsemble) for strategy in made):
            raise ValueError("inner: expected a strategy of one model, got a FedEnsemble")
        limits: Any = {"max_examples": self.max_examples, "outlier_factor": self.outlier_factor}
        self.members = tuple(
            own if isinstance(own, BaseStrategy) else CheckedStrategy(own, name="inner", **limits)
            for own in made
        )
        if self.defence not in ("none", found := self.members[0].defence):
            raise ValueError(
                f"defence: expected that of inner, which follows it, {found}, got {self.defence}"
            )
        if self.averaged is not None and not self.members[0].averages:
            raise ValueError(
                f"average_decay: expected 0 with models by {type(self.members[0]).__name__}, whose "
                f"arrays have no mean over rounds, got {self.averaged.decay}"
            )
        self._share()

    def _share(self) -> None:
        """Give all members what the ensemble has, and the ensemble what they were made with."""
        first, *others = [{**member.settings(), "seed": 0} for member in self.members]
        for k, own in enumerate(others, 1):
            if odd := [name for name in {**first, **own} if first.get(name) != own.get(name)]:
                raise ValueError(
                    "inner: expected strategies that differ in nothing but their seeds, and model "
                    f"{k}'s differs in {', '.join(odd)}"
                )
        if self._seeds is None:
            self._seeds = self.members[0]._seeds
        self.held_out = tuple(sorted({*self.held_out, *self.members[0].held_out}))
        for member in self.members:
            member.work_within(self, everyone=self.num_models == 1)
            member.train_metrics_aggr_fn = partial(self._collect, member.train_metrics_aggr_fn)

    def _collect(self, aggregate: Aggregate, contents: list[RecordDict], key: str) -> MetricRecord:
        """Keep the metrics of a member's clients, and aggregate them as it does."""
        self._reported += contents
        return aggregate(contents, key)

    def settings(self) -> dict[str, Any]:
        """Add the first weights, and the inner strategy's settings."""
        init = self.init if isinstance(self.init, str) else "a function"
        return {**super().settings(), "init": init, "inner": self.members[0].settings()}

    @property
    def learned(self) -> str:
        """What each model's arrays hold, with commas between them."""
        return ",".join(member.learned for member in self.members)

    def agreement(self) -> Agreement:
        """Return what clients that evaluate the ensemble must agree with."""
        inner = self.members[0].agreement()
        return replace(inner, strategy="FedEnsemble", client=self.client)

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the network's own arrays: model 0's, of several models."""
        if EnsembleArrays.are_in(arrays):
            first = EnsembleArrays.from_arrays(arrays).models[0]
            return self.members[0].network_of(ArrayRecord(first))
        return arrays

    def predictor(self, arrays: Learned, network: nn.Module | None = None) -> EnsemblePredictor:
        """Make the predictor of the mean of the models' predictions."""
        network = self.network if network is None else network
        each = self._with_models(named_arrays(arrays))
        return EnsemblePredictor(member.predictor(model, network) for member, model in each)

    def _with_models(self, arrays: Mapping[str, Any]) -> Iterator[tuple[BaseStrategy, Any]]:
        return zip(self.members, EnsembleArrays.from_arrays(arrays).models, strict=True)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Draw the first weights of the models, unless all are given."""
        initial_arrays = super().begin(initial_arrays, num_rounds, done)
        if not done:
            self.strata.of = {}
        if EnsembleArrays.are_in(initial_arrays):
            models = EnsembleArrays.from_arrays(initial_arrays).models
        else:
            models = tuple(self._draw(initial_arrays, k) for k in range(self.num_models))
        if len(models) != self.num_models:
            raise ValueError(
                f"initial_arrays: expected one model or {self.num_models}, got {len(models)}"
            )
        begun = tuple(
            dict(member.begin(ArrayRecord(model), num_rounds, done))
            for member, model in zip(self.members, models, strict=True)
        )
        return ArrayRecord(EnsembleArrays(begun).to_arrays())

    def _draw(self, given: ArrayRecord, k: int) -> dict[str, Array]:
        """Return the first weights of model k, for the given network."""
        if not isinstance(self.init, str):
            made = dict(ArrayRecord(self.init(k).state_dict()))
            if odd := differing(made, given):
                raise ValueError(
                    f"init: the module of model {k} has other names or shapes than initial_arrays: "
                    f"{odd[:5]}"
                )
            return made
        generator = np.random.default_rng([self.seed, k, *b"weights"])
        drawn = draw_weights(named_arrays(given), self.init, generator, zero_biases=True)
        return {name: Array(array) for name, array in drawn.items()}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have each model's strategy instruct the sampled clients of its strata."""
        self.global_arrays, self.server_round = arrays, server_round
        if self.fraction_train == 0.0:
            return []
        self._model_of = self._assign(grid, server_round)
        messages: list[Message] = []
        for k, (member, model) in enumerate(self._with_models(arrays)):
            if nodes := [node for node, own in self._model_of.items() if own == k]:
                shown: Any = GridSubset(grid, nodes)
                own = ConfigRecord(dict(config))
                messages += member.configure_train(server_round, ArrayRecord(model), own, shown)
        self._exchanges[MessageType.TRAIN] = Exchange(messages)
        return messages

    def _assign(self, grid: Grid, server_round: int) -> dict[int, int]:
        """Return node -> model of a sample of the clients, if a model can visit all strata."""
        candidates, size = self._candidates(
            grid,
            MessageType.TRAIN,
            self.fraction_train,
            self.fewest_sampled,
            self.held_out,
            sent_alike=self.strata.count == 1,
        )
        node_of = dict(candidates)
        for what, count, cure in (
            ("clients", len(node_of), "wait for more with min_available_nodes"),
            ("clients sampled a round", size, "sample more with min_train_nodes"),
        ):
            if count < self.strata.count:
                message = f"{count} {what} for num_strata = {self.strata.count}"
                if server_round == 1:
                    raise ValueError(f"{message}: expected at least one each; {cure}, or lower it")
                logger.warning("%s: some strata are left out", message)
        age, r = divmod(server_round - 1, self.num_models)
        self.strata.update(node_of, server_round, new_age=r == 0)
        order = permutations(self.strata.count, self.num_models, self.schedule, self.seed, age)
        generator = np.random.default_rng([self.seed, server_round, *MessageType.TRAIN.encode()])
        chosen = self.strata.sample(size, generator)
        return {node_of[client]: int(order[self.strata.of[client], r]) for client in chosen}

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what the inner strategy would send of each model, to evaluate them together."""
        records, configs = [], []
        for member, model in self._with_models(arrays):
            own = ConfigRecord({**config, **member.told_options})
            content = member.content_for(client, stage, ArrayRecord(model), own)
            records.append(dict(content.array_records))
            told = content.config_records[self.configrecord_key]
            configs.append({n: v for n, v in told.items() if config.get(n) != v})
        merged = ConfigRecord({**config, **EnsembleArrays(tuple(configs)).to_arrays()})
        every = EnsembleArrays(tuple(records)).to_arrays()
        return RecordDict({**every, self.configrecord_key: merged})

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Say what to do if no reply is accepted."""
        metrics = super().aggregate_evaluate(server_round, replies)
        if metrics is not None and not metrics["replies-accepted"]:
            logger.warning(
                "no client could evaluate the ensemble (%s); each has to be wrapped in "
                "FedEnsembleClient, or set fraction_evaluate=0.0",
                self.last_refusal,
            )
        return metrics

    def forget_sent(self, client: int) -> None:
        """Have a client sent all parts of all models again."""
        for member in self.members:
            member.forget_sent(client)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Have each model's strategy aggregate the replies of its clients."""
        sent = self._exchanges.get(MessageType.TRAIN, Exchange())
        of_model: dict[int, list[Message]] = {k: [] for k in sorted(set(self._model_of.values()))}
        rejected, came = Counter[str](), 0
        for reply in replies:
            if (node := sent.node_asked(reply)) is None:
                bad = BadReply("not-asked", "it answers no message of this round")
                self.drop(reply.metadata.src_node_id, bad, rejected)
            else:
                of_model[self._model_of[node]].append(reply)
                came += reply.has_content()
            if came == self._wanted:  # the models' strategies have yet to check these
                break
        self._drop_outliers(of_model, rejected)
        models = EnsembleArrays.from_arrays(self.global_arrays).models
        states = [m.state_dict() for m in self.members] if self.min_completed != 1 else []
        new: dict[int, dict[str, Array]] = {}
        reported: list[MetricRecord] = []
        self._reported = []
        for k, own in of_model.items():
            found, metrics = self.members[k].aggregate_train(server_round, own)
            if found is not None:
                new[k] = dict(found)
            reported += [metrics] if metrics else []
            self.last_refusal = self.members[k].last_refusal or self.last_refusal
            self.last_failure = self.members[k].last_failure or self.last_failure
        record = self._merge_metrics(reported, rejected)
        false = sum(self.members[k].num_false for k in of_model)
        if not self.enough(cast(int, record["replies-accepted"]) + false):
            new = {}
            for member, before in zip(self.members, states, strict=False):
                member.load_state_dict(before)
        record["models-updated"] = len(new)
        self.train_metrics[server_round] = record
        if not new:
            return None, record
        updated = tuple(new.get(k, old) for k, old in enumerate(models))
        return ArrayRecord(EnsembleArrays(updated).to_arrays()), record

    def _drop_outliers(self, of_model: dict[int, list[Message]], rejected: Counter[str]) -> None:
        """Compare the changes of weights over all models: one may have too few replies by itself.

        The models are trained alike, so their clients' changes are of one order of size. Each
        model's own strategy refuses what cannot be read.
        """
        if not self.members[0].takes_weights:
            return
        models = EnsembleArrays.from_arrays(named_arrays(self.global_arrays)).models
        sizes = [
            (k, reply, size)
            for k, replies in of_model.items()
            for reply in replies
            if (size := _change(reply, models[k])) is not None
        ]
        verdicts = screen_sizes([size for _, _, size in sizes], self.outlier_factor)
        for (k, reply, _), bad in zip(sizes, verdicts, strict=True):
            if bad is not None:
                of_model[k] = [other for other in of_model[k] if other is not reply]
                self.drop(reply.metadata.src_node_id, bad, rejected)

    def _merge_metrics(self, metrics: list[MetricRecord], rejected: Counter[str]) -> MetricRecord:
        """Aggregate the clients' metrics over all models, and combine the strategies' own."""
        early: dict[str, Any] = {f"rejected-{reason}": count for reason, count in rejected.items()}
        early |= {"num-examples": 0, "replies-accepted": 0, "replies-rejected": rejected.total()}
        of_clients = {name for content in self._reported for name in content["metrics"]}
        means: dict[str, Any] = {}
        combined: dict[str, Any] = {}
        rules: dict[str, Any] = dict.fromkeys(("num-examples", "replies-", "rejected-"), sum)
        rules |= self.members[0].combined_by
        for name in {name: None for own in (early, *metrics) for name in own}:
            reported = [own for own in (early, *metrics) if isinstance(own.get(name), int | float)]
            values: Any = [own[name] for own in reported]
            examples: Any = [own["num-examples"] for own in reported]
            name_or_group = next((k for k in rules if k[-1] == "-" and name.startswith(k)), name)
            rule = rules.get(name_or_group)
            if rule is not None and values:
                combined[name] = rule(values)
            elif name not in of_clients and any(examples):
                means[name] = float(np.average(values, weights=examples))
        if self._reported:
            means |= self.train_metrics_aggr_fn(self._reported, self.weighted_by_key)
        return MetricRecord({**means, **combined})


def _change(reply: Message, model: Mapping[str, NDArray[Any]]) -> float | None:
    """Return how far a reply's weights are from what was sent; None if they cannot be read."""
    if not reply.has_content() or len(reply.content.array_records) != 1:
        return None
    (record,) = reply.content.array_records.values()
    with suppress(BadReply):
        return change_size(model, check_weights(read_arrays(record), model))
    return None
