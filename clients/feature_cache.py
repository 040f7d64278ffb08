"""What a client of TCT computes once and keeps on disk: its features, their kernel, its state.

Flower makes a client anew for every message, so memory does not outlast one; and a node's
``context.state`` travels with every message in a simulation, which features must not.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import FeatureMap, FeatureRows, Normaliser, NotEnoughMemory, Spectrum

from .weights import set_weights

__all__ = ["FeatureCache", "cache_dir"]

CHUNK_BYTES = 128 * 2**20  # of features that are computed at a time
Arrays = list[NDArray[Any]]


def cache_dir() -> Path:
    """Folder for what can be made again: ``fedntk`` in $XDG_CACHE_HOME or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedntk"


class FeatureCache:
    """A folder with one client's network, features, kernel and state in stage 2.

    Parameters
    ----------
    folder : Path
        The client's own: it is emptied when another network, feature map or data come.
    key : str
        Names the network and the feature map.
    data : tuple of Tensor
        All that features are computed of; a checksum tells whether they have changed.
    model : nn.Module
        Its weights are overwritten by the network's.
    feature_map : FeatureMap
        Which features.
    dtype : {"float32", "float16"}
        In which features are kept.
    keep : {"features", "nothing"}
        Whether features are kept.
    chunk_size : int, optional
        Examples differentiated at a time.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        data: tuple[Tensor, ...],
        model: nn.Module,
        feature_map: FeatureMap,
        *,
        dtype: Literal["float32", "float16"],
        keep: Literal["features", "nothing"],
        chunk_size: int | None,
    ) -> None:
        self.folder, self.model, self.feature_map = folder, model, feature_map
        self.dtype, self.keep, self.chunk_size = dtype, keep, chunk_size
        self.width = feature_map.width(model)
        found, expected = self._path("key.json"), json.dumps([key, *map(_digest, data)])
        if not found.exists() or found.read_text(encoding="utf-8") != expected:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            found.write_text(expected, encoding="utf-8")

    # ------------------------------------------------------------- what was sent

    def take(self, parts: dict[str, Arrays]) -> None:
        """Keep the network and the normaliser, where they came."""
        if "network" in parts:
            self._save("network", **{str(i): a for i, a in enumerate(parts["network"])})
        if "normaliser" in parts:
            mean, scale = parts["normaliser"]
            self._save("normaliser", mean=mean, scale=scale)

    def holds(self, *names: str) -> bool:
        """Whether these have come: ``"network"``, ``"normaliser"``."""
        return all(self._path(f"{name}.npz").exists() for name in names)

    # ----------------------------------------------------------------- features

    def raw(self, name: str, x: Tensor) -> Iterator[Tensor]:
        """Yield the features of examples (n, ...) before they are normalised, (m, p) at a time.

        They are kept until the normaliser comes.
        """
        extract, chunks = self._extractor(), x.split(max(1, CHUNK_BYTES // (4 * self.width)))
        if self.keep == "nothing":
            yield from map(extract, chunks)
            return
        shape, start = (len(x), self.width), 0
        with self._array(f"raw-{name}", shape, "float32") as stored:
            for chunk in chunks:
                features = extract(chunk)
                stored[start : start + len(chunk)] = features.numpy()
                start += len(chunk)
                yield features

    def rows(self, name: str, x: Tensor, *, bias: bool, device: torch.device | str) -> FeatureRows:
        """Return the normalised features of examples (n, ...)."""
        shape = (len(x), self.width)
        saved = self._load("normaliser")
        normalise = Normaliser(saved["mean"], saved["scale"])
        if self.keep == "nothing":
            extract = self._extractor()

            def read(start: int, stop: int) -> Tensor:
                return normalise(extract(x[start:stop]))

            return FeatureRows(read, shape, device=device, bias=bias)
        path = self._path(f"features-{name}.npy")
        if not path.exists():
            raw = self._path(f"raw-{name}.npy")
            if not raw.exists():
                for _ in self.raw(name, x):
                    pass
            with self._array(f"features-{name}", shape, self.dtype) as stored:
                for chunk, z in FeatureRows.of(np.load(raw, mmap_mode="c")).chunks():
                    stored[chunk] = _within(normalise(z), self.dtype)
            raw.unlink()
        return FeatureRows.of(np.load(path, mmap_mode="c"), device=device, bias=bias)

    def kernel(self, rows: FeatureRows) -> Tensor:
        """Return Z Z^T (n, n) of the training examples, float32, formed once."""
        if not self.holds("kernel"):
            self._save("kernel", kernel=rows.gram().numpy())
        return torch.from_numpy(self._load("kernel")["kernel"])

    def spectrum(self, kernel: Tensor) -> Spectrum:
        """Return its eigenvalues and -vectors, found once."""
        if not self.holds("spectrum"):
            found = Spectrum.of(kernel)
            self._save("spectrum", values=found.values.numpy(), vectors=found.vectors.numpy())
        saved = self._load("spectrum")
        return Spectrum(torch.from_numpy(saved["values"]), torch.from_numpy(saved["vectors"]))

    def _extractor(self) -> Callable[[Tensor], Tensor]:
        saved = self._load("network")
        set_weights(self.model, [saved[str(i)] for i in range(len(saved))])
        return self.feature_map.extractor(self.model, chunk_size=self.chunk_size)

    # -------------------------------------------------------------------- state

    def remember(self, server_round: int, coefficients: Tensor, linear: Tensor) -> None:
        """Keep A_k (n, C) of each round, as any may be gone on from, and the last model sent."""
        self._save(f"state-{server_round:06}", coefficients=coefficients.numpy())
        self._save("last", server_round=np.array(server_round), linear=linear.numpy())

    def coefficients(self, server_round: int) -> Tensor | None:
        """Return A_k as it was after a round; None if it is lost."""
        name = f"state-{server_round:06}"
        return torch.from_numpy(self._load(name)["coefficients"]) if self.holds(name) else None

    def last(self, server_round: int) -> Tensor | None:
        """Return the model (p, C) that was sent in a round, if it was the last one; else None."""
        saved = self._load("last") if self.holds("last") else {}
        if not saved or int(saved["server_round"]) != server_round:
            return None
        return torch.from_numpy(saved["linear"])

    # -------------------------------------------------------------------- files

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _save(self, name: str, **arrays: NDArray[Any]) -> None:
        partial = self._path(f"{name}.part")
        with partial.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        partial.replace(self._path(f"{name}.npz"))

    def _load(self, name: str) -> dict[str, NDArray[Any]]:
        with np.load(self._path(f"{name}.npz")) as saved:
            return dict(saved)

    @contextlib.contextmanager
    def _array(self, name: str, shape: tuple[int, int], dtype: str) -> Iterator[NDArray[Any]]:
        """Make a file to be filled, which appears when it is."""
        needed = math.prod(shape) * np.dtype(dtype).itemsize
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise NotEnoughMemory(
                f"{shape[1]} features of {shape[0]} examples need {needed / 1e9:.1f} GB on disk "
                f"and {self.folder} has {free / 1e9:.1f} GB; lower num_features, choose another "
                "cache, or use keep = 'nothing'"
            )
        partial = self._path(f"{name}.part")
        stored = np.lib.format.open_memmap(partial, "w+", np.dtype(dtype), shape)
        yield stored
        stored.flush()
        partial.replace(self._path(f"{name}.npy"))


def _within(features: Tensor, dtype: str) -> NDArray[Any]:
    largest = float(features.abs().max()) if features.numel() else 0.0
    if not largest <= float(np.finfo(dtype).max):
        raise ValueError(f"a normalised feature of {largest:g} does not fit in {dtype}")
    return features.numpy().astype(dtype)


def _digest(tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
