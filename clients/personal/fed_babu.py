"""Client of FedBABU: it trains the body, and its head only to predict.

Source: Oh, Kim and Yun, *FedBABU: Toward Enhanced Representation for Federated Image
Classification*, ICLR 2022, algorithm 1, and section 5.2 for the fine-tuning of heads.
"""

from fedntk.ntk import Predictor
from fedntk.ntk.options import option
from fedntk.ntk.parts import head_arrays
from fedntk.ntk.payloads import wire

from ..core.local_sgd import only_trained
from ..core.weights import Config, Evaluation, Fit, Parameters, get_weights, set_weights
from ..sgd import SGDClient


class FedBABUClient(SGDClient):
    """Trains all but the head; evaluates the received weights with a head that it fine-tunes."""

    strategy = "FedBABU"

    head: str = option("layer that is fixed; the last linear one by default", default="")
    head_epochs: int = option(
        "passes over the training examples that fine-tune the head for each evaluation; 0: none",
        default=5,
        at_least=0,
    )

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train the body as :class:`SGDClient` trains all."""
        with only_trained(self.model, self.model.state_dict().keys() - self._head()):
            x, targets = self.training_examples(config)
            loss = self.sgd.train(self, parameters, x, targets, config)
        return get_weights(self.model), len(x), {wire.TRAIN_LOSS: loss}

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Fine-tune the head on the training examples, and evaluate on the client's own."""
        set_weights(self.model, self._fine_tuned(parameters, config))
        return self.evaluate_model(config)

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of the network with the head fine-tuned."""
        return self.network_predictor(self._fine_tuned(parameters, config))

    def _head(self) -> set[str]:
        return set(head_arrays(self.model, self.head))

    def _fine_tuned(self, parameters: Parameters, config: Config) -> Parameters:
        """Return the weights with the head trained; statistics of the body as received."""
        if self.is_private:
            raise ValueError(
                "this client promises what its messages tell of its training examples, and its "
                "head is fine-tuned on these; set fraction_evaluate = 0"
            )
        if not self.head_epochs:
            return parameters
        head = self._head()
        with only_trained(self.model, head):
            sgd = self.sgd.copy(epochs=self.head_epochs)
            sgd.train(self, parameters, *self.training_examples(config), config)
        pairs = zip(self.model_weights().items(), parameters, strict=True)
        return [tuned if name in head else received for (name, tuned), received in pairs]
