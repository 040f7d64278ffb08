"""Checks of a method by the contract that all methods here keep, with the cure of each failure.

They run the method on the local grid: seven clients with a few of scikit-learn's digits.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import zip_longest
from logging import CRITICAL
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from fedntk.ntk.options import key_of
from fedntk.strategies.core.averaging import named_arrays

from .config.config import Config
from .engine._flower import log_from
from .engine.building import load_setup, make_strategy
from .engine.client_app import app
from .engine.engines import LocalGrid, MeteredGrid
from .engine.runs import Runnable, read_config
from .errors import ConfigError, first_line
from .models import name_model

Change = Callable[[Message], list[Message]]
SMALL = {
    "num_clients": 7, "clients_per_round": 6, "clients_per_evaluation": 3, "rounds": 3,
    "train_examples": 250, "test_examples": 50, "learning_rate": 0.1,
}  # fmt: skip


def failed(reply: Message, reason: str = "out of memory") -> Message:
    """Return an error in place of a reply, from the client."""
    instruction = Message(RecordDict(), reply_to=reply)  # back to the client, which answers it
    error = Message(Error(0, reason), reply_to=instruction)
    error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return error


def from_node(reply: Message, node: int) -> Message:
    """Let another node be the sender."""
    reply.metadata.__dict__["_src_node_id"] = node
    return reply


def _with(arrays: Callable[[Any], dict[str, Any]] = lambda _: {}, **metrics: Any) -> Change:
    """Put other arrays into each record, and set metrics."""

    def change(reply: Message) -> list[Message]:
        for record in reply.content.array_records.values():
            for name, new in arrays(named_arrays(record)).items():
                record[name] = new if isinstance(new, Array) else Array(new)
        for own in reply.content.metric_records.values():
            own.update({key_of(name): value for name, value in metrics.items()})
        return [reply]

    return change


def _first(make: Callable[[Any], Any]) -> Change:
    return _with(lambda arrays: {name: make(array) for name, array in [*arrays.items()][:1]})


# what no honest client sends -> what becomes of its reply
HOSTILE: dict[str, Change] = {
    "an error": lambda reply: [failed(reply)],
    "bytes that are no array": _first(lambda _: Array("float32", (3,), "numpy.ndarray", b"none")),
    "NaN": _first(lambda array: np.full(array.shape, np.nan, np.float32)),
    "infinity": _first(lambda array: np.full(array.shape, np.inf, np.float32)),
    "another shape": _first(lambda array: np.ones((*array.shape, 2), np.float32)),
    "another dtype": _first(lambda array: array.astype(np.complex64)),
    "an extra array": _with(lambda _: {"extra": np.zeros(3, np.float32)}),
    "negative num-examples": _with(num_examples=-5),
    "a list of num-examples": _with(num_examples=[1, 2]),
    "a metric that is NaN": _with(train_loss=float("nan")),
    "its reply twice": lambda reply: [reply, reply],
    "the id of another node": lambda reply: [from_node(reply, 77)],
}


class _Grid(LocalGrid):
    """Has two clients change their replies, permutes all, or breaks down before a round."""

    change: Change | None = None
    order: int | None = None
    ends_before = 0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages, replies = list(messages), list[Message]()
        configs = [c for m in messages for c in m.content.config_records.values()]
        if self.ends_before in [config.get("server-round") for config in configs]:
            raise ConnectionError
        for reply in super().send_and_receive(messages):
            lies = self.change is not None and reply.metadata.src_node_id in (1, 2)
            replies += self.change(reply) if self.change and lies else [reply]
        if self.order is None:
            return replies
        return [replies[i] for i in np.random.default_rng(self.order).permutation(len(replies))]


class Contract:
    """What a method keeps: a check a method, with the cure in its docstring."""

    def __init__(self, config: Config) -> None:
        self.config, self.setup = config, load_setup(config)
        self.first = ArrayRecord(dict(self.setup.network.state_dict()))
        self.after, self.straight = self._run()

    def _run(self, checkpoint: Path | None = None, **how: Any) -> tuple[ArrayRecord, Any]:
        """Return the network's arrays, and the bits of all arrays with the last evaluation."""
        strategy, last = make_strategy(self.setup), self.config.rounds
        grid = _Grid(app, self.config.num_clients, self.config.run_config())
        vars(grid).update(how)
        result = strategy.start(MeteredGrid(grid), self.first, last, checkpoint=checkpoint)
        bits: dict[str, Any] = {n: a.tobytes() for n, a in named_arrays(result.arrays).items()}
        if grid.change is None:
            bits["evaluations"] = dict(strategy.evaluate_metrics.get(last, {}))
        return strategy.network_of(result.arrays), bits

    def _require_same(self, **how: Any) -> None:
        _, found = self._run(**how)
        if odd := [name for name, bits in self.straight.items() if found.get(name) != bits]:
            raise ValueError(f"in round {self.config.rounds} differ: {', '.join(odd)}")

    def settings_survive_a_file_and_flwr_run(self) -> None:
        """Declare options with fedntk.ntk.options.option: numbers, words or tuples of numbers."""
        self.config.save(self.config.folder / "config.toml")
        for found in (Config.of_run(self.config.folder), Config.parse(self.config.run_config())):
            if found != self.config:
                raise ValueError(f"{self.config.settings} became {found.settings}")

    def arrays_keep_names_dtypes_and_shapes(self) -> None:
        """Return cast_like(new, named_arrays(self.global_arrays)), of strategies.core.averaging."""
        kinds = [
            [f"{name} ({array.dtype}, {tuple(array.shape)})" for name, array in arrays.items()]
            for arrays in (self.first, self.after)
        ]
        for was, now in zip_longest(*kinds, fillvalue="none"):
            if was != now:
                raise ValueError(f"{was} became {now}")

    def one_seed_gives_the_same_bits(self) -> None:
        """Draw from a generator of (seed, round), in clients (seed, round, partition)."""
        self._require_same()

    def the_order_of_replies_changes_no_bit(self) -> None:
        """Take the replies as accept_weights or accepted returns them: sorted by client."""
        for order in range(3):
            self._require_same(order=order)

    def a_resumed_run_gives_the_same_bits(self) -> None:
        """Declare what the strategy keeps between rounds as a field: name: type = state(...)."""
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(ConnectionError):
                self._run(Path(folder), ends_before=self.config.rounds)
            self._require_same(checkpoint=Path(folder))

    def no_reply_of_a_client_ends_a_run(self) -> None:
        """Use only what accept_weights or accepted returns; a bad reply is a BadReply of parse."""
        usable: list[Change] = [lambda reply: [reply], lambda _: []]
        expected = [self._run(change=change)[1] for change in usable]
        for kind, change in HOSTILE.items():
            try:
                _, found = self._run(change=change)
            except Exception as error:
                raise ValueError(f"clients send {kind}: {first_line(error)}") from error
            if found not in expected:
                raise ValueError(f"clients send {kind}, and it changes the model")


