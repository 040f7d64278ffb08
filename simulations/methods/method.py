"""What the simulations ask of a method; this file knows none of them."""

import re
import types
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from flwr.client import NumPyClient
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.clients import SGDClient
from fedntk.ntk import EnsemblePredictor, NetworkPredictor, Predictor
from fedntk.ntk.options import Declared, Option
from fedntk.ntk.payloads import EnsembleArrays
from fedntk.strategies import BaseStrategy

from ..config.config import Config
from ..config.registry import ConfiguredMethod
from ..config.settings import ConfigError, Settings
from ..data.kept_examples import KeptExamples, Own
from ..data.load import Data
from ..data.partitions import Split

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure

__all__ = ["Arrays", "Method", "Setup"]

S = TypeVar("S", bound=Settings)
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Setup:
    """What the parts of a run are made from.

    Attributes
    ----------
    config : Config
        All settings.
    data : Data
        The data set.
    split : Split
        Which client has which training examples.
    network : nn.Module
        With the weights that the run starts from. Clients overwrite them.
    kept : KeptExamples
        Of the clients that are made from this setup, in one thread.
    """

    config: Config
    data: Data
    split: Split
    network: nn.Module
    kept: KeptExamples = field(default_factory=KeptExamples)

    @property
    def max_examples(self) -> int:
        """Examples that a client may have at most."""
        return self.config.max_examples or len(self.data.y_train)

    def evaluation_set(self) -> tuple[Tensor, Tensor]:
        """Return the examples that the server evaluates on, standardised, with their labels."""
        config, split = self.config, self.split
        if config.evaluate_on == "test":
            x, y = self.data.test()
            most = config.test_examples or len(y)
            return x[:most], y[:most]
        if len(split.validation):
            return self.data.train(split.validation)
        if config.validation_clients:
            return self.data.train(np.concatenate(split.clients[-config.validation_clients :]))
        kept = [split.train_and_test(i, config)[1] for i in range(len(split.clients))]
        return self.data.train(np.concatenate(kept))

    def examples(self, partition: int) -> Own:
        """Return a partition's examples for training and for its own evaluation, standardised."""

        def make() -> Own:
            train, kept = self.split.train_and_test(partition, self.config)
            if self._on_private_test:
                return Own(self.data.train(train), self.data.test(self.split.tests[partition]))
            return Own(self.data.train(train), self.data.train(kept))

        return self.kept.of(partition, make)

    @property
    def _on_private_test(self) -> bool:
        """Whether clients evaluate on parts of the test set."""
        return self.config.private_test and self.config.evaluate_on == "test"

    @cached_property
    def without_examples_to_evaluate(self) -> frozenset[int]:
        """Clients that are never to evaluate: with private-test, those whose part is empty.

        Elsewhere a client without examples of its own evaluates on its training examples.

        Raises
        ------
        ConfigError
            If that is all clients, and some are to evaluate.
        """
        config, split = self.config, self.split
        if not config.private_test:
            return frozenset()
        sizes = (
            [len(own) for own in split.tests]
            if self._on_private_test
            else [split.num_kept(i, config) for i in range(len(split.clients))]
        )
        if config.clients_per_evaluation and not any(sizes):
            raise ConfigError(
                "private-test: expected a client with examples to evaluate on, got none; "
                + (
                    "the test set has no classes, or owners, of the clients"
                    if self._on_private_test
                    else f"raise local-test-fraction = {config.local_test_fraction:g}"
                )
                + ", or set clients-per-evaluation = 0"
            )
        return frozenset(i for i, size in enumerate(sizes) if not size)

    @cached_property
    def device(self) -> str:
        """Where networks run; ``auto`` is a GPU where there is one.

        Raises
        ------
        ConfigError
            If the configuration names no device, or one that is not there.
        """
        name = self.config.device
        if name == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"device = {name}: cannot be used: {reason}") from error
        return name


