"""Runs with Flower on a GPU: all methods beside the CPU, and what takes a CPU long.

    python benchmarks/gpu_runs.py --data-dir FOLDER [--parts methods,engines,runs] [--device cuda]

- methods: each file of simulations/conf for digits, five rounds, on the GPU and on the CPU.
- engines: FedAvg of SimpleCNN on Fashion-MNIST, clients one after the other in this process, and
  on Ray with a share of the GPU for each client.
- runs: one exchange on all images of Fashion-MNIST, NTK-FL with 20,000 examples a round, TCT on all
  images of Fashion-MNIST, and TCT with ResNet-18 on the JPEG subset of CIFAR-10.

FOLDER has the CIFAR-10 subset as CIFAR10-jpeg. Each run has a process of its own; one that fails
is left out. `seconds` are of the whole run by the clock; `gpu-mb` is the peak in that process.
"""

import argparse
import concurrent.futures
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from common import CONF, in_child, keep_rows, parse_options

KEYS = ["part", "case", "device", "engine"]
MEASURED = ["rounds", "seconds", "seconds-in-rounds", "metric", "accuracy", "loss", "gpu-mb"]
FIRST_STAGE = {"tct": {"tct.bootstrap-rounds": 3}}  # so that five rounds have both stages
SHARED = {"model": "simple-cnn", "rounds": 5, "num-clients": 40, "train-examples": 20_000}
SHARED |= {"partition": "iid", "local-epochs": 5, "batch-size": 64}
ENGINES = [("local", {}), *(("ray", {"client-gpus": share}) for share in (1, 0.25, 0.125))]
RUNS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "one exchange, Fashion-MNIST, 60,000 images, p = 2,000",
        "one_exchange_fmnist",
        {"random-features": 2000},
    ),
    ("one exchange, Fashion-MNIST, 60,000 images, p = 8,000", "one_exchange_fmnist", {}),
    (
        "NTK-FL, Fashion-MNIST, 100 clients of 200 examples a round",
        "ntk_fl_fmnist",
        {"clients-per-round": 100, "rounds": 5},
    ),
    (
        "TCT, Fashion-MNIST, 60,000 images, p = 100,000",
        "tct_fmnist",
        {"tct.bootstrap-rounds": 4, "rounds": 14},
    ),
    (
        "TCT, CIFAR-10 (JPEG subset), ResNet-18, p = 100,000",
        "tct_fmnist",
        {"model": "resnet18", "norm": "group", "tct.bootstrap-rounds": 4, "rounds": 14},
    ),
]


def child(conf: str, engine: str, **settings: Any) -> dict[str, Any]:
    import torch

    from fedntk.simulations import run

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        own = {key.replace("-", "_"): value for key, value in settings.items()}
        done = run(CONF / f"{conf}.toml", engine=engine, out=folder, progress=False, **own)
        summary = done.summary
    headline = done.config.chosen_method.headline
    return {
        "rounds": done.config.rounds, "seconds": time.perf_counter() - start,
        "seconds-in-rounds": summary["seconds"], "metric": headline,
        "accuracy": float(done.curve(headline).iloc[-1]), "loss": summary.get("loss"),
        "gpu-mb": torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0,
    }  # fmt: skip


def cases(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    data = {"data-dir": options.data_dir}
    for file in sorted(CONF.glob("*_digits.toml")):
        name = file.stem.removesuffix("_digits").replace("_", "-")
        for device in ("cpu", options.device):
            key = {"part": "methods", "case": name, "device": device, "engine": "local"}
            yield key, {"conf": file.stem, "rounds": 5, **FIRST_STAGE.get(name, {})}
    for engine, share in ENGINES:
        what = "".join(f", client-gpus = {own:g}" for own in share.values())
        key = {"part": "engines", "case": f"FedAvg, SimpleCNN{what}", "engine": engine}
        made = {"conf": "fedavg_fmnist", **SHARED, **share}
        yield {**key, "device": options.device}, {**made, **data}
    for case, conf, settings in RUNS:
        key = {"part": "runs", "case": case, "device": options.device, "engine": "local"}
        own = {"dataset": f"hf:{options.data_dir}/CIFAR10-jpeg"} if "CIFAR" in case else {}
        yield key, {"conf": conf, **settings, **own, **data}


def measure(key: dict[str, Any], made: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    made |= {"engine": key["engine"], "device": key["device"]}
    if (found := in_child(__file__, made, seconds)) is None:
        return None
    row = {**key, **{column: found[column] for column in MEASURED}}
    print(row, flush=True)
    return row


def main() -> None:
    options = parse_options(
        __doc__, child=child, data_dir="../shared/data", device="cuda",
        parts=("methods", "engines", "runs"), only="", seconds=300.0,
    )  # fmt: skip
    chosen = [
        own
        for own in cases(options)
        if own[0]["part"] in options.parts and options.only in own[0]["case"]
    ]
    for part in options.parts:  # accuracies of digits are no times: several at once
        at_once = max(1, (os.cpu_count() or 1) // 2) if part == "methods" else 1
        mine = [own for own in chosen if own[0]["part"] == part]
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            for row in pool.map(lambda own: measure(*own, options.seconds), mine):
                if row is not None:
                    keep_rows("gpu_runs", [row], KEYS)


if __name__ == "__main__":
    main()
