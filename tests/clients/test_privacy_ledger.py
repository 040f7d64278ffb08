"""The ledger of what a data set gave, and its owner's limits, which no server or restart resets."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedntk.clients import ClosedFormClient, MaskedSums, PrivacyLedger, PrivacyLimits
from fedntk.clients.core.privacy_ledger import Release
from fedntk.ntk import FeatureMap
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.ntk.support.files import DamagedFile
from fedntk.trust import SealError

from ..conftest import refused
from ..strategies.federation import examples, network

ROWS = np.random.default_rng(0).normal(size=(40, 4))
TASK = SumTask(epsilon=1.0, delta=1e-6, bits=8, step="public-key")


@pytest.fixture
def path(tmp_path):
    return PrivacyLedger.create(tmp_path / "x.ledger").path


def give(path, rows=ROWS, epsilon=1.0, most=3.0, exchange="a", **other):
    release = Release("run", epsilon, 1e-6, exchange=exchange)
    task = SimpleNamespace(**vars(TASK) | other)
    limits = PrivacyLimits(ledger=path, epsilon=most, delta=1e-3)
    limits.reserve(release, task, rows, repeats=False)


def test_rows_that_are_added_reordered_or_dealt_out_are_no_fresh_data(path):
    give(path, most=1.0)
    more = np.concatenate([ROWS, np.ones((3, 4))])
    for rows in (ROWS[::-1], more, ROWS[:20], ROWS[20:], torch.tensor(ROWS[39:]).float()):
        refused(r"epsilon and delta of \[2.0, 2e-06\]", give, path, rows, most=1.9, exchange="b")


def test_parts_of_the_data_share_a_budget_only_in_what_they_share(tmp_path):
    """Each example is in one release of two halves, and in both of the whole."""
    path = PrivacyLedger.create(tmp_path / "of-all.ledger", ROWS).path
    give(path, ROWS[:20], most=1.0)
    give(path, ROWS[20:], most=1.0, exchange="b")
    refused(r"delta of \[3.0", give, path, most=2.9, exchange="c")
    give(path, None, most=3.0, exchange="c")  # of a client's whole data
    refused(r"delta of \[3.0", give, path, ROWS[:20], most=2.9, exchange="d")


def test_a_ledger_of_other_data_is_refused(path):
    give(path)
    refused("it is of other examples than this client's", give, path, ROWS + 1, exchange="b")


def test_a_missing_or_damaged_ledger_is_no_fresh_one(path, tmp_path):
    refused("exists and is not replaced", PrivacyLedger.create, path, error=SealError)
    assert path.stat().st_mode & 0o777 == 0o600
    give(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-9])
    refused("damaged .* bring back a copy", give, path, error=DamagedFile)
    path.unlink()
    refused("only if the data gave nothing before", give, path, error=FileNotFoundError)
    assert not path.exists()


def test_what_is_reserved_counts_until_it_is_freed_and_what_is_spent_stays(path):
    ledger = PrivacyLedger(path)
    give(path, exchange="a")
    give(path, exchange="b")
    refused("all runs", give, path, most=2.0, exchange="c")
    ledger.settle("a", opened=True)
    for exchange in "ab":
        ledger.settle(exchange, opened=False)
    assert [(r.exchange, r.spent) for r in ledger.releases()] == [("a", True)]
    give(path, most=2.0, exchange="")
    assert len(ledger.releases()) == 1  # that was a question


def test_two_clients_at_once_pass_no_limit(path):
    said = []

    def client(number):
        try:
            give(path, most=5.0, exchange=f"client {number}")
        except ValueError as error:
            said.append(str(error))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(PrivacyLedger(path).releases()) == 5
    assert len(said) == 3


def test_examples_can_be_recognised_only_with_the_ledgers_secret(path, tmp_path):
    other = PrivacyLedger.create(tmp_path / "other.ledger").path
    for ledger in (path, other):
        give(ledger)
    names = [{r.examples for r in PrivacyLedger(p).releases()} for p in (path, other)]
    assert not names[0] & names[1]


@pytest.mark.parametrize(
    ("limit", "asked", "said"),
    [
        ({"most_radius": 100}, {}, "most_radius: this client's owner allows 100, .* asks for 127"),
        ({"least_colluding": 2}, {}, "least_colluding: .* allows 2, and the server asks for 1"),
        ({"most_bits": 7}, {}, "most_bits: .* allows 7, and the server asks for 8"),
        ({}, {"bits": 32}, "most_bits: .* allows 8, and the server asks for 32"),
        ({"epsilon": 0.9}, {}, r"delta of \[1.0, 1e-06\] in all runs, .* allows \[0.9, 0.001\]"),
        ({"delta": 1e-7}, {}, "epsilon and delta of"),
        ({}, {"epsilon": 0.0}, r"epsilon and delta of \[inf"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", ["public-key", "shares"])
def test_a_client_refuses_beyond_each_limit_before_it_draws_a_key(
    path, tmp_path, limit, asked, said, step
):
    privacy = PrivacyLimits(ledger=path, **{"epsilon": 5.0, "delta": 1e-3} | limit)
    cache = tmp_path / "cache"
    secure = MaskedSums(cache=cache, privacy=privacy)
    client = ClosedFormClient(network(), *examples(0), secure=secure)
    task = SumTask(**{"epsilon": 1.0, "delta": 1e-6, "bits": 8, "step": step} | asked)
    config = {**task.to_config(), **FeatureMap("last-layer").to_config()}
    refused(said, client.fit, [], config)
    assert not cache.exists()
    assert not PrivacyLedger(path).releases()


def test_neither_a_node_nor_a_runs_name_gives_a_fresh_budget(path, tmp_path):
    """The same data, by a client that was restarted under another id, in another run's folder."""
    privacy = PrivacyLimits(ledger=path, epsilon=1.5, delta=1e-3)

    def client(number):
        cache = tmp_path / f"run {number}"
        secure = MaskedSums(cache=cache, privacy=privacy)
        own = ClosedFormClient(network(), *examples(0), secure=secure)
        own.identify(f"node{number}")
        return own

    def of(run):
        return SumTask(epsilon=1.0, delta=1e-6, bits=8, step="masked", run_key=run)

    def reserve(own, exchange, task):
        own.secure.reserve(own.sum_request(task, {}), exchange)

    reserve(client(1), "first", of("a run"))
    for run in ("a run", "another"):
        refused("delta of .2.0", reserve, client(2), "second", of(run))
    assert [r.epsilon for r in PrivacyLedger(path).releases()] == [1.0]
    assert math.isinf(PrivacyLimits(ledger=path).epsilon)


def test_each_client_with_the_same_rows_in_one_sum_counts(path):
    """Three times in a sum, an example moves it three times as far."""
    for client in range(3):
        give(path, exchange=f"sum-{client}")
    assert len(PrivacyLedger(path).releases()) == 3
    refused("all runs", give, path, exchange="sum-3")


def test_a_sum_that_is_opened_must_have_been_reserved(path):
    give(path, exchange="of one roster")
    PrivacyLedger(path).settle("of one roster", opened=False)
    refused("has no sum that was to be opened", PrivacyLedger(path).settle, "of one roster",
            opened=True)  # fmt: skip


def test_a_ledger_with_two_names_is_refused(path):
    """What is written replaces one of them, and the other stays as it was."""
    path.with_name("copy").hardlink_to(path)
    refused("got hard links", give, path)
