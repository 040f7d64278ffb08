"""Runs with real targets: when they are taken for such, units, metrics, refusals."""

import functools

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import mean_absolute_error, r2_score

from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.simulations import (
    Config,
    ConfigError,
    OwnData,
    assess,
    intervals,
    load_predictor,
    load_results,
    run,
    tune,
    unlearn,
    write_report,
)
from fedntk.simulations.config.metrics import is_lower_better
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split
from fedntk.simulations.methods import own_methods
from fedntk.simulations.report.figures import accuracy_curves
from fedntk.simulations.report.report import final_table

from ..conftest import refused

RNG = np.random.default_rng(0)
N = 240
COLUMNS = list("abc")
X = RNG.normal(size=(N, 3)) * [1, 10, 1000] + [0, 5, 1e4]
Y = X @ np.array([[3.0, 0.1], [0.2, 0.0], [0.001, 0.002]]) + 0.1 * RNG.normal(size=(N, 2))
FRAME = pd.DataFrame(X, columns=COLUMNS).assign(
    price=100 * Y[:, 0] + 1e4, size=Y[:, 1], site=np.arange(N) % 6
)
TARGETS = ["price", "size"]


def linear(shape, outputs):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0], outputs))


@functools.cache
def finished(folder):
    options = {"num_clients": 6, "rounds": 1, "validation_examples": 40, "test_seed": 1}
    sums = {"bits": 32, "auto_ridge": False, "validation_share": 0.0, "ridge": 1e-6}
    data = OwnData(FRAME, target="price, size", client_column="site")
    own = {"one_exchange": {"sums": sums}}
    config = Config(method="one-exchange", **options, **own)
    return run(config, data=data, model=linear, out=folder, progress=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("run"))


def test_the_run_is_the_pooled_regression_in_the_targets_units(result):
    """Against scikit-learn's on the clients' rows, in standard deviations of the targets.

    The ridge of 1e-6 shrinks coefficients by 4e-6, for 4 features of mean square 1; inputs and the
    layer are rounded to float32. Columns are correlated by chance, which may double both.
    """
    data = load_data(result.config)
    rows = np.concatenate(load_split(result.config, data).clients)
    predictor = load_predictor(result)
    f = predictor.predict(FRAME)
    assert f.dtype == torch.float64
    pooled = LinearRegression().fit(data.x_train[rows], data.y_train[rows])
    expected = pooled.predict(FRAME[COLUMNS].to_numpy())
    assert (np.abs(f.numpy() - expected) / FRAME[TARGETS].std().to_numpy()).max() < 4e-5
    f_test = predictor.predict(data.x_test).numpy()
    assert result.summary["r2"] == pytest.approx(r2_score(data.y_test, f_test), rel=1e-6)
    mae = mean_absolute_error(data.y_test, f_test)
    assert result.summary["mae"] == pytest.approx(mae, rel=1e-6)
    assert result.summary["headline"] == "r2"
    assert predictor.inputs.classes == ("price", "size")


def test_what_is_recorded_has_no_accuracy(result):
    names = set(result.rounds.metric)
    assert {"r2", "mae", "loss", "client-r2-mean", "client-mae-worst"} <= names
    assert not [name for name in names if "accuracy" in name]
    assert result.curve().name == "r2"
    table = final_table([result])
    assert table["last R^2 (%)"][0].startswith(f"{100 * result.summary['r2']:.1f}")
    assert "last MAE" in table
    assert load_results([result]).summary()["mean"][0] == pytest.approx(result.summary["r2"])


def test_a_target_line_is_in_the_metrics_unit(result):
    axes = accuracy_curves(result.rounds, metric="r2", target=0.5).axes[0]
    assert [0.5, 0.5] in [list(line.get_ydata()) for line in axes.lines]
    assert "0.5" in [text.get_text() for text in axes.texts]


def test_settings_follow_from_the_task(result):
    config = result.config
    assert (config.task, config.loss, config.monitor) == ("regression", "mse", "r2")
    assert config.partition == "natural"
    assert Config(task="regression").partition == "iid"


