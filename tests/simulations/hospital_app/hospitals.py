"""Three hospitals learn together, by any of six methods: an app as a user might write it.

A node's config has ``hospital``, its number; ``key``, the file of its private key; and, if its
examples are in a file, ``data-path``. For tests that kill processes, the run-config names points
such as ``train:2`` (hospital 2 trains), ``query:1`` and ``server:1`` (the server, after round 1):
at those of ``stop-at`` the process writes its id into a file and waits for ever, and at those of
``fail-at`` it raises an error.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from fedntk.clients import (
    BootstrapSGD,
    ClosedFormClient,
    CPNTKFLClient,
    LocalSGD,
    MaskedWeights,
    NTKFLClient,
    SCAFFOLDClient,
    SealedProjection,
    SGDClient,
    TCTClient,
    client_app,
)
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import with_fourier_features
from fedntk.strategies import (
    CPNTKFL,
    NTKFL,
    SCAFFOLD,
    TCT,
    Asynchrony,
    OneExchange,
    Sampling,
    SecureAggregation,
    SeededFedAvg,
    Strategy,
)
from fedntk.trust import ClientKeys, RemoteKeyServer, RemoteShufflingServer, load_key

CLIENTS = {
    "ntk-fl": NTKFLClient, "scaffold": SCAFFOLDClient, "tct": TCTClient, "cp-ntk-fl": CPNTKFLClient,
    "one-exchange": ClosedFormClient, "secure-fedavg": SGDClient,
}  # fmt: skip
PROJECTED = 3
RUN = "trial of three hospitals"
COMPRESSED = {"run": RUN, "sparsity": 0.2, "bits": 8}


def network(inputs: int = 4) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 3))


def network_of(method: str) -> nn.Module:
    if method == "one-exchange":
        return with_fourier_features(network(), 20, seed=0)
    return network(PROJECTED if method == "cp-ntk-fl" else 4)


def examples(hospital: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(hospital)
    n = 6 + hospital
    y = (torch.arange(n) % 2 + hospital) % 3
    return torch.randn(n, 4, generator=generator) + 2 * nn.functional.one_hot(y, 4), y


def client_fn(context: Context) -> NumPyClient:
    node, config = context.node_config, context.run_config
    hospital, method = int(node["hospital"]), config["method"]
    x, y = examples(hospital)
    if "data-path" in node:
        with np.load(node["data-path"]) as file:
            x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    options: dict[str, Any] = {"seed": (3, hospital)}
    kind: type[NumPyClient] = CLIENTS[method]
    if method in ("scaffold", "secure-fedavg"):
        options["sgd"] = LocalSGD(epochs=2, batch_size=4, learning_rate=0.1)
    elif method == "tct":
        options["cache"] = Path(config["out"]) / f"cache-{hospital}"
        options["sgd"] = BootstrapSGD(epochs=2, batch_size=64, weight_decay=1e-5)
    elif method == "cp-ntk-fl":
        context.state.setdefault("keys", ConfigRecord())
        keys = ClientKeys(
            key := load_key(Path(node["key"])),
            run=RUN,
            verify_key=bytes.fromhex(config["verify-key"]),
            state=context.state.config_records["keys"],
        )
        options |= {
            "projection": SealedProjection(PROJECTED, keys),
            "shuffling_key": bytes.fromhex(config["shuffling-key"]),
            "private_key": key,
            "sampling_rate": 0.7,
            **COMPRESSED,
        }
    made = kind(network_of(method), x, y, **options)
    for stage, name in (("train", "fit"), ("query", "query")):
        if answer := getattr(made, name, None):

            def answered(*sent: Any, answer: Any = answer, stage: str = stage) -> Any:
                reach(f"{stage}:{hospital}", config)
                return answer(*sent)

            setattr(made, name, answered)
    return made


def reach(point: str, config: dict[str, Any]) -> None:
    if point in config["fail-at"].split(","):
        raise RuntimeError(f"failed at {point}")
    if point in config["stop-at"].split(","):
        marker = Path(config["out"]) / point
        marker.with_suffix(".partial").write_text(str(os.getpid()), encoding="utf-8")
        marker.with_suffix(".partial").rename(marker)
        while True:  # Flower ends an orphan by a signal, which a long sleep would not notice
            time.sleep(0.1)


client = client_app(client_fn, mods=[MaskedWeights(only_masked=False)])
server = ServerApp()


def strategy_of(method: str, key_server: Any = None, shuffling_server: Any = None) -> Strategy:
    options: dict[str, Any] = {"min_completed": 1, "fraction_evaluate": 0.0}
    options["sampling"] = Sampling(seed=3)
    if method == "scaffold":
        return SCAFFOLD(server_learning_rate=1.2, **options)
    if method == "secure-fedavg":
        return SeededFedAvg(secure=SecureAggregation(), **options)
    if method == "tct":
        options |= {"num_features": 20, "local_steps": 10, "learning_rate": 1e-2}
        bootstrap = SeededFedAvg(fraction_evaluate=0.0)
        return TCT(network=network(), bootstrap=bootstrap, bootstrap_rounds=1, **options)
    if method == "one-exchange":
        options |= {"asynchrony": Asynchrony(stop_at_clients=3), "round_deadline": 60}
        return OneExchange(network=network_of(method), **options)
    options |= {"learning_rate": 0.05, "steps": (5, 20, 80)}
    if method == "ntk-fl":
        return NTKFL(**options)
    third_parties = {"key_server": key_server, "shuffling_server": shuffling_server}
    return CPNTKFL(**third_parties, **COMPRESSED, **options)


def learn(grid: Grid, strategy: Strategy, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Run the configured method on any grid, and return what it learned."""
    strategy.min_available_nodes = strategy.min_train_nodes = config["nodes"]
    strategy.fraction_evaluate = float(config["evaluate"])

    def after_round(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        reach(f"server:{server_round}", config)
        size = sum(float(np.abs(array.numpy()).sum()) for array in arrays.values())
        return MetricRecord({"size": size})

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(dict(network_of(config["method"]).state_dict())),
        num_rounds=config["rounds"],
        evaluate_fn=after_round,
        checkpoint=config["checkpoint"] or None,
    )
    learned = {name: array.numpy() for name, array in result.arrays.items()}
    for server_round, metrics in result.evaluate_metrics_serverapp.items():
        learned[f"size after round {server_round}"] = np.array(metrics["size"])
    for server_round, metrics in result.evaluate_metrics_clientapp.items():
        learned[f"evaluated in round {server_round}"] = np.array(metrics["accuracy"])
    return learned


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    parties: list[Any] = []
    if verify := config["authority"]:
        given = {"token": config["token"], "verify": verify}
        parties.append(RemoteKeyServer(config["key-server"], **given))
        parties.append(RemoteShufflingServer(config["shuffling-server"], **given))
    strategy = strategy_of(config["method"], *parties)
    learned = learn(grid, strategy, dict(config))
    np.savez(Path(config["out"]) / "partial.npz", **learned)
    (Path(config["out"]) / "partial.npz").rename(Path(config["out"]) / "learned.npz")
