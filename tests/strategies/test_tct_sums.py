"""TCT by sums: the pooled solution for every split, without clients, and under masks."""

import functools
import tempfile
from logging import WARNING
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord
from torch import nn

from fedntk.clients import MaskedSums, NamedArrays, TCTClient
from fedntk.clients.core.disk_store import example_digests
from fedntk.ntk import FeatureMap, NotEnoughMemory, one_hot
from fedntk.ntk.convex.pooled_statistics import class_weights
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.options import read_task
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.split_statistics import draw_held_out
from fedntk.strategies import KeptSums, NoUsableReply, Sampling, SecureAggregation, SeededFedAvg
from fedntk.trust import KeyServer, ParcelKeys, new_key, public_bytes

from ..conftest import refused
from .federation import (
    Grid,
    app,
    arrays_of,
    as_record,
    bits,
    examples,
    loaded,
    lost,
    network,
    owned,
    run_as_if_lost,
    start,
    start_in_vain,
    with_arrays,
    with_metrics,
)
from .test_tct import FIXED, LINEAR, distance, errors, held, make, pooled, served, solved, sums

SHARE = {"auto_ridge": True, "validation_share": 0.25}  # two parts of sums


@pytest.fixture
def clients(tmp_path):
    """The clients' app, which is called for one with other clients or options."""
    app = served(tmp_path)
    app.others = functools.partial(served, tmp_path)
    return app


@pytest.mark.parametrize(
    ("options", "tolerance"), [({}, 1e-5), ({"bias": False}, 1e-5), ({"normalise": False}, 1e-4)]
)
def test_the_sums_give_the_solution_of_the_pooled_rows(clients, options, tolerance):
    """Features and normaliser are float32: some 1e-6."""
    grid, strategy = Grid(clients), sums(**options)
    after = start(strategy, grid, rounds=2)
    assert distance(after[LINEAR], solved(**options)) < tolerance
    assert strategy.normalise or (after["tct.scale"] == 1).all()
    assert [kind for kind, _ in grid.exchanges].count("train") == 1  # then it is solved
    assert (strategy.train_metrics[1]["ridge"], strategy.stage) == (1e-2, "solved")


def regrouped(groups, cache):
    """Clients that have several of the six clients' examples each, in other orders."""

    def client(model, *_, seed):
        x, y = pooled(groups[seed[1]])
        return TCTClient(model, x.flip(0), y.flip(0), seed=seed, cache=cache)

    return app(client)


def test_every_split_gives_the_same_bits_with_fixed_point_numbers(clients, tmp_path):
    """Whole numbers add up to the same in any order; the steps are of the server's examples."""
    expected = start(sums(**FIXED), Grid(clients))
    assert distance(expected[LINEAR], solved()) < 0.05  # of 8 bits
    for i, groups in enumerate(([[0, 5], [3], [4, 1, 2]], [[2, 0, 1, 4, 3, 5]])):
        split, number = regrouped(groups, tmp_path / str(i)), len(groups)
        strategy = sums(number, min_train_nodes=1, **FIXED)
        assert bits(start(strategy, Grid(split, num_clients=number))) == bits(expected)


def test_balanced_classes_take_one_exchange_of_counts_before(clients):
    strategy, (_, y) = sums(balanced=True), pooled()
    weights = class_weights(np.bincount(y, minlength=3))
    assert len(set(weights)) > 1
    for _ in range(2):
        after = start(strategy, grid := Grid(clients), rounds=4)
        assert strategy.class_weights.tolist() == weights.tolist()
        assert distance(after[LINEAR], solved(weights=torch.from_numpy(weights)[y])) < 1e-5
        assert [kind for kind, _ in grid.exchanges].count("train") == 2


def test_the_ridge_is_chosen_on_the_servers_examples(clients):
    strategy = sums(auto_ridge=True, validation=held())
    after = start(strategy, Grid(clients))
    error = errors(pooled(), held(), torch.ones(3).double())
    best = min(error, key=error.__getitem__)
    assert strategy.train_metrics[1]["ridge"] == best
    assert distance(after[LINEAR], solved(best)) < 1e-4


def drawn(partition):
    """A client's examples in the order in which it sorts them, and which of them it holds out."""
    x, y = examples(partition)
    order = torch.from_numpy(np.lexsort(example_digests(x, one_hot(y, 3)).T))
    return x[order], y[order], draw_held_out(y[order], 0.25, [0, partition, *b"held-out"])


