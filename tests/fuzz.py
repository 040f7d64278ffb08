"""A fuzzer: liars change real replies of every strategy and stage, and the rules of replies hold.

A case is a reply with one or two of the :data:`~tests.lies.LIES`. `check` requires of a run:

- no exception; one in which no reply could be used says so, by NoUsableReply;
- only finite numbers in the model, the state and the metrics;
- bounds on processor time and memory;
- honest clients may refuse what liars had them sent, but do not stumble over it;
- the model, the state and the metrics have the bits of the run in which the dropped replies never
  came. The exceptions:

  - `LOUD` lies say more than silence, and stay in that run: an error has a client sent again all
    that it may have lost; one that says that it lost its state is sent it again, or begins anew;
  - a round that does not wait asks a client again whose reply was dropped, and waits on for one
    that never came: such a run has errors in the place of the dropped replies;
  - the list of what clients have been sent, which a reply that is out of scale confirms;
  - counts of dropped replies, and public keys, which clients draw anew;
  - what a lie about a masked number has done, if nobody noticed: masks are drawn anew in each run,
    and with them what the lie comes to;
  - replies that a defence dropped come in that run, too: without them it might drop others.

Clients' sums that were kept are taken out of the model again, one client's, with the same bits.

    python -m tests.fuzz 100000 0  # number of cases, seed
"""

import argparse
import hashlib
import itertools
import logging
import re
import resource
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message
from torch import nn
from tqdm import tqdm

from fedntk.clients import (
    BootstrapSGD,
    ClosedFormClient,
    CountedRows,
    DFedAvgClient,
    LocalSGD,
    SGDClient,
    TCTClient,
)
from fedntk.ntk import CentredInputs, TCTModel
from fedntk.ntk.robust_averages import Defence
from fedntk.simulations.check import failed
from fedntk.simulations.engine._flower import own_copy
from fedntk.strategies import (
    CPNTKFL,
    TCT,
    Asynchrony,
    CentreInputs,
    DFedAvg,
    FeatureSums,
    FedEnsemble,
    KeptSums,
    Ledger,
    NoisySums,
    NoUsableReply,
    OneExchange,
    RowChanges,
    Screening,
    SecureAggregation,
    SeededFedAvg,
    Topology,
)
from fedntk.strategies.core.replies import result_of
from fedntk.strategies.core.sums import Sums
from fedntk.trust import ShufflingServer, new_key, public_bytes

from .lies import LIES, LOUD, TWO, Draw, Lie, Replies, World, pick
from .strategies import test_cp_ntk_fl, test_fed_ensemble, test_tct
from .strategies.federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    bits,
    examples,
    loaded,
    network,
    start,
)
from .strategies.test_contract import CONTRACTS, frozen

ROUNDS = 2
MOST_ANSWERS = 10_000  # of clients, in memory
SECONDS = 10  # of the processor, in a run that takes a tenth of one
MOST_BYTES = 2 * 2**30  # of address space that a run may add
ASYNCHRONOUS = "asynchronous OneExchange"
SUMS = {"sums": FeatureSums(validation=examples(7))}
SECURE = {"secure": SecureAggregation()}
LATE = SUMS | {"asynchrony": Asynchrony(), "round_deadline": 1e-9}
SGD = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
NOISY = {
    "sums": FeatureSums(auto_ridge=False, validation_share=0.0), "noise": NoisySums(4.0, delta=1e-3)
}  # fmt: skip
FEW = {"noise": NoisySums(4.0, delta=1e-3, client_examples=4)}
FOLDER = tempfile.TemporaryDirectory(prefix="fedntk-kept-")  # sums on the server's disk
KEPT = {"storage": KeptSums(FOLDER.name)}
CHANGES = {"changes": RowChanges(f"{FOLDER.name}/records")}
KEYS, SHUFFLING_KEY, SEALING = test_cp_ntk_fl.Parties(), new_key(), test_cp_ntk_fl.sealing
NTK = {"learning_rate": 0.1, "steps": [5, 20, 50], "run": test_cp_ntk_fl.RUN}


