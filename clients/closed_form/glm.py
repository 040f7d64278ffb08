"""Client of linear and logistic regression: it sends sums for steps of Newton.

What it gives away: sums over all of its examples, with their number. Those of few examples hold
them: mask sums, so that the server sees only the total.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fedntk.ntk import FeatureMap, loss_value
from fedntk.ntk.features.feature_map import record_input
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.masked_average import average_digest
from fedntk.ntk.payloads.newton_sums import NewtonSums, NewtonTask

from ..core.feature_sums import SumsClient
from ..core.secure_sum import Arrays
from ..core.weights import Config, Fit, NamedArrays, Parameters, Scalar


class GLMClient(SumsClient):
    """Adds up over the last layer's inputs, at the received weights; it trains nothing.

    Sums are float64. Give it a network in float64, as ``nn.Linear(p, C).double()``, and its
    examples as well: float32 rounds them.
    """

    strategy = "GLM"
    replies = "sums of a step of Newton"
    config_keys = frozenset(FeatureMap("last-layer").to_config())
    usual_step = "newton"
    task_kind = NewtonTask
    takes_real_targets = True

    def require_permitted_step(self, step: str, config: Mapping[str, Any]) -> None:
        """Refuse sums that are not masked, as a private client."""
        self.secure.require_masked(step)

    def reported_examples(self, task: NewtonTask) -> int:
        """Return the number of training examples."""
        return self.num_examples

    def step_newton(self, parameters: Parameters, config: Config) -> Fit:
        """Return the arrays of NewtonSums."""
        sums, metrics, _ = self._sum_up(parameters, config)
        return NamedArrays({"arrays": sums.to_arrays()}), sums.num_examples, metrics

    def step_masked(self, parameters: Parameters, config: Config) -> Fit:
        """Return the masked words of the same sums."""
        sums, metrics, message = self._sum_up(parameters, config)
        request = self.sum_request(NewtonTask.from_config(config), config)
        about = average_digest(
            self.model_weights(), request.task.run_key, int(config.get("server-round", 0))
        )
        arrays = self.secure.mask(sums.to_words(), about, request, message)
        return NamedArrays({"arrays": arrays}), sums.num_examples, metrics

    def _sum_up(
        self, parameters: Parameters, config: Config
    ) -> tuple[NewtonSums, dict[str, Scalar], Arrays]:
        _, records = self.load_network(parameters)
        family, feature_map = NewtonTask.from_config(config).family, FeatureMap.from_config(config)
        (x, targets), (_, layer) = (
            self.training_examples(config),
            feature_map.last_layer(self.model),
        )
        feature_map.require_outputs(self.model, targets.shape[1])
        if self.real_targets != (family == "gaussian"):
            raise ValueError(
                f"real_targets: expected {family == 'gaussian'} for family = {family}, got "
                f"{self.real_targets}; give strategy and clients the same"
            )
        coefficients = layer.weight.detach().T
        if layer.bias is not None:
            coefficients = torch.cat([coefficients, layer.bias.detach()[None]])
        if family == "multinomial":
            coefficients = coefficients[:, 1:] - coefficients[:, :1]
        parts, outputs = list[NewtonSums](), list[torch.Tensor]()
        size = self.batch_size_eval
        for batch, y in zip(x.split(size), targets.split(size), strict=True):
            with torch.no_grad(), record_input(layer, len(batch)) as seen:
                outputs.append(self.model.eval()(batch.to(self.device, copy=True)).cpu())
            rows = seen[0].double().cpu()
            if layer.bias is not None:
                rows = torch.cat([rows, torch.ones(len(rows), 1).double()], 1)
            y = y[:, 1:] if family == "multinomial" else y
            parts.append(NewtonSums.of(rows, y, coefficients.cpu(), family))
        loss = loss_value(torch.cat(outputs), targets, self.loss)
        return NewtonSums.join(parts), {wire.TRAIN_LOSS: loss}, records[wire.SECURE_SUM]
