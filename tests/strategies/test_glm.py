"""GLM: estimates and their errors are those of statsmodels on the pooled rows."""

from functools import partial

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from flwr.app import Context
from torch import nn

from fedntk.clients import GLMClient, client_app
from fedntk.ntk.convex.glm import newton_step
from fedntk.ntk.payloads.newton_sums import STEP, NewtonFormat, NewtonSums
from fedntk.strategies import GLM, NoUsableReply

from ..conftest import refused
from .federation import Contract, Grid, app, bits, network, start, with_arrays

N, P, K = 400, 4, 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P)) @ np.array([[1, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0.9], [0, 0, 0, 1]])
X = (X - X.mean(0)) / X.std(0)
REAL = X @ RNG.normal(size=(P, 2)) + [0.5, -2] + RNG.normal(size=(N, 2))
CLASSES = (X @ [1.0, -0.5, 0.0, 0.3] + 0.4 + RNG.logistic(size=N) > 0).astype(int)
ALL = {"min_train_nodes": K, "min_available_nodes": K, "fraction_evaluate": 0.0}


def linear(outputs, *, bias=True, width=P):
    return nn.Linear(width, outputs, bias=bias).double()


CONTRACT = {
    "GLM": Contract(partial(GLM, network=network()), app(GLMClient), once=True, needs_more=True)
}


def grid(x, y, cuts=(1, 30, 100, 250), order=None, **options):
    """Clients with parts of the rows, the first with one row."""
    rows = np.arange(len(x)) if order is None else order
    parts = np.split(rows, cuts)
    is_real = np.asarray(y).dtype.kind == "f"
    outputs = int(y.max()) + 1 if not is_real else 1 if y.ndim == 1 else y.shape[1]
    loss = {"loss": "mse", "real_targets": True} if is_real else {}

    def client_fn(context: Context):
        i = int(context.node_config["partition-id"])
        model = linear(outputs, width=x.shape[1], **options)
        return GLMClient(model, x[parts[i]], y[parts[i]], seed=(0, i), **loss)

    return Grid(client_app(client_fn), num_clients=len(parts))


def fitted(x, y, *, bias=True, rounds=25, **options):
    is_real = np.asarray(y).dtype.kind == "f"
    outputs = int(y.max()) + 1 if not is_real else 1 if y.ndim == 1 else y.shape[1]
    model = linear(outputs, bias=bias, width=x.shape[1])
    strategy = GLM(network=model, real_targets=is_real, **{**ALL, **options.pop("made", {})})
    after = start(strategy, grid(x, y, bias=bias, **options), rounds, model)
    return strategy, after


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_regression_is_that_of_statsmodels(masked, bias):
    """To 1e-8, also masked: sums are then off by 5 2^-31 at most, beside 400 on the diagonal.

    That is 6e-12 of the sums, times a condition number of about 30.
    """
    strategy, after = fitted(X, REAL, bias=bias, rounds=1, made={"secure": masked or None})
    fit, design = strategy.fit, np.column_stack([X, np.ones(N)]) if bias else X
    near = partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-8)
    for c in range(2):
        pooled = sm.OLS(REAL[:, c], design).fit()
        near(fit.coefficients[:, c], pooled.params)
        near(fit.standard_errors[:, c], pooled.bse)
        near(fit.scale[c], pooled.mse_resid)
        near(fit.r2[c], pooled.rsquared)
        assert fit.df_resid == pooled.df_resid
    near(after["weight"], fit.coefficients[:P].T)
    assert strategy.solved


