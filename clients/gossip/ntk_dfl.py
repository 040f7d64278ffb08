"""Client of NTK-DFL: averages with its neighbours, sends them Jacobians, and evolves.

Source: Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous
Settings via Neural Tangent Kernel*, ICML 2025, algorithms 2 to 4.

What a client gives away: to each neighbour the Jacobian of its examples, which of a first linear
layer holds the inputs exactly, and their labels: see :class:`~fedntk.clients.NTKFLClient`. They
pass through the relay's hands, which can read them unless parcels are sealed.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk import BadReply, JacobianUpload, UploadLimits, jacobian, loss_value
from fedntk.ntk.class_prior import log_class_prior
from fedntk.ntk.evolution import Candidates, lowest_loss, mean_losses
from fedntk.ntk.jacobian.differentiate import Plans
from fedntk.ntk.payloads import (
    EvolutionTask,
    JacobianParcel,
    MemoryBudget,
    screen_losses,
    screen_uploads,
)
from fedntk.ntk.support.arrays import require_array

from ..core.randomness import round_seed
from ..core.weights import Scalar
from .relay import ALL, TO, Answer, Arrays, Message, RelayClient, WeightsParcel, mean_weights

__all__ = ["NTKDFLClient"]

AVERAGE = "-average"  # what is kept within a round, beside the weights
NOTES = "-notes"  # the same, where a hub evolves for others
HUB = "hub"  # in a message's configuration: whether the client is one; where there are none: absent
LOSS, T, HEARD, RESTARTED = "train-loss", "t", "neighbours-heard", "restarted"  # metrics
BESIDE = "metric-"  # before the names of metrics that are kept or sent beside weights


class EvolvedParcel(NamedTuple):
    """What a hub's cluster takes from it."""

    new: WeightsParcel
    t: float
    heard: int

    def to_arrays(self) -> Arrays:
        """Wire format: that of the weights, with ``metric-t`` and ``metric-neighbours-heard``."""
        told = {T: np.array(self.t), HEARD: np.array(self.heard, np.int64)}
        return {**self.new.to_arrays(), **{BESIDE + name: array for name, array in told.items()}}

    @classmethod
    def from_arrays(cls, arrays: Arrays, expected: Arrays) -> "EvolvedParcel":
        """Check what :meth:`to_arrays` made; raises BadReply as that of the weights."""
        t, heard = (arrays.get(BESIDE + name) for name in (T, HEARD))
        if t is None or heard is None:
            raise BadReply("arrays", f"expected {T!r} and {HEARD!r}, got {sorted(arrays)[:5]}")
        require_array(T, t, shape=(), dtype=np.float64, low=0)
        require_array(HEARD, heard, shape=(), dtype=np.int64, low=0, high=2**31)
        rest = {name: a for name, a in arrays.items() if not name.startswith(BESIDE)}
        return cls(WeightsParcel.from_arrays(rest, expected), float(t), int(heard))


