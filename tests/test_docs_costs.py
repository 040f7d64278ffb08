"""The formulas of docs/costs.py, compared with the arrays that small federations send and keep."""

import functools
import importlib.util
import math
import sys
from collections import defaultdict

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedntk import clients as halves
from fedntk import strategies
from fedntk.clients import TCTClient, client_app
from fedntk.ntk import JacobianUpload, compress, jacobian, one_hot
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import CPNTKFL, NTKDFL, NTKFL, TCT, FedBE, FedEnsemble, Topology

from .conftest import ROOT

spec = importlib.util.spec_from_file_location("costs", ROOT / "docs" / "costs.py")
costs = sys.modules["costs"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(costs)

EXAMPLES, CLASSES, INPUTS, HIDDEN = 60, 3, 20, 11
FUNCTIONS = {"ceil": math.ceil, "log2": math.log2, "min": min}


def network():
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def numbers(*prefixes, floating=False):
    """Bytes / 4 of the arrays with these prefixes: BatchNorm's counter counts as two numbers."""
    return sum(
        tensor.nbytes // 4
        for name, tensor in network().state_dict().items()
        if name.startswith(prefixes or "") and (tensor.is_floating_point() or not floating)
    )


KNOWN = {"P": numbers(), "n": EXAMPLES, "C": CLASSES, "C_k": CLASSES - 1, "p": HIDDEN}


def value(formula, **symbols):
    return eval(formula, {"__builtins__": {}}, FUNCTIONS | KNOWN | symbols)  # noqa: S307


def examples(partition=0, num_classes=CLASSES):
    generator = torch.Generator().manual_seed(partition)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator)
    return x, torch.arange(EXAMPLES) % num_classes


class Recording(LocalGrid):
    """Keeps the arrays' bytes of each message and reply that has any, by kind."""

    def __init__(self, client_fn, num_clients):
        super().__init__(client_app(client_fn), num_clients, {})
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


def federated(strategy, client, rounds=2, num_clients=2):
    """Run a federation; `client` makes that of a partition."""
    grid = Recording(lambda context: client(int(context.node_config["partition-id"])), num_clients)
    result = strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)
    return grid, result


def options(num_clients=2):
    """Have all clients take part."""
    return {"min_available_nodes": num_clients, "min_train_nodes": num_clients}


# page -> a strategy, and its client's class; each client lacks a class
STRATEGIES = {
    "ntk_fl": (lambda: NTKFL(learning_rate=0.1, steps=(10, 20), **options()), "NTKFLClient"),
    "fed_be": (lambda: FedBE(num_samples=3, **options()), "SGDClient"),
    "fed_ensemble": (lambda: FedEnsemble(num_models=3, num_strata=1, **options()), "SGDClient"),
}
for page, kind, own in (
    ("fedavg", "SeededFedAvg", {}), ("scaffold", "SCAFFOLD", {}), ("ditto", "Ditto", {}),
    ("local_training", "LocalTraining", {}), ("afl", "AFL", {"network": network()}),
    ("fed3r", "Fed3R", {"network": network()}), ("fed_ncm", "FedNCM", {"network": network()}),
    ("fed_bn", "FedBN", {"network": network()}), ("fed_per", "FedPer", {"network": network()}),
    ("fed_proto", "FedProto", {"network": network()}),
    ("weighted_fedavg", "WeightedFedAvg", {"network": network(), "personal_batch_norm": True}),
):  # fmt: skip
    made = getattr(strategies, kind)
    STRATEGIES[page] = functools.partial(made, **own, **options()), made.client
ONCE = ("afl", "fed3r", "fed_ncm")  # trained in the first round only


