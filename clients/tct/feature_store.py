"""What a client of TCT computes once and keeps on disk: its features, their kernel, its state."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import FeatureMap, Normaliser, require_disk, require_memory
from fedntk.ntk.convex.local_steps import Spectrum
from fedntk.ntk.features.rows import CACHED_BYTES, FeatureRows
from fedntk.ntk.payloads import wire

from ..core.disk_store import DiskStore
from ..core.weights import set_weights

logger = getLogger("flwr")
STATES = 20  # of the newest rounds that a client took part in: any may be gone on from
SENT = 2  # models of the newest rounds: a round may be asked for again
SQUARE_BYTES = 12  # of n^2 numbers: kernel and eigenvectors, on disk and in memory
CHUNK_BYTES = 128 * 2**20  # of features that are computed at a time
WITHOUT_NORMALISER = (wire.NETWORK, "raw-train", "raw-test", "examples-train", "examples-test")
LESS_DISK = "lower num_features, or choose another cache"
Arrays = Mapping[str, NDArray[Any]]


def shrink(cache: Path) -> None:
    """Remove from all clients' folders what can be made again, and their state of old rounds."""
    for folder in cache.glob("client-*/run-*/"):
        states = sorted(folder.glob("state-*.npz"), reverse=True)
        names = {"key.json", "examples-train.npz", *(path.name for path in states[:2])}
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()


def require_room(folder: Path, n: int, width: int, dtype: str, *, decomposes: bool) -> None:
    """Refuse n examples whose features do not fit on disk, or whose kernel not in memory."""
    needed = n * width * (4 + np.dtype(dtype).itemsize)
    require_disk(needed, f"{width} features of {n} examples", folder, cure=LESS_DISK)
    if decomposes:
        needed = (Spectrum.BYTES + SQUARE_BYTES) * n * n
        cure = "give the client fewer examples"
        require_memory(needed, f"stage 2 with {n} examples", cure=cure)


class ClientControl(NamedTuple):
    """SCAFFOLD's c_k = v - Z^T A_k; one of both is zero, and is not kept.

    A_k is of the examples that the features Z are of; v is c_k from before these changed.
    """

    coefficients: Tensor  # A_k (n, C), float64
    vector: Tensor  # v (p, C), float32

    @classmethod
    def of(cls, arrays: Arrays, shape: tuple[int, ...], width: int) -> Self:
        """Read what is kept of a round, for targets of a shape (n, C) and p = `width`."""
        zeros = np.zeros(shape), np.zeros((width, shape[1]), np.float32)
        parts = zip(cls._fields, zeros, strict=True)
        return cls(*(torch.from_numpy(arrays.get(name, zero)) for name, zero in parts))


