"""Further metrics of what was learned, on the examples that the server evaluates on.

A metric is a function of scores (float32, shape (n, C)) and labels (int64, shape (n,)), or of
predictions and real targets (float64, shape (n, C), in the targets' units), that returns
a number, or an object of torchmetrics, which is called in the same way and reset before. The
setting ``metrics`` names them: ``f1-macro``, ``auc``, ``mymetrics.py:f`` or ``my_module:f``, and
``name=mymetrics.py:f`` to record it under another name.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from logging import getLogger
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..errors import first_line
from .importing import ID, import_named, whole_name
from .settings import ConfigError, key_of, nearest

Metric = Callable[[Tensor, Tensor], Any]
logger = getLogger("flwr")
ALONE = Lock()  # a metric's state is that of one model's outputs


def f1_macro(scores: Tensor, labels: Tensor) -> float:
    """Mean of F1 = 2 TP / (2 TP + FP + FN) over classes with labels or predictions."""
    hits, true, predicted = _counts(scores, labels)
    both = true + predicted
    return float((2 * hits / both)[both > 0].mean())


def balanced_accuracy(scores: Tensor, labels: Tensor) -> float:
    """Mean over the classes that have labels of the share of their examples that are right."""
    hits, true, _ = _counts(scores, labels)
    return float((hits / true)[true > 0].mean())


def auc(scores: Tensor, labels: Tensor) -> float:
    """Mean over the classes of the area under the ROC curve of each against all others.

    Of the classes that some examples have, and some have not, by their probabilities. ValueError if
    there are none.
    """
    from sklearn.metrics import roc_auc_score  # slow to import

    p, classes = scores.double().softmax(1).numpy(), labels.numpy()
    areas = [
        roc_auc_score(classes == label, p[:, label])
        for label in sorted(set(classes.tolist()))
        if (classes != label).any()
    ]
    if not areas:
        raise ValueError("the AUC needs examples of two classes or more")
    return float(sum(areas) / len(areas))


def is_lower_better(metric: str) -> bool:
    """Whether a smaller value of a metric is a better one, by its name."""
    return "loss" in metric or quantity_of(metric) == "mae"


def quantity_of(metric: str) -> str:
    """Return what a metric is of: mae for mae, client-mae-mean and client-mae-worst."""
    return metric.removeprefix("client-").removesuffix("-mean").removesuffix("-worst")


def _counts(scores: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the hits, labels and predictions of each class, float64."""
    predicted = scores.argmax(1)
    classes = labels[predicted == labels], labels, predicted
    return [torch.bincount(named, minlength=scores.shape[1]).double() for named in classes]


BUILT_IN: dict[str, Metric] = {
    "f1-macro": f1_macro,
    "balanced-accuracy": balanced_accuracy,
    "auc": auc,
}
# what the server records anyway, and what strategies and ensembles report
MEASURED = ("round", "accuracy", "loss", "model-updated")
OF_TARGETS = ("mae", "r2")  # the same, with real targets
MEASURED_PREFIXES = ("client-", "bytes-", "evaluation-bytes-", "seconds", "peak-memory")
REPORTED = ("train-loss", "num-examples", "replies-", "rejected-", "model-", "mutual-information")


def metrics_of(setting: str) -> dict[str, str]:
    """Return name -> place of the metrics in a setting; the place gives a name that is not said."""
    items = [item.strip().rpartition("=") for item in setting.split(",") if item.strip()]
    return {name or _name(place): place for name, _, place in items}


def metrics_setting(
    named: str | Mapping[str, Any], taken: Iterable[str], pass_object: Callable[[Any], str]
) -> str:
    """Return what the setting ``metrics`` holds; `pass_object` names an object."""
    if not isinstance(named, Mapping):
        several = isinstance(named, Iterable) and not isinstance(named, str)
        named = metrics_of(",".join(map(str, named if several else [named])))
    items = []
    for name, metric in named.items():
        place = whole_name(metric) if isinstance(metric, str) else pass_object(metric)
        recorded = name in (*MEASURED, *taken) or name.startswith((*MEASURED_PREFIXES, *REPORTED))
        if recorded or {*name} & {*",="}:
            raise ConfigError(f"metrics: expected another name, such as my-{name}, got {name!r}")
        if ":" not in place and place not in BUILT_IN:
            raise ConfigError(
                f"metrics: expected {', '.join(BUILT_IN)}, <file>.py:<function>, "
                "<module>:<function>, or in Python a dict of names and functions, "
                f"got {place!r}{nearest(place, BUILT_IN)}"
            )
        items.append(place if name == _name(place) else f"{name}={place}")
    return ",".join(items)


def load_metrics(setting: str, passed: Callable[[str], Any]) -> dict[str, Metric]:
    """Return name -> metric of a setting, which is None, and logged once, where it fails."""
    metrics = {}
    for name, place in metrics_of(setting).items():
        metric = passed(place) or BUILT_IN.get(place) or import_named("metrics", place)
        if not callable(metric):
            raise ConfigError(f"metrics = {place}: expected a function, got {metric!r}")
        if hasattr(metric, "reset"):
            metric.reset()
        metrics[name] = _guard(name, metric)
    return metrics


def _name(place: str) -> str:
    return key_of(ID.sub("", place).rpartition(":")[2])


def _guard(name: str, metric: Metric) -> Metric:
    """Keep a metric from ending a run."""
    warned: list[str] = []

    def measure(scores: Tensor, labels: Tensor) -> float | None:
        try:
            with ALONE:
                if hasattr(metric, "reset"):
                    metric.reset()
                value = float(metric(scores, labels))
            reason = f"it returned {value}"
        except Exception as error:  # whatever a user's function raises
            value, reason = math.nan, first_line(error)
        if math.isfinite(value):
            return value
        if not warned:
            logger.warning("metric %s is missing where it fails, as here: %s", name, reason)
            warned.append(reason)
        return None

    return measure
