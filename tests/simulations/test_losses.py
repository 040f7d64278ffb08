"""Lost and late clients by the settings: which they are, what is counted, and the same bits."""

from fedntk.simulations import run
from fedntk.simulations.engine.losses import LossyGrid

from .outcomes import bits, outcome, refused
from .settings import FEDAVG

LOSSES = {"lost_share": 0.3, "late_share": 0.3, "round_deadline": 0.01}
SUMS = {
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
    whole = run("one-exchange", rounds=1, **SUMS, out=tmp_path / "whole")
    late = run(
        "one-exchange", rounds=8, **SUMS, **LOSSES, out=tmp_path / "late",
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
