"""Client of methods that compute a network's last layer in closed form: it sends sums of features.

What it gives away: see :mod:`fedntk.clients.core.feature_sums`.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedntk.ntk import FeatureMap, Predictor, loss_value
from fedntk.ntk.convex.pooled_statistics import personal_model
from fedntk.ntk.convex.private_sums import SumNoise, bound_rows
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.features.layers import RESIDUAL_LAYER, ResidualFeatures, one_by_one
from fedntk.ntk.options import argument, read_task
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumFormat, sums_digest
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.payloads.row_change import COUNTED, NEW, WORDS, RowChange
from fedntk.ntk.payloads.split_statistics import SplitStatistics
from fedntk.ntk.payloads.sum_task import SumTask

from ..core.base import sample_size
from ..core.counted_rows import CountedRows, told_to_owner
from ..core.feature_sums import Records, SumsClient
from ..core.weights import Config, Evaluation, Fit, NamedArrays, Parameters, Scalar

Metrics = dict[str, Scalar]


class ClosedFormClient(SumsClient):
    """Sends sums over what the last layer is given, by the received weights; it trains nothing.

    It keeps nothing but the keys of a secure sum, its owner's ledger and counted rows. In memory
    are features of `batch_size_eval` examples, and 8 p^2 bytes for p features if their Gram matrix
    is asked for. The network's :class:`~fedntk.ntk.features.layers.ResidualFeatures` may add a
    layer's random features. ``train-loss`` is the received network's. With noise, and of changes,
    no loss and one example go out.
    """

    strategy = "ClosedFormStrategy"
    replies = "sums of features"
    config_keys = frozenset({RESIDUAL_LAYER, COUNTED, NEW, *FeatureMap("last-layer").to_config()})
    usual_step = "class-means"
    takes_real_targets = True  # but for the classes' means
    task_kind = SumTask

    rows: CountedRows | None = argument(
        "which of the training examples count, so that the owner can delete and add some; needed "
        "if the strategy has changes",
        default=None,
    )

    def check(self) -> None:
        """Refuse rows that are drawn anew."""
        if self.rows is not None and self.sampling_rate < 1:
            raise ValueError(f"sampling_rate: expected 1 with rows, got {self.sampling_rate}")

    def _examples(self, config: Config) -> tuple[Tensor, Tensor]:
        """Return the training examples that count, and their targets."""
        if self.rows is None:
            return self.training_examples(config)
        chosen, _ = self._counted(self.rows)
        if not len(chosen):
            raise ValueError(
                "rows: none of this client's counts; only a strategy with changes has use for it"
            )
        return self._chosen(chosen, config)

    def _counted(self, rows: CountedRows) -> tuple[Tensor, list[bytes]]:
        """Return the places of the examples that count, and their digests."""
        examples = self.raw_examples()
        with told_to_owner():
            places, digests = rows.select(*examples)
        return places, digests

    def _chosen(self, rows: Tensor, config: Config) -> tuple[Tensor, Tensor]:
        return self.project(self.inputs[rows], config), self.targets[rows]

    def require_permitted_step(self, step: str, config: Mapping[str, Any]) -> None:
        """Refuse sums that are neither masked nor have noise, and noise that does not cover."""
        task = read_task(SumTask, config)
        noisy = task is not None and task.epsilon > 0
        if noisy and self.real_targets:
            raise ValueError("real_targets: the noise of sums is of classes; expected epsilon = 0")
        self.secure.require_masked(step, noisy=noisy)
        if noisy:
            self.require_covered(SumNoise)

    def step_class_means(self, parameters: Parameters, config: Config) -> Fit:
        """Return the arrays of Prototypes: each class's mean features."""
        if self.real_targets:
            raise ValueError("real_targets: they have no classes' means; use one exchange of sums")
        x, targets = self._examples(config)
        self.load_network(parameters)
        features = _Features(self, targets, config)
        means = Prototypes.of(features, x, targets.argmax(1), targets.shape[1])
        reply = NamedArrays({"arrays": means.to_arrays()})
        return reply, len(x), {wire.TRAIN_LOSS: features.loss(targets)}

    def step_statistics(self, parameters: Parameters, config: Config) -> Fit:
        """Return the arrays of FeatureStatistics, or of SplitStatistics with a held-out share."""
        task = SumTask.from_config(config)
        if task.changes:
            change, *_ = self._change(task, parameters, config)
            return NamedArrays({"arrays": {WORDS: change.to_words()}}), 1, {}
        if task.epsilon:  # a trusted server may ask again
            request = self.sum_request(task, config)
            self.secure.reserve(request, f"sums of {task.run_key[:64]} by {request.client}")
        examples = self._examples(config)
        _, records = self.load_network(parameters)
        packed = task.epsilon > 0  # one size for any n
        sums, fixed_point, metrics = self._sum_up(
            task, examples, records, config, as_root=not packed
        )
        reply = NamedArrays({"arrays": sums.to_arrays(fixed_point, packed=packed)})
        return reply, self.reported_examples(task), metrics

    def step_masked(self, parameters: Parameters, config: Config) -> Fit:
        """Return the masked words of the same sums, or of what changed in them."""
        task = SumTask.from_config(config)
        if task.changes:
            change, about, records = self._change(task, parameters, config)
            request, message = self.sum_request(task, config), records[wire.SECURE_SUM]
            masked = self.secure.mask(change.to_words(), about, request, message)
            return NamedArrays({"arrays": masked}), 1, {}
        examples = self._examples(config)
        weights, records = self.load_network(parameters)
        sums, fixed_point, metrics = self._sum_up(task, examples, records, config)
        request, message = self.sum_request(task, config), records[wire.SECURE_SUM]
        if task.epsilon:  # a share for the fewest clients who can open the sum
            if not isinstance(sums, FeatureStatistics):
                raise ValueError(
                    "epsilon: expected validation_share = 0, got held-out sums as well"
                )
            quorum = self.secure.secure_sum(request).quorum(message)
            noise = SumNoise.of(task, sums.width, len(sums.counts), quorum)
            sums = noise.add(sums, np.random.default_rng(secrets.randbits(256)))
        key = ConvexTask.key_of(FeatureMap.from_config(config), weights)
        how: Any = {"key": key, "fixed_point": fixed_point, "weights": task.example_weights}
        arrays = self.mask_sums(sums, request, message, **how)
        return NamedArrays({"arrays": arrays}), self.reported_examples(task), metrics

    def reported_examples(self, task: SumTask) -> int:
        """Return the number of the round's examples; 1 with noise, and of changes."""
        if task.epsilon or task.changes:
            return 1
        if self.rows is not None:
            return len(self._counted(self.rows)[0])
        return sample_size(self.num_examples, self.sampling_rate)

    def _change(
        self, task: SumTask, parameters: Parameters, config: Config
    ) -> tuple[RowChange, bytes, Records]:
        """Return how the sums changed, what its words are about, and the message's records."""
        if self.rows is None:
            raise ValueError(
                "rows: the strategy has changes, and this client does not know which of its rows "
                "count; make it with rows=CountedRows(folder)"
            )
        chosen, digests = self._counted(self.rows)
        examples = self._chosen(chosen, config)
        weights, records = self.load_network(parameters)
        sums, fixed_point, _ = self._sum_up(task, examples, records, config)
        words = sums.to_words(np.uint64)
        names = str(config[COUNTED]), str(config[NEW])
        with told_to_owner():
            change = self.rows.change(task.run_key, names, words, digests)
        key = ConvexTask.key_of(FeatureMap.from_config(config), weights)
        about = sums_digest(key, fixed_point, words.dtype, task.example_weights)
        return change, about, records

    def _sum_up(
        self,
        task: SumTask,
        examples: tuple[Tensor, Tensor],
        records: Records,
        config: Config,
        *,
        as_root: bool = False,
    ) -> tuple[Any, FixedPoint | None, Metrics]:
        x, targets = examples
        if 0 < task.client_examples < len(x):  # more than the noise of a whole client covers
            generator = np.random.default_rng([*self.seed, *b"drawn"])
            drawn = generator.choice(len(x), task.client_examples, replace=False)
            x, targets = x[drawn], targets[drawn]
        features = _Features(self, targets, config, task.radius if task.epsilon else 0)
        if task.epsilon:  # whatever the server says
            features.extract(x[:16])  # refuses outputs that are no function of one example
            ones = np.ones(features.width, np.float32)
            fixed_point: FixedPoint | None = FixedPoint(ones, task.bits)
        else:
            fixed_point = self.fixed_point_in(records, task.bits, features.width)
        size = 1 if task.epsilon else self.batch_size_eval
        order = list[Tensor]()  # targets in the order of the outputs

        def in_chunks(chosen: Tensor | slice) -> Iterator[Tensor]:
            order.append(targets[chosen])
            return map(features, x[chosen].split(size))

        how: Any = {"share": task.validation_share, "weights": task.example_weights}
        how |= {"fixed_point": fixed_point, "as_root": as_root}
        sums = self.add_up(in_chunks, targets, features.width, **how)
        if task.epsilon or task.changes:
            return sums, fixed_point, {}
        return sums, fixed_point, {wire.TRAIN_LOSS: features.loss(torch.cat(order))}

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Loss and accuracy on the local test examples.

        With sums over all clients, it is of the client's own model: ``personal-weight`` is the w of
        :func:`~fedntk.ntk.convex.pooled_statistics.personal_model`.
        """
        task = read_task(SumTask, config)
        if task is not None and task.epsilon:
            self.require_test_examples()
        personal = self._load_personal_network(parameters, config)
        loss, num_examples, metrics = self.evaluate_model(config)
        return loss, num_examples, {**metrics, **personal}

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of the network that the client would evaluate."""
        self._load_personal_network(parameters, config)
        return self.network_predictor(self.get_parameters(config))

    def _load_personal_network(self, parameters: Parameters, config: Config) -> Metrics:
        """Load the received network, with a last layer of the client's own if sums came with it."""
        _, records = self.load_network(parameters)
        if not records[wire.TOTAL]:
            return {}
        if self.is_private:
            raise ValueError(
                "this client promises what its messages tell of its sums, and a model of its own "
                "is computed from the exact ones; have the strategy set personal = False"
            )
        task, examples = SumTask.from_config(config), self._examples(config)
        sums, fixed_point, _ = self._sum_up(task, examples, records, config)
        _, layer = FeatureMap.from_config(config).last_layer(self.model)
        num_classes = examples[1].shape[1]
        expected = SumFormat(layer.in_features, num_classes, task.example_weights, fixed_point)
        total = SplitStatistics.from_arrays(records[wire.TOTAL], expected)
        if fixed_point is not None:
            sums, total = sums.scaled(fixed_point), total.scaled(fixed_point)
        linear, weight = personal_model(total, sums, task.ridge, bias=layer.bias is not None)
        with torch.no_grad():
            layer.weight.copy_(linear[: layer.in_features].T)
            if layer.bias is not None:
                layer.bias.copy_(linear[layer.in_features])
        return {"personal-weight": weight}


