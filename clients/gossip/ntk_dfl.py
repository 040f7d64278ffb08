"""Client of NTK-DFL: averages with its neighbours, sends them Jacobians, and evolves.

Source: Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous
Settings via Neural Tangent Kernel*, ICML 2025, algorithms 2 to 4.

What a client gives away, to each neighbour: what :class:`~fedntk.clients.NTKFLClient` gives the
server. The relay can read it unless parcels are sealed.
"""

from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk import BadReply, JacobianUpload, UploadLimits, jacobian, loss_value
from fedntk.ntk.averages import are_finite, change_size, weighted_sum
from fedntk.ntk.evolution.candidates import Candidates, lowest_loss, mean_losses, trimmed_losses
from fedntk.ntk.losses import log_class_prior
from fedntk.ntk.options import argument
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.gossip_options import ALL, TO, NTKDFLTask, mixing_row
from fedntk.ntk.payloads.leave_one_out import screen_harmful
from fedntk.ntk.payloads.screening import (
    STRANGER_FACTOR,
    MemoryBudget,
    screen_losses,
    screen_sizes,
    screen_strangers,
    screen_uploads,
)
from fedntk.ntk.payloads.uploads import JacobianParcel, compresses
from fedntk.ntk.support.arrays import ArrayDict, require_array, take_arrays

from ..core.base import candidate_losses
from ..core.randomness import round_seed
from ..core.weights import Scalar
from .relay import HEARD, RESTARTED, Answer, Message, RelayClient, WeightsParcel

T = "t"  # metric
BESIDE = "metric-"  # before the names of metrics beside weights


class EvolvedParcel(NamedTuple):
    """What a hub sends its cluster's members."""

    new: WeightsParcel
    t: float  # the hub's choice
    heard: int  # its neighbours

    def to_arrays(self) -> ArrayDict:
        """Wire format: that of the weights, with ``metric-t`` and ``metric-neighbours-heard``."""
        metrics = {BESIDE + T: np.array(self.t), BESIDE + HEARD: np.array(self.heard, np.int64)}
        return self.new.to_arrays() | metrics

    @classmethod
    def from_arrays(cls, arrays: ArrayDict, expected: ArrayDict, most: int) -> "EvolvedParcel":
        """Check what :meth:`to_arrays` made; raise BadReply."""
        names = (BESIDE + T, BESIDE + HEARD)
        t, heard = take_arrays({n: arrays[n] for n in names if n in arrays}, *names)
        require_array(T, t, shape=(), dtype=np.float64, low=0)
        require_array(HEARD, heard, shape=(), dtype=np.int64, low=0, high=2**31)
        weights = {n: a for n, a in arrays.items() if n not in names}
        return cls(WeightsParcel.from_arrays(weights, expected, most), float(t), int(heard))


