"""What a class prototype gives away: which images it is nearest to.

A client's prototype of a class is the mean feature of its examples. Whoever has the network, which
the server does, can compare it with the features of any images. Here the pool has the first 1,000
training images of class 0, the client's among them. Reported are how often the image nearest to the
prototype is one of the client's own, how often chance would hit one, and the median rank of the
client's own images in the pool. Features are the last layer's inputs
("prototypes") or tangent features ("entk"), of a network at its first weights or after rounds of
FedAvg.

    python benchmarks/prototypes_privacy.py --data-dir FOLDER [--draws 200]
"""

import numpy as np
import torch
from common import parse_options, trained, write
from torch import Tensor

from fedntk.ntk import FeatureMap
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup

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
    options = parse_options(__doc__, data_dir=True, draws=200)
    config = Config(
        method="fedavg", dataset="fashion-mnist", data_dir=options.data_dir, model="lenet",
        num_clients=20, clients_per_round=10, clients_per_evaluation=0, train_examples=10_000,
        partition="dirichlet", alpha=0.8, learning_rate=0.1, rounds=10, test_examples=1_000,
    )  # fmt: skip
    setup, rows = load_setup(config), []
    y = setup.data.y_train
    x, _ = setup.data.train(np.flatnonzero(y == 0)[:POOL])
    for rounds in (0, config.rounds):
        network = trained(config) if rounds else setup.network
        for kind, feature_map in FEATURES.items():
            extract = feature_map.extractor(network)
            features = torch.cat([extract(part) for part in x.split(200)])
            for count in COUNTS:
                found = attack(features, count, options.draws)
                rows.append({"rounds": rounds, "features": kind, **found})
                print(rows[-1], flush=True)
    write("prototypes_privacy", summary={"pool": POOL, "draws": options.draws, "rows": rows})


if __name__ == "__main__":
    main()
