"""The server half of the Flower app: checks, runs and records the configured method."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from logging import getLogger

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedntk.ntk.predictors.network import Evaluation
from fedntk.ntk.support.arrays import ArrayDict
from fedntk.ntk.support.files import PARTIAL, claimed, owner_only
from fedntk.strategies import Strategy

from ..attacks import ATTACKS
from ..checkpoints import Checkpoints, OnRound
from ..config.config import BaseConfig
from ..config.private import describe_released
from ..config.settings import ConfigError
from ..configuration import Config
from ..data.data import KeptExamples
from ..errors import Stopped, first_line
from ..methods.method import Setup
from ..report.results import clear_run, require_same, run_state, write_json, write_run
from ..simulated_trust import projected
from ._flower import outlive_workers
from .building import load_setup, make_client, make_strategy, source_of, with_task
from .engines import MeteredGrid
from .faults import LossyGrid, LyingGrid
from .recorder import Recorder

logger = getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run-config says; ``flwr run`` calls this."""
    outlive_workers()
    try:
        config = with_task(Config.parse(context.run_config))
    except ConfigError as error:
        logger.error("%s", error)
        raise
    serve(grid, config)


# what a run needs besides clients; made, and so checked, before the first round
Prepared = tuple[Setup, Strategy]


def prepare(config: Config) -> Prepared:
    """Load data and split, build network, strategy and, as a trial, metrics and a client."""
    config.load_metrics()
    setup = load_setup(config)
    make_client(replace(setup, kept=KeptExamples()), 0, {})  # whose examples go with it
    return setup, make_strategy(setup)


def private(config: Config) -> AbstractContextManager[None]:
    """Write files that only their owner can read, if the examples may be private."""
    return owner_only() if config.may_be_private else contextlib.nullcontext()


def serve(grid: Grid, config: Config, on_round: OnRound | None = None) -> None:
    """Run a configuration on a grid, unless it is finished, as :func:`train` does."""
    state = run_state(config)
    if state == "finished":
        logger.info("finished before; results are in %s", config.folder)
        return
    with at_work(config):
        train(grid, *prepare(config), on_round, resume=state == "interrupted")


@contextlib.contextmanager
def at_work(config: Config) -> Iterator[None]:
    """Claim the run's folder, set torch's threads, and write into the folder what ends the run."""
    folder, threads = config.folder, torch.get_num_threads()
    with private(config), claimed(folder, "server"):
        try:
            torch.set_num_threads(config.server_threads or threads)
            yield
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit | Stopped)
            reason = first_line(error)
            if not stopped:
                logger.error("%s", reason)
            status = "interrupted" if stopped else "failed"
            with contextlib.suppress(OSError):
                write_json(folder / "summary.json", {"status": status, "error": reason})
            raise
        finally:
            torch.set_num_threads(threads)


