"""Client of TCT: local SGD first, then a linear model of tangent features.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4 and algorithms 1 and 2. The steps of stage 2 are those of
:mod:`fedntk.ntk.convex.local_steps`. Algorithm 1's correction h_k is c_k - c (its invariant,
appendix A.1): c_k = -Z^T A_k with A_k (n x C), the mean residual along the last steps over n, which
is all that a client keeps from its own past; and c = (theta^{t-1} - theta^t) / (M eta), for which
it keeps the last model it was sent.

What a client gives away: with few examples, the moments of its features are close to the features,
and these are gradients that hold inputs of a first linear layer. ``solve="server"`` hands over the
features themselves. ``solve="statistics"`` gives sums over all of a client's examples: those of one
example are its features, and those of few hold them.
"""

from collections.abc import Mapping
from dataclasses import replace
from logging import getLogger
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk import Moments, Predictor, TCTModel, require_disk, require_memory
from fedntk.ntk.convex.local_steps import (
    Spectrum,
    centred_targets,
    convex_loss,
    looped_steps,
    mean_gradient,
    residual_sum,
)
from fedntk.ntk.features.rows import FeatureRows
from fedntk.ntk.options import argument, option
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_statistics import SECURE_STEPS, FeatureStatistics
from fedntk.ntk.payloads.feature_upload import FeatureUpload
from fedntk.ntk.payloads.split_statistics import SplitStatistics

from ..core.disk_store import example_digests
from ..core.feature_sums import SumsClient, fixed_point_in
from ..core.named_arrays import NamedArrays, records_of
from ..core.weights import Config, Evaluation, Fit, Parameters, Scalar, set_weights
from ..sgd import SGDClient
from .feature_store import LESS_DISK, FeatureStore

ONCE = ("features", "statistics", "masked")  # steps whose features are used once
logger = getLogger("flwr")
Arrays = Mapping[str, NDArray[Any]]
Records = Mapping[str, Arrays]
Steps = tuple[Tensor, Tensor, Tensor, dict[str, Scalar]]  # W_M, A_k, Z W_0, metrics


