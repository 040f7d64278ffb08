"""Checks of a method by the contract that all methods here keep, with the cure of each failure.

They run the method on the local grid: seven clients with a few of scikit-learn's digits.
"""

import contextlib
import dataclasses
import inspect
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, partial
from itertools import zip_longest
from logging import CRITICAL
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from fedntk.ntk.options import STATE, Declared, key_of
from fedntk.strategies.core.averaging import named_arrays

from .configuration import Config
from .engine._flower import log_from
from .engine.building import load_setup, make_strategy
from .engine.client_app import make_app
from .engine.engines import LocalGrid, MeteredGrid
from .engine.runs import Runnable, read_config
from .errors import ConfigError, first_line

Change = Callable[[Message], list[Message]]
DATA = (int, float, str, list, dict, set, np.ndarray, torch.Tensor)
NOT_JUDGED = "not judged before one seed gives the same bits"
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
        for measured in reply.content.metric_records.values():
            measured.update({key_of(name): value for name, value in metrics.items()})
        return [reply]

    return change


def _held_by(strategy: Any) -> dict[str, Any]:
    """Return name -> value of what a strategy holds besides what fedntk's classes know."""
    kinds = [kind for kind in type(strategy).__mro__ if kind.__module__.startswith("fedntk.")]
    sources = "".join(map(inspect.getsource, kinds))
    declared = itertools.chain(*re.findall(r"self\.(\w+)|^    (\w+):", sources, re.MULTILINE))
    remade = [
        field.name for field in dataclasses.fields(strategy) if field.metadata.get(STATE) is False
    ]
    return {n: _plain(vars(strategy)[n], {}) for n in vars(strategy).keys() - {*declared, *remade}}


def _shared_by(*kinds: type) -> dict[str, Any]:
    """Return what users' classes, and the modules that define them, hold for all objects."""
    held: dict[str, Any] = {}
    for kind in {kind: None for value in kinds for kind in value.__mro__}:
        if kind.__module__.partition(".")[0] not in ("builtins", "fedntk", "flwr"):
            module = vars(sys.modules[kind.__module__]).items()
            values = {
                f"{kind.__name__}.{name}": value
                for name, value in vars(kind).items()
                if name not in vars(Declared)  # such as the list of its options
            }
            values |= {name: value for name, value in module if isinstance(value, DATA)}
            held |= {n: _plain(value, {}) for n, value in values.items() if "__" not in n}
    return held