@pytest.mark.parametrize("options", [{}, {"balanced": True}])
def test_the_ridge_is_chosen_on_what_clients_hold_out(clients, options):
    x, y, out = map(torch.cat, zip(*map(drawn, range(6)), strict=True))
    of_class = torch.ones(3).double()
    if "balanced" in options:
        of_class = torch.from_numpy(class_weights(np.bincount(y, minlength=3)))
    error = errors((x[~out], y[~out]), (x[out], y[out]), of_class)
    strategy = sums(**SHARE, **options)
    after = start(strategy, Grid(clients), rounds=2)
    ridge = strategy.train_metrics[1 + strategy.balanced]["ridge"]
    assert error[ridge] == min(error.values())
    expected = solved(ridge, weights=of_class[pooled()[1]])
    assert distance(after[LINEAR], expected) < 1e-5


def test_a_ridge_too_small_is_raised_tenfold_and_said_so(clients, caplog):
    strategy = sums(ridge=1e-30, num_features=0)
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, Grid(clients))
    said = [message for message in caplog.messages if "is too small for these features" in message]
    assert strategy.train_metrics[1]["ridge"] == pytest.approx(1e-30 * 10 ** len(said), rel=1e-9)
    assert np.isfinite(after[LINEAR]).all()


def scaled(name, by, more=0):
    return with_arrays(lambda arrays: arrays | {name: by * arrays[name] + more})


LARGE = [scaled("gram", 1e6), scaled("class-sums", 1e3)]  # features 1,000 as large


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({}, scaled("gram", -1), "range"),
        ({}, scaled("class-sums", 1e3, 1e6), "range"),
        ({}, with_metrics(num_examples=500), "num-examples"),
        ({}, lambda reply: LARGE[0](LARGE[1](reply)), "scale"),
        ({"balanced": True}, scaled("counts", 1, 1), "num-examples"),
        (SHARE, scaled("held-out-class-sums", 1e3, 1e6), "range"),
    ],
)
def test_sums_that_could_not_be_are_dropped_whole(clients, options, change, reason):
    attacked, without = run_as_if_lost(lambda: sums(**options), clients, change, reason)
    assert attacked.class_weights.tolist() == without.class_weights.tolist()


def test_a_network_that_diverged_leaves_the_model(clients):
    """On the server, which computes features of its own for fixed-point numbers, and on clients."""
    broken = network()
    nn.init.constant_(broken[0].weight, torch.nan)
    for options in (FIXED, FIXED | {"secure": SecureAggregation()}, {}):
        with pytest.raises(NoUsableReply):
            start(sums(**options), Grid(clients), 1, broken)


def started(strategy, grid, rounds=2, *args, **options):
    return as_record(start(strategy, grid, rounds, *args, **options))


def never_had(clients, grid, rounds=2, model=None, **options):
    """Bits of a run without some clients."""
    strategy = sums(sampling=Sampling(held_out=clients), **options)
    return bits(start(strategy, grid, rounds, model))


def raw(arrays):
    return bits(arrays_of(arrays))


@pytest.mark.parametrize("options", [{"bias": False}, {"auto_ridge": True, "validation": held()},
                                     SHARE | FIXED])  # fmt: skip
def test_it_is_to_the_bit_the_model_of_a_run_that_never_had_them(clients, tmp_path, options):
    """Float64 adds up in the order of the clients, whatever that of nodes and replies."""
    strategy = sums(storage=KeptSums(tmp_path / "sums"), **options)
    arrays = started(strategy, Grid(clients, node_ids=[90, 12, 55, 7, 31, 68], order=1))
    left = strategy.without([5, 0], arrays)
    assert raw(left) == never_had([5, 0], Grid(clients), **options)
    assert raw(left)[LINEAR] != raw(arrays)[LINEAR]
    assert raw(strategy.without([], left)) == raw(arrays)


def test_a_client_whose_reply_never_came_is_not_in_the_model(clients, tmp_path):
    strategy = sums(storage=KeptSums(tmp_path / "sums"), **FIXED)
    arrays = started(strategy, Grid(clients, changes={2: lost}))
    refused(r"clients: expected some of .* 0, 1, 3, 4, 5, got 2", strategy.without, [2], arrays)
    assert raw(strategy.without([4], arrays)) == never_had([2, 4], Grid(clients), **FIXED)


def test_a_network_that_was_trained_stays_as_it_is(clients, tmp_path):
    """Stage 1 has seen the client."""
    options = {"bootstrap": SeededFedAvg(), "bootstrap_rounds": 1, **FIXED}
    strategy = sums(storage=KeptSums(tmp_path / "sums"), **options)
    arrays = started(strategy, Grid(clients), rounds=3)
    model = loaded({name: arrays[name].numpy() for name in network().state_dict()})
    expected = never_had([1], Grid(clients), 1, model, **FIXED)
    assert raw(strategy.without([1], arrays)) == expected


