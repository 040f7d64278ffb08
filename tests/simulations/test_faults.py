"""Clients that lie, by the formulas of the papers, and that are lost or late, by the settings."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from fedntk.clients import SGDClient
from fedntk.simulations import Config, ConfigError, run
from fedntk.simulations.attacks import ATTACKS, choose_liars, patched
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.engine.faults import LossyGrid, LyingGrid
from fedntk.strategies import SeededFedAvg, Update

from ..strategies.federation import Grid, app, arrays_of, first_model
from .outcomes import bits, outcome, refused
from .settings import FEDAVG

LIAR = 4
RNG = np.random.default_rng(0)
X, Y = torch.arange(160.0).reshape(10, 1, 4, 4), torch.tensor([0, 1, 2, 2, 2, 1, 0, 2, 2, 1])


def poisoned(name):
    attack = ATTACKS[name].on_examples
    assert attack is not None
    return attack(X.clone(), Y.clone(), 3, np.random.default_rng(0))


def test_attacks_on_labels():
    assert poisoned("label-shift")[1].tolist() == [1, 2, 0, 0, 0, 2, 1, 0, 0, 2]
    assert poisoned("label-flip")[1].tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 0, 1]  # 2 becomes 0
    drawn = poisoned("random-labels")[1]
    assert drawn.dtype == Y.dtype
    assert not torch.equal(drawn, Y)
    assert set(drawn.tolist()) <= {0, 1, 2}


def test_a_backdoor_marks_every_second_image():
    x, y = poisoned("backdoor")
    assert torch.equal(x[::2], patched(X)[::2])
    assert torch.equal(x[1::2], X[1::2])
    assert y.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]


class Recording(SeededFedAvg):
    """Keeps the weights that came."""

    def train_round(self, r):
        uploads = yield from r.ask(lambda reply: reply.arrays())
        self.came = dict(zip(uploads.clients, uploads.values, strict=True))
        return Update(uploads)


def changes(attack, liars=(LIAR,), factor=0.0):
    """Change of each client's weights, floating-point arrays one after the other."""
    strategy = Recording()
    grid = LyingGrid(Grid(app(SGDClient)), liars, ATTACKS[attack], factor=factor)
    first = arrays_of(ArrayRecord(dict(first_model(strategy).state_dict())))
    strategy.start(grid, ArrayRecord(dict(first_model(strategy).state_dict())), num_rounds=1)
    floating = [name for name, array in first.items() if array.dtype.kind == "f"]
    for own in strategy.came.values():  # whole numbers are left alone
        assert own["1.num_batches_tracked"] == 1
    return {
        k: np.concatenate([(own[n] - first[n]).ravel() for n in floating])
        for k, own in strategy.came.items()
    }


HONEST = changes("none")
OTHERS = np.stack([own for k, own in HONEST.items() if k != LIAR])


@pytest.mark.parametrize(
    ("attack", "factor", "expected"),
    [
        ("sign-flip", 0, -HONEST[LIAR]),
        ("sign-flip", 99, -99 * HONEST[LIAR]),
        ("scaling", 0, 10 * HONEST[LIAR]),
        ("little-is-enough", 2, OTHERS.mean(0) - 2 * OTHERS.std(0)),
        ("inner-product", 0.5, -0.5 * OTHERS.mean(0)),
        ("false-prototypes", 0, HONEST[LIAR]),
        ("label-shift", 0, HONEST[LIAR]),  # is on examples
    ],
)
def test_a_lie_follows_its_formula_and_the_honest_stay(attack, factor, expected):
    """Tolerance: float32 weights of order 1, their changes multiplied by up to 99."""
    found = changes(attack, factor=factor)
    np.testing.assert_allclose(found[LIAR], expected, atol=1e-5, rtol=1e-4)
    for k in found.keys() - {LIAR}:
        assert np.array_equal(found[k], HONEST[k])


def test_mimics_repeat_one_honest_client():
    found = changes("mimic", liars=(1, 2, 4))
    assert any(np.array_equal(found[1], HONEST[k]) for k in (0, 3, 5))
    assert np.array_equal(found[1], found[2])
    assert np.array_equal(found[1], found[4])


