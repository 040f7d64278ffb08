"""TCT: federated averaging of a network, then a convex problem in its tangent features."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.client import NumPyClient
from numpy.typing import NDArray
from torch import Tensor

from fedntk.clients import FeatureStore, TCTClient, shrink
from fedntk.clients.core.disk_store import data_digest
from fedntk.ntk import FeatureMap, TCTModel, require_disk, require_memory
from fedntk.ntk.payloads import UNQUANTISED, ConvexTask, check_compression
from fedntk.ntk.predictors.network import Evaluation, Predictor, arrays_of
from fedntk.strategies import TCT, BaseStrategy, SeededFedAvg
from fedntk.trust.secure_sum import FEWEST

from ..config.config import Config
from ..config.settings import ConfigError, Settings, setting
from .method import Method, Setup

__all__ = ["METHOD"]


class TCTSettings(Settings, frozen=True, eq=True):
    """Settings of TCT; those of stage 1's local SGD are common ones."""

    table = "tct"

    bootstrap_rounds: int = setting(
        10, "T_1, rounds of FedAvg; the others are for moments and stage 2", at_least=0
    )
    features: Literal["entk", "entk-sketch", "last-layer", "fourier"] = setting(
        "entk",
        "tangent features: coordinates, or a sketch of them all; or the last layer's inputs, or "
        "random Fourier features of these",
    )
    num_features: int = setting(
        100_000, "p; 0: all, but for entk-sketch and fourier, which need a number", at_least=0
    )
    feature_seed: int = setting(123, "of the new last layer and the coordinates", at_least=0)
    normalise: bool = setting(True, "whether features get mean 0 and variance 1")
    bias: bool = setting(False, "whether the linear model has a bias")
    loss: Literal["mse", "cross-entropy"] = setting("mse", "of stage 2; cross-entropy: TCT-CE")
    optimizer: Literal["scaffold", "fedavg", "gd"] = setting("scaffold", "of stage 2")
    learning_rate: float = setting(5e-5, "eta of stage 2", above=0)
    local_steps: int = setting(500, "M, full-batch steps of a client a round", at_least=1)
    local_solver: Literal["closed", "loop"] = setting(
        "closed", "these steps in closed form, or one by one"
    )
    solve: Literal["clients", "server", "statistics"] = setting(
        "clients",
        "server: clients send their features and the server solves, in one round; statistics: they "
        "send sums over their features",
    )
    ridge: float = setting(
        1e-2, "of solve = server and statistics, over the mean of the diagonal", above=0
    )
    auto_ridge: bool = setting(
        False,
        "of solve = statistics: the ridge with the least squared error on validation-examples",
    )
    balanced: bool = setting(
        False, "of solve = statistics: all classes weigh the same; takes a round more, for counts"
    )
    secure_aggregation: bool = setting(
        False,
        "of solve = statistics with bits = 2 ... 8: clients mask their sums, and the server learns "
        "the sum over all of them alone",
    )
    secure_threshold: float = setting(
        2 / 3, "share of the clients who must stay to the end of that", above=0.5, at_most=1
    )
    validation_share: float = setting(
        0.0,
        "of solve = statistics and auto-ridge, where the server has no examples: share of a "
        "client's that it holds out to choose the ridge by; doubles the bytes up",
        at_least=0,
        at_most=0.5,
    )
    keep_sums: bool = setting(
        False,
        "of solve = statistics: keep each client's sums, as many bytes as it sent, in details/sums "
        "of the run's folder, for fedntk unlearn",
    )
    sparsity: float = setting(
        0.0, "of solve = server: share of the features that is dropped", at_least=0, below=1
    )
    bits: int = setting(
        32,
        "of solve = server: of each feature sent, 1 ... 16; 32: float16; of solve = statistics: of "
        "the fixed-point numbers summed up, 2 ... 8, with validation-examples; 32: none",
        at_least=1,
    )
    dtype: Literal["float32", "float16"] = setting("float32", "in which features that fit are kept")
    keep: Literal["features", "nothing"] = setting(
        "features",
        "what a client keeps on disk; nothing: features are computed anew in each round",
    )
    proximal_mu: float = setting(
        0.0, "of stage 1: mu of FedProx's proximal term; 0: none", at_least=0
    )

    def check(self) -> None:
        """Refuse what does not go with the way in which the problem is solved."""
        try:
            check_compression(self.sparsity, self.bits)
        except ValueError as error:
            raise ConfigError(f"{self.table}: {str(error).replace('_', '-')}") from None
        if self.solve != "clients" and self.loss != "mse":
            raise ConfigError(f"tct.solve = {self.solve} needs tct.loss = mse, got {self.loss}")
        if self.solve == "clients" and (self.sparsity, self.bits) != (0.0, 32):
            raise ConfigError("tct.sparsity and tct.bits go with tct.solve = server, got clients")
        if self.solve != "statistics" and (self.auto_ridge or self.balanced):
            raise ConfigError(
                f"tct.auto-ridge and tct.balanced go with tct.solve = statistics, got {self.solve}"
            )
        if self.solve == "statistics" and self.sparsity:
            raise ConfigError(f"tct.sparsity goes with tct.solve = server, got {self.solve}")
        if self.solve == "statistics" and self.bits != UNQUANTISED and self.balanced:
            raise ConfigError(
                "tct.balanced: sums of weighted examples are no whole numbers; set tct.bits = 32"
            )
        if self.secure_aggregation and (self.solve != "statistics" or self.bits == UNQUANTISED):
            raise ConfigError(
                "tct.secure-aggregation adds masks to whole numbers; set tct.solve = statistics "
                f"and tct.bits = 8, got {self.solve} and {self.bits}"
            )
        if self.secure_aggregation and (self.keep_sums or self.validation_share):
            raise ConfigError(
                "tct.secure-aggregation: the server has no client's sums to keep, nor of what "
                "clients hold out; set tct.keep-sums = false and tct.validation-share = 0"
            )
        if self.validation_share and not self.auto_ridge:
            raise ConfigError("tct.validation-share goes with tct.auto-ridge = true, got false")
        if self.keep_sums and (self.solve != "statistics" or self.balanced):
            raise ConfigError(
                "tct.keep-sums goes with tct.solve = statistics and without tct.balanced, whose "
                f"weights are of all clients' counts; got {self.solve} and {self.balanced}"
            )
        if self.dtype == "float16" and not self.normalise:
            raise ConfigError(
                "tct.dtype = float16 would lose small features without tct.normalise; use float32"
            )

    @property
    def validates(self) -> bool:
        """Whether the server needs validation examples."""
        return self.solve == "statistics" and (self.chooses_by_own or self.bits != UNQUANTISED)

    @property
    def chooses_by_own(self) -> bool:
        """Whether the server chooses the ridge by examples of its own."""
        return self.auto_ridge and not self.validation_share

    @property
    def feature_map(self) -> FeatureMap:
        """What turns examples into features."""
        return FeatureMap(self.features, self.num_features, self.feature_seed)


