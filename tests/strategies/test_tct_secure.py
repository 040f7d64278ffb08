"""TCT's sums under secure aggregation: the same model, and no client's sums by themselves."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord

from fedntk.clients import MaskedSums, NamedArrays, TCTClient
from fedntk.ntk import FeatureMap
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.options import read_task
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.strategies import SecureAggregation
from fedntk.trust import KeyServer, ParcelKeys, new_key, public_bytes

from .federation import Grid, app, bits, examples, lost, network, owned, start, start_in_vain
from .tct_problem import FIXED, LINEAR, held, served, sums
from .tct_problem import make as local

STEPS = ("public-key", "shares", "masked", "confirm", "reveal")


def make(clients=6, **options):
    return sums(clients, **{"secure": SecureAggregation()} | FIXED | options)


def step_of(config):
    return getattr(read_task(ConvexTask, config), "step", None)


def acting(step, change, *partitions, only_round=0):
    """Clients, some of which answer otherwise in one step."""

    class Acting(TCTClient):
        def fit(self, parameters, config):
            own = super().fit(parameters, config)
            now = step_of(config) == step and only_round in (0, config["server-round"])
            return change(*own) if now and self.seed[-1] in partitions else own

    return Acting


def gone(*_):
    raise ConnectionError("this client is gone")


@pytest.fixture
def clients(tmp_path):
    return functools.partial(served, tmp_path)


@functools.cache
def without(*partitions):
    with tempfile.TemporaryDirectory() as cache:
        grid = Grid(served(Path(cache)), changes=dict.fromkeys(partitions, lost))
        return bits(start(make(secure=None), grid))


@pytest.mark.parametrize("step", ["", *STEPS])
def test_the_model_is_that_of_plain_sums_of_those_who_stayed_to_the_bit(clients, step):
    strategy, grid = make(), Grid(clients(acting(step, gone, 1, 4)))
    left = () if step in ("", "confirm", "reveal") else (1, 4)
    assert bits(start(strategy, grid)) == without(*left)
    metrics = strategy.train_metrics[1]
    assert metrics["replies-accepted"] == 6 - len(left)
    assert metrics["replies-rejected"] == (2 if step else 0)


@pytest.mark.parametrize("step", ["masked", "reveal"])
def test_with_too_few_left_the_sum_stays_closed_and_the_next_round_begins_anew(clients, step):
    strategy = make(secure=SecureAggregation(threshold=0.8))  # five of six
    found = start(strategy, Grid(clients(acting(step, gone, 1, 4, only_round=1))), rounds=2)
    assert bits(found) == without()
    assert "ridge" not in strategy.train_metrics[1]


def test_a_sum_of_fewer_than_are_needed_for_the_model_is_not_opened(clients):
    strategy, grid = make(min_completed=6), Grid(clients(acting("masked", gone, 1)))
    assert not start(strategy, grid)[LINEAR].any()
    assert [kind for kind, _ in grid.exchanges].count("train") == 5  # the words; then it is void
    two = {0: lost}  # three are the fewest
    start_in_vain(make(3), Grid(clients(), num_clients=3, changes=two))


def test_the_server_gets_no_clients_sums(clients, tmp_path):
    """No word of a client's own is where it would be in the clear; masks are new in each run."""
    extract = FeatureMap(num_features=12).extractor(network())
    fixed = FixedPoint.of(extract(held()[0]), 8)
    grids = [Grid(clients()), Grid(clients())]
    for grid in grids:
        start(make(), grid)
    masked, again = map(masked_words, grids)
    words = {}
    for k, (x, y) in enumerate(map(examples, range(6))):
        own = FeatureStatistics.of([extract(x)], y, 3, fixed_point=fixed)
        words[k] = own.to_words(np.uint32)
        assert not (masked[k] == words[k]).any()
        assert not (masked[k] == again[k]).any()
    added, total = (np.sum([*w.values()], axis=0, dtype=np.uint32) for w in (masked, words))
    assert not (added == total).any()  # nor is the sum open without the shares
    assert not list(tmp_path.glob("*/*.npy"))  # clients keep no features either


def masked_words(grid):
    contents = [m.content for way, m in grid.seen if way == "up"]
    return {
        int(content["metrics"]["partition-id"]): content["arrays"]["masked"].numpy()
        for content in contents
        if "masked" in content["arrays"]
    }


@pytest.mark.parametrize(
    ("step", "change", "left"),
    [
        ("public-key", lambda a: [a[0][:31]], (2,)),
        ("public-key", lambda a: [a[0] * 0, a[1]], (2,)),  # of low order
        ("shares", lambda a: [a[0], a[1][:-1]], (2,)),
        ("masked", lambda a: [a[0][:-1]], (2,)),
        ("masked", None, (2,)),  # another number of examples
        # its words are in the sum, which the other five open
        ("confirm", lambda a: [a[0][:-1]], ()),
        ("confirm", lambda a: [a[0] * 0], ()),
        ("reveal", lambda a: [a[0], a[1][:, ::-1].copy()], ()),
        ("reveal", lambda a: [a[0][::-1].copy(), a[1]], ()),
        # it breaks the protocol: the sum stays closed
        ("shares", lambda a: [a[0][::-1].copy(), a[1]], range(6)),
        ("shares", lambda a: [a[0], a[1] * 0], range(6)),
        ("masked", lambda a: [a[0] + np.uint32(2**30)], range(6)),
    ],
)
def test_what_a_client_sends_wrongly_leaves_it_out_or_does_no_harm(clients, step, change, left):
    def changed(arrays, count, metrics):
        if change is None:
            return arrays, count + 1, metrics
        own = zip(arrays.records["arrays"], change(list(arrays)), strict=False)
        return NamedArrays({"arrays": dict(own)}), count, metrics

    strategy, grid = make(min_completed=1), Grid(clients(acting(step, changed, 2)))
    if len(left) == 6:
        assert not start_in_vain(strategy, grid)[LINEAR].any()
    else:
        assert bits(start(strategy, grid)) == without(*left)
    assert strategy.train_metrics[1]["replies-accepted"] == 6 - len(left)


