"""The table of methods: how each one's strategy and client are made from a configuration."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from torch import Tensor, nn

from fedntk.clients import (
    CPNTKFLClient,
    ModelClient,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
    sample_size,
)
from fedntk.ntk import FeatureMap, NotEnoughMemory, TCTModel, jacobian, require_disk, require_memory
from fedntk.ntk.payloads import ConvexTask
from fedntk.strategies import CPNTKFL, NTKFL, SCAFFOLD, TCT, SeededFedAvg

from ._flower import log_from
from .config import Config, ConfigError
from .data import Data, load_data
from .models import build_model
from .parties import key_server, projected, run_name, sealed_projection, shuffling_server
from .partitions import Split
from .results import load_model

__all__ = [
    "METHODS",
    "Method",
    "device_of",
    "evaluate_arrays",
    "load_predictor",
    "make_client",
    "make_strategy",
]


@dataclass(frozen=True)
class Method:
    """Server and client half of one method.

    Attributes
    ----------
    strategy : callable
        (config, options common to all, network) -> strategy. For methods with `jacobians` the
        options hold ``validation_loss``, the server's loss on its validation examples, or None.
    client : callable
        (config, partition, options common to all) -> client.
    jacobians : bool
        Whether the server holds Jacobians of the clients' examples and evolves them.
    """

    strategy: Callable[[Config, dict[str, Any], nn.Module], SeededFedAvg]
    client: Callable[[Config, int, dict[str, Any]], NumPyClient]
    jacobians: bool = False


def _evolution(config: Config, options: dict[str, Any]) -> dict[str, Any]:
    """Options of the strategies that evolve a kernel."""
    return dict(
        learning_rate=config.learning_rate,
        steps=config.steps_grid,
        loss=config.loss,
        selection=config.selection,
        validation_partitions=options.pop("held_out"),
        kernel=config.kernel,
        residuals=config.residuals,
        tolerance=config.tolerance,
        memory_budget=round(config.memory_budget * 1e9) or None,
        device=device_of(config),
        **options,
    )


def _cp_ntk_fl_strategy(config: Config, options: dict[str, Any], _: nn.Module) -> SeededFedAvg:
    return CPNTKFL(
        sparsity=config.sparsity,
        bits=config.bits,
        shuffling_server=shuffling_server(config) if config.shuffle else None,
        noise_multiplier=config.noise_multiplier,
        label_noise=config.label_noise,
        delta=config.delta,
        **_evolution(config, options),
    )


def _cp_ntk_fl_client(config: Config, partition: int, options: dict[str, Any]) -> NumPyClient:
    return CPNTKFLClient(
        wire=config.wire,
        sparsity=config.sparsity,
        bits=config.bits,
        clip=config.clip,
        noise_multiplier=config.noise_multiplier,
        label_noise=config.label_noise,
        noise_seed=(config.seed, partition),
        shuffling_key=shuffling_server(config).public_key if config.shuffle else None,
        run=run_name(config),
        **options,
    )


def _local_sgd(config: Config) -> dict[str, Any]:
    """Options of the clients that run local epochs of SGD."""
    return {
        "local_epochs": config.local_epochs,
        "batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
    }


def _feature_map(config: Config) -> FeatureMap:
    return FeatureMap(config.features, config.num_features, config.feature_seed)  # type: ignore[arg-type]


def _tct_strategy(config: Config, options: dict[str, Any], network: nn.Module) -> SeededFedAvg:
    bootstrap = SeededFedAvg(
        seed=config.seed, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1
    )
    return TCT(
        network=network,
        bootstrap=bootstrap if config.bootstrap_rounds else None,
        bootstrap_rounds=config.bootstrap_rounds,
        features=config.features,  # type: ignore[arg-type]
        num_features=config.num_features,
        feature_seed=config.feature_seed,
        normalise=config.normalise,
        bias=config.bias,
        loss=config.convex_loss,  # type: ignore[arg-type]
        optimizer=config.convex_optimizer,  # type: ignore[arg-type]
        learning_rate=config.convex_learning_rate,
        local_steps=config.convex_steps,
        solve=config.solve,  # type: ignore[arg-type]
        ridge=config.ridge,
        sparsity=config.sparsity,
        bits=config.bits,
        device=device_of(config),
        **options,
    )


def _tct_client(config: Config, options: dict[str, Any]) -> TCTClient:
    return TCTClient(
        cache=config.folder / "cache",
        dtype=config.feature_dtype,  # type: ignore[arg-type]
        keep=config.keep,  # type: ignore[arg-type]
        local_solver=config.convex_solver,  # type: ignore[arg-type]
        proximal_mu=config.proximal_mu,
        **_local_sgd(config),
        **options,
    )


METHODS = {
    "ntk-fl": Method(
        lambda config, options, _: NTKFL(**_evolution(config, options)),
        lambda config, _, options: NTKFLClient(
            wire=config.wire,  # type: ignore[arg-type]
            **options,
        ),
        jacobians=True,
    ),
    "cp-ntk-fl": Method(_cp_ntk_fl_strategy, _cp_ntk_fl_client, jacobians=True),
    "tct": Method(_tct_strategy, lambda config, _, options: _tct_client(config, options)),
    "fedavg": Method(
        lambda _, options, __: SeededFedAvg(**options),
        lambda config, _, options: SGDClient(
            proximal_mu=config.proximal_mu, **_local_sgd(config), **options
        ),
    ),
    "scaffold": Method(
        lambda config, options, _: SCAFFOLD(
            server_learning_rate=config.server_learning_rate, **options
        ),
        lambda config, _, options: SCAFFOLDClient(
            option=config.scaffold_option,  # type: ignore[arg-type]
            **_local_sgd(config),
            **options,
        ),
    ),
}


def make_strategy(config: Config, data: Data, split: Split, model: nn.Module) -> SeededFedAvg:
    """Make the strategy that `config` names.

    Raises
    ------
    ConfigError
        If what the server or a client must hold would not fit.
    """
    evaluating = min(config.clients_per_evaluation, config.num_clients)
    options: dict[str, Any] = {
        "seed": config.seed,
        "min_completed": config.min_completed,
        "max_examples": len(data.y_train),
        "fraction_train": config.clients_per_round / config.num_clients,
        "min_train_nodes": config.clients_per_round,
        "fraction_evaluate": evaluating / config.num_clients,
        "min_evaluate_nodes": evaluating,
        "min_available_nodes": config.num_clients,
        # clients held out for validation are trained on by no method
        "held_out": range(config.num_clients - config.validation_clients, config.num_clients),
        "key_server": key_server(config) if config.projection else None,
        "run": run_name(config),
    }
    if METHODS[config.method].jacobians:
        _require_room_for_jacobians(config, data, split, model)
        options["validation_loss"] = _validation_loss(config, data, split, model)
    with log_from(ERROR):  # Flower warns that no client evaluates; that was asked for
        try:
            strategy = METHODS[config.method].strategy(config, options, model)
        except ValueError as error:
            raise ConfigError(f"method = {config.method}: {error}") from error
    if config.method == "tct":
        _require_room_for_features(config, data, split, model)
    return strategy


def _validation_loss(
    config: Config, data: Data, split: Split, model: nn.Module
) -> Callable[[ArrayRecord], float] | None:
    if not len(split.validation):
        return None
    x, y = data.train(split.validation)
    x = projected(config, x)
    return lambda arrays: evaluate_arrays(config, model, arrays, x, y)[0]


def _require_room_for_features(config: Config, data: Data, split: Split, model: nn.Module) -> None:
    """Refuse what TCT's clients, all on this machine, or its server could not hold."""
    width = _feature_map(config).width(model)
    sizes = sorted(len(own) for own in split.clients)
    largest, total = sizes[-1], sum(sizes)
    if config.solve == "server":
        memory, disk = 24 * total**2 + 3 * 4 * total * width, 0
    else:
        memory = 52 * largest**2 * (config.convex_steps > 1)
        memory += 4 * largest * width * (config.convex_solver == "loop")
        # all clients' as computed, in float32; one's as normalised beside them; the test set's,
        # which float16 may not hold
        itemsize = np.dtype(config.feature_dtype).itemsize
        tested = min(config.test_examples or len(data.y_test), len(data.y_test))
        rows = total * 4 + largest * itemsize + tested * (4 + 4)
        disk = rows * width * (config.keep == "features")
    try:
        require_memory(
            memory,
            f"stage 2 of {len(sizes)} clients, up to {largest} examples each,",
            cure="use more clients, fewer train-examples or, for solve = server, num-features",
        )
        require_disk(
            disk,
            "features of all examples",
            config.folder,
            cure="lower num-features, set feature-dtype = float16, or keep = nothing",
        )
    except NotEnoughMemory as error:
        raise ConfigError(f"num-features = {width}: {error}") from error