class _TCT(Method[TCTSettings]):
    name = "tct"
    settings = TCTSettings
    metrics = ("examples-changed", "features-constant", "rate-times-lambda", "ridge")

    def check(self, config: Config, settings: TCTSettings) -> None:
        """Refuse a choice by examples that are not there, or that are to judge the choice."""
        if settings.secure_aggregation and config.num_clients < FEWEST:
            raise ConfigError(
                f"tct.secure-aggregation needs num-clients = {FEWEST} or more, as of two each "
                f"would learn the other's sums; got {config.num_clients}"
            )
        apart = config.local_test_fraction or config.private_test
        if settings.secure_aggregation and config.clients_per_evaluation and not apart:
            raise ConfigError(
                "tct.secure-aggregation: clients refuse to evaluate on the examples of their sums, "
                "which losses would tell of; set clients-per-evaluation = 0, or "
                f"local-test-fraction; got {config.clients_per_evaluation} and 0"
            )
        if not settings.validates:
            return
        key = settings.key("auto_ridge" if settings.chooses_by_own else "bits")
        if not config.validation_examples or config.projection:
            raise ConfigError(
                f"{key} needs validation-examples, and no projection, whose seed the server does "
                f"not have; got {config.validation_examples} and {config.projection}"
            )
        if config.evaluate_on == "validation":
            raise ConfigError(
                f"{key} uses the examples that evaluate-on = validation measures with; set "
                "evaluate-on = test, or tct.auto-ridge = false and tct.bits = 32"
            )

    def validates(self, config: Config) -> bool:
        """Say whether held-out examples choose anything."""
        return self.own(config).validates

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own = self.own(setup.config)
        bootstrap = SeededFedAvg(
            seed=setup.config.seed, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1
        )
        return TCT(
            network=setup.network,
            bootstrap=bootstrap if own.bootstrap_rounds else None,
            bootstrap_rounds=own.bootstrap_rounds,
            features=own.features,
            num_features=own.num_features,
            feature_seed=own.feature_seed,
            normalise=own.normalise,
            bias=own.bias,
            loss=own.loss,
            optimizer=own.optimizer,
            learning_rate=own.learning_rate,
            local_steps=own.local_steps,
            solve=own.solve,
            ridge=own.ridge,
            auto_ridge=own.auto_ridge,
            sparsity=own.sparsity,
            bits=own.bits,
            balanced=own.balanced,
            secure_aggregation=own.secure_aggregation,
            secure_threshold=own.secure_threshold,
            validation_share=own.validation_share,
            keep_sums=_sums(setup.config) if own.keep_sums else None,
            validation=setup.data.train(setup.split.validation) if own.validates else None,
            device=setup.device,
            **options,
        )

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        own = self.own(setup.config)
        return TCTClient(
            cache=_cache(setup.config),
            dtype=own.dtype,
            keep=own.keep,
            local_solver=own.local_solver,
            only_masked=own.secure_aggregation,
            proximal_mu=own.proximal_mu,
            **setup.config.local_sgd,
            **options,
        )

    def predictor(
        self,
        setup: Setup,
        arrays: Mapping[str, NDArray[Any]],
        learned: str,
        *,
        cache: Path | None = None,
    ) -> Predictor:
        if learned == "network":
            return super().predictor(setup, arrays, learned)
        own, network = self.own(setup.config), setup.network.to(setup.device)
        if cache is None:
            return TCTModel.from_arrays(network, own.feature_map, arrays, loss=own.loss)
        model = _KeptFeatures.from_arrays(network, own.feature_map, arrays, loss=own.loss)
        model.keep_in(cache, own, setup.device)
        return model

    def require_resources(self, setup: Setup, models: int = 1) -> None:
        """Refuse kernels or features that would not fit in memory, or on this machine's disk."""
        config, own = setup.config, self.own(setup.config)
        width = own.feature_map.width(setup.network)
        sizes = [len(part) for part in setup.split.clients]
        total, largest = sum(sizes), max(sizes)
        memory = {
            "server": 24 * total**2 + 3 * 4 * total * width,
            "clients": 52 * largest**2 * (own.local_steps > 1)
            + 4 * largest * width * (own.local_solver == "loop"),
            "statistics": 0,  # the strategy says
        }
        require_memory(
            memory[own.solve],
            f"stage 2 of {len(sizes)} clients, up to {largest} examples each,",
            cure="use more clients, fewer train-examples or, for tct.solve = server, "
            "tct.num-features",
        )
        if own.solve == "clients" and own.keep == "features":
            # all clients' as computed, in float32; one's as normalised beside them; the test
            # set's, which float16 may not hold
            tested = len(setup.evaluation_set()[1])
            rows = total * 4 + largest * np.dtype(own.dtype).itemsize + tested * (4 + 4)
            require_disk(
                models * rows * width,
                "features of all examples",
                config.folder,
                cure="lower tct.num-features, set tct.dtype = float16, or tct.keep = nothing",
            )

    def clean_up(self, config: Config) -> None:
        shrink(_cache(config))