@pytest.mark.parametrize("page", STRATEGIES)
def test_what_a_client_of_a_server_sends_and_keeps(page, tmp_path):
    """Two rounds of two clients, each of which is accepted in the first."""
    make, name = STRATEGIES[page]
    kind = getattr(halves, name)
    own = {"cache": tmp_path} if "kept" in costs.COSTS[page] else {}

    def client(partition):
        made = kind(network(), *examples(partition, CLASSES - 1), **own)
        return halves.FedEnsembleClient(made) if page == "fed_ensemble" else made

    grid, _ = federated(make(), client)
    symbols = {
        "P_b": numbers("1."), "P_h": numbers("3."), "P_f": numbers(floating=True), "K": 3, "T": 3
    }  # fmt: skip
    row = dict(costs.COSTS[page])
    if page == "ntk_fl":  # whose candidates travel as queries
        (candidates,) = (f for key, f in row.items() if key.startswith("down, candidates"))
        assert set(grid.down["query"]) == {value(candidates, **symbols)}
        row["up"] = f"{row['up, outputs and targets']} + {jacobian_bytes()}"
    down, up, evaluate = (value(row[key], **symbols) for key in ("down", "up", "evaluate"))
    first = value(row.get("first", "0"), **symbols)
    times = 2 if page in ONCE else 4
    expected = [down + first] * 2 + [down] * (times - 2)
    assert grid.down["train"] == [each for each in expected if each]
    assert grid.up["train"] == [up] * times * bool(up)
    assert set(grid.down["evaluate"]) <= {evaluate}
    files = sorted(tmp_path.glob("*/round-*.npz"))
    assert len(files) == (4 if own else 0)
    for path in files:
        assert 0 <= path.stat().st_size - value(row["kept"], **symbols) <= heads(path)


def heads(path):
    """Of an array 128 bytes, and up to 300 for it in the archive."""
    with np.load(path) as kept:
        return 430 * len(kept.files)


def jacobian_bytes():
    """By the formulas: linear layers in factors, BatchNorm's two parameters dense."""
    rows = costs.COSTS["ntk_fl"]
    total = 2 * value(rows["up, a dense parameter"], d=HIDDEN)
    for width_in, width_out in ((INPUTS, HIDDEN), (HIDDEN, CLASSES)):
        total += value(rows["up, a layer in factors"], A=width_in, S=1, d_out=width_out)
    return total


