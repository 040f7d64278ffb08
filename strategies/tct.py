"""TCT: train a network with any strategy, then solve a convex problem in its tangent features.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4 and algorithms 1 and 2:

    stage 1     T_1 rounds of a bootstrap strategy (FedAvg) on the network
    convexify   z = tangent features of the first logit, the last layer drawn anew; one exchange
                of their moments makes each of mean 0 and variance 1 over all clients' examples
    stage 2     T_2 rounds of SCAFFOLD on sum_k (n_k / n) L_k(W):
                client   theta_k = M steps of theta - eta (grad L_k(theta) - h_k)          eq. (3)
                server   theta = sum_k (n_k / n) theta_k

The correction is h_k = c_k - c (the invariant of appendix A.1), with c_k the mean gradient along
client k's last steps. When all clients took part in the last round, c is the difference of its
model and this one over M eta, and only models travel: algorithm 1. The paper does not treat partial
participation; here it is SCAFFOLD's own, and c travels down with theta: see
:mod:`fedntk.strategies.control_variate`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, Literal, get_args

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import (
    BadReply,
    FeatureMap,
    Loss,
    Moments,
    Normaliser,
    TCTModel,
    UploadLimits,
    available_memory,
)
from fedntk.ntk.convex import pooled_ridge
from fedntk.ntk.features import FeatureKind
from fedntk.ntk.losses import check_loss
from fedntk.ntk.payloads import UNQUANTISED, ConvexTask, FeatureUpload, check_compression

from .bootstrap import Bootstrap
from .control_variate import ControlVariate
from .nodes import Nodes
from .replies import Reply, check_like
from .seeded_fedavg import SeededFedAvg, logger, weighted_mean

__all__ = ["TCT", "ConvexOptimizer"]

LINEAR, MEAN, SCALE = TCTModel.ARRAYS
BOOTSTRAP = "bootstrap."  # begins the names of the bootstrap strategy's state
ConvexOptimizer = Literal["scaffold", "fedavg", "gd"]
Arrays = dict[str, NDArray[Any]]


class TCT(SeededFedAvg):
    """Train, convexify, train (Yu et al. 2022). Clients are :class:`~fedntk.clients.TCTClient`.

    Of ``num_rounds`` rounds, `bootstrap_rounds` are stage 1, one is for the moments of the features
    (none with ``normalise=False``), and the others are stage 2. The arrays that :meth:`start`
    returns, and that ``evaluate_fn`` is given, are the network's and ``tct.linear``, ``tct.mean``
    and ``tct.scale``; :meth:`predictor` makes a model of them. Until stage 2 has changed the linear
    model, clients evaluate the network.

    A client is sent the network and the normaliser once, then only linear models. One that lost
    what it keeps says so and is sent it again; if its own c_k is lost, the corrections of all start
    again from zero. All clients that were ever seen count in c, each with the number of examples it
    told first: another number is refused. A node that tells no partition goes by its node id and is
    a new client after it registers anew, so give nodes a partition-id. The moments are those of
    the clients that answered in that one round: see ``min_completed``. Well-formed lies are not
    defended against: one false model, or false moments, stay in c or in the normaliser.

    Parameters
    ----------
    network : nn.Module
        The clients' architecture; its weights do not matter.
    bootstrap : Strategy, optional
        Flower strategy of stage 1, whose replies are one set of weights. None: stage 2 begins with
        the initial weights, such as those of a pre-trained network. It chooses among the nodes that
        this strategy samples. What a bad reply holds never reaches it.
    bootstrap_rounds : int
        T_1; without a bootstrap there are none.
    num_features : int
        p; 0 or more than the network has: all coordinates.
    features : {"entk", "last-layer"}
        Tangent features, or the last layer's inputs (Table 12).
    feature_seed : int
        Of the last layer's new weights and of the coordinates.
    head : str
        Name of the last linear layer; the last ``nn.Linear`` by default.
    normalise : bool
        Whether features get mean 0 and variance 1.
    bias : bool
        Whether the linear model has one (algorithm 2's b; eq. (1) has none).
    loss : {"mse", "cross-entropy"}
        Of stage 2; cross-entropy is TCT-CE (Table 11). Targets of least squares are one-hot minus
        1/C.
    optimizer : {"scaffold", "fedavg", "gd"}
        Of stage 2: SCAFFOLD; the same without a correction; gradient descent, one step a round.
    learning_rate : float
        eta of stage 2, of L_k = ||Z W - Y||^2 / (2 n_k). Steps diverge if eta times the largest
        eigenvalue of Z Z^T / n_k is above 2; the metric ``rate-times-lambda`` is the largest of
        the clients'. Without normalisation features are much smaller and larger rates fit: 0.01
        to 0.5 in the paper.
    local_steps : int
        M.
    solve : {"clients", "server"}
        ``"server"``, beyond the paper: clients send their features and labels in one exchange,
        float16 or compressed, and the server solves the ridge regression exactly. About 2 n p bytes
        up, and the server sees features from which inputs can be computed, and labels.
    ridge : float
        Of ``solve="server"``: see :func:`fedntk.ntk.ridge_regression`.
    sparsity, bits : float, int
        Compression of the features for ``solve="server"``, as in CP-NTK-FL; 0 and 32: none.
    device : torch.device or str
        Where the server solves.
    **fedavg_options
        Of :class:`SeededFedAvg` (seed, min_completed) and of Flower's FedAvg. All nodes are asked
        for moments or features, whatever ``fraction_train``.

    Raises
    ------
    ValueError
        If an argument is out of range or two do not fit together.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> strategy = TCT(network=network, bootstrap=FedAvg(), bootstrap_rounds=20)
    >>> strategy.shape
    (49, 3)
    """

    def __init__(
        self,
        *,
        network: nn.Module,
        bootstrap: Strategy | None = None,
        bootstrap_rounds: int = 100,
        num_features: int = 100_000,
        features: FeatureKind = "entk",
        feature_seed: int = 123,
        head: str = "",
        normalise: bool = True,
        bias: bool = False,
        loss: Loss = "mse",
        optimizer: ConvexOptimizer = "scaffold",
        learning_rate: float = 5e-5,
        local_steps: int = 500,
        solve: Literal["clients", "server"] = "clients",
        ridge: float = 1e-2,
        sparsity: float = 0.0,
        bits: int = UNQUANTISED,
        device: torch.device | str = "cpu",
        **fedavg_options: Any,
    ) -> None:
        super().__init__(**fedavg_options)
        for name, value, known in (
            ("optimizer", optimizer, get_args(ConvexOptimizer)),
            ("solve", solve, ("clients", "server")),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
        for name, number, least in (
            ("bootstrap_rounds", bootstrap_rounds, 0),
            ("local_steps", local_steps, 1),
        ):
            if number < least or number != int(number):
                raise ValueError(f"{name}: expected a whole number from {least}, got {number}")
        for name, positive in (("learning_rate", learning_rate), ("ridge", ridge)):
            if not 0 < positive < math.inf:
                raise ValueError(f"{name}: expected a finite number above 0, got {positive}")
        check_compression(sparsity, bits)
        if solve == "server" and loss != "mse":
            raise ValueError("solve='server' is for loss='mse', got loss='cross-entropy'")
        if solve == "clients" and (sparsity, bits) != (0.0, UNQUANTISED):
            raise ValueError("sparsity and bits go with solve='server', got solve='clients'")
        self.network = network
        self.bootstrap = None if bootstrap is None else Bootstrap(bootstrap, self)
        self.bootstrap_rounds = bootstrap_rounds if bootstrap is not None else 0
        self.feature_map = FeatureMap(features, num_features, feature_seed, head)
        _, last = self.feature_map.last_layer(network)
        self.width = self.feature_map.width(network)
        self.shape = (self.width + bias, last.out_features)
        self.normalise, self.solve, self.ridge = normalise, solve, ridge
        self.device = device
        self.task = ConvexTask(
            step="linear",
            key="",
            feature_map=self.feature_map,
            bias=bias,
            loss=check_loss(loss),
            learning_rate=learning_rate,
            steps=1 if optimizer == "gd" else local_steps,
            corrected=optimizer == "scaffold",
            sparsity=sparsity,
            bits=bits,
        )
        if self.bootstrap is not None:  # which must not wait for more nodes than it is shown
            self.min_available_nodes = max(self.min_available_nodes, self.bootstrap.waits_for)
        self._begin()

    def _begin(self) -> None:
        """Forget all rounds of stage 2."""
        self._prepared = False  # moments are known, or the problem is solved
        self._control = ControlVariate(self.task.steps * self.task.learning_rate)
        self._nodes = Nodes(self.partitions)
        self._lost = False

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        logger.log(
            INFO,
            "\t└──> TCT: %d rounds of %s, then %s on %d x %d weights (%s, eta %g, M %d)",
            self.bootstrap_rounds,
            type(self.bootstrap.strategy).__name__ if self.bootstrap else "a bootstrap",
            "steps" if self.solve == "clients" else "a solution on the server",
            *self.shape,
            self.task.loss,
            self.task.learning_rate,
            self.task.steps,
        )

    def predictor(self, arrays: ArrayRecord | Mapping[str, NDArray[Any]]) -> TCTModel:
        """Make the predictor of what :meth:`start` returned, or ``evaluate_fn`` was given."""
        named = {k: a.numpy() if isinstance(a, Array) else a for k, a in arrays.items()}
        return TCTModel.from_arrays(self.network, self.feature_map, named)

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return what later rounds depend on: c, and which c_k count. Clients keep these."""
        inner = {} if self.bootstrap is None else self.bootstrap.state_dict()
        return {
            **super().state_dict(),
            "prepared": self._prepared,
            **self._control.state_dict(),
            **{BOOTSTRAP + name: value for name, value in inner.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; clients are sent again what they need."""
        inner = {k.removeprefix(BOOTSTRAP): v for k, v in state.items() if k.startswith(BOOTSTRAP)}
        own = {k: v for k, v in state.items() if not k.startswith(BOOTSTRAP)}
        present = {k: None for k in self.state_dict() if k.startswith(BOOTSTRAP)}
        super().load_state_dict({**own, **present})
        self._prepared = bool(state["prepared"])
        self._control.load_state_dict(state)
        self._nodes.forget_all()
        if self.bootstrap is not None:
            self.bootstrap.load_state_dict(inner)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int) -> ArrayRecord:
        """Add the linear model and the normaliser to the network's arrays.

        After :meth:`load_state_dict` `initial_arrays` are all that the run had returned by then;
        otherwise others than the network's are not looked at, and a second run of one strategy
        object begins anew, but for what its bootstrap keeps.

        Raises
        ------
        ValueError
            If they are not those of the network, or not all that the state goes with.
        """
        expected = {k: tuple(t.shape) for k, t in self.network.state_dict().items()}
        found = {k: tuple(a.shape) for k, a in initial_arrays.items()}
        if {k: v for k, v in found.items() if k not in TCTModel.ARRAYS} != expected:
            odd = [k for k in {**found, **expected} if found.get(k) != expected.get(k)]
            raise ValueError(f"initial_arrays: not those of the network, differing in {odd[:5]}")
        if num_rounds <= self.bootstrap_rounds + (self.normalise and self.solve == "clients"):
            logger.log(
                WARNING,
                "num_rounds = %d end before stage 2, which begins after %d of stage 1",
                num_rounds,
                self.bootstrap_rounds,
            )
        if not self._rounds_loaded:
            self._begin()
        elif set(TCTModel.ARRAYS) <= initial_arrays.keys():
            return initial_arrays
        elif self._rounds_loaded > self.bootstrap_rounds:
            raise ValueError(
                f"initial_arrays: the loaded state goes with {', '.join(TCTModel.ARRAYS)}, too; "
                "pass all arrays that were returned with it"
            )
        zero, identity = np.zeros(self.shape, np.float32), Normaliser.identity(self.width)
        own = zip(TCTModel.ARRAYS, (zero, identity.mean, identity.inv_std), strict=True)
        return ArrayRecord({**self._network(initial_arrays), **{k: Array(a) for k, a in own}})

    # ---------------------------------------------------------------- sampling

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the network in stage 1, then what each sampled client lacks, and the task."""
        self.global_arrays, self.server_round = arrays, server_round
        bootstrap, step = self._stage_1(server_round), self._step()
        if self.fraction_train == 0.0 or (bootstrap is None and step is None):
            return []
        some = bootstrap is not None or step == "linear"
        fraction = self.fraction_train if some else 1.0
        minimum = max(self.min_train_nodes, self.min_completed)
        nodes = self.sample(grid, server_round, "train", fraction, minimum, self.held_out)
        config["server-round"] = server_round
        self._nodes.register(grid.get_node_ids())
        if bootstrap is not None:
            for key, value in replace(self.task, step="bootstrap").to_config().items():
                config[key] = value  # in round 1 clients say if they could not do that
            network = self._network(arrays)
            messages = bootstrap.messages(server_round, network, config, grid, nodes)
            return [sent for m in messages for sent in self._sealed(m, grid)]
        asked = replace(self.task, step=step or "linear", key=self._key())
        return [
            message
            for node in nodes
            for message in self._asked(
                self._task(asked, node, server_round), config, node, MessageType.TRAIN, grid
            )
        ]

    def _stage_1(self, server_round: int) -> Bootstrap | None:
        """Return the bootstrap strategy in the rounds that are its own."""
        return self.bootstrap if server_round <= self.bootstrap_rounds else None

    def _step(self) -> Literal["statistics", "features", "linear"] | None:
        """Return what comes next in stage 2; None where the problem is solved."""
        if self.solve == "server":
            return None if self._prepared else "features"
        return "statistics" if self.normalise and not self._prepared else "linear"

    def _sealed(self, message: Message, grid: Grid) -> Iterable[Message]:
        """Add a node's sealed seed to another strategy's message, where there is a key server."""
        if self._seeds is None:
            return [message]
        node = message.metadata.dst_node_id
        return self.messages(message.content, [node], MessageType.TRAIN, grid)

    def _task(self, asked: ConvexTask, node: int, server_round: int) -> ConvexTask:
        """Complete a task by what a node is to be sent for it."""
        if asked.step != "linear":
            return replace(asked, parts=tuple(self._nodes.lacks(node, "network")))
        client = self._nodes.client(node)
        control = self._control.source(client, server_round)
        state_round = self._control.round_of(client)
        parts = [*self._nodes.lacks(node, "network", "normaliser"), "linear"]
        parts += ["control"] if control == "sent" else []
        return replace(asked, parts=tuple(parts), state_round=state_round, control=control)

    def _asked(
        self, task: ConvexTask, config: ConfigRecord, node: int, message_type: str, grid: Grid
    ) -> Iterable[Message]:
        """Make the message that asks a node to do a task."""
        groups = {
            "network": list(self.network.state_dict()),
            "normaliser": [MEAN, SCALE],
            "linear": [LINEAR],
        }
        arrays = {n: self.global_arrays[n] for part in task.parts for n in groups.get(part, [])}
        if "control" in task.parts:
            arrays["tct.control"] = Array(self._control.value)
        record = RecordDict(
            {
                self.arrayrecord_key: ArrayRecord(arrays),
                self.configrecord_key: ConfigRecord({**config, **task.to_config()}),
            }
        )
        return self.messages(record, [node], message_type, grid)

    def _network(self, arrays: ArrayRecord) -> ArrayRecord:
        return ArrayRecord({name: arrays[name] for name in self.network.state_dict()})

    def _key(self) -> str:
        network = [array.numpy() for array in self._network(self.global_arrays).values()]
        return ConvexTask.key_of(self.feature_map, network)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the network, or the linear model once there is one."""
        self.global_arrays = arrays
        if not arrays[LINEAR].numpy().any():
            network = self._network(arrays)
            return super().configure_evaluate(server_round, network, config, grid)
        if self.fraction_evaluate == 0.0:
            return []
        nodes = self.sample(
            grid, server_round, "evaluate", self.fraction_evaluate, self.min_evaluate_nodes
        )
        config["server-round"] = server_round
        asked = replace(self.task, key=self._key())
        messages: list[Message] = []
        for node in nodes:
            task = self._task(asked, node, server_round)
            parts = tuple(part for part in task.parts if part != "control")
            task = replace(task, control="zero", parts=parts)
            messages += self._asked(task, config, node, MessageType.EVALUATE, grid)
        return messages

    # ------------------------------------------------------------- aggregation

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Do what the round is for with the replies."""
        bootstrap, step = self._stage_1(server_round), self._step()
        if bootstrap is not None:
            expected = {k: a.numpy() for k, a in self._network(self.global_arrays).items()}
            arrays, metrics = bootstrap.aggregate(server_round, replies, expected)
        elif step is None:
            return None, None
        elif step == "statistics":
            arrays, metrics = self._aggregate_moments(replies)
        elif step == "features":
            arrays, metrics = self._aggregate_features(replies)
        else:
            arrays, metrics = self._aggregate_linear(server_round, replies)
        self.train_metrics[server_round] = metrics
        return (None if arrays is None else self._with(arrays)), metrics

    def _aggregate_moments(self, replies: Iterable[Message]) -> tuple[Arrays | None, MetricRecord]:
        def parse(reply: Reply) -> Moments:
            arrays = self._own_arrays(reply)
            return Moments.from_arrays(arrays, reply.num_examples, self.width)

        pairs, metrics = self._answers(replies, parse, "network")
        if not self.enough(len(pairs)):
            return None, metrics
        self._prepared = True
        self._control.know({self._nodes.client(r.node): r.num_examples for r, _ in pairs})
        normaliser = Normaliser.of(Moments.join(moments for _, moments in pairs))
        metrics["features-constant"] = int((normaliser.inv_std == 0).sum())
        return {MEAN: normaliser.mean, SCALE: normaliser.inv_std}, metrics

    def _aggregate_features(self, replies: Iterable[Message]) -> tuple[Arrays | None, MetricRecord]:
        asked = UploadLimits({}, self.max_examples, self.task.sparsity, self.task.bits)

        def parse(reply: Reply) -> FeatureUpload:
            upload = FeatureUpload.from_arrays(
                self._own_arrays(reply), asked, width=self.width, num_outputs=self.shape[1]
            )
            if len(upload.labels) != reply.num_examples:
                raise BadReply(
                    "num-examples", f"claims {reply.num_examples}, sends {len(upload.labels)}"
                )
            return upload

        pairs, metrics = self._answers(replies, parse, "network")
        pairs = self._affordable(pairs, metrics)
        if not self.enough(len(pairs)):
            return None, metrics
        try:
            linear, normaliser = pooled_ridge(
                [upload for _, upload in pairs],
                self.shape[1],
                ridge=self.ridge,
                normalise=self.normalise,
                bias=self.task.bias,
                device=self.device,
            )
        except (ArithmeticError, RuntimeError, ValueError, MemoryError) as error:
            logger.log(WARNING, "no solution (%s): the model stays as it was", error)
            return None, metrics
        self._prepared = True
        return {LINEAR: linear, MEAN: normaliser.mean, SCALE: normaliser.inv_std}, metrics

    def _affordable(
        self, pairs: list[tuple[Reply, FeatureUpload]], metrics: MetricRecord
    ) -> list[tuple[Reply, FeatureUpload]]:
        """Leave out the largest uploads while a kernel of all examples would not fit."""
        kept, room = list(pairs), available_memory()
        while kept and 24 * sum(r.num_examples for r, _ in kept) ** 2 > room:
            largest = max(kept, key=lambda pair: pair[0].num_examples)
            kept.remove(largest)
            logger.log(
                WARNING,
                "dropped %d examples of node %d: a kernel with them does not fit in %.1f GB",
                largest[0].num_examples,
                largest[0].node,
                room / 1e9,
            )
        if dropped := len(pairs) - len(kept):
            metrics["rejected-too-large"] = dropped
            metrics["replies-accepted"] = len(kept)
            metrics["replies-rejected"] = int(metrics["replies-rejected"]) + dropped  # type: ignore[arg-type]
        return kept

    def _aggregate_linear(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        theta = self.global_arrays[LINEAR].numpy()
        rates: list[float] = []  # of clients whose steps overflow, too

        def parse(reply: Reply) -> NDArray[Any]:
            if "diverged" in reply.metrics:
                rates.extend(_rates(reply))
                raise BadReply("diverged", "its steps of stage 2 overflow")
            (linear,) = self._own_arrays(reply, 1)
            check_like(LINEAR, linear, theta)
            self._control.check(self._nodes.client(reply.node), reply.num_examples, theta, linear)
            return linear

        pairs, metrics = self._answers(replies, parse, "network", "normaliser")
        rates += [rate for reply, _ in pairs for rate in _rates(reply)]
        if rates:
            metrics["rate-times-lambda"] = max(rates)
            if max(rates) > 2:
                logger.log(
                    WARNING,
                    "stage 2: learning rate times largest eigenvalue over n is %.3g on a client; "
                    "above 2 its steps diverge: lower the learning rate",
                    max(rates),
                )
        if lost := self._lost:  # some c_k is no more, and c still holds it
            logger.log(WARNING, "a client lost its state: all corrections start again from zero")
            self._control.reset()
            self._lost = False
        if not self.enough(len(pairs)):
            return None, metrics
        counts = [reply.num_examples for reply, _ in pairs]
        mean = weighted_mean([{LINEAR: linear} for _, linear in pairs], counts)[LINEAR]
        mean = np.asarray(mean, np.float32)
        own = {self._nodes.client(r.node): (r.num_examples, linear) for r, linear in pairs}
        everyone = self._nodes.clients() - set(self.held_out)
        if self.task.corrected and not lost:
            self._control.update(server_round, theta, mean, own, everyone)
        return {LINEAR: mean}, metrics

    def _answers(
        self, replies: Iterable[Message], parse: Any, *parts: str
    ) -> tuple[list[tuple[Reply, Any]], MetricRecord]:
        """Check replies of stage 2, and note which parts each node now holds."""
        replies = list(replies)
        self._nodes.forget_failed(replies)
        pairs, rejected = self.accepted(replies, parse)
        self._nodes.now_hold((reply.node for reply, _ in pairs), *parts)
        return pairs, self.round_metrics([reply for reply, _ in pairs], rejected)

    def _own_arrays(self, reply: Reply, count: int | None = None) -> list[NDArray[Any]]:
        """Return a reply's arrays; BadReply if the client has lost what it was to use."""
        if "lost-state" in reply.metrics:
            self._nodes.forget(reply.node)
            had = self._control.round_of(self._nodes.client(reply.node)) > 0
            self._lost |= had and reply.metrics["lost-state"] == 1
            raise BadReply("lost-state", "the client no longer has what it was sent")
        arrays = list(reply.arrays().values())
        if count is not None and len(arrays) != count:
            raise BadReply("arrays", f"expected {count}, got {len(arrays)}")
        return arrays

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the metrics, and note who has the network; who failed is sent it again."""
        replies = list(replies)
        self._nodes.forget_failed(replies)
        metrics = super().aggregate_evaluate(server_round, replies)
        if self.global_arrays[LINEAR].numpy().any():
            good = [n for n, k in self.partitions.items() if k in self.client_evaluations]
            self._nodes.now_hold(good, "network", "normaliser")
        return metrics

    def _with(self, arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
        """Return all arrays, some of them new."""
        return ArrayRecord(
            {k: Array(arrays[k]) if k in arrays else a for k, a in self.global_arrays.items()}
        )


def _rates(reply: Reply) -> list[float]:
    rate = reply.metrics.get("rate-times-lambda")
    return [rate] if isinstance(rate, int | float) and rate >= 0 else []
