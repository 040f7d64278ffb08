"""NTK-FL: clients send Jacobians, the server evolves their kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from flwr.app import ArrayRecord
from flwr.client import NumPyClient

from fedntk.clients import NTKFLClient, sample_size
from fedntk.ntk import jacobian, require_memory
from fedntk.ntk.evolution import AUTO
from fedntk.ntk.predictors.network import NetworkPredictor
from fedntk.strategies import DEFAULT_STEPS, NTKFL, BaseStrategy

from ..config.config import Config
from ..config.settings import ConfigError, Settings, numbers, setting
from ..deploy.simulated_trust import projected
from .method import Method, Setup

__all__ = ["METHOD", "EvolvingMethod", "EvolvingSettings"]

S = TypeVar("S", bound="EvolvingSettings")


@dataclass(frozen=True, kw_only=True)
class EvolvingSettings(Settings):
    """Settings of the methods whose server evolves a kernel."""

    auto_learning_rate: bool = setting(
        False, "take the learning rate of each round from its kernel's largest eigenvalue, instead "
        "of learning-rate; steps has another default then: 10,30 ... 10000",
    )  # fmt: skip
    steps: str = setting(
        ",".join(map(str, DEFAULT_STEPS)), "the grid of update steps t to choose from"
    )
    allow_no_step: bool = setting(True, "have t = 0, the weights as they are, among the candidates")
    selection: Literal["clients", "linearised", "validation"] = setting(
        "clients", "how t is chosen: by clients' losses, by the linearised network's, or by the "
        "loss on validation-examples or of validation-clients",
    )  # fmt: skip
    class_prior: bool = setting(
        False, "take the classes' shares among a round's examples out of what is learned from them"
    )
    class_target: Literal["uniform", "seen"] = setting(
        "uniform",
        "of class-prior: predict for classes that are equally common, or as common as so far",
    )
    kernel: Literal["mean", "corrected", "full"] = setting(
        "mean", "over outputs; corrected: with exact outputs at each of the steps; or full"
    )
    residuals: Literal["integral", "sum"] = setting("integral", "over time: see fedntk.ntk.evolve")
    kernel_dtype: Literal["outputs", "bfloat16"] = setting(
        "outputs", "in which the mean kernel is multiplied; bfloat16 goes with a tolerance of 0.01"
    )
    tolerance: float = setting(1e-4, "of the solver", above=0, below=1)
    memory_budget: float = setting(
        0.0, "GB that the mean kernel may take; 0: what is available", at_least=0
    )
    structure: Literal["factored", "dense"] = setting(
        "factored", "form in which Jacobians are sent", formerly="wire"
    )

    @property
    def steps_grid(self) -> tuple[int, ...]:
        """`steps` as numbers."""
        return tuple(numbers(self.key("steps"), self.steps, int))

    def check(self) -> None:
        """Refuse steps that do not increase."""
        grid = self.steps_grid
        if not grid or any(a >= b for a, b in zip((0, *grid), grid, strict=False)):
            raise ConfigError(
                f"{self.key('steps')}: expected increasing whole numbers, got {self.steps!r}"
            )


class EvolvingMethod(Method[S]):
    """What NTK-FL and CP-NTK-FL share."""

    metrics: ClassVar[tuple[str, ...]] = (
        "t",
        "learning-rate",
        "candidate-loss",
        "linearised-loss",
        "losses-accepted",
        "kernel-products",
        "solver-steps",
        "solver-error-estimate",
    )

    def check(self, config: Config, settings: S) -> None:
        """Refuse a choice by examples that are not there, or that are to judge the choice."""
        if settings.class_prior and config.loss != "cross-entropy":
            raise ConfigError(
                f"{settings.key('class_prior')} goes with loss = cross-entropy, got {config.loss}"
            )
        if settings.selection != "validation":
            return
        key = settings.key("selection")
        if bool(config.validation_examples) == bool(config.validation_clients):
            raise ConfigError(
                f"{key} = validation goes with one of validation-examples (kept on the server) and "
                f"validation-clients (held out), got {config.validation_examples} and "
                f"{config.validation_clients}"
            )
        if config.evaluate_on == "validation":
            raise ConfigError(
                f"{key} = validation trains on the examples that evaluate-on = validation measures "
                f"with; set {key} = clients or linearised"
            )

    def validates(self, config: Config) -> bool:
        """Say whether t is chosen by held-out examples."""
        return bool(self.own(config).selection == "validation")

    def evolution(self, setup: Setup, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the strategies that evolve a kernel."""
        config, settings = setup.config, self.own(setup.config)
        chooses = settings.selection == "validation"  # else what is held out is for others
        return dict(
            learning_rate=AUTO if settings.auto_learning_rate else config.learning_rate,
            steps=() if settings.steps_grid == DEFAULT_STEPS else settings.steps_grid,
            allow_no_step=settings.allow_no_step,
            loss=config.loss,
            selection=settings.selection,
            validation_partitions=options.pop("held_out") if chooses else (),
            validation_loss=_validation_loss(setup) if chooses else None,
            class_prior=settings.class_prior,
            class_target=settings.class_target,
            kernel=settings.kernel,
            residuals=settings.residuals,
            kernel_dtype=settings.kernel_dtype,
            tolerance=settings.tolerance,
            memory_budget=settings.memory_budget,
            device=setup.device,
            **options,
        )

    def require_resources(self, setup: Setup, models: int = 1) -> None:
        """Refuse a round of Jacobians, and their stack, that the server could not hold."""
        del models
        config, device = setup.config, setup.device
        x, _ = setup.data.train(setup.split.clients[0][:1])
        row = jacobian(setup.network.to(device), projected(config, x).to(device))
        size = sum(b.dense_size for b in row.blocks) * row.dtype.itemsize
        size = size if self.own(config).structure == "dense" else row.nbytes
        counts = [sample_size(len(own), config.sampling_rate) for own in setup.split.clients]
        largest = sorted(counts)[-config.clients_per_round :]
        require_memory(
            2 * size * sum(largest),
            f"a round of {len(largest)} clients, up to {sum(largest)} examples of "
            f"{size / 1e6:.1f} MB,",
            cure="lower clients-per-round or the examples of each, or use a smaller network",
        )


def _validation_loss(setup: Setup) -> Callable[[ArrayRecord], float] | None:
    """Return the server's loss on its validation examples, where it has some."""
    if not len(setup.split.validation):
        return None
    x, y = setup.data.train(setup.split.validation)
    x, config = projected(setup.config, x), setup.config

    def loss(arrays: ArrayRecord) -> float:
        named = {name: array.numpy() for name, array in arrays.items()}
        predictor = NetworkPredictor.from_arrays(
            setup.network, named, loss=config.loss, device=setup.device
        )
        return predictor.evaluate(x, y).loss

    return loss


@dataclass(frozen=True, kw_only=True)
class NTKFLSettings(EvolvingSettings):
    """Settings of NTK-FL."""

    table = "ntk-fl"


class _NTKFL(EvolvingMethod[NTKFLSettings]):
    name = "ntk-fl"
    settings = NTKFLSettings

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        return NTKFL(**self.evolution(setup, options))

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        return NTKFLClient(structure=self.own(setup.config).structure, **options)


METHOD = _NTKFL()
