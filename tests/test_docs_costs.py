"""The formulas on the methods' pages, read from the pages and compared with what is sent and kept.

Bytes are those of the arrays in the messages; names, shapes and Flower's framing come on top.
"""

import math
import re
from collections import defaultdict

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedntk.clients import (
    ClosedFormClient,
    CPNTKFLClient,
    DFedAvgClient,
    DFedSAMClient,
    DisPFLClient,
    DittoClient,
    DPSGDClient,
    FedEnsembleClient,
    FedProtoClient,
    NTKDFLClient,
    NTKFLClient,
    PersonalisedClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
    WeightedFedAvgClient,
    client_app,
)
from fedntk.ntk import JacobianUpload, jacobian, one_hot
from fedntk.ntk.payloads import compress
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import (
    AFL,
    CPNTKFL,
    DPSGD,
    NTKDFL,
    NTKFL,
    SCAFFOLD,
    TCT,
    DFedAvg,
    DFedSAM,
    DisPFL,
    Distillation,
    Ditto,
    Fed3R,
    FedBE,
    FedBN,
    FedEnsemble,
    FedNCM,
    FedPer,
    FedProto,
    LocalTraining,
    SeededFedAvg,
    Topology,
    WeightedFedAvg,
)

from .conftest import ROOT

EXAMPLES, CLASSES, INPUTS, HIDDEN = 60, 3, 20, 11
OPTIONS = {
    "min_available_nodes": 1, "min_train_nodes": 1, "min_evaluate_nodes": 1,
}  # fmt: skip
TOKEN = re.compile(r"\^2|\d+|[A-Za-z_]+|[()+/-]")


def network():
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.GroupNorm(1, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


P = sum(tensor.numel() for tensor in network().state_dict().values())


def examples(partition):
    generator = torch.Generator().manual_seed(partition)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator)
    return x, torch.arange(EXAMPLES) % CLASSES


def rows(page, column):
    """First cell of each row of a page's tables -> the cell of the formula."""
    text = (ROOT / "docs" / "methods" / f"{page}.md").read_text(encoding="utf-8")
    text = text.partition("## What it costs")[2].partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {c[0].strip(): c[column].strip() for c in cells if len(c) > column}


def evaluated(formula, **values):
    """Evaluate a formula as it is printed: a space between two factors is a product."""
    products, before = "", ""
    for part in TOKEN.findall(formula.replace("²", " ^2")):
        if part == "^2":
            products += "**2"
            continue
        operand = part[0].isalnum() or part == "("
        follows = before and (before[0].isalnum() or before == ")")
        products += ("*" if operand and follows else "") + part
        before = part
    return eval(products, {"__builtins__": {}}, values)  # noqa: S307


def test_formulas_are_read_as_they_are_meant():
    assert evaluated("4 n (A + C S d_out)", n=2, A=3, C=5, S=1, d_out=7) == 8 * 38
    assert evaluated("4 n² + 8 n²", n=3) == 12 * 9
    assert evaluated("8 N C (24 + 2 T)", N=2, C=3, T=4) == 48 * 32


class Recording(LocalGrid):
    """Keeps the arrays' bytes of each message and reply that has any, by kind."""

    def __init__(self, client_fn, clients=1):
        super().__init__(client_app(client_fn), clients, {})
        self.down, self.up = defaultdict(list), defaultdict(list)

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for exchange, kept in ((messages, self.down), (replies, self.up)):
            for message in exchange:
                assert not message.has_error(), message.error
                records = message.content.array_records.values()
                arrays = [array.numpy() for record in records for array in record.values()]
                if arrays:
                    kept[message.metadata.message_type].append(size(arrays))
        return replies


def size(arrays):
    """Bytes of arrays, without the Jacobian's layout, which is JSON."""
    return sum(a.nbytes for a in arrays if not (a.dtype == np.uint8 and a[0] in b"[{"))


def start(strategy, client, rounds=1, clients=1):
    grid = Recording(client, clients)
    initial = ArrayRecord(network().state_dict())
    result = strategy.start(grid, initial, num_rounds=rounds)
    return grid, result


@pytest.fixture
def refusals(monkeypatch):
    """Message -> bytes of each demand for memory or disk."""
    demands = {}

    def note(num_bytes, what, *folder, **options):
        demands[what] = num_bytes

    for module in ("fedntk.strategies.ntk.ntk_fl", "fedntk.ntk.evolution.gradient_flow",
                   "fedntk.clients.tct.tct", "fedntk.ntk.convex.ridge",
                   "fedntk.strategies.tct.tct", "fedntk.strategies.tct.statistics",
                   "fedntk.ntk.payloads.feature_statistics",
                   "fedntk.ntk.payloads.split_statistics"):  # fmt: skip
        monkeypatch.setattr(f"{module}.require_memory", note)
    return demands


