"""The client half of the Flower app: the configured method's client, with its node's examples."""

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Error, Message

from fedntk.clients import MaskedWeights, client_app
from fedntk.clients.core.numpy_client import NumPyClient

from ..config.config import Config
from ..config.settings import ConfigError
from ..data.kept_examples import KeptExamples
from ..data.load import load_own
from ..errors import TRACEBACKS, first_line
from ..methods.method import PERSONAL, Setup
from .building import load_setup, make_client
from .engines import CLIENT_APP_RAISED_EXCEPTION
from .meter import meter

Function = Callable[[Message, Context], Message]
STATE = "fedntk.client"  # name of the record that a client keeps


def client_fn(context: Context) -> NumPyClient:
    """Make the client of a node; its configuration says which examples it has.

    ``data-path`` names a file of its own; else it has the part of the data set that
    ``partition-id`` stands for. A node without ``partition-id`` is known by its id.
    ``check-ranges=false`` accepts a file whose numbers are of another scale than the run's.
    """
    node = context.node_config
    partition, path = node.get("partition-id"), node.get("data-path")
    checked = bool(node.get("check-ranges", True))
    if partition is None and path is None:
        raise ConfigError(
            "the node config names no examples: start the SuperNode with --node-config "
            "'partition-id=0' for a part of the data set, or with 'data-path=\"examples.npz\"' "
            "for examples of its own"
        )
    setup = _own_setup(context)
    torch.set_num_threads(setup.config.client_threads)
    number = context.node_id if partition is None else int(partition)
    own = None
    if path is not None:
        own = load_own(str(path), setup.data, setup.max_examples, check_ranges=checked)
    if STATE not in context.state:
        context.state[STATE] = ConfigRecord()
    return make_client(setup, number, context.state.config_records[STATE], own)


def _own_setup(context: Context) -> Setup:
    """Return what the clients of one run share in a thread: every message overwrites the weights.

    Examples are also kept for one thread: a network may change in place what it is given.
    """
    run = context.run_id, dict(context.run_config)
    if getattr(_thread, "run", None) != run:
        # one client is made at a time
        template = _template(context.run_id, Config.parse(context.run_config))
        network = copy.deepcopy(template.network)
        _thread.setup = replace(template, network=network, kept=KeptExamples())
        _thread.run = run
    setup: Setup = _thread.setup
    return setup


_thread = threading.local()


@lru_cache(maxsize=1)
def _template(_run_id: int, config: Config) -> Setup:
    """Make it once a run: what the settings name may change between runs."""
    return load_setup(config)


def _say_where(message: Message, context: Context, call_next: Function) -> Message:
    """Answer with the place of an error in a user's file, which Ray's own answer lacks."""
    try:
        return call_next(message, context)
    except Exception as error:  # a client must not end the run
        TRACEBACKS.log(context, error)
        return Message(Error(CLIENT_APP_RAISED_EXCEPTION, first_line(error)), reply_to=message)


def _mask(message: Message, context: Context, call_next: Function) -> Message:
    """Mask the weights of a client if the strategy asks for that."""
    return _masks(tuple(context.run_config.items()))(message, context, call_next)


@lru_cache(maxsize=4)
def _masks(run_config: tuple[tuple[str, Any], ...]) -> MaskedWeights:
    """Return the mod of a run; it may answer again, as a run that was cut off asks again."""
    config = Config.parse(dict(run_config))
    return MaskedWeights(cache=config.cache / PERSONAL, only_masked=False)


app = client_app(client_fn, mods=[meter, _say_where, _mask])
