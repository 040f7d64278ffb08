"""NTK-DFL: decentralised; clients send each other Jacobians."""

from typing import Any, Literal

from flwr.client import NumPyClient

from fedntk.clients import NTKDFLClient
from fedntk.ntk.payloads import check_compression
from fedntk.strategies import NTKDFL, BaseStrategy

from ..config.config import Config
from ..config.settings import ConfigError, numbers, setting
from .decentralised import DecentralisedMethod, GraphSettings
from .method import Setup
from .personal import personal_cache

__all__ = ["METHOD"]


class NTKDFLSettings(GraphSettings, frozen=True, eq=True):
    """Settings of NTK-DFL."""

    table = "ntk-dfl"

    steps: str = setting("100,200,300,400,500,600,700,800", "grid of t")
    kernel: Literal["mean", "corrected", "full"] = setting(
        "mean", "over outputs; corrected: with exact outputs at each of the steps; or full"
    )
    selection: Literal["last", "true-loss", "own"] = setting(
        "last",
        "which t: last: the paper's rule comes to that; true-loss: the lowest loss of the network "
        "itself over the neighbourhood, as in the authors' program; own: over the own examples",
    )
    learning_rate_decay: float = setting(
        0.0, "in round k the rate is eta exp(-decay (k - 1)); 0.07 in the program", at_least=0
    )
    batches: int = setting(
        1, "m_1: parts of a client's examples, each with an evolution", at_least=1
    )
    average: bool = setting(True, "weights are averaged with the neighbours' first")
    class_prior: bool = setting(
        False, "the classes' shares in a neighbourhood are an offset of the outputs that evolve"
    )
    sparsity: float = setting(
        0.0,
        "share of the numbers of each tensor of a Jacobian that is not sent",
        at_least=0,
        below=1,
    )
    bits: int = setting(
        32, "of each number that is sent, 1 ... 16; 32 leaves them as they are", at_least=1
    )
    residuals: Literal["integral", "sum"] = setting("integral", "over time: see fedntk.ntk.evolve")
    kernel_dtype: Literal["outputs", "bfloat16"] = setting(
        "outputs", "in which kernels are multiplied; bfloat16 goes with a tolerance of 0.01"
    )
    tolerance: float = setting(1e-3, "of the solver", above=0, below=1)
    evolve_once: bool = setting(
        False, "with topology = clustered: one client of each cluster evolves for all"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers(self.key("steps"), self.steps, float)

    def check(self) -> None:
        """Refuse what cannot be quantised."""
        super().check()
        try:
            check_compression(self.sparsity, self.bits)
        except ValueError as error:
            raise ConfigError(f"{self.table}: {error}") from None


class _NTKDFL(DecentralisedMethod[NTKDFLSettings]):
    name = "ntk-dfl"
    settings = NTKDFLSettings
    metrics = (*DecentralisedMethod.metrics, "t")

    def check(self, config: Config, settings: NTKDFLSettings) -> None:
        super().check(config, settings)
        if settings.evolve_once and not (settings.topology == "clustered" and settings.average):
            raise ConfigError(
                f"{settings.key('evolve-once')} goes with topology = clustered and average = true, "
                f"got {settings.topology} and {str(settings.average).lower()}"
            )
        if settings.class_prior and config.loss != "cross-entropy":
            raise ConfigError(
                f"{settings.key('class-prior')} goes with loss = cross-entropy, got {config.loss}"
            )

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own, config = self.own(setup.config), setup.config
        return NTKDFL(
            learning_rate=config.learning_rate,
            learning_rate_decay=own.learning_rate_decay,
            steps=numbers(own.key("steps"), own.steps, float),
            loss=config.loss,
            kernel=own.kernel,
            selection=own.selection,
            batches=own.batches,
            average=own.average,
            class_prior=own.class_prior,
            sparsity=own.sparsity,
            bits=own.bits,
            residuals=own.residuals,
            kernel_dtype=own.kernel_dtype,
            tolerance=own.tolerance,
            evolve_once=own.evolve_once,
            **own.of_relay(config),
            **options,
        )

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        return NTKDFLClient(cache=personal_cache(setup.config), **options)


METHOD = _NTKDFL()
