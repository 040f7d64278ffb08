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
anew from all c_i in each round; with unequal n_i, sums over S alone would leave it apart from them.
"""

from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import BadReply

from .replies import Reply, checked_weights
from .seeded_fedavg import SeededFedAvg, like, logger, weighted_mean

__all__ = ["SCAFFOLD"]


class SCAFFOLD(SeededFedAvg):
    """SCAFFOLD (Karimireddy et al. 2020). Clients are :class:`~fedntk.clients.SCAFFOLDClient`.

    The controls c_i of all clients are kept here, by partition, and each client is sent its own
    correction c - c_i with the model. So clients are stateless, a reply that is lost or dropped
    leaves its client's control as it was, and :meth:`state_dict` holds all there is. What it costs:
    one model's size of memory for each client heard of, and twice the bytes of FedAvg in both
    directions, as in the paper. Nodes that tell one partition share its control; one that tells
    none goes by its node id, and is a new client when it registers anew.

    In messages and replies, one record of arrays holds the model's arrays under their names and,
    behind them, for each array of floating point ``<name>.control``: down c - c_i, up c_i+. Arrays
    for which all clients send controls of zero are not trained, such as BatchNorm's statistics, and
    are averaged as in FedAvg whatever eta_g; so are integers.

    Parameters
    ----------
    server_learning_rate : float
        eta_g, more than 0. At 1 the new weights are the clients' mean.
    **fedavg_options
        Of :class:`SeededFedAvg` (seed, min_completed) and of Flower's FedAvg. N are the partitions
        that are not `held_out`.

    Attributes
    ----------
    controls : dict of int to ndarray, shape (P,)
        Partition -> c_i of the clients heard of: the floating-point arrays one after the other,
        in the model's order and dtype (the widest of several).
    examples : dict of int to int
        Partition -> n_i, as last reported.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> strategy = SCAFFOLD(min_train_nodes=10, min_completed=5)
    >>> strategy.server_learning_rate
    1.0
    """

    def __init__(self, *, server_learning_rate: float = 1.0, **fedavg_options: Any) -> None:
        super().__init__(**fedavg_options)
        if not 0 < server_learning_rate < np.inf:
            raise ValueError(
                "server_learning_rate: expected a finite number of more than 0, got "
                f"{server_learning_rate}"
            )
        self.server_learning_rate = server_learning_rate
        self.controls: dict[int, NDArray[Any]] = {}
        self.examples: dict[int, int] = {}

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        rate = self.server_learning_rate
        logger.log(INFO, "\t└──> SCAFFOLD: server learning rate %g", rate)

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Add the controls, shape (M, P), and whose they are, with their examples."""
        partitions = sorted(self.controls)
        rows = [self.controls[partition] for partition in partitions]
        return {
            **super().state_dict(),
            "partitions": partitions,
            "examples": [self.examples[partition] for partition in partitions],
            "controls": np.stack(rows) if rows else np.zeros((0, 0), np.float32),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        partitions = [int(partition) for partition in state["partitions"]]
        self.controls = dict(zip(partitions, np.array(state["controls"]), strict=True))
        self.examples = dict(zip(partitions, map(int, state["examples"]), strict=True))

    # ---------------------------------------------------------------- controls

    def control(self) -> NDArray[np.float64]:
        """c: mean of all clients' controls by their examples; of those not heard of they are 0.

        Returns
        -------
        ndarray of float64, shape (P,)
            Empty before the first reply.
        """
        clients = (set(self.partitions.values()) - set(self.held_out)) | self.controls.keys()
        total = sum(self.examples.values())
        control = np.zeros(len(next(iter(self.controls.values()), ())))
        for partition in sorted(self.controls):
            weight = self.examples[partition] / total * (len(self.controls) / len(clients))
            control += np.multiply(self.controls[partition], weight, dtype=np.float64)
        return control

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the global model and its own correction, c - c_i, to each of a sample."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        floating = _floating({name: array.numpy() for name, array in arrays.items()})
        size = sum(array.size for array in floating.values())
        control = self.control() if self.controls else np.zeros(size)
        if len(control) != size:
            raise ValueError(
                f"the model has {size} numbers, the controls of {len(control)} are of another; "
                "start from the weights that belong to the state"
            )
        for message in messages:
            node = message.metadata.dst_node_id
            own = self.controls.get(self.partitions.get(node, node), 0.0)
            corrections = _parted(control - own, floating)
            record = ArrayRecord({**arrays, **{n: Array(a) for n, a in corrections.items()}})
            message.content = RecordDict({**message.content, self.arrayrecord_key: record})
        return messages

    # ------------------------------------------------------------- aggregation

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Step towards the mean of the accepted weights, and keep the accepted controls."""
        model = {name: array.numpy() for name, array in self.global_arrays.items()}
        floating = _floating(model)
        expected = {**model, **{_control_of(name): array for name, array in floating.items()}}
        pairs, rejected = self.accepted(replies, lambda reply: _checked(reply, expected, floating))
        metrics = self.round_metrics([reply for reply, _ in pairs], rejected)
        self.train_metrics[server_round] = metrics
        if not self.enough(len(pairs)):
            return None, metrics
        weights = weighted_mean(
            [{name: arrays[name] for name in model} for _, arrays in pairs],
            [reply.num_examples for reply, _ in pairs],
        )
        if self.server_learning_rate != 1.0:
            for name, start in floating.items():
                if any(arrays[_control_of(name)].any() for _, arrays in pairs):
                    weights[name] = start + self.server_learning_rate * (weights[name] - start)
        if not all(np.isfinite(weights[name]).all() for name in floating):
            logger.log(WARNING, "the new weights are not finite: the model stays as it was")
            return None, metrics
        for reply, arrays in pairs:
            partition = self.order(reply)[0]
            parts = [arrays[_control_of(name)].ravel() for name in floating]
            self.controls[partition] = np.concatenate(parts)
            self.examples[partition] = reply.num_examples
        return like(weights, model), metrics


def _control_of(name: str) -> str:
    """Name of an array's control; a module beside a tensor of its name cannot be."""
    return f"{name}.control"


def _floating(model: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: a for name, a in model.items() if np.issubdtype(a.dtype, np.floating)}


def _parted(
    vector: NDArray[np.float64], floating: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Cut a vector into arrays of the given shapes and dtypes, under their controls' names."""
    ends = np.cumsum([array.size for array in floating.values()])[:-1]
    return {
        _control_of(name): part.reshape(array.shape).astype(array.dtype)
        for (name, array), part in zip(floating.items(), np.split(vector, ends), strict=True)
    }


def _checked(
    reply: Reply,
    expected: Mapping[str, NDArray[Any]],
    floating: Mapping[str, NDArray[Any]],
) -> dict[str, NDArray[Any]]:
    """Check weights and controls whole; controls so large that c - c_i overflows are refused."""
    arrays = checked_weights(reply, expected)
    for name, array in floating.items():
        largest = np.abs(arrays[_control_of(name)]).max(initial=0)
        if largest > np.finfo(array.dtype).max / 4:
            raise BadReply("scale", f"{_control_of(name)} is as large as {largest:g}")
    return arrays