# --------------------------------------------------------------------------- NTK-FL


def jacobian_bytes(structure):
    """By the page: linear layers in factors, all else dense."""
    costs = rows("ntk_fl", 1)
    factors, dense = costs["up, a layer in factors"], costs["up, a parameter dense"]
    widths = {"0.weight": (INPUTS, HIDDEN), "3.weight": (HIDDEN, CLASSES)}
    total = 0
    for name, parameter in network().named_parameters():
        if structure == "factored" and name in widths:
            width_in, width_out = widths[name]
            total += evaluated(factors, n=EXAMPLES, A=width_in, C=CLASSES, S=1, d_out=width_out)
        elif structure == "dense" or name.startswith("1."):
            total += evaluated(dense, n=EXAMPLES, C=CLASSES, d=parameter.numel())
    return total


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_what_ntk_fl_sends_and_holds(structure, refusals):
    costs, steps, clients = rows("ntk_fl", 1), (10, 20, 30, 40), 3
    strategy = NTKFL(learning_rate=0.1, steps=steps, **OPTIONS | {"min_train_nodes": clients})
    grid, _ = start(
        strategy,
        lambda _: NTKFLClient(network(), *examples(0), structure=structure),
        clients=clients,
    )
    known = {"P": P, "n": EXAMPLES, "C": CLASSES, "T": len(strategy.steps)}  # with t = 0
    assert len(strategy.steps) == len(steps) + 1
    assert set(grid.down["train"]) == {evaluated(costs["down, to train"], **known)}
    assert set(grid.down["evaluate"]) == {evaluated(costs["down, to evaluate"], **known)}
    (candidates,) = (f for row, f in costs.items() if row.startswith("down, candidates"))
    assert set(grid.down["query"]) == {evaluated(candidates, **known)}
    assert candidates == costs["server, candidates"]
    sent = jacobian_bytes(structure)
    whole = sent + evaluated(costs["up, outputs and targets"], **known)
    assert set(grid.up["train"]) == {whole}
    solver = next(f for row, f in costs.items() if row.startswith("server, solver"))
    demanded = {what.split()[1]: size for what, size in refusals.items()}
    assert demanded["evolution"] == evaluated(solver, N=clients * EXAMPLES, **known)
    assert demanded["global"] == evaluated(
        costs["server, Jacobians"].split(",")[0], J=clients * sent
    )


def test_the_memory_of_ntk_fls_kernel(refusals):
    """The mean kernel's and, with MSE, the eigendecomposition's; the full one has no matrix."""
    formula, more = rows("ntk_fl", 1)["server, mean kernel"].split(", and ")
    own = jacobian(network(), examples(0)[0])
    assert own.gram_bytes() == evaluated(formula.replace("MiB", "M"), N=EXAMPLES, M=2**20)
    strategy = NTKFL(learning_rate=0.1, steps=[1], loss="mse", **OPTIONS)
    start(strategy, lambda _: NTKFLClient(network(), *examples(0), loss="mse"))
    (eigen,) = (size for what, size in refusals.items() if "eigendecomposition" in what)
    assert eigen == evaluated(more.split(" more")[0], N=EXAMPLES)


def test_a_layer_goes_in_factors_if_they_are_at_most_half_as_large():
    """Of one output: d_in + d_out against d_in d_out numbers."""
    factored = {}
    for width in (2, 3, 4):
        layer = nn.Linear(4, width, bias=False)
        (block,) = jacobian(nn.Sequential(layer, Sum()), torch.randn(2, 4)).blocks
        factored[width] = len(block.arrays) == 2
        assert factored[width] == (2 * (4 + width) <= 4 * width)
    assert factored == {2: False, 3: False, 4: True}


class Sum(nn.Module):
    def forward(self, x):
        return x.sum(1, keepdim=True)


# --------------------------------------------------------------------- Fed-ensemble


def test_what_fed_ensemble_sends():
    costs, models = rows("fed_ensemble", 1), 3
    strategy = FedEnsemble(num_models=models, num_strata=1, **OPTIONS)
    grid, _ = start(strategy, lambda _: FedEnsembleClient(SGDClient(network(), *examples(0))))
    assert grid.down["train"] == [evaluated(costs["down"], P=P)]
    assert grid.up["train"] == [evaluated(costs["up"], P=P)]
    assert grid.down["evaluate"] == [evaluated(costs["down, to evaluate"], P=P, K=models)]


