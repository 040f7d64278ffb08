"""One configuration for a run: a frozen dataclass, a TOML file, or Flower's run-config.

Keys are the field names in kebab-case. Settings of one method are a table of its name, ``[tct]``
with ``num-features = 1000``; without tables, keys have a dot: ``tct.num-features``.
Flower's run-config knows no lists, so lists are written as strings: ``steps = "100,200,400"``.
"""

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import cached_property
from logging import getLogger
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import tomli_w

from fedntk.clients import LocalSGD, SGDClient
from fedntk.ntk.noise import Noise
from fedntk.ntk.options import part, parts_of
from fedntk.ntk.support.files import whole
from fedntk.strategies import Strategy

from ..attacks import ATTACKS
from ..errors import naming
from .data import SplitSettings, absolute_dataset
from .importing import ID, STRANGE, UNTRUSTED, id_of, name_object, renew_names, whole_name
from .metrics import (
    BUILT_IN,
    OF_TARGETS,
    Metric,
    load_metrics,
    metrics_of,
    metrics_setting,
    quantity_of,
)
from .private import public_parts
from .sections import (
    AsynchronySettings,
    AverageSettings,
    CentreSettings,
    SamplingSettings,
    ScreeningSettings,
    SecureSettings,
)
from .settings import ConfigError, Settings, Value, key_of, nearest, setting

# keys that do not change what a run computes, only where, how safely and with what machine
INCIDENTAL = frozenset(
    {
        *("out", "targets", "checkpoint-every", "data-dir"),
        *("ray-address", "client-cpus", "client-gpus"),
    }
)
CONF = Path(__file__).parents[1] / "conf"  # files that come with fedntk
OBJECTS = ("method", "model", "metrics")  # settings that may name what was passed in Python
# key of Flower's run-config that holds the settings of other packages' methods, as JSON: the
# app's pyproject.toml has to list all keys
PLUGGED_IN = "plugged-in"
CACHE = "cache"  # a folder in that of a run
logger = getLogger("flwr")
REPLACE_RUN = "replace that run with again=True (on the command line --again)"
MONITORED = (
    *("accuracy", "loss", "client-accuracy-mean", "client-accuracy-worst"),
    *("client-loss-mean", "client-loss-worst"),
    *("r2", "mae", "client-r2-mean", "client-r2-worst", "client-mae-mean", "client-mae-worst"),
)
PRETRAINED = ("efficientnet-lite0", "torchvision", "timm", "hf", "text-e5")  # begin their names
# with real targets, the values of settings that have their defaults
OF_REGRESSION = {"loss": "mse", "partition": "iid", "monitor": "r2"}
END = "# end of the settings\n"  # of a file that is whole


