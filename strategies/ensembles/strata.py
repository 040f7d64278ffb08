"""Which client trains which model of an ensemble in a round.

Source: Shi et al., *Fed-ensemble: Improving Generalization through Model Ensembling in Federated
Learning*, 2021, algorithm 1, lines 2, 4 and 6.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Schedule = Literal["independent", "balanced"]


class Strata:
    """The clients of a run, divided at random into Q strata.

    Their sizes differ by at most one when they are formed. A client that joins goes into a smallest
    stratum; one that is gone leaves its own. In each new age, which draws all permutations anew,
    the fewest clients move that make the sizes differ by at most one again.
    """

    def __init__(self, count: int = 1, seed: int = 0) -> None:
        self.count, self.seed = count, seed  # Q; of the first division and of all moves
        self.of: dict[int, int] = {}  # client -> its stratum, 0 ... Q - 1

    def update(self, clients: Iterable[int], server_round: int, *, new_age: bool) -> None:
        """Set the clients that are there; in a new age, also even out the sizes."""
        clients = set(clients)
        self.of = {client: q for client, q in self.of.items() if client in clients}
        generator = np.random.default_rng([self.seed, server_round, *b"strata"])
        joining = sorted(clients - self.of.keys())
        sizes = self.sizes()
        for client in generator.permutation(joining).tolist() if joining else []:
            self._put(client, sizes, generator)
        while new_age and max(sizes) - min(sizes) > 1:
            largest = int(np.argmax(sizes))
            moved = int(generator.choice(self.members(largest)))
            sizes[largest] -= 1
            self._put(moved, sizes, generator)

    def _put(self, client: int, sizes: list[int], generator: np.random.Generator) -> None:
        smallest = np.flatnonzero(np.array(sizes) == min(sizes))
        self.of[client] = int(generator.choice(smallest))
        sizes[self.of[client]] += 1

    def sizes(self) -> list[int]:
        """Count the clients of each stratum."""
        members = Counter(self.of.values())
        return [members[q] for q in range(self.count)]

    def members(self, stratum: int) -> list[int]:
        """Return the clients of a stratum, in their order."""
        return sorted(client for client, q in self.of.items() if q == stratum)

    def sample(self, size: int, generator: np.random.Generator) -> list[int]:
        """Draw clients from all strata, in equal shares as far as that goes, and sort them.

        If the clients are fewer than `size`, all are drawn. What is left over after equal shares
        comes from strata chosen at random; a stratum with too few gives all it has. With one
        stratum the draw is that of any other strategy here.
        """
        sizes = np.array(self.sizes())
        shares = np.zeros_like(sizes)
        while size > shares.sum() and (shares < sizes).any():
            room = np.flatnonzero(shares < sizes)
            equal, rest = divmod(int(size - shares.sum()), len(room))
            if equal:
                shares[room] = np.minimum(shares[room] + equal, sizes[room])
            else:
                shares[generator.choice(room, size=rest, replace=False)] += 1
        chosen: list[int] = []
        for stratum, share in enumerate(shares.tolist()):
            members = self.members(stratum)
            drawn = generator.choice(len(members), size=share, replace=False)
            chosen += [members[i] for i in drawn]
        return sorted(chosen)

    def state_dict(self) -> dict[str, int]:
        """Return the stratum of each client; placeholders end with their nodes."""
        return {str(client): q for client, q in sorted(self.of.items()) if client >= 0}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.of = {int(client): int(q) for client, q in state.items()}


def permutations(
    num_strata: int, num_models: int, schedule: Schedule, seed: int, age: int
) -> NDArray[np.int64]:
    """Draw P, shape (Q, K): in round r of the age, stratum q trains model ``P[q, r]``.

    Each row is a permutation, so that in the K rounds of an age every model visits every stratum
    once. With ``"independent"`` each is drawn by itself, as in algorithm 1: in a round several
    strata may train one model, and none another. With ``"balanced"`` rows are the shifts of one
    random order, dealt out at random: in each round the numbers of strata that train two models
    differ by at most one. Each row by itself is as random as before.
    """
    generator = np.random.default_rng([seed, age, *b"permutations"])
    if schedule == "independent":
        return np.stack([generator.permutation(num_models) for _ in range(num_strata)])
    order = generator.permutation(num_models)
    rows, columns = generator.permutation(num_strata), generator.permutation(num_models)
    shifted: NDArray[np.int64] = order[(rows[:, None] + columns[None, :]) % num_models]
    return shifted