# ------------------------------------------------------------------------ CP-NTK-FL


def tensor_bytes(shape, groups, sparsity, bits):
    """By the page: 20 + 8 a + R + Q + V."""
    m, keeps = math.prod(shape), math.prod(shape) // groups
    k = groups * (keeps - math.floor(sparsity * keeps))
    ranges = 0 if bits == 32 else 8 * groups
    indices = math.ceil(k * math.ceil(math.log2(m)) / 8)
    positions = 0 if k == m else min(math.ceil(m / 8), indices)
    values = 4 * k if bits == 32 else math.ceil(k * bits / 8)
    formula = rows("cp_ntk_fl", 1)["each tensor"]
    return evaluated(formula, a=len(shape), R=ranges, Q=positions, V=values)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("bits", [1, 6, 16, 32])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
def test_the_bytes_of_a_compressed_tensor(sparsity, bits, by_row):
    tensor = np.random.default_rng(0).standard_normal((9, 5, 41)).astype(np.float32)
    code = compress(tensor, sparsity=sparsity, bits=bits, by_row=by_row)
    assert code.nbytes == tensor_bytes(tensor.shape, 9 if by_row else 1, sparsity, bits)


def test_the_page_describes_the_bytes_of_a_compressed_tensor_so():
    """What the function above computes is what the table says."""
    costs = rows("cp_ntk_fl", 1)
    assert costs["R, ranges of the magnitudes"] == "8 g, or 0 with `bits = 32`"
    assert costs["Q, positions"] == (
        "the smaller of ceil(m / 8) and ceil(k ceil(log₂ m) / 8); 0 if all stay"
    )
    assert costs["V, values"] == "ceil(k b / 8) with b = `bits`, 4 k with `bits = 32`"


def test_what_cp_ntk_fl_sends():
    costs, tools = rows("cp_ntk_fl", 1), {"sparsity": 0.5, "bits": 6}
    strategy = CPNTKFL(learning_rate=0.1, steps=[10], **tools, **OPTIONS)
    grid, _ = start(strategy, lambda _: CPNTKFLClient(network(), *examples(0), **tools))
    known = {"n": EXAMPLES, "C": CLASSES}
    expected = evaluated(costs["outputs"], **known)
    expected += evaluated(costs["labels"].split(" (")[0], **known)
    for block in jacobian(network(), examples(0)[0]).blocks:
        expected += sum(tensor_bytes(tuple(a.shape), 1, 0.5, 6) for a in block.arrays)
    assert grid.up["train"] == [expected]


# ------------------------------------------------------------------------------ TCT


@pytest.mark.parametrize("solve", ["clients", "server"])
def test_what_tct_sends_and_keeps(solve, tmp_path, refusals):
    """Two clients; in the last round but one, the first alone, so that c travels after it."""
    down, up = rows("tct", 1), rows("tct", 2)

    def client(context):
        k = context.node_config["partition-id"]
        return TCTClient(network(), *examples(k), cache=tmp_path, seed=(0, k))

    strategy = TCT(
        network=network(), bootstrap=FedAvg(fraction_evaluate=0.0), bootstrap_rounds=1,
        learning_rate=1e-3, local_steps=3, solve=solve, **OPTIONS | {"min_train_nodes": 2},
    )  # fmt: skip
    grid, result = start(strategy, client, rounds=4 if solve == "clients" else 2, clients=2)
    p = strategy.shape[0]
    known = {"P": P, "n": EXAMPLES, "p": p, "C": CLASSES}

    def of(row, *, sent):
        return evaluated((up if sent else down)[row], **known)

    stage_1 = "a round of stage 1, by FedAvg"
    assert grid.down["train"][:2] == [of(stage_1, sent=False)] * 2
    assert grid.up["train"][:2] == [of(stage_1, sent=True)] * 2
    before, after = down["an evaluation, before stage 2 and in it"].split("; ")
    assert grid.down["evaluate"][:2] == [evaluated(before, **known)] * 2
    if solve == "server":
        row = '`solve = "server"`'
        assert grid.down["train"][2:] == [of(row, sent=False)] * 2
        assert grid.up["train"][2:] == [of(row, sent=True)] * 2
        (solved,) = (size for what, size in refusals.items() if what.startswith("solving"))
        server = next(f for r, f in rows("tct", 1).items() if r.startswith("server, `solve"))
        assert solved == evaluated(server.split(" with ")[0], N=2 * EXAMPLES)
        return
    assert grid.down["evaluate"][-2:] == [evaluated(after, **known)] * 2
    assert grid.down["train"][2:4] == [of("the moments", sent=False)] * 2
    assert grid.up["train"][2:4] == [of("the moments", sent=True)] * 2
    once = of("its first round of stage 2, besides", sent=False)
    each = of("a round of stage 2", sent=False)
    # clients had the normaliser with the evaluation of the round before, or get it now
    assert set(grid.down["train"][4:6]) <= {each, each + once}
    assert grid.down["train"][6:] == [each] * 2
    assert grid.up["train"][4:] == [of("a round of stage 2", sent=True)] * 4
    (memory,) = (size for what, size in refusals.items() if what.startswith("stage 2 with"))
    assert memory == evaluated(rows("tct", 1)["client, stage 2"].split(",")[0], n=EXAMPLES)
    assert len(result.arrays["tct.linear"].numpy()) == p


