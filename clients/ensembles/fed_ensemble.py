"""Client of Fed-ensemble: that of the inner method, which evaluates all models together.

Source: Shi et al., *Fed-ensemble*, 2021, section 3.1: "after the training process is done, all K
modes are sent to the client".
"""

from typing import Any

from fedntk.ntk import EnsemblePredictor
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays

from ..core.base import ModelClient
from ..core.numpy_client import NumPyClient
from ..core.weights import Config, Evaluation, NamedArrays, Parameters


class FedEnsembleClient(NumPyClient):
    """Trains one model as the `client` within does, and evaluates the whole ensemble.

    The `client` is that of the inner strategy, such as an :class:`~fedntk.clients.SGDClient`.
    """

    def __init__(self, client: ModelClient) -> None:
        self.client = client
        for name in ("fit", "get_parameters", "get_properties"):  # which NumPyClient has as well
            setattr(self, name, getattr(client, name))

    def __getattr__(self, name: str) -> Any:
        """Give what else the client within has, such as ``identify`` and ``query``."""
        if name == "client":  # not made yet, as in copying
            raise AttributeError(name)
        return getattr(self.client, name)

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Evaluate the ensemble, and its single models: see :class:`EnsemblePredictor`."""
        x, targets = self.client.test_examples(config)
        predictor = self.predictor(parameters, config)
        predictor.metrics = self.client.metrics or {}
        evaluated = predictor.evaluate(x, targets.argmax(1))
        return evaluated.loss, len(x), {"accuracy": evaluated.score, **evaluated.more}

    def predictor(self, parameters: Parameters, config: Config) -> EnsemblePredictor:
        """Make the ensemble that a message for evaluation brings."""
        records = parameters.records if isinstance(parameters, NamedArrays) else {}
        if not EnsembleArrays.are_in(records):
            raise ValueError(
                f"expected the records of several models, such as model-0.arrays, from the "
                f"strategy FedEnsemble, got {', '.join(records) or 'none'}"
            )
        predictors = []
        for k, model in enumerate(EnsembleArrays.from_arrays(records).models):
            names = [name for name in config if name.startswith(f"model-{k}.")]
            specific = {name.removeprefix(f"model-{k}."): config[name] for name in names}
            predictors.append(self.client.predictor(NamedArrays(model), config | specific))
        return EnsemblePredictor(predictors)