def test_each_run_keeps_its_own_and_one_that_was_cut_off_finds_them_again(clients, tmp_path):
    first, again = (sums(storage=KeptSums(tmp_path / "sums"), **FIXED) for _ in range(2))
    before = started(first, Grid(clients), 1, checkpoint=tmp_path / "cut")
    expected = raw(first.without([4], before))
    assert expected == raw(first.without([4], started(first, Grid(clients))))
    assert len(list((tmp_path / "sums").iterdir())) == 2
    arrays = started(again, Grid(clients), 3, checkpoint=tmp_path / "cut")
    assert raw(again.without([4], arrays)) == expected


def test_what_was_forgotten_or_damaged_is_gone_and_has_to_be_named_from_then_on(clients, tmp_path):
    strategy = sums(storage=KeptSums(tmp_path / "sums"))
    arrays = started(strategy, Grid(clients))
    strategy.storage.forget([3])
    refused(r"those of client 3 are not in .* take that client out", strategy.without, [1], arrays)
    (path,) = tmp_path.glob("sums/*/client-4.safetensors")
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    refused(r"those of client 4 are not in .* or are damaged", strategy.without, [1, 3], arrays)
    assert raw(strategy.without([1, 3, 4], arrays)) == never_had([1, 3, 4], Grid(clients))


def test_what_cannot_be_solved_again_or_would_not_fit_is_refused(clients, tmp_path, monkeypatch):
    strategy, arrays = sums(storage=KeptSums(tmp_path / "sums")), started(sums(), Grid(clients))
    refused(r"no sums were kept .* the round of sums", strategy.without, [1], arrays)
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda _: 2000)
    said = "sums of 12 features from 6 clients"
    refused(said, start, sums(), Grid(clients), error=NotEnoughMemory)


# ------------------------------------------------------------------- under masks

STEPS = ("public-key", "shares", "masked", "confirm", "reveal")


def secret(clients=6, **options):
    return sums(clients, **{"secure": SecureAggregation()} | FIXED | options)


def step_of(config):
    return getattr(read_task(ConvexTask, config), "step", None)


def acting(step, change, *partitions, only_round=0):
    """Clients, some of which answer otherwise in one step."""

    class Acting(TCTClient):
        def fit(self, parameters, config):
            reply = super().fit(parameters, config)
            now = step_of(config) == step and only_round in (0, config["server-round"])
            return change(*reply) if now and self.seed[-1] in partitions else reply

    return Acting


def gone(*_):
    raise ConnectionError("this client is gone")


@functools.cache
def without(*partitions):
    with tempfile.TemporaryDirectory() as cache:
        grid = Grid(served(Path(cache)), changes=dict.fromkeys(partitions, lost))
        return bits(start(secret(secure=None), grid))


@pytest.mark.parametrize("step", ["", *STEPS])
def test_the_model_is_that_of_plain_sums_of_those_who_stayed_to_the_bit(clients, step):
    strategy, grid = secret(), Grid(clients.others(acting(step, gone, 1, 4)))
    left = () if step in ("", "confirm", "reveal") else (1, 4)
    assert bits(start(strategy, grid)) == without(*left)
    metrics = strategy.train_metrics[1]
    assert metrics["replies-accepted"] == 6 - len(left)
    assert metrics["replies-rejected"] == (2 if step else 0)


@pytest.mark.parametrize("step", ["masked", "reveal"])
def test_with_too_few_left_the_sum_stays_closed_and_the_next_round_begins_anew(clients, step):
    strategy = secret(secure=SecureAggregation(threshold=0.8))  # five of six
    grid = Grid(clients.others(acting(step, gone, 1, 4, only_round=1)))
    assert bits(start(strategy, grid, rounds=2)) == without()
    assert "ridge" not in strategy.train_metrics[1]


def test_a_sum_of_fewer_than_are_needed_for_the_model_is_not_opened(clients):
    strategy, grid = secret(min_completed=6), Grid(clients.others(acting("masked", gone, 1)))
    assert not start(strategy, grid)[LINEAR].any()
    assert [kind for kind, _ in grid.exchanges].count("train") == 5  # the words; then it is void
    start_in_vain(secret(3), Grid(clients, num_clients=3, changes={0: lost}))  # three are fewest


def masked_words(grid):
    contents = [
        m.content for way, m in grid.seen if way == "up" and "masked" in m.content["arrays"]
    ]
    return {int(c["metrics"]["partition-id"]): c["arrays"]["masked"].numpy() for c in contents}


