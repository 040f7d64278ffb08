"""The table of methods: how each one's strategy and client are made from a configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from logging import ERROR
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from torch import Tensor, nn

from fedntk.clients import ModelClient, NTKFLClient, SGDClient
from fedntk.ntk import NotEnoughMemory, jacobian, require_memory
from fedntk.strategies import NTKFL, SeededFedAvg

from ._flower import log_from
from .config import Config, ConfigError
from .data import Data
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
    """

    strategy: Callable[
        [Config, dict[str, Any], Callable[[ArrayRecord], float] | None], SeededFedAvg
    ]
    client: Callable[[Config, int, dict[str, Any]], NumPyClient]


def _ntk_fl_strategy(
    config: Config,
    options: dict[str, Any],
    validation_loss: Callable[[ArrayRecord], float] | None,
) -> SeededFedAvg:
    return NTKFL(
        learning_rate=config.learning_rate,
        steps=config.steps_grid,
        loss=config.loss,  # type: ignore[arg-type]
        selection=config.selection,  # type: ignore[arg-type]
        validation_loss=validation_loss,
        validation_partitions=options.pop("held_out"),
        kernel=config.kernel,  # type: ignore[arg-type]
        residuals=config.residuals,  # type: ignore[arg-type]
        tolerance=config.tolerance,
        memory_budget=round(config.memory_budget * 1e9) or None,
        device=device_of(config),
        **options,
    )


METHODS = {
    "ntk-fl": Method(
        _ntk_fl_strategy,
        lambda config, _, options: NTKFLClient(
            wire=config.wire,  # type: ignore[arg-type]
            **options,
        ),
    ),
    "fedavg": Method(
        lambda _, options, __: SeededFedAvg(**options),
        lambda config, partition, options: SGDClient(
            local_epochs=config.local_epochs,
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            seed=(config.seed, partition),
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
    if config.method == "ntk-fl":
        _require_room(config, data, split, model)
    if config.method == "ntk-fl" and len(split.validation):
        x, y = data.train(split.validation)

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
    }
    with log_from(ERROR):  # Flower warns that no client evaluates; that was asked for
        return METHODS[config.method].strategy(config, options, validation_loss)


def _require_room(config: Config, data: Data, split: Split, model: nn.Module) -> None:
    """Refuse what the server could not hold: the clients' Jacobians, and the global one."""
    x, _ = data.train(split.clients[0][:1])
    row = jacobian(model.to(device_of(config)), x.to(device_of(config)))
    size = sum(b.dense_size for b in row.blocks) * row.dtype.itemsize
    size = size if config.wire == "dense" else row.nbytes
    sizes = sorted(len(own) for own in split.clients)[-config.clients_per_round :]
    try:
        require_memory(
            2 * size * sum(sizes),
            f"a round of {len(sizes)} clients, up to {sum(sizes)} examples of {size / 1e6:.1f} MB,",
            cure="lower clients-per-round or the examples of each, or use a smaller network",
        )
    except NotEnoughMemory as error:
        raise ConfigError(f"model = {config.model}: {error}") from error


def make_client(
    config: Config, partition: int, data: Data, split: Split, model: nn.Module
) -> NumPyClient:
    """Make the client that `config` names, with the examples of one partition."""
    train, test = split.train_and_test(partition, config)
    x, y = data.train(train)
    options: dict[str, Any] = {
        "model": model,
        "x": x,
        "y": y,
        "loss": config.loss,
        "device": device_of(config),
    }
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
