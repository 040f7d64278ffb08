"""SCAFFOLD's c if clients send only models: who changed it, and how clients learn it.

Source: Karimireddy et al., *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*, ICML
2020, option II; Yu et al., *TCT*, NeurIPS 2022, algorithm 1. Clients keep their own c_k; the server
computes their changes from the models they return:

    c_k <- c_k - c + (theta - theta_k) / (M eta),        c = sum_k n_k c_k / n over all clients.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedntk.ntk.convex.local_steps import mean_gradient
from fedntk.ntk.options import Declared, state

from ..core.saved_state import pack_state, unpack_state


class ControlVariate(Declared):
    """The server's c, and the round from which each client's c_k counts."""

    value: NDArray[Any] = state(lambda: np.zeros((0, 0), np.float32))  # c (p, C); empty: zero
    total: float = state(float)  # n by which c was divided
    rounds: dict[int, int] = state(dict)  # client -> round from which its c_k counts; others: 0
    # client -> number of examples that it reported first
    examples: dict[int, int] = state(dict, reset=False)
    full_round: int = state(lambda: -1)  # the last round, if all clients took part in it

    def source(self, client: int, server_round: int) -> Literal["zero", "last", "sent"]:
        """Return how a client gets to know c: see `control` of MessageTask.

        ``"last"``, the difference of models, needs all clients in the last round.
        """
        if not self.value.size:
            return "zero"
        in_last = self.full_round == server_round - 1 == self.rounds.get(client, 0)
        return "last" if in_last else "sent"

    def know(self, examples: Mapping[int, int]) -> None:
        """Note the clients' numbers of examples; the first that a client reports counts."""
        self.examples = {**examples, **self.examples}

    def update(
        self,
        server_round: int,
        theta: NDArray[Any],
        mean: NDArray[Any],
        clients: Mapping[int, tuple[int, NDArray[Any]]],
        everyone: set[int],
        span: float,
    ) -> None:
        """Take the changes of the clients' c_k into c.

        `theta` and `mean` (p, C) are the model before and after the round, `span` is M eta. Each
        of the `clients` that took part has a number of examples and a returned model. All of
        `everyone` present, and clients that left, count in c; one that never took part has c_k = 0
        and counts with the others' mean number of examples.
        """
        self.know({client: count for client, (count, _) in clients.items()})
        everyone = everyone | self.rounds.keys()
        counts = [n for client, n in self.examples.items() if client in everyone]
        total = len(everyone) * float(np.mean(counts)) if counts else 0.0
        began = bool(self.value.size)
        full = clients.keys() >= everyone and (not began or total == self.total)
        if full:
            before, after = torch.from_numpy(theta), torch.from_numpy(mean)
            self.value = mean_gradient(before, after, span).numpy()
        else:
            control = self.value.astype(np.float64) if began else np.zeros(theta.shape)
            summed = control * self.total
            for count, linear in clients.values():
                summed += count * ((theta - linear.astype(np.float64)) / span - control)
            self.value = (summed / total).astype(np.float32)
        self.total = total
        self.rounds |= dict.fromkeys(clients, server_round)
        self.full_round = server_round if full else -1

    def state_dict(self) -> dict[str, Any]:
        """Return all that later rounds depend on."""
        return pack_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        unpack_state(self, state)