def test_intervals_hold_their_share_of_test_examples(result):
    """48 test examples: within the range of 95 % of draws, which the seeds fix."""
    found = intervals(result, 0.8)
    assert found.table.target.tolist() == TARGETS
    table = found.table
    assert (table.test_coverage >= table.expected_low).all()
    assert (table.test_coverage <= table.expected_high).all()
    refused("at least 99", intervals, result, 0.99, error=ConfigError)
    refused("use intervals", assess, result, error=ConfigError)
    refused("strategy.without", unlearn, result, [0], error=ConfigError)


def real(n=60):
    return RNG.normal(size=n)


@pytest.mark.parametrize(
    ("y", "task"),
    [
        (real(), "regression"),
        (real().astype(np.float32), "regression"),
        (real().tolist(), "regression"),
        (real()[:, None], "regression"),
        (np.stack([real(), real()], 1), "regression"),
        (torch.from_numpy(real()), "regression"),
        (np.arange(60) % 3, "auto"),
        (np.arange(60) % 3 + 0.0, "auto"),
        (np.array(["a", "b"] * 30), "auto"),
    ],
)
def test_the_task_is_inferred_only_where_there_is_no_doubt(y, task):
    data = OwnData((np.eye(60), y)).read()
    assert data.keep().get("task", "auto") == task
    assert data.has_real_targets == (task == "regression")


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.arange(60) % 4 / 2, "set task = regression"),  # few numbers: grades, or classes
        (np.arange(60), "set task = regression"),  # whole numbers: amounts, or names
        (np.full((60, 4), 0.25) + np.stack([real(), -real()] * 2, 1) * 0, "several"),  # shares
        (np.where(np.arange(60) == 7, np.nan, real()), "1 of 60 targets are NaN"),
        (np.where(np.arange(60) == 7, np.inf, real()), "1 of 60 targets are NaN or infinite"),
    ],
)
def test_targets_in_doubt_are_refused_with_the_cure(y, message):
    refused(message, OwnData((np.eye(60), y)).read, error=ConfigError)


@pytest.mark.parametrize("y", [np.arange(60), np.arange(60) % 2, np.eye(60).repeat(2, 0)[:60, :3]])
def test_a_stated_task_takes_any_numbers(y):
    assert OwnData((np.eye(60), y), task="regression").read().has_real_targets


def test_a_stated_task_refuses_what_are_no_numbers():
    words = OwnData((np.eye(60), ["a", "b"] * 30), task="regression")
    refused("expected numbers as targets", words.read, error=ConfigError)
    one = OwnData((np.eye(60), np.ones(60)), task="regression")
    refused("expected numbers that differ", one.read, error=ConfigError)
    classes = OwnData((np.eye(60), real()), task="classification")
    refused("expected whole numbers", classes.read, error=ConfigError)
    test = OwnData((np.eye(60), real()), test=(np.eye(60), np.stack([real(), real()], 1)))
    refused("expected 1 targets, got 2", test.read, error=ConfigError)


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_files_have_real_targets_in_all_forms(kind, tmp_path):
    """A file's run has the targets of the frame, also of two columns, and infers the task."""
    expected = OwnData(FRAME, target="price,size", client_column="site").read()
    path = tmp_path / f"data.{kind}"
    if kind == "npz":
        expected.write(path)
    else:
        getattr(FRAME, f"to_{kind}")(path, index=False)
    config = Config(
        dataset=f"{kind}:{path}", target="price, size", client_column="site", partition="natural"
    )
    data = load_data(config)
    np.testing.assert_allclose(data.y_train, expected.y_train, rtol=1e-15)
    assert data.inputs.classes == ("price", "size")
    done = run(config, method="afl", num_clients=6, rounds=1, out=tmp_path / "o", progress=False)
    assert done.config.task == "regression"


def test_frames_may_have_their_targets_beside_them():
    beside = OwnData((FRAME[COLUMNS], FRAME[TARGETS])).read()
    assert beside.inputs.classes == ("price", "size")
    one = OwnData((FRAME[COLUMNS], FRAME.price), target="price").read()
    assert one.inputs.classes == ("price",)
    assert one.columns == tuple(COLUMNS)


