"""TCT's sums under secure aggregation: the same model, and no client's sums by themselves."""

import functools
import tempfile
from collections.abc import Callable, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, Context

from fedntk.clients import NamedArrays, TCTClient, client_app
from fedntk.ntk import BadReply, FeatureMap
from fedntk.ntk.features import FixedPoint
from fedntk.ntk.payloads import ConvexTask, FeatureStatistics
from fedntk.strategies import TCT, NoUsableReply
from fedntk.trust import KeyServer, ParcelKeys, new_key, public_bytes

from .federation import Grid, app, bits, examples, lost, network, start, start_in_vain
from .test_tct_statistics import LINEAR, held
from .test_tct_statistics import make as make_statistics

STEPS = ("public-key", "shares", "masked", "confirm", "reveal")


def make(clients: int = 6, **options: Any) -> TCT:
    own = {"bits": 8, "validation": held(), "secure_aggregation": True}
    return make_statistics(clients, **own | options)


def step_of(config: Mapping[str, Any]) -> str:
    task = ConvexTask.of_message(config)
    return "" if task is None else task.step


def failing_at(step: str, *partitions: int, only_round: int = 0) -> type[TCTClient]:
    """Clients of which some are gone when it comes to a step."""

    class Failing(TCTClient):
        def fit(self, parameters, config):
            if (
                self.seed[-1] in partitions
                and step_of(config) == step
                and only_round in (0, config["server-round"])
            ):
                raise ConnectionError("this client is gone")
            return super().fit(parameters, config)

    return Failing


class Recording(Grid):
    """A grid that keeps what clients replied, by step."""

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for step in {step_of(m.content["config"]) for m in messages if "config" in m.content}:
            self.__dict__.setdefault("replies", {})[step] = replies
        return replies


@pytest.fixture
def clients(tmp_path: Path) -> Callable[..., Any]:
    def made(kind: type[TCTClient] = TCTClient, **options: Any) -> Any:
        return app(kind, cache=tmp_path, **options)

    return made


@functools.cache
def without(*partitions: int) -> dict[str, bytes]:
    """The model of plain sums of the others."""
    with tempfile.TemporaryDirectory() as cache:
        grid = Grid(app(TCTClient, cache=cache), changes=dict.fromkeys(partitions, lost))
        return bits(start(make(secure_aggregation=False), grid))


# --------------------------------------------------------------------- the sum


def test_the_model_is_that_of_plain_sums_to_the_bit(clients):
    strategy, grid = make(), Grid(clients())
    assert bits(start(strategy, grid)) == without()
    assert [kind for kind, _ in grid.exchanges if kind == "train"] == ["train"] * len(STEPS)
    assert strategy.train_metrics[1]["replies-accepted"] == 6


@pytest.mark.parametrize("step", STEPS)
def test_clients_that_drop_out_leave_the_sum_of_the_others(clients, step):
    """Before the words, what it had masked for is taken away again; after them it is in the sum."""
    strategy = make()
    found = start(strategy, Grid(clients(failing_at(step, 1, 4))))
    gone = () if step in ("confirm", "reveal") else (1, 4)
    assert bits(found) == without(*gone)
    assert strategy.train_metrics[1]["replies-accepted"] == 6 - len(gone)
    assert strategy.train_metrics[1]["replies-rejected"] == 2


@pytest.mark.parametrize("step", ["masked", "reveal"])
def test_with_too_few_left_the_sum_stays_closed_and_the_next_round_begins_anew(
    clients, step, caplog
):
    strategy = make(secure_threshold=0.8)  # five of six
    with caplog.at_level(WARNING, "flwr"):
        found = start(strategy, Grid(clients(failing_at(step, 1, 4, only_round=1))), rounds=2)
    assert bits(found) == without()
    assert "no secure sum" in caplog.text
    assert "ridge" not in strategy.train_metrics[1]
    assert "ridge" in strategy.train_metrics[2]