def test_the_server_gets_no_clients_sums(clients, tmp_path):
    """No word of a client's own is where it would be in the clear; masks are new in each run."""
    extract = FeatureMap(num_features=12).extractor(network())
    fixed = FixedPoint.of(extract(held()[0]), 8)
    grids = [Grid(clients), Grid(clients)]
    for grid in grids:
        start(secret(), grid)
    masked, again = map(masked_words, grids)
    words = {}
    for k, (x, y) in enumerate(map(examples, range(6))):
        plain = FeatureStatistics.of([extract(x)], y, 3, fixed_point=fixed)
        words[k] = plain.to_words(np.uint32)
        assert not (masked[k] == words[k]).any()
        assert not (masked[k] == again[k]).any()
    added, total = (np.sum([*w.values()], axis=0, dtype=np.uint32) for w in (masked, words))
    assert not (added == total).any()  # nor is the sum open without the shares
    assert not list(tmp_path.glob("*/*.npy"))  # clients keep no features either


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
        others = zip(arrays.records["arrays"], change(list(arrays)), strict=False)
        return NamedArrays({"arrays": dict(others)}), count, metrics

    strategy, grid = secret(min_completed=1), Grid(clients.others(acting(step, changed, 2)))
    if len(left) == 6:
        assert not start_in_vain(strategy, grid)[LINEAR].any()
    else:
        assert bits(start(strategy, grid)) == without(*left)
    assert strategy.train_metrics[1]["replies-accepted"] == 6 - len(left)


def test_givers_of_false_shares_are_named_and_the_sum_opens(clients):
    """Two of six who agree on shares of other secrets; four are the threshold."""

    def false(arrays, count, metrics):
        shares = arrays.records["arrays"]
        shares = NamedArrays({"arrays": {**shares, "shares": shares["shares"] * 0}})
        return shares, count, metrics

    strategy = secret()
    assert bits(start(strategy, Grid(clients.others(acting("reveal", false, 0, 3))))) == without()
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

    after = start_in_vain(secret(), Grid(clients, on_send=lie))
    assert len(lies) == 1
    assert not after[LINEAR].any()


def with_keys(cache, keys):
    """Clients, some of which have key pairs that are not drawn for the run."""

    def client(*data, seed):
        secure = MaskedSums(cache=cache, parcel_keys=keys.get(seed[1]))
        return TCTClient(*data, seed=seed, secure=secure, cache=cache)

    return app(client)


def test_a_copied_public_key_leaves_out_those_who_sent_it(tmp_path):
    shared = with_keys(tmp_path, dict.fromkeys((1, 4), ParcelKeys(new_key())))
    assert bits(start(secret(), Grid(shared))) == without(1, 4)


def test_vouched_keys_give_the_same_sum_and_one_of_the_servers_own_none(tmp_path):
    keys = [new_key() for _ in range(6)]
    server = KeyServer(bytes(32), list(map(public_bytes, keys)), Ed25519PrivateKey.generate())
    pairs = {k: ParcelKeys(key, "a run", server.verify_key) for k, key in enumerate(keys)}
    federation = with_keys(tmp_path, pairs)

    def vouched(by):
        return secret(secure=SecureAggregation(vouching=by), run="a run")

    assert bits(start(vouched(server), Grid(federation))) == without()

    class Lying:
        """Has a key of its own passed off as a client's, with that client's voucher."""

        def voucher(self, public_key, run):
            return server.voucher(public_key, "another run")

    start_in_vain(vouched(Lying()), Grid(federation))


def test_a_client_gives_one_sum_of_its_data_and_insists_on_enough_clients(tmp_path):
    """Another network is no other data: the features of two may hardly differ."""

    def owners(**limits):
        def client(*data, seed, **options):
            secure = MaskedSums(cache=tmp_path, privacy=owned(tmp_path, seed[1], **limits))
            return TCTClient(*data, seed=seed, secure=secure, **options)

        return served(tmp_path, client)

    def in_vain(said, limits, **options):
        start_in_vain(strategy := secret(**options), Grid(owners(**limits)))
        assert said in strategy.channel.last_refusal

    few = "opens only with 5 clients or more, got one that opens with 4 of 6"
    in_vain(few, {"fewest_clients": 5})
    in_vain("most_bits: this client's owner allows 7, and the server asks", {"most_bits": 7})
    start(secret(), Grid(owners()))
    in_vain("only its owner can allow", {}, num_features=11)


def test_a_client_that_only_masks_refuses_what_is_not_masked(clients):
    grid = Grid(clients.others(secure=MaskedSums(only_masked=True, allow_repeats=True)))
    assert bits(start(secret(), grid)) == without()
    for strategy in (sums(), make(), make(normalise=False)):
        assert not start_in_vain(strategy, grid)[LINEAR].any()


@pytest.mark.parametrize("held_out", [False, True])
def test_a_client_that_only_masks_evaluates_no_linear_model_on_what_its_sums_are_of(
    clients, held_out
):
    """Losses of chosen models on the same examples would give its Gram matrix exactly."""
    x, y = examples(7)
    tests = {"x_test": x, "y_test": y} if held_out else {}
    secure = MaskedSums(only_masked=True, allow_repeats=True)
    strategy = secret(fraction_evaluate=1.0)
    start(strategy, Grid(clients.others(secure=secure, **tests)))
    assert ("accuracy" in strategy.evaluate_metrics.get(1, {})) == held_out