def validation_loss(arrays: ArrayRecord) -> float:
    """Loss of the network on the server's examples, or the norm of TCT's linear model."""
    weights, (x, y) = arrays_of(arrays), examples(7)
    if TCTModel.ARRAYS[0] in weights:
        return float(np.linalg.norm(weights[TCTModel.ARRAYS[0]]))
    return float(nn.functional.cross_entropy(loaded(weights)(x), y).detach())


JUDGED = {"screening": Screening("validation", validation_loss=validation_loss)}
TRIED = {"screening": Screening("leave-one-out")}
DEFENCES = {
    "SeededFedAvg": JUDGED, "SCAFFOLD": JUDGED, "Ditto": JUDGED, "TCT, stage 2": JUDGED,
    "FedProto": {"screening": Screening("geometric-median")},
    "NTKFL": TRIED, "CPNTKFL": TRIED, "NTKDFL, line, class prior, compressed": TRIED,
}  # fmt: skip


def centred(network: nn.Module, *data: Any, **options: Any) -> SGDClient:
    return SGDClient(CentredInputs(network, (4,)), *data, **options)


def shuffled(**options: Any) -> CPNTKFL:
    """Make a strategy with a shuffling server of its own, which gives out each round once."""
    server = ShufflingServer(test_cp_ntk_fl.ENROLLED, SHUFFLING_KEY)
    return CPNTKFL(shuffling_server=server, **NTK, **options)


class CountingExchange(OneExchange):
    """Solves nothing with more examples than clients may have."""

    def solve(self, total: Sums, *args: Any) -> Any:
        count = total.everyone.num_examples
        most = (self.noise and self.noise.client_examples) or self.max_examples
        assert count <= self.min_available_nodes * most, f"{count} examples"
        return super().solve(total, *args)


def one_exchange(**options: Any) -> Contract:
    strategy = partial(CountingExchange, network=network(), **options)
    return Contract(strategy, app(ClosedFormClient))


def counting(*data: Any, seed: tuple[int, int], **options: Any) -> ClosedFormClient:
    rows = CountedRows(f"{FOLDER.name}/rows-{seed[1]}")
    return ClosedFormClient(*data, seed=seed, rows=rows, **options)


def changing(**options: Any) -> Contract:
    return one_exchange(**CHANGES, **options)._replace(clients=app(counting))


def defended(name: str) -> Contract:
    case = CONTRACTS[name]
    return case._replace(strategy=partial(case.strategy, **DEFENCES[name]))


# what CONTRACTS lack: secure sums, with and without noise, sums in any order, those that are judged
# by what the model is without them, sealed parcels, trusted third parties, centred inputs
FEDERATIONS = CONTRACTS | {
    "secure OneExchange": one_exchange(**SUMS | SECURE),
    "secure TCT": Contract(
        partial(TCT, network=network(), num_features=12, **SUMS | SECURE),
        app(TCTClient, sgd=BootstrapSGD(learning_rate=0.1, batch_size=4)),
    ),
    ASYNCHRONOUS: one_exchange(**LATE),
    f"{ASYNCHRONOUS} that keeps sums": one_exchange(**LATE | KEPT),
    "OneExchange with noise": one_exchange(**NOISY),
    "OneExchange with noise for a client's examples": one_exchange(**NOISY | FEW),
    "secure OneExchange with noise": one_exchange(**NOISY | SECURE),
    "OneExchange with changes": changing(**SUMS),
    "secure OneExchange with changes": changing(**SUMS | SECURE),
    "OneExchange that judges sums": one_exchange(**SUMS | KEPT, ledger=Ledger(0.05)),
    "CPNTKFL with a key server": Contract(
        partial(CPNTKFL, key_server=KEYS.server, **NTK), KEYS.app
    ),
    "shuffled CPNTKFL": Contract(shuffled, app(SEALING, shuffling_key=public_bytes(SHUFFLING_KEY))),
    "centred SeededFedAvg": Contract(
        partial(SeededFedAvg, centre=CentreInputs()), app(centred, **SGD)
    ),
    **{f"{name} with a defence": defended(name) for name in DEFENCES},
    "FedEnsemble with a defence": Contract(
        partial(FedEnsemble, inner=partial(SeededFedAvg, **JUDGED), num_models=2),
        CONTRACTS["FedEnsemble"].clients,
    ),
    "sealed DFedAvg": Contract(
        partial(DFedAvg, topology=Topology("ring"), seal=True), app(DFedAvgClient, **SGD)
    ),
}
MODELS = {  # where it is not the usual network
    "CPNTKFL with a key server": test_cp_ntk_fl.small(),
    "centred SeededFedAvg": CentredInputs(network(), (4,)),
}
ACCIDENTS = ("TypeError", "KeyError", "AttributeError", "IndexError", "RuntimeError", "MemoryError")
COMPARED = {*get_args(Defence), "scale"}  # why a defence drops what it compares
ASIDE = {"query.partition"}  # asked while other replies are being read
RANDOM = {name for name in FEDERATIONS if re.match("secure|sealed|shuffled|.*key server", name)}
CACHES = test_tct.CACHE.name, test_fed_ensemble.CACHE.name, FOLDER.name  # of files that are kept

