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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any

import flwr.serverapp.strategy
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import BadReply, EnsemblePredictor
from fedntk.ntk.averages import change_size
from fedntk.ntk.first_weights import Initialisation, draw_weights
from fedntk.ntk.options import argument, option, part, parts_of, state
from fedntk.ntk.payloads.agreement import Agreement
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.ntk.payloads.screening import screen_sizes
from fedntk.ntk.robust_averages import DEFENCES

from ..core.averaging import Learned, differing, named_arrays
from ..core.channel import Ask, JointAsk, Rounds, together
from ..core.from_flower import FromFlower
from ..core.replies import accuracy_of, check_weights, read_arrays, screen_accuracies
from ..core.round import Round
from ..core.rounds import open_run
from ..core.screening import Screening
from ..core.strategy import Strategy, metrics_of, permitted_by
from ..core.uploads import Update, Uploads
from ..core.weight_average import WeightAverage
from .strata import Schedule, Strata, permutations

logger = getLogger("flwr")
Weights = Mapping[str, NDArray[Any]]


class FedEnsemble(Strategy):
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
    rules = (*DEFENCES, "validation")

    inner: Callable[[], flwr.serverapp.strategy.Strategy] = argument(
        "makes the strategy of one model, a new one at each call: one of Flower's with replies of "
        "weights (FedAvg, FedAdam, Krum, ...), or one of those here (NTKFL, TCT, SCAFFOLD, ...), "
        "which differ only in their seeds. Their sampling options are ignored, but for clients "
        "held out. max_examples and outlier_factor of the ensemble hold for Flower's; those here "
        "have their own. If a model has fewer than three replies of weights, the changes of all "
        "models are compared by the ensemble's outlier_factor",
        default=FedAvg,
    )
    num_models: int = option("K", default=5, at_least=1)
    num_strata: int = option(
        "Q, groups of clients; a round samples at least Q clients; 0: K", default=0, at_least=0
    )
    schedule: Schedule = option(
        "permutations of the models: independent: each stratum's by itself, as by Shi et al. 2021; "
        "balanced: in each round the models have as many strata, or one more",
        default="independent",
    )
    init: Initialisation | Callable[[int], nn.Module] = argument(
        "first weights of all K models. he or xavier: arrays of floating point with two axes or "
        "more are drawn, (outputs, inputs, ...) (He et al. 2015, eq. (10); Glorot and Bengio 2010, "
        "eq. (16)), biases are 0, and other arrays are those given to start. Or a function that "
        "makes the module of model k, for k = 0 ... K - 1, as buffers, frozen layers or "
        "transposed convolutions need. To begin with weights of your own, give start those of all "
        "K models, as EnsembleArrays",
        default="he",
    )
    average: WeightAverage | None = part(
        "average of all models over rounds, if their strategies can have one", default=None
    )
    members: tuple[Strategy, ...] = state(tuple, reset=False)
    strata: Strata = state(Strata, reset=False)

    def prepare(self) -> None:
        """Make the strategies of the models, and give them what the ensemble has."""
        self.strata = Strata(self.num_strata or self.num_models, self.sampling.seed)
        made = [self.inner() for _ in range(self.num_models)]
        if len({id(strategy) for strategy in made}) < self.num_models:
            raise ValueError("inner: expected a new strategy at each call, got the same one twice")
        if any(isinstance(strategy, FedEnsemble) for strategy in made):
            raise ValueError("inner: expected a strategy of one model, got a FedEnsemble")
        screening = Screening(outlier_factor=self.screening.outlier_factor)
        most = self.max_examples
        wrap = partial(FromFlower, name="inner", max_examples=most, screening=screening)
        self.members = tuple(s if isinstance(s, Strategy) else wrap(s) for s in made)
        first = self.members[0]
        rule = first.screening.rule
        if self.screening.rule not in ("none", rule):
            got = f"{rule}, got {self.screening.rule}"
            raise ValueError(f"screening.rule: expected that of inner, which follows it, {got}")
        if self.average is not None and "average" not in parts_of(type(first)):
            kind = type(first).__name__
            raise ValueError(f"average: expected None with models by {kind}, which have no mean")
        expected = _without_seed(first.settings())
        for k, member in enumerate(self.members):
            settings = _without_seed(member.settings())
            names = [n for n in {**expected, **settings} if expected.get(n) != settings.get(n)]
            if names:
                raise ValueError(
                    "inner: expected strategies that differ in nothing but their seeds, and model "
                    f"{k}'s differs in {', '.join(names)}"
                )
            member.require_nested("FedEnsemble", everyone=self.num_models == 1)
            for key in ("weighted_by_key", "arrayrecord_key", "configrecord_key"):
                setattr(member, key, getattr(self, key))
        if self.channel.seeds is None:
            self.channel.seeds = first.channel.seeds
        self.sampling.held_out = tuple(sorted({*self.sampling.held_out, *first.sampling.held_out}))

    def further_settings(self) -> dict[str, Any]:
        """Return the first weights, and the inner strategy's settings."""
        init = self.init if isinstance(self.init, str) else "a function"
        return {"init": init, "inner": self.members[0].settings()}

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
        pairs = self._with_models(named_arrays(arrays))
        return EnsemblePredictor(member.predictor(model, network) for member, model in pairs)

    def _with_models(self, arrays: Mapping[str, Any]) -> Iterator[tuple[Strategy, Any]]:
        return zip(self.members, EnsembleArrays.from_arrays(arrays).models, strict=True)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Draw the first weights of the models, unless all are given."""
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
        pairs = zip(self.members, models, strict=True)
        begun = [dict(open_run(m, ArrayRecord(model), num_rounds, done)) for m, model in pairs]
        return ArrayRecord(EnsembleArrays(tuple(begun)).to_arrays())

    def _draw(self, network: ArrayRecord, k: int) -> dict[str, Array]:
        """Return the first weights of model k, for a network."""
        if not isinstance(self.init, str):
            made = dict(ArrayRecord(self.init(k).state_dict()))
            if names := differing(made, network):
                raise ValueError(
                    f"init: model {k} has other names or shapes than initial_arrays: {names[:5]}"
                )
            return made
        generator = np.random.default_rng([self.sampling.seed, k, *b"weights"])
        drawn = draw_weights(named_arrays(network), self.init, generator, zero_biases=True)
        return {name: Array(array) for name, array in drawn.items()}

    # --------------------------------------------------------------------- training

    def train_round(self, r: Round) -> Rounds[Update]:
        """Have each model's strategy do its round with the sampled clients of its strata."""
        model_of, wanted = self._assign(r)
        states = [m.state_dict() for m in self.members] if self.min_completed != 1 else []
        old, rounds = EnsembleArrays.from_arrays(r.arrays).models, dict[int, Rounds[Update]]()
        for k, (member, model) in enumerate(zip(self.members, old, strict=True)):
            if nodes := [node for node, chosen in model_of.items() if chosen == k]:
                rounds[k] = member.train_round(r.within(member, ArrayRecord(model), nodes))
        models = [named_arrays(ArrayRecord(old[k])) for k in rounds]
        updates, rejected = yield from together(
            list(rounds.values()),
            wanted=wanted,
            screen=lambda joint, replies: self._screen(joint, replies, models),
        )
        results = list(zip(rounds, updates, strict=True))
        record = self._merge_metrics([(self.members[k], update) for k, update in results], rejected)
        new = {k: dict(update.arrays) for k, update in results if update.arrays is not None}
        false = sum(
            self.members[k].screening.bears(update.uploads)
            for k, update in results
            if update.uploads is not None
        )
        accepted = int(record["replies-accepted"])  # type: ignore[arg-type]
        if not self.enough(accepted + false, sampled=r.sampled):
            new = {}
            for member, before in zip(self.members, states, strict=False):
                member.load_state_dict(before)
        record["models-updated"] = len(new)
        if not new:
            return Update(None, None, record=record)
        updated = tuple(new.get(k, model) for k, model in enumerate(old))
        return Update(None, ArrayRecord(EnsembleArrays(updated).to_arrays()), record=record)

    def _assign(self, r: Round) -> tuple[dict[int, int], int | None]:
        """Return node -> model of a sample of the clients, and how many replies are wanted.

        ValueError in the first round if a model cannot visit all strata.
        """
        candidates = self.sampling.candidates(r, r.population, sent_alike=self.strata.count == 1)
        r.sampled = candidates.num_clients
        node_of = dict(candidates.pairs)
        for what, count, cure in (
            ("clients", len(node_of), "wait for more with min_available_nodes"),
            ("clients sampled a round", candidates.size, "sample more with min_train_nodes"),
        ):
            if count < self.strata.count:
                message = f"{count} {what} for num_strata = {self.strata.count}"
                if r.number == 1:
                    raise ValueError(f"{message}: expected at least one each; {cure}, or lower it")
                logger.warning("%s: some strata are left out", message)
        age, step = divmod(r.number - 1, self.num_models)
        self.strata.update(node_of, r.number, new_age=step == 0)
        seed = self.sampling.seed
        order = permutations(self.strata.count, self.num_models, self.schedule, seed, age)
        generator = np.random.default_rng([seed, r.number, *r.stage.encode()])
        chosen = self.strata.sample(candidates.size, generator)
        model_of = {node_of[c]: int(order[self.strata.of[c], step]) for c in chosen}
        return model_of, candidates.wanted

    def _screen(
        self, joint: JointAsk, replies: Sequence[Sequence[Message]], models: Sequence[Weights]
    ) -> list[list[BadReply | None]]:
        """Compare the changes of weights over all models: one may have too few replies by itself.

        Clients' changes are of one order of size. Each model's strategy refuses what is unreadable.
        """
        verdicts: list[list[BadReply | None]] = [[None] * len(of_model) for of_model in replies]
        if not joint.asks[0].of_weights:
            return verdicts
        sizes = dict[tuple[int, int], float]()
        for k, of_model in enumerate(replies):
            for i, reply in enumerate(of_model):
                if reply.has_content() and len(reply.content.array_records) == 1:
                    (record,) = reply.content.array_records.values()
                    with suppress(BadReply):
                        weights = check_weights(read_arrays(record), models[k])
                        sizes[k, i] = change_size(models[k], weights)
        judged = screen_sizes(list(sizes.values()), self.screening.outlier_factor)
        for (k, i), bad in zip(sizes, judged, strict=True):
            verdicts[k][i] = bad
        return verdicts

    def _merge_metrics(
        self, updates: Sequence[tuple[Strategy, Update]], rejected: Mapping[str, int]
    ) -> MetricRecord:
        """Aggregate the clients' metrics over all models, and combine the strategies' own."""
        reported = [
            content
            for member, update in updates
            if update.uploads is not None
            for content in update.uploads.metric_records(self.weighted_by_key, permitted_by(member))
        ]
        of_clients = {name for content in reported for name in content["metrics"]}
        early: dict[str, Any] = {f"rejected-{reason}": count for reason, count in rejected.items()}
        early |= {"num-examples": 0, "replies-accepted": 0}
        early["replies-rejected"] = sum(rejected.values())
        records: list[Mapping[str, Any]] = [early]
        records += [record for m, u in updates if (record := metrics_of(m, u)) is not None]
        rules: dict[str, Any] = dict.fromkeys(("num-examples", "replies-", "rejected-"), sum)
        rules |= self.members[0].combined_by
        means, combined = dict[str, Any](), dict[str, Any]()
        for name in {name: None for record in records for name in record}:
            with_name = [m for m in records if isinstance(m.get(name), int | float)]
            values, examples = ([m[key] for m in with_name] for key in (name, "num-examples"))
            group = next((k for k in rules if k[-1] == "-" and name.startswith(k)), name)
            if group in rules and values:
                combined[name] = rules[group](values)
            elif name not in of_clients and any(examples):
                means[name] = float(np.average(values, weights=examples))
        if reported:
            means |= self.train_metrics_aggr_fn(reported, self.weighted_by_key)
        return MetricRecord({**means, **combined})

    # ------------------------------------------------------------------- evaluation

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate all models together."""
        sample = r.sample()
        asks = [
            _first_ask(member, r.within(member, ArrayRecord(model), sample.nodes, speaker=self))
            for member, model in self._with_models(r.arrays)
        ]
        key = self.configrecord_key

        def contents(client: int, config: ConfigRecord) -> RecordDict:
            messages = [ask.content(client) for ask in asks]
            configs = [message.config_records[key] for message in messages]
            differing_keys = tuple(
                {n: v for n, v in one.items() if config.get(n) != v} for one in configs
            )
            records = tuple(dict(message.array_records) for message in messages)
            merged = ConfigRecord({**config, **EnsembleArrays(differing_keys).to_arrays()})
            return RecordDict({**EnsembleArrays(records).to_arrays(), key: merged})

        uploads = yield from r.ask(
            accuracy_of, clients=sample, contents=contents, sent=_AllSent(asks), resends=False
        )
        uploads = self.screening.drop(uploads, screen_accuracies)
        if not uploads:
            logger.warning(
                "no client could evaluate the ensemble (%s); each has to be wrapped in "
                "FedEnsembleClient, or set fraction_evaluate=0.0",
                r.channel.last_refusal,
            )
        return uploads


class _AllSent:
    """What clients keep of the messages of several strategies."""

    def __init__(self, asks: Sequence[Ask[Any]]) -> None:
        self._asks = asks

    def doubt(self, client: int) -> None:
        """Note that a client failed, for all models."""
        for ask in self._asks:
            if ask.sent is not None:
                ask.sent.doubt(client)

    forget = doubt


def _first_ask(strategy: Strategy, r: Round) -> Ask[Any]:
    """Return the first exchange of a strategy's evaluation, to be made by another."""
    rounds = strategy.evaluate_round(r)
    ask = next(rounds)
    rounds.close()
    if not isinstance(ask, Ask):
        raise TypeError(f"{type(strategy).__name__}: expected one exchange of evaluation")
    return ask


def _without_seed(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "sampling": {**settings["sampling"], "seed": 0}}