STATISTICS = {
    "": {},
    "`bits` = 2 ... 8": {"bits": 8},
    "`balanced`": {"balanced": True},
    "`validation-share`": {"ridge": "auto", "validation_share": 0.2},
    "`validation-share` and `bits` = 2 ... 8": {
        "ridge": "auto", "validation_share": 0.2, "bits": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("way", STATISTICS)
def test_what_tct_sends_for_pooled_statistics(way, tmp_path, refusals):
    """Two clients, an exchange of counts before where classes are to weigh the same."""

    def client(context):
        k = context.node_config["partition-id"]
        return TCTClient(network(), *examples(k), cache=tmp_path, seed=(0, k))

    strategy = TCT(
        network=network(), solve="statistics", fraction_evaluate=0.0, validation=examples(7),
        **STATISTICS[way], **OPTIONS | {"min_train_nodes": 2},
    )  # fmt: skip
    balanced = strategy.task.balanced
    grid, _ = start(strategy, client, rounds=3, clients=2)
    known = {"P": P, "p": strategy.shape[0], "C": CLASSES}
    down, up = rows("tct", 1), rows("tct", 2)
    row = f"the same, {way}" if way else '`solve = "statistics"`'
    before = [evaluated(up["the counts before, `balanced`"], **known)] * 2 * balanced
    assert evaluated(down["the counts before, `balanced`"], **known) == 0
    assert grid.up["train"] == [*before, *[evaluated(up[row], **known)] * 2]
    assert grid.down["train"] == [evaluated(down[row], **known)] * 2
    memory = rows("tct", 1)
    (client_memory,) = (size for what, size in refusals.items() if what.startswith("the sums of"))
    whose = "`validation-share`" if "share" in way else '`solve = "statistics"`'
    # sums themselves take 12 p^2, whoever is told beforehand that there will be two
    first = memory['client, `solve = "statistics"`'].split(",")[0]
    assert client_memory == evaluated(first, **known)
    (own,) = (size for what, size in refusals.items() if what.startswith("pooled-statistics of"))
    uploads = 2 * evaluated(up[row], **known) * strategy.min_available_nodes
    assert own == evaluated(memory[f"server, {whose}"].split(",")[0], **known) + uploads


@pytest.mark.parametrize("way", ["", "`bits` = 2 ... 8", "`validation-share`"])
def test_what_the_server_of_tct_keeps_of_clients(way, tmp_path, refusals):
    """What a client sent, and the steps; a file has a list of its arrays before them."""

    def client(context):
        k = context.node_config["partition-id"]
        return TCTClient(network(), *examples(k), cache=tmp_path / "cache", seed=(0, k))

    strategy = TCT(
        network=network(), solve="statistics", fraction_evaluate=0.0, validation=examples(7),
        keep_sums=tmp_path / "sums", **STATISTICS[way], **OPTIONS | {"min_train_nodes": 2},
    )  # fmt: skip
    grid, result = start(strategy, client, rounds=1, clients=2)
    files = {path.parent.name: path for path in tmp_path.glob("sums/*/*/*.safetensors")}
    steps = ["steps"] * ("bits" in way)
    assert sorted(files) == ["client-0", "client-1", *steps]
    for name, path in files.items():
        sent = 4 * strategy.shape[0] if name == "steps" else grid.up["train"][0]
        assert 0 < path.stat().st_size - sent < 3000
    assert strategy.phases[-1].upload_bytes == grid.up["train"][0]
    refusals.clear()
    strategy.without([0], result.arrays)
    (again,) = (size for what, size in refusals.items() if what.startswith("pooled-statistics of"))
    of_one, of_two = rows("tct", 1)["server, without a client"].split(", or ")
    formula = of_two.split(" with")[0] if "share" in way else of_one
    assert again == evaluated(formula, p=strategy.shape[0])


def test_the_memory_of_tcts_clients_for_two_sums(tmp_path, refusals):
    """It is refused in the first round of stage 1."""
    strategy = TCT(
        network=network(), solve="statistics", bootstrap=FedAvg(fraction_evaluate=0.0),
        bootstrap_rounds=1, ridge="auto", validation_share=0.2, **OPTIONS,
    )  # fmt: skip
    client = lambda _: TCTClient(network(), *examples(0), cache=tmp_path)  # noqa: E731
    start(strategy, client, rounds=1, clients=2)
    (both,) = (size for what, size in refusals.items() if "twice," in what)
    formula = rows("tct", 1)["client, `validation-share`"].split(",")[0]
    assert both == evaluated(formula, p=strategy.shape[0])


def test_what_tct_sends_under_secure_aggregation(tmp_path):
    """Four clients, who all stay: keys, shares, masked sums, shares."""

    def client(context):
        k = context.node_config["partition-id"]
        return TCTClient(network(), *examples(k), cache=tmp_path, seed=(0, k), only_masked=True)

    strategy = TCT(
        network=network(), solve="statistics", bits=8, secure_aggregation=True,
        validation=examples(7), fraction_evaluate=0.0, **OPTIONS | {"min_train_nodes": 4},
    )  # fmt: skip
    grid, _ = start(strategy, client, rounds=1, clients=4)
    row = "`bits` = 2 ... 8 and `secure-aggregation` of K clients"
    known = {"P": P, "p": strategy.shape[0], "C": CLASSES, "K": 4}
    for sent, column in ((grid.down["train"], 1), (grid.up["train"], 2)):
        each = evaluated(rows("tct", column)[row], **known)
        assert sum(sent) == 4 * each


def test_c_travels_after_a_round_that_not_all_took_part_in(tmp_path):
    def client(context):
        k = context.node_config["partition-id"]
        return TCTClient(network(), *examples(k), cache=tmp_path, seed=(0, k))

    strategy = TCT(network=network(), learning_rate=1e-3, local_steps=3, normalise=False,
                   fraction_train=0.5, fraction_evaluate=0.0, min_available_nodes=4,
                   min_train_nodes=2)  # fmt: skip
    grid, _ = start(strategy, client, rounds=3, clients=4)
    down, p = rows("tct", 1), strategy.shape[0]
    each = evaluated(down["a round of stage 2"], p=p, C=CLASSES)
    control = evaluated(
        down["a round after one that not all took part in, besides"], p=p, C=CLASSES
    )
    normaliser = evaluated(down["its first round of stage 2, besides"], p=p)
    first = {each + 4 * P + normaliser}
    assert set(grid.down["train"][:2]) == first  # c is zero, and does not travel
    assert set(grid.down["train"][2:]) <= {each + control, each + control + 4 * P + normaliser}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_a_client_of_tct_keeps_on_disk(dtype, tmp_path):
    """Files are arrays with heads of 128 bytes, or archives of them with some hundred more."""
    strategy = TCT(network=network(), learning_rate=1e-3, local_steps=3, **OPTIONS)
    start(
        strategy,
        lambda _: TCTClient(network(), *examples(0), cache=tmp_path, dtype=dtype),
        rounds=26,
    )
    costs, p = rows("tct", 1), strategy.shape[0]
    known = {"P": P, "n": EXAMPLES, "p": p, "C": CLASSES}
    (folder,) = tmp_path.iterdir()
    sizes = defaultdict(list)
    for path in folder.iterdir():
        sizes[path.stem.split("-")[0]].append(path.stat().st_size)
    wide, narrow = costs["features"].split(", or ")
    formula = narrow.split(" with")[0] if dtype == "float16" else wide
    assert sizes["features"] == [128 + evaluated(formula, **known)]
    assert "raw" not in sizes  # it goes when the features are normalised
    kernel = evaluated(costs["kernel and its eigendecomposition"], **known) + 8 * EXAMPLES
    assert 0 <= sum(sizes["kernel"] + sizes["spectrum"]) - kernel < 1500
    checksums = evaluated(costs["checksums of its examples"], **known)
    assert 0 <= sum(sizes["examples"]) - checksums < 700
    states = costs["corrections of its newest 20 rounds"].split(" each")[0]
    models = costs["models of its newest 2 rounds"].split(" each")[0]
    assert (len(sizes["state"]), len(sizes["sent"])) == (20, 2)
    assert all(0 <= size - evaluated(states, **known) < 700 for size in sizes["state"])
    assert all(0 <= size - evaluated(models, **known) < 700 for size in sizes["sent"])
    network_and_normaliser = evaluated(costs["network and normaliser"], **known)
    assert 0 <= sum(sizes["network"] + sizes["normaliser"]) - network_and_normaliser < 4000


# ------------------------------------------------------------------------ baselines


def test_what_fedavg_sends():
    costs = rows("fedavg", 1)
    grid, _ = start(SeededFedAvg(**OPTIONS), lambda _: SGDClient(network(), *examples(0)))
    assert grid.down["train"] == [evaluated(costs["down"], P=P)]
    assert grid.up["train"] == [evaluated(costs["up"], P=P)]
    assert grid.down["evaluate"] == [evaluated(costs["down, to evaluate"], P=P)]


@pytest.mark.parametrize("distilled", [False, True])
def test_what_fed_be_sends_and_what_is_learned(distilled):
    """Two clients, M = 3: one model each way, and six models or one on the server."""
    costs, x = rows("fed_be", 1), torch.randn(8, INPUTS)
    distill = Distillation(network(), x, epochs=1) if distilled else None
    strategy = FedBE(num_samples=3, distill=distill, **OPTIONS | {"min_train_nodes": 2})
    client = lambda _: SGDClient(network(), *examples(0))  # noqa: E731
    grid, result = start(strategy, client, rounds=2, clients=2)
    assert grid.down["train"] == [evaluated(costs["down"], P=P)] * 4
    assert grid.up["train"] == [evaluated(costs["up"], P=P)] * 4
    assert set(grid.down["evaluate"]) == {evaluated(costs["down, to evaluate"], P=P)}
    learned = costs["server, what is learned"].split(", or ")[distilled].split(" distilled")[0]
    found = size([array.numpy() for array in result.arrays.values()])
    assert found == evaluated(learned, P=P, M=3, N=2)


def test_what_scaffold_sends_and_keeps():
    """With BatchNorm, whose counter is no number of floating point: 8 bytes, one way and other."""
    costs, integers = rows("scaffold", 1), 1

    def net():
        return nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))

    numbers = sum(tensor.numel() for tensor in net().state_dict().values())
    strategy = SCAFFOLD(**OPTIONS | {"min_train_nodes": 2})
    grid = Recording(lambda _: SCAFFOLDClient(net(), *examples(0)), clients=2)
    strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=1)
    known = {"P": numbers, "P_f": numbers - integers}
    wider = 4 * integers  # than the page's 4 bytes a number
    assert grid.down["train"] == [evaluated(costs["down"], **known) + wider] * 2
    assert grid.up["train"] == [evaluated(costs["up"], **known) + wider] * 2
    kept = evaluated(costs["server"].split(" for each")[0], **known)
    assert [control.nbytes for control in strategy.controls.values()] == [kept] * 2