NAMES = [name for name in vars(Contract) if not name.startswith("_")]


def _read_config(method: Runnable, settings: dict[str, Any]) -> Config:
    if "model" in settings:
        settings["model"] = name_model(settings["model"])
    return read_config(method, {**SMALL, **settings})


@contextlib.contextmanager
def _contract(config: Config) -> Iterator[Callable[[], Contract]]:
    """Yield what makes the contract, once: all checks compare with its run."""
    with tempfile.TemporaryDirectory() as folder:
        yield cache(partial(Contract, config.replace(out=folder)))


def _check(name: str, contract: Callable[[], Contract]) -> None:
    """Raise AssertionError, with a cure, if a check fails."""
    cure = ""  # of a run that fails as it is
    with log_from(CRITICAL):
        try:
            check = getattr(contract(), name)
            cure = f". {check.__doc__}"
            check()
        except ConfigError:  # the settings do not go together
            raise
        except Exception as error:
            said = first_line(error).removeprefix("ValueError: ")
            raise AssertionError(f"{said}{cure}") from error


def make_fixture(method: Runnable, **settings: Any) -> Any:
    """Make a pytest fixture: a test that takes it runs once with each of the method's checks.

    The test calls what it is given. Parameters are those of :func:`check_method`.
    """
    import pytest  # only tests need it

    config = _read_config(method, settings)

    def check(request: Any) -> Iterator[Callable[[], None]]:
        with _contract(config) as contract:
            yield partial(_check, request.param, contract)

    return pytest.fixture(params=NAMES, ids=lambda name: name.replace("_", " "))(check)


def check_method(method: Runnable, **settings: Any) -> pd.DataFrame:
    """Check a method by the contract of those here: a table of check, passed and what to do.

    `method` is what :func:`~fedntk.simulations.run` takes; `settings` (snake_case) win over it, and
    `model` may be an object, such as for a method that needs a network with BatchNorm.

    Examples
    --------
    >>> bool(check_method("fedavg").passed.all())
    True
    """
    rows = []
    with _contract(_read_config(method, settings)) as contract:
        for name in NAMES:
            said = ""
            try:
                _check(name, contract)
            except AssertionError as error:
                said = str(error)
            rows.append((name.replace("_", " "), not said, said))
    return pd.DataFrame(rows, columns=["check", "passed", "what to do"])
