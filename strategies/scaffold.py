"""Server of SCAFFOLD: FedAvg whose clients' drift is corrected by control variates.

Source: Karimireddy et al., *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*,
ICML 2020, algorithm 1, for the clients S of a round out of N:

    x <- x + eta_g mean over S of (y_i - x)
    c_i <- c_i+                                  for the clients in S
    c <- c + (|S| / N) mean over S of (c_i+ - c_i)

From c = c_i = 0 the last line keeps c = (1 / N) sum over all clients of c_i. The paper's clients
all count alike. Here each counts by its n_i examples, as in FedAvg, so that what is minimised is
the loss of the pooled examples:

    x <- x + eta_g sum over S of (n_i / n_S) (y_i - x)
    c = (M / N) sum of (n_i / n_M) c_i           over the M clients heard of so far

where n_S and n_M are the sums of the n_i. With equal n_i these are the paper's lines. c is formed
anew from all c_i in each round; with unequal n_i, sums over only S would make it differ from them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.averages import all_alike, are_finite, put_back
from fedntk.ntk.options import option, state
from fedntk.ntk.payloads.screening import screen_changes
from fedntk.ntk.robust_averages import DEFENCES, robust_mean

from .core.averaging import cast_like, named_arrays, record_of
from .core.base import BaseStrategy
from .core.exchange import Aggregated, logger
from .core.replies import Reply, check_weights

CORRECTIONS, CONTROLS = "corrections", "controls"  # names of the records
Arrays = dict[str, NDArray[Any]]


class SCAFFOLD(BaseStrategy):
    """SCAFFOLD (Karimireddy et al. 2020). Clients are :class:`~fedntk.clients.SCAFFOLDClient`.

    Clients are stateless: messages have a record ``corrections`` with c - c_i, and replies a record
    ``controls`` with c_i+, of the model's floating-point arrays. So a reply that is lost or dropped
    leaves its client's control as it was. This costs a model's memory for each client heard of, and
    twice the bytes of FedAvg in both directions, as in the paper. A node that reports no partition
    is known by its node id, and is a new client when it registers anew.

    Arrays for which all clients send controls of zero are not trained, such as BatchNorm's
    statistics, and are averaged as in FedAvg for any eta_g; so are integers.

    Attributes
    ----------
    controls : dict of int to ndarray, shape (P,)
        Client -> c_i of the clients heard of: the floating-point arrays one after the other, in
        the model's order and dtype (the widest of several).
    examples : dict of int to int
        Client -> n_i, as last reported.
    """

    client = "SCAFFOLDClient"
    replies = "weights and controls"
    centres = True
    defences = (*DEFENCES, "validation")

    server_learning_rate: float = option(
        "eta_g; at 1 the new weights are the clients' mean", default=1.0, above=0
    )
    controls: dict[int, NDArray[Any]] = state(dict)
    examples: dict[int, int] = state(dict)
    _control: NDArray[np.float64] = state(lambda: np.zeros(0), saved=False)  # c of the round

    def control(self) -> NDArray[np.float64]:
        """Return c (P,), empty before the first reply; clients not heard of count with 0."""
        clients = self.registry.clients(without=self.held_out, departed=True)
        clients |= self.controls.keys()
        if self.defence not in ("none", "validation") and self.controls:
            known = sorted(self.controls)
            zero = np.zeros_like(self.controls[known[0]])
            every = [{"c": self.controls[client]} for client in known]
            counts = [self.examples[client] for client in known]
            mean = robust_mean({"c": zero}, every, counts, self.defence, self.liars_expected)["c"]
            return np.asarray(mean * (len(known) / len(clients)), np.float64)
        total = sum(self.examples.values())
        control = np.zeros(len(next(iter(self.controls.values()), ())))
        for client in sorted(self.controls):
            weight = self.examples[client] / total * (len(self.controls) / len(clients))
            control += np.multiply(self.controls[client], weight, dtype=np.float64)
        if self.controls:
            own = list(self.controls.values())
            put_back(control, own[0] * (len(own) / len(clients)), all_alike(own))
        return control

    def prepare_round(self, server_round: int, nodes: list[int], grid: Grid) -> None:
        """Form c, now that the live clients are known."""
        self._control = self.control()

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Add c - c_i for training."""
        content = super().content_for(client, stage, arrays, config)
        if stage == MessageType.TRAIN:
            floating = _floating(named_arrays(arrays))
            ends = np.cumsum([array.size for array in floating.values()])
            control = self._control if self.controls else np.zeros(ends[-1])
            if len(control) != ends[-1]:
                raise ValueError(
                    f"the model has {ends[-1]} numbers, the controls of {len(control)} are of "
                    "another; start from the weights that belong to the state"
                )
            parts = np.split(control - self.controls.get(client, 0.0), ends[:-1])
            shaped = zip(floating.items(), parts, strict=True)
            content[CORRECTIONS] = record_of(
                {n: part.reshape(a.shape).astype(a.dtype) for (n, a), part in shaped}
            )
        return content

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Step towards the mean of the accepted weights, and keep the accepted controls."""
        model = named_arrays(self.global_arrays)
        floating = _floating(model)
        zeros = {name: np.zeros_like(array) for name, array in floating.items()}

        def parse(reply: Reply) -> tuple[Arrays, Arrays]:
            weights, controls = reply.array_records(self.arrayrecord_key, CONTROLS)
            found = check_weights(weights, model, self.untrained)
            return found, check_weights(controls, floating)

        def screen(own: Sequence[tuple[Arrays, Arrays]], most: float) -> list[BadReply | None]:
            by_weights = screen_changes(model, [weights for weights, _ in own], most)
            by_controls = screen_changes(zeros, [controls for _, controls in own], most)
            return [a or b for a, b in zip(by_weights, by_controls, strict=True)]

        pairs, rejected = self.accepted(replies, parse, MessageType.TRAIN)
        pairs = self.apply_screen(pairs, rejected, screen)
        pairs = self.judged(pairs, rejected, model, lambda own: own[0])
        metrics = self.round_metrics([reply for reply, _ in pairs], rejected)
        self.train_metrics[server_round] = metrics
        if not self.enough(len(pairs)):
            return None, metrics
        weights = self.robust_mean_of(model, [(reply, own) for reply, (own, _) in pairs])
        if self.server_learning_rate != 1.0:
            for name, start in floating.items():
                if any(controls[name].any() for _, (_, controls) in pairs):
                    step = self.server_learning_rate * (weights[name] - start)
                    weights[name] = put_back(start + step, start, step == 0)
        if not are_finite({name: weights[name] for name in floating}, model):
            logger.warning("the new weights are not finite: the model stays as it was")
            return None, metrics
        for reply, (_, controls) in pairs:
            parts = [controls[name].ravel() for name in floating]
            self.controls[reply.client] = np.concatenate(parts)
            self.examples[reply.client] = reply.num_examples
        return cast_like(weights, model), metrics


def _floating(model: Mapping[str, NDArray[Any]]) -> Arrays:
    return {name: a for name, a in model.items() if np.issubdtype(a.dtype, np.floating)}
