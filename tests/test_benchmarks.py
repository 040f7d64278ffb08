"""The benchmarks' networks are the simulations', and each measurement can be made."""

import ast
import importlib
import math
import sys

import pandas as pd
import pytest
import torch

from fedntk.ntk import random_projection
from fedntk.simulations.models import mlp, resnet18, simple_cnn

from .conftest import ROOT, output_of


def sizes(model: torch.nn.Module) -> list[tuple[int, ...]]:
    return sorted(tuple(p.shape) for p in model.parameters())


@pytest.mark.parametrize(
    ("network", "ours"),
    [
        ("mlp-100", lambda: mlp((1, 28, 28), 10)),
        ("simple-cnn", lambda: simple_cnn((1, 28, 28), 10)),
        ("resnet18-gn", lambda: resnet18((3, 32, 32), 10, "group")),
    ],
)
def test_networks_are_those_of_the_simulations(network, ours, program):
    model, x = program("common").make(network, 2, "cpu")
    assert sizes(model) == sizes(ours())
    assert model(x).shape == (2, 10)


def test_what_benchmarks_import_is_there():
    """They import it when they measure, which most of them do in no test."""
    trees = {p.stem: ast.parse(p.read_text("utf-8")) for p in (ROOT / "benchmarks").rglob("*.py")}
    for tree in trees.values():
        for node in ast.walk(tree):
            names = [own.name for own in node.names] if isinstance(node, ast.ImportFrom) else []
            module = getattr(node, "module", "") or "__init__"  # as in "from . import"
            if names and module in trees:
                has = {name.id for name in ast.walk(trees[module]) if isinstance(name, ast.Name)}
                has |= {getattr(node, "name", "") for node in trees[module].body}
                assert set(names) <= has | set(trees), module
            elif names and module.startswith("fedntk"):
                package = importlib.import_module(module)
                for name in names:  # a submodule, or what the module has or makes when asked
                    if not hasattr(package, name):
                        importlib.import_module(f"{module}.{name}")


def test_options_are_read_by_their_defaults_and_bad_ones_refused(monkeypatch, program):
    names = ("a", "b, c")
    defaults = {"part": {"x": 1}, "seeds": (0, 1), "names": names, "kind": ["p", "q"], "rate": 0.5}

    def parsed(*words):
        monkeypatch.setattr(sys, "argv", ["program", "x", *words])
        found = program("common").parse_options("", data_dir="", quick=False, **defaults)
        return vars(found)

    plain = {**defaults, "part": "x", "kind": "p", "data_dir": "", "quick": False}
    assert parsed() == plain
    words = ["--seeds=2,3", "--kind=q", "--rate=1", "--quick", "--data-dir=d", "--names=b, c"]
    changed = {"seeds": [2, 3], "kind": "q", "rate": 1.0, "quick": True, "data_dir": "d"}
    assert parsed(*words) == plain | changed | {"names": ["b, c"]}
    for wrong in (["--names", "d"], ["--kind", "r"], ["--seeds", "x"], ["--rate", "x"], ["y"]):
        with pytest.raises(SystemExit):
            parsed(*wrong)


SLOW = ("tangent_features: simple-cnn, p=1000, n=100", "gradient_norms: resnet18-gn, n=32")
FAST = ("factored", "subsample", "factors")


@pytest.mark.parametrize(
    ("case", "here"),
    [
        ("kernel: mlp-100 n=50", ["--here"]),  # as on a machine without pyperf
        *(
            pytest.param(case, [], marks=pytest.mark.slow)
            for case in ("kernel: mlp-100 n=50", *SLOW)
        ),
    ],
)
def test_a_case_is_measured_and_right(case, here, tmp_path):
    """Our ways against float64, 1e-5: 170 float32 roundings of 6e-8, in sums of up to 3,136.

    The contraction of torch.func adds 79,510 products in some order: at most one rounding each.
    """
    path, results = ROOT / "benchmarks" / "speed.py", tmp_path / "speed.csv"
    output_of(sys.executable, path, "--turns=1", f"--results={results}", *here, "--cases", case)
    rows = pd.read_csv(results).set_index("way")
    assert (rows.seconds > 0).all()
    compared = rows[rows.rival.notna()]
    quotients = compared.seconds / compared["rival-seconds"]
    assert (quotients / compared.ratio).between(1 - 1e-5, 1 + 1e-5).all()  # six digits each
    assert rows.error[rows.index.isin(FAST)].max() < 1e-5
    assert (rows.error.dropna() < 79_510 * 2**-24).all()
    assert "torch" in rows.machine.iloc[0]


