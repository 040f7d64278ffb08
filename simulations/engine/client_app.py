"""The client half of the Flower app: the configured method's client, with its node's examples."""

import copy
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from logging import getLogger
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp

from fedntk.clients import MaskedWeights, PrivacyLimits, cache_dir, client_app
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk.predictors.network import dtype_of

from ..config.data import TABLE, DatasetSettings
from ..config.settings import ConfigError, key_of
from ..configuration import Config
from ..data.data import KeptExamples
from ..data.load import load_own
from ..errors import TRACEBACKS, first_line, naming
from ..methods.method import PERSONAL, Setup, masks_itself
from .building import load_setup, make_client, with_task
from .engines import CLIENT_APP_RAISED_EXCEPTION, meter

logger = getLogger("flwr")
Function = Callable[[Message, Context], Message]
Load = Callable[[Context], Setup]
STATE = "fedntk.client"  # name of the record that a client keeps
DATA, PRIVACY = "data-path", "privacy-"  # a node's own examples; begins what their owner allows
INPUTS = "inputs"  # folder of what is known of a run's examples
ROWS = "rows-path"  # folder of which rows of a node's own examples count


@lru_cache(maxsize=1)
def _load_once(_run_id: int, config: Config, inputs: str) -> Setup:
    """Load it once a run: what the settings name may change between runs."""
    return load_setup(config, inputs)


def load(context: Context) -> Setup:
    """Load the setup that a run's settings say, if the node answers such runs.

    A node with ``inputs``, a folder with ``inputs.json``, needs no copy of the run's data set, and
    keeps what it keeps in its user's cache, not in the run's folder, which is the server's.
    """
    node = context.node_config
    method = str(context.run_config.get("method", Config.options()["method"].default))
    methods = [name.strip() for name in str(node.get("methods", "")).split(",") if name.strip()]
    if methods and method not in methods:
        raise ConfigError(
            f"methods: this node answers {', '.join(methods)}, and the run's is {method}; its "
            "owner can change that in the node config"
        )
    config = Config.parse(context.run_config)
    inputs = str(node.get(INPUTS, ""))
    if inputs and DATA not in node:
        raise ConfigError(f"node config: {INPUTS} goes with {DATA}, got no examples of its own")
    if inputs:
        folder = hashlib.sha256(str(config.folder).encode()).hexdigest()[:16]
        config = config.replace(out=str(cache_dir() / "runs" / folder))
    else:
        config = with_task(config)
    return _load_once(context.run_id, config, inputs)


def client_fn(context: Context, load: Load = load) -> NumPyClient:
    """Make the client of a node; its configuration says which examples it has.

    ``data-path`` names a file of its own; else it has the part of the data set that
    ``partition-id`` stands for. A node without ``partition-id`` is known by its id. A table is read
    by the run's settings, such as ``target`` and ``separator``, unless the node has its own.
    ``check-ranges=false`` accepts a file whose numbers are of another scale than the run's. Keys
    that begin with ``privacy-`` say what the owner of the examples allows, whatever the run says.
    ``rows-path`` names the folder of :class:`~fedntk.clients.CountedRows`.
    """
    node = context.node_config
    partition, path = node.get("partition-id"), node.get("data-path")
    checked = bool(node.get("check-ranges", True))
    if partition is None and path is None:
        raise ConfigError(
            "the node config names no examples: start the SuperNode with --node-config "
            "'partition-id=0' for a part of the data set, or with 'data-path=\"examples.csv\"' "
            "for examples of its own"
        )
    if path is None and ROWS in node:
        raise ConfigError(f"node config: {ROWS} goes with {DATA}, got no examples of its own")
    setup = load(context)
    torch.set_num_threads(setup.config.client_threads)
    number = context.node_id if partition is None else int(partition)
    examples, owner = None, owner_of(node)
    if path is not None:
        with naming("node config"):
            own = {name: node.get(key_of(name), getattr(setup.config, name)) for name in TABLE}
            how = DatasetSettings(**own)
        try:
            options: Any = {"check_ranges": checked, "dtype": dtype_of(setup.network)}
            examples = load_own(str(path), setup.data, setup.max_examples, settings=how, **options)
        except ValueError as error:  # which tells facts of the examples, such as a cell
            logger.error("%s", error)
            raise ConfigError(
                f"{DATA}: the examples do not fit the run's data set; this node's log says why"
            ) from None
        if "privacy" in owner:  # the run's settings prepare the examples, and do not name them
            owner["privacy"] = replace(owner["privacy"], examples=examples.raw)
        examples = examples._replace(owner=owner, rows=str(node.get(ROWS, "")))
        if STATE not in context.state:  # the first message of the run; this log is the node's
            logger.info("%s %s: %s", DATA, path, examples.describe(setup.data.inputs.classes))
    if STATE not in context.state:
        context.state[STATE] = ConfigRecord()
    return make_client(setup, number, context.state.config_records[STATE], examples)


