"""What neighbours that send false Jacobians do to a client of NTK-DFL, one of them or two.

scikit-learn's digits, 20 clients with 50 images each, on a fixed ring (2 neighbours) and on a fixed
graph of degree 5. One or two neighbours of client 0 follow the protocol except for the Jacobians
that they send (Thompson et al., ICML 2025, algorithm 3):

labels     each label is the next class
scale 90   the same, and Jacobians 90 times as large: less than the 100 medians that are refused
scale 1e4  the same, 10,000 times as large: refused, unless those who agree set the median

    python benchmarks/hostile_neighbours.py [--rounds 10] [--seeds 0,1,2]

Measured are the test accuracy after the last round of client 0's model, of the other honest
clients' models on average, and of the mean model; and the parcels refused in a round.
"""

import json
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import parse_options, write
from flwr.app import Array, ArrayRecord, Context
from torch import Tensor, nn

from fedntk.clients import NTKDFLClient, client_app
from fedntk.ntk import NetworkPredictor
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import NTKDFL, Topology

CLIENTS, EXAMPLES = 20, 50
OFFSETS = {2: (1,), 5: (1, 2, 10)}  # of a client's neighbours, both ways round
HOSTILE = {2: ((), (1,), (1, 19)), 5: ((), (1,), (1, 2))}
SCALES = {"labels": 1.0, "scale 90": 90.0, "scale 1e4": 1e4}
Arrays = dict[str, Any]


class Hostile(NTKDFLClient):
    """Sends Jacobians of wrong labels, and scaled ones."""

    scale = 1.0

    def step_jacobians(self, message: Any) -> Any:
        """Send the changed Jacobians."""
        outgoing, metrics = super().step_jacobians(message)
        return {to: self._changed(arrays) for to, arrays in outgoing.items()}, metrics

    def _changed(self, arrays: Arrays) -> Arrays:
        """Scale the second factor of each layer, the derivatives by its outputs."""
        factors = sorted(name for name in arrays if name.startswith("block-"))[1::2]
        scaled = {name: self.scale * arrays[name] for name in factors}
        return {**arrays, **scaled, "targets": np.roll(arrays["targets"], 1, axis=1)}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))


def accuracy(model: nn.Module, weights: Arrays, test: tuple[Tensor, Tensor]) -> float:
    predictor = NetworkPredictor.from_arrays(model, weights, loss="cross-entropy")
    return float(predictor.evaluate(*test).accuracy)


def measured(degree: int, hostile: tuple[int, ...], attack: str, seed: int, rounds: int) -> Arrays:
    data = load_data(Config(dataset="digits"))
    order = np.random.default_rng(seed).permutation(len(data.y_train))
    own = [data.train(part) for part in np.split(order[: CLIENTS * EXAMPLES], CLIENTS)]
    edges = [(k, (k + offset) % CLIENTS) for k in range(CLIENTS) for offset in OFFSETS[degree]]
    with TemporaryDirectory() as cache:

        def client_fn(context: Context) -> NTKDFLClient:
            k = int(context.node_config["partition-id"])
            kind = Hostile if k in hostile else NTKDFLClient
            client = kind(network(seed), *own[k], cache=cache, seed=(seed, k))
            client.scale = SCALES[attack]  # type: ignore[attr-defined]
            return client

        strategy = NTKDFL(
            learning_rate=0.1, steps=(200.0,), topology=Topology("own", graph=edges),
            min_available_nodes=CLIENTS, fraction_evaluate=0.0,
        )  # fmt: skip
        first = {k: Array(t.numpy()) for k, t in network(seed).state_dict().items()}
        grid = LocalGrid(client_app(client_fn), CLIENTS, {})
        result = strategy.start(grid, ArrayRecord(first), num_rounds=rounds)
    test, model = data.test(), network(seed)
    others = [k for k in range(1, CLIENTS) if k not in hostile]
    mean = {name: array.numpy() for name, array in result.arrays.items()}
    refused = [float(m["parcels-rejected"]) for m in strategy.train_metrics.values()]
    return {
        "client 0": accuracy(model, strategy.models[0], test),
        "other honest clients": float(
            np.mean([accuracy(model, strategy.models[k], test) for k in others])
        ),
        "mean model": accuracy(model, mean, test),
        "parcels refused a round": float(np.mean(refused)),
    }


def main() -> None:
    options = parse_options(__doc__, rounds=10, seeds=(0, 1, 2))
    torch.set_num_threads(1)
    rows = []
    for degree, groups in HOSTILE.items():
        for hostile in groups:
            for attack in SCALES if hostile else ["labels"]:
                found = [
                    measured(degree, hostile, attack, s, options.rounds) for s in options.seeds
                ]
                means = {k: round(float(np.mean([f[k] for f in found])), 4) for k in found[0]}
                row = {"degree": degree, "hostile": len(hostile)}
                rows.append({**row, "attack": attack if hostile else "none", **means})
                print(json.dumps(rows[-1]), flush=True)
    write("hostile_neighbours", summary={**vars(options), "rows": rows})


if __name__ == "__main__":
    main()