CLOSED_FORM = {"afl": AFL, "fed3r": Fed3R, "fed_ncm": FedNCM}


@pytest.mark.parametrize("page", sorted(CLOSED_FORM))
def test_what_a_method_that_computes_the_last_layer_sends(page):
    """Two rounds of two clients that lack a class; the second round only evaluates."""
    costs = rows(page, 1)
    x, _ = examples(0)
    y = torch.arange(EXAMPLES) % (CLASSES - 1)
    strategy = CLOSED_FORM[page](network=network(), **OPTIONS | {"min_available_nodes": 2})
    grid, _ = start(strategy, lambda _: ClosedFormClient(network(), x, y), rounds=2, clients=2)
    known = {"P": P, "C": CLASSES, "C_k": CLASSES - 1, "p": HIDDEN}
    assert grid.down["train"] == [evaluated(costs["down"], **known)] * 2
    assert grid.up["train"] == [evaluated(costs["up"], **known)] * 2
    assert set(grid.down["evaluate"]) == {evaluated(costs["down, to evaluate"], **known)}


# ---------------------------------------------------------- a model for each client


def normalised():
    return nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))


PERSONAL = {
    "fed_bn": (lambda: FedBN(network=normalised(), **OPTIONS), PersonalisedClient),
    "fed_per": (lambda: FedPer(network=normalised(), **OPTIONS), PersonalisedClient),
    "local_training": (lambda: LocalTraining(**OPTIONS), PersonalisedClient),
    "ditto": (lambda: Ditto(**OPTIONS), DittoClient),
    "fed_proto": (lambda: FedProto(network=normalised(), **OPTIONS), FedProtoClient),
    "weighted_fedavg": (
        lambda: WeightedFedAvg(network=normalised(), personal_batch_norm=True, **OPTIONS),
        WeightedFedAvgClient,
    ),
}


