"""What the simulations ask of a method; this file knows none of them."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from logging import getLogger
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

import fedntk.clients
from fedntk.clients import LocalSGD, MaskedSums
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import EnsemblePredictor, NetworkPredictor, Predictor
from fedntk.ntk.features.frozen import FrozenPart
from fedntk.ntk.noise import Noise
from fedntk.ntk.options import Declared, Option, check_together, parts_of
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.ntk.predictors.network import dtype_of
from fedntk.ntk.support.arrays import Arrays
from fedntk.strategies import Strategy
from fedntk.strategies.core.averaging import named_arrays
from fedntk.trust.secure_sum import FEWEST

from ..attacks import choose_liars
from ..config.config import BaseConfig
from ..config.metrics import Metric
from ..config.private import require_covered
from ..config.settings import ConfigError, Settings, key_of, settings_class
from ..data.data import Data, KeptExamples, LocalData
from ..data.load import load_data
from ..data.partitions import Split, load_split
from ..models import device_of
from ..simulated_trust import projected

logger = getLogger("flwr")
PERSONAL = "personal"  # in a run's cache: what its clients keep

# places in the name of a class where kebab-case has a hyphen: FedAvgM becomes fed-avg-m
WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_")


@dataclass(frozen=True, eq=False)
class Setup:
    """What the parts of a run are made from.

    `network` has the weights that the run starts from; clients overwrite them. `kept` serves the
    clients that are made from this setup, in one thread. `loaded` is the data set, if it is loaded.
    `frozen` is what comes before the network.
    """

    config: BaseConfig
    network: nn.Module
    frozen: FrozenPart | None = None
    kept: KeptExamples = field(default_factory=KeptExamples)
    loaded: Data | None = None

    @cached_property
    def data(self) -> Data:
        """The data set."""
        data = self.loaded or load_data(self.config)
        return data if data.frozen is self.frozen else replace(data, frozen=self.frozen)

    @cached_property
    def split(self) -> Split:
        """Which client has which examples."""
        return load_split(self.config, self.data)

    @cached_property
    def liars(self) -> frozenset[int]:
        """Partitions that lie."""
        config = self.config
        training = self.split.clients[: config.num_clients - config.validation_clients]
        return choose_liars(config.liars, [len(part) for part in training], config.seed)

    @property
    def absent(self) -> frozenset[int]:
        """Liars that are never asked to train."""
        return self.liars if self.config.attack == "absent" else frozenset()

    @property
    def max_examples(self) -> int:
        """Most examples of a client."""
        return self.config.max_examples or self.data.num_train

    def describe_data(self) -> str:
        """Say in a line what was read; of a run with noise, nothing that its epsilon is of."""
        data = self.data.inputs if self.config.mechanism else self.data
        return f"data {self.config.dataset}: {data.describe()}"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of examples, that of the network."""
        return dtype_of(self.network)

    def evaluation_set(self) -> tuple[Tensor, Tensor]:
        """Return the examples that the server evaluates on, standardised, with their labels."""
        config, split = self.config, self.split
        if config.evaluate_on == "test":
            return self.data.test(slice(config.test_examples or None), self.dtype)
        if len(split.validation):
            return self.data.train(split.validation, self.dtype)
        if config.validation_clients:
            return self.data.train(
                np.concatenate(split.clients[-config.validation_clients :]), self.dtype
            )
        tests = [split.train_and_test(i, config)[1] for i in range(len(split.clients))]
        return self.data.train(np.concatenate(tests), self.dtype)

    def examples(self, partition: int) -> LocalData:
        """Return a partition's examples for training and for its own evaluation, standardised."""

        def make() -> LocalData:
            data, dtype, (train, test_rows) = (
                self.data,
                self.dtype,
                self.split.train_and_test(partition, self.config),
            )
            if partition >= self.config.num_clients - self.config.validation_clients:
                train = train[: len(train) - len(self.split.shared)]  # they evaluate on their own
            private = self._on_private_test
            rows = self.split.tests[partition] if private else test_rows
            test = data.test(rows, dtype) if private else data.train(rows, dtype)
            return LocalData(data.train(train, dtype), test)

        return self.kept.of(partition, make)

    @property
    def _on_private_test(self) -> bool:
        return self.config.private_test and self.config.evaluate_on == "test"

    @cached_property
    def without_examples_to_evaluate(self) -> frozenset[int]:
        """Clients that never evaluate: with private-test, those without a part."""
        config, split = self.config, self.split
        if not config.private_test:
            return frozenset()
        if self._on_private_test:
            sizes = list(map(len, split.tests))
            cure = "the test set has no classes, or owners, of the clients"
        else:
            sizes = [split.num_kept(i, config) for i in range(len(split.clients))]
            cure = f"raise local-test-fraction = {config.local_test_fraction:g}"
        if config.clients_per_evaluation and not any(sizes):
            raise ConfigError(
                f"private-test: expected a client with examples to evaluate on, got none; {cure}, "
                "or set clients-per-evaluation = 0"
            )
        return frozenset(i for i, size in enumerate(sizes) if not size)

    @cached_property
    def metrics(self) -> Mapping[str, Metric]:
        """Further metrics of clients' evaluations; a node that lacks their code has none."""
        if not self.config.metrics_of_clients:
            return {}
        try:
            return self.config.load_metrics()
        except ConfigError as error:  # at a node: the server has them
            logger.warning("evaluations without further metrics: %s", error)
            return {}

    @cached_property
    def device(self) -> str:
        """Where networks run."""
        return device_of(self.config.device)