def _require_room_for_jacobians(config: Config, data: Data, split: Split, model: nn.Module) -> None:
    """Refuse what the server could not hold: the clients' Jacobians, and the global one."""
    x, _ = data.train(split.clients[0][:1])
    device = device_of(config)
    row = jacobian(model.to(device), projected(config, x).to(device))
    size = sum(b.dense_size for b in row.blocks) * row.dtype.itemsize
    size = size if config.wire == "dense" else row.nbytes
    sizes = sorted(sample_size(len(own), config.sampling_rate) for own in split.clients)[
        -config.clients_per_round :
    ]
    try:
        require_memory(
            2 * size * sum(sizes),
            f"a round of {len(sizes)} clients, up to {sum(sizes)} examples of {size / 1e6:.1f} MB,",
            cure="lower clients-per-round or the examples of each, or use a smaller network",
        )
    except NotEnoughMemory as error:
        raise ConfigError(f"model = {config.model}: {error}") from error


def make_client(
    config: Config,
    partition: int,
    data: Data,
    split: Split,
    model: nn.Module,
    state: MutableMapping[str, Any],
) -> NumPyClient:
    """Make the client that `config` names, with the examples of one partition.

    `state` is what the client keeps from one message to the next.
    """
    train, test = split.train_and_test(partition, config)
    x, y = data.train(train)
    options: dict[str, Any] = {
        "model": model,
        "x": x,
        "y": y,
        "loss": config.loss,
        "device": device_of(config),
        "sampling_rate": config.sampling_rate,
        "seed": (config.seed, partition),
    }
    if config.projection:
        options["projection"] = sealed_projection(config, partition, state)
    if len(test):
        options["x_test"], options["y_test"] = data.train(test)
    return METHODS[config.method].client(config, partition, options)