def test_committed_rows_of_attacks_are_of_the_cells(program):
    for name, case in program("attack").CASES.items():
        cells = pd.DataFrame(case.cells)
        table = pd.read_csv(ROOT / "benchmarks" / "results" / f"{name}.csv")[[*cells]]
        measured, wanted = (set(map(tuple, rows.to_numpy())) for rows in (table, cells))
        assert measured == wanted, (name, sorted(measured ^ wanted)[:5])


def test_rows_of_chosen_cells_are_replaced_and_others_stay(monkeypatch, program, tmp_path):
    attack, figures = program("attack"), iter((0.1234567, 0.25, 0.75))
    monkeypatch.setattr(program("common"), "RESULTS", tmp_path)
    case = attack.Case("", "", "", lambda _, alpha: [{"accuracy": next(figures)}, {"harm": 1}],
                       [{"alpha": 0.5}, {"alpha": 1.0}])  # fmt: skip
    monkeypatch.setitem(attack.CASES, "case", case)
    for words in ([], ["--only", "alpha < 1"]):
        monkeypatch.setattr(sys, "argv", ["attack.py", "case", *words])
        attack.main()
    text = "alpha,accuracy,harm\n0.5,0.75,\n0.5,,1\n1,0.25,\n1,,1\n"
    assert (tmp_path / "case.csv").read_text() == text


def test_who_is_in_small_sums_is_found(monkeypatch, program):
    """20 Gaussian examples of 60 in 30 features span none of the others; 50 or 100 span all."""
    attack = program("attack").members
    monkeypatch.setattr(attack, "MANY", 50)
    drawn = torch.Generator().manual_seed(0)
    z, public = (torch.randn(*n, 30, generator=drawn) for n in ((2, 60), (80,)))
    features = attack.Features(z, public, None)
    small, large = (list(attack.membership(features, count, 1)) for count in (10, 50))
    assert [row["sums"] for row in small] == ["one client", "sum of ten"]
    for few, many in zip(small, large, strict=True):
        for key in ("auc", "auc-calibrated", "others-ruled-out"):
            assert few[key] == 1
        assert max(many["auc"], many["others-ruled-out"]) < 1
    assert attack.difference(features, 10)["auc"] == 1


def test_a_round_of_ntk_dfl_sends_what_its_formula_says(shared_data, program):
    """Headers and names come on top, 1 % at this size. One cluster of four, 20 examples each."""
    case = {"clients": 4, "kappa": 3, "examples": 20, "data_dir": str(shared_data)}
    measured = program("cases").ntk_dfl_round(**case, topology="clustered", evolve_once=True)
    assert measured["cpu-seconds"] > 0
    for way in ("up", "down"):
        exact = measured[f"formula-{way}"]
        assert exact < measured[f"bytes-{way}"] < 1.02 * exact


def test_two_colluding_neighbours_learn_a_thirds_weights_and_one_does_not(program):
    """Inputs of a linear layer one has exactly. Weights are in float32: 1e-4 of their spread."""
    attack = program("attack").neighbours
    one, two = (next(attack.curious("", "mlp", count)) for count in (1, 2))
    assert max(row["input-error-mean"] for row in (one, two)) < 1e-5
    assert one["labels-in-clear"]
    assert two["third-weights-error"] < 1e-4 < 0.3 < one["third-weights-error"]


