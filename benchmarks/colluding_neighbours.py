"""What one neighbour of a client learns in NTK-DFL, and what two neighbours learn that collude.

Five clients on a fixed graph, scikit-learn's digits, two rounds. Client 0 has the neighbours 1, 2
and 3; of these 1, or 1 and 2, are curious. They follow the protocol (Thompson et al., ICML 2025,
algorithms 2 to 4) and keep what they get in round 2, when all weights differ:

inputs    client 0's examples, from its Jacobians at the curious clients' own averages. With a
          linear first layer from the block's factors, in closed form. With a convolution first
          the Jacobian is summed over the positions; L-BFGS fits pixels to all that arrived: that
          block, and the inputs of the last layer. Relative error: of pixels in units of their
          deviation, root mean square over an image; the median and the mean over the images
weights   client 3's, with which no curious one has an edge, from client 0's weights and average:
          eq. (1) is solved for what is not known. How many examples client 3 has is taken as known.
          Error: distance from the truth, over that of client 0's average

    python benchmarks/colluding_neighbours.py [--images 20]
"""

import json
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import parse_options, write
from flwr.app import Array, ArrayRecord, Context, Message
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.clients import NTKDFLClient, client_app
from fedntk.ntk import JacobianUpload
from fedntk.ntk.payloads.npy import from_npy
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import NTKDFL, Topology

VICTIM, THIRD = 0, 3
EDGES = ((0, 1), (0, 2), (0, 3), (3, 4))
EXAMPLES = (60, 50, 40, 30, 20)  # of the five clients
ROUND = 2
STARTS, STEPS = 4, 300  # of L-BFGS for an image
Arrays = dict[str, NDArray[Any]]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def cnn() -> nn.Module:
    body = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(128, 10))


NETWORKS = {"mlp": mlp, "cnn": cnn}


class Curious(LocalGrid):
    """Keeps what clients get in a round, by receiver, step and sender."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.got: dict[tuple[int, str, int], Arrays] = {}

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        """Keep what is sent, and send it."""
        messages = list(messages)
        for message in messages:
            self._keep(message)
        return super().send_and_receive(messages, timeout=timeout)

    def _keep(self, message: Message) -> None:
        configs = message.content.config_records
        config = dict(configs.get("config", {}))
        if config.get("server-round") != ROUND or "step" not in config:
            return
        receiver = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        for name, record in message.content.array_records.items():
            arrays = {key: from_npy(array.data) for key, array in record.items()}
            sender = int(name.removeprefix("from-"))
            self.got[int(receiver), str(config["step"]), sender] = arrays


def examples() -> list[tuple[Tensor, Tensor]]:
    data = load_data(Config())
    order = np.random.default_rng(0).permutation(len(data.y_train))
    parts = np.split(order, np.cumsum(EXAMPLES))[: len(EXAMPLES)]
    return [data.train(part) for part in parts]


def overheard(name: str) -> tuple[Curious, Tensor]:
    """Run two rounds; return what was sent, and the truth of client 0's inputs."""
    torch.manual_seed(0)
    network, own = NETWORKS[name](), examples()
    with TemporaryDirectory() as cache:

        def client_fn(context: Context) -> NTKDFLClient:
            k = int(context.node_config["partition-id"])
            return NTKDFLClient(NETWORKS[name](), *own[k], cache=cache, seed=(0, k))

        strategy = NTKDFL(
            learning_rate=0.1, steps=(20.0,), topology=Topology("own", graph=EDGES),
            collect=False, min_available_nodes=len(EXAMPLES), fraction_evaluate=0.0,
        )  # fmt: skip
        grid = Curious(client_app(client_fn), len(EXAMPLES), {})
        first = {key: Array(tensor.numpy()) for key, tensor in network.state_dict().items()}
        strategy.start(grid, ArrayRecord(first), num_rounds=ROUND)
    return grid, own[VICTIM][0]


def upload_of(grid: Curious, curious: int) -> tuple[JacobianUpload, Arrays]:
    """Return the rows that a curious client got from client 0, and its weights that they are at."""
    arrays = grid.got[curious, "evolve", VICTIM]
    weights = {
        n: a for n, a in grid.got[VICTIM, "jacobians", curious].items() if n != "num-examples"
    }
    rows = {key: array.copy() for key, array in arrays.items() if key != "inputs"}
    shapes = {key: array.shape for key, array in weights.items()}
    known = {key: torch.from_numpy(array.copy()) for key, array in weights.items()}
    return JacobianUpload.from_arrays(rows, parameters=shapes, weights=known), weights


