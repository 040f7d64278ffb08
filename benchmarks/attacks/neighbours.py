"""Neighbours in NTK-DFL (Thompson et al., ICML 2025): the curious and those who lie.

Scikit-learn's digits on a fixed graph. **Curious**: five clients, two rounds. Client 0 has the
neighbours 1, 2 and 3; of these 1, or 1 and 2, follow the protocol (algorithms 2 to 4) and keep what
they get in round 2, when all weights differ:

inputs    client 0's examples, from its Jacobians at the curious clients' own averages. With a
          linear first layer in closed form. With a convolution first the Jacobian is summed over
          the positions; L-BFGS fits pixels to that block and the inputs of the last layer
weights   client 3's, with which no curious one has an edge, from client 0's weights and average:
          eq. (1) is solved for what is not known. How many examples client 3 has is taken as known

**Hostile**: 20 clients with 50 images each, ten rounds. One or two neighbours of client 0 send
Jacobians (algorithm 3) of false labels, each the next class, as they are, 90 times as large (less
than the 100 medians that are refused) or 10,000 times. Means of three seeds.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import Tensor, nn

from fedntk.clients import NTKDFLClient, client_app
from fedntk.ntk import JacobianUpload, NetworkPredictor
from fedntk.ntk.payloads.npy import from_npy
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import NTKDFL, Topology

from .cells import grid

VICTIM, THIRD = 0, 3
EDGES = ((0, 1), (0, 2), (0, 3), (3, 4))
EXAMPLES = (60, 50, 40, 30, 20)  # of the five clients
ROUND, IMAGES = 2, 20
STARTS, STEPS = 4, 300  # of L-BFGS for an image
CLIENTS, OFFSETS = 20, {2: (1,), 5: (1, 2, 10)}  # of a client's neighbours, both ways round
LIARS = {2: (1, 19), 5: (1, 2)}
SCALES = {"none": 1.0, "labels": 1.0, "scale 90": 90.0, "scale 1e4": 1e4}
CURIOUS = grid(network=("mlp", "cnn"), curious=(1, 2))
HOSTILE = [
    cell for cell in grid(degree=OFFSETS, hostile=(0, 1, 2), attack=SCALES)
    if (cell["attack"] == "none") == (cell["hostile"] == 0)
]  # fmt: skip
Arrays = dict[str, Any]
Upload = tuple[JacobianUpload, Arrays]  # rows, and the weights that they are at


def network(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if name == "cnn":
        body = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        return nn.Sequential(*body, nn.Linear(128, 10))
    width = 100 if name == "mlp" else 50
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def federation(
    clients: Sequence[Callable[[str], NTKDFLClient]], model: nn.Module, grid_class: type[LocalGrid],
    rounds: int, **options: Any,
) -> tuple[Any, NTKDFL, Any]:  # fmt: skip
    """Run clients, each made with a cache; return the grid, the strategy and its result."""
    strategy = NTKDFL(
        learning_rate=0.1, min_available_nodes=len(clients), fraction_evaluate=0.0, **options
    )
    with TemporaryDirectory() as cache:

        def client_fn(context: Context) -> NTKDFLClient:
            return clients[int(context.node_config["partition-id"])](cache)

        grid = grid_class(client_app(client_fn), len(clients), {})
        first = {key: Array(tensor.numpy()) for key, tensor in model.state_dict().items()}
        return grid, strategy, strategy.start(grid, ArrayRecord(first), num_rounds=rounds)


class CuriousGrid(LocalGrid):
    """Keeps what clients get in a round, by receiver, step and sender."""

    def _answer(self, message: Message) -> Message:
        config = dict(message.content.config_records.get("config", {}))
        receiver = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        if config.get("server-round") == ROUND and "step" in config:
            for name, record in message.content.array_records.items():
                arrays = {key: from_npy(array.data) for key, array in record.items()}
                place = int(receiver), str(config["step"]), int(name.removeprefix("from-"))
                vars(self).setdefault("got", {})[place] = arrays
        return super()._answer(message)


@functools.cache
def overheard(name: str) -> tuple[Any, Tensor]:
    """Run two rounds; return what was sent, and the truth of client 0's inputs."""
    data = load_data(Config())
    order = np.random.default_rng(0).permutation(len(data.y_train))
    parts = [data.train(p) for p in np.split(order, np.cumsum(EXAMPLES))[: len(EXAMPLES)]]
    clients = [
        lambda cache, k=k, part=part: NTKDFLClient(network(name), *part, cache=cache, seed=(0, k))
        for k, part in enumerate(parts)
    ]
    options = {"steps": (20.0,), "topology": Topology("own", graph=EDGES), "collect": False}
    grid, *_ = federation(clients, network(name), CuriousGrid, ROUND, **options)
    return grid.got, parts[VICTIM][0]


def upload_of(got: Any, curious: int) -> Upload:
    """Return what a curious client got from client 0."""
    weights = {n: a for n, a in got[VICTIM, "jacobians", curious].items() if n != "num-examples"}
    rows = {k: a.copy() for k, a in got[curious, "evolve", VICTIM].items() if k != "inputs"}
    shapes = {key: array.shape for key, array in weights.items()}
    tensors = {key: torch.from_numpy(array.copy()) for key, array in weights.items()}
    return JacobianUpload.from_arrays(rows, parameters=shapes, weights=tensors), tensors


def closed_form(uploads: Sequence[Upload], shape: torch.Size) -> Tensor:
    """Read a first linear layer's inputs: weight row over bias row; the mean of all that came."""
    inputs = []
    for upload, _ in uploads:
        dense = upload.jacobian.dense()
        rows, slopes = dense["1.weight"], dense["1.bias"]  # (n, C, H, d) and (n, C, H)
        best = slopes.flatten(1).abs().argmax(1)
        each = torch.arange(len(best))
        inputs.append(rows.flatten(1, 2)[each, best] / slopes.flatten(1)[each, best][:, None])
    return torch.stack(inputs).mean(0).reshape(shape)