RAY = [pytest.mark.slow, pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's open files
@pytest.mark.parametrize(
    "way",
    [
        "local",
        *(pytest.param(way, marks=RAY) for way in ("ray", "cluster")),
        pytest.param("supernodes", marks=pytest.mark.federation),
    ],
)
def test_the_cost_of_a_round_is_measured(way, program):
    """Two clients, in each way the same bits; a process that has imported torch has 50 MB."""
    costs = program("reports")
    rounds = 30 if way in ("ray", "cluster") else 1  # those that end within 0.2 s are read together
    row = costs.round_cost(way, 2, rounds)
    assert 0 < row["least"] <= row["seconds"] <= row["most"]
    assert rounds > 1 or row["least"] == row["seconds"] == row["most"]
    assert row["cpu-seconds"] > 0
    assert row["memory-mb"] > 50
    assert row["model"] == costs.round_cost("local", 2, rounds)["model"]
    if way == "supernodes":
        for key in ("cpu-seconds", "memory-mb"):
            assert 0 < row[f"server-{key}"] < row[key]


# ------------------------------------------------------------------ reconstruction

WIRES = ("dense", "factored")


@pytest.fixture
def attack(program):
    """The attackers on uploads of Jacobians."""
    return program("attack").jacobians


def seen_by_server(attack, wire, sparsity=0.0):
    """Network, what the server sees of four pictures, and these, standardised."""
    line = torch.linspace(-1, 1, 28)
    down, across = torch.meshgrid(line, line, indexing="ij")
    disc = (down**2 + across**2 < 0.5).float()
    frame = (torch.maximum(down.abs(), across.abs()) > 0.6).float()
    images = torch.stack([disc, frame, (down + 1) / 2, disc * (across + 1) / 2])
    x = (images.flatten(1) - attack.MEAN) / attack.STD
    model = attack.network(x.shape[1], seed=0)
    net = attack.leakage.Network.of(model)
    sent = attack.leakage.upload(model, x, torch.arange(len(x)), wire)
    tensors = attack.with_thresholds(attack.leakage.received(model, sent, sparsity, 32), sparsity)
    seen = [attack.see(tensors, row, sent.outputs[row], net) for row in range(len(x))]
    return net, seen, x.double()


@pytest.mark.parametrize("wire", WIRES)
def test_closed_form_is_exact_without_protection(attack, wire):
    """An entry g x of a float32 Jacobian is rounded once, by 2^-24 at most; the rest is float64."""
    _, seen, x = seen_by_server(attack, wire)
    for one, original in zip(seen, x, strict=True):
        assert ((one.closed - original).abs() <= 2**-23 * original.abs()).all()


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("sparsity", [0.5, 0.99])
def test_what_the_attacker_infers_is_true(attack, wire, sparsity):
    """Numbers that came are right, those that did not are within their bounds (to float32)."""
    net, seen, x = seen_by_server(attack, wire, sparsity)
    for one, original in zip(seen, x, strict=True):
        before = net.w1 @ original + net.b1
        assert (before[one.on] > 0).all()
        assert (before[one.off] <= 0).all()
        got = one.hidden != 0
        assert torch.allclose(one.hidden[got], before[got], rtol=1e-5, atol=1e-5)
        assert (before[~got] <= one.hidden_bound + 1e-5).all()
        missing = original[~one.mask]
        assert torch.allclose(one.inputs[one.mask], original[one.mask], rtol=1e-5)
        assert (missing.abs() <= one.bound * (1 + 1e-5)).all()


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
def test_deep_leakage_and_the_adaptive_attack_succeed_without_protection(attack, wire):
    net, seen, x = seen_by_server(attack, wire)
    for row in (0, 3):
        original, one = attack.pixels(x[row])[None], seen[row]
        generator = torch.Generator().manual_seed(0)
        leaked = attack.leakage.deep_leakage(net, one.products, one.slopes, one.tops, generator)
        for rebuilt in leaked, attack.adaptive(one, net):
            assert attack.ssim(attack.pixels(rebuilt)[None], original) > 0.95


def test_projection_hides_the_direction_from_those_without_the_seed(attack):
    """With the seed the angle's cosine is about sqrt(200 / 784); without, the rebuilt image is in
    a uniformly random direction, whose cosine has a standard deviation of 1 / sqrt(784)."""
    x = torch.randn(1, 784, generator=torch.Generator().manual_seed(0)).double()
    matrices = [random_projection(torch.eye(784), 200, seed).double() for seed in range(4)]
    z = x @ matrices[0]
    cosines = [float(torch.cosine_similarity(attack.lifted(z, matrix), x)) for matrix in matrices]
    assert cosines[0] == pytest.approx(math.sqrt(200 / 784), abs=5 / math.sqrt(784))
    assert max(map(abs, cosines[1:])) < 5 / math.sqrt(784)