def closed_form(grid: Curious, curious: Sequence[int], shape: torch.Size) -> Tensor:
    """Read a first linear layer's inputs: weight row over bias row; the mean of all that came."""
    found = []
    for client in curious:
        upload, _ = upload_of(grid, client)
        dense = upload.jacobian.dense()
        rows, slopes = dense["1.weight"], dense["1.bias"]  # (n, C, H, d) and (n, C, H)
        best = slopes.flatten(1).abs().argmax(1)
        each = torch.arange(len(best))
        found.append(rows.flatten(1, 2)[each, best] / slopes.flatten(1)[each, best][:, None])
    return torch.stack(found).mean(0).reshape(shape)


def fitted(grid: Curious, curious: Sequence[int], shape: torch.Size, images: int) -> Tensor:
    """Fit pixels to the convolution's Jacobian and the last layer's inputs, image by image."""
    seen = []
    for client in curious:
        upload, weights = upload_of(grid, client)
        dense = {key: rows.double() for key, rows in upload.jacobian.dense().items()}
        features = dense["4.weight"][:, 0, 0]  # of output 0 with respect to its own row: the inputs
        model = cnn().double()
        model.load_state_dict({key: torch.from_numpy(a.copy()) for key, a in weights.items()})
        seen.append((model, dense["0.weight"], dense["0.bias"], features))
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(images):
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
                    outputs = model[4](hidden)[0]
                    for c in range(len(outputs)):
                        own = torch.autograd.grad(
                            outputs[c], (model[0].weight, model[0].bias), create_graph=True
                        )
                        value = value + (own[0] - weight[i, c]).square().sum()
                        value = value + (own[1] - bias[i, c]).square().sum()
                value.backward(inputs=[x])
                return value

            fit.step(loss)
            tries.append((float(loss().detach()), x.detach()))
        found.append(min(tries, key=lambda own: own[0])[1][0])
    return torch.stack(found)


def third_weights(grid: Curious, curious: Sequence[int]) -> float:
    """Solve eq. (1) for client 3's weights; return the error over that of the average itself."""
    counts = dict(enumerate(EXAMPLES))
    near = [VICTIM, 1, 2, THIRD]
    known = [VICTIM, *curious]
    sent = {j: grid.got[VICTIM if j != VICTIM else 1, "average", j] for j in near}
    average = grid.got[1, "jacobians", VICTIM]
    unknown = [j for j in near if j not in known]
    errors, baseline = 0.0, 0.0
    for name, centre in average.items():
        if name == "num-examples":
            continue
        total = sum(counts[j] for j in near) * centre.astype(np.float64)
        rest = total - sum(counts[j] * sent[j][name].astype(np.float64) for j in known)
        guess = rest / sum(counts[j] for j in unknown)
        errors += float(((guess - sent[THIRD][name]) ** 2).sum())
        baseline += float(((centre - sent[THIRD][name]) ** 2).sum())
    return float(np.sqrt(errors / baseline))


def measured(name: str, images: int) -> list[dict[str, Any]]:
    grid, x = overheard(name)
    rows = []
    for curious in ((1,), (1, 2)):
        if name == "mlp":
            found = closed_form(grid, curious, x.shape)[:images]
        else:
            found = fitted(grid, curious, x.shape, images)
        error = (found - x[:images]).flatten(1).double().square().mean(1).sqrt()
        targets = [upload_of(grid, client)[0].targets for client in curious]
        rows.append({
            "network": name,
            "curious": len(curious),
            "images": len(error),
            "input-error-median": float(error.median()),
            "input-error-mean": float(error.mean()),
            "labels-in-clear": all(bool((labels.sum(1) == 1).all()) for labels in targets),
            "third-weights-error": third_weights(grid, curious),
        })  # fmt: skip
    return rows


def main() -> None:
    options = parse_options(__doc__, images=20)
    rows = [row for name in NETWORKS for row in measured(name, options.images)]
    for row in rows:
        print(json.dumps(row))
    write("colluding_neighbours", summary={"rows": rows})


if __name__ == "__main__":
    main()