def _cache(config: Config) -> Path:
    return config.folder / "cache"


def _sums(config: Config) -> Path:
    return config.folder / "details" / "sums"


class _KeptFeatures(TCTModel):
    """The predictor of a run: it takes the test features from disk, as clients take theirs.

    So they are computed once for a network and not in each round, and have clients' dtype.
    """

    def keep_in(self, cache: Path, settings: TCTSettings, device: str) -> None:
        """Say where features are kept, and how."""
        self.cache, self.settings, self.device = cache, settings, device

    def evaluate(self, x: Tensor, y: Tensor) -> Evaluation:
        """Return loss and accuracy, as a client computes them."""
        network = arrays_of(self.network)
        key = ConvexTask.key_of(self.feature_map, list(network.values()))
        bias = self.settings.bias
        kept = FeatureStore(
            self.cache / f"test-{data_digest(x, y)}",
            f"{key} {bias}",
            self.network,
            self.feature_map,
            dtype=self.settings.dtype,
            keep=self.settings.keep,
            chunk_size=None,
        )
        kept.take(
            {
                "network": network,
                "normaliser": {"mean": self.normaliser.mean, "inv_std": self.normaliser.inv_std},
            }
        )
        rows = kept.rows("train", x, bias=bias, device=torch.device(self.device))
        return self._evaluated(rows @ self.linear, y)


METHOD = _TCT()
