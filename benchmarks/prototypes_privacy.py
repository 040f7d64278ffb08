"""What a class prototype gives away: which images it is nearest to.

A client's prototype of a class is the mean feature of its examples. Whoever has the network, which
the server does, can compare it with the features of any images. Here the pool has the first 1,000
training images of class 0, the client's among them. Reported are how often the image nearest to the
prototype is one of the client's own, how often chance would hit one, and the median rank of the
client's own images in the pool. Features are the last layer's inputs
("prototypes") or tangent features ("entk"), of a network at its first weights or after rounds of
FedAvg.

    python benchmarks/prototypes_privacy.py --data-dir FOLDER [--draws 200]

FOLDER is in torchvision's layout, with Fashion-MNIST. Writes results/prototypes_privacy.json.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedntk.ntk import FeatureMap
from fedntk.simulations import Config, run
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.report.results import load_model, machine

COUNTS = (1, 2, 5, 20, 100)
POOL = 1_000  # images of one class
FEATURES = {"prototypes": FeatureMap("last-layer"), "entk": FeatureMap("entk", 1000)}


def attack(features: Tensor, count: int, draws: int) -> dict[str, float]:
    """Compare means of some images' features with the features of all."""
    rng, hits, ranks = np.random.default_rng(0), [], []
    for _ in range(draws):
        own = rng.choice(len(features), size=count, replace=False)
        distances = (features - features[own].mean(0)).norm(dim=1)
        order = distances.argsort()
        hits.append(int(order[0]) in own)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order))
        ranks.append(float(position[own].double().median()) / len(features))
    return {
        "examples": count,
        "nearest-is-own": float(np.mean(hits)),
        "by-chance": count / len(features),
        "median-rank-of-own": float(np.mean(ranks)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--draws", type=int, default=200)
    options = parser.parse_args()
    config = Config(
        method="fedavg", dataset="fashion-mnist", data_dir=options.data_dir, model="lenet",
        num_clients=20, clients_per_round=10, clients_per_evaluation=0, train_examples=10_000,
        partition="dirichlet", alpha=0.8, learning_rate=0.1, rounds=10, test_examples=1_000,
    )  # fmt: skip
    setup, rows = load_setup(config), []
    y = setup.data.y_train
    x, _ = setup.data.train(np.flatnonzero(y == 0)[:POOL])
    with tempfile.TemporaryDirectory() as folder:
        run(config, out=folder, progress=False)
        trained = load_model(Path(folder))
    for rounds in (0, config.rounds):
        network = setup.network
        if rounds:
            network.load_state_dict({name: torch.tensor(a) for name, a in trained.items()})
        for kind, feature_map in FEATURES.items():
            extract = feature_map.extractor(network)
            features = torch.cat([extract(part) for part in x.split(200)])
            for count in COUNTS:
                found = attack(features, count, options.draws)
                rows.append({"rounds": rounds, "features": kind, **found})
                print(rows[-1], flush=True)
    content = {"machine": machine(), "pool": POOL, "draws": options.draws, "rows": rows}
    path = Path(__file__).parent / "results" / "prototypes_privacy.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
