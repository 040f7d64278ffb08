"""Client of TCT: local SGD first, then a linear model of tangent features.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4 and algorithms 1 and 2. The steps of stage 2 are those of
:mod:`fedntk.ntk.convex.local_steps`. Algorithm 1's correction h_k is c_k - c (its invariant,
appendix A.1): c_k = -Z^T A_k with A_k (n x C), the mean residual along the last steps over n, which
is all that a client keeps from its own past; and c = (theta^{t-1} - theta^t) / (M eta), for which
it keeps the last model it was sent.

What a client gives away: with few examples, the moments of its features are close to the features,
and these are gradients that hold inputs of a first linear layer. ``solve="statistics"`` gives sums
over all of a client's examples: those of one example are its features, and those of few hold them.
"""

from collections.abc import Mapping
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk import Moments, Predictor, TCTModel
from fedntk.ntk.convex.local_steps import (
    Spectrum,
    centred_targets,
    convex_loss,
    mean_gradient,
    residual_sum,
)
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.features.rows import FeatureRows
from fedntk.ntk.options import argument, option, part, read_task
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.split_statistics import SplitStatistics

from ..core.base import LostStateError
from ..core.disk_store import client_folder, client_name, example_digests, make_folder
from ..core.feature_sums import Sums, SumsClient
from ..core.local_sgd import SGD_KEYS, LocalSGD
from ..core.weights import Config, Evaluation, Fit, NamedArrays, Parameters, records_of, set_weights
from .feature_store import ClientControl, FeatureStore, require_room

STAGE_1 = ("train", "bootstrap")  # steps
logger = getLogger("flwr")
Arrays = Mapping[str, NDArray[Any]]
Records = Mapping[str, Arrays]
Steps = tuple[Tensor, Tensor, Tensor, dict[str, Any]]  # W_M, A_k, Z W_0, metrics


class BootstrapSGD(LocalSGD, frozen=True):
    """Local training of stage 1, with the defaults of Yu et al. 2022; TCTClient takes no other."""

    epochs: int = LocalSGD.options()["epochs"].field(default=5)
    batch_size: int = LocalSGD.options()["batch_size"].field(default=64)
    weight_decay: float = LocalSGD.options()["weight_decay"].field(default=1e-5)


