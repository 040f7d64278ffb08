"""Strategy, clients and predictor of a run, as its configuration says."""

from collections.abc import MutableMapping
from dataclasses import replace
from functools import partial
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import MessageType

from fedntk.clients import CountedRows
from fedntk.clients.core.adapter import unpack_content
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import NotEnoughMemory
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.ntk.predictors.network import Predictor
from fedntk.strategies import Sampling, Strategy
from fedntk.strategies.core.array_archive import checksum, load_tensors
from fedntk.strategies.core.strategy import round_of

from ..attacks import ATTACKS
from ..checkpoints import Checkpoint, Checkpoints
from ..config.config import BaseConfig
from ..config.importing import ID, place_of, source_checksum
from ..config.metrics import metrics_of
from ..config.private import named_for, public_parts
from ..config.settings import ConfigError
from ..configuration import Config
from ..data.data import Data, LocalData
from ..data.load import load_data
from ..methods import all_methods
from ..methods.method import Method, Setup
from ..models import build_networks, network_checksum, sample_outputs
from ..report.results import Run, read_summary, require_same
from ..simulated_trust import key_server, projected, run_name, sealed_projection
from ._flower import log_from

logger = getLogger("flwr")


def with_task(config: Config) -> Config:
    """Return a configuration of regression if it leaves the task open and the data say that."""
    if config.task != "auto" or not config.may_be_private or not load_data(config).has_real_targets:
        return config
    logger.info("the targets are real numbers: task = regression, with its defaults")
    return config.replace(task="regression")


def load_setup(config: Config, inputs: str = "") -> Setup:
    """Load data and split, and build the network.

    A node with examples of its own needs none of the run's: `inputs` is then the folder with
    ``inputs.json``, which says what is done to examples. The run has to say its max-examples.
    """
    data = load_inputs(Path(inputs), config.max_examples) if inputs else load_data(config)
    if data.has_real_targets != (config.task == "regression"):
        kind = "real targets" if data.has_real_targets else "classes"
        raise ConfigError(f"task = {config.task}: {config.dataset} has {kind}")
    network, frozen = build_networks(config, data.input_shape, data.num_classes)
    loaded = data if frozen is None else replace(data, frozen=frozen)
    setup = Setup(config, network, frozen, loaded=loaded)
    if inputs:
        return setup
    if data.elsewhere is not None and config.mechanism is not None:
        raise ConfigError(
            "moments: they come from sums without noise over clients' rows, which epsilon does not "
            "count; leave them out"
        )
    known_scale = data.x_train.dtype == np.uint8 or "moments" in public_parts(config.public)
    known_scale = known_scale or config.takes_texts
    if config.is_pretrained and config.mechanism is not None and not known_scale:
        raise ConfigError(
            f"dataset: the noise does not cover whether {data.x_train.dtype} pictures have values "
            "0 ... 1 or 0 ... 255; store them as unsigned bytes, or add moments to public"
        )
    _ = setup.split
    return setup


def load_inputs(folder: Path, max_examples: int) -> Data:
    """Load what a node knows of a run's examples: how they are prepared, and how many they are."""
    transform = InputTransform.load(folder)
    if transform is None:
        raise ConfigError(f"inputs: no {InputTransform.FILE} in {folder}; fedntk deploy writes it")
    if not max_examples:
        raise ConfigError(
            "max-examples: expected the most examples of a client, as nodes with inputs have no "
            "copy of the run's data set, got 0"
        )
    return Data.of_inputs(transform, max_examples)


def code_checksums(config: BaseConfig) -> dict[str, str]:
    """Return checksums of the source files that the settings name: see SOURCES."""
    method, metrics = config.chosen_method, metrics_of(config.metrics).values()
    parts = type(method), method.strategy_class, method.client_class, *method.parts
    installed = [place_of(part) for part in parts if method in all_methods().values()]
    return {
        "model-code": "" if config.is_pretrained else source_checksum(config.model),
        "metrics-code": source_checksum(*metrics),
        "method-code": source_checksum(config.method, *installed),
    }


