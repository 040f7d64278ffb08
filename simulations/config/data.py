"""Settings of the data set and of its split among the clients."""

from pathlib import Path
from typing import Literal

from .importing import whole_name
from .settings import ConfigError, Settings, setting

TABLE = ("target", "client_column", "separator", "decimal", "encoding")  # how a table is read
FILES = ("csv", "parquet", "folder", "npz", "leaf", "hf")  # kinds of data sets that a path follows


class DatasetSettings(Settings, frozen=True, eq=True):
    """Which examples there are."""

    dataset: str = setting(
        "digits",
        "digits, mnist, fashion-mnist, cifar10, cifar100, femnist, femnist-digits (only its "
        "digits), either with :<folder>, digit-domains, digits-five, digits-five:<folder>, "
        "two-patch:<options>; or your own: csv:<file>, parquet:<file>, folder:<class folders>, "
        "hf:<name or folder>, leaf:<folder>, npz:<file>, or <file>.py:<function>",
    )
    standardise: bool = setting(
        True,
        "networks get inputs of mean 0 and standard deviation 1, by the moments of the training "
        "examples: per channel of images, per column of tables, of all values of other examples; "
        "texts stay as they are",
    )
    task: Literal["auto", "classification", "regression"] = setting(
        "auto",
        "classification of labels, or regression of real targets, which are standardised as inputs "
        "are; auto: regression if your own data have targets of more than 20 different numbers, "
        "some of them not whole, else classification. With regression the defaults of loss, "
        "partition and monitor are mse, iid and r2",
    )
    test_share: float = setting(
        0.2,
        "share of the examples, and of each class, that is kept as a test set, if your own data "
        "have none",
        at_least=0,
        below=1,
    )
    test_seed: int = setting(0, "seed of that draw, the same for all seeds of a run", at_least=0)
    data_dir: str = setting(
        "", "folder of torchvision's data sets; ~/.cache/fedntk/data by default"
    )
    image_column: str = setting("", "column of images of a Hugging Face set; the first by default")
    target: str = setting(
        "label",
        "column of the labels of a table or a Hugging Face set; of real targets several columns, "
        "with commas between them",
    )
    client_column: str = setting(
        "", "column that says whose an example is, for partition = natural"
    )
    separator: Literal["comma", "semicolon", "tab", "bar"] = setting(
        "comma", "what stands between the cells of a csv file"
    )
    decimal: Literal["point", "comma"] = setting("point", "decimal mark in a csv file")
    encoding: str = setting("utf-8", "encoding of a csv file, such as latin-1, cp1252, utf-16")
    schema: str = setting(
        "",
        "TOML file that says what the columns of a table mean: words, dates, texts and gaps become "
        "numbers; fedntk schema proposes one",
    )
    moments: str = setting(
        "",
        "folder with the inputs.json of a run of glm on the same columns, whose pooled means and "
        "deviations count, also for gaps, in place of those of this data set",
    )
    examples_per_domain: int = setting(
        0,
        "training examples of each domain of digit-domains or digits-five, as many of each class; "
        "0: all, or as many as the smallest domain of digit-domains has",
        at_least=0,
    )
    test_examples_per_domain: int = setting(0, "the same for the test set", at_least=0)

    def check(self) -> None:
        """Refuse a decimal mark that also separates cells, and an unknown encoding."""
        if self.separator == self.decimal:
            raise ConfigError(
                "decimal = comma: expected another separator, such as semicolon, got comma"
            )
        try:
            "".encode(self.encoding)
        except (LookupError, ValueError):
            raise ConfigError(
                "encoding: expected the name of an encoding of text, such as utf-8, latin-1 or "
                f"cp1252, got {self.encoding!r}"
            ) from None

    @property
    def may_be_private(self) -> bool:
        """Whether examples are a user's: what is known of them stays in the run's folder."""
        return ":" in self.dataset and not self.dataset.startswith("two-patch:")


class SplitSettings(DatasetSettings, frozen=True, eq=True):
    """Which client has which of them."""

    seed: int = setting(0, "seed of the split, the first weights and all sampling", at_least=0)
    num_clients: int = setting(50, "number of clients, which are Flower's nodes", at_least=1)
    validation_examples: int = setting(
        0, "training examples kept on the server, which no client gets", at_least=0
    )

    partition: Literal[
        "iid", "dirichlet", "client-dirichlet", "pathological", "natural", "given"
    ] = setting(
        "dirichlet",
        "iid; dirichlet: per class over clients; client-dirichlet: per client over classes, as by "
        "Yue et al. 2022; pathological: #C classes a client; natural: by client-column, LEAF's "
        "users, FEMNIST's writers, domains, or the clients of two-patch; given: the split that "
        "comes with your own data",
    )
    owners: int = setting(
        0,
        "number of owners, such as FEMNIST's writers, to draw, with natural; the "
        "others' training examples are not used; 0: all",
        at_least=0,
    )
    alpha: float = setting(0.1, "Dirichlet's concentration; small: few classes a client", above=0)
    min_partition_size: int = setting(
        1,
        "fewest examples a client, with dirichlet; 1: a client that ten draws leave without any "
        "gets one of the largest client's",
        at_least=1,
    )
    examples_per_client: int = setting(200, "size of a client, with client-dirichlet", at_least=1)
    classes_per_client: int = setting(2, "classes a client, with pathological", at_least=1)
    class_assignment: Literal["random", "first-deterministic", "deterministic"] = setting(
        "random",
        "how clients get their classes, with pathological; first-deterministic: the "
        "first is the client's number modulo the classes, as by Yu et al. 2022",
    )
    train_examples: int = setting(
        0, "training examples that clients get in all, drawn from the set; 0: all", at_least=0
    )
    shared_examples: int = setting(
        0,
        "data sharing (Zhao et al. 2018): public training examples, drawn at random, on which each "
        "client trains besides its own; they are in no client's part",
        at_least=0,
    )
    local_test_fraction: float = setting(
        0.0,
        "share of a client's examples kept out of its training, for its own evaluation",
        at_least=0,
        below=1,
    )
    private_test: bool = setting(
        False,
        "clients evaluate on their own part of the test set, which is split as the training "
        "examples are; with evaluate-on = validation, on their local-test-fraction",
    )

    def check(self) -> None:
        """Refuse a number of owners without a natural split."""
        super().check()
        if self.client_column and self.partition != "natural":
            raise ConfigError(
                f"client-column = {self.client_column} says whose an example is, and goes with "
                f"partition = natural; got {self.partition}"
            )
        if self.owners and self.partition != "natural":
            raise ConfigError(
                f"owners = {self.owners} needs partition = natural, got {self.partition}"
            )


def absolute_dataset(dataset: str) -> str:
    """Return the setting with the whole path of a file or folder that exists."""
    kind, _, rest = dataset.partition(":")
    path = Path(rest).expanduser()
    if kind in FILES and rest and path.exists():
        return f"{kind}:{path.absolute()}"
    return whole_name(dataset) if kind.endswith(".py") else dataset