def test_one_column_of_labels_in_a_frame_may_be_classes():
    data = OwnData((FRAME[COLUMNS], pd.DataFrame({"kind": ["a", "b"] * (N // 2)}))).read()
    assert data.classes == ("a", "b")
    assert data.columns == tuple(COLUMNS)


def test_test_targets_are_put_in_the_order_of_the_training_set():
    train, test = FRAME[:200], FRAME[200:]
    of = [(part[COLUMNS], part[names]) for part, names in ((train, TARGETS), (test, TARGETS[::-1]))]
    data = OwnData(of[0], test=of[1]).read()
    np.testing.assert_array_equal(data.y_test, test[TARGETS])
    other = test[COLUMNS], test[TARGETS].rename(columns={"size": "width"})
    both = OwnData(of[0], test=other)
    refused("expected the targets price, size, got price, width", both.read, error=ConfigError)


def test_a_metric_of_ones_own_may_be_called_mae_or_end_in_r2():
    names = {"mae": len, "bulk-r2": len}
    for name in names:
        assert Config(metrics=names, monitor=name).monitor == name
    refused("expected another name", Config, metrics=names, task="regression", error=ConfigError)
    assert [*map(is_lower_better, ("client-mae-worst", "mae", "maesure", "r2"))] == [
        *(True, True, False, False)
    ]


def test_what_regression_changes_is_said(caplog):
    caplog.set_level("INFO", "flwr")
    Config(task="regression")
    assert "task = regression" not in caplog.text
    Config(task="regression", partition="dirichlet")
    assert "task = regression: partition = iid" in caplog.text


def test_equal_test_targets_are_refused_before_the_run(tmp_path):
    data = OwnData((X[:-1], real(N - 1)), test=(X[-1:], real(1)))
    config = Config(method="fedavg", num_clients=4, clients_per_round=4, rounds=1)
    message = r"R\^2 needs two examples with differing targets, got 1"
    refused(message, run, config, data=data, out=tmp_path, progress=False, error=ConfigError)


def test_a_nodes_own_targets_are_standardised_by_the_runs_moments():
    data = OwnData(FRAME.drop(columns="site"), target="price,size").read()
    x, y = FRAME[COLUMNS].to_numpy(), FRAME[TARGETS].to_numpy()
    _, targets = data.convert_examples(x, y, columns=COLUMNS, classes=("price", "size"))
    assert torch.equal(targets, data.inputs.targets(y))
    wrong = functools.partial(data.convert_examples, x, y, columns=COLUMNS)
    in_cents = functools.partial(data.convert_examples, x, 100 * y, columns=COLUMNS)
    refused("in the unit of training", in_cents)
    in_cents(check_ranges=False)
    refused("expected the targets price, size", wrong, classes=("size", "price"), error=ConfigError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "pathological"}, "splits examples by class"),
        ({"partition": "client-dirichlet"}, "splits examples by class"),
        ({"monitor": "client-accuracy-mean"}, "has no client-accuracy-mean"),
        ({"metrics": "f1-macro"}, "f1-macro need classes"),
        ({"attack": "label-flip", "liars": 1}, "changes labels"),
        ({"class_prior": True}, "cross-entropy"),
        ({"task": "auto", "monitor": "r2"}, "goes with task = regression"),
        ({"method": "ntk-dfl", "ntk_dfl": {"bits": 8, "degree": 2}}, "compressed rows have labels"),
    ],
)
def test_settings_that_need_classes_are_refused(settings, message, tmp_path):
    def start():
        common = {"num_clients": 4, "clients_per_round": 4, "rounds": 1, "method": "fedavg"}
        config = Config(**{"task": "regression", **common, **settings})
        data = (X.astype(np.float32), real(N))
        run(config, data=data, out=tmp_path, progress=False)

    refused(message, start, error=ConfigError)


def test_each_method_takes_real_targets_or_refuses_them(tmp_path):
    taking = {name for name, m in own_methods().items() if m.strategy_class.takes_real_targets}
    assert {"fedavg", "scaffold", "ntk-fl", "ntk-dfl", "tct", "one-exchange", "afl"} <= taking
    for name in own_methods().keys() - taking:
        refused(f"{name} works with classes", Config, method=name, task="regression")
    refused("has classes", run, method_on_digits := Config(method="fedavg", task="regression"),
            out=tmp_path, progress=False, error=ConfigError)  # fmt: skip
    assert method_on_digits.dataset == "digits"


def table_of(y, folder, **options):
    data = OwnData(FRAME[COLUMNS].assign(y=y, site=FRAME.site), target="y", client_column="site")
    config = Config(method="glm", model="linear", num_clients=6, rounds=9, **options)
    done = run(config, data=data, out=folder, progress=False)
    rows = load_data(done.config).x_train
    targets = load_data(done.config).y_train
    return done, pd.read_csv(done.folder / "details" / "coefficients.csv"), rows, targets


@pytest.mark.parametrize("masked", [False, True])
def test_a_runs_table_of_coefficients_is_that_of_statsmodels(masked, tmp_path):
    """In the columns' own units, of a run of the app: to 1e-8 also under secure aggregation."""
    secure = {"secure": True, "clients_per_evaluation": 0} if masked else {}
    done, table, x, y = table_of(1e3 * FRAME["size"] + 7, tmp_path, **secure)
    pooled = sm.OLS(y[:, 0], np.column_stack([x, np.ones(len(x))])).fit()
    assert table.name.tolist() == [*COLUMNS, "(constant)"]
    assert set(table.target) == {"y"}
    low, high = pooled.conf_int().T
    for column, expected in (
        ("coefficient", pooled.params),
        ("standard_error", pooled.bse),
        ("statistic", pooled.tvalues),
        ("low", low),
        ("high", high),
    ):
        np.testing.assert_allclose(table[column], expected, rtol=1e-8, err_msg=column)
    np.testing.assert_allclose(table.p, pooled.pvalues, rtol=1e-6, atol=1e-300)
    predictor, test = load_predictor(done), load_data(done.config).x_test
    expected = np.column_stack([test, np.ones(len(test))]) @ pooled.params
    np.testing.assert_allclose(predictor.predict(test)[:, 0], expected, rtol=1e-8)
    if not masked:
        assert "Coefficients of glm" in write_report(done.folder).read_text()


def test_a_runs_table_of_a_logistic_regression_is_the_pooled_one(tmp_path):
    words = np.where(X[:, 0] + RNG.logistic(size=N) > 0, "yes", "no")
    _, table, x, y = table_of(words, tmp_path)
    pooled = sm.Logit(y, np.column_stack([x, np.ones(N)[: len(x)]])).fit(disp=0, tol=1e-14)
    assert set(table.target) == {"yes"}
    np.testing.assert_allclose(table.coefficient, pooled.params, rtol=1e-6)
    np.testing.assert_allclose(table.standard_error, pooled.bse, rtol=1e-6)
    np.testing.assert_allclose(table.p, pooled.pvalues, rtol=1e-5)


def test_a_runs_table_has_errors_of_what_is_not_collinear_and_only_of_a_solution(tmp_path, caplog):
    data = OwnData(FRAME[COLUMNS].assign(k=5.0, y=FRAME["size"]), target="y")
    config = Config(method="glm", model="linear", num_clients=4, rounds=1)
    done = run(config, data=data, out=tmp_path / "a", progress=False)
    table = pd.read_csv(done.folder / "details" / "coefficients.csv")
    assert table.standard_error.isna().tolist() == [False, False, False, True, True]
    assert (table.p[:3] < 1).all()
    words = np.where(X[:, 0] + RNG.logistic(size=N) > 0, "yes", "no")
    data = OwnData(FRAME[COLUMNS].assign(y=words), target="y")
    done = run(config, data=data, out=tmp_path / "b", progress=False)
    assert not (done.folder / "details" / "coefficients.csv").exists()
    assert "no table of coefficients: more rounds are needed" in caplog.text


def test_a_search_takes_the_best_r2_of_real_targets(tmp_path):
    data = OwnData(FRAME.drop(columns="size"), target="price", client_column="site")
    config = Config(method="afl", num_clients=6, rounds=1, validation_examples=40)
    grid = {"afl.ridge": [1e4, 0.0]}
    tuned = tune(config, grid=grid, data=data, out=tmp_path, progress=False)
    assert tuned.best.settings.ridge == 0.0
    assert tuned.trials["mean"][0] > 0.9


def test_a_regression_on_random_features_is_refused():
    refused("set model = linear", Config, method="glm", error=ConfigError)


def test_inputs_without_targets_have_the_digest_and_file_that_they_had(tmp_path):
    inputs = InputTransform.fit(X, classes=(0, 1))
    inputs.save(tmp_path)
    assert InputTransform.load(tmp_path).targets is None
    assert InputTransform.load(tmp_path).digest == inputs.digest