class FeatureStore(DiskStore):
    """A folder with one client's network, features, kernel and state in stage 2.

    It is emptied when another `key` comes, which names all that its content depends on but the
    normaliser. The model's weights are overwritten by the network's. Features too large for float16
    are kept in float32, as of examples unlike those by which the normaliser was fitted.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        model: nn.Module,
        feature_map: FeatureMap,
        *,
        dtype: Literal["float32", "float16"],
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(folder, [key, dtype], cure=LESS_DISK)
        self.model, self.feature_map = model, feature_map
        self.dtype, self.chunk_size = dtype, chunk_size
        self.width = feature_map.width(model)

    def take(self, records: Mapping[str, Arrays]) -> None:
        """Keep a network and a normaliser that came; a new one makes void the old one's work."""
        if wire.NETWORK in records:
            arrays = records[wire.NETWORK].values()
            self.save(wire.NETWORK, **{str(i): array for i, array in enumerate(arrays)})
        if wire.NORMALISER in records:
            parts = list(records[wire.NORMALISER].values())
            if len(parts) != 2:
                raise ValueError(f"record normaliser: expected mean and scale, got {len(parts)}")
            old = self.load(wire.NORMALISER)
            if old and not all(map(np.array_equal, old.values(), parts)):
                self.remove(all_but=WITHOUT_NORMALISER)
            self.save(wire.NORMALISER, mean=parts[0], inv_std=parts[1])

    def holds(self, *names: str) -> bool:
        """Whether these have come: ``"network"``, ``"normaliser"``."""
        return all(self.load(name) for name in names)

    @property
    def network(self) -> list[NDArray[Any]]:
        """The network's weights, in the order of its state dict."""
        saved = self.load(wire.NETWORK)
        return [saved[str(i)] for i in range(len(saved))]

    @property
    def normaliser(self) -> Normaliser:
        """The normaliser that came last."""
        return Normaliser(**self.load(wire.NORMALISER))

    def examples(self, name: str) -> NDArray[np.uint64] | None:
        """Return the sorted digests (n, 2) of examples, ``"train"`` or ``"test"``, if any."""
        return self.load(f"examples-{name}").get("digests")

    def has(self, name: str, digests: NDArray[np.uint64]) -> bool:
        """Whether a set's content was computed from these examples."""
        saved = self.examples(name)
        return saved is not None and np.array_equal(saved, digests)

    def replace(self, name: str, digests: NDArray[np.uint64]) -> None:
        """Keep these examples under a name, and nothing of others."""
        patterns = [f"raw-{name}.npy", f"features-{name}.npy"]
        if name == "train":
            patterns += ["kernel.npz", "spectrum.npz"]
        for pattern in patterns:
            self.remove(pattern=pattern)
        self.save(f"examples-{name}", digests=digests)

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the features of examples (n, ...) before they are normalised, (m, p) at a time."""
        set_weights(self.model, self.network)
        extract = self.feature_map.extractor(self.model, chunk_size=self.chunk_size)
        yield from map(extract, x.split(max(1, CHUNK_BYTES // (4 * self.width))))

    def raw(self, name: str, x: Tensor) -> Iterator[Tensor]:
        """Do the same, and keep them until the normaliser comes."""
        start = 0
        with self._fill(f"raw-{name}", len(x), "float32") as stored:
            for features in self.stream(x):
                stored[start : start + len(features)] = features.numpy()
                start += len(features)
                yield features

    def rows(self, name: str, x: Tensor, *, bias: bool, device: torch.device | str) -> FeatureRows:
        """Return the normalised features of examples (n, ...)."""
        shape = (len(x), self.width)
        normalise = self.normaliser
        if self.dtype == "float16" and not normalise.mean.any() and (normalise.inv_std == 1).all():
            raise ValueError(
                "dtype = float16 would lose small features that are not normalised; use float32"
            )
        features = self.mapped(f"features-{name}", shape)
        if features is None:
            raw = self.mapped(f"raw-{name}", shape)
            if raw is None:
                for _ in self.raw(name, x):
                    pass
                raw = self._there(f"raw-{name}", shape)
            try:
                self._normalise(name, raw, normalise, self.dtype)
            except OverflowError as error:
                if self.dtype == "float32":
                    raise
                logger.warning("%s: these examples' are kept in float32", error)
                self._normalise(name, raw, normalise, "float32")
            self.remove(pattern=f"raw-{name}.npy")
            features = self._there(f"features-{name}", shape)
        return FeatureRows(features, device=device, bias=bias)

    def _normalise(self, name: str, raw: NDArray[Any], normalise: Normaliser, dtype: str) -> None:
        size = max(1, CACHED_BYTES // (4 * self.width))
        with self._fill(f"features-{name}", len(raw), dtype) as stored:
            whole, filled = (torch.from_numpy(array).split(size) for array in (raw, stored))
            for features, place in zip(whole, filled, strict=True):
                made = normalise(features)
                largest = max(map(abs, map(float, made.aminmax()))) if made.numel() else 0.0
                if not largest <= float(np.finfo(dtype).max):
                    raise OverflowError(
                        f"a normalised feature of {largest:g} does not fit in {dtype}"
                    )
                place.copy_(made)

    def _fill(self, name: str, n: int, dtype: str) -> AbstractContextManager[NDArray[Any]]:
        what = f"{self.width} features of {n} examples"
        return self.fill(name, (n, self.width), dtype, what=what)

    def _there(self, name: str, shape: tuple[int, int]) -> NDArray[Any]:
        array = self.mapped(name, shape)
        if array is None:
            raise OSError(f"{name} has gone from {self.folder} while it was made; try again")
        return array

    def kernel(self, rows: FeatureRows) -> Tensor:
        """Return Z Z^T (n, n) of the training examples, float32, formed once."""
        kernel = self._tensor("kernel")
        if kernel is None:
            kernel = rows.gram()
            self.save("kernel", kernel=kernel.numpy())
        return kernel

    def spectrum(self, kernel: Tensor, device: torch.device | str) -> Spectrum:
        """Return its eigenvalues and -vectors on the CPU, found once, on a device."""
        if saved := self.load("spectrum"):
            return Spectrum(**{name: torch.from_numpy(array) for name, array in saved.items()})
        on_device = Spectrum.of(kernel.to(device))
        spectrum = Spectrum(on_device.values.cpu(), on_device.vectors.cpu())
        self.save("spectrum", values=spectrum.values.numpy(), vectors=spectrum.vectors.numpy())
        return spectrum

    def remember(
        self, server_round: int, coefficients: Tensor, linear: Tensor, *, needed: int = 0
    ) -> None:
        """Keep this round's A_k (n, C) and the model sent; c_k of the round `needed` stays."""
        self.save(_of("state-", server_round), coefficients=coefficients.numpy())
        self.save(_of("sent-", server_round), linear=linear.numpy())
        self.remove(pattern="sent-*.npz", all_but=self.names("sent-*.npz")[-SENT:])
        newest = [*self.names("state-*.npz")[-STATES:], _of("state-", needed)]
        self.remove(pattern="state-*.npz", all_but=newest)

    def control(self, server_round: int) -> Arrays:
        """Return what is kept of c_k after a round: see :class:`ClientControl`; empty if lost."""
        return self.load(_of("state-", server_round))

    def sent(self, server_round: int) -> Tensor | None:
        """Return the model that was sent in a round, if it is kept."""
        return self._tensor(_of("sent-", server_round))

    def carry(self, server_round: int, *, bias: bool, device: torch.device | str) -> None:
        """Keep c_k of a round as a vector v, before the examples change; A_k of others go."""
        for name in self.names("state-*.npz"):
            coefficients = self.load(name).get("coefficients")
            if coefficients is None:
                continue
            features = self.mapped("features-train", (len(coefficients), self.width))
            if name == _of("state-", server_round) and features is not None:
                rows = FeatureRows(features, device=device, bias=bias)
                vector = -rows.transposed_matmul(torch.from_numpy(coefficients).float())
                self.save(name, vector=vector.numpy())
            else:
                self.remove(pattern=f"{name}.npz")
        self.remove(pattern="state-*.npz", all_but=self.names("state-*.npz")[-SENT:])

    def _tensor(self, name: str) -> Tensor | None:
        return next(map(torch.from_numpy, self.load(name).values()), None)


def _of(kind: str, server_round: int) -> str:
    return f"{kind}{server_round:06}"
