"""Client of methods that compute a network's last layer in closed form: it sends sums of features.

What it gives away: sums over all of the client's examples. Those of one example are its features,
and those of few hold them. The number of examples of each class is sent as well.
"""

import torch
from torch import Tensor

from fedntk.ntk import FeatureMap, loss_value
from fedntk.ntk.payloads import FEATURE_GRAM, FeatureStatistics, Prototypes

from ..core.base import ModelClient
from ..core.named_arrays import NamedArrays
from ..core.weights import Config, Fit, Parameters, set_weights


class ClosedFormClient(ModelClient):
    """Sends sums over what the last layer is given, by the received weights; it trains nothing.

    It keeps nothing from one message to the next. In memory are features of `batch_size_eval`
    examples, and 12 p^2 bytes for p features if their Gram matrix is asked for.
    """

    strategy = "ClosedFormStrategy"
    replies = "sums of features"
    config_keys = frozenset({FEATURE_GRAM, *FeatureMap("last-layer").to_config()})

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Sum up the features of the round's examples.

        The arrays are those of :class:`~fedntk.ntk.payloads.FeatureStatistics`, or of
        :class:`~fedntk.ntk.payloads.Prototypes` if no Gram matrix is asked for. The metric
        ``train-loss`` is the received network's.
        """
        set_weights(self.model, parameters)
        feature_map = FeatureMap.from_config(config)
        x, targets = self.training_examples(config)
        num_classes = targets.shape[1]
        feature_map.require_outputs(self.model, num_classes)
        both, labels = feature_map.extractor_with_outputs(self.model), targets.argmax(1)
        outputs: list[Tensor] = []

        def features(part: Tensor) -> Tensor:
            z, scores = both(part)
            outputs.append(scores)
            return z

        if config.get(FEATURE_GRAM, False):
            chunks = map(features, x.split(self.batch_size_eval))
            arrays = FeatureStatistics.of(chunks, labels, num_classes).to_arrays()
        else:
            arrays = Prototypes.of(features, x, labels, num_classes).to_arrays()
        train_loss = loss_value(torch.cat(outputs), targets, self.loss)
        return NamedArrays({"arrays": arrays}), len(x), {"train-loss": train_loss}