_answers: dict[tuple[Any, ...], Message] = {}  # what a client was sent in a run -> last answer


class LiarsGrid(Grid):
    """A grid on which some clients lie; replies (client, n) that are `lost` never come.

    `told` are the lies that were told, and `dropped` the replies that were dropped, with reasons.
    """

    patience = float("inf")  # a defence that bears more liars than there are clients is not refused

    def __init__(self, name: str, num_clients: int, lies: Iterable[Lie], lost: Iterable[Any]):
        lies = list(lies)
        liars = {k: partial(self._lie, k) for k in range(num_clients)}
        super().__init__(FEDERATIONS[name].clients, num_clients=num_clients, changes=liars)
        self.lies, self.lost, self.name = lies, set(lost), name
        self.told: list[Lie] = []
        self.dropped: dict[tuple[int, int], str] = {}
        self.earlier: Replies = []
        self.failed: list[str] = []  # of honest clients, why
        self._counts: dict[Any, Iterator[int]] = defaultdict(partial(itertools.count, 1))
        self._newest: dict[int, tuple[int, int]] = {}  # node -> its newest reply
        # node -> replies in its name that were not yet dropped
        self._impostors: dict[int, list[tuple[int, int]]] = defaultdict(list)
        # first pull that returns a reply, its place, its node's newest reply, and the reply itself
        self._inbox: list[tuple[int, float, dict[int, Any], Message]] = []
        self._pulls = 0
        self._heard: dict[int, Replies] = {node: [] for node in self.contexts}
        self._live = dict.fromkeys(self.contexts, 0)  # messages that real clients have answered

    def _answer(self, message: Message) -> Message:
        """Answer from memory if the client's answer to all that it was sent so far is known."""
        node = message.metadata.dst_node_id
        heard = self._heard[node]
        heard.append(own_copy(message))
        if self.name in RANDOM:
            return super()._answer(message)
        asked = (self.name, node, *map(digest, heard))
        if asked not in _answers:
            for earlier in heard[self._live[node] : -1]:
                super()._answer(earlier)
            self._live[node] = len(heard)
            if len(_answers) >= MOST_ANSWERS:
                _answers.clear()
            _answers[asked] = super()._answer(message)
        answer = _answers[asked]
        if answer.has_error():
            return Message(answer.error, reply_to=message)
        return Message(own_copy(answer).content, reply_to=message)

    def _lie(self, client: int, reply: Message) -> Replies:
        aside = reply.metadata.message_type in ASIDE
        key = client, (-1 if aside else 1) * next(self._counts[client, aside])
        if reply.has_error():
            self.failed += [reply.error.reason] * (client not in {lie.client for lie in self.lies})
        elif not aside:
            self.earlier.append(own_copy(reply))
        node, replies = reply.metadata.src_node_id, [reply]
        for lie in self.lies:
            if lie[:2] == key and not (reply.has_error() or key in self.lost):
                draw = np.random.default_rng(lie.seed)
                world = World([] if aside else self.earlier, partial(foreign_reply, self.name))
                copied = own_copy(reply)
                told = LIES[lie.how](draw, copied, world)
                replies = told if isinstance(told, list) else [told or copied]
                reply = replies[0]
                self.told.append(lie)
        if not aside:
            if (sender := reply.metadata.src_node_id) == node:
                self._newest[node] = key
            else:
                self._impostors[sender].append(key)
        if key in self.lost:
            ends = (*key, "other message") not in {lie[:3] for lie in self.lies}
            return [failed(reply)] if self.name.startswith(ASYNCHRONOUS) and ends else []
        return replies

    def note(self, node: int, reason: str) -> None:
        """Note that the newest reply of a node was dropped, or the newest in its name."""
        newest, impostors = self._newest.get(node), self._impostors[node]
        later = newest is not None and bool(impostors) and impostors[-1] > newest
        if impostors and (reason == "not-asked" or (reason == "duplicate" and later)):
            newest = impostors.pop()
        if newest:
            self.dropped[newest] = reason

    def send_and_receive(self, messages: Iterable[Message], **options: Any) -> Iterable[Message]:
        """Send in the order of the nodes: what was said earlier is then the same in each run."""
        messages = sorted(messages, key=lambda m: m.metadata.dst_node_id)
        self.changed_kinds = sorted({m.metadata.message_type for m in messages})
        return super().send_and_receive(messages, **options)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer messages; with sums in any order some answers come a round later."""
        messages = sorted(messages, key=lambda m: m.metadata.dst_node_id)
        for message in messages:
            node = message.metadata.dst_node_id
            replies = list(self.send_and_receive([message]))
            draw = np.random.default_rng([node, next(self._counts[node])])
            late = self.name.startswith(ASYNCHRONOUS) and int(draw.integers(2))
            of_node, place = {node: self._newest.get(node)}, draw.random()
            self._inbox += [(self._pulls + late, place, of_node, reply) for reply in replies]
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies whose time has come, in an order that is drawn."""
        ids = set(message_ids)
        came = [
            (place, of_node, reply)
            for due, place, of_node, reply in self._inbox
            if due <= self._pulls and reply.metadata.reply_to_message_id in ids
        ]
        came.sort(key=lambda one: one[0])
        replies = [reply for *_, reply in came]
        self._newest |= {node: key for _, of_node, _ in came for node, key in of_node.items()}
        self._inbox = [one for one in self._inbox if all(one[3] is not reply for reply in replies)]
        self._pulls += 1
        return replies


