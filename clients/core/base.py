"""What the clients of all methods share: a model, local examples, and evaluation.

Examples may be sampled anew each round, and projected by a matrix that the server does not know:
Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import (
    CentredInputs,
    Loss,
    NetworkPredictor,
    Predictor,
    loss_value,
    one_hot,
    regression_metrics,
)
from fedntk.ntk.noise import ANSWERED, Noise
from fedntk.ntk.options import PREFIX, Declared, argument, option
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.agreement import Agreement
from fedntk.ntk.predictors.network import Metric, measure
from fedntk.ntk.predictors.targets import TargetTransform, real_targets
from fedntk.ntk.support.shared_arrays import require_separate
from fedntk.trust import SEALED_SEED

from .adapter import CLIENT_ID
from .examples import Columns, Data, LabelledExamples, class_numbers, labelled_examples
from .model_probe import cast_examples, check_dtypes, num_outputs
from .numpy_client import NumPyClient
from .projection import SealedProjection
from .randomness import round_seed
from .weights import Config, Evaluation, Fit, Parameters, Scalar, get_weights, set_weights

PROMISED = ContextVar("PROMISED", default=False)  # whether a mod makes all clients private
STEP = "step_"  # begins the names of methods that answer training messages
STEP_OPTION = PREFIX + "step"  # key of a step that is an option of a task
OF_EVERY_MESSAGE = ("server-round", CLIENT_ID, SEALED_SEED)


class LostStateError(LookupError):
    """What a client kept is lost; `state` is 1 if the server cannot send it again, else 0."""

    def __init__(self, message: str, num_examples: int, state: int = 0) -> None:
        super().__init__(message)
        self.num_examples, self.metrics = num_examples, {wire.LOST_STATE: state}


def sample_size(num_examples: int, sampling_rate: float) -> int:
    """Examples that a client draws for a round: max(1, round(beta n))."""
    return max(1, round(sampling_rate * num_examples))


class ModelClient(Declared, NumPyClient):
    """A client that holds a PyTorch model and labelled examples.

    Examples come as a Tensor or NumPy array with labels; as a ``Dataset`` of pairs or dicts, of
    torch or of Hugging Face (with a torch format or transform); or as a ``DataLoader`` of one. All
    count, each once and in the order of the dataset: a loader's shuffling, its ``drop_last`` and
    ``num_workers`` play no part. A ``SubsetRandomSampler`` chooses its examples; other samplers are
    refused, as is an ``IterableDataset``. Floats are cast to the dtype of the model's parameters.

    **Augmentation.** A dataset that draws random numbers is read with the global generators of
    torch, NumPy and Python seeded by (`seed`, round), and restored afterwards. So all exchanges of
    a round see the same examples, and the next round sees new ones. Evaluation, and all of stage 2
    of :class:`TCTClient`, see those of `seed` only.
    """

    strategy: ClassVar[str] = ""  # that the client goes with
    replies: ClassVar[str] = ""  # what it replies with: see Agreement; empty: not checked
    config_keys: ClassVar[frozenset[str]] = frozenset()  # of train_config that it uses
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64, torch.float16)
    usual_step: ClassVar[str] = "train"  # of a training message that names no step
    takes_real_targets: ClassVar[bool] = False  # whether what it computes needs no classes

    model: nn.Module = argument(
        "maps (n, ...) to (n, C), C at least 2 (MSE: 1); weights are overwritten", kw_only=False
    )
    x: Data = argument(
        "training examples: an array (n, ...), or a dataset that holds their labels", kw_only=False
    )
    y: Any = argument(
        "labels of an array x: integers of shape (n,) or (n, 1), or one-hot rows (n, C)",
        default=None,
        kw_only=False,
    )
    x_test: Data = argument("examples for evaluation; by default those of training", default=None)
    y_test: Any = argument("their labels", default=None)
    columns: Columns | None = argument(
        "names or positions of example and label in a dataset's dicts or tuples", default=None
    )
    loss: Loss = option("loss; MSE is against one-hot targets", default="cross-entropy")
    real_targets: bool = argument(
        "whether y are real targets (n,) or (n, C), standardised, for least squares (loss mse)",
        default=False,
    )
    target_unit: Any = argument(
        "what real targets were divided by, a number or (C,): mae is in their own unit",
        default=(1.0,),
    )
    metrics: Mapping[str, Metric] | None = argument(
        "further metrics of evaluations, by name: functions of scores (n, C) and labels (n,), None "
        "where one is not defined; not for real targets",
        default=None,
    )
    device: torch.device | str = argument("where the model runs", default="cpu")
    batch_size_eval: int = option("examples per pass when evaluating", default=1024, at_least=1)
    sampling_rate: float = option(
        "beta: share of the training examples, drawn anew each round without replacement",
        default=1.0,
        above=0,
        at_most=1,
    )
    projection: SealedProjection | None = argument(
        "projects each example; the model takes its features", default=None
    )
    schema: str = argument(
        "name of its columns, classes and units; a strategy that states another is refused",
        default="",
    )
    seed: Any = argument(
        "with the round, seeds what is drawn: whole numbers such as (run's seed, partition); by "
        "default the client's id in the federation",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._has_seed = self.seed is not None
        if self.x_test is None and self.y_test is not None:
            raise ValueError("x_test: expected the examples of y_test, got none; give both")
        seed = 0 if self.seed is None else self.seed
        numbers = seed if isinstance(seed, tuple) else (seed,)
        if not all(isinstance(n, int | np.integer) and n >= 0 for n in numbers):
            raise ValueError(
                f"seed: expected a whole number of at least 0, or several, got {self.seed!r}"
            )
        self.seed: tuple[int, ...] = tuple(map(int, numbers))
        check_dtypes(self.model, self.dtypes)
        require_separate(self.model)  # a move to another device would part them
        self.model.to(self.device)
        self.device = torch.device(self.device)
        self._training = labelled_examples(self.x, self.y, columns=self.columns)
        self._probe(self._training)
        self._testing: LabelledExamples | None = None
        if self.x_test is not None:
            test = labelled_examples(self.x_test, self.y_test, columns=self.columns, name="x_test")
            self._testing = test
            self._probe(test)
        if (sgd := getattr(self, "sgd", None)) is not None:
            sgd.require_loss(self.loss, self.num_outputs)
        del self.x, self.y, self.x_test, self.y_test  # kept once, as read

    def check(self) -> None:
        """Refuse targets that do not go with the loss."""
        if self.real_targets and not self.takes_real_targets:
            raise ValueError(
                f"real_targets: expected False, as {type(self).__name__} works with classes, got "
                "True; take a method for regression, such as FedAvg or one exchange"
            )
        if self.real_targets and self.metrics:
            names = ", ".join(self.metrics)
            raise ValueError(f"metrics: expected none beside real targets, got {names}")
        if self.real_targets and self.loss != "mse":
            raise ValueError(f"real_targets: expected the loss mse, got {self.loss}")

    def identify(self, client_id: str) -> None:
        """Set the seed by the client's id in the federation, unless one was given."""
        if not self._has_seed:
            self.seed = (0, *client_id.encode())

    def _probe(self, examples: LabelledExamples) -> None:
        x, labels = examples.read([*self.seed, 0], torch.zeros(1, dtype=torch.int64))
        x = cast_examples(x, self.model)
        probe = x if self.projection is None else self.projection.probe(x)
        fewest = 1 if self.loss == "mse" else 2  # a single score of one class has no cross-entropy
        self.num_outputs = num_outputs(self.model, probe.to(self.device), self.loss, fewest=fewest)
        if examples.may_change:
            self._targets_of(labels, examples.name)
        else:
            _ = self._all_training if examples is self._training else self._all_testing

    def _read(
        self, examples: LabelledExamples, seed: Sequence[int], chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x, labels = examples.read(seed, chosen)
        return cast_examples(x, self.model), self._targets_of(labels, examples.name)

    def _targets_of(self, labels: Tensor, name: str) -> Tensor:
        if self.real_targets:
            return real_targets(labels, self.num_outputs, name=name)
        return one_hot(class_numbers(labels, self.num_outputs, name=name), self.num_outputs)

    def strata(self, targets: Tensor) -> Tensor:
        """Return the class of each example (n,); real targets (n, C) are all of class 0."""
        return targets.argmax(1) if not self.real_targets else torch.zeros(len(targets)).long()

    @cached_property
    def _all_training(self) -> tuple[Tensor, Tensor]:
        return self._read(self._training, [*self.seed, 0])

    @cached_property
    def _all_testing(self) -> tuple[Tensor, Tensor]:
        if self._testing is None:
            return self.inputs, self.targets
        return self._read(self._testing, [*self.seed, 0])

    @cached_property
    def inputs(self) -> Tensor:
        """All training examples (n, ...), augmented by the client's seed only."""
        return self._all_training[0]

    @cached_property
    def targets(self) -> Tensor:
        """Their targets (n, C): one-hot and float32, or real ones."""
        return self._all_training[1]

    @cached_property
    def test_inputs(self) -> Tensor:
        """Examples (n, ...) for evaluation: `inputs` itself if there are none."""
        return self._all_testing[0]

    @cached_property
    def test_targets(self) -> Tensor:
        """Their targets (n, C)."""
        return self._all_testing[1]

    def raw_examples(self) -> tuple[Tensor, Tensor]:
        """Return all training examples and labels as they were passed; ValueError of a dataset."""
        if self._training.may_change:
            raise ValueError(
                "x: expected arrays of examples, whose rows can be told apart, got a dataset, "
                "which may augment them at random"
            )
        return self._training.read(())

    @property
    def num_examples(self) -> int:
        """Number of training examples."""
        return len(self._training)

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Answer a training message by the method ``step_<name>`` of the step that it names."""
        return answer_step(self, self.step_in(config), parameters, config)

    def step_in(self, config: Mapping[str, Any]) -> str:
        """Return the step that a training message names; ValueError if this client may not."""
        step = str(config.get(wire.STEP, config.get(STEP_OPTION, self.usual_step)))
        self.require_permitted_step(step, config)
        return step

    def require_permitted_step(self, step: str, config: Mapping[str, Any]) -> None:
        """Refuse a step that is not among those which a private client answers."""

    def require_agreement(self, config: Mapping[str, Any], *, to_train: bool = True) -> None:
        """Refuse a strategy for other examples; to train, also for another client, loss or keys."""
        client, expected = type(self).__name__, Agreement.from_config(config)
        if expected is not None and expected.schema not in ("", self.schema):
            raise ValueError(
                f"schema: {expected.strategy} expects examples whose columns, units, classes and "
                f"moments have the name or digest {expected.schema!r}, and this client's have "
                f"{self.schema or 'none'!r}; have both name the same ones"
            )
        if not to_train:
            return
        if expected is not None:
            self._require_expected(client, expected)
        elif self.replies not in ("", wire.WEIGHTS):
            raise ValueError(
                f"{client} replies with {self.replies}, and the message comes from a strategy that "
                f"takes no such replies; use fedntk.strategies.{self.strategy} on the server"
            )
        keys = {key for key in config if not (key.startswith(PREFIX) or Agreement.owns(key))}
        unknown = sorted(keys - {*OF_EVERY_MESSAGE, *self.config_keys})
        if self.replies and unknown:
            supported = ", ".join(sorted(self.config_keys)) or "none"
            raise ValueError(
                f"train_config: unknown keys {', '.join(unknown)} for {client}; supported: "
                f"{supported}. Set them where client or strategy is made, or add them to "
                "config_keys of a client class of your own"
            )

    def _require_expected(self, client: str, expected: Agreement) -> None:
        if self.replies not in ("", expected.replies):
            raise ValueError(
                f"{expected.strategy} takes {expected.replies}, and {client} replies with "
                f"{self.replies}; have client_fn return a {expected.client}"
            )
        if expected.loss not in ("", self.loss):
            raise ValueError(
                f"{expected.strategy} has the loss {expected.loss}, and {client} has {self.loss}; "
                "give both the same loss"
            )
        if expected.projected and self.projection is None:
            raise ValueError(
                f"{expected.strategy} has a key_server, and {client} projects nothing; give it "
                "projection=SealedProjection(...), or leave key_server out"
            )

    @property
    def is_private(self) -> bool:
        """Whether the owner promises what messages may tell of the training examples."""
        return PROMISED.get()

    def require_permitted(self, kind: str) -> None:
        """Refuse a message that is not among those which a private client answers."""
        if self.is_private and kind not in ANSWERED:
            raise ValueError(
                f"this client promises what its messages tell of its training examples, and "
                f"answers only {', '.join(sorted(ANSWERED))}; got {kind}"
            )

    def require_test_examples(self) -> None:
        """Refuse to evaluate on training examples, which stand in for missing ones."""
        if self.test_inputs is self.inputs:
            raise ValueError(
                "this client promises what its messages tell of its training examples; give it "
                "examples for evaluation (x_test, y_test), or set fraction_evaluate = 0"
            )

    def require_covered(self, mechanism: type[Noise]) -> None:
        """Refuse noise in what is made of examples by options that its epsilon does not cover."""
        mechanism.require_covered(self)
        if self._training.may_change:
            raise ValueError(
                "x: with noise an example must not depend on those that are read before it; "
                "expected arrays of examples, got a dataset, which may augment them at random"
            )

    def get_parameters(self, config: Config) -> Parameters:
        """Return the model's current weights."""
        return get_weights(self.model)

    def model_weights(self) -> dict[str, NDArray[Any]]:
        """Return copies of the model's arrays, by name."""
        return dict(zip(self.model.state_dict(), get_weights(self.model), strict=True))

    def get_properties(self, config: Config) -> dict[str, Scalar]:
        """Return what the key server needs to seal the projection's seed; else nothing."""
        return {} if self.projection is None else dict(self.projection.keys.request())

    def input_sums(self, config: Config) -> tuple[NDArray[np.float64], int]:
        """Return the sum of all training inputs, of one input's shape, and their number."""
        return sum_inputs(self, config)

    def training_examples(self, config: Config) -> tuple[Tensor, Tensor]:
        """Return this round's sample of the training examples, projected, and their targets."""
        chosen, seed = None, round_seed(self.seed, config)
        if self.sampling_rate < 1:
            n = len(self._training)
            generator = np.random.default_rng([*seed, *b"sample"])
            size = sample_size(n, self.sampling_rate)
            chosen = torch.from_numpy(generator.choice(n, size=size, replace=False))
        if self._training.may_change:
            x, targets = self._read(self._training, seed, chosen)
        elif chosen is None:
            x, targets = self.inputs, self.targets
        else:
            x, targets = self.inputs[chosen], self.targets[chosen]
        return self.project(x, config), targets

    def test_examples(self, config: Config) -> tuple[Tensor, Tensor]:
        """Return the examples for evaluation, projected, and their targets (n, C)."""
        if self.is_private:
            self.require_test_examples()
        return self.project(self.test_inputs, config), self.test_targets

    def project(self, x: Tensor, config: Config) -> Tensor:
        """Return examples as the model takes them: projected if there is a projection."""
        return x if self.projection is None else self.projection(x, config)

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Return loss, number of test examples, and ``"accuracy"``, or ``"mae"`` and ``"r2"``.

        The loss of real targets is of standardised ones; ``"r2"`` is missing if they do not vary.
        """
        set_weights(self.model, parameters)
        return self.evaluate_model(config)

    def evaluate_model(self, config: Config) -> Evaluation:
        """Evaluate the model with the weights that it holds: see :meth:`evaluate`."""
        x, targets = self.test_examples(config)
        outputs = self.outputs(x)
        return loss_value(outputs, targets, self.loss), len(x), self.quality(outputs, targets)

    def quality(self, outputs: Tensor, targets: Tensor) -> dict[str, Scalar]:
        """Return the metrics, besides the loss, of outputs (n, C) for targets (n, C)."""
        if self.real_targets:
            return {**regression_metrics(outputs, targets, self.target_unit)}
        labels = targets.argmax(1)
        further = measure(self.metrics or {}, outputs, labels)
        return {**further, "accuracy": float((outputs.argmax(1) == labels).double().mean())}

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of what :func:`~fedntk.clients.received` returns, to evaluate yourself."""
        return self.network_predictor(parameters)

    def network_predictor(self, weights: Parameters) -> Predictor:
        """Make a predictor of the client's network with some weights."""
        set_weights(self.model, weights)
        predictor = NetworkPredictor(self.model, loss=self.loss, device=self.device)
        predictor.targets = self.standardised
        return predictor

    @property
    def standardised(self) -> TargetTransform | None:
        """What keeps real targets as they are; None if there are classes."""
        if not self.real_targets:
            return None
        return TargetTransform(np.zeros(self.num_outputs), np.ones(self.num_outputs))

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """f(x) in evaluation mode, on the CPU: shape (n, C)."""
        self.model.eval()
        chunks = x.split(self.batch_size_eval)  # copied: a network may write into its input
        return torch.cat([self.model(c.to(self.device, copy=True)).cpu() for c in chunks])


def step_method(client: object, step: str) -> Callable[..., Any]:
    """Return a client's method ``step_<name>``; ValueError if there is none."""
    steps = [name.removeprefix(STEP) for name in dir(client) if name.startswith(STEP)]
    name = step.replace("-", "_")
    if name not in steps:
        raise ValueError(f"step: expected one of {', '.join(steps)}, got {step!r}")
    return getattr(client, STEP + name)  # type: ignore[no-any-return]


def answer_step(client: ModelClient, step: str, parameters: Parameters, config: Config) -> Fit:
    """Return a step's answer: arrays, number of examples and metrics; or what the client lost."""
    try:
        answer: Fit = step_method(client, step)(parameters, config)
    except LostStateError as lost:
        return [], lost.num_examples, dict(lost.metrics)
    return answer


def sum_inputs(client: ModelClient, config: Config) -> tuple[NDArray[np.float64], int]:
    """Return the sum of a client's inputs, as its model takes them, and their number."""
    client.require_permitted("query.input_sums")
    if not isinstance(client.model, CentredInputs):
        raise ValueError(
            "centre_inputs: the strategy asks for the sum of this client's inputs, but its "
            "model is no CentredInputs(network, input_shape), and subtracts no mean"
        )
    x = client.project(client.inputs, config)
    return x.sum(0, dtype=torch.float64).cpu().numpy(), len(x)


def candidate_losses(
    client: ModelClient,
    candidates: Sequence[Sequence[NDArray[Any]]],
    x: Tensor,
    targets: Tensor,
    offset: Tensor | float = 0.0,
) -> list[float]:
    """Return the loss of each candidate, with `offset` added to outputs; infinity for NaN."""
    losses = []
    for candidate in candidates:
        set_weights(client.model, candidate)
        value = loss_value(client.outputs(x) + offset, targets, client.loss)
        losses.append(float("inf") if np.isnan(value) else value)
    return losses