class TCTClient(SumsClient):
    """Trains in stage 1 as :class:`SGDClient`; in stage 2 solves its part of the convex problem.

    All settings of stage 2 come from the strategy; ``config["lr"]`` is of stage 1. What is computed
    once is kept on disk: with p features an example the features take ``4 n p`` bytes, or ``2 n p``
    in float16, and ``4 n p`` beside that until they are normalised; as much for test examples that
    are not the training examples; kernel and eigenvectors ``12 n^2``. In memory are a chunk of 128
    MiB of features, and up to 512 MiB to differentiate it; while the kernel is formed two blocks of
    512 MiB and ``4 n^2`` bytes; and for the decomposition about ``52 n^2``. What would not fit is
    refused with its size, in the first round of stage 1.

    A client needs its folder in `cache` from round to round; it goes as a
    :class:`PersonalisedClient`'s, see also :func:`shrink`. Examples may come in another order in
    each message. If they are others than before, the client says so in its log and in the metric
    ``examples-changed``, computes the features anew and keeps its correction as it was.
    """

    strategy = "TCT"
    replies = "weights, then linear models"
    config_keys = SGD_KEYS
    task_kind = ConvexTask
    takes_real_targets = True

    sgd: BootstrapSGD = part("local training of stage 1", default=BootstrapSGD)
    dtype: Literal["float32", "float16"] = option(
        "dtype in which features are kept, as far as it holds them", default="float32"
    )
    chunk_size: int | None = argument("examples differentiated at a time", default=None)
    cache: Path | str | None = argument(
        "folder for what is computed once; by default fedntk/tct in $XDG_CACHE_HOME or ~/.cache",
        default=None,
    )

    def require_permitted_step(self, step: str, config: Mapping[str, Any]) -> None:
        """Refuse, as a private client, what is not masked; in stage 1 if there is a ledger."""
        if step not in STAGE_1:
            self.secure.require_masked(step)
        elif self.secure.privacy is not None:
            raise ValueError(
                "privacy: stage 1 sends weights without masks, which its ledger does not "
                "count; have the strategy begin with stage 2, without bootstrap rounds"
            )

    def reported_examples(self, task: ConvexTask) -> int:
        """Return the number of training examples."""
        return self.num_examples

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train from the received weights (stage 1), as :class:`SGDClient`."""
        x, targets = self.training_examples(config)
        train_loss = self.sgd.train(self, parameters, x, targets, config)
        return self.get_parameters(config), len(x), {wire.TRAIN_LOSS: train_loss}

    def step_bootstrap(self, parameters: Parameters, config: Config) -> Fit:
        """Do the same; refuse in round 1 what stage 2 could not do or not hold in memory."""
        if int(config.get("server-round", 0)) == 1:
            task = ConvexTask.from_config(config)
            set_weights(self.model, parameters)
            task.feature_map.require_outputs(self.model, self.targets.shape[1])
            task.feature_map.extractor(self.model)(self.project(self.inputs[:1], config))
            n, width = len(self.inputs), task.feature_map.width(self.model)
            folder = self.folder(task, config)  # an error now if it cannot be made
            if task.solve == "statistics":
                sums = SplitStatistics if task.validation_share else FeatureStatistics
                sums.require_memory(width)
            else:
                require_room(folder, n, width, self.dtype, decomposes=task.num_steps > 1)
        return self.step_train(parameters, config)

    def step_counts(self, parameters: Parameters, config: Config) -> Fit:
        """Return the number of examples of each class."""
        if self.real_targets:
            raise ValueError("real_targets: they have no classes; expected balanced = False")
        counts = {wire.COUNTS: self.targets.sum(0).numpy().astype(np.int64)}
        task = ConvexTask.from_config(config)
        return _reply_at_zero(task, centred_targets(self.targets, task.loss), counts)

    def step_moments(self, parameters: Parameters, config: Config) -> Fit:
        """Return the arrays of the Moments of the features."""
        work = self._start_work(parameters, config, wire.NETWORK)
        changed = {wire.EXAMPLES_CHANGED: self._note_examples(work)}
        moments = Moments.join(map(Moments.of, work.store.raw("train", work.x)))
        if work.task.bias and not self.real_targets:
            counts = work.targets.sum(0).numpy().astype(np.int64)
            moments = replace(moments, class_counts=counts)
        return _reply_at_zero(work.task, work.centred, moments.to_arrays(), changed)

    def step_statistics(self, parameters: Parameters, config: Config) -> Fit:
        """Return the arrays of FeatureStatistics or SplitStatistics."""
        work = self._start_work(parameters, config, wire.NETWORK)
        sums, fixed_point = self._sum_up(work, as_root=True)
        return _reply_at_zero(work.task, work.centred, sums.to_arrays(fixed_point))

    def step_masked(self, parameters: Parameters, config: Config) -> Fit:
        """Return the masked words of the same sums."""
        work = self._start_work(parameters, config, wire.NETWORK)
        sums, fixed_point = self._sum_up(work)
        task, message = work.task, work.records[wire.SECURE_SUM]
        key = task.key_of(task.feature_map, work.store.network)
        request = self.sum_request(task, config)
        arrays = self.mask_sums(sums, request, message, key=key, fixed_point=fixed_point)
        return _reply_at_zero(task, work.centred, arrays)

    def step_linear(self, parameters: Parameters, config: Config) -> Fit:
        """Take M corrected steps from the received model, and return the new one (algorithm 1).

        ``"train-loss"`` is at the received model. A client that lacks what the message presumes
        returns no arrays and ``"lost-state"``: 1 if its c_k is lost, 0 if the server can send what
        is. One whose steps overflow returns none, and ``"diverged"``.
        """
        work = self._start_work(parameters, config, wire.NETWORK, wire.NORMALISER)
        changed = self._note_examples(work)
        task, store = work.task, work.store
        targets = work.centred
        server_round = int(config.get("server-round", 0))
        theta, arrays = _only(work.records, wire.LINEAR), dict[str, NDArray[Any]]()
        if task.corrected and task.state_round > 0:
            arrays = dict(store.control(task.state_round))
            if not arrays:
                raise LostStateError("the correction c_k is lost", 1, state=1)
        client_control = ClientControl.of(arrays, tuple(targets.shape), store.width + task.bias)
        control = torch.zeros_like(theta)
        if task.control == "sent":
            control = _only(work.records, wire.CONTROL)
        elif task.control == "last":
            last = store.sent(server_round - 1)
            if last is None:
                raise LostStateError("the model of the last round is lost", 1)
            control = mean_gradient(last, theta, task.span)
        rows = store.rows("train", work.x, bias=task.bias, device=self.device)
        model, after, outputs, metrics = _take_steps(
            work, rows, theta, client_control.coefficients, control - client_control.vector
        )
        if not bool(torch.isfinite(model).all()):
            return [], len(targets), {**metrics, wire.DIVERGED: 1, wire.EXAMPLES_CHANGED: changed}
        if task.corrected:
            store.remember(server_round, after, theta, needed=task.state_round)
        metrics[wire.TRAIN_LOSS] = convex_loss(outputs, targets, task.loss)
        metrics[wire.EXAMPLES_CHANGED] = changed
        reply = NamedArrays({"arrays": {TCTModel.ARRAYS[0]: model.numpy()}})
        return reply, len(targets), metrics

    def _start_work(self, parameters: Parameters, config: Config, *needed: str) -> "_Work":
        task = ConvexTask.from_config(config)
        names = [wire.LINEAR] if task.step == "linear" else []
        if task.control == "sent":
            names.append(wire.CONTROL)
        records = records_of(parameters, *names, strategy=self.strategy)
        store = self._store(task, records, config, *needed)
        digests, order = _sort_examples(self.inputs, self.targets)
        x = self.project(self.inputs[order], config)
        targets = self.targets[order]
        centred = centred_targets(targets, task.loss, self.real_targets)
        return _Work(task, records, store, digests, x, targets, centred, config)

    def _note_examples(self, work: "_Work") -> int:
        """Return whether the examples have changed: then c_k stays, and all else is made anew."""
        task, store, digests = work.task, work.store, work.digests
        before = store.examples("train")
        if before is None:
            store.save("examples-train", digests=digests)
        if before is None or store.has("train", digests):
            return 0
        previous = set(map(tuple, before.tolist()))
        logger.warning(
            "client-%s: %d of its %d examples are the same as before; features are computed anew. "
            "Return the same examples, in any order, in all rounds of a run",
            client_name(work.config, self.seed),
            sum(tuple(row) in previous for row in digests.tolist()),
            len(digests),
        )
        counted = task.state_round if task.corrected else 0
        store.carry(counted, bias=task.bias, device=self.device)
        store.replace("train", digests)
        return 1

    def folder(self, task: ConvexTask, config: Mapping[str, Any]) -> Path:
        """Return the folder of what this client keeps in a run."""
        client = client_name(config, self.seed)
        return make_folder(client_folder(self.cache, "tct", task.run_key, client))

    def _store(
        self, task: ConvexTask, records: Records, config: Mapping[str, Any], *needed: str
    ) -> FeatureStore:
        """Return what is kept, with what came; LostStateError if something needed is missing."""
        store = FeatureStore(
            self.folder(task, config),
            f"{task.network_key} {task.bias}",
            self.model,
            task.feature_map,
            dtype=self.dtype,
            chunk_size=self.chunk_size,
        )
        store.take(records)
        if not store.holds(*needed):
            text = "the network of stage 2 is lost: it is sent again with a later round"
            raise LostStateError(text, 1)
        return store

    def _sum_up(self, work: "_Work", *, as_root: bool = False) -> tuple[Sums, FixedPoint | None]:
        task, width = work.task, work.store.width
        fixed_point = self.fixed_point_in(work.records, task.bits, width)
        sums = self.add_up(
            lambda chosen: work.store.stream(work.x[chosen]),
            work.targets,
            width,
            share=task.validation_share,
            weights=_only(work.records, wire.CLASS_WEIGHTS).numpy() if task.balanced else None,
            fixed_point=fixed_point,
            as_root=as_root,
        )
        return sums, fixed_point

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Evaluate the network or the linear model; ``"lost-state"``: 0 if the network is lost."""
        task = read_task(ConvexTask, config)
        if task is None:
            set_weights(self.model, parameters)
            return self.evaluate_model(config)
        if self.is_private:
            self.require_test_examples()
        records = records_of(parameters, wire.LINEAR, strategy=self.strategy)
        try:
            store = self._store(task, records, config, wire.NETWORK, wire.NORMALISER)
        except LostStateError as lost:
            return 0.0, lost.num_examples, dict(lost.metrics)
        digests, order = _sort_examples(self.test_inputs, self.test_targets)
        same = self.test_inputs is self.inputs and store.has("train", digests)
        name = "train" if same else "test"
        if not store.has(name, digests):
            store.replace(name, digests)
        x = self.project(self.test_inputs[order], config)
        rows = store.rows(name, x, bias=task.bias, device=self.device)
        outputs, targets = rows @ _only(records, wire.LINEAR), self.test_targets[order]
        centred = centred_targets(targets, task.loss, self.real_targets)
        value = convex_loss(outputs, centred, task.loss)
        return value, len(targets), self.quality(outputs, targets)

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of the network or the linear model; LookupError if the network is lost."""
        task = read_task(ConvexTask, config)
        if task is None:
            return self.network_predictor(parameters)
        records = records_of(parameters, wire.LINEAR, strategy=self.strategy)
        store = self._store(task, records, config, wire.NETWORK, wire.NORMALISER)
        set_weights(self.model, store.network)
        linear = _only(records, wire.LINEAR).numpy()
        model = TCTModel(self.model, task.feature_map, store.normaliser, linear, loss=task.loss)
        model.targets = self.standardised
        return model


class _Work(NamedTuple):
    """A task of stage 2, and the examples in the order of what is kept."""

    task: ConvexTask
    records: Records
    store: FeatureStore
    digests: NDArray[np.uint64]  # of the examples, (n, 2)
    x: Tensor  # projected, (n, ...)
    targets: Tensor  # (n, C)
    centred: Tensor  # of least squares
    config: Mapping[str, Any]


def _take_steps(
    work: _Work, rows: FeatureRows, theta: Tensor, before: Tensor, shift: Tensor
) -> Steps:
    """Take the steps of eq. (3), by the sum of the residuals in the kernel's eigenbasis.

    The correction h_k is -Z^T A_k, by the A_k (n, C) `before`, minus `shift` (p, C).
    """
    task, store = work.task, work.store
    metrics: dict[str, Any] = {}
    outputs, along = (rows @ torch.cat([theta, shift], 1)).split(theta.shape[1], 1)
    kernel: Spectrum | Tensor = torch.empty(0, 0)
    drift = torch.zeros_like(outputs)
    if task.num_steps > 1:
        matrix = store.kernel(rows)
        drift = -(matrix.double() @ before) - along
        kernel = store.spectrum(matrix, rows.device) if task.loss == "mse" else matrix
    if isinstance(kernel, Spectrum):
        metrics[wire.RATE_TIMES_LAMBDA] = kernel.rate(task.learning_rate)
    total = residual_sum(
        kernel,
        outputs,
        work.centred,
        drift,
        learning_rate=task.learning_rate,
        local_steps=task.num_steps,
        loss=task.loss,
    )
    after = total / (rows.shape[0] * task.num_steps)
    change = rows.transposed_matmul((after - before).float())
    return theta + task.span * (change - shift), after, outputs, metrics


def _sort_examples(x: Tensor, targets: Tensor) -> tuple[NDArray[np.uint64], Tensor]:
    digests = example_digests(x, targets)
    order = np.lexsort(digests.T)
    return digests[order], torch.from_numpy(order)


def _only(records: Records, name: str) -> Tensor:
    arrays = list(records[name].values())
    if len(arrays) != 1:
        raise ValueError(f"record {name}: expected 1 array, got {len(arrays)}")
    return torch.from_numpy(arrays[0])


def _reply_at_zero(
    task: ConvexTask, centred: Tensor, arrays: Arrays, more: Mapping[str, Any] | None = None
) -> Fit:
    """Return arrays, with the loss of the linear model that is zero."""
    loss = convex_loss(torch.zeros_like(centred), centred, task.loss)
    metrics = {wire.TRAIN_LOSS: loss, **(more or {})}
    return NamedArrays({"arrays": arrays}), len(centred), metrics
