"""What a run with noise may use: a list of what is permitted, for the settings of all methods."""

import hashlib
import secrets
from typing import Any

from fedntk.clients import cache_dir
from fedntk.ntk.noise import HARMLESS, Noise
from fedntk.ntk.support.files import whole_path
from fedntk.trust.sealing import write_secret

from .settings import ConfigError, Settings

# what an owner may say to be known without the training examples, and the settings it is about
PUBLIC = {
    "schema": "names of columns and classes, kinds of columns, and what the setting schema says",
    "moments": "mean and standard deviation of the inputs",
    "model": "a network of one's own, with its weights",
    "weights": "the weights to start from",
}

# settings that concern no value of a training example: what is run, where and when, the test set,
# and which client has which examples
HARMLESS_SETTINGS = HARMLESS - {"max_examples"} | {
    *("average", "method", "name", "out", "rounds", "clients_per_round", "clients_per_evaluation"),
    *("lost_share", "late_share", "targets", "metrics", "monitor", "patience", "checkpoint_every"),
    *("test_examples", "width", "init", "norm", "learning_rate", "random_features", "expand"),
    *("bandwidth", "projection_kind", "local_epochs", "batch_size", "momentum", "weight_decay"),
    *("optimizer", "rate_decay", "rate_decay_after", "groups"),
    *("trained", "image_size", "adapters", "adapter_rank", "adapter_alpha", "adapter_targets"),
    *("public", "ray_address", "client_cpus", "client_gpus", "client_threads", "server_threads"),
    *("dataset", "test_share", "test_seed", "data_dir", "image_column", "target", "client_column"),
    *("separator", "decimal", "encoding", "schema", "moments"),
    *("examples_per_domain", "test_examples_per_domain", "num_clients", "partition", "owners"),
    *("alpha", "min_partition_size", "examples_per_client", "classes_per_client"),
    *("class_assignment", "train_examples", "local_test_fraction", "private_test"),
}


# settings by which one example more, or another label, draws other examples for a client, and what
# they may be for examples that may be private: of public data sets the parts are the clients
DRAWN: dict[str, tuple[Any, ...]] = {
    "partition": ("given", "natural", "iid"),
    "test_share": (0.0,),
    **dict.fromkeys(("local_test_fraction", "train_examples", "owners"), (0,)),
    "private_test": (False,),
}


def require_covered(mechanism: type[Noise], config: Any, settings: Settings) -> None:
    """Refuse settings of a run with noise that tell more than its epsilon is of; ConfigError."""
    public = public_parts(config.public)
    from_user = {
        "dataset": ("schema", config.may_be_private),
        "model": ("model", ":" in config.model),
        "weights": ("weights", bool(config.weights)),
        "pretrained_weights": ("weights", bool(config.pretrained_weights)),
        "standardise": ("moments", config.standardise and not config.is_pretrained),
    }
    for name, (part, is_used) in from_user.items():
        if is_used and part not in public:
            cure = "set standardise = false, or " if name == "standardise" else ""
            raise ConfigError(
                f"{config.key(name)}: the noise does not cover {PUBLIC[part]}, which a run with it "
                f"would use and write into its results; {cure}if they are known without the "
                f"training examples, add {part} to public, got public = {config.public!r}"
            )
    harmless = HARMLESS_SETTINGS | from_user.keys()
    if config.may_be_private:
        harmless -= DRAWN.keys()
    for home in (config, settings):
        mechanism.require_covered(home, harmless=harmless, needs=DRAWN)


def describe_released(config: Any) -> dict[str, Any]:
    """Say what a run with noise protects, what it releases, and what its epsilon is not of."""
    return {
        "protects": config.mechanism.protects,
        "released": list(config.mechanism.releases),
        "not-covered": [
            *(PUBLIC[part] for part in public_parts(config.public)),
            "metrics of examples for evaluation",
            "times and sizes of messages, and whether clients answer",
        ],
    }


def named_for(config: Any, checksum: str) -> str:
    """Return a checksum of training examples as results may name it; with noise, :func:`keyed`."""
    return checksum if config.mechanism is None else keyed(checksum)


def keyed(checksum: str) -> str:
    """Return a name for a checksum, with which nobody else can try values of an example."""
    path = cache_dir() / "checksum.key"
    if not path.exists():
        with whole_path(path) as partial:
            write_secret(partial, secrets.token_bytes(32))
    return hashlib.blake2b(checksum.encode(), key=path.read_bytes()).hexdigest()[:64]


def public_parts(text: str) -> tuple[str, ...]:
    """Return the words of the setting `public`; ConfigError for others than those of PUBLIC."""
    words = tuple(filter(None, (word.strip() for word in text.split(","))))
    if unknown := [word for word in words if word not in PUBLIC]:
        known = "; ".join(f"{word}: {meaning}" for word, meaning in PUBLIC.items())
        raise ConfigError(f"public: expected words of {known}; got {unknown[0]!r}")
    return words