@pytest.mark.parametrize("page", sorted(PERSONAL))
def test_what_a_method_of_personal_models_sends_and_keeps(page, tmp_path):
    """Three rounds of one client, which lacks a class and whose first reply is lost.

    BatchNorm's counter has 8 bytes, which pages count as 4. A file has 128 bytes before each array,
    and an archive up to 300 more for each.
    """
    make, kind = PERSONAL[page]
    state = normalised().state_dict()
    known = {
        "P": sum(tensor.numel() for tensor in state.values()),
        "P_b": sum(tensor.numel() for name, tensor in state.items() if name.startswith("1.")),
        "P_h": sum(tensor.numel() for name, tensor in state.items() if name.startswith("2.")),
        "C": CLASSES,
        "C_k": CLASSES - 1,
        "p": 4,
    }
    x, _ = examples(0)
    y = torch.arange(EXAMPLES) % (CLASSES - 1)
    client = lambda _: kind(normalised(), x, y, cache=tmp_path, seed=1)  # noqa: E731
    strategy = make()

    class FirstLost(Recording):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            lost = strategy.server_round == 1 and messages[0].metadata.message_type == "train"
            replies = super().send_and_receive(messages, timeout=timeout)
            return [] if lost else replies

    grid = FirstLost(client)
    strategy.start(grid, ArrayRecord(state), num_rounds=3)
    costs = rows(page, 1)
    first = "down, until a reply of it has been accepted, besides"
    once = evaluated(costs[first], **known) if first in costs else 0
    counter = 4  # what the pages count too little for it, wherever it travels
    down, to_evaluate = (evaluated(costs[row], **known) for row in ("down", "down, to evaluate"))
    has = {
        "fed_bn": (0, counter), "fed_per": (counter, 0), "local_training": (0, counter),
        "ditto": (counter, 0), "fed_proto": (0, counter), "weighted_fedavg": (0, counter),
    }  # fmt: skip
    always, at_first = has[page]
    start = [down + always + once + at_first] * 2
    assert grid.down["train"] == [size for size in [*start, down + always] if size]
    start = [to_evaluate + always + once + at_first]
    assert grid.down["evaluate"] == [size for size in [*start, *[to_evaluate + always] * 2] if size]
    up = evaluated(costs["up"], **known)
    way_up = always if page in ("ditto", "fed_per") else 0
    assert grid.up["train"] == [up + way_up] * 3 * bool(up)
    (row,) = (row for row in costs if row.endswith("each of the newest 20 rounds"))
    formula = evaluated(costs[row], **known) + (0 if page == "fed_per" else counter)
    files = sorted(tmp_path.glob("*/round-*.npz"))
    assert [path.stem for path in files] == [f"round-0000000{number}" for number in (1, 2, 3)]
    for path in files:
        with np.load(path) as kept:
            count = len(kept.files)
        assert 0 <= path.stat().st_size - formula <= 430 * count