class NTKDFLClient(RelayClient):
    """Answers the steps of NTK-DFL: ``weights``, ``average``, ``jacobians`` and ``evolve``.

    If one member of a cluster evolves for all, ``adopt`` follows. `sampling_rate` is 1 / m_2 of
    appendix E.3.
    """

    strategy = "NTKDFL"
    config_keys = RelayClient.config_keys | {wire.HUB}
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64)
    options_kind = NTKDFLTask

    chunk_size: int | None = argument(
        "examples differentiated at a time; chosen by default", default=None
    )

    def step_weights(self, message: Message) -> Answer:
        """Send the weights; without averages also those of a client that lost its own."""
        weights, lost = message.memory.current()
        silent = lost and message.options.average_first and message.neighbours
        return {} if silent else {ALL: self.parcel(weights)}, {RESTARTED: int(lost)}

    def step_average(self, message: Message) -> Answer:
        """Average with the neighbours' weights, and send the average (algorithm 2)."""
        if message.config.get(wire.HUB) is False:
            return {}, {}
        weights, lost = message.memory.current()
        others = self.read_weights(message, weights)
        if message.options.rule == "leave-one-out":
            distances = [change_size(weights, parcel.weights) for _, parcel in others]
            others = self.screen(others, [None, *screen_sizes(distances, STRANGER_FACTOR)])
            models = [weights, *(parcel.weights for _, parcel in others)]
            examples = self.training_examples(dict(message.config))
            losses = candidate_losses(self, [[*model.values()] for model in models], *examples)
            others = self.screen(others, screen_strangers(losses))
        parcels = [parcel for _, parcel in others]
        if not (lost and others):
            parcels = [WeightsParcel(weights, self.num_examples), *parcels]
        shares = mixing_row(message.options.mixing, [parcel.num_examples for parcel in parcels])
        average = weighted_sum([parcel.weights for parcel in parcels], shares)
        message.memory.keep_within("weights", average)
        message.memory.keep_before(average)
        return {ALL: self.parcel(average)}, {RESTARTED: int(lost)}

    def step_jacobians(self, message: Message) -> Answer:
        """Send each neighbour the rows of the own examples at its weights (algorithm 3)."""
        weights, options = message.memory.current()[0], message.options
        if not options.average_first and message.batch == 0:
            message.memory.keep_within("weights", weights)
        x, targets = _batch_of(self, message)
        outgoing = {}
        for sender, parcel in self.read_weights(message, weights):
            rows = self._rows(parcel.weights, x, targets)
            blocks = [array for block in rows.jacobian.blocks for array in block.arrays]
            if not all(bool(torch.isfinite(array).all()) for array in (rows.outputs, *blocks)):
                bad = BadReply("non-finite", "the network's rows at its weights are not finite")
                self.refuse(sender, bad)
                continue
            if wire.HUB in message.config:
                loss = loss_value(rows.outputs, rows.targets, self.loss)
                message.memory.keep_within("metrics", {wire.TRAIN_LOSS: loss})
                if options.average_first and message.batch == 0:
                    message.memory.keep_before(parcel.weights)
            sent = JacobianParcel(rows, x if options.selection == "true-loss" else None)
            outgoing[f"{TO}{sender}"] = sent.to_arrays(sparsity=options.sparsity, bits=options.bits)
        return outgoing, {}

    def step_evolve(self, message: Message) -> Answer:
        """Evolve from the average, choose t, and send the new weights (algorithm 4)."""
        if message.config.get(wire.HUB) is False:
            return {}, {}
        average, options = message.memory.weights_within(), message.options
        rows, others = self._all_rows(average, message)
        whole = JacobianUpload.concatenate([rows.upload, *(parcel.upload for _, parcel in others)])
        offset = log_class_prior(whole.targets) if options.class_prior else torch.zeros(())
        flow = options.flow_in(message.memory.round)
        outputs, targets = (whole.outputs + offset).to(self.device), whole.targets.to(self.device)
        candidates = Candidates.of(average, whole.jacobian.to(self.device), outputs, targets, flow)
        best = self._choose(candidates, rows, others, message, offset)
        weights = average if best is None else candidates.weights_at(best)
        if not are_finite(weights, average):
            weights, best = average, None
        metrics: dict[str, Scalar] = {
            wire.TRAIN_LOSS: loss_value(rows.upload.outputs, rows.upload.targets, self.loss),
            T: 0.0 if best is None else float(flow.steps[best]),
            HEARD: len(others),
            RESTARTED: int(message.memory.current()[1]),
        }
        new = WeightsParcel(weights, self.num_examples)
        is_last = message.batch == options.batches - 1
        if is_last and wire.HUB not in message.config:
            message.memory.keep(weights)
            return {ALL: new.to_arrays()}, metrics
        message.memory.keep_within("weights", weights)
        message.memory.keep_within("metrics", metrics)
        sent = EvolvedParcel(new, float(metrics[T]), len(others)) if is_last else new
        return {ALL: sent.to_arrays()}, metrics

    def step_adopt(self, message: Message) -> Answer:
        """Take the weights that the cluster's hub has found, and send them (appendix E.2)."""
        noted, (expected, lost) = message.memory.metrics_within(), message.memory.current()
        if wire.TRAIN_LOSS not in noted:
            raise ValueError(
                "adopt: the client has no Jacobian in this round; it keeps its weights, and goes "
                "on with the next round"
            )
        if message.config[wire.HUB]:
            weights, t, heard = message.memory.weights_within(), noted[T], noted[HEARD]
        else:

            def parse(_: int, arrays: ArrayDict) -> EvolvedParcel:
                return EvolvedParcel.from_arrays(arrays, expected, message.max_examples)

            others = self.open(message.parcels, parse)
            if not others:
                raise ValueError(
                    "no weights came from the cluster's hub; the client keeps its own, and goes on "
                    "with the next round"
                )
            ((weights, _), t, heard) = others[0][1]
        message.memory.keep(weights)
        metrics = {wire.TRAIN_LOSS: noted[wire.TRAIN_LOSS], T: t, HEARD: heard}
        return {ALL: self.parcel(weights)}, {**metrics, RESTARTED: int(lost)}

    def _rows(self, weights: ArrayDict, x: Tensor, targets: Tensor) -> JacobianUpload:
        self.load_weights(weights)
        rows = jacobian(self.model, x.to(self.device), chunk_size=self.chunk_size)
        outputs = self.outputs(x)
        return JacobianUpload(rows, outputs, targets.to(outputs.dtype))

    def _all_rows(
        self, average: ArrayDict, message: Message
    ) -> tuple[JacobianParcel, list[tuple[int, JacobianParcel]]]:
        x, targets = _batch_of(self, message)
        upload, options = self._rows(average, x, targets), message.options
        if compresses(options.sparsity, options.bits):
            if self.real_targets:
                raise ValueError("real_targets: compressed rows have labels; expected bits = 32")
            upload = replace(upload, jacobian=upload.jacobian.expanded())
        rows = JacobianParcel(upload, None if options.selection == "last" else x)
        form = JacobianParcel(upload, x if options.selection == "true-loss" else None)
        shapes = {name: array.shape for name, array in average.items()}
        limits = UploadLimits(shapes, message.max_examples, options.sparsity, options.bits)
        budget = MemoryBudget()

        def parse(_: int, arrays: ArrayDict) -> JacobianParcel:
            parcel = JacobianParcel.from_arrays(
                arrays, limits=limits, receiver=form, real_targets=self.real_targets
            )
            budget.hold(parcel.upload)
            return parcel

        heard = self.open(message.parcels, parse)
        uploads = [upload, *(parcel.upload for _, parcel in heard)]
        others = self.screen(heard, screen_uploads(uploads, message.outlier_factor))
        if options.rule == "leave-one-out":
            uploads = [upload, *(parcel.upload for _, parcel in others)]
            others = self.screen(others, screen_harmful(uploads, options.malicious, trusted=1))
        return rows, others

    def _choose(
        self,
        candidates: Candidates,
        rows: JacobianParcel,
        others: list[tuple[int, JacobianParcel]],
        message: Message,
        offset: Tensor,
    ) -> int | None:
        """Return the position of t by the plausible losses on all inputs, None if all are bad."""
        if rows.inputs is None:
            return len(candidates) - 1
        models = [list(candidates.weights_at(k).values()) for k in range(len(candidates))]

        def judge(x: Tensor, targets: Tensor) -> tuple[NDArray[np.float64], int]:
            return np.array(candidate_losses(self, models, x, targets, offset)), len(targets)

        first = judge(rows.inputs, rows.upload.targets)
        judged = [(j, judge(p.inputs, p.upload.targets)) for j, p in others if p.inputs is not None]
        all_losses = [first[0], *(losses for _, (losses, _) in judged)]
        agreed = self.screen(judged, screen_losses(all_losses, message.outlier_factor))
        losses, counts = zip(first, *(judgement for _, judgement in agreed), strict=True)
        if message.options.rule != "none":
            return lowest_loss(trimmed_losses(losses, message.options.malicious))
        return lowest_loss(mean_losses(losses, counts))


def _batch_of(client: NTKDFLClient, message: Message) -> tuple[Tensor, Tensor]:
    """Return a batch's examples; parts come again if there are fewer examples than batches."""
    x, targets = client.training_examples(dict(message.config))
    batches = message.options.batches
    if batches == 1:
        return x, targets
    generator = np.random.default_rng([*round_seed(client.seed, message.config), *b"batches"])
    parts = np.array_split(generator.permutation(len(x)), min(batches, len(x)))
    chosen = torch.from_numpy(np.sort(parts[message.batch % len(parts)]))
    return x[chosen], targets[chosen]