def _plain(value: Any, seen: dict[int, int]) -> Any:
    """Return a value, with all that is in it, as tuples, numbers and texts."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return type(value).__name__, repr(value)
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), np.shape(value), value.tobytes()
    if isinstance(value, Mapping):
        parts = [(repr(key), _plain(part, seen)) for key, part in value.items()]
        return type(value).__name__, sorted(parts, key=lambda part: part[0])
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, value))
    if isinstance(value, Iterable) and hasattr(value, "__len__"):
        return type(value).__name__, [_plain(part, seen) for part in value]
    held = {**getattr(value, "__dict__", {})}
    return type(value).__name__, getattr(value, "__qualname__", ""), _plain(held, seen)


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
    looks_at: Callable[[Any], None] = staticmethod(lambda server_round: None)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages, replies = list(messages), list[Message]()
        configs = [c for m in messages for c in m.content.config_records.values()]
        for server_round in {config.get("server-round") for config in configs}:
            self.looks_at(server_round)
            if server_round == self.ends_before:
                raise ConnectionError
        for reply in super().send_and_receive(messages):
            lies = self.change is not None and reply.metadata.src_node_id in (1, 2)
            replies += self.change(reply) if self.change and lies else [reply]
        if self.order is None:
            return replies
        return [replies[i] for i in np.random.default_rng(self.order).permutation(len(replies))]


class NotJudged(Exception):  # noqa: N818
    """A check that says nothing of a method whose runs differ as they are."""


class Contract:
    """What a method keeps: a check a method, with the cure in its docstring."""

    def __init__(self, config: Config) -> None:
        self.config, self.setup = config, load_setup(config)
        self.first = ArrayRecord(dict(self.setup.network.state_dict()))
        self.held: dict[str, Any] | None = None  # by the strategy when the last round began
        method = config.chosen_method
        before = _shared_by(method.strategy_class, method.client_class)
        self.after, self.straight = self._run()
        after = _shared_by(method.strategy_class, method.client_class)
        self.shared = [name for name, value in after.items() if before.get(name) != value]

    def _run(self, checkpoint: Path | None = None, **how: Any) -> tuple[ArrayRecord, Any]:
        """Return the network's arrays, and the bits of all arrays with the last evaluation."""
        strategy, last = make_strategy(self.setup), self.config.rounds
        app = make_app(lambda _: self.setup)
        grid = _Grid(app, self.config.num_clients, self.config.run_config())
        vars(grid).update(how)

        def look(server_round: Any) -> None:
            if server_round == last and self.held is None:
                self.held = _held_by(strategy)

        self.held = None
        grid.looks_at = look
        result = strategy.start(MeteredGrid(grid), self.first, last, checkpoint=checkpoint)
        bits: dict[str, Any] = {n: a.tobytes() for n, a in named_arrays(result.arrays).items()}
        if grid.change is None:
            bits["evaluations"] = dict(strategy.evaluate_metrics.get(last, {}))
        return strategy.network_of(result.arrays), bits

    def _differing(self, **how: Any) -> list[str]:
        _, changed = self._run(**how)
        return [name for name, bits in self.straight.items() if changed.get(name) != bits]

    @cached_property
    def _varying(self) -> list[str]:
        """What differs if nothing is changed."""
        return self._differing()

    def _require_same(self, **how: Any) -> None:
        if self._varying:
            raise NotJudged(NOT_JUDGED)
        if differing := self._differing(**how):
            raise ValueError(f"in round {self.config.rounds} differ: {', '.join(differing)}")

    def settings_survive_a_file_and_flwr_run(self) -> None:
        """Declare options with fedntk.ntk.options.option: numbers, words or tuples of numbers."""
        config, folder = self.config, self.config.folder
        config.save(folder / "config.toml")
        passed = {"objects": config.objects, "methods": config.methods}
        for read in (Config.of_run(folder, passed=config), Config(config.run_config(), **passed)):
            if read != config:
                raise ValueError(f"{config.settings} became {read.settings}")

    def arrays_keep_names_dtypes_and_shapes(self) -> None:
        """Return Update(uploads, cast_like(new, r.model)), of strategies.core.averaging."""
        kinds = [
            [f"{name} ({array.dtype}, {tuple(array.shape)})" for name, array in arrays.items()]
            for arrays in (self.first, self.after)
        ]
        for was, now in zip_longest(*kinds, fillvalue="none"):
            if was != now:
                raise ValueError(f"{was} became {now}")

    def one_seed_gives_the_same_bits(self) -> None:
        """Draw from a generator of (seed, round), in clients (seed, round, partition)."""
        if self._varying:
            raise ValueError(f"in round {self.config.rounds} differ: {', '.join(self._varying)}")

    def the_order_of_replies_changes_no_bit(self) -> None:
        """Take the replies as r.ask returns them: sorted by client."""
        for order in range(3):
            self._require_same(order=order)

    def a_resumed_run_gives_the_same_bits(self) -> None:
        """Declare what the strategy keeps between rounds as a field: name: type = state(...).

        What it can make anew is declared as state(..., saved=False).
        """
        if self._varying:
            raise NotJudged(NOT_JUDGED)
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(ConnectionError):
                self._run(Path(folder), ends_before=self.config.rounds)
            before = self.held or {}
            differing = self._differing(checkpoint=Path(folder))
        now = self.held or {}
        differing += [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if differing := [*differing, *self.shared]:
            raise ValueError(f"in round {self.config.rounds} differ: {', '.join(differing)}")

    def no_reply_of_a_client_ends_a_run(self) -> None:
        """Use only what r.ask returns, and end if not self.enough; its parse raises BadReply."""
        usable: list[Change] = [lambda reply: [reply], lambda _: []]
        expected = [self._run(change=change)[1] for change in usable]
        for kind, change in HOSTILE.items():
            try:
                _, outcome = self._run(change=change)
            except Exception as error:
                raise ValueError(f"clients send {kind}: {first_line(error)}") from error
            if outcome not in expected and not self._varying:
                raise ValueError(f"clients send {kind}, and it changes the model")


NAMES = [name for name in vars(Contract) if not name.startswith("_")]


def _read_config(method: Runnable, settings: dict[str, Any]) -> Config:
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
            cure = f". {inspect.cleandoc(check.__doc__)}".replace("\n\n", " ")
            check()
        except (ConfigError, NotJudged):  # the settings do not go together
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
        def judge(contract: Callable[[], Contract]) -> None:
            try:
                _check(request.param, contract)
            except NotJudged as error:
                pytest.skip(str(error))

        with _contract(config) as contract:
            yield partial(judge, contract)

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
            passed, said = True, ""
            try:
                _check(name, contract)
            except AssertionError as error:
                passed, said = False, str(error)
            except NotJudged as error:
                said = str(error)
            rows.append((name.replace("_", " "), passed, said))
    return pd.DataFrame(rows, columns=["check", "passed", "what to do"])
