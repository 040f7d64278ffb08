"""Sampling by client: the same seed draws the same clients, whatever their node ids.

Flower samples nodes, and their ids are random in every run. Here each node reports its partition,
and clients are drawn by it, from a generator of (seed, round, stage).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import MessageType
from flwr.serverapp import Grid

from fedntk.ntk.options import option

from .exchange import Exchanges, logger

SETTLED = 10.0  # seconds in which Flower's simulation registers a node more, if one is to come
SILENCE = 5.0  # seconds of waiting before the log says so


class NotEnoughNodes(ValueError):  # noqa: N818
    """Options that want more nodes than a grid will ever have."""


def patience_with(grid: Any) -> float:
    """Return the seconds without a new node after which a grid gets no more; infinity: it may.

    A grid says so as ``patience``. The nodes of Flower's simulation are set before it starts.
    """
    simulated = type(grid).__name__ == "InMemoryGrid"
    return float(getattr(grid, "patience", SETTLED if simulated else float("inf")))


def await_nodes(grid: Grid, wanted: Mapping[str, int]) -> list[int]:
    """Return the grid's nodes when there are as many as each option wants.

    NotEnoughNodes if there never will be.
    """
    needed, patience, begun, seen = max(wanted.values()), patience_with(grid), time.monotonic(), -1
    while len(nodes := sorted(grid.get_node_ids())) < needed:
        names = ", ".join(f"{name} = {n}" for name, n in wanted.items() if n > len(nodes))
        now = time.monotonic()
        if len(nodes) > seen:
            seen, last, told = len(nodes), now, False
        if now - last >= patience:
            raise NotEnoughNodes(
                f"{names}: this grid has {len(nodes)} nodes, and no more will come; lower what "
                f"wants more, or give the grid {needed}: num_clients of a LocalGrid, "
                "num-supernodes of a simulation"
            )
        if not told and now - begun >= SILENCE:
            logger.info("waiting for nodes: %d of %d are there (%s)", len(nodes), needed, names)
            told = True
        time.sleep(min(1.0, patience))
    return nodes


class Sampling(Exchanges):
    """A strategy that samples its nodes by the partitions that they report."""

    seed: int = option("seed of the sampling of clients", default=0, at_least=0)
    over_selection: float = option(
        "factor of the clients that are asked to train: as many as without it are used, the first "
        "whose replies are valid, and the others are not waited for (Bonawitz et al. 2019)",
        default=1.0,
        at_least=1,
    )
    held_out: Sequence[int] = option("partitions never sampled for training", default=())
    evaluate_without: Sequence[int] = option(
        "partitions never sampled for evaluation", default=(), compared=False
    )

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

        The strategy's seed, round and stage seed the draw of ``max(int(fraction * available),
        minimum)`` nodes, times `over_selection` for training, or of all if they are fewer, without
        the `excluded` partitions.
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
        self._grid, options = grid, {"min_available_nodes": self.min_available_nodes}
        nodes = await_nodes(grid, options | {f"clients to {stage}": minimum})
        needed = self.fewest_replies if stage == MessageType.TRAIN else 0  # by a defence, too
        wanted = max(int(fraction * len(nodes)), minimum, needed)
        if new := self.registry.unknown(nodes):  # ask each once, or have it told with the reply
            everyone = wanted >= len(nodes) and not excluded
            if everyone and sent_alike and self._is_first_sample:
                self.registry.expect(new)
            else:
                self.registry.add(self._ask_partitions(new))
        self.registry.set_present(nodes)
        candidates = sorted(
            (self.registry.client(node), node)
            for node in nodes
            if self.registry.partitions[node] not in excluded
        )
        wanted = size = min(wanted, len(candidates))
        if stage == MessageType.TRAIN:
            self.num_sampled = wanted
            size = min(round(self.over_selection * wanted), len(candidates))
            self._wanted = wanted if size > wanted else None
        logger.info("configure_%s: sampled %d of %d nodes", stage, size, len(nodes))
        return candidates, size

    @property
    def _is_first_sample(self) -> bool:
        """Whether no client has state yet, so all are sent the same."""
        return not self.registry.partitions and self.server_round <= 1