def owner_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a node's configuration allows clients that mask; nothing in it is the run's."""
    said = {
        key.removeprefix(PRIVACY).replace("-", "_"): value
        for key, value in node.items()
        if key.startswith(PRIVACY)
    }
    if said and DATA not in node:
        raise ConfigError(f"node config: {PRIVACY}... goes with {DATA}, got no examples of its own")
    owner = {"allow_repeats": DATA not in node}
    owner |= {name: said.pop(name) for name in ("allow_repeats", "only_masked") if name in said}
    with naming(f"node config, {PRIVACY}...", ValueError, TypeError):
        limits = {"only_masked": True, "privacy": PrivacyLimits(**said)} if said else {}
    return {**limits, "cache": cache_dir() / PERSONAL, **owner} if DATA in node else owner


def _say_where(message: Message, context: Context, call_next: Function) -> Message:
    """Answer with the place of an error in a user's file, which Ray's own answer lacks."""
    try:
        return call_next(message, context)
    except Exception as error:  # a client must not end the run
        TRACEBACKS.log(context, error)
        return Message(Error(CLIENT_APP_RAISED_EXCEPTION, first_line(error)), reply_to=message)


def _mask(message: Message, context: Context, call_next: Function, *, load: Load) -> Message:
    """Mask the weights of a client if the strategy asks for that."""
    owner = tuple((k, v) for k, v in context.node_config.items() if k.startswith((DATA, PRIVACY)))
    return _masks(load(context).config, owner)(message, context, call_next)


@lru_cache(maxsize=4)
def _masks(config: Config, node: tuple[tuple[str, Any], ...]) -> MaskedWeights:
    """Return the mod of a run; clients that mask sums themselves refuse what is not masked."""
    owner = owner_of(dict(node))
    if masks_itself(config.chosen_method.client_class):
        owner |= {"only_masked": False, "privacy": None}
    return MaskedWeights(**{"cache": config.cache / PERSONAL, "only_masked": False, **owner})


def _setup_of(context: Context, *, load: Load) -> Setup:
    """Return a setup with a network and examples for this thread, which its clients change.

    Ray makes an app anew for each message, so it cannot hold this itself.
    """
    run = load, context.run_id, dict(context.run_config)
    if getattr(_thread, "run", None) != run:
        template = load(context)
        network = copy.deepcopy(template.network)
        _thread.setup = replace(template, network=network, kept=KeptExamples())
        _thread.run = run
    setup: Setup = _thread.setup
    return setup


_thread = threading.local()


def make_app(load: Load) -> ClientApp:
    """Make the client half of runs whose setup is what `load` returns."""
    mask = partial(_mask, load=load)
    client_of = partial(client_fn, load=partial(_setup_of, load=load))
    return client_app(client_of, mods=[meter, _say_where, mask])


app = make_app(load)