# ------------------------------------------------------------------ decentralised


def test_what_ntk_dfl_sends():
    """Three clients, each the neighbour of both others; two rounds, each with an evaluation."""
    costs, d, clients = rows("ntk_dfl", 1), 2, 3

    def client(context):
        k = context.node_config["partition-id"]
        return NTKDFLClient(network(), *examples(k), seed=(0, k))

    strategy = NTKDFL(topology=Topology("complete"), **OPTIONS | {"min_train_nodes": clients})
    grid = Recording(client, clients=clients)
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=2)
    x, y = examples(0)
    rows_ = jacobian(network(), x)
    upload = JacobianUpload(rows_, torch.zeros(EXAMPLES, CLASSES), one_hot(y, CLASSES))
    known = {"P": P, "d": d, "U": size(upload.to_arrays())}
    up, down = (evaluated(costs[row], **known) for row in ("up", "down"))
    first = evaluated(costs["down, until a reply of it has been accepted, besides"], P=P)
    weights = 4 * P + 8
    assert sum(grid.up["train"]) == clients * (weights + 2 * up)
    assert sum(grid.down["train"]) == clients * (first + 2 * down)
    assert grid.up["evaluate.model"] == [evaluated(costs[MODEL_ROW], P=P)] * 6
    both = NTKDFL(
        topology=Topology("complete"), collect_both=True, **OPTIONS | {"min_train_nodes": clients}
    )
    grid = Recording(client, clients=clients)
    both.start(grid, ArrayRecord(network().state_dict()), num_rounds=1)
    expected = (costs[row] for row in (MODEL_ROW, "up, besides, with `collect_both`"))
    assert grid.up["evaluate.model"] == [sum(evaluated(f, P=P) for f in expected)] * 3