def tensor_bytes(shape, groups, sparsity, bits):
    whole, ranges, positions, values = (
        next(f for key, f in costs.COSTS["cp_ntk_fl"].items() if key.startswith(start))
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
@pytest.mark.parametrize("bits", [1, 6, 16, 32])
def test_the_bytes_of_a_compressed_tensor(bits, by_row):
    """Positions are a bitmap or indices, whichever is smaller."""
    tensor = np.random.default_rng(0).standard_normal((9, 5, 41)).astype(np.float32)
    for sparsity in (0.0, 0.5, 0.9, 0.95, 0.99):
        code = compress(tensor, sparsity=sparsity, bits=bits, by_row=by_row)
        assert code.nbytes == tensor_bytes(tensor.shape, 9 if by_row else 1, sparsity, bits)


def test_what_cp_ntk_fl_sends():
    rows, tools = costs.COSTS["cp_ntk_fl"], {"sparsity": 0.5, "bits": 6}
    strategy = CPNTKFL(learning_rate=0.1, steps=[10], **tools, **options())
    client = lambda k: halves.CPNTKFLClient(network(), *examples(k), **tools)  # noqa: E731
    grid, _ = federated(strategy, client, rounds=1)
    expected = value(rows["outputs"]) + value(rows["labels, up to 256 classes"])
    for block in jacobian(network().eval(), examples()[0]).blocks:
        expected += sum(tensor_bytes(tuple(a.shape), 1, 0.5, 6) for a in block.arrays)
    assert grid.up["train"] == [expected] * 2


def tct(tmp_path, rounds, num_clients=2, client_options=None, **own):
    """Run TCT; return what travelled, with p besides the other symbols."""
    strategy = TCT(network=network(), **options(num_clients) | {"fraction_evaluate": 0.0} | own)

    def client(k):
        cache = tmp_path / "cache"
        return TCTClient(
            network(), *examples(k), cache=cache, seed=(0, k), **client_options or {}
        )  # fmt: skip

    grid, _ = federated(strategy, client, rounds, num_clients)

    def of(row):
        """Bytes of a row of the table, down and up."""
        formulas = costs.TCT[row]
        return tuple(value(f, p=strategy.shape[0], K=num_clients) for f in formulas)

    return grid, of


def test_what_tct_sends_in_its_stages(tmp_path):
    """Two clients. They have the normaliser from the evaluation before stage 2, or get it then."""
    stages = {"bootstrap": FedAvg(fraction_evaluate=0.0), "bootstrap_rounds": 1}
    grid, of = tct(
        tmp_path, 4, **stages, learning_rate=1e-3, local_steps=3, fraction_evaluate=1.0
    )  # fmt: skip
    once, each = of("its first round of stage 2, besides")[0], of(costs.STAGE_2)
    for i, row in enumerate((costs.STAGE_1, costs.MOMENTS)):
        down, up = of(row)
        assert grid.down["train"][2 * i : 2 * i + 2] == [down] * 2
        assert grid.up["train"][2 * i : 2 * i + 2] == [up] * 2
    assert set(grid.down["train"][4:6]) <= {each[0], each[0] + once}
    assert grid.down["train"][6:] == [each[0]] * 2
    assert grid.up["train"][4:] == [each[1]] * 4
    assert grid.down["evaluate"][:2] == [of("an evaluation before stage 2")[0]] * 2
    assert grid.down["evaluate"][-2:] == [of("an evaluation in stage 2")[0]] * 2
    grid, of = tct(tmp_path, 2, **stages, solve="server")
    down, up = of('features, `solve = "server"`')
    assert (grid.down["train"][2:], grid.up["train"][2:]) == ([down] * 2, [up] * 2)


def test_c_travels_after_a_round_that_not_all_took_part_in(tmp_path):
    part = {"normalise": False, "fraction_train": 0.5, "min_train_nodes": 2}
    grid, of = tct(tmp_path, 3, 4, learning_rate=1e-3, local_steps=3, **part)
    network_and_normaliser = 4 * KNOWN["P"] + of("its first round of stage 2, besides")[0]
    each = of(costs.STAGE_2)[0]
    control = of("a round after one that not all took part in, besides")[0]
    assert set(grid.down["train"][:2]) == {each + network_and_normaliser}  # c is zero
    later = {each + control, each + control + network_and_normaliser}
    assert set(grid.down["train"][2:]) <= later


SHARE = {"auto_ridge": True, "validation_share": 0.2}
STATISTICS = {
    costs.SUMS: {},
    "sums, `bits` = 2 to 8": {"bits": 8},
    "sums, `balanced`": {"balanced": True},
    "sums, `validation-share`": SHARE,
    "sums, `validation-share` and `bits` = 2 to 8": SHARE | {"bits": 8},
}


@pytest.mark.parametrize("row", STATISTICS)
def test_what_tct_sends_for_sums(row, tmp_path):
    """Two clients, with an exchange of counts before where classes are to weigh the same."""
    grid, of = tct(tmp_path, 3, solve="statistics", validation=examples(7), **STATISTICS[row])
    down, up = of(row)
    nothing, counts = of("the counts before, `balanced`")
    assert nothing == 0
    assert grid.up["train"] == [counts] * 2 * ("balanced" in row) + [up] * 2
    assert grid.down["train"] == [down] * 2


def test_what_tct_sends_under_secure_aggregation(tmp_path):
    """Four clients, who all stay: keys, shares, masked sums, shares."""
    grid, of = tct(
        tmp_path, 1, 4, {"only_masked": True}, solve="statistics", bits=8,
        secure_aggregation=True, validation=examples(7),
    )  # fmt: skip
    row = "sums, `bits` = 2 to 8, `secure-aggregation` of K clients"
    assert (sum(grid.down["train"]), sum(grid.up["train"])) == tuple(4 * b for b in of(row))


def decentralised(kind, name, rounds, kept=None, topology=None, **own):
    """Run three clients, each the neighbour of both others."""
    strategy = kind(topology=topology or Topology("complete"), **own, **options(3))
    cache = {"cache": kept} if kept else {}

    def client(k):
        return getattr(halves, name)(network(), *examples(k), **cache, seed=(0, k))

    return federated(strategy, client, rounds, 3)[0]


@pytest.mark.parametrize("once", [False, True])
def test_what_ntk_dfl_sends(once):
    """Two rounds with an evaluation each; with `evolve_once` a cluster of a hub and two others."""
    rows = costs.COSTS["ntk_dfl"]
    x, y = examples()
    upload = JacobianUpload(
        jacobian(network().eval(), x), torch.zeros(EXAMPLES, CLASSES), one_hot(y, CLASSES)
    )
    row = {key: value(f, d=2, U=size(upload.to_arrays().values())) for key, f in rows.items()}
    own = {"topology": Topology("clustered", degree=2), "evolve_once": True} if once else {}
    grid = decentralised(NTKDFL, "NTKDFLClient", 2, **own)
    weights = 4 * KNOWN["P"] + 8  # once more, in the first round
    for way, sent, more in (("up", grid.up, weights), ("down", grid.down, row["first"])):
        hub, other = (row[f"`evolve-once`: {way}, {who}"] for who in ("a hub", "another"))
        a_round = hub + 2 * other if once else 3 * row[way]
        assert sum(sent["train"]) == 3 * more + 2 * a_round
    assert grid.up["evaluate.model"] == [row["model"]] * 6
    if not once:
        grid = decentralised(NTKDFL, "NTKDFLClient", 1, collect_both=True)
        both = row["model"] + row["up besides, with `collect_both`"]
        assert grid.up["evaluate.model"] == [both] * 3


RELAYED = {"dfedavg": "DFedAvg", "dfedsam": "DFedSAM", "d_psgd": "DPSGD", "dispfl": "DisPFL"}


@pytest.mark.parametrize("page", RELAYED)
def test_what_a_decentralised_baseline_sends_and_keeps(page, tmp_path):
    """Three rounds, each with an evaluation."""
    kind = getattr(strategies, RELAYED[page])
    grid = decentralised(kind, kind.client, 3, tmp_path)
    sizes = [p.numel() for p in network().parameters() if p.dim() > 1]
    vectors = sum(p.numel() for p in network().parameters()) - sum(sizes)
    in_masks = round(0.5 * (sum(sizes) + vectors)) - vectors  # half of the parameters in all
    row = {
        key: value(formula, d=2, P_m=sum(sizes), K=in_masks)
        for key, formula in costs.COSTS[page].items()
    }
    before = page in ("d_psgd", "dispfl")  # one exchange more in round 1, of the first weights
    rounded = 5 if page == "dispfl" else 0  # bits to bytes, and K to a whole number
    sent, got = [row["up"]] * (12 if before else 9), [row["first"]] * 3 + [row["down"]] * 9
    assert np.abs(np.array(grid.up["train"]) - sent).max() <= rounded
    assert np.abs(np.array(grid.down["train"]) - got).max() <= 2 * rounded
    assert grid.up["evaluate.model"] == [row["model"]] * 9
    assert not grid.down["evaluate.model"]
    folders = {"kept": "client-?", "what it trained": "client-?-weights-within-round"}
    for start, pattern in folders.items():
        for key in (key for key in row if key.startswith(start)):
            files = sorted(tmp_path.glob(f"*{pattern}/round-*.npz"))
            assert len(files) == 9 + 3 * (start == "kept")
            for path in files:  # those of round 0 have the first weights
                expected = row["first" if path.stem == "round-00000000" else key]
                assert 0 <= path.stat().st_size - expected <= heads(path)