def digest(message: Message) -> bytes:
    """Return a short name of a message's contents."""
    parts = hashlib.sha256(message.metadata.message_type.encode())
    for name, record in message.content.items():
        parts.update(name.encode())
        for key, value in record.items():
            parts.update(value.data if isinstance(value, Array) else repr((key, value)).encode())
    return parts.digest()


def hear(grid: LiarsGrid, record: logging.LogRecord) -> None:
    """Hear from the log which nodes' replies were dropped, and why."""
    said, given = getattr(record, "given", (record.msg, record.args))  # if it was made printable
    if "node %d" in str(said) and isinstance(given, tuple):
        node, error = given
        grid.note(int(node), getattr(error, "reason", "other"))


def end_it(*_: Any) -> None:
    """End a run that takes too long."""
    raise TimeoutError("it took too long")


@contextmanager
def bounded(grid: LiarsGrid) -> Iterator[None]:
    """Listen to the log; bound the memory and seconds of a run."""
    logger, limits = logging.getLogger("flwr"), resource.getrlimit(resource.RLIMIT_AS)
    before = logger.handlers, logger.propagate
    handler = logging.Handler(logging.WARNING)
    handler.emit = partial(hear, grid)
    logger.handlers, logger.propagate = [handler], False
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, limits[1]))
    signal.signal(signal.SIGPROF, end_it)
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 1)  # again, if the first was taken for a client's
    begun = time.process_time()
    try:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", folder)
            numbers = itertools.count(1)
            patch.setattr("secrets.token_hex", lambda n: f"{next(numbers):0{2 * n}x}")
            patch.setattr("secrets.randbits", lambda n: 2**n // 3)  # the seed of noise
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        logger.handlers, logger.propagate = before
        for folder in itertools.chain.from_iterable(Path(cache).iterdir() for cache in CACHES):
            shutil.rmtree(folder)
    assert time.process_time() - begun < SECONDS, "it took too long"


def run(
    name: str, num_clients: int, lies: Iterable[Lie], lost: Iterable[Any] = (), rounds: int = ROUNDS
) -> tuple[LiarsGrid, dict[Any, Any]]:
    """Run a strategy; return the grid, and what must have the same bits."""
    strategy = FEDERATIONS[name].strategy(
        min_available_nodes=num_clients, fraction_train=1.0, fraction_evaluate=1.0, min_completed=1
    )
    grid, end = LiarsGrid(name, num_clients, lies, lost), ""
    with bounded(grid):
        try:
            arrays = start(strategy, grid, rounds, MODELS.get(name))
        except NoUsableReply:
            arrays, end = arrays_of(strategy.global_arrays), "no usable reply"
        storage = getattr(strategy, "storage", None)
        if storage is not None and len(storage.summed) > 1:
            left = result_of(lambda: strategy.without(storage.summed[:1], strategy.global_arrays))
            arrays |= {f"without {n}": a for n, a in arrays_of(left or ArrayRecord()).items()}
    measured = {
        (stage, number, metric): np.asarray(value)
        for stage in ("train", "evaluate")
        for number, of in getattr(strategy, f"{stage}_metrics").items()
        for metric, value in of.items()
        if "replies-" not in metric and "rejected" not in metric
    }
    for what, array in [*arrays.items(), *measured.items(), *strategy.state_dict().items()]:
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            assert np.isfinite(array).all(), f"{what} is not finite"
    return grid, {
        "end": end,
        **bits(arrays),
        **{f"state {n}": value for n, value in frozen(strategy, "public_keys", "sent").items()},
        **{n: value.tobytes() for n, value in measured.items()},
    }


@cache
def foreign_replies() -> dict[str, Replies]:
    """Return what three honest clients reply in a round of each strategy."""
    return {name: run(name, 3, [], rounds=1)[0].earlier for name in sorted(FEDERATIONS)}


def foreign_reply(name: str, draw: Draw) -> Message:
    """Draw a reply of another strategy's run, or of another run of this one."""
    library = foreign_replies()
    return pick(draw, library[name if draw.random() < 0.3 else pick(draw, library)])


def check(name: str, *, num_clients: int, lies: Sequence[Lie]) -> int:
    """Require what the module's docstring lists of a run; return the number of cases in it."""
    foreign_replies()  # before this run: no run begins within another
    grid, outcome = run(name, num_clients, lies)
    accidents = [reason for reason in grid.failed if reason.startswith(ACCIDENTS)]
    assert not accidents, f"an honest client failed: {accidents[0]}"
    loud = {lie[:2] for lie in grid.told if lie.how in LOUD}
    spare = {None, "duplicate", "not-asked"}  # why the second of two replies is dropped
    of_two = {lie[:2] for lie in grid.told if lie.how in TWO}
    second = {key for key in of_two if grid.dropped.get(key) in spare}
    compared = COMPARED if "with a defence" in name else ()
    lost = {key for key, why in grid.dropped.items() if why not in compared} - loud - second
    left = [lie for lie in grid.told if lie[:2] not in second & grid.dropped.keys()]
    if lost or left != grid.told:
        _, without = run(name, num_clients, left, lost)
        traces = [key for key in {**outcome, **without} if outcome.get(key) != without.get(key)]
        for _ in range(8 if traces and name.startswith("secure") else 0):
            _, again = run(name, num_clients, left, lost)
            traces = [key for key in traces if without.get(key) == again.get(key)]
        assert not traces, (
            f"dropped replies {sorted(grid.dropped.items())} left traces in {traces[:5]}: "
            f"{[(outcome.get(key), without.get(key)) for key in traces[:2]]!s:.400}"
        )
    return len({lie[:2] for lie in grid.told})


def draw_lies(draw: Draw, num_clients: int) -> list[Lie]:
    """One or two liars, who lie in most of their replies."""
    lies = []
    for client in draw.permutation(num_clients)[: draw.integers(1, 3)]:
        for reply in (-2, -1, *range(1, 40)):
            for how in draw.permutation(sorted(LIES))[: pick(draw, [0, 1, 1, 1, 2])]:
                lies.append(Lie(int(client), reply, str(how), int(draw.integers(2**31))))
    alone = {lie[:2] for lie in lies if lie.how in TWO | {"error"}}
    return [
        lie for lie, next_ in itertools.zip_longest(lies, lies[1:])
        if lie[:2] not in alone or next_ is None or next_[:2] != lie[:2]
    ]  # fmt: skip


def shrink(name: str, num_clients: int, lies: list[Lie]) -> tuple[list[Lie], str]:
    """Return the fewest lies of these that still break a rule, and how."""
    said, size = "", len(lies)
    while size:
        for at in range(0, len(lies), size):
            fewer = lies[:at] + lies[at + size :]
            try:
                check(name, num_clients=num_clients, lies=fewer)
            except Exception as error:
                lies, said = fewer, f"{type(error).__name__}: {error}"
                break
        else:
            size //= 2
        size = min(size, len(lies))
    return lies, said


def program_for(name: str, num_clients: int, lies: Sequence[Lie]) -> str:
    told = "".join(f"    {lie},\n" for lie in lies)
    call = f"check({name!r}, num_clients={num_clients}, lies=[\n{told}])\n"
    return f"from tests.fuzz import Lie, check\n\n{call}"


def fuzz(
    count: int, seed: int, names: Sequence[str] = (), most_failures: int = 20
) -> tuple[int, list[str]]:
    """Try so many cases, as many of each strategy; return their number, and programs that fail."""
    failures: list[str] = []
    cases = dict.fromkeys(names or sorted(FEDERATIONS), 0)
    numbers = itertools.count()
    bar = tqdm(total=count, unit=" replies", mininterval=10)
    while sum(cases.values()) < count and len(failures) < most_failures:
        name = min(cases, key=cases.__getitem__)
        draw = np.random.default_rng([seed, next(numbers)])
        num_clients = int(draw.choice([3, 3, 4, 6]))  # with few of them no majority hides a fault
        lies = draw_lies(draw, num_clients)
        try:
            cases[name] += check(name, num_clients=num_clients, lies=lies)
        except Exception as error:
            cases[name] += 1
            fewest, said = shrink(name, num_clients, lies)
            said = said or f"not again: {type(error).__name__}: {error}"
            failures.append(f"# {said}\n{program_for(name, num_clients, fewest)}")
            bar.write(failures[-1])
            bar.set_postfix(failures=len(failures))
        bar.update(sum(cases.values()) - bar.n)
    bar.close()
    return sum(cases.values()), failures


def main() -> None:
    """Fuzz from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=2_000)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("names", nargs="*", help="strategies, as FEDERATIONS has them")
    arguments = parser.parse_args()
    begun = time.process_time()
    cases, failures = fuzz(arguments.count, arguments.seed, arguments.names)
    seconds = time.process_time() - begun
    print(f"{cases} replies, {len(failures)} failures, {seconds:.0f} s of the processor")  # noqa: T201
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