def fitted(uploads: Sequence[Upload], shape: torch.Size) -> Tensor:
    """Fit pixels to the convolution's Jacobian and the last layer's inputs, image by image."""
    seen = []
    for upload, weights in uploads:
        dense = {key: rows.double() for key, rows in upload.jacobian.dense().items()}
        features = dense["4.weight"][:, 0, 0]  # of output 0 with respect to its own row: the inputs
        model = network("cnn").double()
        model.load_state_dict(weights)
        seen.append((model, dense["0.weight"], dense["0.bias"], features))
    generator, found = torch.Generator().manual_seed(0), []
    for i in range(IMAGES):
        tries = []
        for _ in range(STARTS):
            x = torch.randn(1, *shape[1:], generator=generator, dtype=torch.float64)
            x.requires_grad_()
            fit = torch.optim.LBFGS([x], max_iter=STEPS, line_search_fn="strong_wolfe")

            def loss(x: Tensor = x, fit: Any = fit, i: int = i) -> Tensor:
                fit.zero_grad()
                value = torch.zeros((), dtype=torch.float64)
                for model, weight, bias, features in seen:
                    hidden = model[:4](x)
                    value = value + (hidden[0] - features[i]).square().sum()
                    for c, output in enumerate(model[4](hidden)[0]):
                        parameters = (model[0].weight, model[0].bias)
                        made = torch.autograd.grad(output, parameters, create_graph=True)
                        value = value + (made[0] - weight[i, c]).square().sum()
                        value = value + (made[1] - bias[i, c]).square().sum()
                value.backward(inputs=[x])
                return value

            fit.step(loss)
            tries.append((float(loss().detach()), x.detach()))
        found.append(min(tries, key=lambda attempt: attempt[0])[1][0])
    return torch.stack(found)


def third_weights(got: Any, curious: Sequence[int]) -> float:
    """Solve eq. (1) for client 3's weights; return the error over that of the average itself."""
    near, known = [VICTIM, 1, 2, THIRD], [VICTIM, *curious]
    sent = {j: got[VICTIM if j != VICTIM else 1, "average", j] for j in near}
    unknown = [j for j in near if j not in known]
    errors, baseline = 0.0, 0.0
    for name, centre in got[1, "jacobians", VICTIM].items():
        if name != "num-examples":
            total = sum(EXAMPLES[j] for j in near) * centre.astype(np.float64)
            rest = total - sum(EXAMPLES[j] * sent[j][name].astype(np.float64) for j in known)
            guess = rest / sum(EXAMPLES[j] for j in unknown)
            errors += float(((guess - sent[THIRD][name]) ** 2).sum())
            baseline += float(((centre - sent[THIRD][name]) ** 2).sum())
    return float(np.sqrt(errors / baseline))


def curious(_: str, network: str, curious: int) -> Iterator[Arrays]:
    got, x = overheard(network)
    clients = range(1, curious + 1)
    uploads = [upload_of(got, client) for client in clients]
    rebuilt = closed_form(uploads, x.shape) if network == "mlp" else fitted(uploads, x.shape)
    error = (rebuilt[:IMAGES] - x[:IMAGES]).flatten(1).double().square().mean(1).sqrt()
    yield {
        "images": len(error),
        "input-error-median": float(error.median()),
        "input-error-mean": float(error.mean()),
        "labels-in-clear": all(bool((u.targets.sum(1) == 1).all()) for u, _ in uploads),
        "third-weights-error": third_weights(got, clients),
    }


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


def attacked(degree: int, hostile: Sequence[int], attack: str, seed: int, rounds: int) -> Arrays:
    data = load_data(Config(dataset="digits"))
    order = np.random.default_rng(seed).permutation(len(data.y_train))[: CLIENTS * 50]

    def client(cache: str, k: int) -> NTKDFLClient:
        kind = Hostile if k in hostile else NTKDFLClient
        part = data.train(np.split(order, CLIENTS)[k])
        made = kind(network("small", seed), *part, cache=cache, seed=(seed, k))
        made.scale = SCALES[attack]  # type: ignore[attr-defined]
        return made

    edges = [(k, (k + offset) % CLIENTS) for k in range(CLIENTS) for offset in OFFSETS[degree]]
    clients = [functools.partial(client, k=k) for k in range(CLIENTS)]
    options = {"steps": (200.0,), "topology": Topology("own", graph=edges)}
    model = network("small", seed)
    _, strategy, result = federation(clients, model, LocalGrid, rounds, **options)

    def accuracy(weights: Any) -> float:
        predictor = NetworkPredictor.from_arrays(model, weights, loss="cross-entropy")
        return float(predictor.evaluate(*data.test()).accuracy)

    others = [k for k in range(1, CLIENTS) if k not in hostile]
    refused = [float(m["parcels-rejected"]) for m in strategy.train_metrics.values()]
    return {
        "client 0": accuracy(strategy.models[0]),
        "other honest clients": float(np.mean([accuracy(strategy.models[k]) for k in others])),
        "mean model": accuracy({name: array.numpy() for name, array in result.arrays.items()}),
        "parcels refused a round": float(np.mean(refused)),
    }


def hostile(_: str, degree: int, hostile: int, attack: str, rounds: int = 10) -> Iterator[Arrays]:
    found = [attacked(degree, LIARS[degree][:hostile], attack, seed, rounds) for seed in range(3)]
    yield {key: round(float(np.mean([row[key] for row in found])), 4) for key in found[0]}