def train(
    grid: Grid, setup: Setup, strategy: Strategy, on_round: OnRound | None, *, resume: bool
) -> None:
    """Run a strategy on a grid, or `resume` it from the newest checkpoint; write the results."""
    config = setup.config
    folder, method = config.folder, config.chosen_method
    for path in folder.rglob(f"*{PARTIAL}"):  # what killed processes left half written
        path.unlink(missing_ok=True)
    checkpoints = Checkpoints(folder)
    checkpoint = checkpoints.newest() if resume else None
    source = {  # what the bits of a run depend on besides its configuration
        **source_of(setup),
        "device": setup.device,
        "threads": f"{torch.get_num_threads()} on the server, {config.client_threads} in a client",
    }
    if checkpoint is not None:
        before = checkpoint.source
        require_same(before, source, folder)
        for key in ("device", "threads"):
            if before[key] != source[key]:
                logger.warning(
                    "%s: %s before, now %s: bits may differ", key, before[key], source[key]
                )
    logger.info("%s", setup.describe_data())
    _await_nodes(grid, config)
    clear_run(folder, checkpoints=checkpoint is None)
    config.save(folder / "config.toml")
    setup.data.inputs.save(folder)
    if config.liars:
        attack, factor = ATTACKS[config.attack], config.attack_factor
        grid = LyingGrid(grid, setup.liars, attack, factor=factor, seed=config.seed)
    metered = MeteredGrid(grid)
    x, y = setup.evaluation_set()
    if config.task == "regression" and not bool((y != y[:1]).any()):
        raise ConfigError(
            f"evaluate-on = {config.evaluate_on}: R^2 needs two examples with differing targets, "
            f"got {len(y)} with equal ones; give more test examples, or a larger test-share"
        )
    x = projected(config, x)  # once, not in each round
    metrics = config.load_metrics()

    def evaluate(arrays: ArrayDict) -> Evaluation:
        predictor = method.judged(setup, arrays, strategy.learned, cache=config.cache)
        predictor.metrics = metrics
        evaluation: Evaluation = predictor.evaluate(x, y)
        more = {**evaluation.more, **method.measure(setup, strategy)}
        return evaluation._replace(more=more)

    recorder = Recorder(config, metered, strategy, evaluate, checkpoints, source, on_round)
    initial = ArrayRecord(dict(setup.network.state_dict()))
    if checkpoint is not None:
        initial = checkpoint.arrays
        strategy.load_state_dict(checkpoint.strategy)
        recorder.go_on_from(checkpoint, initial)
    elif resume and config.mechanism is not None:
        raise ConfigError(
            f"no checkpoint in {folder} can be used, and the run may have released what has noise: "
            "a second release adds to epsilon; take another folder, and add up both"
        )
    elif resume:
        logger.warning("no checkpoint in %s can be used: starting with round 1", folder)
    used: Grid = metered
    if config.lost_share or config.late_share:
        shares = config.lost_share, config.late_share
        used = LossyGrid(metered, strategy, config.seed, *shares)
        nodes, channel = sorted(used.get_node_ids()), strategy.channel
        channel.grid = used
        channel.registry.add(channel.ask_partitions(nodes))  # losses are drawn by client
        channel.registry.set_present(nodes)
    try:
        strategy.start(
            grid=used,
            initial_arrays=initial,
            num_rounds=config.rounds,
            evaluate_fn=recorder,
            should_stop=recorder.should_stop,
        )
    except BaseException:
        with contextlib.suppress(OSError):  # what ended the run is what is to be told
            recorder.save()
        raise
    recorder.save()
    method.after_run(setup, strategy, folder / "details")
    sizes = setup.split.sizes
    more = {
        **source,
        "inputs": setup.data.inputs.describe(),
        "test-examples": len(setup.data.y_test),
    }
    if config.mechanism is None:
        more["examples-per-client"] = [min(sizes), max(sizes)]
    else:
        more["privacy"] = describe_released(config)
    summary = write_run(config, recorder.checkpoint, **more)
    checkpoints.save(recorder.checkpoint, last=True)
    write_json(folder / "summary.json", summary)
    method.clean_up(config)
    if unchanged := summary["rounds-unchanged"]:
        logger.warning("%d rounds left the model as it was", unchanged)
    logger.info("results are in %s", folder)


def _await_nodes(grid: Grid, config: BaseConfig, patience: float = 30) -> None:
    """Wait for the configured number of nodes, as long as new ones come within `patience` s."""
    seen, since = -1, time.monotonic()
    while (count := len(list(grid.get_node_ids()))) < config.num_clients:
        if count > seen:
            logger.info("waiting for nodes: %d of %d are there", count, config.num_clients)
            seen, since = count, time.monotonic()
        elif time.monotonic() > since + patience:
            break
        time.sleep(0.2)
    if count != config.num_clients:
        raise ConfigError(
            f"num-clients: expected {config.num_clients} nodes, got {count}; start the run with "
            f'--federation-config "num-supernodes={config.num_clients}", or set num-clients'
        )
