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
from fedntk.ntk.features.fourier import one_by_one
from fedntk.ntk.features.residual import RESIDUAL_LAYER, ResidualFeatures
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_statistics import SECURE_STEPS, FeatureStatistics, SumFormat
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.payloads.split_statistics import SplitStatistics
from fedntk.ntk.payloads.sum_task import SumTask

from ..core.feature_sums import Sums, SumsClient, fixed_point_in
from ..core.masking import Arrays
from ..core.named_arrays import NamedArrays
from ..core.privacy_ledger import Release
from ..core.weights import Config, Evaluation, Fit, Parameters, get_weights, set_weights

Records = dict[str, Arrays]
BESIDE = ("steps", "secure-sum", "total")  # records beside the network's


class ClosedFormClient(SumsClient):
    """Sends sums over what the last layer is given, by the received weights; it trains nothing.

    It keeps nothing from one message to the next, except for the keys of a secure sum and its
    owner's ledger. In memory are features of `batch_size_eval` examples, and 8 p^2 bytes for
    p features if their Gram matrix is asked for.
    """

    strategy = "ClosedFormStrategy"
    replies = "sums of features"
    config_keys = frozenset({RESIDUAL_LAYER, *FeatureMap("last-layer").to_config()})

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Sum up the features of the round's examples.

        The arrays are those of FeatureStatistics, or of SplitStatistics if a share is held out;
        masked words of these, and what goes before and after them; or, if no Gram matrix is asked
        for, those of Prototypes. The network's
        :class:`~fedntk.ntk.features.residual.ResidualFeatures` may add a layer's random features.
        The metric ``train-loss`` is the received network's. With noise asked for, one example is
        reported, and no loss.
        """
        task, records = SumTask.of_message(config), dict(getattr(parameters, "records", {}))
        step = "class means" if task is None else task.step
        private = task is not None and task.epsilon > 0
        self.require_masked(step, SECURE_STEPS, noisy=private)
        if private:
            self.require_covered(SumNoise)
        if task is not None and private and step == "statistics":
            name = f"sums of {task.run_key[:64]} by {self._name(config)}"
            self.reserve(name, task, config)  # a trusted server may ask again
        x, targets = self.training_examples(config)
        count = 1 if private else len(x)
        if task is not None and 0 < task.client_examples < len(x):
            generator = np.random.default_rng([*self.seed, *b"drawn"])
            drawn = torch.from_numpy(generator.choice(len(x), task.client_examples, replace=False))
            x, targets = x[drawn], targets[drawn]
        if task is not None and step in SECURE_STEPS and step != "masked":
            return NamedArrays({"arrays": self.answer_sum(step, task, records, config)}), count, {}
        weights, beside = self._load_network(parameters)
        sums, fixed_point, train_loss = self._sum_up(task, x, targets, beside, config)
        if task is None:
            arrays: Arrays = sums.to_arrays()
        elif step == "masked":
            message = beside["secure-sum"]
            sums = self.add_noise(sums, task, message, config) if private else sums
            key = ConvexTask.key_of(FeatureMap.from_config(config), weights)
            arrays = self.mask(sums, task, message, config, key=key, fixed_point=fixed_point)
        else:
            arrays = sums.to_arrays(fixed_point, packed=private)  # one size for any n
        return NamedArrays({"arrays": arrays}), count, {} if private else {"train-loss": train_loss}

    def _sum_up(
        self, task: SumTask | None, x: Tensor, targets: Tensor, beside: Records, config: Config
    ) -> tuple[Any, FixedPoint | None, float]:
        """Return sums or class means, how features are rounded, and the received network's loss."""
        feature_map, num_classes = FeatureMap.from_config(config), targets.shape[1]
        feature_map.require_outputs(self.model, num_classes)
        both, noisy = feature_map.extractor_with_outputs(self.model), bool(task and task.epsilon)
        size = 1 if noisy else self.batch_size_eval
        width, layer = feature_map.width(self.model), config.get(RESIDUAL_LAYER)
        outputs, seen = list[Tensor](), list[Tensor]()  # scores, and their targets
        if layer is not None:
            _, blocks = ResidualFeatures.find(self.model, width)
            width += blocks.directions.shape[2]

        def features(part: Tensor) -> Tensor:
            with one_by_one() if noisy else nullcontext():  # so a row depends on no other example
                z, scores = both(part)
            outputs.append(scores)
            z = z if layer is None else blocks.beside(z, int(layer))
            return bound_rows(z, task.radius) if task is not None and noisy else z

        def in_chunks(chosen: Tensor | slice) -> Iterator[Tensor]:
            seen.append(targets[chosen])
            return map(features, x[chosen].split(size))

        fixed_point = None
        if noisy:
            both(x[:16])  # is the network a function of one example?
        if task is None:
            seen.append(targets)
            found: Any = Prototypes.of(features, x, targets.argmax(1), num_classes)
        else:
            fixed_point, share = fixed_point_in(beside, task.bits, width), task.validation_share
            if noisy:  # whatever the server says
                fixed_point = FixedPoint(np.ones(width, np.float32), task.bits)
            found = self.add_up(in_chunks, targets, width, share=share, fixed_point=fixed_point)
        return found, fixed_point, loss_value(torch.cat(outputs), torch.cat(seen), self.loss)

    def release_of(self, task: SumTask, config: Mapping[str, Any]) -> Release:
        """Return the sums of a run, with their epsilon and delta if they have noise."""
        if not task.epsilon:
            return super().release_of(task, config)
        return Release(task.run_key[:64], task.epsilon, task.delta)

    def owned_examples(self, task: SumTask) -> Any:
        """Return the training examples, or None if the noise is of the whole client."""
        return None if task.client_examples else super().owned_examples(task)

    def add_noise(self, sums: Sums, task: SumTask, parcels: Arrays, config: Config) -> Sums:
        """Add this client's share of the noise.

        Shares are sized for the fewest clients who can open the sum, as agreed on among them.
        """
        if not isinstance(sums, FeatureStatistics):
            raise ValueError("epsilon: expected validation_share = 0, got held-out sums as well")
        quorum = self.secure_sum(task, config).quorum(parcels)
        noise = SumNoise.of(task, sums.width, len(sums.counts), quorum)
        return noise.add(sums, np.random.default_rng(secrets.randbits(256)))

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Loss and accuracy on the local test examples.

        If the sums over all clients come with the network, it is a model of the client's own that
        is evaluated, and the metric ``personal-weight`` is w of
        :func:`~fedntk.ntk.convex.pooled_statistics.personal_model`.
        """
        task = SumTask.of_message(config)
        if task is not None and task.epsilon:
            self.require_test_examples()
        metrics = self._load_own_network(parameters, config)
        loss, num_examples, found = super().evaluate(get_weights(self.model), config)
        return loss, num_examples, {**found, **metrics}

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of the network that the client would evaluate."""
        self._load_own_network(parameters, config)
        return super().predictor(get_weights(self.model), config)

    def _load_network(self, parameters: Parameters) -> tuple[Parameters, Records]:
        """Load the received network; return its weights, and the records beside it."""
        records = dict(getattr(parameters, "records", {}))
        beside = {name: records.pop(name, {}) for name in BESIDE}
        named = [array for record in records.values() for array in record.values()]
        weights = named or parameters
        set_weights(self.model, weights)
        return weights, beside

    def _load_own_network(self, parameters: Parameters, config: Config) -> dict[str, float]:
        """Load the received network, with a last layer of the client's own if sums came with it.

        The client's sums are formed anew, from the same examples as before if neither
        `sampling_rate` nor augmentation draws others for this round.
        """
        _, beside = self._load_network(parameters)
        if not beside["total"]:
            return {}
        if self.is_private:
            raise ValueError(
                "this client promises what its messages tell of its sums, and a model of its own "
                "is computed from the exact ones; have the strategy set personal = False"
            )
        task, (x, targets) = SumTask.from_config(config), self.training_examples(config)
        own, fixed, _ = self._sum_up(task, x, targets, beside, config)
        _, layer = FeatureMap.from_config(config).last_layer(self.model)
        expected = SumFormat(layer.in_features, targets.shape[1], None, fixed)
        total = SplitStatistics.from_arrays(beside["total"], expected)
        if fixed is not None:
            own, total = own.scaled(fixed), total.scaled(fixed)
        linear, weight = personal_model(total, own, task.ridge, bias=layer.bias is not None)
        with torch.no_grad():
            layer.weight.copy_(linear[: layer.in_features].T)
            if layer.bias is not None:
                layer.bias.copy_(linear[layer.in_features])
        return {"personal-weight": weight}
