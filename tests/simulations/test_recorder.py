"""What clients name as they like never becomes a column unasked, and never ends a run."""

from flwr.app import MetricRecord

from fedntk.clients import SGDClient
from fedntk.simulations import run
from fedntk.simulations.engine.client_app import app
from fedntk.simulations.engine.recorder import LONGEST, OTHERS
from fedntk.simulations.engine.server_app import serve
from fedntk.simulations.report.results import read_run

from .outcomes import bits, grid_of, measured
from .settings import FEDAVG

SMALL = FEDAVG.replace(num_clients=6, clients_per_evaluation=3, rounds=3)


def naming(monkeypatch, more):
    """Let all clients add metrics to their replies; `more` is given the kind and the round."""
    for name in ("fit", "evaluate"):
        own = getattr(SGDClient, name)

        def changed(self, parameters, config, own=own, name=name):
            *result, metrics = own(self, parameters, config)
            return *result, more(name, int(config["server-round"])) | metrics

        monkeypatch.setattr(SGDClient, name, changed)


def test_any_name_of_a_metric_is_recorded_beside_what_the_server_measures(tmp_path, monkeypatch):
    """Except one that no file can hold."""
    plain = run(SMALL, out=tmp_path / "plain", progress=False)
    names = ["run", "round", "level_0", "client-loss-mean", "", "\U0001f600", "x" * LONGEST]
    odd = {
        "fit": ["accuracy", "loss", "seconds", "\ud800", "x" * (LONGEST + 1)],
        "evaluate": ["a\udfff"],
    }
    naming(monkeypatch, lambda kind, _: dict.fromkeys(names + odd[kind], -7.0))
    result = run(SMALL, out=tmp_path / "named", progress=False)
    for name in names:
        assert result.clients[result.clients.metric == name].value.tolist() == [-7.0] * 9
    for metric in ("accuracy", "loss", "client-accuracy-mean", "client-loss-mean"):
        assert result.curve(metric).tolist() == plain.curve(metric).tolist()
    assert (result.curve("seconds") > 0).all()
    unusual = {name for name in result.rounds.metric if name > "\u00ff" or name[:2] == "xx"}
    assert unusual == {"\U0001f600", "x" * LONGEST}


def test_thousands_of_new_names_a_round_leave_files_small(tmp_path, monkeypatch):
    """500 a round from every client: the first 32 are recorded, also of a run that goes on."""

    def names(_, server_round):
        count = 24 if server_round < 3 else 500
        return {f"name {server_round} {i}": float(i) for i in range(count)}

    naming(monkeypatch, names)
    whole = run(SMALL, rounds=4, out=tmp_path / "whole", progress=False)
    for frame in (whole.rounds, whole.clients):
        assert len({name for name in frame.metric if name.startswith("name")}) == OTHERS
    for rounds in (1, 3, 4):
        parts = run(SMALL, rounds=rounds, out=tmp_path / "parts", progress=False)
    assert parts.clients.equals(whole.clients)
    assert measured(parts).equals(measured(whole))
    network = (parts.folder / "model.safetensors").stat().st_size
    (checkpoint,) = (parts.folder / "checkpoints").glob("*.safetensors")
    assert checkpoint.stat().st_size < 2 * network + 40_000
    assert (parts.folder / "rounds.jsonl").stat().st_size < 4 * 6_000


def test_nodes_with_ids_of_64_bits_are_recorded(tmp_path):
    """Without a partition of its own a client goes by its node's id, or by a placeholder."""

    def answer(message, context):
        partition, reply = context.node_config["partition-id"], app(message, context)
        if message.metadata.message_type == "query.partition":
            if partition in (2, 3):
                raise RuntimeError("not yet")
            reply.content["metrics"] = MetricRecord({"partition-id": partition or 1})
        return reply

    config = SMALL.replace(out=tmp_path, clients_per_evaluation=6)
    grid = grid_of(config)
    grid.app = answer
    grid.contexts = {2**64 - node: context for node, context in grid.contexts.items()}
    serve(grid, config)
    # 2^64 - 3 and 2^64 - 4 are -3 and -4 in 64 bits with a sign; -1 - (2^64 - 1) is 0
    assert set(read_run(tmp_path).clients.partition) == {0, 1, 4, 5, -3, -4}


def test_rounds_between_evaluations_change_what_is_measured_and_nothing_else(tmp_path):
    """Every second round, and the last one; targets go by these."""
    base = SMALL.replace(rounds=5, learning_rate=0.3, local_epochs=2, targets="0.2", patience=3)
    every, some = (
        run(base, evaluate_every=n, out=tmp_path / str(n), progress=False) for n in (1, 2)
    )
    for metric, measured_in in (("accuracy", [0, 2, 4, 5]), ("client-loss-worst", [2, 4, 5])):
        assert len(every.curve(metric)) == 6 - (metric != "accuracy")
        assert some.curve(metric).equals(every.curve(metric)[measured_in])
    for metric in ("bytes-up", "train-loss", "model-updated"):
        assert some.curve(metric).tolist() == every.curve(metric).tolist()
    assert sorted(some.clients["round"].unique()) == [2, 4, 5]
    assert bits(some.folder) == bits(every.folder)
    reached = some.to_target(0.2)
    assert reached["round"] in (2, 4, 5)
    assert reached["bytes-up"] == every.curve("bytes-up").loc[: int(reached["round"])].sum()