def test_what_ntk_dfl_sends_where_one_client_of_a_cluster_evolves():
    """A cluster of three, two rounds: a hub and two others, whichever they are in each."""
    costs, d, clients = rows("ntk_dfl", 1), 2, 3

    def client(context):
        k = context.node_config["partition-id"]
        return NTKDFLClient(network(), *examples(k), seed=(0, k))

    own = OPTIONS | {"min_train_nodes": clients, "evolve_once": True}
    strategy = NTKDFL(topology=Topology("clustered", degree=d), **own)
    grid = Recording(client, clients=clients)
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=2)
    x, y = examples(0)
    upload = JacobianUpload(
        jacobian(network(), x), torch.zeros(EXAMPLES, CLASSES), one_hot(y, CLASSES)
    )
    known = {"P": P, "d": d, "U": size(upload.to_arrays())}
    found = {
        way: [
            evaluated(costs[f"with `evolve-once`, {way}, {who}"], **known)
            for who in ("a hub", "another")
        ]
        for way in ("up", "down")
    }
    up, down = (found[way][0] + d * found[way][1] for way in ("up", "down"))
    first = evaluated(costs["down, until a reply of it has been accepted, besides"], P=P)
    assert sum(grid.up["train"]) == clients * (4 * P + 8) + 2 * up
    assert sum(grid.down["train"]) == clients * first + 2 * down


MODEL_ROW = "up, its model, where a round evaluates"
RELAYED = {
    "dfedavg": (DFedAvg, DFedAvgClient),
    "dfedsam": (DFedSAM, DFedSAMClient),
    "d_psgd": (DPSGD, DPSGDClient),
    "dispfl": (DisPFL, DisPFLClient),
}


@pytest.mark.parametrize("page", sorted(RELAYED))
def test_what_a_decentralised_baseline_sends_and_keeps(page, tmp_path):
    """Three clients, each the neighbour of both others; three rounds, each with an evaluation.

    A file has 128 bytes before each array, and an archive up to 300 more for each.
    """
    (make, kind), d, clients = RELAYED[page], 2, 3

    def client(context):
        k = context.node_config["partition-id"]
        return kind(network(), *examples(k), cache=tmp_path, seed=(0, k))

    strategy = make(topology=Topology("complete"), **OPTIONS | {"min_train_nodes": clients})
    grid = Recording(client, clients=clients)
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=3)
    costs = rows(page, 1)
    masked = sum(p.numel() for p in network().parameters() if p.dim() > 1)
    vectors = sum(p.numel() for p in network().parameters()) - masked
    known = {"P": P, "d": d, "P_m": masked, "K": round(0.5 * P) - vectors}
    up, down = (evaluated(costs[row], **known) for row in ("up", "down"))
    (first,) = (f for row, f in costs.items() if row.startswith("down, until"))
    first = evaluated(first, **known)
    (model,) = (f for row, f in costs.items() if row.startswith("up, its model"))
    if page in ("dfedavg", "dfedsam"):
        sent, got = [up] * 9, [first] * 3 + [down] * 9
    else:  # one exchange more in round 1, of the first weights
        sent, got = [up] * 12, [first] * 3 + [down] * 9
    rounded = 5 if page == "dispfl" else 0  # bits to bytes, and K to a whole number
    assert np.abs(np.array(grid.up["train"]) - sent).max() <= rounded
    assert np.abs(np.array(grid.down["train"]) - got).max() <= d * rounded
    assert grid.up["evaluate.model"] == [evaluated(model, **known)] * 9
    assert not grid.down["evaluate.model"]
    kept = {row: f for row, f in costs.items() if row.startswith(("its weights", "its masks"))}
    kept |= {row: f for row, f in costs.items() if row.startswith("what it trained")}
    folders = {"its weights": "client-?", "its masks": "client-?-masks",
               "what it trained": "client-?-within-round"}  # fmt: skip
    for row, formula in kept.items():
        (pattern,) = (p for name, p in folders.items() if row.startswith(name))
        files = sorted(tmp_path.glob(f"*{pattern}/round-*.npz"))
        assert len(files) == 9 + 3 * row.startswith("its weights")
        for path in files:
            with np.load(path) as found:
                count = len(found.files)
            assert 0 <= path.stat().st_size - evaluated(formula, **known) <= 430 * count