def test_a_sum_of_fewer_than_are_needed_for_the_model_is_not_opened(clients):
    strategy, grid = make(min_completed=6), Recording(clients(failing_at(STEPS[2], 1)))
    found = start(strategy, grid)
    assert not found[LINEAR].any()
    assert "confirm" not in grid.replies
    assert strategy.train_metrics[1]["replies-accepted"] == 5


def test_a_run_that_is_cut_off_goes_on_with_a_sum_anew(clients, tmp_path):
    """After a round in which the sum stayed closed; with the settings that it had."""
    folder = tmp_path / "checkpoint"
    initial = ArrayRecord(dict(network().state_dict()))
    options = {"secure_threshold": 0.8}
    failing = Grid(clients(failing_at("reveal", 1, 4)))
    with pytest.raises(NoUsableReply):
        make(**options).start(failing, initial, num_rounds=1, checkpoint=folder)
    strategy, whole = make(**options), Grid(clients())
    result = strategy.start(whole, initial, num_rounds=2, checkpoint=folder)
    assert bits({name: a.numpy() for name, a in result.arrays.items()}) == without()
    assert strategy.phase is None
    with pytest.raises(ValueError, match="secure_threshold"):
        make().start(whole, initial, num_rounds=3, checkpoint=folder)


def masked_words(grid: Recording) -> dict[int, np.ndarray]:
    return {
        int(r.content["metrics"]["partition-id"]): r.content["arrays"]["masked"].numpy()
        for r in grid.replies["masked"]
    }


def sums_of(partition: int) -> tuple[FeatureStatistics, FixedPoint]:
    extract = FeatureMap(num_features=12).extractor(network())
    fixed, (x, y) = FixedPoint.of(extract(held()[0]), 8), examples(partition)
    return FeatureStatistics.of([extract(x)], y, 3, fixed_point=fixed), fixed


