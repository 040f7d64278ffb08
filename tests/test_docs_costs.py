"""The formulas on the methods' pages, compared with the arrays that small federations send."""

import json
import math
import re

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg

from fedntk.clients import FedEnsembleClient, MaskedSums, SGDClient
from fedntk.ntk import (
    JacobianUpload,
    compress,
    jacobian,
    one_hot,
    with_overlap_codes,
    with_residual_features,
)
from fedntk.simulations.methods import own_methods
from fedntk.strategies import FeatureSums, NoisySums, SecureAggregation, Topology
from fedntk.strategies.gossip.relay import RelayStrategy

from .conftest import ROOT
from .strategies.federation import Grid, app, arrays_of, examples, network, start
from .strategies.test_contract import CONTRACTS

X, Y = examples(6)  # of each client; one of the three classes is missing
EXAMPLES, CLASSES, (HIDDEN, INPUTS) = len(Y), 3, network()[0].weight.shape
FUNCTIONS = {"ceil": math.ceil, "log2": math.log2, "min": min}
TABLE = re.compile(r"^\| bytes of one client.*?\n\n", re.MULTILINE | re.DOTALL)
NAMES = {  # rows that most pages have
    "first": "down besides, until a reply of the client has been accepted",
    "then": "down besides, after a reply of the client has been accepted",
    "evaluate": "down, to evaluate",
    "model": "up, its model, when a round evaluates",
    "kept": "on its disk, for each of the newest 20 rounds",
}


def as_python(formula):
    """A space between two quantities is a product; "-" is nothing."""
    formula = formula.replace("²", "**2").replace("log₂", "log2")
    return "0" if formula == "-" else re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)


def rows_of(page):
    """What a page's table of costs says: row -> its formulas."""
    (table,) = TABLE.findall((ROOT / "docs" / "methods" / f"{page}.md").read_text() + "\n\n")
    short = {long: name for name, long in NAMES.items()}
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return {short.get(row, row): [*map(as_python, formulas)] for row, *formulas in rows}


def costs_of(page):
    return {row: formula for row, (formula,) in rows_of(page).items()}


def numbers(*prefixes, floating=False):
    """Bytes / 4 of the arrays with these prefixes: BatchNorm's counter counts as two numbers."""
    return sum(
        tensor.nbytes // 4
        for name, tensor in network().state_dict().items()
        if name.startswith(prefixes or "") and (tensor.is_floating_point() or not floating)
    )


KNOWN = {
    "P": numbers(), "P_b": numbers("1."), "P_h": numbers("3."), "P_f": numbers(floating=True),
    "P_t": sum(p.numel() for p in network().parameters()),
    "n": EXAMPLES, "h": 1, "C": CLASSES, "C_k": CLASSES - 1, "p": HIDDEN,
}  # fmt: skip


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """The arrays of replies stay for :func:`sent` to measure."""
    monkeypatch.setattr("fedntk.strategies.core.channel._release", lambda messages: None)


def value(formula, **symbols):
    return eval(formula, {"__builtins__": {}}, FUNCTIONS | KNOWN | symbols)  # noqa: S307


def size(arrays):
    """Bytes of arrays, without the Jacobian's layout, which is JSON."""
    return sum(a.nbytes for a in arrays if a.dtype != np.uint8 or not is_json(a.tobytes()))


def is_json(data):
    try:
        return isinstance(json.loads(data), list | dict)
    except ValueError:  # random bytes of a key may begin as JSON does
        return False


def sent(grid, way, kind="train"):
    """Bytes of each message's arrays, of those that have any."""
    messages = [m for w, m in grid.seen if (w, m.metadata.message_type) == (way, kind)]
    records = [message.content.array_records.values() for message in messages]
    sizes = [size(a for record in own for a in arrays_of(record).values()) for own in records]
    return [bytes_of for bytes_of in sizes if bytes_of]


def federated(page, rounds=2, num_clients=2, client=None, **options):
    """Run a method in which all clients take part; return what travelled, and the strategy."""
    method = own_methods()[page.replace("_", "-")]

    def make(model, x, y, **more):
        kind = SGDClient if page == "fed_ensemble" else method.client_class
        made = kind(options.get("network", model), X, Y, **more)
        return FedEnsembleClient(made) if page == "fed_ensemble" else made

    grid = Grid(app(make, **client or {}), num_clients=num_clients)
    everyone = {"min_available_nodes": num_clients, "min_train_nodes": num_clients}
    kind = method.strategy_class if options else contract_of(page).strategy
    strategy = kind(**everyone, **options)
    start(strategy, grid, rounds, options.get("network"))
    return grid, strategy