@pytest.mark.parametrize("masked", [False, True])
def test_logistic_regression_is_the_pooled_maximum_of_the_likelihood(masked):
    """To 1e-6, in few exchanges; the network's scores are the log odds."""
    strategy, after = fitted(X, CLASSES, rounds=9, made={"secure": masked or None})
    pooled = sm.Logit(CLASSES, np.column_stack([X, np.ones(N)])).fit(disp=0, tol=1e-14)
    fit = strategy.fit
    np.testing.assert_allclose(fit.coefficients[:, 0], pooled.params, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(fit.standard_errors[:, 0], pooled.bse, rtol=1e-6)
    assert fit.deviance[0] == pytest.approx(-2 * pooled.llf, rel=1e-9)
    assert fit.r2[0] == pytest.approx(pooled.prsquared, rel=1e-6)
    assert strategy.solved
    assert len(strategy.train_metrics) <= 9
    odds = X @ (after["weight"][1] - after["weight"][0]) + after["bias"][1]
    np.testing.assert_allclose(odds, np.column_stack([X, np.ones(N)]) @ pooled.params, rtol=1e-5)


def test_more_classes_are_those_of_the_multinomial_model():
    """With the first class as the base, as statsmodels has it."""
    y = (CLASSES + (X[:, 2] + RNG.logistic(size=N) > 0.5)).astype(int)
    strategy, after = fitted(X, y, rounds=9)
    pooled = sm.MNLogit(y, np.column_stack([X, np.ones(N)])).fit(disp=0, method="newton", tol=1e-12)
    fit = strategy.fit
    np.testing.assert_allclose(fit.coefficients, pooled.params, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(fit.standard_errors, pooled.bse, rtol=1e-6)
    assert fit.deviance[0] == pytest.approx(-2 * pooled.llf, rel=1e-9)
    assert fit.null_deviance[0] == pytest.approx(-2 * pooled.llnull, rel=1e-9)
    assert fit.df_resid == pooled.df_resid
    np.testing.assert_allclose(after["weight"][1:], fit.coefficients[:P].T)


def test_any_split_gives_the_same_fit_and_one_client_the_pooled():
    """To rounding of sums in float64; masked, whole numbers are off by 2^-31 a client."""
    one, _ = fitted(
        X, REAL, rounds=1, cuts=(), made={"min_train_nodes": 1, "min_available_nodes": 1}
    )
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(N)
        other, _ = fitted(X, REAL, rounds=1, order=order, cuts=(2, 3, 4, 50))
        np.testing.assert_allclose(other.fit.coefficients, one.fit.coefficients, atol=1e-12)


def test_a_fit_of_standardised_columns_is_given_in_their_units():
    mean, std = np.array([1e3, 0, -5, 2.0]), np.array([10, 1e-3, 1, 7.0])
    raw, y = X * std + mean, REAL * [3.0, 1e4] + [50, -1e5]
    target_mean, target_std = y.mean(0), y.std(0)
    strategy, _ = fitted(X, (y - target_mean) / target_std, rounds=1)
    fit = strategy.fit.in_units(mean, std, target_mean, target_std)
    for c in range(2):
        pooled = sm.OLS(y[:, c], np.column_stack([raw, np.ones(N)])).fit()
        np.testing.assert_allclose(fit.coefficients[:, c], pooled.params, rtol=1e-8)
        np.testing.assert_allclose(fit.standard_errors[:, c], pooled.bse, rtol=1e-8)
        assert fit.scale[c] == pytest.approx(pooled.mse_resid, rel=1e-8)


def test_a_nearly_exact_fit_measures_its_residuals_in_a_second_exchange():
    """RSS is 1e-14 of the total: yty - b^T X^T y would have two digits."""
    y = X @ np.ones(P) + 1e-7 * RNG.normal(size=N)
    strategy, _ = fitted(X, y, rounds=5)
    pooled = sm.OLS(y, np.column_stack([X, np.ones(N)])).fit()
    np.testing.assert_allclose(strategy.fit.standard_errors[:, 0], pooled.bse, rtol=1e-6)
    assert strategy.solved


def sums_of(x, y, family="gaussian"):
    x, y = torch.from_numpy(np.asarray(x, float)), torch.from_numpy(np.asarray(y, float))
    y = y[:, None] if y.ndim == 1 else y
    return NewtonSums.of(x, y, torch.zeros(x.shape[1], y.shape[1]).double(), family)


ONE = np.ones((N, 1))


@pytest.mark.parametrize(
    ("x", "y", "family", "message"),
    [
        (X[:3], REAL[:3, 0], "gaussian", "expected more examples than the 4 estimates, got 3"),
        (X, 0 * REAL[:, 0] + 3, "gaussian", "do not vary"),
        (X, 0 * CLASSES, "multinomial", "two classes or more, got 400 of one"),
        (X, 0 * CLASSES + 1, "multinomial", "two classes or more, got 400 of one"),
    ],
)
def test_what_has_no_estimate_is_refused_by_name(x, y, family, message):
    zeros = np.zeros((x.shape[1], 1))
    names = list("abcde")[: x.shape[1]]
    refused(message, newton_step, sums_of(x, y, family), zeros, family, names=names)


@pytest.mark.parametrize(
    ("column", "linked"), [(X[:, :1] * 2 - X[:, 1:2], "abe"), (0 * ONE, "e"), (3 * ONE, "e1")]
)
def test_collinear_columns_are_named_and_have_no_standard_errors(column, linked):
    """Predictions are still those of least squares, and so are the others' errors."""
    design, names = np.hstack([X, column, ONE]), [*"abcde1"]
    fit = newton_step(sums_of(design, REAL), np.zeros((P + 2, 2)), "gaussian", names=names)
    assert fit.collinear == tuple(linked)
    pooled = [sm.OLS(y, np.hstack([X, ONE])).fit() for y in REAL.T]
    for c in range(2):
        predicted = design @ fit.coefficients[:, c]
        np.testing.assert_allclose(predicted, pooled[c].fittedvalues, atol=1e-9)
    for k, name in enumerate(names):
        error = fit.standard_errors[k, 0]
        if name in linked:
            assert np.isnan(error)
        elif name in "cd":
            assert error == pytest.approx(pooled[0].bse[k], rel=1e-8)


def test_units_leave_standard_errors_of_what_is_not_linked():
    """A linked column with a mean enters the constant; one without leaves its error as it is."""
    design, pooled = np.hstack([X, 0 * ONE, ONE]), sm.OLS(REAL[:, 0], np.hstack([X, ONE])).fit()
    fit = newton_step(sums_of(design, REAL[:, 0]), np.zeros((P + 2, 1)), "gaussian")
    for mean, is_known in ((0.0, True), (3.0, False)):
        errors = fit.in_units(np.array([0, 0, 0, 0, mean]), np.full(5, 2.0)).standard_errors[:, 0]
        np.testing.assert_allclose(errors[:P], pooled.bse[:P] / 2, rtol=1e-8)
        assert np.isnan(errors[P])
        assert np.isnan(errors[-1]) != is_known


def test_collinear_dummies_are_named_under_masks():
    """Rounding of 20 clients' sums gives the direction of zeros an eigenvalue of up to 1e-9."""
    for seed in range(10):
        dummies = np.eye(3)[np.random.default_rng(seed).integers(3, size=60)]
        dummies = (dummies - dummies.mean(0)) / dummies.std(0)
        design, y = np.hstack([dummies, X[:60, :1], ONE[:60]]), REAL[:60, :1]
        words = sum(sums_of(design[i::20], y[i::20]).to_words() for i in range(20))
        sums = NewtonSums.from_words(words, NewtonFormat(5, 1, "gaussian"), 60, 20)
        fit = newton_step(sums, np.zeros((5, 1)), "gaussian", names=[*"abcx1"])
        assert fit.collinear == (*"abc",)


def test_a_masked_client_with_an_outlier_counts():
    """One example at 25 standard deviations among two."""
    x, y = X.copy(), REAL[:, :1].copy()
    x[0, 0], y[0] = 25.0, 25.0
    strategy, _ = fitted(x, y, rounds=1, cuts=(2, 100, 250, 300), made={"secure": True})
    pooled = sm.OLS(y, np.hstack([x, ONE])).fit()
    np.testing.assert_allclose(strategy.fit.coefficients[:, 0], pooled.params, rtol=1e-8)
    too_many = NewtonFormat(P + 1, 2, "gaussian"), 2**25 - 2**12
    refused("expected up to 33550335", NewtonSums.from_words, np.zeros(1), *too_many, 1)


def test_a_large_mean_of_targets_costs_no_digits():
    """Sums of squares of y have a rounding of 1e-4 there: RSS is measured once more."""
    y = X @ np.ones(P) + RNG.normal(size=N) + 1e6
    strategy, _ = fitted(X, y, rounds=3)
    pooled = sm.OLS(y, np.hstack([X, ONE])).fit()
    assert strategy.solved
    assert len(strategy.train_metrics) == 2
    assert strategy.fit.scale[0] == pytest.approx(pooled.mse_resid, rel=1e-8)
    assert strategy.fit.r2[0] == pytest.approx(pooled.rsquared, rel=1e-8)


def test_a_step_of_other_rows_is_not_halved(caplog):
    """The deviance of more rows is larger, which says nothing of the step."""
    clients = grid(X, CLASSES)
    clients.changes = {4: lambda reply: reply if len(clients.exchanges) > 1 else None}
    strategy = GLM(network=linear(2), **ALL)
    start(strategy, clients, 9, linear(2))
    pooled = sm.Logit(CLASSES, np.hstack([X, ONE])).fit(disp=0, tol=1e-14)
    np.testing.assert_allclose(strategy.fit.coefficients[:, 0], pooled.params, rtol=1e-6)
    assert strategy.solved
    assert "1 of 5 clients are not in the sums" in caplog.text
    assert "the rows are others" in caplog.text
    assert strategy.train_metrics[1]["clients-missing"] == 1


def test_quasi_separation_is_no_collinearity(caplog):
    """A group of one class has no best coefficient; after some steps its rows have no weight."""
    group = (np.arange(N) % 10 == 0) & (CLASSES == 1)
    x = np.hstack([X, group[:, None]])
    strategy, after = fitted(x, CLASSES, rounds=30)
    assert strategy.fit is None
    assert not strategy.solved
    assert caplog.text.count("separation: ") == 1
    assert "collinear" not in caplog.text
    assert np.isfinite(after["weight"]).all()


def test_a_class_without_examples_is_separation():
    message = r"classes of numbers \[2\] have no examples"
    y = np.column_stack([CLASSES, 0 * CLASSES])
    refused(message, newton_step, sums_of(X, y, "multinomial"), np.zeros((P, 2)), "multinomial")


def test_nearly_collinear_columns_are_warned_of(caplog):
    near = X[:, :1] + 1e-5 * X[:, 1:2]
    fitted(np.hstack([X[:, :1], near]), REAL, rounds=1)
    assert "nearly collinear" in caplog.text


def test_a_fit_is_in_the_checkpoint():
    strategy, _ = fitted(X, REAL, rounds=1)
    other = GLM(network=linear(2), real_targets=True, **ALL)
    other.load_state_dict(strategy.state_dict())
    assert other.solved
    np.testing.assert_array_equal(other.fit.standard_errors, strategy.fit.standard_errors)


def test_classes_that_are_separated_are_reported_and_do_not_end_in_numbers(caplog):
    """The deviance falls to 0, and no coefficients are the best."""
    strategy, after = fitted(X, (X[:, 0] > 0).astype(int), rounds=25)
    assert not strategy.solved
    assert "perfect separation" in caplog.text
    assert np.isfinite(after["weight"]).all()


def test_a_bad_reply_is_dropped_and_the_fit_is_that_of_the_others():
    def negative(arrays):
        return {**arrays, "hessian": -arrays["hessian"]}

    strategy = GLM(network=linear(1), real_targets=True, **ALL)
    clients = grid(X, REAL[:, 0])
    clients.changes = {4: with_arrays(negative)}
    start(strategy, clients, 1, linear(1))
    pooled = sm.OLS(REAL[:250, 0], np.column_stack([X, np.ones(N)])[:250]).fit()
    np.testing.assert_allclose(strategy.fit.coefficients[:, 0], pooled.params, rtol=1e-8)


def test_words_round_to_their_step_and_refuse_numbers_that_would_overflow():
    sums = sums_of(np.hstack([X, ONE]), REAL)
    words = sums.to_words()
    again = NewtonSums.from_words(words, NewtonFormat(P + 1, 2, "gaussian"), N, 1)
    for name in NewtonSums.NAMES:
        assert np.abs(getattr(again, name) - getattr(sums, name)).max() <= STEP / 2
    assert len(words) == NewtonFormat(P + 1, 2, "gaussian").num_words
    refused("standardise features", sums_of(100 * X, REAL).to_words)


def test_strategy_and_clients_must_agree_on_the_family():
    strategy = GLM(network=linear(2), **ALL)
    with pytest.raises(NoUsableReply):
        start(strategy, grid(X, REAL), 1, linear(2))
    refused("an output for each class", GLM, network=linear(1))
    refused("expected 4 names", GLM, network=linear(2), columns=["a"])


def test_the_first_weights_do_not_matter():
    first, second = (fitted(X, CLASSES, rounds=9)[1] for _ in range(2))
    assert bits(first) == bits(second)


@pytest.mark.parametrize("y", [REAL, CLASSES, np.arange(N) % 3], ids=["real", "two", "three"])
def test_moments_are_those_of_the_pooled_rows(y):
    """At coefficients of 0 all weights V are alike, and the constant's sum is theirs."""
    x = X + np.array([1, 0, -2, 0])
    strategy, _ = fitted(x, y, rounds=1)
    expected = [x, *([y] if y is REAL else [])]
    for (mean, std), rows in zip(strategy.moments, expected, strict=True):
        np.testing.assert_allclose(mean, rows.mean(0), atol=1e-12)
        np.testing.assert_allclose(std, rows.std(0), rtol=1e-12)
    assert fitted(X, y, rounds=1, bias=False)[0].moments == []


@pytest.mark.parametrize("y", [REAL, CLASSES], ids=["real", "two"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_column_without_deviation_has_none_by_its_sums(y, masked):
    x = np.column_stack([X, np.full(N, 1 / 3), np.full(N, -7.1)])
    (_, std), *_ = fitted(x, y, rounds=1, made={"secure": masked or None})[0].moments
    assert (std[:P] > 0.9).all()
    assert std[P:].tolist() == [0, 0]


def test_moments_of_rows_without_an_estimate_are_there_as_well():
    """One of three classes has no examples; clients may not give their sums again."""
    strategy, _ = fitted(X, CLASSES * 2, rounds=1)
    assert strategy.fit is None
    np.testing.assert_allclose(strategy.moments[0][0], X.mean(0), atol=1e-12)