class _Features:
    """Maps examples to rows of features, and remembers the outputs met on the way.

    With a `radius` rows are bounded, and each depends on its own example only.
    """

    def __init__(
        self, client: ClosedFormClient, targets: Tensor, config: Config, radius: int = 0
    ) -> None:
        feature_map = FeatureMap.from_config(config)
        feature_map.require_outputs(client.model, targets.shape[1])
        self.extract = feature_map.extractor_with_outputs(client.model)
        self.width, self.radius = feature_map.width(client.model), radius
        self.layer, self.loss_kind = config.get(RESIDUAL_LAYER), client.loss
        if self.layer is not None:
            _, self.blocks = ResidualFeatures.find(client.model, self.width)
            self.width += self.blocks.directions.shape[2]
        self.outputs = list[Tensor]()

    def __call__(self, x: Tensor) -> Tensor:
        with one_by_one() if self.radius else nullcontext():
            rows, scores = self.extract(x)
        self.outputs.append(scores)
        if self.layer is not None:
            rows = self.blocks.beside(rows, int(self.layer))
        return bound_rows(rows, self.radius) if self.radius else rows

    def loss(self, targets: Tensor) -> float:
        """Return the loss of the outputs so far, whose targets are given in their order."""
        return loss_value(torch.cat(self.outputs), targets, self.loss_kind)
