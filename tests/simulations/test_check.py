"""The contract finds each fault of a method by its own check, and names the cure."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from typer.testing import CliRunner

from fedntk.clients import SGDClient
from fedntk.ntk.averages import weighted_mean
from fedntk.ntk.options import state
from fedntk.simulations import ConfigError, Method, check_method, make_fixture
from fedntk.simulations.cli import app
from fedntk.simulations.methods import own_methods
from fedntk.strategies import SeededFedAvg, Update
from fedntk.strategies.core.averaging import cast_like, named_arrays

from .networks import normalised


class ServerMomentum(SeededFedAvg):
    """Keeps half of its last step, in a declared state."""

    step: dict[str, np.ndarray] = state(dict)

    def train_round(self, r):
        update = yield from super().train_round(r)
        if update.arrays is None:
            return update
        model, new = r.model, named_arrays(update.arrays)
        self.step = {n: new[n] - a + 0.5 * self.step.get(n, 0) for n, a in model.items()}
        arrays = cast_like({n: a + self.step[n] for n, a in model.items()}, model)
        return Update(update.uploads, arrays)


class Forgetful(ServerMomentum):
    """Keeps it beside the state."""

    kept = None

    def train_round(self, r):
        self.step = self.kept or {}
        update = yield from super().train_round(r)
        self.kept, self.step = self.step, {}
        return update


class Late(SeededFedAvg):
    """Keeps what it uses from round 5 on in some place, as an object of its own."""

    place = "attribute"
    lists = []  # noqa: RUF012 - of all objects

    def train_round(self, r):
        update = yield from super().train_round(r)
        if self.place == "attribute":
            self._seen = [*vars(self).get("_seen", []), {"round": np.float64(r.number)}]
        elif self.place == "object":
            self.helper = vars(self).get("helper") or Helper()
            self.helper.seen[r.number] = update.arrays
        elif self.place == "previous":  # is the same again after any further round
            self.before = r.number, named_arrays(update.arrays)
        elif self.place == "generator":
            self.generator = vars(self).get("generator") or np.random.default_rng(0)
            self.generator.random()
        elif self.place == "class":
            type(self).lists.append(r.number)
        elif self.place == "module":
            MODULE["last"] = MODULE.get("last", 0) + 1
        elif self.place == "declared badly":
            self.pairs = {**self.pairs, r.number: (1, 2)}
        if r.number >= 5:
            raise AssertionError("never in a check of 3 rounds")
        return update

    pairs: dict[int, tuple[int, int]] = state(dict)


MODULE: dict[str, int] = {}


class Helper:
    def __init__(self):
        self.seen = {}


class Cached(SeededFedAvg):
    """Makes something anew, and says so."""

    cached: float = state(float, saved=False)

    def train_round(self, r):
        self.cached = r.number
        return (yield from super().train_round(r))


class Unseeded(SGDClient):
    def step_train(self, parameters, config):
        arrays, *more = super().step_train(parameters, config)
        return [array + np.random.standard_normal() for array in arrays], *more  # noqa: NPY002


class AsTheyCome(SeededFedAvg):
    """Adds up in the order of arrival."""

    def train_round(self, r):
        came = []

        def parse(reply):
            came.append(reply.node)
            return r.weights(reply)

        uploads = yield from r.ask(parse)
        if not self.enough(uploads):
            return Update(uploads)
        ordered = sorted(uploads, key=lambda upload: came.index(upload.node))
        mean = weighted_mean([upload.value for upload in ordered], [1] * len(ordered))
        return Update(uploads, cast_like(mean, r.model))


class Trusting(SeededFedAvg):
    """Reads arrays that nothing has checked."""

    def train_round(self, r):
        def parse(reply):
            (arrays,) = reply.message.content.array_records.values()
            return {name: arrays[name].numpy() for name in r.model}

        uploads = yield from r.ask(parse)
        if not self.enough(uploads):
            return Update(uploads)
        return Update(uploads, cast_like(self.screening.mean(uploads, r.model), r.model))


class Wide(SeededFedAvg):
    """Returns float64."""

    def train_round(self, r):
        update = yield from super().train_round(r)
        arrays = named_arrays(update.arrays or {})
        wide = {name: Array(array.astype(np.float64)) for name, array in arrays.items()}
        return Update(update.uploads, update.arrays and ArrayRecord(wide))


@pytest.mark.parametrize(
    ("method", "failed", "cure"),
    [
        (Forgetful, "a resumed run gives the same bits", "as a field: name: type = state("),
        (AsTheyCome, "the order of replies changes no bit", "sorted by client"),
        (Trusting, "no reply of a client ends a run", "Use only what r.ask returns"),
    ],
)
def test_each_fault_is_found_by_its_own_check(method, failed, cure):
    found = check_method(method, rounds=2)
    assert found[~found.passed]["check"].tolist() == [failed]
    assert cure in "".join(found["what to do"])


@pytest.mark.parametrize(
    "place", ["attribute", "object", "previous", "generator", "class", "module", "declared badly"]
)
def test_state_that_matters_only_in_later_rounds_is_found(place):
    found = check_method(type("Late", (Late,), {"place": place, "__module__": __name__}))
    assert found[~found.passed]["check"].tolist() == ["a resumed run gives the same bits"]
    assert "name: type = state(" in "".join(found["what to do"])


def test_what_is_made_anew_is_no_fault_if_it_is_declared():
    assert check_method(Cached).passed.all()


def test_an_unseeded_client_is_one_fault_with_its_cure():
    found = check_method(Method(SeededFedAvg, Unseeded, name="unseeded"))
    assert found[~found.passed]["check"].tolist() == ["one seed gives the same bits"]
    assert "in clients (seed, round, partition)" in "".join(found["what to do"])
    assert (found["what to do"] == "not judged before one seed gives the same bits").sum() == 2


check = make_fixture("tct", tct={"bootstrap_rounds": 1, "num_features": 50, "local_steps": 10})


def test_checks_are_a_fixture_for_pytest(check):
    check()


NEEDS = {
    "fed-bn": {"model": normalised},
    "tct": {"tct": {"bootstrap_rounds": 0}},
    "glm": {"model": "linear"},
    "one-exchange": {"validation_examples": 20},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", own_methods())
def test_every_method_keeps_the_contract(method):
    found = check_method(method, **NEEDS.get(method, {}))
    assert found[~found.passed].to_dict("records") == []


def test_the_command_says_what_failed_and_settings_are_not_a_fault(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["check", f"{__name__}:Wide", "--set=rounds=2"])
    assert done.exit_code == 1
    assert "became 1.weight (float64, (100, 64)). Return Update(uploads, " in done.output
    assert done.output.count("passed") == 5
    options = "--set=momentum=0.5", "--set=rounds=2"
    good = CliRunner().invoke(app, ["check", f"{__name__}:ServerMomentum", *options])
    assert (good.exit_code, good.output.count("passed")) == (0, 6)
    with pytest.raises(ConfigError, match="degree: expected less than clients-per-round"):
        check_method("d-psgd", clients_per_round=5)
