"""One configuration for a run: a frozen dataclass, a TOML file, or Flower's run-config.

Keys are the field names in kebab-case. Flower's run-config knows no lists, so lists are written as
strings: ``steps = "100,200,400"``.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import operator
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import tomli_w

from fedntk.ntk.payloads import check_compression, check_privacy
from fedntk.strategies import DEFAULT_STEPS

from .files import whole

__all__ = ["Config", "ConfigError", "nearest"]


# metrics by which models can be compared; those of loss are the better the smaller
MONITORED = (
    "accuracy",
    "loss",
    "client-accuracy-mean",
    "client-accuracy-worst",
    "client-loss-mean",
    "client-loss-worst",
)


class ConfigError(ValueError):
    """A setting that cannot work; the message says which, what was expected and what came."""


# keys that do not change what a run computes, only where, how safely and with what machine
INCIDENTAL = frozenset(
    {"out", "targets", "checkpoint-every", "data-dir", "client-cpus", "client-gpus"}
)

_LIMITS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("at_least", operator.ge, "at least"),
    ("at_most", operator.le, "at most"),
    ("above", operator.gt, "more than"),
    ("below", operator.lt, "less than"),
)


def _option(default: Any, doc: str, **limits: Any) -> Any:
    """Field with its description and limits: choices, at_least, at_most, above, below."""
    return dataclasses.field(default=default, metadata={"doc": doc, **limits})


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run; checked when made.

    ``Config.describe()`` lists each key with its default, limits and meaning.

    Raises
    ------
    ConfigError
        If a value is of a wrong type or out of range, or two do not fit together.

    Examples
    --------
    >>> Config(num_clients=20).clients_per_round
    10
    >>> Config.parse({"learning-rat": 0.1})
    Traceback (most recent call last):
    fedntk.simulations.config.ConfigError: unknown key 'learning-rat'; did you mean 'learning-rate'?
    """

    method: str = _option(
        "ntk-fl", "what to run", choices=("ntk-fl", "cp-ntk-fl", "tct", "fedavg", "scaffold")
    )
    name: str = _option("", "name of the run; the method by default")
    out: str = _option("", "folder for results; by default one in runs/, named after the settings")
    seed: int = _option(0, "of the split, the initial weights, and all sampling", at_least=0)
    rounds: int = _option(20, "communication rounds", at_least=0)
    num_clients: int = _option(50, "clients; the number of Flower's nodes", at_least=1)
    clients_per_round: int = _option(10, "clients trained on a round", at_least=1)
    clients_per_evaluation: int = _option(
        10, "clients that evaluate the new model in a round; 0: none", at_least=0
    )
    min_completed: int = _option(1, "fewer valid replies leave the model unchanged", at_least=1)
    targets: str = _option("0.8,0.85,0.9", "accuracies whose first round is reported")
    monitor: str = _option(
        "accuracy",
        "metric by which a model is the best: kept as best.safetensors, and for patience",
        choices=MONITORED,
    )
    patience: int = _option(
        0, "stop after so many rounds without a better model; 0: never", at_least=0
    )
    checkpoint_every: int = _option(
        1, "rounds between checkpoints; what is lost at most when a run is killed", at_least=1
    )

    dataset: str = _option(
        "digits", "digits, mnist, fashion-mnist, cifar10, hf:<name or folder>, or npz:<file>"
    )
    data_dir: str = _option(
        "", "folder of torchvision's data sets; ~/.cache/fedntk/data by default"
    )
    image_column: str = _option("", "of a Hugging Face set; its first image column by default")
    label_column: str = _option("label", "of a Hugging Face set")
    natural_column: str = _option("", "of a Hugging Face set: whose example it is")
    validation_examples: int = _option(
        0, "training examples kept on the server, for selection = validation", at_least=0
    )

    partition: str = _option(
        "dirichlet",
        "iid; dirichlet: per class over clients; client-dirichlet: per client over classes, as in "
        "paper 000; pathological: #C classes a client; natural: by natural-column",
        choices=("iid", "dirichlet", "client-dirichlet", "pathological", "natural"),
    )
    alpha: float = _option(0.1, "concentration of the Dirichlet partitions", above=0)
    min_partition_size: int = _option(1, "of partition = dirichlet", at_least=1)
    examples_per_client: int = _option(200, "of partition = client-dirichlet", at_least=1)
    classes_per_client: int = _option(2, "of partition = pathological", at_least=1)
    class_assignment: str = _option(
        "random",
        "of partition = pathological: how clients get their classes; first-deterministic: the "
        "first is the client's number modulo the classes, as in paper 002's benchmark",
        choices=("random", "first-deterministic", "deterministic"),
    )
    train_examples: int = _option(
        0, "training examples that clients get in all, drawn from the set; 0: all", at_least=0
    )
    test_examples: int = _option(
        0, "of the test set, from its beginning, on which the server evaluates; 0: all", at_least=0
    )
    local_test_fraction: float = _option(
        0.0, "share of a client's examples kept for its own evaluation", at_least=0, below=1
    )

    model: str = _option(
        "mlp", "mlp, simple-cnn, lenet, resnet18, or <module>:<factory>(input_shape, num_classes)"
    )
    width: int = _option(100, "hidden units of the mlp", at_least=1)
    weights: str = _option(
        "", "safetensors file of the network to start from, such as another run's model.safetensors"
    )
    norm: str = _option("batch", "of resnet18", choices=("batch", "group"))
    loss: str = _option("cross-entropy", "of all methods", choices=("cross-entropy", "mse"))
    learning_rate: float = _option(0.01, "eta", above=0)

    sampling_rate: float = _option(
        1.0, "beta: share of its examples that a client draws for each round", above=0, at_most=1
    )
    projection: int = _option(
        0, "d_1': features that inputs are randomly projected to; 0: as they are", at_least=0
    )

    steps: str = _option(
        ",".join(map(str, DEFAULT_STEPS)),
        "ntk-fl, cp-ntk-fl: the grid of update steps t to choose from",
    )
    selection: str = _option(
        "clients",
        "ntk-fl, cp-ntk-fl: how t is chosen",
        choices=("clients", "linearised", "validation"),
    )
    validation_clients: int = _option(
        0, "ntk-fl, cp-ntk-fl: clients held out of training, for selection = validation", at_least=0
    )
    kernel: str = _option(
        "mean", "ntk-fl, cp-ntk-fl: as in fedntk.ntk.evolve", choices=("mean", "full")
    )
    residuals: str = _option(
        "integral", "ntk-fl, cp-ntk-fl: as in fedntk.ntk.evolve", choices=("integral", "sum")
    )
    tolerance: float = _option(1e-4, "ntk-fl, cp-ntk-fl: of the solver", above=0, below=1)
    memory_budget: float = _option(
        0.0, "ntk-fl, cp-ntk-fl: GB that the mean kernel may take; 0: what is available", at_least=0
    )
    wire: str = _option(
        "factored",
        "ntk-fl, cp-ntk-fl: form of the Jacobian on the wire",
        choices=("factored", "dense"),
    )

    sparsity: float = _option(
        0.0,
        "cp-ntk-fl, tct with solve = server: share of each tensor's numbers that is dropped",
        at_least=0,
        below=1,
    )
    bits: int = _option(
        32,
        "cp-ntk-fl, tct with solve = server: of each number sent, 1 ... 16; 32: as they are",
        at_least=1,
    )
    shuffle: bool = _option(False, "cp-ntk-fl: have a shuffling server mix the clients' rows")
    clip: float = _option(
        0.0, "cp-ntk-fl: norm of a row under differential privacy; 0: none", at_least=0
    )
    noise_multiplier: float = _option(
        0.0, "cp-ntk-fl: noise on a row, in units of clip", at_least=0
    )
    label_noise: float = _option(
        0.0, "cp-ntk-fl: probability that a label is drawn anew", at_least=0, at_most=1
    )
    delta: float = _option(1e-5, "cp-ntk-fl: at which epsilon is reported", above=0, below=1)

    local_epochs: int = _option(1, "fedavg, scaffold, tct: E", at_least=0)
    batch_size: int = _option(32, "fedavg, scaffold, tct: B", at_least=1)
    momentum: float = _option(0.0, "fedavg, scaffold, tct: of the local SGD", at_least=0, below=1)
    weight_decay: float = _option(0.0, "fedavg, scaffold, tct: of the local SGD", at_least=0)
    proximal_mu: float = _option(
        0.0, "fedavg, tct: mu of FedProx's proximal term; 0: none", at_least=0
    )
    scaffold_option: str = _option(
        "II",
        "scaffold: the new control: II: mean gradient of the local steps; I: of all examples, at "
        "the received weights",
        choices=("II", "I"),
    )
    server_learning_rate: float = _option(1.0, "scaffold: eta_g", above=0)

    bootstrap_rounds: int = _option(
        10, "tct: T_1, rounds of FedAvg; the others are for moments and stage 2", at_least=0
    )
    features: str = _option(
        "entk", "tct: tangent features, or the last layer's", choices=("entk", "last-layer")
    )
    num_features: int = _option(100_000, "tct: p; 0: all", at_least=0)
    feature_seed: int = _option(123, "tct: of the new last layer and the coordinates", at_least=0)
    normalise: bool = _option(True, "tct: whether features get mean 0 and variance 1")
    bias: bool = _option(False, "tct: whether the linear model has a bias")
    convex_loss: str = _option(
        "mse", "tct: of stage 2; cross-entropy: TCT-CE", choices=("mse", "cross-entropy")
    )
    convex_optimizer: str = _option(
        "scaffold", "tct: of stage 2", choices=("scaffold", "fedavg", "gd")
    )
    convex_learning_rate: float = _option(5e-5, "tct: eta of stage 2", above=0)
    convex_steps: int = _option(500, "tct: M, full-batch steps of a client a round", at_least=1)
    convex_solver: str = _option(
        "closed", "tct: these steps in closed form, or one by one", choices=("closed", "loop")
    )
    solve: str = _option(
        "clients",
        "tct: server: clients send their features and the server solves, in one round",
        choices=("clients", "server"),
    )
    ridge: float = _option(1e-2, "tct: of solve = server, over the mean of the diagonal", above=0)
    feature_dtype: str = _option(
        "float32", "tct: in which features that fit are kept", choices=("float32", "float16")
    )
    keep: str = _option(
        "features",
        "tct: what a client keeps on disk; nothing: features are computed anew in each round",
        choices=("features", "nothing"),
    )

    device: str = _option("auto", "auto (a GPU where there is one), cpu, cuda, cuda:1, ...")
    client_cpus: int = _option(1, "Ray: CPUs for each client at work", at_least=1)
    client_gpus: float = _option(0.0, "Ray: share of a GPU for each client at work", at_least=0)
    client_threads: int = _option(1, "CPU threads of torch in a client", at_least=1)
    server_threads: int = _option(
        0, "CPU threads of torch on the server; 0: all, or what OMP_NUM_THREADS says", at_least=0
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field)
        if self.weights:  # the same file for every process
            path = str(Path(self.weights).expanduser().absolute())
            object.__setattr__(self, "weights", path)
        self._check_together()

    def _check(self, field: dataclasses.Field[Any]) -> None:
        limits, key, expected = field.metadata, _key(field.name), type(field.default)
        value = _plain(getattr(self, field.name), expected)
        object.__setattr__(self, field.name, value)
        if type(value) is not expected:
            raise ConfigError(
                f"{key}: expected {expected.__name__}, got {type(value).__name__} {value!r}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}: expected a finite number, got {value}")
        if "choices" in limits and value not in limits["choices"]:
            raise ConfigError(
                f"{key}: expected one of {', '.join(limits['choices'])}, "
                f"got {value!r}{nearest(str(value), limits['choices'])}"
            )
        for limit, holds, words in _LIMITS:
            if limit in limits and not holds(value, limits[limit]):
                raise ConfigError(f"{key}: expected {words} {limits[limit]}, got {value}")

    def _check_together(self) -> None:
        if not self.steps_grid or any(
            a >= b for a, b in zip((0, *self.steps_grid), self.steps_grid, strict=False)
        ):
            raise ConfigError(f"steps: expected increasing whole numbers, got {self.steps!r}")
        if any(not 0 < target < 1 for target in self.target_accuracies):
            raise ConfigError(f"targets: expected numbers between 0 and 1, got {self.targets!r}")
        trainable = self.num_clients - self.validation_clients
        if self.clients_per_round > trainable:
            raise ConfigError(
                f"clients-per-round: expected at most the {trainable} clients that train, "
                f"got {self.clients_per_round}"
            )
        if self.monitor.startswith("client-") and not self.clients_per_evaluation:
            raise ConfigError(
                f"monitor = {self.monitor} needs clients-per-evaluation of at least 1, got 0"
            )
        if self.min_completed > self.clients_per_round:
            raise ConfigError(
                f"min-completed: expected at most clients-per-round = {self.clients_per_round}, "
                f"got {self.min_completed}"
            )
        if self.method == "scaffold" and not self.local_epochs:
            raise ConfigError("local-epochs: expected at least 1 with method = scaffold, got 0")
        self._check_tools()
        held_out = (self.validation_examples > 0) + (self.validation_clients > 0)
        if held_out != (self.selection == "validation"):
            raise ConfigError(
                "selection = validation goes with one of validation-examples (kept on the server) "
                f"and validation-clients (held out), got selection = {self.selection}, "
                f"validation-examples = {self.validation_examples} and "
                f"validation-clients = {self.validation_clients}"
            )
        if self.client_gpus and self.device == "cpu":
            raise ConfigError(f"client-gpus = {self.client_gpus:g} does not go with device = cpu")
        if self.partition == "natural" and not self.natural_column:
            raise ConfigError("partition = natural needs natural-column, the column of the ids")

    def _check_tools(self) -> None:
        try:
            check_compression(self.sparsity, self.bits)
            check_privacy(self.clip, self.noise_multiplier, self.label_noise)
        except ValueError as error:
            raise ConfigError(str(error).replace("_", "-")) from None
        tools = ("sparsity", "bits", "shuffle", "clip", "noise_multiplier", "label_noise")
        sends_features = self.method == "tct" and self.solve == "server"
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("sparsity", "bits") and sends_features:
                continue
            if field.name in tools and value != field.default and self.method != "cp-ntk-fl":
                raise ConfigError(
                    f"{_key(field.name)} = {value} goes with method = cp-ntk-fl, got {self.method}"
                )
        if sends_features and self.convex_loss != "mse":
            raise ConfigError(f"solve = server needs convex-loss = mse, got {self.convex_loss}")
        if self.method == "tct" and self.feature_dtype == "float16" and not self.normalise:
            raise ConfigError(
                "feature-dtype = float16 would lose small features without normalise; use float32"
            )
        if self.noise_multiplier and (self.selection == "clients" or self.validation_clients):
            raise ConfigError(
                f"selection = {self.selection} asks clients for losses of their examples, which "
                f"noise-multiplier = {self.noise_multiplier:g} does not cover; use linearised, or "
                "validation with validation-examples"
            )
        if self.noise_multiplier and self.clients_per_evaluation and not self.local_test_fraction:
            raise ConfigError(
                "evaluations on training examples are not covered by noise-multiplier = "
                f"{self.noise_multiplier:g}; set local-test-fraction, or clients-per-evaluation = 0"
            )

    @property
    def folder(self) -> Path:
        """Where results go: `out`, or a folder in ``runs`` of its own for each configuration."""
        if self.out:
            return Path(self.out).expanduser().absolute()
        dataset = self.dataset.replace(":", "-").replace("/", "-")
        settings = json.dumps({k: v for k, v in self.values().items() if k not in INCIDENTAL})
        digest = hashlib.sha256(settings.encode()).hexdigest()[:6]
        name = f"{self.name or self.method}-{dataset}-{self.seed}-{digest}"
        return Path("runs").absolute() / name

    def differences(self, other: "Config") -> dict[str, tuple[Any, Any]]:
        """Key -> (own value, the other's) of the settings that can change a run's results."""
        theirs = other.values()
        return {
            key: (value, theirs[key])
            for key, value in self.values().items()
            if value != theirs[key] and key not in INCIDENTAL
        }

    @property
    def steps_grid(self) -> tuple[int, ...]:
        """`steps` as numbers."""
        return tuple(_numbers("steps", self.steps, int))

    @property
    def target_accuracies(self) -> tuple[float, ...]:
        """`targets` as numbers."""
        return tuple(_numbers("targets", self.targets, float))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from kebab-case (or snake_case) keys; the rest are defaults."""
        for key in values:
            cls._field(key)
        return cls(**{key.replace("-", "_"): value for key, value in values.items()})

    @classmethod
    def _field(cls, key: str) -> dataclasses.Field[Any]:
        known = {_key(field.name): field for field in fields(cls)}
        if _key(key) not in known:
            hint = nearest(_key(key), known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r}{hint}")
        return known[_key(key)]

    @classmethod
    def convert(cls, key: str, text: str) -> bool | float | int | str:
        """Read a value from text, as the type of its key.

        Raises
        ------
        ConfigError
            If there is no such key, or the text is no such value.
        """
        kind: type[Any] = type(cls._field(key).default)
        if kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        else:
            with contextlib.suppress(ValueError):
                value: float | int | str = kind(text)
                return value
        raise ConfigError(f"{_key(key)}: expected {kind.__name__}, got {text!r}")

    def replace(self, **overrides: Any) -> Self:
        """Return a copy with other settings (snake_case)."""
        return self.parse({**self.values(), **{_key(k): v for k, v in overrides.items()}})

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Self:
        """Read a TOML file; `overrides` (snake_case) win over it.

        Raises
        ------
        ConfigError
            If the file is missing or no TOML, or a key or value is wrong.
        """
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"no configuration at {path}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is no TOML: {error}") from None
        try:
            return cls.parse({**{_key(k): v for k, v in values.items()}, **overrides})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def values(self) -> dict[str, Any]:
        """Kebab-case key -> value, for a run-config or a TOML file."""
        return {_key(field.name): getattr(self, field.name) for field in fields(self)}

    def save(self, path: str | Path) -> None:
        """Write all keys as TOML."""
        with whole(Path(path)) as file:
            file.write(tomli_w.dumps(self.values()).encode())

    @classmethod
    def describe(cls) -> str:
        """One line for each key: default, choices, meaning."""
        lines = []
        for field in fields(cls):
            choices = field.metadata.get("choices")
            among = f" ({', '.join(choices)})" if choices else ""
            lines.append(f"{_key(field.name)} = {field.default!r}{among}: {field.metadata['doc']}")
        return "\n".join(lines)


def nearest(value: str, known: Iterable[str]) -> str:
    """Say which of the known words is meant, if one is near; empty if none is."""
    near = difflib.get_close_matches(value, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _plain(value: Any, expected: type) -> Any:
    """Convert what users have at hand: NumPy's numbers, paths, whole numbers for floats."""
    if isinstance(value, np.generic):
        value = value.item()
    if expected is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    return float(value) if expected is float and type(value) is int else value


def _key(name: str) -> str:
    return name.replace("_", "-")


def _numbers(key: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(
            f"{key}: expected numbers with commas between them, got {text!r}"
        ) from None