def contract_of(page):
    """How the tests of all strategies run a method, in the first case of its class."""
    kind = own_methods()[page.replace("_", "-")].strategy_class
    return next(case for case in CONTRACTS.values() if type(case.strategy()) is kind)


BLOCK = 5  # width of a residual block
SUMS = {"validation": examples(7)}
OPTIONS = {  # page -> options of its strategy, if they are not those of its contract
    "ntk_fl": {"learning_rate": 0.1, "steps": (10, 20)},
    "fed_ensemble": {"num_models": 3, "num_strata": 1},
    "deep_afl": {"network": with_residual_features(network(), 2, BLOCK, 0)},
    "safle": {"network": with_overlap_codes(network(), 1, 4, 0)},  # two tables of 16 rows
    "one_exchange": {"network": network(), "sums": FeatureSums(**SUMS)},
    "weighted_fedavg": {"network": network(), "personal_batch_norm": True},
}
ELSEWHERE = ("cp_ntk_fl", "tct")  # whose tables have other rows
PAGES = [
    name.replace("-", "_")
    for name, method in own_methods().items()
    if not issubclass(method.strategy_class, RelayStrategy)
]
DECENTRALISED = [
    name.replace("-", "_")
    for name, method in own_methods().items()
    if issubclass(method.strategy_class, RelayStrategy) and method.baseline
]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_what_a_client_of_a_server_sends(page, tmp_path):
    """Two rounds of two clients, accepted in the first; each lacks a class."""
    row = costs_of(page)
    cache = {"cache": tmp_path} if "kept" in row else {}
    grid, _ = federated(page, client=cache, **OPTIONS.get(page, {}))
    if page == "ntk_fl":  # the candidates travel as queries
        (candidates,) = (f for key, f in row.items() if key.startswith("down, candidates"))
        assert set(sent(grid, "down", "query")) == {value(candidates, T=3)}
        row["up"] = f"{row['up, outputs and targets']} + {jacobian_bytes(row)}"
    more = {"P": KNOWN["P"] + 2 * BLOCK * HIDDEN, "m": BLOCK} if page == "deep_afl" else {}
    if page == "safle":  # limits, and a last layer of 32 codes
        more = {"P": KNOWN["P"] + HIDDEN + CLASSES * (32 - HIDDEN), "p": 32}
        assert set(sent(grid, "down", "query")) == {
            value(row["down, for means and deviations"], **more)
        }
    down, up, evaluate = (value(row[key], K=3, **more) for key in ("down", "up", "evaluate"))
    first, then = (value(row.get(key, "0")) for key in ("first", "then"))
    times = 2 if contract_of(page).once and page != "deep_afl" else 4  # that: once for each layer
    expected = [down + first] * 2 + [down + then] * (times - 2)
    assert sent(grid, "down") == [each for each in expected if each]
    assert sent(grid, "up") == [up] * times * bool(up)
    assert set(sent(grid, "down", "evaluate")) <= {evaluate}


def jacobian_bytes(row):
    """By the formulas: linear layers in factors, BatchNorm's two parameters dense."""
    last = "up, the last linear layer, or one before it and an activation"
    return (
        2 * value(row["up, a dense parameter"], d=HIDDEN)
        + value(row["up, a layer in factors"], A=INPUTS, S=1, d_out=HIDDEN)
        + value(row[last], A=HIDDEN, d_out=CLASSES)
    )


