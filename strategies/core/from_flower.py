"""Any of Flower's strategies as a round of one here: with its checks, its sampling, its state."""

from collections.abc import Mapping, Sequence
from typing import Any

import flwr.serverapp.strategy
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk.averages import all_alike
from fedntk.ntk.options import argument, state
from fedntk.ntk.payloads.agreement import Agreement
from fedntk.ntk.support.arrays import ArrayDict

from .array_archive import under
from .averaging import cast_like, named_arrays, record_of
from .channel import Rounds, logger
from .replies import Reply, kinds_of
from .round import Round
from .strategy import Strategy
from .uploads import Update, Upload, Uploads

EVERYONE = {"fraction_train": 1.0, "min_train_nodes": 0, "min_available_nodes": 0}


class Moments:
    """What another's strategy keeps in attributes that hold arrays, such as Adam's moments."""

    def __init__(self, strategy: flwr.serverapp.strategy.Strategy) -> None:
        self._strategy: Any = strategy
        self._fresh = dict(vars(strategy))

    def reset(self) -> None:
        """Have the strategy forget what it has kept since it was given."""
        for name, fresh in self._fresh.items():
            if _holds_arrays(getattr(self._strategy, name)):
                setattr(self._strategy, name, fresh)

    def state_dict(self) -> dict[str, Any]:
        """Return its own ``state_dict()``, else attributes that hold arrays."""
        if (saved := getattr(self._strategy, "state_dict", None)) is not None:
            state: dict[str, Any] = saved()
            return state
        state = {"kept": {}}
        for name, value in vars(self._strategy).items():
            if _holds_arrays(value):
                state["kept"][name] = type(value).__name__
                by_key: Any = dict(enumerate(value)) if isinstance(value, list) else value
                for key, array in named_arrays(by_key).items():
                    state[f"{name}.{key}"] = np.asarray(array)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the strategy back what :meth:`state_dict` returned."""
        if (load := getattr(self._strategy, "load_state_dict", None)) is not None:
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
            setattr(self._strategy, name, value)


class FromFlower(Strategy):
    """One of Flower's strategies, with the sampling, the checks and the state of those here.

    Same seed, same bits; a bad reply is dropped, logged and counted; moments and momenta are saved.
    (Flower: Beutel et al., *Flower: A Friendly Federated Learning Research Framework*, 2020.)
    """

    strategy: flwr.serverapp.strategy.Strategy = argument(
        "strategy whose replies are one set of weights; unless it `chooses`, how it samples, and "
        "how many nodes it waits for, is set so that it asks all nodes that it is shown",
        kw_only=False,
    )
    chooses: bool = argument(
        "whether it chooses among the round's clients, by its own fraction of them", default=False
    )
    name: str = argument("name under which the strategy was given, for errors", default="strategy")
    moments: Moments = state(lambda: None, reset=False)

    def prepare(self) -> None:
        """Have the strategy neither sample nor wait: this one does."""
        if isinstance(self.strategy, Strategy):
            raise ValueError(
                f"{self.name}: expected another one's, got {type(self.strategy).__name__}, which "
                "needs nothing around it"
            )
        if isinstance(getattr(self.strategy, "strategy", None), flwr.serverapp.strategy.Strategy):
            raise ValueError(
                f"{self.name}: expected a strategy that aggregates itself, got the wrapper "
                f"{type(self.strategy).__name__}, which samples by another one"
            )
        self.moments = Moments(self.strategy)
        if not self.chooses:
            ask_everyone(self.strategy)

    def agreement(self) -> Agreement:
        """Return what clients must agree with, under the name of Flower's strategy."""
        name = type(self.strategy).__name__
        return Agreement(strategy=name, client=self.client, replies=self.replies, loss="")

    def further_settings(self) -> dict[str, Any]:
        """Return the class of Flower's strategy, and its options that are plain values."""
        plain = {
            name: value
            for name, value in sorted(vars(self.strategy).items())
            if isinstance(value, bool | int | float | str) and not name.startswith("_")
        }
        return {"inner": {"strategy": type(self.strategy).__name__, **plain}}

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Forget what the strategy kept of an earlier run, unless a state was loaded."""
        if not done:
            self.moments.reset()
        return initial_arrays

    def train_round(self, r: Round) -> Rounds[Update]:
        """Have the strategy instruct the round's clients, and aggregate their replies."""
        sample, name = r.sample(), type(self.strategy).__name__
        asked, contents = self._instructions(r, sample.nodes)

        def parse(reply: Reply) -> tuple[ArrayDict, Message]:
            return r.weights(reply), reply.message

        both = yield from r.ask(
            parse,
            clients=sample._replace(nodes=tuple(asked)),
            contents=lambda client, config: _told(contents[client], config, without=r.config),
        )
        weights: Uploads[ArrayDict] = both.with_values(value for value, _ in both.values)
        weights = self.screening.drop_outliers(weights, r.model)
        if not self.enough(weights):
            return Update(weights)
        both = both.keep(weights.nodes)
        shared = {n for n, _ in frozenset.intersection(*(kinds_of(u.metrics) for u in both))}
        replies = [self._clean(upload, shared, r) for upload in both]
        try:
            with np.errstate(invalid="ignore"):  # infinite numbers are put back
                arrays, metrics = self.strategy.aggregate_train(r.number, replies)
        except Exception as error:  # another's code must not end the run
            logger.warning("%s failed (%r): the model stays as it was", name, error)
            r.channel.last_failure = f"{name} failed: {error!r}"
            return Update(weights)
        extra = {name: value for name, value in (metrics or {}).items() if name not in shared}
        if arrays is None:
            return Update(weights, None, extra)
        new = {
            name: _put_back(array, r.model[name], [value[name] for value in weights.values])
            for name, array in named_arrays(arrays).items()
        }
        return Update(weights, cast_like(new, r.model), extra)

    def _instructions(
        self, r: Round, nodes: Sequence[int]
    ) -> tuple[list[int], dict[int, RecordDict]]:
        """Return whom the strategy asks among the nodes, and by client what."""
        waits_for = int(getattr(self.strategy, "min_available_nodes", 0))
        if len(nodes) < waits_for:
            raise ValueError(
                f"{self.name}: it waits for min_available_nodes = {waits_for}, and {len(nodes)} "
                "nodes are sampled in a round; lower that, or sample more"
            )
        shown: Any = GridSubset(r.channel.grid, list(nodes))
        config = ConfigRecord(dict(r.config))
        messages = list(self.strategy.configure_train(r.number, r.arrays, config, shown))
        asked = [message.metadata.dst_node_id for message in messages]
        clients = map(r.registry.client, asked)
        return asked, dict(zip(clients, (m.content for m in messages), strict=True))

    def _clean(
        self, upload: Upload[tuple[ArrayDict, Message]], names: set[str], r: Round
    ) -> Message:
        """Return a reply that holds its arrays, its number of examples and metrics all have."""
        message = upload.value[1]
        (arrays,) = message.content.array_records.values()
        metrics = {name: value for name, value in upload.metrics.items() if name in names}
        key = getattr(self.strategy, "weighted_by_key", r.owner.weighted_by_key)
        record = MetricRecord({**metrics, key: upload.num_examples})
        message.content = RecordDict({r.owner.arrayrecord_key: arrays, "metrics": record})
        return message


def _told(
    content: RecordDict, config: Mapping[str, Any], *, without: Mapping[str, Any]
) -> RecordDict:
    """Add what clients must agree with to a strategy's instructions; user's keys stay its own."""
    told = {name: value for name, value in config.items() if name not in without}
    for record in content.config_records.values():
        record.update(told)
    return content


def _put_back(
    new: NDArray[Any], sent: NDArray[Any], replies: Sequence[NDArray[Any]]
) -> NDArray[Any]:
    """Return a new array without the rounding errors of Flower's means of numbers all alike.

    An array that all clients return as it was sent stays as it was, whatever step was taken.
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


def ask_everyone(strategy: flwr.serverapp.strategy.Strategy) -> None:
    """Have a strategy neither sample nor wait: another one does."""
    for name in EVERYONE.keys() & vars(strategy).keys():
        setattr(strategy, name, EVERYONE[name])


class GridSubset:
    """A grid that shows a strategy only some of the nodes."""

    def __init__(self, grid: Grid | None, nodes: list[int]) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> list[int]:
        """Return the nodes that are seen."""
        return self._nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)
