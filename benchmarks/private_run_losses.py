"""A private exchange in full: one client in ten is lost after it has given its shares.

    python benchmarks/private_run_losses.py --data-dir FOLDER [--seed 0]

simulations/conf/one_exchange_fmnist_private.toml as it is: 100 clients add their shares of Skellam
noise, mask their sums, and the server opens the total. The last ten clients answer with an error
when they are asked for masked sums, so their masks have to be taken off by the others' shares.
Measured are the accuracy on the test images, and the epsilon of those who survived.
"""

import time
from typing import Any

from common import CONF, parse_options, write
from flwr.app import ArrayRecord, Message

from fedntk.ntk.options import read_task
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.simulations import Config
from fedntk.simulations.check import failed
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.engine.client_app import app
from fedntk.simulations.engine.engines import LocalGrid, MeteredGrid

LOST = 10


class LossyGrid(LocalGrid):
    """A grid whose last clients are lost when they are asked for masked sums."""

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        task = read_task(SumTask, dict(message.content.get("config", {})))
        late = message.metadata.dst_node_id > len(self.contexts) - LOST
        return failed(reply) if late and task is not None and task.step == "masked" else reply


def main() -> None:
    options = parse_options(__doc__, data_dir=True, seed=0, examples=0)
    start = time.monotonic()
    config = Config.load(
        CONF / "one_exchange_fmnist_private.toml", data_dir=options.data_dir, seed=options.seed
    )
    if options.examples:
        config = config.replace(train_examples=options.examples)
    setup = load_setup(config)
    strategy = make_strategy(setup)
    grid = LossyGrid(app, config.num_clients, config.run_config())
    result = strategy.start(MeteredGrid(grid), ArrayRecord(setup.network.state_dict()), 1)
    x, y = setup.data.test()
    predictor = strategy.predictor(result.arrays)
    hits = [
        predictor.predict(a).argmax(1) == b for a, b in zip(x.split(500), y.split(500), strict=True)
    ]
    metrics: dict[str, Any] = dict(result.train_metrics_clientapp[1])
    row = {
        "accuracy": sum(int(found.sum()) for found in hits) / len(y), "seed": options.seed,
        "clients": config.num_clients, "lost": LOST, "images": sum(map(len, setup.split.clients)),
        "seconds": time.monotonic() - start, **metrics,
    }  # fmt: skip
    print(row)
    write("private_run_losses", [row], {})


if __name__ == "__main__":
    main()