def _whole_path(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


class BaseConfig(SplitSettings, frozen=True, eq=False):
    """All that :class:`~fedntk.simulations.Config` is but for the table of the methods."""

    objects: ClassVar[dict[str, Any]]  # id -> what was passed in Python, of this configuration
    methods: ClassVar[dict[str, Any]]  # setting -> method that is not installed
    chosen_method: ClassVar[Any]  # the method that is run
    method_table: ClassVar[Any]  # has own_methods(), all_methods() and find_method(...)

    method: str = setting("ntk-fl", "method: one of those here, or <file>.py:<class>")
    name: str = setting("", "name of the run; the method by default")
    out: str = setting("", "folder for results; by default one in runs/, named after the settings")
    rounds: int = setting(20, "communication rounds", at_least=0)
    clients_per_round: int = setting(
        0, "clients that train in a round; 0: 10, or all if they are fewer", at_least=0
    )
    clients_per_evaluation: int = setting(
        10, "clients that evaluate the new model in a round; 0: none", at_least=0
    )
    evaluate_every: int = setting(
        1, "rounds from one evaluation to the next; the last round always has one", at_least=1
    )
    min_completed: float = Strategy.options()["min_completed"].field()
    round_deadline: float = Strategy.options()["round_deadline"].field()
    lost_share: float = setting(
        0.0, "share of clients, drawn anew in each round, that are gone for it", at_least=0, below=1
    )
    late_share: float = setting(
        0.0, "share of clients that train, and answer after round-deadline", at_least=0, below=1
    )
    max_examples: int = setting(
        0, "most examples that a client may claim; 0: as many as the training set has", at_least=0
    )
    targets: tuple[float, ...] = setting(
        (0.8, 0.85, 0.9), "accuracies whose first round is reported", above=0, below=1
    )
    metrics: str = setting(
        "",
        "further metrics of what was learned, on the examples of server and clients: f1-macro, "
        "auc, balanced-accuracy, <file>.py:<function>, <module>:<function>, with commas between",
    )
    monitor: str = setting(
        "accuracy",
        "metric by which a model is the best, the smallest of a loss and the largest of others: "
        "kept as best.safetensors, and for patience; may be one of metrics",
    )
    patience: int = setting(
        0, "rounds without a better model after which a run stops; 0: never", at_least=0
    )
    public: str = setting(
        "",
        "with noise: what its epsilon need not cover, as it is known without the training "
        "examples; some of schema (columns, classes), moments (of inputs), model, weights",
    )
    checkpoint_every: int = setting(
        1, "rounds between checkpoints; what is lost at most when a run is killed", at_least=1
    )

    validation_clients: int = setting(0, "clients held out of training by all methods", at_least=0)
    evaluate_on: Literal["test", "validation"] = setting(
        "test",
        "what the server's accuracy and loss are measured on: the test set, or validation-examples "
        "(the examples of validation-clients, if there are only these; with private-test and "
        "neither, the local-test-fraction of all clients); with validation, validation-clients, if "
        "there are any, are the only clients that evaluate",
    )
    test_examples: int = setting(
        0, "first examples of the test set, on which the server evaluates; 0: all", at_least=0
    )

    model: str = setting(
        "mlp",
        "mlp (with BatchNorm for fed-bn), simple-cnn, lenet, lenet-bn (with BatchNorm), "
        "digits-cnn, resnet18, char-lstm, linear, two-patch-cnn, scattering (features of images, "
        "nothing trained); pre-trained: efficientnet-lite0, torchvision:<name>, timm:<name>, "
        "hf:<name or folder>, and of texts text-e5; or your own, <file>.py:<function> or "
        "<module>:<function>, called with the shape of an example and the number of classes",
    )
    trained: str = setting(
        "auto",
        "part of the network that is trained and sent, while what comes before is frozen: head "
        "(the last linear layer), last-block, the name of the first module that is trained, such "
        "as layer4, or all; auto: head of a pre-trained network, all of others",
    )
    adapters: Literal["none", "lora", "ffa-lora", "tangent-lora"] = setting(
        "none",
        "low-rank adapters B A beside the frozen layers of the trained part; they and the last "
        "linear layer are trained and sent: lora; ffa-lora (A stays as it was drawn); or "
        "tangent-lora (features for any method: the gradient at B and at the last layer)",
    )
    adapter_rank: int = setting(4, "r, of A (r, d_in) and B (d_out, r)", at_least=1)
    adapter_alpha: float = setting(8.0, "adapters are multiplied by alpha / r", above=0)
    adapter_targets: str = setting(
        "",
        "layers with adapters, names or their last parts with commas between them; by default all "
        "linear layers and convolutions that can have them",
    )
    pretrained_weights: str = setting(
        "",
        "safetensors or torch file of a pre-trained network's weights, on every machine that takes "
        "part; by default those that come with the network, or are downloaded",
    )
    image_size: int = setting(
        0,
        "height and width to which pictures are resized for a pre-trained network; smaller is "
        "faster; 0: those that it was trained with",
        at_least=0,
    )
    width: int = setting(
        100,
        "hidden units of the mlp, of each layer of char-lstm, and of the last hidden layer of "
        "digits-cnn, whose other layers are in proportion: 512 as by Li et al. 2021; filters of "
        "each class of two-patch-cnn",
        at_least=1,
    )
    weights: str = setting(
        "", "safetensors file of the network to start from, such as another run's model.safetensors"
    )
    init: Literal["default", "he", "xavier"] = setting(
        "default",
        "first weights: those that the network's layers draw; or he or xavier, all trained "
        "matrices and filters drawn anew by that rule",
    )
    norm: Literal["batch", "group"] = setting("batch", "normalisation in resnet18")
    groups: int = setting(32, "groups of channels in resnet18 with norm = group", at_least=1)
    random_features: int = setting(
        0,
        "p random features of the last layer's inputs, which a last layer drawn anew is given in "
        "their place; 0: none, but one-exchange then takes 200 to 1,000 by the size of an example, "
        "of bandwidth 1.6, unless it has validation-examples, bits = 32 or epsilon",
        at_least=0,
    )
    expand: Literal["fourier", "frequencies"] = setting(
        "fourier",
        "kind of random-features: random Fourier features; or, for model = scattering, the lowest "
        "frequencies, which are not random, for sums with noise",
    )
    bandwidth: float = setting(
        0.3,
        "standard deviation of the Gaussian kernel that random Fourier features estimate, for "
        "inputs of length 1; about 1.6 for model = scattering",
        above=0,
    )
    loss: Literal["cross-entropy", "mse"] = setting("cross-entropy", "loss of all methods")
    learning_rate: float = setting(0.01, "eta: step of SGD, or of gradient flow", above=0)

    sampling_rate: float = SGDClient.options()["sampling_rate"].field()
    projection: int = setting(
        0, "d_1': features that inputs are randomly projected to; 0: as they are", at_least=0
    )
    projection_kind: Literal["gaussian", "low-frequency"] = setting(
        "gaussian", "of projection: random, or the lowest frequencies of images, randomly rotated"
    )

    local_epochs: int = setting(1, "E: a client's passes of SGD in a round", at_least=0)
    batch_size: int = setting(32, "B: examples in a step of local SGD", at_least=1)
    optimizer: Literal["sgd", "adam"] = LocalSGD.options()["optimizer"].field()
    rate_decay: float = LocalSGD.options()["rate_decay"].field()
    rate_decay_after: int = LocalSGD.options()["rate_decay_after"].field()
    momentum: float = setting(0.0, "momentum of local SGD", at_least=0, below=1)
    weight_decay: float = setting(0.0, "weight decay of local SGD", at_least=0)
    class_prior: bool = LocalSGD.options()["class_prior"].field()
    class_weights: tuple[float, ...] = LocalSGD.options()["class_weights"].field()

    attack: str = setting(
        "none",
        "what clients that lie do, to test screening. To their examples: label-shift (each label "
        "is the next class), label-flip (their most frequent class becomes the next), random-"
        "labels, backdoor (half of the images get a patch and class 0). To their replies: "
        "sign-flip, scaling, false-prototypes, false-gram, false-jacobians (large ones, of shifted "
        "labels); little-is-enough, inner-product and mimic know the honest replies. absent: they "
        "are never asked to train, which is what a screening that knew them would leave",
    )
    liars: int = setting(
        0, "clients that lie, drawn among those of at least the median size", at_least=0
    )
    attack_factor: float = setting(
        0.0,
        "strength: of sign-flip, scaling (factor), little-is-enough (z), inner-product (epsilon), "
        "false-prototypes, false-jacobians (factor); 0: 1, 10, 1.5, 1, 1 and 50",
        at_least=0,
    )

    device: str = setting("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    ray_address: str = setting(
        "",
        "Ray: address of a running cluster, such as 10.0.0.1:6379, or auto for this machine's; by "
        "default the run starts a Ray of its own",
    )
    client_cpus: int = setting(1, "Ray: CPUs for each running client", at_least=1)
    client_gpus: float = setting(0.0, "Ray: share of a GPU for each running client", at_least=0)
    client_threads: int = setting(1, "CPU threads of torch in a client", at_least=1)
    server_threads: int = setting(
        0, "CPU threads of torch on the server; 0: all, or what OMP_NUM_THREADS says", at_least=0
    )

    screening: ScreeningSettings = part(
        "how malicious replies are found and borne", default=ScreeningSettings
    )
    secure: SecureSettings | None = part(
        "secure aggregation: clients mask what they send, and the server learns only the sum over "
        "all of them (Bonawitz et al., CCS 2017); four more exchanges in the round, and at least "
        "three clients. Sums over features need bits = 2 ... 8, and are the same to the bit as "
        "without masks; of weights it sees only the average, and cannot screen them",
        default=None,
    )
    sampling: SamplingSettings = part("which clients are asked", default=SamplingSettings)
    average: AverageSettings | None = part(
        "an exponential mean of the weights over the rounds that changed them is evaluated and "
        "returned in their place, while clients train from the newest weights",
        default=None,
    )
    centre: CentreSettings | None = part(
        "subtract the mean over all clients from the inputs, after a projection if there is one; "
        "clients are asked for their sums before the first round",
        default=None,
    )
    asynchrony: AsynchronySettings | None = part(
        "a reply counts in whichever round it comes: a round asks the live clients that have yet "
        "to answer, and ends when all have, when a new node is there, or at its round-deadline, "
        "which is needed; a client without an answer after the run's timeout is asked again",
        default=None,
    )

    tables: tuple[Settings, ...] = ()  # of the chosen method, and others' that are not defaults

    def __init__(
        self,
        *layers: Mapping[str, Any],
        objects: Mapping[str, Any] = MappingProxyType({}),
        methods: Mapping[str, Any] = MappingProxyType({}),
        **overrides: Any,
    ) -> None:
        """Take settings; what comes later wins. Objects and methods are the attributes' values."""
        objects, methods = dict(objects), dict(methods)
        for table in overrides.pop("tables", ()):  # from dataclasses.replace
            overrides |= table.values()
        all_layers = *layers, overrides
        place = self.options()["method"].default
        for layer in all_layers:  # the table of a method may be in any of them
            if "method" in layer:
                place, method = self.method_table.find_method(layer["method"], methods)
                methods[place] = method
        chosen = methods.setdefault(place, self.method_table.all_methods().get(place))
        for name, value in (("objects", objects), ("methods", methods), ("chosen_method", chosen)):
            object.__setattr__(self, name, value)
        flat = self._merged(all_layers) | {"method": place}
        if callable(flat.get("model")):
            flat["model"] = self._pass(flat["model"])
        if "metrics" in flat:
            recorded = (*chosen.metrics, *OF_TARGETS * (flat.get("task") == "regression"))
            flat["metrics"] = metrics_setting(flat["metrics"], recorded, self._pass)
        by_table: dict[str, dict[str, Any]] = {}
        places = self._places()
        for key, value in flat.items():
            table, name = places[key] if key in places else self._unknown(key)
            by_table.setdefault(table, {})[name] = value
        common = by_table.get("", {})
        for name, option in self.options().items():
            value = common.get(name, option.default)
            if common.get("task") == "regression" and value == option.default:
                value = OF_REGRESSION.get(name, value)
                if name in common and value != option.default:
                    logger.info("task = regression: %s = %s", self.key(name), value)
            object.__setattr__(self, name, value)
        for name in parts_of(type(self)):
            object.__setattr__(self, name, self.section_from(name, by_table))
        self.__post_init__()
        tables = [method.settings.from_tables(by_table) for method in self.known_methods().values()]
        installed = self.method_table.all_methods()
        acting = (
            settings
            for settings in tables
            if settings.table == chosen.name
            or (settings.table in installed and settings != type(settings)())
        )
        object.__setattr__(self, "tables", tuple(acting))
        chosen.check(self, self.settings)
        for name in ("class_prior", "class_weights"):
            if getattr(self, name) and not chosen.reads(name, self):
                has_option = name in self.settings.options()
                cure = f"; set {self.settings.key(name)}" if has_option else ""
                needed = "local SGD" + " or sums of features by class" * (name == "class_weights")
                raise ConfigError(f"{key_of(name)} needs {needed}, which {self.method} lacks{cure}")

    def _whole_model(self) -> str:
        kind, _, place = self.model.partition(":")
        if not self.is_pretrained:
            return whole_name(self.model)
        is_folder = kind == "hf" and Path(place).expanduser().is_dir()
        return f"{kind}:{_whole_path(place)}" if is_folder else self.model

    def _check_pretrained(self) -> None:
        """Refuse settings of pre-trained networks for others, and others' for these."""
        for name in ("pretrained_weights", "image_size"):
            if getattr(self, name) and (not self.is_pretrained or self.takes_texts):
                raise ConfigError(
                    f"{self.key(name)} goes with a pre-trained network of pictures, such as model "
                    f"= efficientnet-lite0; got model = {self.model}"
                )
        for name in ("adapter_rank", "adapter_alpha", "adapter_targets"):
            value = getattr(self, name)
            if self.adapters == "none" and value != self.options()[name].default:
                raise ConfigError(
                    f"{self.key(name)} goes with adapters = lora, ffa-lora or tangent-lora; got "
                    f"{value} with adapters = none"
                )
        if self.takes_texts and self.trained_part != "head":
            raise ConfigError(
                f"trained = {self.trained}: of model = {self.model} only the head can be trained; "
                "expected head"
            )
        if not self.trained:
            raise ConfigError("trained: expected head, last-block, all or a module's name, got ''")
        if self.takes_features:
            if self.attack == "backdoor":
                raise ConfigError(
                    f"attack = backdoor marks pictures, and with trained = {self.trained_part} and "
                    f"adapters = {self.adapters} clients have features of them; choose another "
                    "attack, or trained = all"
                )
            if self.projection_kind != "gaussian":
                raise ConfigError(
                    f"projection-kind = {self.projection_kind} is of pictures, and with trained = "
                    f"{self.trained_part} features are projected; expected gaussian"
                )
        if self.adapters != "none" and self.init != "default":
            raise ConfigError(f"init = {self.init} would draw adapters anew, which begin with 0")
        if self.adapters != "none" and self.projection:
            raise ConfigError(
                "projection: adapters are of a network for examples as they are; set projection = "
                f"0, or adapters = none, got {self.projection}"
            )
        if not self.is_pretrained:
            return
        if self.projection and self.trained_part == "all":
            raise ConfigError(
                "projection: a pre-trained network takes pictures; set trained = head, whose "
                f"features can be projected, or projection = 0, got {self.projection}"
            )
        kind, _, name = self.model.partition(":")
        if (kind in ("efficientnet-lite0", "text-e5")) == bool(name):
            raise ConfigError(
                "model: expected efficientnet-lite0, torchvision:<name>, timm:<name>, hf:<name or "
                f"folder> or text-e5, got {self.model!r}"
            )
        if self.init != "default":
            raise ConfigError(f"init = {self.init} would draw a pre-trained network's weights anew")
        if not self.standardise:
            raise ConfigError(
                "standardise = false: a pre-trained network takes inputs that are standardised "
                "as its own were; leave it out"
            )

    @property
    def is_pretrained(self) -> bool:
        """Whether the network is a pre-trained one, which says how its inputs are scaled."""
        return self.model.partition(":")[0] in PRETRAINED

    @property
    def takes_texts(self) -> bool:
        """Whether the network takes texts."""
        return self.model == "text-e5"

    @property
    def trained_part(self) -> str:
        """The part of the network that is trained: all, head, last-block or a module's name."""
        if self.trained != "auto":
            return self.trained
        return "head" if self.is_pretrained else "all"

    @property
    def takes_features(self) -> bool:
        """Whether the trained part takes features of examples, not the examples."""
        return self.trained_part != "all" or self.adapters == "tangent-lora"

    def known_methods(self) -> dict[str, Any]:
        """Return the methods by name: those installed, and those that were named or passed."""
        named = {method.name: method for method in self.methods.values()}
        return {**self.method_table.all_methods(), **named}

    def knowing(self, *methods: Any) -> Self:
        """Return a copy that takes settings of further methods."""
        find = self.method_table.find_method
        return self.replace(methods=dict(find(method, self.methods) for method in methods))

    def _pass(self, thing: Any) -> str:
        """Return the name of an object that was passed, and hold it."""
        name = name_object(thing)
        self.objects[id_of(name)] = thing
        return name

    def passed(self, named: str) -> Any:
        """Return the object of a name, if it was passed in this process; else None."""
        return self.objects.get(id_of(named))

    @property
    def metrics_of_clients(self) -> tuple[str, ...]:
        """Names of the further metrics of clients' evaluations.

        There are none with real targets, whose means clients lack, and none with a mechanism, whose
        list has none.
        """
        if self.task == "regression" or self.mechanism is not None:
            return ()
        return tuple(metrics_of(self.metrics))

    def load_metrics(self) -> dict[str, Metric]:
        """Return name -> metric of the setting ``metrics``; ConfigError if one cannot be had."""
        return load_metrics(self.metrics, self.passed)

    def renewed(self, before: Mapping[str, Any] | None = None) -> Self:
        """Return a copy in which passed objects have new names, or those of earlier settings."""
        names, objects = dict[str, str](), dict(self.objects)
        for key in OBJECTS:
            named = getattr(self, key)
            names[key] = renew_names(named, str((before or {}).get(key, "")))
            for old, new in zip(ID.findall(named), ID.findall(names[key]), strict=True):
                if old in objects:
                    objects[new] = objects[old]
        methods = {names["method"]: self.chosen_method}
        return self.replace(**names, objects=objects, methods=methods)

    def check(self) -> None:
        """Refuse common settings that do not fit together."""
        super().check()
        # the same files for every process
        for name, whole_path in (
            ("weights", _whole_path(self.weights)),
            ("dataset", absolute_dataset(self.dataset)),
            ("model", self._whole_model()),
            ("pretrained_weights", _whole_path(self.pretrained_weights)),
            ("schema", _whole_path(self.schema)),
            ("moments", _whole_path(self.moments)),
        ):
            object.__setattr__(self, name, whole_path)
        public_parts(self.public)
        of_clients = [f"client-{n}-{s}" for n in self.metrics_of_clients for s in ("mean", "worst")]
        metrics = (*MONITORED, *metrics_of(self.metrics), *of_clients)
        trainable, sampled = self.num_clients - self.validation_clients, self.clients_a_round
        if self.weights and self.init != "default":
            raise ConfigError(
                f"init = {self.init} draws first weights, and weights = {self.weights} gives them; "
                "leave one of the two out"
            )
        self._check_pretrained()
        if self.monitor not in metrics:
            raise ConfigError(
                f"monitor: expected one of {', '.join(metrics)}, got {self.monitor!r}"
                f"{nearest(self.monitor, metrics)}"
            )
        if self.task == "regression":
            self._require_real_targets()
        elif quantity_of(self.monitor) in OF_TARGETS and self.monitor not in metrics_of(
            self.metrics
        ):
            raise ConfigError(f"monitor = {self.monitor} goes with task = regression")
        if self.projection_kind != "gaussian" and not self.projection:
            raise ConfigError(
                f"projection-kind = {self.projection_kind} goes with projection, the number of "
                "features; got 0"
            )
        for name in ("class_prior", "class_weights"):
            if getattr(self, name) and self.loss != "cross-entropy":
                raise ConfigError(f"{key_of(name)} goes with loss = cross-entropy, got {self.loss}")
        if not 1 <= sampled <= trainable:
            raise ConfigError(
                f"clients-per-round: expected 1 ... {trainable}, the clients that train, got "
                f"{sampled}"
            )
        if self.late_share and not self.round_deadline:
            raise ConfigError("late-share: expected a round-deadline above 0, such as 0.01, got 0")
        if self.monitor.startswith("client-") and not self.clients_per_evaluation:
            raise ConfigError(
                f"monitor = {self.monitor} needs clients-per-evaluation of at least 1, got 0"
            )
        if self.min_completed > sampled:
            raise ConfigError(
                f"min-completed: expected at most clients-per-round = {sampled}, got "
                f"{self.min_completed:g}"
            )
        if self.attack not in ATTACKS:
            raise ConfigError(
                f"attack: expected one of {', '.join(ATTACKS)}, got {self.attack!r}"
                f"{nearest(self.attack, ATTACKS)}"
            )
        if (self.attack == "none") != (self.liars == 0):
            raise ConfigError(
                f"attack = {self.attack} and liars = {self.liars}: set both, or neither"
            )
        if 2 * self.liars > trainable:
            raise ConfigError(
                f"liars: expected at most half of the {trainable} clients that train, got "
                f"{self.liars}"
            )
        if self.client_gpus and self.device == "cpu":
            raise ConfigError(f"client-gpus = {self.client_gpus:g} does not go with device = cpu")
        if self.evaluate_on == "validation":
            self._require_held_out()

    def _require_real_targets(self) -> None:
        """Refuse what needs classes."""
        if self.partition in ("dirichlet", "client-dirichlet", "pathological"):
            raise ConfigError(
                f"partition = {self.partition} splits examples by class, and real targets have "
                "none; set partition = iid or natural"
            )
        if self.loss != "mse":
            raise ConfigError(f"loss: expected mse with task = regression, got {self.loss}")
        if quantity_of(self.monitor) == "accuracy":
            raise ConfigError(f"monitor: task = regression has no {self.monitor}; set r2 or mae")
        if of_classes := ", ".join(BUILT_IN.keys() & metrics_of(self.metrics).values()):
            raise ConfigError(f"metrics: {of_classes} need classes; give functions of your own")
        if ATTACKS[self.attack].on_examples or self.attack == "false-jacobians":
            raise ConfigError(f"attack = {self.attack} changes labels, and real targets have none")

    def _require_held_out(self) -> None:
        if self.private_test and not self.local_test_fraction:
            raise ConfigError(
                "local-test-fraction: expected more than 0 with private-test and evaluate-on = "
                "validation, which keeps clients from the test set, got 0; set it, such as to 0.1, "
                "also for the final run on the test set"
            )
        if not (self.validation_examples or self.validation_clients or self.private_test):
            raise ConfigError(
                "evaluate-on = validation: nothing is held out of training; set "
                "validation-examples, such as a tenth of the training set, or validation-clients"
            )

    @property
    def clients_a_round(self) -> int:
        """How many clients train in a round."""
        return self.clients_per_round or min(10, self.num_clients - self.validation_clients)

    @property
    def mechanism(self) -> type[Noise] | None:
        """What adds noise, if the run is to be differentially private."""
        mechanism: type[Noise] | None = self.chosen_method.mechanism(self.settings)
        return mechanism

    @property
    def headline(self) -> str:
        """Metric that says how good the run's models are."""
        headline: str = self.chosen_method.headline
        return headline.replace("accuracy", "r2") if self.task == "regression" else headline

    @property
    def label(self) -> str:
        """Name of the run: the setting ``name``, or the method's."""
        return self.name or str(self.chosen_method.name)

    @property
    def settings(self) -> Any:
        """The chosen method's own settings."""
        return self.settings_of(self.chosen_method.name)

    def settings_of(self, method: str) -> Settings:
        """Return one method's own settings, chosen or not."""
        by_table = {table.table: table for table in self.tables}
        settings: Settings = by_table.get(method) or self.known_methods()[method].settings()
        return settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BaseConfig) and self.values() == other.values()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.values().items()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values: classes of settings that are made from options have no module."""
        named = [place for place in self.methods if not id_of(place)]
        return _restore, (type(self), self.values(), named)

    @property
    def folder(self) -> Path:
        """Where results go: `out`, or a folder in ``runs`` of its own for each configuration."""
        if self.out:
            return Path(self.out).expanduser().absolute()
        dataset = re.sub(r"[^\w.-]+", "-", re.sub(r"[^:]*/", "", self.dataset))
        settings = json.dumps({k: v for k, v in self._acting().items() if k not in INCIDENTAL})
        digest = hashlib.sha256(settings.encode()).hexdigest()[:6]
        name = f"{self.label}-{dataset}-{self.seed}-{digest}"
        return Path("runs").absolute() / name

    @property
    def cache(self) -> Path:
        """Where the run keeps what need not outlast it: features, and what its clients know."""
        return self.folder / CACHE

    def _acting(self) -> dict[str, Value]:
        """Key -> value of the settings that have an effect."""
        return {**super().values(), **self.settings.values()}

    def differences(self, other: "BaseConfig | Mapping[str, Any]") -> dict[str, tuple[Any, Any]]:
        """Key -> (own value, the other's) of common settings that can change results."""
        if isinstance(other, BaseConfig):
            theirs = other._acting()
        else:  # which may lack a setting that is new
            defaults = type(self)()
            theirs = {**super(BaseConfig, defaults).values(), **type(self.settings)().values()}
            theirs |= _unnest(other)
        return {
            key: (value, theirs[key])
            for key, value in self._acting().items()
            if key in theirs and _named(value) != _named(theirs[key]) and key not in INCIDENTAL
        }

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from keys, in kebab-case or snake_case; the rest are defaults."""
        return cls(values)

    def convert(self, key: str, text: str) -> Any:
        """Read a value from text, as the type of its key."""
        home, name = self.home_of(key)
        return home.checked(name, text, from_text=True)

    def home_of(self, key: str) -> tuple[type[Settings], str]:
        """Return the class that has the setting of a key, and its name there."""
        key, places = key_of(key), self._places()
        table, name = places[key] if key in places else self._unknown(key)
        method = self.known_methods().get(table.partition(".")[0])
        home = type(self) if method is None else method.settings
        return home.sections().get(table, home), name

    def replace(self, **overrides: Any) -> Self:
        """Return a copy with other settings (snake_case): ``replace(tct={"bias": True})``."""
        objects = {**self.objects, **overrides.pop("objects", {})}
        methods = {**self.methods, **overrides.pop("methods", {})}
        return type(self)(self.values(), overrides, objects=objects, methods=methods)

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Self:
        """Read a TOML file, or one that comes with fedntk; `overrides` (snake_case) win over it.

        The latter is found by its name, ``ntk_fl_digits.toml``, with ``simulations/conf`` before it
        or without. The name of a method is its defaults.
        """
        file = Path(path)
        if not file.exists() and str(file.parent) in (".", "simulations/conf"):
            file = own if (own := CONF / file.name).exists() else file
        if not file.exists() and file.suffix != ".toml":
            return cls({"method": str(path)}, **overrides)
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise ConfigError(f"no configuration at {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            cure = f"; did you mean {path}:<class>?" * (Path(path).suffix == ".py")
            raise ConfigError(f"{path} is no TOML: {error}{cure}") from None
        with naming(str(path)):
            return cls(values, **overrides)

    @classmethod
    def of_run(
        cls, folder: str | Path, *, trust: bool = False, passed: "BaseConfig | None" = None
    ) -> Self:
        """Read a run's configuration; code that only its folder names needs `trust` to be run.

        What was passed in Python is that of a configuration, `passed`.
        """
        values = saved_values(folder) | {"out": str(folder)}
        more: dict[str, Any] = {}
        if passed is not None:
            more = {"objects": passed.objects, "methods": passed.methods}
        if not trust:
            values["ray-address"] = ""  # whose cluster executes what it is sent
        reading = copy_context()
        reading.run(STRANGE.set, not trust)
        with naming(str(Path(folder) / "config.toml")):
            return reading.run(cls, values, **more)

    def values(self) -> dict[str, Value]:
        """Key -> value: of common settings, the chosen method's, and others' that were given."""
        values = super().values()
        for table in self.tables:
            values |= table.values()
        return values

    def run_config(self) -> dict[str, Value]:
        """Return what Flower carries: settings of other packages' methods are in one key."""
        values, others = super().values(), dict[str, Value]()
        for settings in self.tables:
            of_app = settings.table in self.method_table.own_methods()
            (values if of_app else others).update(settings.values())
        return {**values, PLUGGED_IN: json.dumps(others) if others else ""}

    @classmethod
    def run_config_defaults(cls) -> dict[str, Value]:
        """Return all keys of Flower's run-config with their defaults, as the app lists them."""
        values = cls().run_config()
        for home in (cls, *(method.settings for method in cls.method_table.own_methods().values())):
            values |= {} if home is cls else home().values()
            for section in home.sections().values():
                values |= section().values()
        return values

    def save(self, path: str | Path) -> None:
        """Write :meth:`values` as TOML, with a last line that says that it is whole."""
        with whole(Path(path)) as file:
            file.write((tomli_w.dumps(nest(self.values())).replace(UNTRUSTED, "") + END).encode())

    @classmethod
    def describe(cls, method: str = "") -> list[str]:
        """One line for each key, or for each of a method's own: default, choices, meaning."""
        if method:
            _, described = cls.method_table.find_method(method, {})
            return list(described.settings.describe())
        methods = cls.method_table.all_methods().values()
        return [*super().describe(), *(line for m in methods for line in m.settings.describe())]

    @classmethod
    def choices(cls, name: str) -> tuple[str, ...]:
        """Return what a setting may be, if it is one of several words."""
        named = {"method": tuple(cls.method_table.all_methods()), "monitor": MONITORED}
        return named.get(name) or super().choices(name)

    def _homes(self) -> list[type[Settings]]:
        return [type(self), *(method.settings for method in self.known_methods().values())]

    def _places(self) -> dict[str, tuple[str, str]]:
        """Return key -> table (empty: none) and name there."""
        places = type(self).places()
        for method in self.known_methods().values():
            places |= method.places
        return places

    def _merged(self, layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return flat settings; what is said later wins, also of a part."""
        tables = {home.table: False for home in self._homes() if home.table}
        for home in self._homes():
            tables |= {
                home.key(name): declared.optional for name, declared in parts_of(home).items()
            }
        flat: dict[str, Any] = {}
        for layer in layers:
            changes = _flatten(layer, tables)
            for table in tables:
                prefix = f"{table}."
                if changes.get(table) is False:
                    flat = {key: v for key, v in flat.items() if not key.startswith(prefix)}
                elif any(key.startswith(prefix) for key in changes):
                    flat.pop(table, None)
            flat |= changes
        return flat

    def _unknown(self, key: str) -> Any:
        places = self._places()
        in_tables = [full for full in places if full.endswith(f".{key}")]
        if meant := in_tables or difflib.get_close_matches(key, places, n=1):
            raise ConfigError(f"unknown key {key!r}; did you mean {' or '.join(map(repr, meant))}?")
        common = ", ".join(name for name in places if "." not in name)
        raise ConfigError(
            f"unknown key {key!r}; known keys: {common}; and those of each method, which fedntk "
            "settings lists"
        )


def _restore(kind: type[BaseConfig], values: Mapping[str, Any], methods: Sequence[str]) -> Any:
    find = kind.method_table.find_method
    return kind(values, methods=dict(find(method, {}) for method in methods))


def saved_values(folder: str | Path) -> dict[str, Any]:
    """Return what a run's file says, without any code that its settings name."""
    path = Path(folder) / "config.toml"
    if not path.exists():
        raise ConfigError(f"no run in {folder}: config.toml is missing")
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.endswith(END):
        raise ConfigError(
            f"{path} is cut off, or of an older version: its last line, {END.strip()!r}, is "
            f"missing. Choose another folder with out, or {REPLACE_RUN}"
        )
    with naming(str(path), tomllib.TOMLDecodeError):
        return tomllib.loads(text)


def _named(value: Value) -> Value:
    return value.replace(UNTRUSTED, "") if isinstance(value, str) else value


def _unnest(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat[prefix + key] = True if isinstance(value, dict) else value  # a part that is there
        if isinstance(value, dict):
            flat |= _unnest(value, f"{prefix}{key}.")
    return flat


def nest(values: Mapping[str, Value]) -> dict[str, Any]:
    """Turn keys with a dot into tables; a table says that an optional part is there."""
    result: dict[str, Any] = {}
    tables = {key.rpartition(".")[0] for key in values}
    for key, value in values.items():
        if key not in tables:
            *above, name = key.split(".")
            home = result
            for table in above:
                home = home.setdefault(table, {})
            home[name] = value
    return result


def _flatten(
    values: Mapping[str, Any], tables: Mapping[str, bool], table: str = ""
) -> dict[str, Any]:
    """Turn tables into keys with a dot, all in kebab-case."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{table}.{key_of(name)}" if table else key_of(name)
        if key == PLUGGED_IN and isinstance(value, str):
            try:
                others = json.loads(value or "{}")
            except ValueError:
                others = None
            if not isinstance(others, dict) or not all("." in key for key in others):
                raise ConfigError(f"{PLUGGED_IN}: expected JSON of methods' keys, got {value!r}")
            flat |= others
        elif (is_optional := tables.get(key)) is None:
            flat[key] = value
        elif isinstance(value, Settings):
            flat |= ({key: True} if is_optional else {}) | value.values()
        elif isinstance(value, Mapping):
            flat |= ({key: True} if is_optional else {}) | _flatten(value, tables, key)
        elif is_optional:
            flat[key] = False if value is None else value
        else:
            raise ConfigError(
                f"{key}: expected a table of settings, got {type(value).__name__} {value!r}"
            )
    return flat