def device_of(config: Config) -> str:
    """Return the device that `config` names; ``auto`` is a GPU where there is one.

    Raises
    ------
    ConfigError
        If it is no device, or not there.
    """
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = {config.device}: cannot be used: {reason}") from error
    return config.device


def evaluate_arrays(
    config: Config, model: nn.Module, arrays: ArrayRecord, x: Tensor, y: Tensor
) -> tuple[float, float]:
    """Loss and accuracy of the given arrays on labelled examples.

    Of TCT's linear model where it is there, and not all zero; else of the network.
    """
    named = {name: array.numpy() for name, array in arrays.items()}
    network = [named[name] for name in model.state_dict()]
    options: dict[str, Any] = {"loss": config.loss, "device": device_of(config)}
    if TCTModel.ARRAYS[0] in named and named[TCTModel.ARRAYS[0]].any():
        tct = _tct_client(config, {"model": model, "x": x, "y": y, "run": "server", **options})
        feature_map = _feature_map(config)
        task = ConvexTask(
            step="linear",
            key=ConvexTask.key_of(feature_map, network),
            feature_map=feature_map,
            bias=config.bias,
            loss=config.convex_loss,  # type: ignore[arg-type]
            parts=("network", "normaliser", "linear"),
        )
        linear, mean, scale = (named[name] for name in TCTModel.ARRAYS)
        evaluated = tct.evaluate([*network, mean, scale, linear], {**task.to_config()})
    else:
        evaluated = ModelClient(model, x, y, **options).evaluate(network, {})
    loss, _, metrics = evaluated
    return loss, float(metrics["accuracy"])


def load_predictor(folder: str | Path, which: Literal["model", "best"] = "model") -> TCTModel:
    """Return the predictor that a run of TCT learned: its last model, or the best one.

    Raises
    ------
    ConfigError
        If the run is of another method, or its data set, which tells the shape of an example,
        cannot be had.
    FileNotFoundError
        If there is no finished run.
    """
    config = Config.load(Path(folder) / "config.toml")
    if config.method != "tct":
        raise ConfigError(
            f"{folder} holds a run of {config.method}, expected one of tct; load_model reads its "
            "weights"
        )
    data = load_data(config)
    network = build_model(config.replace(weights=""), data.input_shape, data.num_classes)
    return TCTModel.from_arrays(network, _feature_map(config), load_model(folder, which))
