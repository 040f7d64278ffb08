"""What the decentralised methods share: the graph of the clients, and how good their models are."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from fedntk.ntk.support.arrays import Arrays
from fedntk.ntk.support.files import whole
from fedntk.strategies import RelayStrategy, Strategy, Topology
from fedntk.strategies.core.averaging import cast_like, named_arrays
from fedntk.strategies.gossip.topology import TopologyKind

from ..config.config import BaseConfig
from ..config.settings import ConfigError, Settings, setting
from ..errors import naming
from ..simulated_trust import projected
from .method import Method, Setup

if TYPE_CHECKING:  # slow to import
    import networkx as nx
    import pandas as pd

_GRAPH = Topology.options()


class GraphSettings(Settings, frozen=True, eq=True):
    """Settings of methods whose clients have neighbours."""

    topology: TopologyKind = _GRAPH["kind"].field()
    graph: str = setting(
        "", "with topology = own: a file with its edges, two partitions on each line"
    )
    degree: int = _GRAPH["degree"].field()
    dynamic: bool = _GRAPH["dynamic"].field()
    both_accuracies: bool = setting(
        True,
        "clients' models are judged both after they averaged and after they trained, in rounds "
        "that evaluate; they then send two",
    )
    selection_points: int = setting(
        20,
        "numbers of clients at which the mean of a selection of the last models is judged, best to "
        "worst, at random and worst to best; 0: none",
        at_least=0,
    )

    def check(self) -> None:
        """Take the same file of the graph in every process."""
        if self.graph:
            object.__setattr__(self, "graph", str(Path(self.graph).expanduser().absolute()))

    def graphs(self, config: BaseConfig) -> Topology:
        """Return the graphs of a run."""
        return Topology(
            self.topology,
            degree=self.degree,
            dynamic=self.dynamic,
            seed=config.seed,
            graph=self._read_graph(config.num_clients) if self.graph else None,
        )

    def _read_graph(self, num_clients: int) -> "nx.Graph":
        import networkx as nx

        named = f"{self.key('graph')} = {self.graph}: expected edges"
        with naming(f"{named}, two partitions on each line", OSError, TypeError, ValueError):
            graph = nx.read_edgelist(self.graph, nodetype=int, data=False)
        unknown = sorted(client for client in graph if not 0 <= client < num_clients)
        if unknown or not graph:
            raise ConfigError(
                f"{named} between the partitions 0 ... {num_clients - 1}, got "
                f"{unknown[:5] or 'none'}"
            )
        return graph


class DecentralisedMethod(Method):
    """A method whose clients have neighbours, and weights of their own."""

    own_settings = GraphSettings
    metrics: ClassVar[tuple[str, ...]] = (
        "inter-client-deviation", "models-collected", "neighbours-heard", "parcels-rejected",
        "restarted", "spectral-gap",
    )  # fmt: skip

    def check(self, config: BaseConfig, settings: Any) -> None:
        """Refuse more neighbours than there are others in a round."""
        super().check(config, settings)
        taking_part = config.clients_a_round
        if settings.topology in ("regular", "clustered") and settings.degree >= taking_part:
            raise ConfigError(
                f"{settings.key('degree')}: expected less than clients-per-round = {taking_part}, "
                f"got {settings.degree}"
            )

    def arguments(self, config: BaseConfig, settings: Any) -> dict[str, Any]:
        """Return the graphs, and whether clients send two models."""
        return {"topology": settings.graphs(config), "collect_both": settings.both_accuracies}

    def measure(self, setup: Setup, strategy: Strategy) -> Mapping[str, float]:
        """Return how good the clients' models are, by accuracy or R^2, on the server's examples."""
        measured: dict[str, float] = {}
        models_at = cast(RelayStrategy, strategy).models_at
        if not any(models_at.values()):
            return measured
        x, y = setup.evaluation_set()
        x = projected(setup.config, x)
        for point, models in sorted(models_at.items()):
            if values := [self._accuracy(setup, model, x, y) for model in models.values()]:
                quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
                statistics = dict(zip(("min", "q1", "median", "q3", "max"), quantiles, strict=True))
                statistics |= {"mean": np.mean(values), "std": np.std(values)}
                statistics |= {f"decile-{d}": np.percentile(values, d) for d in range(0, 101, 10)}
                metric = "accuracy" if setup.data.inputs.targets is None else "r2"
                measured |= {f"{point}-{metric}-{name}": float(v) for name, v in statistics.items()}
        return measured

    def after_run(self, setup: Setup, strategy: Strategy, folder: Path) -> None:
        """Write ``selection.parquet``: the accuracy of means of some of the last models."""
        relay, points = (
            cast(RelayStrategy, strategy),
            self.settings_in(setup.config).selection_points,
        )
        if not (points and relay.models):
            return
        (x, y), held = selection_sets(setup)
        x, x_held = projected(setup.config, x), projected(setup.config, held[0])
        expected = next(iter(relay.models.values()))
        curves = selection_curves(
            relay.models,
            lambda model: self._accuracy(setup, model, x_held, held[1]),
            lambda model: self._accuracy(setup, model, x, y),
            lambda models: named_arrays(cast_like(relay.mean_of(models), expected)),
            seed=setup.config.seed,
            points=points,
        )
        with whole(folder / "selection.parquet") as file:
            curves.to_parquet(file)

    def _accuracy(self, setup: Setup, model: Arrays, x: Tensor, y: Tensor) -> float:
        return self.judged(setup, model, "network").evaluate(x, y).score


def selection_sets(setup: Setup) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the examples that judge means of models, and those by which models are sorted."""
    x, y = setup.evaluation_set()
    if len(setup.split.validation) and setup.config.evaluate_on == "test":
        return (x, y), setup.data.train(setup.split.validation)
    generator = np.random.default_rng([setup.config.seed, *b"selection sets"])
    order = torch.from_numpy(generator.permutation(len(y)))
    judging, sorting = order[: len(y) // 2], order[len(y) // 2 :]
    return (x[judging], y[judging]), (x[sorting], y[sorting])


def selection_curves(
    models: Mapping[int, Arrays],
    validation: Callable[[Arrays], float],
    judged: Callable[[Arrays], float],
    mean_of: Callable[[Sequence[Arrays]], Arrays],
    *,
    seed: int = 0,
    points: int = 20,
) -> "pd.DataFrame":
    """Average more and more of the clients' last models, in three orders, and evaluate each mean.

    `models` is client -> weights. `validation` and `judged` return the accuracy of weights on the
    examples that sort the models, and on those that judge the means; they have no example in
    common: else the best models are those of lucky examples. `seed` is of the random order, and
    means are judged at `points` numbers of clients at most. The result has the columns order,
    clients (how many are averaged), client (the last of them), accuracy.
    """
    import pandas as pd

    accuracies = {client: validation(model) for client, model in sorted(models.items())}
    worst_first = sorted(accuracies, key=lambda client: accuracies[client])
    best_first = sorted(accuracies, key=lambda client: -accuracies[client])
    drawn = np.random.default_rng([seed, *b"selection"]).permutation([*accuracies]).tolist()
    orders = {"best to worst": best_first, "random": drawn, "worst to best": worst_first}
    rows = []
    for order, clients in orders.items():
        for count in numbers_averaged(len(clients), points):
            mean = mean_of([models[client] for client in clients[:count]])
            rows.append((order, count, clients[count - 1], judged(mean)))
    return pd.DataFrame(rows, columns=["order", "clients", "client", "accuracy"])


def numbers_averaged(count: int, points: int) -> list[int]:
    """Return how many clients to average: 1 ... `count`, or `points` numbers, small ones dense.

    Examples
    --------
    >>> numbers_averaged(4, 20), numbers_averaged(300, 6)
    ([1, 2, 3, 4], [1, 3, 10, 31, 96, 300])
    """
    if count <= points:
        return list(range(1, count + 1))
    return sorted({*np.rint(np.geomspace(1, count, max(points, 2))).astype(int).tolist()})