def tensor_bytes(shape, groups, sparsity, bits):
    whole, ranges, positions, values = (
        next(f for key, f in costs_of("cp_ntk_fl").items() if key.startswith(start))
        for start in ("each tensor", "R,", "Q,", "V,")
    )
    m = math.prod(shape)
    k = groups * (m // groups - math.floor(sparsity * (m // groups)))
    return value(
        whole,
        a=len(shape),
        R=0 if bits == 32 else value(ranges, g=groups),
        Q=0 if k == m else value(positions, m=m, k=k),
        V=value(values, k=k, b=bits),
    )


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("bits", [1, 6, 32])
def test_the_bytes_of_a_compressed_tensor(bits, by_row):
    """Positions are a bitmap or indices, whichever is smaller."""
    tensor = np.random.default_rng(0).standard_normal((9, 5, 41)).astype(np.float32)
    for sparsity in (0.0, 0.5, 0.99):
        code = compress(tensor, sparsity=sparsity, bits=bits, by_row=by_row)
        assert code.nbytes == tensor_bytes(tensor.shape, 9 if by_row else 1, sparsity, bits)


def test_what_cp_ntk_fl_sends():
    rows, tools = costs_of("cp_ntk_fl"), {"sparsity": 0.5, "bits": 6}
    grid, _ = federated("cp_ntk_fl", 1, client=tools, learning_rate=0.1, steps=[10], **tools)
    expected = value(rows["outputs"]) + value(rows["labels, up to 256 classes"])
    for block in jacobian(network().eval(), X).expanded().blocks:
        expected += sum(tensor_bytes(tuple(a.shape), 1, 0.5, 6) for a in block.arrays)
    assert sent(grid, "up") == [expected] * 2


STAGE_1, MOMENTS, STAGE_2 = "a round of stage 1, by FedAvg", "the moments", "a round of stage 2"


def tct(tmp_path, rounds, num_clients=2, only_masked=False, **options):
    """Run TCT; return what travelled, and a function for the bytes of a row, down and up."""
    secure = MaskedSums(cache=tmp_path, only_masked=only_masked, allow_repeats=True)
    client = {"cache": tmp_path, "secure": secure}
    options = {"network": network(), "fraction_evaluate": 0.0} | options
    grid, strategy = federated("tct", rounds, num_clients, client, **options)

    def of(row):
        return tuple(value(f, p=strategy.width, K=num_clients) for f in rows_of("tct")[row])

    return grid, of


def test_what_tct_sends_in_its_stages(tmp_path):
    """Two clients. They have the normaliser from the evaluation before stage 2, or get it then."""
    grid, of = tct(
        tmp_path, 4, bootstrap=FedAvg(fraction_evaluate=0.0), bootstrap_rounds=1,
        learning_rate=1e-3, local_steps=3, fraction_evaluate=1.0,
    )  # fmt: skip
    once, each = of("its first round of stage 2, besides")[0], of(STAGE_2)[0]
    up = [of(row)[1] for row in (STAGE_1, MOMENTS, STAGE_2, STAGE_2)]
    assert sent(grid, "up") == np.repeat(up, 2).tolist()
    down, evaluate = sent(grid, "down"), sent(grid, "down", "evaluate")
    assert down[:4] == [of(STAGE_1)[0]] * 2 + [of(MOMENTS)[0]] * 2
    assert set(down[4:6]) <= {each, each + once}
    assert down[6:] == [each] * 2
    assert evaluate[:2] == [of("an evaluation before stage 2")[0]] * 2
    assert evaluate[-2:] == [of("an evaluation in stage 2")[0]] * 2


SHARE = {"auto_ridge": True, "validation_share": 0.2}
MASKED = {"secure": SecureAggregation(), "only_masked": True}
SOLVED_ONCE = {  # row -> options of the sums, and of TCT
    "sums": ({}, {}),
    "sums, `bits` = 2 to 8": ({"bits": 8}, {}),
    "sums, `balanced`": ({}, {"balanced": True}),
    "sums, `validation-share`, h examples held out": (SHARE, {}),
    "sums, `validation-share` and `bits` = 2 to 8, h examples held out": (SHARE | {"bits": 8}, {}),
    "sums, `bits` = 2 to 8, `secure` of K clients": ({"bits": 8}, MASKED),
}


@pytest.mark.parametrize("row", SOLVED_ONCE)
def test_what_tct_sends_in_its_only_round(row, tmp_path):
    """All exchanges of a secure sum count, in which all four clients stay."""
    of_sums, options = SOLVED_ONCE[row]
    plain = {"bits": 32, "validation_share": 0.0, "auto_ridge": False}
    grid, of = tct(tmp_path, 2, 4, sums=FeatureSums(**SUMS | plain | of_sums), **options)
    down, up = of(row)
    counts = of("the counts before, `balanced`")
    if "balanced" in row:
        down, up = down + counts[0], up + counts[1]
    assert (sum(sent(grid, "down")), sum(sent(grid, "up"))) == (4 * down, 4 * up)


def test_what_one_exchange_sends_otherwise(tmp_path):
    """All exchanges of a secure sum count, in which all four clients stay."""
    row, plain = costs_of("one_exchange"), {"validation_share": 0.0, "auto_ridge": False}
    for key, options in (
        ("up, with `validation-share = 0`", {"sums": FeatureSums(**SUMS, **plain)}),
        (
            "up, with `noise`, for any n",
            {"sums": FeatureSums(**plain), "noise": NoisySums(epsilon=1.0)},
        ),
    ):
        grid, _ = federated("one_exchange", 1, network=network(), fraction_evaluate=0.0, **options)
        assert sent(grid, "up") == [value(row[key])] * 2
    grid, _ = federated("one_exchange", 1, **OPTIONS["one_exchange"], personal=True)
    most = value(row["down, to evaluate, with `personal`, at most"])
    assert 0 < max(sent(grid, "down", "evaluate")) <= most
    client = {"secure": MaskedSums(cache=tmp_path, only_masked=True, allow_repeats=True)}
    options = OPTIONS["one_exchange"] | {"fraction_evaluate": 0.0, "secure": SecureAggregation()}
    grid, _ = federated("one_exchange", 1, 4, client, **options)
    for way in ("down", "up"):
        formula = row[f"{way}, with `secure` of K clients"]
        assert sum(sent(grid, way)) == 4 * value(formula, K=4)


@pytest.mark.parametrize("once", [False, True])
def test_what_ntk_dfl_sends(once):
    """Three clients, all neighbours or a hub and two others; two rounds, each with evaluation."""
    outputs, targets = torch.zeros(EXAMPLES, CLASSES), one_hot(Y, CLASSES)
    upload = JacobianUpload(jacobian(network().eval(), X), outputs, targets).to_arrays()
    row = {k: value(f, d=2, U=size(upload.values())) for k, f in costs_of("ntk_dfl").items()}
    topology = Topology("clustered", degree=2) if once else Topology("complete")
    own = {"topology": topology, "evolve_once": once, "collect_both": not once}
    grid, _ = federated("ntk_dfl", 2, 3, **own)
    weights = 4 * KNOWN["P"] + 8  # once more, in the first round
    for way, more in (("up", weights), ("down", row["first"])):
        hub, other = (row[f"`evolve-once`: {way}, {who}"] for who in ("a hub", "another"))
        a_round = hub + 2 * other if once else 3 * row[way]
        assert sum(sent(grid, way)) == 3 * more + 2 * a_round
    both = 0 if once else row["up besides, with `collect_both`"]
    assert sent(grid, "up", "evaluate.model") == [row["model"] + both] * 6


@pytest.mark.parametrize("page", DECENTRALISED)
def test_what_a_decentralised_baseline_sends(page, tmp_path):
    """Three rounds, each with an evaluation; three clients, all of them neighbours."""
    grid, _ = federated(page, 3, 3, {"cache": tmp_path}, topology=Topology("complete"))
    parameters = list(network().parameters())
    in_matrices = sum(p.numel() for p in parameters if p.dim() > 1)
    total = sum(p.numel() for p in parameters)
    in_masks = round(0.5 * total) - (total - in_matrices)  # half of the parameters in all
    formulas = costs_of(page).items()
    row = {key: value(formula, d=2, P_m=in_matrices, K=in_masks) for key, formula in formulas}
    before = page in ("d_psgd", "dispfl")  # one exchange more in round 1, of the first weights
    rounded = 5 if page == "dispfl" else 0  # bits to bytes, and K to a whole number
    up, down = [row["up"]] * (12 if before else 9), [row["first"]] * 3 + [row["down"]] * 9
    assert np.abs(np.array(sent(grid, "up")) - up).max() <= rounded
    assert np.abs(np.array(sent(grid, "down")) - down).max() <= 2 * rounded
    assert sent(grid, "up", "evaluate.model") == [row["model"]] * 9
    assert not sent(grid, "down", "evaluate.model")