class TCTClient(SumsClient, SGDClient):
    """Trains in stage 1 as :class:`SGDClient`; in stage 2 solves its part of the convex problem.

    All settings of stage 2 come from the strategy; ``config["lr"]`` is of stage 1. What is computed
    once is kept on disk: with p features an example the features take ``4 n p`` bytes, or ``2 n p``
    in float16, and ``4 n p`` beside that until they are normalised; as much for test examples that
    are not the training examples; kernel and eigenvectors ``12 n^2``. In memory are a chunk of 128
    MiB of features, and up to 512 MiB to differentiate it; while the kernel is formed two blocks of
    512 MiB and ``4 n^2`` bytes; and for the decomposition about ``52 n^2``: with p = 100,000 and n
    = 6,000 4.8 GB on disk and 1.9 GB in memory. What would not fit is refused with its size, in the
    first round of stage 1.

    A client needs its folder in `cache` from round to round. It goes when this client begins
    another run more than a day after it was last used; see also :func:`shrink`. Examples may come
    in another order in each message. If they are others than before, the client says so in its log
    and in the metric ``examples-changed``, computes the features anew and keeps its correction as
    it was: return the same examples in all rounds.
    """

    strategy = "TCT"
    replies = "weights, then linear models"
    cache_name = "tct"

    dtype: Literal["float32", "float16"] = option(
        "dtype in which features are kept; one that float16 cannot hold has its set kept in "
        "float32. Products are formed in float32",
        default="float32",
    )
    keep: Literal["features", "nothing"] = option(
        "what a client keeps on disk; nothing: features are computed anew whenever they are "
        "needed, twice a round, and for the kernel once for each pair of its blocks of 512 MiB",
        default="features",
    )
    local_solver: Literal["closed", "loop"] = option(
        "the M steps in closed form, or one after another as in eq. (3), with all features in "
        "memory",
        default="closed",
    )
    chunk_size: int | None = argument("examples differentiated at a time", default=None)
    local_epochs: int = option("local epochs of stage 1", default=5, at_least=0)
    batch_size: int = option("batch size of stage 1", default=64, at_least=1)
    learning_rate: float = option("learning rate of stage 1", default=0.01, at_least=0)
    weight_decay: float = option("weight decay of stage 1", default=1e-5, at_least=0)

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Return what the stage asks for, the number of examples, and metrics.

        In stage 1 the arrays are the new weights. In stage 2 they are the new linear model (p, C);
        those of Moments, FeatureUpload, FeatureStatistics or SplitStatistics; masked sums and what
        goes before and after them; or the classes' counts. ``"train-loss"`` is at the received
        model. A client that lacks what the message presumes returns no arrays and ``"lost-state"``:
        1 if its c_k is lost, 0 if the server can send what is. One whose steps overflow returns
        none, and ``"diverged"``.
        """
        task = ConvexTask.of_message(config)
        if task is None or task.step == "bootstrap":
            if self.privacy is not None:
                raise ValueError(
                    "privacy: stage 1 sends weights without masks, which its ledger does not "
                    "count; have the strategy begin with stage 2, without bootstrap rounds"
                )
            if task is not None and int(config.get("server-round", 0)) == 1:
                self._check(task, parameters, config)
            return super().fit(parameters, config)
        self.require_masked(task.step, SECURE_STEPS)
        if task.step in SECURE_STEPS and task.step != "masked":
            sent = getattr(parameters, "records", {})
            return _reply(self.answer_sum(task.step, task, sent, config), len(self.inputs), {})
        if task.step == "counts":
            counts = {"counts": _counts(self.targets)}
            return _reply(counts, len(self.inputs), _loss_at_zero(task, self.targets))
        needed = ["linear"] * (task.step == "linear") + ["control"] * (task.control == "sent")
        records = records_of(parameters, *needed, strategy=self.strategy)
        store = self._store(task, records, config)
        if not store.holds(*(["network"] if task.step != "linear" else ["network", "normaliser"])):
            return _lost(0)
        digests, order = _sort_examples(self.inputs, self.targets)
        x = self._project(self.inputs[order], config)
        work = _Work(task, records, store, x, self.targets[order], config)
        if task.step in ONCE:
            arrays = _features(work) if task.step == "features" else self._sums(work)
            return _reply(arrays, len(x), _loss_at_zero(task, work.targets))
        changed = self._note_examples(task, store, digests, config)
        if task.step == "moments":
            moments = Moments.join(map(Moments.of, store.raw("train", x)))
            if task.bias:
                moments = replace(moments, class_counts=_counts(work.targets))
            result = _reply(moments.to_arrays(), len(x), _loss_at_zero(task, work.targets))
        else:
            result = self._linear(work)
        if "lost-state" not in result[2]:
            result[2]["examples-changed"] = int(changed)
        return result

    def _note_examples(
        self,
        task: ConvexTask,
        store: FeatureStore,
        digests: NDArray[np.uint64],
        config: Mapping[str, Any],
    ) -> bool:
        """Return whether these are other examples than before.

        Then c_k stays as it was, and all else is computed anew.
        """
        before = store.examples("train")
        if before is None:
            store.save("examples-train", digests=digests)
        if before is None or store.has("train", digests):
            return False
        known = set(map(tuple, before.tolist()))
        logger.warning(
            "client-%s: %d of its %d examples are the same as before; features are computed anew. "
            "Return the same examples, in any order, in all rounds of a run",
            self._name(config),
            sum(tuple(row) in known for row in digests.tolist()),
            len(digests),
        )
        if task.corrected and task.state_round:
            store.carry(task.state_round, bias=task.bias, device=self.device)
        store.replace("train", digests)
        return True

    def _check(self, task: ConvexTask, parameters: Parameters, config: Config) -> None:
        """Refuse, before stage 1, what stage 2 could not do or not hold in memory."""
        set_weights(self.model, parameters)
        task.feature_map.require_outputs(self.model, self.targets.shape[1])
        task.feature_map.extractor(self.model)(self._project(self.inputs[:1], config))
        n, width = len(self.inputs), task.feature_map.width(self.model)
        folder = self.folder(task, config)  # an error now if it cannot be made
        if task.solve == "statistics":
            sums = SplitStatistics if task.validation_share else FeatureStatistics
            sums.require_memory(width)
            return
        if self.keep == "features":
            needed = n * width * (4 + np.dtype(self.dtype).itemsize)
            require_disk(needed, f"{width} features of {n} examples", folder, cure=LESS_DISK)
        require_memory(
            52 * n * n * (task.num_steps > 1),
            f"stage 2 with {n} examples",
            cure="give the client fewer examples, or have it take its steps in a loop",
        )

    def _store(self, task: ConvexTask, records: Records, config: Mapping[str, Any]) -> FeatureStore:
        """Return what this client keeps, with what came now."""
        store = FeatureStore(
            self.folder(task, config),
            f"{task.network_key} {task.bias}",
            self.model,
            task.feature_map,
            dtype=self.dtype,
            keep="nothing" if task.step in ONCE else self.keep,
            chunk_size=self.chunk_size,
        )
        store.take(records)
        return store

    def _sums(self, work: "_Work") -> Arrays:
        """Return the sums over the features, masked if that is asked for."""
        task, width = work.task, work.store.width
        fixed_point = fixed_point_in(work.records, task.bits, width)
        sums = self.add_up(
            lambda own: work.store.raw("train", work.x[own]),
            work.targets,
            width,
            share=task.validation_share,
            weights=_only(work.records, "class-weights").numpy() if task.balanced else None,
            fixed_point=fixed_point,
        )
        if task.step == "statistics":
            return sums.to_arrays(fixed_point)
        key, message = task.key_of(task.feature_map, work.store.network), work.records["secure-sum"]
        return self.mask(sums, task, message, work.config, key=key, fixed_point=fixed_point)

    def _linear(self, work: "_Work") -> Fit:
        """Take M corrected steps from the received model (algorithm 1)."""
        task, store = work.task, work.store
        targets = centred_targets(work.targets, task.loss)
        server_round = int(work.config.get("server-round", 0))
        theta = _only(work.records, "linear")
        own = _own_control(task, store, targets)
        control = _server_control(task, work.records, store, theta, server_round)
        if own is None or control is None:
            return _lost(own is None)
        rows = store.rows("train", work.x, bias=task.bias, device=self.device)
        take_steps = _take_steps if self.local_solver == "loop" else _sum_steps
        coefficients, vector = own
        result, after, outputs, metrics = take_steps(
            work, rows, theta, coefficients, control - vector
        )
        if not bool(torch.isfinite(result).all()):
            return [], len(targets), {**metrics, "diverged": 1}
        if task.corrected:
            store.remember(server_round, after, theta, needed=task.state_round)
            if self.keep == "nothing":  # c_k = c_k - c - (theta_k - theta) / (M eta)
                kept = task.state_round
                before = store.of_round("carried", kept) if kept else torch.zeros(1)
                if before is not None:
                    vector = before - control - (result - theta) / task.span
                    store.remember_vector(server_round, vector, needed=kept)
        metrics["train-loss"] = convex_loss(outputs, targets, task.loss)
        return _reply({TCTModel.ARRAYS[0]: result.numpy()}, len(targets), metrics)

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Loss and accuracy on the local test examples, of the network or of the linear model.

        A client that lacks the network of stage 2 says ``"lost-state"``: 0 instead.
        """
        task = ConvexTask.of_message(config)
        if task is None:
            return super().evaluate(parameters, config)
        if self.is_private:
            self.require_test_examples()
        records = records_of(parameters, "linear", strategy=self.strategy)
        store = self._store(task, records, config)
        if not store.holds("network", "normaliser"):
            return 0.0, 1, {"lost-state": 0}
        digests, order = _sort_examples(self.test_inputs, self.test_targets)
        same = self.test_inputs is self.inputs and store.has("train", digests)
        name = "train" if same else "test"
        if not store.has(name, digests):
            store.replace(name, digests)
        x = self._project(self.test_inputs[order], config)
        rows = store.rows(name, x, bias=task.bias, device=self.device)
        outputs, targets = rows @ _only(records, "linear"), self.test_targets[order]
        hits = outputs.argmax(1) == targets.argmax(1)
        value = convex_loss(outputs, centred_targets(targets, task.loss), task.loss)
        return value, len(hits), {"accuracy": float(hits.double().mean())}

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of what a message brings: the network, or in stage 2 the linear model.

        LookupError if the client lacks the network of stage 2, which is sent again next time.
        """
        task = ConvexTask.of_message(config)
        if task is None:
            return super().predictor(parameters, config)
        records = records_of(parameters, "linear", strategy=self.strategy)
        store = self._store(task, records, config)
        if not store.holds("network", "normaliser"):
            raise LookupError("the network of stage 2 is lost: it is sent again with a later round")
        set_weights(self.model, store.network)
        linear = _only(records, "linear").numpy()
        return TCTModel(self.model, task.feature_map, store.normaliser, linear, loss=task.loss)


class _Work(NamedTuple):
    """A task of stage 2, and the examples in the order of what is kept."""

    task: ConvexTask
    records: Records
    store: FeatureStore
    x: Tensor  # projected, (n, ...)
    targets: Tensor  # one-hot, (n, C)
    config: Mapping[str, Any]


def _counts(targets: Tensor) -> NDArray[np.int64]:
    return targets.sum(0).numpy().astype(np.int64)


def _features(work: _Work) -> Arrays:
    task, store, x = work.task, work.store, work.x
    require_memory(
        3 * 4 * len(x) * store.width,
        f"sending {store.width} features of {len(x)} examples",
        cure="lower num_features, or solve on the clients",
    )
    upload = FeatureUpload.of(torch.cat(list(store.raw("train", x))), work.targets)
    return upload.to_arrays(sparsity=task.sparsity, bits=task.bits)


def _take_steps(work: _Work, rows: FeatureRows, theta: Tensor, own: Tensor, shift: Tensor) -> Steps:
    """Take the steps of eq. (3): return the new model, A_k, and the outputs before.

    The correction h_k is -Z^T A_k, by the A_k (n, C) before, minus `shift` (p, C).
    """
    task = work.task
    require_memory(
        4 * rows.shape[0] * work.store.width,
        f"{work.store.width} features of {rows.shape[0]} examples",
        cure="use local_solver = 'closed', which reads them in chunks",
    )
    features = rows[:]  # where products are formed
    start, own, shift = (t.to(features) for t in (theta, own, shift))
    result, total = looped_steps(
        features,
        start,
        centred_targets(work.targets, task.loss).to(features),
        -(features.T @ own) - shift,
        learning_rate=task.learning_rate,
        local_steps=task.num_steps,
        loss=task.loss,
    )
    after = total.cpu().double() / (len(features) * task.num_steps)
    return result.cpu(), after, (features @ start).cpu(), {}


def _sum_steps(work: _Work, rows: FeatureRows, theta: Tensor, own: Tensor, shift: Tensor) -> Steps:
    """Do the same by the sum of the residuals, in the kernel's eigenbasis."""
    task, store = work.task, work.store
    metrics: dict[str, Scalar] = {}
    outputs, along = (rows @ torch.cat([theta, shift], 1)).split(theta.shape[1], 1)
    kernel: Spectrum | Tensor = torch.empty(0, 0)
    drift = torch.zeros_like(outputs)
    if task.num_steps > 1:
        matrix = store.kernel(rows)
        drift = -(matrix.double() @ own) - along
        kernel = store.spectrum(matrix, rows.device) if task.loss == "mse" else matrix
    if isinstance(kernel, Spectrum):
        metrics["rate-times-lambda"] = kernel.rate(task.learning_rate)
    total = residual_sum(
        kernel,
        outputs,
        centred_targets(work.targets, task.loss),
        drift,
        learning_rate=task.learning_rate,
        local_steps=task.num_steps,
        loss=task.loss,
    )
    after = total / (rows.shape[0] * task.num_steps)
    change = rows.transposed_matmul((after - own).float())
    return theta + task.span * (change - shift), after, outputs, metrics