def test_givers_of_false_shares_are_named_and_the_sum_opens(clients):
    """Two of six who agree on shares of other secrets; four are the threshold."""

    def false(arrays, count, metrics):
        own = dict(arrays.records["arrays"])
        return NamedArrays({"arrays": own | {"shares": own["shares"] * 0}}), count, metrics

    strategy = make()
    assert bits(start(strategy, Grid(clients(acting("reveal", false, 0, 3))))) == without()
    metrics = strategy.train_metrics[1]
    assert metrics["replies-accepted"] == 6
    assert metrics["rejected-false-shares"] == 2
    assert "false-shares: of clients [0, 1, 2, 3, 4, 5], or" in strategy.channel.last_refusal


@pytest.mark.parametrize("record", ["network", "steps"])
def test_a_client_that_was_asked_about_other_features_keeps_the_sum_closed(clients, record):
    """Else a server could have all others add zeros to one client's sums."""
    lies = []

    def lie(messages):
        for content in [message.content for message in messages[1:2]]:
            if step_of(content.get("config", {})) == "masked":
                name, array = next(iter(content[record].items()))
                changed = Array(array.numpy() * np.float32(0.5))
                content[record] = ArrayRecord({**content[record], name: changed})
                lies.append(name)

    found = start_in_vain(make(), Grid(clients(), on_send=lie))
    assert len(lies) == 1
    assert not found[LINEAR].any()


def with_keys(cache, keys):
    """Clients, some of which have key pairs that are not drawn for the run."""
    make = functools.partial(TCTClient, cache=cache)
    return app(
        lambda *of, seed: make(
            *of, seed=seed, secure=MaskedSums(cache=cache, parcel_keys=keys.get(seed[1]))
        )
    )


def test_a_copied_public_key_leaves_out_those_who_sent_it(tmp_path):
    shared = with_keys(tmp_path, dict.fromkeys((1, 4), ParcelKeys(new_key())))
    assert bits(start(make(), Grid(shared))) == without(1, 4)


def test_vouched_keys_give_the_same_sum_and_one_of_the_servers_own_none(tmp_path):
    keys = [new_key() for _ in range(6)]
    server = KeyServer(bytes(32), list(map(public_bytes, keys)), Ed25519PrivateKey.generate())
    own = {k: ParcelKeys(key, "a run", server.verify_key) for k, key in enumerate(keys)}
    federation = with_keys(tmp_path, own)
    assert (
        bits(start(make(secure=SecureAggregation(vouching=server), run="a run"), Grid(federation)))
        == without()
    )

    class Lying:
        """Has a key of its own passed off as a client's, with that client's voucher."""

        def voucher(self, public_key, run):
            return server.voucher(public_key, "another run")

    start_in_vain(make(secure=SecureAggregation(vouching=Lying()), run="a run"), Grid(federation))


def test_a_client_gives_one_sum_of_its_data_and_insists_on_enough_clients(tmp_path):
    """Another network is no other data: the features of two may hardly differ."""

    def owners(**limits):
        def made(*of, seed, **options):
            return TCTClient(
                *of,
                seed=seed,
                secure=MaskedSums(cache=tmp_path, privacy=owned(tmp_path, seed[1], **limits)),
                **options,
            )

        return served(tmp_path, made)

    few = make()
    start_in_vain(few, Grid(owners(fewest_clients=5)))
    assert (
        "opens only with 5 clients or more, got one that opens with 4 of 6"
        in few.channel.last_refusal
    )
    few_bits = make()
    start_in_vain(few_bits, Grid(owners(most_bits=7)))
    assert (
        "most_bits: this client's owner allows 7, and the server asks"
        in few_bits.channel.last_refusal
    )
    start(make(), Grid(owners()))
    again = make(num_features=11)
    start_in_vain(again, Grid(owners()))
    assert "only its owner can allow" in again.channel.last_refusal


def test_a_client_that_only_masks_refuses_what_is_not_masked(clients):
    app = clients(secure=MaskedSums(only_masked=True, allow_repeats=True))
    assert bits(start(make(), Grid(app))) == without()
    for strategy in (sums(), local(), local(normalise=False)):
        assert not start_in_vain(strategy, Grid(app))[LINEAR].any()


@pytest.mark.parametrize("held_out", [False, True])
def test_a_client_that_only_masks_evaluates_no_linear_model_on_what_its_sums_are_of(
    clients, held_out
):
    """Losses of chosen models on the same examples would give its Gram matrix exactly."""
    x, y = examples(7)
    own = {"x_test": x, "y_test": y} if held_out else {}
    strategy = make(fraction_evaluate=1.0)
    start(strategy, Grid(clients(secure=MaskedSums(only_masked=True, allow_repeats=True), **own)))
    assert ("accuracy" in strategy.evaluate_metrics.get(1, {})) == held_out