class NTKDFLClient(RelayClient):
    """Answers the steps of NTK-DFL: ``weights``, ``average``, ``jacobians`` and ``evolve``.

    Where one member of a cluster evolves for all, there is a last step, ``adopt``.

    Parameters
    ----------
    chunk_size : int, optional
        Examples differentiated at a time; :func:`~fedntk.ntk.jacobian` chooses by default.
    **options
        Of :class:`RelayClient` and :class:`ModelClient`: model, x, y, x_test, y_test, loss, device,
        sampling_rate (1 / m_2 of appendix E.3), cache, seed. The model is of float32 or float64.
        How weights evolve comes with the messages.
    """

    strategy = "NTKDFL"
    config_keys = RelayClient.config_keys | {HUB}
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64)

    def __init__(self, *args: Any, chunk_size: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chunk_size = chunk_size
        self._plans: Plans = {}

    def require_agreement(self, config: Mapping[str, Any]) -> None:
        """Refuse to train for another strategy: see :meth:`ModelClient.require_agreement`."""
        super().require_agreement({k: v for k, v in config.items() if not EvolutionTask.owns(k)})

    def steps(self, message: Message) -> Mapping[str, Callable[[Message], Answer]]:
        """Return what the client does in each step, with the settings that the message brings.

        Raises
        ------
        ValueError
            If it brings no settings of an evolution.
        """
        task = EvolutionTask.from_config(message.config)
        return {
            "weights": lambda own: self._send_weights(own, task),
            "average": lambda own: self._average(own, task),
            "jacobians": lambda own: self._send_jacobians(own, task),
            "evolve": lambda own: self._evolve(own, task),
            "adopt": self._adopt,
        }

    # ------------------------------------------------------------------ steps

    def _send_weights(self, message: Message, task: EvolutionTask) -> Answer:
        """Send w_i to all neighbours (algorithm 2, line 2), but for a lost one to an average."""
        weights, lost = self.current(message.config)
        sent = WeightsParcel(weights, len(self._training)).to_arrays()
        silent = lost and task.average and message.neighbours
        return {} if silent else {ALL: sent}, len(self._training), {RESTARTED: int(lost)}

    def _average(self, message: Message, task: EvolutionTask) -> Answer:
        """Average with the neighbours' weights, and send the average (lines 3 to 5)."""
        del task
        if message.config.get(HUB) is False:
            return {}, len(self._training), {}
        own, lost = self.current(message.config)
        others = self.weights_heard(message, own)
        mine = [WeightsParcel(own, len(self._training))] * (not lost or not others)
        average = mean_weights([*mine, *(parcel for _, parcel in others)])
        self._keep_average(average, message)
        self.keep_before(average, message.config)
        sent = WeightsParcel(average, len(self._training)).to_arrays()
        return {ALL: sent}, len(self._training), {RESTARTED: int(lost)}

    def _send_jacobians(self, message: Message, task: EvolutionTask) -> Answer:
        """Send each neighbour the rows of the own examples at its weights (algorithm 3)."""
        own, _ = self.current(message.config)
        if not task.average and message.batch == 0:
            self._keep_average(own, message)
        x, targets = self._part(message, task)
        outgoing = {}
        for sender, parcel in self.weights_heard(message, own):
            rows = self._rows(parcel.weights, x, targets)
            if not _is_finite(rows):
                bad = BadReply("non-finite", "the network's rows at its weights are not finite")
                self.refuse(sender, bad)
                continue
            if HUB in message.config:
                loss = loss_value(rows.outputs, rows.targets, self.loss)
                self._note(message, {LOSS: loss})
                if task.average and message.batch == 0:
                    self.keep_before(parcel.weights, message.config)
            sent = JacobianParcel(rows, x if task.selection == "true-loss" else None)
            outgoing[f"{TO}{sender}"] = sent.to_arrays(sparsity=task.sparsity, bits=task.bits)
        return outgoing, len(x), {}

    def _evolve(self, message: Message, task: EvolutionTask) -> Answer:
        """Evolve from the average, choose t, and send the new weights (algorithm 4)."""
        if message.config.get(HUB) is False:
            return {}, len(self._training), {}
        average = self._kept_average(message)
        x, targets = self._part(message, task)
        upload = self._rows(average, x, targets)
        own = JacobianParcel(upload, None if task.selection == "last" else x)
        form = JacobianParcel(upload, x if task.selection == "true-loss" else None)
        shapes = {name: array.shape for name, array in average.items()}
        limits = UploadLimits(shapes, message.max_examples, task.sparsity, task.bits)
        budget = MemoryBudget()

        def parse(arrays: Arrays) -> JacobianParcel:
            parcel = JacobianParcel.from_arrays(arrays, limits=limits, own=form)
            budget.hold(parcel.upload)
            return parcel

        heard = self.opened(message, parse)
        uploads = [upload, *(each.upload for _, each in heard)]
        others = self.screened(heard, lambda factor: screen_uploads(uploads, factor), message)
        rows = [own, *(each for _, each in others)]
        whole = JacobianUpload.concatenate([each.upload for each in rows])
        offset = log_class_prior(whole.targets) if task.class_prior else torch.zeros(())
        candidates = Candidates.of(
            average,
            whole.jacobian.to(self.device),
            (whole.outputs + offset).to(self.device),
            whole.targets.to(self.device),
            task.flow,
        )
        best = self._chosen(candidates, own, others, message, offset)
        weights = average if best is None else candidates.weights_at(best)
        if not all(np.isfinite(array).all() for array in weights.values()):
            weights, best = average, None
        metrics: dict[str, Scalar] = {
            LOSS: loss_value(own.upload.outputs, own.upload.targets, self.loss),
            T: 0.0 if best is None else float(task.flow.steps[best]),
            HEARD: len(others),
            RESTARTED: int(self.current(message.config)[1]),
        }
        new = WeightsParcel(weights, len(self._training))
        sent = new.to_arrays()
        if message.batch < task.batches - 1:
            self._keep_average(weights, message)
        elif HUB in message.config:
            self._note(message, {T: metrics[T], HEARD: len(others), LOSS: metrics[LOSS]}, weights)
            sent = EvolvedParcel(new, float(metrics[T]), len(others)).to_arrays()
        else:
            self.keep(weights, message.config)
        return {ALL: sent}, len(self._training), metrics

    def _adopt(self, message: Message) -> Answer:
        """Take the weights that the cluster's hub has found, and send them (appendix E.2)."""
        noted = self._noted(message)
        expected, lost = self.current(message.config)
        if message.config[HUB]:
            weights = {name: noted[name] for name in self.model.state_dict()}
            t, heard = float(noted[BESIDE + T]), int(noted[BESIDE + HEARD])
        else:
            others = self.opened(
                message, lambda arrays: EvolvedParcel.from_arrays(arrays, expected)
            )
            if not others:
                raise ValueError(
                    "no weights came from the cluster's hub; the client keeps its own, and goes on "
                    "with the next round"
                )
            (new, t, heard) = others[0][1]
            weights = new.weights
        self.keep(weights, message.config)
        metrics: dict[str, Scalar] = {LOSS: float(noted[BESIDE + LOSS]), T: t, HEARD: heard}
        metrics[RESTARTED] = int(lost)
        sent = WeightsParcel(weights, len(self._training)).to_arrays()
        return {ALL: sent}, len(self._training), metrics

    # --------------------------------------------------------------- the rows

    def _part(self, message: Message, task: EvolutionTask) -> tuple[Tensor, Tensor]:
        """Return the part of the round's examples that a batch stands for.

        With fewer examples than batches each example is a part, and parts come again.
        """
        x, targets = self.training_examples(message.config)
        if task.batches == 1:
            return x, targets
        generator = np.random.default_rng([*round_seed(self.seed, message.config), *b"batches"])
        parts = np.array_split(generator.permutation(len(x)), min(task.batches, len(x)))
        chosen = torch.from_numpy(np.sort(parts[message.batch % len(parts)]))
        return x[chosen], targets[chosen]

    def _rows(self, weights: Arrays, x: Tensor, targets: Tensor) -> JacobianUpload:
        """Return Jacobian, outputs and targets at some weights: eq. (2)."""
        self.load_weights(weights)
        examples = x.to(self.device)
        rows = jacobian(self.model, examples, chunk_size=self.chunk_size, plans=self._plans)
        outputs = self.outputs(x)
        return JacobianUpload(rows, outputs, targets.to(outputs.dtype))

    def _chosen(
        self,
        candidates: Candidates,
        own: JacobianParcel,
        others: list[tuple[int, JacobianParcel]],
        message: Message,
        offset: Tensor,
    ) -> int | None:
        """Return the position of the t that is taken; None if no loss is finite.

        Losses are compared on the examples of those whose inputs are there: for ``"last"`` nobody's
        are, for ``"own"`` the client's. Neighbours on whose examples they are out of all proportion
        have no say.
        """
        if own.inputs is None:
            return len(candidates) - 1
        each = [list(candidates.weights_at(k).values()) for k in range(len(candidates))]

        def judged(x: Tensor, targets: Tensor) -> tuple[NDArray[np.float64], int]:
            return np.array(self.candidate_losses(each, x, targets, offset)), len(targets)

        mine = judged(own.inputs, own.upload.targets)
        heard = [
            (sender, judged(parcel.inputs, parcel.upload.targets))
            for sender, parcel in others
            if parcel.inputs is not None
        ]
        agreed = self.screened(
            heard,
            lambda factor: screen_losses([mine[0], *(own[0] for _, own in heard)], factor),
            message,
        )
        losses, counts = zip(mine, *(own for _, own in agreed), strict=True)
        return lowest_loss(mean_losses(losses, counts))

    # ------------------------------------------------------- within the round

    def _keep_average(self, average: Arrays, message: Message) -> None:
        number = int(message.config.get("server-round", 0))
        self.store(message.config, AVERAGE).save(number, average)

    def _kept_average(self, message: Message) -> Arrays:
        number = int(message.config.get("server-round", 0))
        kept = self.store(message.config, AVERAGE).load(number)
        if kept is None:
            raise ValueError(
                f"{self.store(message.config, AVERAGE).folder}: the average of this round is lost; "
                "the client goes on with the next round"
            )
        return {name: kept[name] for name in self.model.state_dict()}

    def _note(
        self, message: Message, metrics: Mapping[str, Scalar], weights: Arrays | None = None
    ) -> None:
        number = int(message.config.get("server-round", 0))
        told = {BESIDE + name: np.array(value) for name, value in metrics.items()}
        self.store(message.config, NOTES).save(number, {**(weights or {}), **told})

    def _noted(self, message: Message) -> Arrays:
        store = self.store(message.config, NOTES)
        noted = store.load(int(message.config.get("server-round", 0)))
        if noted is None or BESIDE + LOSS not in noted:
            raise ValueError(
                f"{store.folder}: this round has no Jacobian of the client; the client keeps its "
                "weights, and goes on with the next round"
            )
        return noted


def _is_finite(rows: JacobianUpload) -> bool:
    """Whether outputs and Jacobian hold no infinity and no NaN."""
    arrays = [rows.outputs, *(array for block in rows.jacobian.blocks for array in block.arrays)]
    return all(bool(torch.isfinite(array).all()) for array in arrays)
