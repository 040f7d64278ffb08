"""Client of FedDyn: local SGD on its loss and the dynamic regulariser.

Source: Acar et al., *Federated Learning Based on Dynamic Regularization*, ICLR 2021, eq. (1), up to
a constant, with c = w + g_k / alpha, which the server sends; the minimum is approached by SGD:

    min over v of  L_k(v) + (alpha / 2) ||v - c||^2
"""

import torch

from fedntk.ntk.payloads import wire

from .core.local_sgd import Adjust, proximal_term, trained_parameters
from .core.weights import Config, Fit, Parameters, Record, get_weights
from .sgd import SGDClient


class FedDynClient(SGDClient):
    """Trains the received weights, pulled to the record ``proximal-centre``, or to themselves.

    alpha comes as ``proximal-mu`` of the configuration. The client keeps nothing.
    """

    strategy = "FedDyn"

    def check(self) -> None:
        """Refuse what has no place in FedDyn."""
        self.sgd.refuse_proximal_term("FedDyn's is the strategy's pull")

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train from the received weights; the metric ``train-loss`` has no regulariser."""
        records = dict(getattr(parameters, "records", {}))
        sent = records.pop(wire.PROXIMAL_CENTRE, None)
        weights = [*next(iter(records.values())).values()] if records else parameters
        examples = self.training_examples(config)
        if sent is None:
            loss = self.sgd.train(self, weights, *examples, config)
        else:
            adjust = self._pulled_to(sent, float(config[wire.PROXIMAL_MU]))
            loss = self.sgd.descend(self, weights, *examples, config, adjust)
        return get_weights(self.model), len(examples[0]), {wire.TRAIN_LOSS: loss}

    def _pulled_to(self, sent: Record, pull: float) -> Adjust:
        """Check the centre; return what adds pull (v - c) to gradients."""
        trained = trained_parameters(self.model)
        shapes = {n: sent[n].shape == tuple(p.shape) for n, p in trained.items() if n in sent}
        if wrong := [name for name in trained if not shapes.get(name)]:
            raise ValueError(
                f"{wire.PROXIMAL_CENTRE}: expected an array for each parameter that is trained, "
                f"differing in {wrong[:5]}; the strategy's network must be the client's"
            )
        centre = {name: torch.from_numpy(sent[name].copy()) for name in trained}
        return proximal_term(trained, pull, centre)