def _sort_examples(x: Tensor, targets: Tensor) -> tuple[NDArray[np.uint64], Tensor]:
    """Return digests of examples in an order that does not depend on theirs, and that order."""
    digests = example_digests(x, targets)
    order = np.lexsort(digests.T)
    return digests[order], torch.from_numpy(order)


def _own_control(
    task: ConvexTask, store: FeatureStore, targets: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return A_k (n, C) and v (p, C) of c_k = v - Z^T A_k, either of them zero; None if lost.

    v is of a round in which the examples were others.
    """
    none = torch.zeros(targets.shape, dtype=torch.float64)
    zero = torch.zeros(store.width + task.bias, targets.shape[1])
    if not task.corrected or not task.state_round:
        return none, zero
    coefficients = store.of_round("state", task.state_round)
    if coefficients is not None:
        return coefficients, zero
    vector = store.of_round("carried", task.state_round)
    return None if vector is None else (none, vector)


def _server_control(
    task: ConvexTask, records: Records, store: FeatureStore, theta: Tensor, server_round: int
) -> Tensor | None:
    """Return c (p, C); None if the model that it is the difference to is lost."""
    if task.control == "sent":
        return _only(records, "control")
    if task.control == "last":
        last = store.of_round("sent", server_round - 1)
        return None if last is None else mean_gradient(last, theta, task.span)
    return torch.zeros_like(theta)


def _loss_at_zero(task: ConvexTask, targets: Tensor) -> dict[str, Scalar]:
    centred = centred_targets(targets, task.loss)
    return {"train-loss": convex_loss(torch.zeros_like(centred), centred, task.loss)}


def _only(records: Records, name: str) -> Tensor:
    arrays = list(records[name].values())
    if len(arrays) != 1:
        raise ValueError(f"record {name}: expected 1 array, got {len(arrays)}")
    return torch.from_numpy(arrays[0])


def _reply(arrays: Arrays, num_examples: int, metrics: dict[str, Scalar]) -> Fit:
    return NamedArrays({"arrays": arrays}), num_examples, metrics


def _lost(state: bool | int) -> Fit:
    """Say that something was lost: c_k itself (1), or what the server can send again (0)."""
    return [], 1, {"lost-state": int(state)}