def test_false_gram_keeps_the_diagonal():
    gram = np.arange(1, 11)  # of width 4: the diagonal is 1, 5, 8, 10
    attack = ATTACKS["false-gram"].on_reply
    assert attack is not None
    found = attack({"arrays/gram": gram, "arrays/counts": gram}, [], 1, np.random.default_rng(1))
    assert found["arrays/gram"][[0, 4, 7, 9]].tolist() == [1, 5, 8, 10]
    assert np.array_equal(np.abs(found["arrays/gram"]), gram)
    assert (found["arrays/gram"] < 0).any()
    assert found["arrays/counts"] is gram


def test_false_prototypes_come_under_the_next_class():
    means, attack = np.eye(3), ATTACKS["false-prototypes"].on_reply
    assert attack is not None
    found = attack({"arrays/means": means}, [], 1, RNG)["arrays/means"]
    assert np.array_equal(found, means[[2, 0, 1]])


def test_liars_are_large_clients():
    assert choose_liars(2, [9, 1, 2, 8], seed=0) == {0, 3}
    assert choose_liars(1, [9, 1, 2, 8], seed=0) < {0, 3}


def test_absent_liars_are_in_no_round(tmp_path):
    """Two of four clients are at least as large as the median: one of them is gone."""
    settings = {"num_clients": 4, "rounds": 2, "attack": "absent", "liars": 1}
    found = run("fedavg", out=tmp_path, progress=False, **settings)
    setup = load_setup(found.config)
    assert tuple(make_strategy(setup).sampling.held_out) == tuple(setup.liars)
    assert found.curve("replies-accepted").tolist() == [3, 3]


def test_runs_with_liars_are_reproducible_and_refuse_half_settings(tmp_path):
    settings = {"num_clients": 4, "rounds": 2, "progress": False}
    accuracies = [
        run("fedavg", attack="sign-flip", liars=1, out=tmp_path / str(i), **settings).curve()
        for i in range(2)
    ]
    honest = run("fedavg", out=tmp_path / "honest", **settings).curve()
    assert accuracies[0].equals(accuracies[1])
    assert not accuracies[0].equals(honest)
    with pytest.raises(ConfigError, match="set both, or neither"):
        Config(liars=1)
    with pytest.raises(ConfigError, match="did you mean 'scaling'"):
        Config(attack="scalin", liars=1)
    with pytest.raises(ConfigError, match="at most half of the 4 clients"):
        Config(num_clients=4, attack="scaling", liars=3)


LOSSES = {"lost_share": 0.3, "late_share": 0.3, "round_deadline": 0.01}
LATE_SUMS = {
    "num_clients": 8, "clients_per_round": 8, "train_examples": 300, "random_features": 30,
    "progress": False,
}  # fmt: skip


def test_one_seed_loses_the_same_clients(tmp_path):
    """Those lost are counted as errors, those late are not heard of."""
    config = FEDAVG.replace(**LOSSES, rounds=4, clients_per_round=8)
    first, again = (run(config, out=tmp_path / n, progress=False).folder for n in ("a", "b"))
    assert outcome(first) == outcome(again)
    found = run(config, out=first).rounds.pivot_table("value", "round", "metric")
    fate = LossyGrid(None, None, config.seed, 0.3, 0.3).fate
    fates = [[fate(client, number) for client in range(8)] for number in range(1, 5)]
    for metric, kind in (("replies-accepted", "in time"), ("rejected-error", "lost")):
        assert found[metric].dropna().tolist() == [f.count(kind) for f in fates if kind in f]


def test_late_sums_all_count_and_over_selection_is_a_setting(tmp_path):
    """Sums that come in other rounds give the bits of a run in which nothing is lost."""
    whole = run("one-exchange", rounds=1, **LATE_SUMS, out=tmp_path / "whole")
    late = run(
        "one-exchange", rounds=8, **LATE_SUMS, **LOSSES, out=tmp_path / "late",
        asynchrony=True,
    )  # fmt: skip
    assert late.curve("clients").iloc[0] < 8
    assert bits(late.folder) == bits(whole.folder)
    few = run(
        FEDAVG, out=tmp_path / "few", sampling={"over_selection": 2.0}, rounds=1, progress=False
    )
    assert few.curve("replies-accepted").tolist() == [3]


def test_late_replies_need_a_deadline():
    refused("late-share: expected a round-deadline above 0", FEDAVG.replace, late_share=0.3)
