"""Sampling by client: the same seed draws the same clients, whatever their node ids.

Flower samples nodes, and their ids are random in every run. Here each node reports its partition,
and clients are drawn by it, from a generator of (seed, round, stage).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from logging import getLogger
from typing import Any, NamedTuple

import numpy as np
from flwr.app import MessageType
from flwr.serverapp import Grid

from fedntk.ntk.options import Declared, option

logger = getLogger("flwr")
Round = Any  # that of round.py, which imports this file
SETTLED = 10.0  # seconds in which Flower's simulation registers a node more, if one is to come
SILENCE = 5.0  # seconds of waiting before the log says so


class NotEnoughNodes(ValueError):  # noqa: N818
    """Options that want more nodes than a grid will ever have."""


def patience_with(grid: Any) -> float:
    """Return the seconds without a new node after which a grid gets no more: its ``patience``."""
    simulated = type(grid).__name__ == "InMemoryGrid"
    return float(getattr(grid, "patience", SETTLED if simulated else float("inf")))


def await_nodes(grid: Grid, wanted: Mapping[str, int]) -> list[int]:
    """Return the nodes when there are as many as each option wants, or raise NotEnoughNodes."""
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


class Population(NamedTuple):
    """How many clients of a round are sampled, and out of which."""

    fraction: float  # of the available nodes
    minimum: int  # fewest clients, which are waited for
    needed: int  # fewest clients with whom a round can change the model
    available: int  # nodes to wait for
    excluded: Collection[int]  # partitions that are never sampled


class Sample(NamedTuple):
    """Clients of a round."""

    nodes: tuple[int, ...]  # their ids, in the order of the clients
    wanted: int | None  # number of replies after which a round goes on; None: it waits for all
    num_clients: int  # that are sampled, without those over this number


class Candidates(NamedTuple):
    """All clients that may be sampled, and how many are."""

    pairs: list[tuple[int, int]]  # (client, node), in order
    size: int
    wanted: int | None  # as of a Sample
    num_clients: int


class Sampling(Declared):
    """Which clients take part in a round."""

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

    def draw(self, r: Round, population: Population, *, sent_alike: bool = True) -> Sample:
        """Draw the clients of a round.

        The seed, the round and its stage seed the draw of ``max(int(fraction * available),
        minimum)`` clients, times `over_selection` for training, or of all if they are fewer.
        """
        pairs, size, wanted, num_clients = self.candidates(r, population, sent_alike=sent_alike)
        generator = np.random.default_rng([self.seed, r.number, *r.stage.encode()])
        chosen = np.sort(generator.choice(len(pairs), size=size, replace=False))
        return Sample(tuple(pairs[i][1] for i in chosen), wanted, num_clients)

    def candidates(
        self, r: Round, population: Population, *, sent_alike: bool = True
    ) -> Candidates:
        """Return all clients that may be sampled, when enough of them are there."""
        channel, registry, stage = r.channel, r.channel.registry, r.stage
        if channel.grid is None:
            raise RuntimeError("call configure_train first, which sets the grid")
        minimum = {f"clients to {stage}": population.minimum}
        nodes = await_nodes(channel.grid, {"min_available_nodes": population.available, **minimum})
        wanted = max(int(population.fraction * len(nodes)), population.minimum, population.needed)
        if new := registry.unknown(nodes):  # ask each once, or have it told with the reply
            everyone = wanted >= len(nodes) and not population.excluded
            is_first = not registry.partitions and r.number <= 1  # no client has state yet
            if everyone and sent_alike and is_first:
                registry.expect(new)
            else:
                registry.add(channel.ask_partitions(new))
        registry.set_present(nodes)
        partitions, excluded = registry.partitions, population.excluded
        present = [node for node in nodes if partitions[node] not in excluded]
        pairs = sorted((registry.client(node), node) for node in present)
        count = size = min(wanted, len(pairs))
        if stage == MessageType.TRAIN:
            size = min(round(self.over_selection * count), len(pairs))
        logger.info("%s: sampled %d of %d nodes", stage, size, len(nodes))
        return Candidates(pairs, size, count if size > count else None, count)