def source_of(setup: Setup) -> dict[str, Any]:
    """Return what the results of a run depend on besides its settings: see SOURCES."""
    config, network = setup.config, setup.network
    drawn = ":" in config.model and not ID.search(config.model)  # by a user's code, or from files
    state = network.state_dict() if drawn or config.weights or config.is_pretrained else {}
    return {
        "data": named_for(config, setup.data.checksum),
        "split": named_for(config, setup.split.checksum),
        **network_facts(setup, setup.data.input_shape),
        "first-weights": checksum(*(t.cpu().numpy() for t in state.values())) if state else "",
        **code_checksums(config),
    }


def network_facts(setup: Setup, input_shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a network shows of itself, and of what is frozen before it."""
    shape = setup.frozen.shape if setup.frozen else input_shape
    shape = (setup.config.projection,) if setup.config.projection else shape
    return {
        "network": network_checksum(setup.network),
        "sample-outputs": sample_outputs(setup.network, shape),
        **({"frozen": setup.frozen.digest} if setup.frozen else {}),
    }


def load_checkpoint(folder: Path) -> Checkpoint:
    """Load the checkpoint of a finished run; FileNotFoundError if it has none."""
    checkpoint = Checkpoints(folder).newest()
    if checkpoint is None:
        raise FileNotFoundError(f"{folder}: no checkpoint of a finished run")
    return checkpoint


def make_strategy(setup: Setup) -> Strategy:
    """Make the strategy that the configuration names."""
    config = setup.config
    method: Method = config.chosen_method
    training = config.num_clients - config.validation_clients
    # clients that evaluate only if the others, which train, are to be measured
    silent = training if config.evaluate_on == "validation" and config.validation_clients else 0
    without = sorted({*range(silent), *setup.without_examples_to_evaluate})
    evaluating = min(config.clients_per_evaluation, config.num_clients - len(without))
    options: dict[str, Any] = {  # besides those that have the names of settings
        "max_examples": setup.max_examples,
        "fraction_train": config.clients_a_round / config.num_clients,
        "min_train_nodes": config.clients_a_round,
        "fraction_evaluate": evaluating / config.num_clients,
        "min_evaluate_nodes": evaluating,
        "min_available_nodes": config.num_clients,
        # no method trains on clients held out for validation, or on absent liars
        "sampling": Sampling(
            seed=config.seed,
            over_selection=config.sampling.over_selection,
            held_out=sorted({*range(training, config.num_clients), *setup.absent}),
            evaluate_without=without,
        ),
        "key_server": key_server(config) if config.projection else None,
        "run": run_name(config),
    }
    with log_from(ERROR):  # Flower warns that no client evaluates; that was asked for
        try:
            strategy = method.strategy(setup, options)
            strategy.require_memory()
            method.require_resources(setup)
        except ConfigError:
            raise
        except (ValueError, ArithmeticError, NotEnoughMemory) as error:
            raise ConfigError(f"method = {config.method}: {error}") from error
    return strategy


def make_client(
    setup: Setup, partition: int, state: MutableMapping[str, Any], examples: LocalData | None = None
) -> NumPyClient:
    """Make the client of a partition; its number also seeds what the client draws.

    It keeps its `state` from one message to the next. Its node's `examples`, if any, are used
    instead of the partition's.
    """
    config = setup.config
    if examples is None:
        if not 0 <= partition < len(setup.split.clients):
            raise ConfigError(
                f"partition-id: expected 0 ... {len(setup.split.clients) - 1}, got {partition}"
            )
        examples = setup.examples(partition)
    elif seeded := config.chosen_method.seeded_protection(config):
        raise ConfigError(
            f"{', '.join(seeded)}: this app derives the keys from the seed, so they protect "
            "nothing; write a client with keys of its own for data-path"
        )
    (x, y), (x_test, y_test) = examples.train, examples.test
    lie = ATTACKS[config.attack].on_examples
    if lie is not None and partition in setup.liars:
        rng = np.random.default_rng([config.seed, partition, *b"lie"])
        x, y = lie(x, y, setup.data.num_classes, rng)
    options: dict[str, Any] = {
        "model": setup.network,
        "x": x,
        "y": y,
        "loss": config.loss,
        "device": setup.device,
        "sampling_rate": config.sampling_rate,
        "seed": (config.seed, partition),
    }
    if config.projection:
        options["projection"] = sealed_projection(config, partition, state)
    if len(y_test):
        options["x_test"], options["y_test"] = x_test, y_test
    options["owner"] = examples.owner
    if examples.rows and getattr(config.settings, "changes", None):
        options["rows"] = CountedRows(examples.rows)
    client: NumPyClient = config.chosen_method.client(setup, partition, options)
    return client


def load_predictor(
    run: Run | str | Path,
    which: Literal["model", "best"] = "model",
    *,
    client: int | None = None,
    model: Any = None,
    trust: bool = False,
) -> Predictor:
    """Return what a run learned: its last model, the best one, or a client's own.

    It takes raw examples, as they were before the run standardised and projected them: arrays, a
    data frame with the columns of the run's table, or texts. It predicts real targets in their
    units.

    FileNotFoundError if there is no finished run.

    Parameters
    ----------
    run : Run or path
        A finished run, or its folder.
    which : {"model", "best"}
        The last model, or the best one by the setting ``monitor``.
    client : int, optional
        Partition of a client, to return its own last model, with what it kept in the run's folder:
        what that client would evaluate. Methods without such models give the last one.
    model : nn.Module or callable, optional
        The network, if the run got it as an object and is given as a folder.
    trust : bool
        Whether to execute files and modules that only the folder's ``config.toml`` names.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    passed = run.config if isinstance(run, Run) else None
    inputs = InputTransform.load(folder)
    if inputs is None or not (folder / "config.toml").exists():
        runs = [str(path.parent) for path in sorted(folder.rglob("inputs.json"))]
        cure = f"; name one of the runs in it, such as {runs[0]}" if runs else ""
        if inputs is not None:
            cure = "; a predictor that was saved is read by load of its class, such as "
            cure += f"NetworkPredictor.load({str(folder)!r}, network)"
        raise FileNotFoundError(f"expected the folder of a run, got {folder}{cure}")
    own_model = {} if model is None else {"model": model}
    config = Config.of_run(folder, trust=trust, passed=passed).replace(**own_model)
    if config.trained_part == "all" and config.adapters == "none":
        config = config.replace(weights="")
    if config.projection:
        inputs = replace(inputs, project=partial(projected, config))
    network, frozen = build_networks(config, inputs.shape, len(inputs.classes))
    if frozen is not None and frozen.network is not None:
        inputs = replace(inputs, frozen=frozen)
    setup = Setup(config, network, frozen)
    if (folder / "summary.json").exists():
        now = network_facts(setup, inputs.shape)
        if model is None:
            now["model-code"] = code_checksums(config)["model-code"]
        require_same(read_summary(folder), now, folder)
    if client is None:
        weights, described = load_tensors(folder / f"{which}.safetensors")
        predictor: Predictor = config.chosen_method.predictor(setup, weights, described["learned"])
        predictor.inputs, predictor.targets = inputs, inputs.targets
        return predictor
    if which != "model":
        raise ConfigError(f"which: clients have only their last models, got {which!r}")
    checkpoint = load_checkpoint(folder)
    # the strategy says what it would send the client, which makes a module of it
    client_model: Any = make_client(setup, client, {})
    strategy = make_strategy(setup)
    strategy.load_state_dict(checkpoint.strategy)
    arrays = strategy.begin(checkpoint.arrays, checkpoint.round, done=checkpoint.round)
    r = round_of(strategy, strategy.server_round, MessageType.EVALUATE, arrays, {})
    ask: Any = next(strategy.evaluate_round(r.within(strategy, arrays, [client])))
    if ask.sent is not None:
        ask.sent.doubt(client)  # what it keeps may have been removed
    predictor = client_model.predictor(*unpack_content(ask.content(client), str(client)))
    predictor.inputs, predictor.targets = inputs, inputs.targets
    return predictor
