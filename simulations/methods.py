"""The table of methods: how each one's strategy and client are made from a configuration."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from logging import ERROR
from typing import Any

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
    sample_size,
)
from fedntk.ntk import NotEnoughMemory, jacobian, require_memory
from fedntk.strategies import CPNTKFL, NTKFL, SCAFFOLD, SeededFedAvg

from ._flower import log_from
from .config import Config, ConfigError
from .data import Data
from .parties import key_server, projected, run_name, sealed_projection, shuffling_server
from .partitions import Split

__all__ = ["METHODS", "Method", "device_of", "evaluate_arrays", "make_client", "make_strategy"]


@dataclass(frozen=True)
class Method:
    """Server and client half of one method.

    Attributes
    ----------
    strategy : callable
        (config, options common to all, the server's loss on validation examples or None)
        -> strategy.
    client : callable
        (config, partition, options common to all) -> client.
    jacobians : bool
        Whether the server holds Jacobians of the clients' examples and evolves them.
    """

    strategy: Callable[
        [Config, dict[str, Any], Callable[[ArrayRecord], float] | None], SeededFedAvg
    ]
    client: Callable[[Config, int, dict[str, Any]], NumPyClient]
    jacobians: bool = False


def _evolution(
    config: Config,
    options: dict[str, Any],
    validation_loss: Callable[[ArrayRecord], float] | None,
) -> dict[str, Any]:
    """Options of the strategies that evolve a kernel."""
    return dict(
        learning_rate=config.learning_rate,
        steps=config.steps_grid,
        loss=config.loss,
        selection=config.selection,
        validation_loss=validation_loss,
        validation_partitions=options.pop("held_out"),
        kernel=config.kernel,
        residuals=config.residuals,
        tolerance=config.tolerance,
        memory_budget=round(config.memory_budget * 1e9) or None,
        device=device_of(config),
        **options,
    )


def _cp_ntk_fl_strategy(
    config: Config,
    options: dict[str, Any],
    validation_loss: Callable[[ArrayRecord], float] | None,
) -> SeededFedAvg:
    return CPNTKFL(
        sparsity=config.sparsity,
        bits=config.bits,
        shuffling_server=shuffling_server(config) if config.shuffle else None,
        noise_multiplier=config.noise_multiplier,
        label_noise=config.label_noise,
        delta=config.delta,
        **_evolution(config, options, validation_loss),
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


METHODS = {
    "ntk-fl": Method(
        lambda *arguments: NTKFL(**_evolution(*arguments)),
        lambda config, _, options: NTKFLClient(
            wire=config.wire,  # type: ignore[arg-type]
            **options,
        ),
        jacobians=True,
    ),
    "cp-ntk-fl": Method(_cp_ntk_fl_strategy, _cp_ntk_fl_client, jacobians=True),
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
        If a round's Jacobians would not fit on the server.
    """
    validation_loss = None
    if METHODS[config.method].jacobians:
        _require_room(config, data, split, model)
    if METHODS[config.method].jacobians and len(split.validation):
        x, y = data.train(split.validation)
        x = projected(config, x)

        def validation_loss(arrays: ArrayRecord) -> float:
            return evaluate_arrays(config, model, arrays, x, y)[0]

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
    with log_from(ERROR):  # Flower warns that no client evaluates; that was asked for
        return METHODS[config.method].strategy(config, options, validation_loss)


def _require_room(config: Config, data: Data, split: Split, model: nn.Module) -> None:
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
    """Loss and accuracy of the given weights on labelled examples."""
    evaluator = ModelClient(model, x, y, loss=config.loss, device=device_of(config))  # type: ignore[arg-type]
    loss, _, metrics = evaluator.evaluate([array.numpy() for array in arrays.values()], {})
    return loss, float(metrics["accuracy"])
