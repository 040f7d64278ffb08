"""NumPyClients on Flower's Message API.

Flower's own ``ClientApp(client_fn)`` speaks the older record names, which today's strategies do
not send. :func:`client_app` answers their train, evaluate and query messages with any NumPyClient.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedntk.ntk.features.centred_inputs import INPUT_SUMS
from fedntk.ntk.options import read_task
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.agreement import Agreement
from fedntk.ntk.payloads.masked_average import AverageTask
from fedntk.ntk.payloads.npy import from_npy, to_npy

from .numpy_client import NumPyClient
from .randomness import GLOBAL_STATE
from .weights import Fit, NamedArrays

CLIENT_ID = "client-id"  # name in the configuration: which client of a run this is
OF_A_CLIENT = "from-"  # begins the name of a record that another client made

ClientFn = Callable[[Context], NumPyClient]
Function = Callable[[Message, Context], Message]  # that answers a kind of message
Decorator = Callable[[Function], Function]
Mod = Callable[[Message, Context, Function], Message]
Lifespan = Callable[[Context], Iterator[None]]
DEFAULT = "default"  # action of a message whose type has none, as in Flower


def client_app(client_fn: ClientFn, **options: Any) -> ClientApp:
    """Make a ClientApp that serves a NumPyClient.

    It answers three kinds of messages:

    - ``train`` calls ``fit(parameters, config)``. The reply has ``arrays``, and ``metrics`` with
      ``num-examples``.
    - ``evaluate`` calls ``evaluate(parameters, config)``. The reply has ``metrics`` with ``loss``
      and ``num-examples``.
    - ``query`` calls ``query(parameters, config)`` if there is one and arrays came, else
      ``get_properties(config)``. The reply has ``metrics``; strings go into ``properties``.

    Each reply's metrics hold ``partition-id`` from the node's configuration, -1 if it has none. A
    ``query.partition`` message asks only for that and loads no data; ``query.keys`` calls
    ``get_properties({})``, for the key server; ``query.public_key`` calls ``public_key(config)``,
    and ``query.input_sums`` ``input_sums(config)``. The configuration also has ``client-id``: the
    partition, or ``node<id>``. It names what a client keeps on disk.

    Parameters are :class:`~fedntk.clients.NamedArrays`: a list, as any NumPyClient takes it, whose
    ``records`` hold each array's record and name. A reply's arrays go back in the record
    ``arrays``, under the names of the message's first record if there are as many of them, else
    under numbers; a client that returns NamedArrays names its records itself.

    Functions registered with ``@app.train()``, ``@app.evaluate()`` or ``@app.query()`` replace
    these: they are given Flower's message as it came, and return the reply. Each metric is averaged
    over the clients that report it, weighted by their ``num-examples``, which must be among them;
    one that is NaN or infinite is left out.

    Parameters
    ----------
    client_fn : callable
        Context -> NumPyClient, called once per message.
    **options
        Of ``flwr.clientapp.ClientApp``, such as ``mods``.

    Examples
    --------
    ::

        app = client_app(lambda context: NTKFLClient(MyModel(), *load_my_data()))

    docs/drop-in.md shows an app with an evaluation of its own.
    """
    default = ClientApp(**options)
    _register(default, client_fn)
    return _ReplaceableApp(default, **options)


class _ReplaceableApp(ClientApp):
    """Has another app answer the messages for which no function is registered here."""

    def __init__(self, app: ClientApp, **options: Any) -> None:
        super().__init__(**options)
        self._default_app, self._replaced = app, set[tuple[str, str]]()

    def __call__(self, message: Message, context: Context) -> Message:
        category, _, action = message.metadata.message_type.partition(".")
        if (category, action or DEFAULT) in self._replaced:
            return super().__call__(message, context)
        return self._default_app(message, context)

    def train(self, action: str = DEFAULT, *, mods: list[Mod] | None = None) -> Decorator:
        self._replaced.add(("train", action))
        return super().train(action, mods=mods)

    def evaluate(self, action: str = DEFAULT, *, mods: list[Mod] | None = None) -> Decorator:
        self._replaced.add(("evaluate", action))
        return super().evaluate(action, mods=mods)

    def query(self, action: str = DEFAULT, *, mods: list[Mod] | None = None) -> Decorator:
        self._replaced.add(("query", action))
        return super().query(action, mods=mods)

    def lifespan(self) -> Callable[[Lifespan], Lifespan]:
        """Register with both apps: either may answer."""

        def register(function: Lifespan) -> Lifespan:
            self._default_app.lifespan()(function)
            return super(_ReplaceableApp, self).lifespan()(function)

        return register


def _register(app: ClientApp, client_fn: ClientFn) -> None:
    def unpack(message: Message, context: Context) -> tuple[Any, NamedArrays, dict[str, Any]]:
        client = _make_client(client_fn, context)
        if (require := getattr(client, "require_permitted", None)) is not None:
            require(message.metadata.message_type)
        return client, *received(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, parameters, config = unpack(message, context)
        task = read_task(AverageTask, config, "masked_step")
        if task is not None and task.masked_step != "masked":  # which the mod answers
            raise ValueError(
                "the strategy has secure aggregation, and this app does not mask: make it with "
                "client_app(client_fn, mods=[MaskedWeights()])"
            )
        if (require := getattr(client, "require_agreement", None)) is not None:
            require(_agreement_in(message))
        return _reply_with_arrays(message, context, parameters, client.fit(parameters, config))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, parameters, config = unpack(message, context)
        if (require := getattr(client, "require_agreement", None)) is not None:
            require(_agreement_in(message), to_train=False)
        loss, num_examples, metrics = client.evaluate(parameters, config)
        return make_reply(message, context, {"loss": loss, "num-examples": num_examples, **metrics})

    @app.evaluate("model")
    def model(message: Message, context: Context) -> Message:
        client, parameters, config = unpack(message, context)
        return _reply_with_arrays(message, context, parameters, client.report(parameters, config))

    @app.query()
    def query(message: Message, context: Context) -> Message:
        client, parameters, config = unpack(message, context)
        if parameters and (answer := getattr(client, "query", None)) is not None:
            return make_reply(message, context, answer(parameters, config))
        return make_reply(message, context, client.get_properties(config))

    @app.query("public_key")
    def public_key(message: Message, context: Context) -> Message:
        client, _, config = unpack(message, context)
        return make_reply(message, context, {wire.PUBLIC_KEY: client.public_key(config)})

    @app.query("input_sums")
    def input_sums(message: Message, context: Context) -> Message:
        client, _, config = unpack(message, context)
        client.require_agreement(_agreement_in(message))
        sums, num_examples = client.input_sums(config)
        records = {"arrays": {INPUT_SUMS: sums}}
        return make_reply(message, context, {"num-examples": num_examples}, records)

    @app.query("keys")
    def keys(message: Message, context: Context) -> Message:
        return make_reply(message, context, _make_client(client_fn, context).get_properties({}))

    @app.query("partition")
    def partition(message: Message, context: Context) -> Message:
        return make_reply(message, context, {})


def _make_client(client_fn: ClientFn, context: Context) -> NumPyClient:
    with GLOBAL_STATE:  # no other client of this process draws meanwhile
        client = client_fn(context)
    if not isinstance(client, NumPyClient):
        raise TypeError(
            f"client_fn: expected a NumPyClient, got a {type(client).__name__}; return the client "
            "itself, without .to_client()"
        )
    if (identify := getattr(client, "identify", None)) is not None:
        identify(_client_id(context))
    return client


def received(message: Message, context: Context) -> tuple[NamedArrays, dict[str, Any]]:
    """Return what a client is given: copies of the arrays received, and the configuration."""
    return unpack_content(message.content, _client_id(context))


def unpack_content(content: RecordDict, client_id: str) -> tuple[NamedArrays, dict[str, Any]]:
    """Return what :func:`received` returns, for a client of this id."""
    records, unreadable = {}, {}
    for record, arrays in content.array_records.items():
        try:
            records[record] = {name: from_npy(a.data).copy() for name, a in arrays.items()}
        except Exception as error:  # whatever hostile bytes provoke
            if not record.startswith(OF_A_CLIENT):
                raise
            unreadable[record] = str(error)
    config: dict[str, Any] = {CLIENT_ID: client_id}
    for values in content.config_records.values():
        config.update({name: value for name, value in values.items() if name != CLIENT_ID})
    return NamedArrays(records, unreadable), config


def _agreement_in(message: Message) -> dict[str, Any]:
    records = message.content.config_records
    for record in records.values():
        if any(Agreement.owns(key) for key in record):
            return dict(record)
    return dict(records.get("config", {}))


def _client_id(context: Context) -> str:
    """Name the client by its partition; by its node id, which a restart keeps, without one."""
    partition = context.node_config.get("partition-id")
    return f"node{context.node_id}" if partition is None else str(partition)


def _reply_with_arrays(
    message: Message, context: Context, received: NamedArrays, reply: Fit
) -> Message:
    result, num_examples, metrics = reply
    if isinstance(result, NamedArrays) and result is not received:  # else it may be changed
        records = result.records
    else:
        names = list(next(iter(received.records.values()), {}))
        if len(names) != len(result):
            names = [str(i) for i in range(len(result))]
        records = {"arrays": dict(zip(names, result, strict=True))}
    return make_reply(message, context, {"num-examples": num_examples, **metrics}, records)


def make_reply(
    message: Message,
    context: Context,
    values: Mapping[str, Any],
    records: Mapping[str, Mapping[str, NDArray[Any]]] | None = None,
) -> Message:
    """Return a reply with metrics, strings among them as properties, and records of arrays."""
    metrics, others = MetricRecord(), ConfigRecord()
    metrics["partition-id"] = int(context.node_config.get("partition-id", -1))
    for key, value in values.items():
        plain = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        if isinstance(plain, str | bytes):
            others[key] = plain
        else:
            metrics[key] = int(plain) if isinstance(plain, bool) else plain
    content = RecordDict({"metrics": metrics})
    for name, record in (records or {}).items():
        arrays = {key: np.asarray(array) for key, array in record.items()}
        content[name] = ArrayRecord(
            {
                key: Array(str(a.dtype), a.shape, "numpy.ndarray", to_npy(a))
                for key, a in arrays.items()
            }
        )
    if others:
        content["properties"] = others
    return Message(content, reply_to=message)