def _unmeasured(arrays: ArrayRecord) -> float:
    raise RuntimeError("settings are only checked: there are no examples")


def _options(kind: type[Declared]) -> Mapping[str, Option]:
    """Return the options of a class that settings of the same names hold."""
    return {name: o for name, o in kind.options().items() if (kind, name) != (LocalSGD, "epochs")}


def named_client(strategy: Any) -> Any:
    """Return the class that a strategy names, beside it or in fedntk.clients; None if none."""
    home = next(kind for kind in strategy.__mro__ if "client" in vars(kind)).__module__
    places = (sys.modules.get(home), fedntk.clients)
    return next(filter(None, (getattr(place, strategy.client, None) for place in places)), None)


def masks_itself(client_class: Any) -> bool:
    """Whether clients of a class mask sums of their own."""
    return issubclass(client_class, Declared) and "secure" in parts_of(client_class)


class Method:
    """All that the simulations know of one method.

    ``Method(MyStrategy)`` or ``Method(MyStrategy, MyClient)`` is a method of one's own, which
    :func:`~fedntk.simulations.run` takes; its name is that of the strategy in kebab-case, unless
    `name` is given.

    Here an object of it is a row of :mod:`fedntk.simulations.methods.table`: name, strategy and
    further attributes. A method with behaviour of its own is a subclass, with an object of it as
    ``METHOD`` in a module of :mod:`fedntk.simulations.methods`, or in another package that names it
    in the entry-point group ``fedntk.methods``.

    Its `name`, in kebab-case, is the value of the setting ``method`` and the table of its settings.
    Those are `own_settings` and the options of its classes that files can hold, but for options
    that all strategies or clients have and those that are common settings, unless they stand
    `apart`.
    """

    name: ClassVar[str]
    settings: type[Settings]
    strategy_class: ClassVar[type[Strategy]]
    parts: ClassVar[tuple[type[Declared], ...]] = ()  # from which the strategy is made, as well
    # settings that the classes lack, or have with another default or meaning
    own_settings: ClassVar[type[Settings]] = Settings
    # its own settings though common ones have these names; of the first class that has them
    apart: ClassVar[tuple[str, ...]] = ()
    learns_on_server: ClassVar[bool] = True  # else the server's model keeps its first weights
    batch_norm: ClassVar[bool] = False  # whether its mlp has BatchNorm
    baseline: ClassVar[bool] = False  # there to compare with, without a notebook
    # metric of a round, a share, that says how good the method is; shown during and after runs
    headline: ClassVar[str] = "accuracy"
    # what the strategy reports of training besides what all report; of other names only some are
    # recorded, as clients may choose them
    metrics: ClassVar[tuple[str, ...]] = ()
    summarised: ClassVar[tuple[str, ...]] = ()  # of these, what a run's summary has as well
    evaluation_metrics: ClassVar[tuple[str, ...]] = ()  # of clients, besides loss and accuracy

    def __init__(self, *row: Any, **more: Any) -> None:
        if row and not isinstance(row[0], str):  # the classes; the first one names it
            words = WORD_BREAK.sub("-", getattr(row[0], "__name__", "").strip("_"))
            row = (more.pop("name", words.lower()), *row)
        names = ("name", "strategy_class", "client_class")
        vars(self).update(zip(names, row, strict=False), **more)
        kind = self.strategy_class
        if not (isinstance(kind, type) and issubclass(kind, Strategy)):
            raise ConfigError(
                f"method: expected a class derived from Strategy or SeededFedAvg, got {kind!r}"
            )
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", self.name):
            raise ValueError(f"name: expected words in kebab-case, got {self.name!r}")
        self.settings = self._make_settings()
        self.places = self.settings.places()  # key -> table and name there

    @cached_property
    def client_class(self) -> Any:
        """Class of its clients: the one that the strategy names, unless another is given."""
        if (client := named_client(self.strategy_class)) is None:
            raise ConfigError(
                f"{self.name}: client = {self.strategy_class.client!r} is neither beside "
                f"{self.strategy_class.__name__} nor in fedntk.clients; give Method both classes"
            )
        return client

    def _make_settings(self) -> Any:
        shared = (BaseConfig, Strategy, fedntk.clients.ModelClient, LocalSGD)
        common = {name for kind in shared for name in _options(kind)}
        more = self.own_settings.options()
        options: dict[str, Option] = {}
        for kind in self._declared():
            for name, declared in _options(kind).items():
                is_own = name in self.apart or name not in common
                if declared.in_files and is_own and name not in more:
                    options.setdefault(name, declared)
        parts = parts_of(self.strategy_class).items()
        own_parts = {name: part for name, part in parts if name not in parts_of(BaseConfig)}
        return settings_class(self.name, options, own_parts, self.own_settings)

    def _declared(self) -> list[type[Declared]]:
        kinds = (self.strategy_class, *self.parts, self.client_class)
        declared = [kind for kind in kinds if issubclass(kind, Declared)]
        return [*declared, LocalSGD] if "sgd" in parts_of(declared[-1]) else declared

    def reads(self, name: str, config: BaseConfig) -> bool:
        """Whether a common setting is an option of its clients' local SGD, or of its strategy."""
        of_strategy = self.strategy_class.options().keys() - self.settings.options().keys()
        return LocalSGD in self._declared() or name in of_strategy

    def _home_of(self, name: str) -> type[Declared]:
        return next(kind for kind in self._declared() if name in _options(kind))

    def _option_values(
        self, kind: type[Declared], config: BaseConfig, settings: Any, setup: Setup | None = None
    ) -> dict[str, Any]:
        """Return the options of a class that the settings say."""
        values = self.arguments(config, settings) if kind is self.strategy_class else {}
        if kind is LocalSGD:
            values["epochs"] = config.local_epochs
        if "sgd" in parts_of(kind):
            local_training = parts_of(kind)["sgd"].kind
            values["sgd"] = local_training(**self._option_values(LocalSGD, config, settings))
        own_options, common = self.settings.options(), BaseConfig.options()
        for name, declared in _options(kind).items():
            is_own = name not in self.apart or kind is self._home_of(name)
            if declared.in_files and is_own and name in own_options:
                values[name] = getattr(settings, name)
            elif declared.in_files and name in common:
                values[name] = getattr(config, name)
        if kind is self.strategy_class:
            for name, part in parts_of(kind).items():
                home = settings if name in parts_of(self.settings) else config
                section: Settings | None = getattr(home, name)
                if section is None:
                    values[name] = part.check(None)
                else:
                    options = {name: getattr(section, name) for name in section.options()}
                    values[name] = part.make(options | self.part_arguments(name, config, setup))
        return values

    def part_arguments(self, name: str, config: BaseConfig, setup: Setup | None) -> dict[str, Any]:
        """Return a part's arguments that no file holds; no setup: settings are only checked."""
        if name != "screening" or not self.judges(config):
            return {}
        return {"validation_loss": _unmeasured if setup is None else self.validation_loss(setup)}

    def judges(self, config: BaseConfig) -> bool:
        """Whether the strategy judges weights by the server's validation examples."""
        return config.screening.rule == "validation"

    def _make(self, kind: Any, setup: Setup, options: dict[str, Any]) -> Any:
        """Make an object from a run's settings and parts, and from `options`, which win."""
        if kind not in self._declared():
            return kind(**options)
        parts: dict[str, Any] = {
            "network": setup.network,
            "device": setup.device,
            "cache": setup.config.cache / PERSONAL,
            "schema": setup.data.digest,
        }
        if (targets := setup.data.inputs.targets) is not None:
            parts |= {"real_targets": True, "target_unit": targets.std}
        shared = {name: part for name, part in parts.items() if name in kind.options()}
        values = self._option_values(kind, setup.config, self.settings_in(setup.config), setup)
        return kind(**{**shared, **values, **options})

    def check(self, config: BaseConfig, settings: Any) -> None:
        """Refuse settings that do not go together, with a ConfigError."""
        if config.task == "regression" and not self.strategy_class.takes_real_targets:
            those = [
                method.name
                for method in config.method_table.all_methods().values()
                if method.strategy_class.takes_real_targets
            ]
            raise ConfigError(
                f"task: {self.name} works with classes, got regression; expected method = "
                f"{', '.join(those)}, or a strategy of yours with takes_real_targets = True"
            )
        if self.strategy_class.learns_only_head and config.adapters in ("lora", "ffa-lora"):
            raise ConfigError(
                f"adapters = {config.adapters}: {self.name} learns only the last layer, and "
                "adapters would stay 0; set adapters = tangent-lora, in whose features it solves"
            )
        for name in parts_of(BaseConfig):
            if getattr(config, name) is not None and not self.can_have(name):
                those = [m for m in config.method_table.all_methods().values() if m.can_have(name)]
                raise ConfigError(
                    f"{key_of(name)}: {self.name} cannot have it; expected method = "
                    f"{' or '.join(method.name for method in those)}, or {key_of(name)} = false"
                )
        for kind in self._declared():
            try:
                check_together(kind, self._option_values(kind, config, settings))
            except ValueError as error:
                raise ConfigError(self._in_keys(str(error))) from None
        if (mechanism := self.mechanism(settings)) is not None:
            try:
                require_covered(mechanism, config, settings)
            except ValueError as error:
                raise ConfigError(self._in_keys(str(error))) from None
        if config.secure is not None and config.clients_a_round < FEWEST:
            raise ConfigError(
                "secure: expected clients-per-round and num-clients "
                f"of {FEWEST} or more, as two clients would learn each other's numbers; got "
                f"{config.clients_a_round} and {config.num_clients}"
            )
        if config.screening.rule == "validation" and not config.validation_examples:
            raise ConfigError(
                "screening.rule = validation judges by examples that the server keeps; set "
                "validation-examples, got 0"
            )
        if config.evaluate_on == "validation" and (key := self.chosen_by(config)):
            raise ConfigError(
                f"{key} uses the examples that evaluate-on = validation measures with; set "
                f"evaluate-on = test, or change {key}"
            )
        if config.patience and not (self.learns_on_server or config.monitor.startswith("client-")):
            raise ConfigError(
                f"patience = {config.patience}: with {self.name} the server's model never changes, "
                f"so monitor = {config.monitor} would stop every run; set monitor = "
                f"{config.headline}"
            )

    def can_have(self, part: str) -> bool:
        """Whether its strategy can have a part."""
        return part in parts_of(self.strategy_class)

    def mechanism(self, settings: Any) -> type[Noise] | None:
        """Return what adds noise, if the method's settings ask for differential privacy."""
        return self.strategy_class.mechanism_of(settings)

    def random_features(
        self, config: BaseConfig, input_shape: tuple[int, ...]
    ) -> tuple[int, float]:
        """Return number and bandwidth of the network's random features; 0: it has none."""
        return config.random_features, config.bandwidth

    def adapt(self, network: nn.Module, config: BaseConfig) -> nn.Module:
        """Return the network that the run has in place of the one that its settings name."""
        return network

    def arguments(self, config: BaseConfig, settings: Any) -> dict[str, Any]:
        """Return arguments of the strategy that the settings say, and its rules speak of."""
        return {}

    def _in_keys(self, message: str) -> str:
        """Name settings by their keys in an error about options."""
        homes: list[Any] = [*self.settings.sections().values(), BaseConfig, self.settings]
        keys = {name: home.key(name) for home in homes for name in home.names()}
        for name, declared in parts_of(self.settings).items():
            kind = self.settings.sections()[self.settings.key(name)]
            keys |= {f"{name}.{below}": kind.key(below) for below in declared.kind.options()}
        first, colon, rest = message.partition(":")
        message = f"{keys.get(first, first)}{colon}{rest}"
        long = sorted((name for name in keys if re.search("[_.]", name)), key=len, reverse=True)
        pattern = rf"(?<![\w.-])({'|'.join(long)})(?![\w-])"
        return re.sub(pattern, lambda match: keys[match[1]], message)

    def settings_in(self, config: BaseConfig) -> Any:
        """Return the method's settings in a configuration."""
        return config.settings_of(self.name)

    def strategy(self, setup: Setup, options: dict[str, Any]) -> Strategy:
        """Make the strategy; `options` are what strategies of all methods take."""
        strategy: Strategy = self._make(self.strategy_class, setup, options)
        return strategy

    def validation_loss(self, setup: Setup) -> Callable[[ArrayRecord], float]:
        """Make what measures weights on the server's validation examples."""
        x, y = setup.data.train(setup.split.validation)
        x = projected(setup.config, x)

        def loss(arrays: ArrayRecord) -> float:
            weights = named_arrays(arrays)
            learned = self.learned_in(weights)
            predictor = self.judged(setup, weights, learned, cache=setup.config.cache)
            return predictor.evaluate(x, y).loss

        return loss

    def judged(
        self, setup: Setup, arrays: Arrays, learned: str, *, cache: Path | None = None
    ) -> Predictor:
        """Make the predictor, which knows the units of real targets."""
        predictor = self.predictor(setup, arrays, learned, cache=cache)
        predictor.targets = setup.data.inputs.targets
        return predictor

    def learned_in(self, arrays: Arrays) -> str:
        """Return what `learned` of :meth:`predictor` is for weights that are being judged."""
        return "network"

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        """Make a partition's client; ``owner`` among `options` are options of MaskedSums."""
        owner = options.pop("owner", {})
        if masks_itself(self.client_class):
            cache, masks = setup.config.cache / PERSONAL, self.mask_options(setup.config)
            options["secure"] = MaskedSums(**{"cache": cache, **masks, **owner})
        if setup.metrics and issubclass(self.client_class, fedntk.clients.ModelClient):
            options["metrics"] = setup.metrics
        client: NumPyClient = self._make(self.client_class, setup, options)
        return client

    def mask_options(self, config: BaseConfig) -> dict[str, Any]:
        """Return options of MaskedSums that a simulation's clients have."""
        return {}

    def predictor(
        self, setup: Setup, arrays: Arrays, learned: str, *, cache: Path | None = None
    ) -> Predictor:
        """Make what was learned: by default a network, or an ensemble of what EnsembleArrays hold.

        `arrays` are a round's global ones, and `learned`, an attribute of the strategy, says what
        they hold. `cache` is a folder for what the predictors of several rounds share, such as
        features of the test examples; None: nothing is kept.
        """
        if EnsembleArrays.are_in(arrays):
            models = EnsembleArrays.from_arrays(arrays).models
            return EnsemblePredictor(self.predictor(setup, model, learned) for model in models)
        return NetworkPredictor.from_arrays(
            setup.network, arrays, loss=setup.config.loss, device=setup.device
        )

    def require_resources(self, setup: Setup, models: int = 1) -> None:
        """Raise NotEnoughMemory if this machine lacks memory or disk for so many models."""

    def validates(self, config: BaseConfig) -> str:
        """Return the key of a setting by which held-out examples choose part of the model."""
        return ""

    def chosen_by(self, config: BaseConfig) -> str:
        """Return the key of :meth:`validates`, or that of screening by such examples."""
        by_loss = config.screening.rule == "validation"
        return "screening.rule" if by_loss else self.validates(config)

    def seeded_protection(self, config: BaseConfig) -> list[str]:
        """Name the settings whose keys come from the seed, and so protect nothing."""
        return ["projection"] if config.projection else []

    def measure(self, setup: Setup, strategy: Strategy) -> Mapping[str, float]:
        """Return further metrics of a round's models, when the server evaluates."""
        return {}

    def after_round(self, strategy: Strategy, server_round: int, folder: Path) -> None:
        """Write what else a round showed into the run's ``details``, which may be missing."""

    def after_run(self, setup: Setup, strategy: Strategy, folder: Path) -> None:
        """Write what a run showed into its ``details``, when its rounds are over."""

    def clean_up(self, config: BaseConfig) -> None:
        """Remove what clients keep on disk for a run and can make again, when it has ended."""
