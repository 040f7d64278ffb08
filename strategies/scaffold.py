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

from collections.abc import Mapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.averages import all_alike, are_finite, put_back
from fedntk.ntk.options import option, part, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.screening import screen_changes
from fedntk.ntk.robust_averages import DEFENCES, robust_mean
from fedntk.ntk.support.arrays import ArrayDict

from .core.averaging import cast_like, record_of
from .core.centre import CentreInputs, untrained_by
from .core.channel import Rounds
from .core.replies import Reply, check_weights
from .core.round import Round
from .core.strategy import Strategy
from .core.uploads import Update
from .core.weight_average import WeightAverage

logger = getLogger("flwr")
Both = tuple[ArrayDict, ArrayDict]  # weights and controls


class SCAFFOLD(Strategy):
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
    takes_real_targets = True
    rules = (*DEFENCES, "validation")

    server_learning_rate: float = option(
        "eta_g; at 1 the new weights are the clients' mean", default=1.0, above=0
    )
    average: WeightAverage | None = part("average of the weights over rounds", default=None)
    centre: CentreInputs | None = part("take the mean over all clients off inputs", default=None)
    controls: dict[int, NDArray[Any]] = state(dict)
    examples: dict[int, int] = state(dict)

    def train_round(self, r: Round) -> Rounds[Update]:
        """Step towards the mean of the clients' weights, and store their controls."""
        sample = r.sample()
        floating = _floating(r.model)
        zeros = {name: np.zeros_like(array) for name, array in floating.items()}
        control = self.control(r)

        def parse(reply: Reply) -> Both:
            weights, controls = reply.array_records(r.owner.arrayrecord_key, wire.CONTROLS)
            checked = check_weights(weights, r.model, untrained_by(self))
            return checked, check_weights(controls, floating)

        def screen(both: Sequence[Both], factor: float) -> list[BadReply | None]:
            by_weights = screen_changes(r.model, [weights for weights, _ in both], factor)
            by_controls = screen_changes(zeros, [controls for _, controls in both], factor)
            return [a or b for a, b in zip(by_weights, by_controls, strict=True)]

        uploads = yield from r.ask(
            parse,
            clients=sample,
            records=lambda client: {wire.CORRECTIONS: self.corrections(client, control, floating)},
        )
        uploads = self.screening.drop(uploads, screen)
        uploads = self.screening.drop_harmful(uploads, r.model, lambda both: both[0])
        if not self.enough(uploads):
            return Update(uploads)
        changes = uploads.with_values(weights for weights, _ in uploads.values)
        weights = self.screening.mean(changes, r.model)
        if self.server_learning_rate != 1.0:
            for name, start in floating.items():
                if any(controls[name].any() for _, controls in uploads.values):
                    step = self.server_learning_rate * (weights[name] - start)
                    weights[name] = put_back(start + step, start, step == 0)
        if not are_finite({name: weights[name] for name in floating}, r.model):
            logger.warning("the new weights are not finite: the model stays as it was")
            return Update(uploads)
        for upload in uploads:
            _, controls = upload.value
            self.controls[upload.client] = np.concatenate([controls[n].ravel() for n in floating])
            self.examples[upload.client] = upload.num_examples
        return Update(uploads, cast_like(weights, r.model))

    def control(self, r: Round) -> NDArray[np.float64]:
        """Return c (P,), empty before the first reply; clients not heard of count with 0."""
        clients = r.registry.clients(without=r.held_out, departed=True) | self.controls.keys()
        if not self.controls:
            return np.zeros(0)
        heard = sorted(self.controls)
        if self.screening.rule not in ("none", "validation"):
            zero = {"c": np.zeros_like(self.controls[heard[0]])}
            controls = [{"c": self.controls[client]} for client in heard]
            counts = [self.examples[client] for client in heard]
            rule, malicious = self.screening.rule, self.screening.malicious
            mean = robust_mean(zero, controls, counts, rule, malicious)["c"]
            return np.asarray(mean * (len(heard) / len(clients)), np.float64)
        total = sum(self.examples.values())
        control = np.zeros(len(self.controls[heard[0]]))
        for client in heard:
            weight = self.examples[client] / total * (len(heard) / len(clients))
            control += np.multiply(self.controls[client], weight, dtype=np.float64)
        every = list(self.controls.values())
        return put_back(control, every[0] * (len(every) / len(clients)), all_alike(every))

    def corrections(
        self, client: int, control: NDArray[np.float64], floating: ArrayDict
    ) -> ArrayRecord:
        """Return c - c_i for a client, in the shapes and dtypes of the model."""
        ends = np.cumsum([array.size for array in floating.values()])
        control = control if self.controls else np.zeros(ends[-1])
        if len(control) != ends[-1]:
            raise ValueError(
                f"the model has {ends[-1]} numbers, the controls of {len(control)} are of another; "
                "start from the weights that belong to the state"
            )
        parts = np.split(control - self.controls.get(client, 0.0), ends[:-1])
        shaped = zip(floating.items(), parts, strict=True)
        return record_of({n: p.reshape(a.shape).astype(a.dtype) for (n, a), p in shaped})


def _floating(model: Mapping[str, NDArray[Any]]) -> ArrayDict:
    return {name: a for name, a in model.items() if np.issubdtype(a.dtype, np.floating)}