def test_the_server_gets_no_clients_sums(clients):
    """Of each client's own numbers none is where it would be in the clear; masks are new ones."""
    first, second = Recording(clients()), Recording(clients())
    start(make(), first)
    start(make(), second)
    masked, again = masked_words(first), masked_words(second)
    own = {k: sums_of(k)[0].to_words(np.uint32) for k in masked}
    for k, words in masked.items():
        assert words.shape == own[k].shape == (12 * 13 // 2 + 3 * 13,)
        assert not (words == own[k]).any()
        assert not (words == again[k]).any()
    assert {*first.replies} >= {*STEPS}
    added, total = (np.sum([*w.values()], axis=0, dtype=np.uint32) for w in (masked, own))
    assert not (added == total).any()  # nor is the sum open without the shares


def test_sums_that_no_examples_have_are_refused_in_wide_words():
    """Beyond int32, in which sums over so few examples fit."""
    own, fixed = sums_of(0)
    words = own.to_words(np.uint64)
    found = FeatureStatistics.from_words(words, own.num_examples, 12, 3, fixed)
    np.testing.assert_array_equal(found.gram, own.gram)
    words[1] += np.uint64(2**32)  # is no other number in int32
    with pytest.raises(BadReply, match="do not fit in int32"):
        FeatureStatistics.from_words(words, own.num_examples, 12, 3, fixed)


# ------------------------------------------------------- what others may try


def test_a_client_masks_and_gives_shares_once_and_keeps_its_secrets_to_itself(tmp_path):
    """With another set of survivors a server would learn both of somebody's secrets."""
    asked, modes = [], set()

    class Twice(TCTClient):
        def fit(self, parameters, config):
            modes.update(path.stat().st_mode & 0o777 for path in tmp_path.glob("*/sum-*"))
            first = super().fit(parameters, config)
            if step_of(config) in ("masked", "reveal"):
                with pytest.raises(ValueError, match=r"already|given its shares before"):
                    super().fit(parameters, config)
                asked.append(step_of(config))
            return first

    start(make(), Grid(app(Twice, cache=tmp_path)))
    assert asked == ["masked"] * 6 + ["reveal"] * 6
    assert modes == {0o600}
    assert not list(tmp_path.glob("*/sum-*"))  # no secrets are left
    assert not list(tmp_path.glob("*/*.npy"))  # nor features


def damaged(step: str, change: Callable[[list[np.ndarray]], list[np.ndarray]]) -> type[TCTClient]:
    class Hostile(TCTClient):
        def fit(self, parameters, config):
            arrays, n, metrics = super().fit(parameters, config)
            if self.seed[-1] == 2 and step_of(config) == step:
                changed = change([np.array(a) for a in arrays])
                names = [*arrays.records["arrays"], "more", "and more"]
                return NamedArrays({"arrays": dict(zip(names, changed, strict=False))}), n, metrics
            return arrays, n, metrics

    return Hostile


@pytest.mark.parametrize(
    ("step", "change", "gone"),
    [
        ("public-key", lambda arrays: [arrays[0][:31]], (2,)),
        ("public-key", lambda arrays: [arrays[0] * 0, arrays[1]], (2,)),  # of low order
        ("shares", lambda arrays: [arrays[0], arrays[1][:-1]], (2,)),
        ("shares", lambda arrays: [arrays[0].astype(np.int64), arrays[1]], (2,)),
        ("masked", lambda arrays: [arrays[0][:-1]], (2,)),
        ("masked", lambda arrays: [arrays[0].astype(np.uint64)], (2,)),
        # its words are in the sum, which the other five open
        ("confirm", lambda arrays: [arrays[0][:-1]], ()),
        ("confirm", lambda arrays: [arrays[0] * 0], ()),
        ("reveal", lambda arrays: [arrays[0], arrays[1][:, ::-1].copy()], ()),
        ("reveal", lambda arrays: [arrays[0][::-1].copy(), arrays[1]], ()),
        ("reveal", lambda arrays: [arrays[0], np.tile(arrays[1], 3)], ()),
    ],
)
def test_what_a_client_sends_wrongly_leaves_it_out_or_does_no_harm(clients, step, change, gone):
    strategy = make()
    found = start(strategy, Grid(clients(damaged(step, change))))
    assert bits(found) == without(*gone)
    assert strategy.train_metrics[1]["replies-accepted"] == 6 - len(gone)


@pytest.mark.parametrize(
    ("step", "change", "words"),
    [
        ("shares", lambda a: [a[0][::-1].copy(), a[1]], "not of what it promised"),
        ("shares", lambda a: [a[0], a[1] * 0], "no secure sum"),  # no other client can open it
        ("masked", lambda a: [a[0] + np.uint32(2**30)], "no secure sum"),
    ],
)
def test_a_client_that_breaks_the_protocol_leaves_the_model_and_is_no_end(
    clients, step, change, words, caplog
):
    with caplog.at_level(WARNING, "flwr"):
        found = start_in_vain(make(), Grid(clients(damaged(step, change))))
    assert words in caplog.text
    assert not found[LINEAR].any()


def test_another_number_of_examples_with_the_words_leaves_the_client_out(clients):
    class More(TCTClient):
        def fit(self, parameters, config):
            arrays, n, metrics = super().fit(parameters, config)
            return arrays, n + (self.seed[-1] == 2 and step_of(config) == STEPS[2]), metrics

    assert bits(start(make(), Grid(clients(More)))) == without(2)


class Lying(Grid):
    """A server that tells one client something else than the others."""

    def __init__(self, *args: Any, record: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.record, self.lies = record, 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for message in messages[1:2]:
            if step_of(message.content.get("config", {})) == "masked":
                own = message.content[self.record]
                name, array = next(iter(own.items()))
                changed = Array(array.numpy() * np.float32(0.5))
                message.content[self.record] = ArrayRecord({**own, name: changed})
                self.lies += 1
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize("record", ["network", "steps"])
def test_a_client_that_was_asked_about_other_features_keeps_the_sum_closed(clients, record, caplog):
    """Else a server could have all others add zeros to one client's sums."""
    grid = Lying(clients(), record=record)
    with caplog.at_level(WARNING, "flwr"):
        found = start_in_vain(make(), grid)
    assert grid.lies == 1
    assert "no secure sum" in caplog.text
    assert not found[LINEAR].any()


def test_a_copied_public_key_leaves_out_those_who_sent_it(tmp_path):
    """And not all others with them."""
    shared = ParcelKeys(new_key())

    def client_fn(context: Context) -> TCTClient:
        k = int(context.node_config["partition-id"])
        own = shared if k in (1, 4) else None
        return TCTClient(network(), *examples(k), seed=(0, k), cache=tmp_path, parcel_keys=own)

    strategy = make()
    found = start(strategy, Grid(client_app(client_fn)))
    assert bits(found) == without(1, 4)
    assert strategy.train_metrics[1]["rejected-public-key"] == 2


# ------------------------------------------------------------------------ keys


def vouched(tmp_path: Path, keys: dict[int, Any], server: KeyServer) -> Any:
    """Clients with key pairs of their own, who trust those that the key server vouches for."""

    def client_fn(context: Context) -> TCTClient:
        k = int(context.node_config["partition-id"])
        own = ParcelKeys(keys[k], "a run", server.verify_key)
        return TCTClient(network(), *examples(k), seed=(0, k), cache=tmp_path, parcel_keys=own)

    return client_app(client_fn)


def test_vouched_keys_give_the_same_sum_and_one_of_the_servers_own_none(tmp_path, clients, caplog):
    keys = {k: new_key() for k in range(6)}
    enrolled = [public_bytes(key) for key in keys.values()]
    server = KeyServer(bytes(32), enrolled, Ed25519PrivateKey.generate())
    federation = vouched(tmp_path, keys, server)
    found = start(make(vouching=server, run="a run"), Grid(federation))
    assert bits(found) == without()

    class Lying:
        """Has a key of its own passed off as a client's, with that client's voucher."""

        def voucher(self, public_key: bytes, run: str) -> bytes:
            return server.voucher(public_key, "another run")

    with caplog.at_level(WARNING, "flwr"):
        start_in_vain(make(vouching=Lying(), run="a run"), Grid(federation))
    assert "voucher" in caplog.text


def test_a_client_that_masks_alone_refuses_what_is_not_masked(clients):
    app_ = clients(only_masked=True)
    assert bits(start(make(), Grid(app_))) == without()
    plain = {"secure_aggregation": False, "validation": None, "bits": 32}
    for options in (
        {},
        {"solve": "server"},
        {"solve": "clients"},
        {"solve": "clients", "normalise": False},
    ):
        assert not start_in_vain(make(**plain | options), Grid(app_))[LINEAR].any()


@pytest.mark.parametrize("held_out", [False, True])
def test_a_client_that_masks_alone_evaluates_no_linear_model_on_what_its_sums_are_of(
    clients, held_out, caplog
):
    """Losses of chosen models on the same examples would give its Gram matrix exactly."""
    x, y = examples(7)
    own = {"x_test": x, "y_test": y} if held_out else {}
    strategy = make(fraction_evaluate=1.0)
    with caplog.at_level(WARNING, "flwr"):
        start(strategy, Grid(clients(only_masked=True, **own)))
    assert ("accuracy" in strategy.evaluate_metrics.get(1, {})) == held_out
    assert ("losses of linear models on its training examples" in caplog.text) != held_out


def test_two_clients_are_too_few(clients, caplog):
    with caplog.at_level(WARNING, "flwr"):
        start_in_vain(make(2), Grid(clients(), num_clients=2))
    assert "at least 3 clients of a secure sum, got 2" in caplog.text