class Method(ConfiguredMethod[S], ABC):
    """All that the simulations know of one method.

    Write a subclass in a module of its own, and an object of it as ``METHOD``. The modules of
    :mod:`fedntk.simulations.methods` are found by themselves; another package names its object in
    the entry-point group ``fedntk.methods``.

    Attributes
    ----------
    name : str
        In kebab-case: the value of the setting ``method``, and the table of the method's settings.
    strategy_class, client_class : type
        Of the method. Their options that files can hold are the method's settings, but for those
        that all strategies or clients have and those that are common settings.
    parts : tuple of type
        Further classes with options, from which the strategy is made.
    own_settings : type of Settings
        Settings that the classes lack, or have with another default or meaning.
    apart : frozenset of str
        Options that are the method's own settings though common settings have the same name; of the
        first of these classes that has them.
    settings : type of Settings
        All of the method's settings, made from these.
    baseline : bool
        Whether it is there to compare with: such methods have no notebook.
    headline : str
        Metric of a round that says how good the method is, as a share: it is shown while a run is
        at work, and in the end.
    metrics : tuple of str
        Names of what the strategy reports of a training round besides what all report. Others are
        recorded, too, but only some of them, as clients may choose names.
    evaluation_metrics : tuple of str
        Names of what clients report of an evaluation besides loss and accuracy.
    """

    strategy_class: ClassVar[type[BaseStrategy]]
    client_class: ClassVar[type[NumPyClient]]
    parts: ClassVar[tuple[type[Declared], ...]] = ()
    own_settings: ClassVar[type[Settings]] = Settings
    apart: ClassVar[frozenset[str]] = frozenset()
    baseline: ClassVar[bool] = False
    headline: ClassVar[str] = "accuracy"
    metrics: ClassVar[tuple[str, ...]] = ()
    evaluation_metrics: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", self.name):
            raise ValueError(f"name: expected words in kebab-case, got {self.name!r}")
        if not hasattr(self, "settings"):
            self.settings = self._made_settings()
        if self.settings.table != self.name:
            raise ValueError(
                f"settings: expected table = {self.name!r}, got {self.settings.table!r}"
            )

    def _made_settings(self) -> Any:
        """Make the class of the method's settings from the options of its classes."""
        common = {**Config.options(), **BaseStrategy.options(), **SGDClient.options()}
        own = self.own_settings.options()
        found: dict[str, Option] = {}
        for kind in self._declared():
            for name, declared in kind.options().items():
                is_own = name in self.apart or name not in common
                if declared.in_files and is_own and name not in own:
                    found.setdefault(name, declared)
        body: dict[str, Any] = {"table": self.name, "__doc__": f"Settings of {self.name}."}
        body["__annotations__"] = {name: declared.kind for name, declared in found.items()}
        body |= {name: declared.field() for name, declared in found.items()}
        keywords, bases = {"frozen": True, "eq": True}, (self.own_settings,)
        return types.new_class("MethodSettings", bases, keywords, lambda names: names.update(body))

    def _declared(self) -> list[type[Declared]]:
        """Return the classes of the method that declare options."""
        kinds = (self.strategy_class, *self.parts, self.client_class)
        return [kind for kind in kinds if issubclass(kind, Declared)]

    def _given(self, kind: type, config: Config, settings: S) -> dict[str, Any]:
        """Return the options of a class that the settings say."""
        given = {}
        for name, declared in kind.options().items() if kind in self._declared() else ():
            homes = [home for home in self._declared() if name in home.options()]
            is_own = name not in self.apart or kind is homes[0]
            if declared.in_files and is_own and name in self.settings.options():
                given[name] = getattr(settings, name)
            elif declared.in_files and name in Config.options():
                given[name] = getattr(config, name)
        return given

    def _values(self, kind: type, setup: Setup) -> dict[str, Any]:
        """Return the options of a class that a run's settings or parts give."""
        config = setup.config
        parts = {
            "network": setup.network,
            "device": setup.device,
            "cache": config.folder / "cache" / "personal",
        }
        names = kind.options() if kind in self._declared() else ()
        shared = {name: part for name, part in parts.items() if name in names}
        return {**shared, **self._given(kind, config, self.own(config))}

    def check(self, config: Config, settings: S) -> None:
        """Refuse settings that do not go together, with a ConfigError."""
        for kind in self._declared():
            given = self._given(kind, config, settings)
            if kind is self.strategy_class:
                given |= self.arguments(config, settings)
            try:
                kind.check_together(given)
            except ValueError as error:
                raise ConfigError(self._in_keys(str(error))) from None

    def arguments(self, config: Config, settings: S) -> dict[str, Any]:
        """Return arguments of the strategy that the settings say, and its rules speak of."""
        del config, settings
        return {}

    def _in_keys(self, message: str) -> str:
        """Name settings by their keys in an error about options."""
        keys = {name: self.settings.key(name) for name in self.settings.options()}
        keys = {**{name: Config.key(name) for name in Config.options()}, **keys}
        first, colon, rest = message.partition(":")
        message = f"{keys.get(first, first)}{colon}{rest}"
        long = [name for name in keys if "_" in name]
        pattern = rf"(?<![\w.-])({'|'.join(long)})(?![\w-])"
        return re.sub(pattern, lambda found: keys[found[1]], message)

    def own(self, config: Config) -> S:
        """Return the method's settings in a configuration."""
        return cast(S, config.settings_of(self.name))

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        """Make the strategy.

        Parameters
        ----------
        setup : Setup
            Of the run.
        options : dict
            What strategies of all methods take.

        Raises
        ------
        ValueError
            If its arguments do not fit together.
        """
        return self.strategy_class(**{**self._values(self.strategy_class, setup), **options})

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        """Make the client with the examples of one partition; `options` are common to all."""
        del partition
        return self.client_class(**{**self._values(self.client_class, setup), **options})

    def predictor(
        self, setup: Setup, arrays: Arrays, learned: str, *, cache: Path | None = None
    ) -> Predictor:
        """Make what was learned: by default a network, or an ensemble of what EnsembleArrays hold.

        Parameters
        ----------
        setup : Setup
            Of the run.
        arrays : dict of str to ndarray
            A round's global arrays, by name.
        learned : str
            What they hold, as the strategy's attribute of that name said.
        cache : path, optional
            Folder for what the predictors of several rounds share, such as features of the test
            examples. None: nothing is kept.
        """
        if EnsembleArrays.are_in(arrays):
            models = EnsembleArrays.from_arrays(arrays).models
            return EnsemblePredictor(self.predictor(setup, own, learned) for own in models)
        del cache
        return NetworkPredictor.from_arrays(
            setup.network, arrays, loss=setup.config.loss, device=setup.device
        )

    def require_resources(self, setup: Setup, models: int = 1) -> None:
        """Refuse what all clients' examples would take of this machine's memory and disk.

        It raises NotEnoughMemory before the first round. `models` are learned beside each other.
        """

    def validates(self, config: Config) -> bool:
        """Say whether a run chooses part of its model by examples that are held out."""
        del config
        return False

    def seeded_protection(self, config: Config) -> list[str]:
        """Name the settings whose keys or noise the app derives from the run's seed.

        They show what protection costs, and protect nothing: clients with examples of their own
        refuse them.
        """
        return ["projection"] if config.projection else []

    def measured(self, setup: Setup, strategy: BaseStrategy) -> Mapping[str, float]:
        """Measure what else the server can of a round's models, where it evaluates."""
        del setup, strategy
        return {}

    def after_round(self, strategy: BaseStrategy, server_round: int, folder: Path) -> None:
        """Write what else a round showed.

        Parameters
        ----------
        strategy : BaseStrategy
            After the round.
        server_round : int
            Its number; a round may be run again after a crash.
        folder : Path
            In the run's folder, ``details``. It is not there before something is written.
        """

    def after_run(self, setup: Setup, strategy: BaseStrategy, folder: Path) -> None:
        """Write what a run showed, when its rounds are over.

        Parameters
        ----------
        setup : Setup
            Of the run.
        strategy : BaseStrategy
            After the last round; made anew where a run that was cut off had no round left.
        folder : Path
            As of :meth:`after_round`.
        """

    def pictures(self, folder: Path) -> Mapping[str, "Figure"]:
        """Draw what :meth:`after_round` and :meth:`after_run` wrote, for the report, by name."""
        del folder
        return {}

    def clean_up(self, config: Config) -> None:
        """Remove what clients keep on disk for a run and can make again, when it has ended."""
