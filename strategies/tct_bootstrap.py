"""Rounds of another strategy within a strategy: with its nodes, and replies that are good.

Source: stage 1 of Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural
Tangent Kernels*, NeurIPS 2022, section 4.3, for any strategy of Flower's.
"""

from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedntk.ntk.payloads import screen_changes

from .averaging import cast_like
from .base import BaseStrategy, logger
from .fedavg import SeededFedAvg
from .replies import Reply, checked_weights

__all__ = ["Bootstrap"]


class Bootstrap:
    """A strategy at work within another, which samples the nodes and checks the replies.

    Parameters
    ----------
    strategy : Strategy
        Whose replies are one set of weights, the network's.
    owner : BaseStrategy
        Samples the nodes and checks the replies: its ``min_completed`` and ``max_examples`` are
        what counts.

    Raises
    ------
    ValueError
        If the strategy is one of those here whose replies are something else.
    """

    def __init__(self, strategy: Strategy, owner: BaseStrategy) -> None:
        if isinstance(strategy, BaseStrategy) and not isinstance(strategy, SeededFedAvg):
            raise ValueError(
                "bootstrap: expected a strategy whose replies are one set of weights, such as "
                f"FedAvg, got {type(strategy).__name__}"
            )
        self.strategy, self.owner = strategy, owner

    @property
    def waits_for(self) -> int:
        """Nodes that it waits for before it begins a round; 0 if it does not say."""
        return int(getattr(self.strategy, "min_available_nodes", 0))

    def messages(
        self,
        server_round: int,
        network: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        nodes: list[int],
    ) -> list[Message]:
        """Return the strategy's instructions to some or all of the nodes.

        Raises
        ------
        ValueError
            If it would wait for more nodes than it is shown.
        """
        if len(nodes) < self.waits_for:
            raise ValueError(
                f"bootstrap: it waits for min_available_nodes = {self.waits_for}, and {len(nodes)} "
                "nodes are sampled in a round; lower that, or sample more"
            )
        shown: Any = _Shown(grid, nodes)
        own = list(self.strategy.configure_train(server_round, network, config, shown))
        for message in own:  # clients are to agree with the owner
            for record in message.content.config_records.values():
                self.owner.prepare_config(record, server_round)
        asked = [message.metadata.dst_node_id for message in own]
        return self.owner.addressed(asked, [m.content for m in own], MessageType.TRAIN)

    def aggregate(
        self,
        server_round: int,
        replies: Iterable[Message],
        expected: Mapping[str, NDArray[Any]],
    ) -> tuple[dict[str, NDArray[Any]] | None, MetricRecord]:
        """Return the new network, if there is one, and the round's metrics.

        Parameters
        ----------
        server_round : int
            Now.
        replies : iterable of Message
            In any order.
        expected : mapping of str to ndarray
            The network as it was sent.
        """
        pairs, rejected = self.owner.accepted(
            replies, lambda reply: checked_weights(reply.arrays(), expected), MessageType.TRAIN
        )
        pairs = self.owner.screened(
            pairs, rejected, lambda own, most: screen_changes(expected, own, most)
        )
        metrics = self.owner.round_metrics([reply for reply, _ in pairs], rejected)
        if not self.owner.enough(len(pairs)):
            return None, metrics
        names = {n for n, _ in frozenset.intersection(*(r.metric_names for r, _ in pairs))}
        clean = [self._cleaned(reply, names) for reply, _ in pairs]
        try:
            found, own = self.strategy.aggregate_train(server_round, clean)
        except Exception as error:  # another's code must not end the run
            name = type(self.strategy).__name__
            logger.log(WARNING, "%s failed (%r): the model stays as it was", name, error)
            return None, metrics
        extra = {name: value for name, value in (own or {}).items() if name not in names}
        metrics = MetricRecord({**extra, **metrics})
        if found is None:
            return None, metrics
        arrays = cast_like({name: array.numpy() for name, array in found.items()}, expected)
        return {name: array.numpy() for name, array in arrays.items()}, metrics

    def _cleaned(self, reply: Reply, names: set[str]) -> Message:
        """Return a reply that holds its arrays, its number of examples and metrics all have."""
        (arrays,) = reply.message.content.array_records.values()
        values = {name: value for name, value in reply.metrics.items() if name in names}
        key = getattr(self.strategy, "weighted_by_key", self.owner.weighted_by_key)
        metrics = MetricRecord({**values, key: reply.num_examples})
        reply.message.content = RecordDict({self.owner.arrayrecord_key: arrays, "metrics": metrics})
        return reply.message

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy's own state; empty if it has none to give."""
        own: dict[str, Any] = getattr(self.strategy, "state_dict", dict)()
        return own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the strategy its state back; one that keeps none goes on from the weights alone."""
        load = getattr(self.strategy, "load_state_dict", None)
        if load is not None:
            load(state)
        elif vars(self.strategy).get("m_t") is not None or hasattr(self.strategy, "beta_1"):
            name = type(self.strategy).__name__
            logger.log(WARNING, "%s goes on without its moments, which it cannot save", name)


class _Shown:
    """A grid of which a strategy sees only some nodes."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> list[int]:
        return self._nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)
