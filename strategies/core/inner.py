"""Rounds of another strategy within a strategy: with its nodes, and replies that are good."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedntk.ntk.averages import all_alike
from fedntk.ntk.options import argument, state
from fedntk.ntk.payloads.agreement import Agreement

from .array_archive import under
from .averaging import cast_like, named_arrays, record_of
from .base import BaseStrategy
from .exchange import Aggregated, logger
from .replies import Reply, kinds_of


class InnerStrategy:
    """A strategy that runs within its owner, which samples the nodes and checks the replies.

    Its replies are one set of weights, the network's; the owner's ``min_completed`` and
    ``max_examples`` count. `argument` is the name under which it was given, for errors.
    """

    def __init__(self, argument: str, strategy: Strategy, owner: BaseStrategy) -> None:
        if isinstance(strategy, BaseStrategy):
            if strategy.replies != BaseStrategy.replies:
                raise ValueError(
                    f"{argument}: expected a strategy whose replies are one set of weights, such "
                    f"as FedAvg, got {type(strategy).__name__}"
                )
            for name, none in (("average_decay", 0), ("secure_aggregation", False)):
                if (value := getattr(strategy, name)) != none:
                    raise ValueError(f"{argument}: expected {name} = {none}, got {value}")
        self.argument, self.strategy, self.owner = argument, strategy, owner
        self._fresh = dict(vars(strategy))

    def disable_sampling(self) -> None:
        """Have the strategy neither sample nor wait: another one does."""
        everyone = {"fraction_train": 1.0, "min_train_nodes": 0, "min_available_nodes": 0}
        for name in everyone.keys() & vars(self.strategy).keys():
            setattr(self.strategy, name, everyone[name])

    def reset(self) -> None:
        """Have the strategy forget what it has kept in attributes since it was given."""
        for name, fresh in self._fresh.items():
            if _holds_arrays(getattr(self.strategy, name)):
                setattr(self.strategy, name, fresh)

    @property
    def waits_for(self) -> int:
        """Nodes that it waits for before it begins a round; 0 if it does not say."""
        return int(getattr(self.strategy, "min_available_nodes", 0))

    def messages(
        self, network: ArrayRecord, config: ConfigRecord, grid: Grid, nodes: list[int]
    ) -> list[Message]:
        """Return the strategy's instructions to some or all of the nodes."""
        server_round = self.owner.server_round
        if len(nodes) < self.waits_for:
            raise ValueError(
                f"{self.argument}: it waits for min_available_nodes = {self.waits_for}, and "
                f"{len(nodes)} nodes are sampled in a round; lower that, or sample more"
            )
        shown: Any = GridSubset(grid, nodes)
        own = list(self.strategy.configure_train(server_round, network, config, shown))
        for message in own:  # clients are to agree with the owner
            for record in message.content.config_records.values():
                self.owner.prepare_config(record, server_round)
        asked = [message.metadata.dst_node_id for message in own]
        return self.owner.address(asked, [m.content for m in own], MessageType.TRAIN)

    def aggregate(
        self, replies: Iterable[Message], expected: Mapping[str, NDArray[Any]]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Return the new network, if there is one, and metrics; `expected` is what was sent."""
        pairs, metrics = self.owner.accept_weights(replies, expected)
        if not self.owner.enough(len(pairs)):
            return None, metrics
        names = {n for n, _ in frozenset.intersection(*(kinds_of(r.metrics) for r, _ in pairs))}
        clean = [self._clean(reply, names) for reply, _ in pairs]
        try:
            with np.errstate(invalid="ignore"):  # infinite numbers are put back
                found, own = self.strategy.aggregate_train(self.owner.server_round, clean)
        except Exception as error:  # another's code must not end the run
            name = type(self.strategy).__name__
            logger.warning("%s failed (%r): the model stays as it was", name, error)
            self.owner.last_failure = f"{name} failed: {error!r}"
            return None, metrics
        extra = {name: value for name, value in (own or {}).items() if name not in names}
        metrics = MetricRecord({**extra, **metrics})
        if found is None:
            return None, metrics
        new = {
            name: _put_back(array, expected[name], [own[name] for _, own in pairs])
            for name, array in named_arrays(found).items()
        }
        return cast_like(new, expected), metrics

    def _clean(self, reply: Reply, names: set[str]) -> Message:
        """Return a reply that holds its arrays, its number of examples and metrics all have."""
        (arrays,) = reply.message.content.array_records.values()
        values = {name: value for name, value in reply.metrics.items() if name in names}
        key = getattr(self.strategy, "weighted_by_key", self.owner.weighted_by_key)
        metrics = MetricRecord({**values, key: reply.num_examples})
        reply.message.content = RecordDict({self.owner.arrayrecord_key: arrays, "metrics": metrics})
        return reply.message

    def settings(self) -> dict[str, Any]:
        """Return the strategy's class and its options that are plain values."""
        if isinstance(self.strategy, BaseStrategy):
            return self.strategy.settings()
        plain = {
            name: value
            for name, value in sorted(vars(self.strategy).items())
            if isinstance(value, bool | int | float | str) and not name.startswith("_")
        }
        return {"strategy": type(self.strategy).__name__, **plain}

    def state_dict(self) -> dict[str, Any]:
        """Return its own ``state_dict()``, else attributes that hold arrays: moments."""
        if (saved := getattr(self.strategy, "state_dict", None)) is not None:
            state: dict[str, Any] = saved()
            return state
        kept: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        for name, value in vars(self.strategy).items():
            if _holds_arrays(value):
                kept[name] = type(value).__name__
                found: Any = dict(enumerate(value)) if isinstance(value, list) else value
                own = named_arrays(found)
                arrays |= {f"{name}.{key}": np.asarray(array) for key, array in own.items()}
        return {"kept": kept, **arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the strategy back what :meth:`state_dict` returned."""
        if (load := getattr(self.strategy, "load_state_dict", None)) is not None:
            load(state)
            return
        self.reset()
        for name, kind in state["kept"].items():
            arrays = under(f"{name}.", state)
            value: Any = arrays
            if kind == "list":
                value = [arrays[str(i)] for i in range(len(arrays))]
            elif kind == "ArrayRecord":
                value = record_of(arrays)
            setattr(self.strategy, name, value)


def _put_back(
    new: NDArray[Any], sent: NDArray[Any], replies: Sequence[NDArray[Any]]
) -> NDArray[Any]:
    """Return a new array without the rounding errors of Flower's means.

    An array that all clients return as it was sent stays as it was, whatever step the strategy
    takes. Numbers that all return alike are as they came, up to such a step.
    """
    if all_alike([sent, *replies]).all():
        return sent
    alike = all_alike(replies)
    if alike.any() and sent.dtype.kind == "f":
        rounding = (len(replies) + 2) * float(np.finfo(sent.dtype).eps)
        alike &= np.isclose(new, replies[0], rtol=rounding, atol=0)
    return np.where(alike, replies[0], new)


def _holds_arrays(value: Any) -> bool:
    """Whether it is a record, a list or a dict by name of arrays, and of nothing else."""
    if isinstance(value, ArrayRecord):
        return True
    items = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return bool(items) and all(isinstance(item, np.ndarray | np.generic) for item in items)


class CheckedStrategy(BaseStrategy):
    """One of Flower's strategies, with the sampling, the checks and the state of those here.

    Same seed, same bits; a bad reply is dropped, logged and counted; moments and momenta are saved.
    (Flower: Beutel et al., *Flower: A Friendly Federated Learning Research Framework*, 2020.)
    """

    strategy: Strategy = argument(
        "strategy whose replies are one set of weights; how it samples, and how many nodes it "
        "waits for, is set so that it asks all nodes that it is shown",
        kw_only=False,
    )
    name: str = argument("name under which the strategy was given, for errors", default="strategy")
    inner: InnerStrategy = state(lambda: None, reset=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(getattr(self.strategy, "strategy", None), Strategy):
            raise ValueError(
                f"{self.name}: expected a strategy that aggregates itself, got the wrapper "
                f"{type(self.strategy).__name__}, which samples by another one"
            )
        self.inner = InnerStrategy(self.name, self.strategy, self)
        self.inner.disable_sampling()

    def agreement(self) -> Agreement:
        """Return what clients must agree with: the strategy's name is that of Flower's."""
        return replace(super().agreement(), strategy=type(self.strategy).__name__)

    def settings(self) -> dict[str, Any]:
        """Add the strategy's own."""
        return {**super().settings(), "inner": self.inner.settings()}

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Forget what the strategy kept of an earlier run, unless a state was loaded."""
        if not done:
            self.inner.reset()
        return super().begin(initial_arrays, num_rounds, done)

    def messages(
        self, nodes: Sequence[int], stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> list[Message]:
        """Have the strategy instruct the nodes that were sampled for training."""
        if stage != MessageType.TRAIN or self._grid is None:
            return super().messages(nodes, stage, arrays, config)
        return self.inner.messages(arrays, config, self._grid, list(nodes))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Have the strategy aggregate the replies that can be used."""
        found, metrics = self.inner.aggregate(replies, named_arrays(self.global_arrays))
        self.train_metrics[server_round] = metrics
        return found, metrics


class GridSubset:
    """A grid that shows a strategy only some of the nodes."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> list[int]:
        """Return the nodes that are seen."""
        return self._nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)
