"""Liars' replies by the thousand break no rule, and the fuzzer finds rules that are broken."""

import pytest

from fedntk.strategies import OneExchange, Uploads
from fedntk.strategies.core import round as round_module

from . import fuzz


@pytest.mark.parametrize(
    ("count", "seed"), [(500, 0), pytest.param(2_000, 1, marks=pytest.mark.slow)]
)
def test_replies_of_liars_break_no_rule(count, seed):
    cases, failures = fuzz.fuzz(count, seed)
    assert cases >= count
    assert not failures, failures[0]


FOUND = {  # by the fuzzer, and mended: what a dropped reply left behind -> strategy, clients, lies
    "its node asked for its partition at once": (
        "TCT, stage 2",
        3,
        [fuzz.Lie(0, -1, "contents", 2020842573), fuzz.Lie(0, 1, "records", 861904686)],
    ),
    "its model was taken to have replies enough to find an outlier among": (
        "FedEnsemble",
        6,
        [fuzz.Lie(4, 1, "shape", 706271161), fuzz.Lie(1, 1, "numbers", 1309355673)],
    ),
    "an infinite number in a list was averaged, if it came first of two that differ": (
        "sealed DFedAvg",
        3,
        [fuzz.Lie(2, 7, "error", 286486251), fuzz.Lie(0, 7, "metrics", 1407856370)],
    ),
    "a claim to a partition, if the shuffling server dropped it": (
        "shuffled CPNTKFL",
        4,
        [fuzz.Lie(3, 1, "contents", 622159984), fuzz.Lie(3, 4, "bytes", 552679799)],
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_the_fuzzer_found_stays_mended(what):
    name, num_clients, lies = FOUND[what]
    assert fuzz.check(name, num_clients=num_clients, lies=lies) == 2


def believe(arrays, *_):
    """Take a client's arrays as they are, in place of check_weights."""
    return dict(arrays)


def remember(uploads, *options, metrics=Uploads.metrics):
    """Have metrics depend on what was dropped, in place of Uploads.metrics."""
    record = metrics(uploads, *options)
    if uploads.rejected:
        record["train-loss"] = -1.0
    return record


FAULTS = {  # what the failure says -> what is broken, by what
    "ValueError": (round_module, "check_weights", believe),
    "left traces in": (Uploads, "metrics", remember),
}


@pytest.mark.parametrize("said", sorted(FAULTS))
def test_a_broken_rule_is_found_and_shown_by_a_program_with_the_fewest_lies(said, monkeypatch):
    """FedAvg without a check of arrays, and one whose metrics depend on what it drops."""
    monkeypatch.setattr(*FAULTS[said])
    _, (failure,) = fuzz.fuzz(100, 0, ["SeededFedAvg"], most_failures=1)
    assert said in failure
    assert failure.count("Lie(") == 1
    with pytest.raises((ValueError, AssertionError)):
        exec(failure)  # noqa: S102 - what the fuzzer printed


def test_sums_of_more_examples_than_a_client_may_have_are_found(monkeypatch):
    """Where nobody checks what counts and sums claim in agreement, before there is noise."""
    monkeypatch.setattr(
        OneExchange, "parse", lambda own, reply: own.sums.parse(reply.arrays(), checked=True)
    )
    with pytest.raises(AssertionError, match="500000013 examples"):
        fuzz.run("OneExchange with noise", 3, [fuzz.Lie(0, 1, "as if more", 1)])


@pytest.mark.parametrize("name", [name for name in fuzz.FEDERATIONS if "defence" in name])
def test_defended_federations_of_the_fuzzer_learn(name):
    """Six honest clients, of whom each model of an ensemble hears three, are enough for it."""
    (_, before), (_, after) = (fuzz.run(name, 6, [], rounds=number) for number in (0, 1))
    arrays = [n for n in after if isinstance(n, str) and not n.startswith(("state", "end"))]
    assert any(after[n] != before.get(n) for n in arrays)
