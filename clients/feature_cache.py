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
import zipfile
import zlib
from collections.abc import Callable, Iterator
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import FeatureMap, Normaliser, require_disk
from fedntk.ntk.convex import Spectrum
from fedntk.ntk.features import FeatureRows

from .weights import set_weights

__all__ = ["LESS_DISK", "FeatureCache", "cache_dir", "data_digest", "shrink"]

logger = getLogger("flwr")
STATES = 20  # of the newest rounds that a client took part in: any may be gone on from
CHUNK_BYTES = 128 * 2**20  # of features that are computed at a time
LESS_DISK = "lower num_features, choose another cache, or use keep = 'nothing'"
Arrays = list[NDArray[Any]]


def cache_dir() -> Path:
    """Folder for what can be made again: ``fedntk`` in $XDG_CACHE_HOME or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedntk"


def shrink(cache: Path) -> None:
    """Remove from all clients' folders what can be made again, and their state of old rounds."""
    for folder in cache.glob("*/"):
        kept = {"key.json", *(path.name for path in _states(folder)[:2])}
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink()


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob("state-*.npz"), reverse=True)


class FeatureCache:
    """A folder with one client's network, features, kernel and state in stage 2.

    Parameters
    ----------
    folder : Path
        The client's own: it is emptied when another key comes. A file in it that is damaged counts
        as missing.
    key : str
        Names all that what is kept depends on, the normaliser excepted.
    model : nn.Module
        Its weights are overwritten by the network's.
    feature_map : FeatureMap
        Which features.
    dtype : {"float32", "float16"}
        In which features are kept; in float32 if one is too large for float16, as happens with
        examples that the moments do not know, where a feature hardly varies among those they do.
    keep : {"features", "nothing"}
        Whether features are kept.
    chunk_size : int, optional
        Examples differentiated at a time.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
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
        found, expected = self._path("key.json"), json.dumps([key, dtype])
        if not found.exists() or found.read_text(encoding="utf-8") != expected:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            found.write_text(expected, encoding="utf-8")

    # ------------------------------------------------------------- what was sent

    def take(self, parts: dict[str, Arrays]) -> None:
        """Keep the network and the normaliser, where they came.

        Another normaliser than the one before makes what was computed with that one void.
        """
        if "network" in parts:
            self._save("network", **{str(i): a for i, a in enumerate(parts["network"])})
        if "normaliser" in parts:
            mean, scale = parts["normaliser"]
            old = self._load("normaliser")
            if old and not all(map(np.array_equal, old.values(), (mean, scale))):
                for path in self.folder.iterdir():
                    if path.stem not in ("key", "network", "raw-train", "raw-test"):
                        path.unlink()
            self._save("normaliser", mean=mean, scale=scale)

    def holds(self, *names: str) -> bool:
        """Whether these have come: ``"network"``, ``"normaliser"``."""
        return all(self._load(name) for name in names)

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
        if self.dtype == "float16" and not saved["mean"].any() and (saved["scale"] == 1).all():
            raise ValueError(
                "dtype = float16 would lose small features that are not normalised; use float32"
            )
        if self.keep == "nothing":
            extract = self._extractor()

            def read(start: int, stop: int) -> Tensor:
                return normalise(extract(x[start:stop]))

            return FeatureRows(read, shape, device=device, bias=bias)
        features = self._mapped(f"features-{name}", shape)
        if features is None:
            raw = self._mapped(f"raw-{name}", shape)
            if raw is None:
                for _ in self.raw(name, x):
                    pass
                raw = np.load(self._path(f"raw-{name}.npy"), mmap_mode="c")
            try:
                self._normalise(name, raw, normalise, self.dtype)
            except OverflowError as error:
                if self.dtype == "float32":
                    raise
                logger.log(WARNING, "%s: these examples' are kept in float32", error)
                self._normalise(name, raw, normalise, "float32")
            self._path(f"raw-{name}.npy").unlink()
            features = np.load(self._path(f"features-{name}.npy"), mmap_mode="c")
        return FeatureRows.of(features, device=device, bias=bias)

    def _normalise(self, name: str, raw: NDArray[Any], normalise: Normaliser, dtype: str) -> None:
        with self._array(f"features-{name}", (len(raw), self.width), dtype) as stored:
            for chunk, z in FeatureRows.of(raw).chunks():
                stored[chunk] = _within(normalise(z), dtype)

    def kernel(self, rows: FeatureRows) -> Tensor:
        """Return Z Z^T (n, n) of the training examples, float32, formed once."""
        saved = self._load("kernel")
        if not saved:
            saved = {"kernel": rows.gram().numpy()}
            self._save("kernel", **saved)
        return torch.from_numpy(saved["kernel"])

    def spectrum(self, kernel: Tensor) -> Spectrum:
        """Return its eigenvalues and -vectors, found once."""
        saved = self._load("spectrum")
        if not saved:
            found = Spectrum.of(kernel)
            saved = {"values": found.values.numpy(), "vectors": found.vectors.numpy()}
            self._save("spectrum", **saved)
        return Spectrum(torch.from_numpy(saved["values"]), torch.from_numpy(saved["vectors"]))

    def _extractor(self) -> Callable[[Tensor], Tensor]:
        saved = self._load("network")
        set_weights(self.model, [saved[str(i)] for i in range(len(saved))])
        return self.feature_map.extractor(self.model, chunk_size=self.chunk_size)

    # -------------------------------------------------------------------- state

    def remember(self, server_round: int, coefficients: Tensor, linear: Tensor) -> None:
        """Keep A_k (n, C) of this round beside those of some before, and the last model sent."""
        self._save(f"state-{server_round:06}", coefficients=coefficients.numpy())
        self._save("last", server_round=np.array(server_round), linear=linear.numpy())
        for path in _states(self.folder)[STATES:]:
            path.unlink()

    def coefficients(self, server_round: int) -> Tensor | None:
        """Return A_k as it was after a round; None if it is lost."""
        saved = self._load(f"state-{server_round:06}")
        return torch.from_numpy(saved["coefficients"]) if saved else None

    def last(self, server_round: int) -> Tensor | None:
        """Return the model (p, C) that was sent in a round, if it was the last one; else None."""
        saved = self._load("last")
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
        """Return the arrays of a file; none if it is missing or damaged."""
        try:
            with self._path(f"{name}.npz").open("rb") as file, np.load(file) as saved:
                return dict(saved)
        except FileNotFoundError:
            return {}
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error):
            self._path(f"{name}.npz").unlink()
            return {}

    def _mapped(self, name: str, shape: tuple[int, int]) -> NDArray[Any] | None:
        """Map an array's file into memory; None if it is missing, damaged or of another shape."""
        path = self._path(f"{name}.npy")
        try:
            array: NDArray[Any] = np.load(path, mmap_mode="c")
        except FileNotFoundError:
            return None
        except (OSError, EOFError, ValueError):
            path.unlink()
            return None
        return array if array.shape == shape else None

    @contextlib.contextmanager
    def _array(self, name: str, shape: tuple[int, int], dtype: str) -> Iterator[NDArray[Any]]:
        """Make a file to be filled, which appears when it is."""
        needed = math.prod(shape) * np.dtype(dtype).itemsize
        what = f"{shape[1]} features of {shape[0]} examples"
        require_disk(needed, what, self.folder, cure=LESS_DISK)
        partial = self._path(f"{name}.part")
        stored = np.lib.format.open_memmap(partial, "w+", np.dtype(dtype), shape)
        try:
            yield stored
        except BaseException:
            partial.unlink()
            raise
        stored.flush()
        partial.replace(self._path(f"{name}.npy"))


def _within(features: Tensor, dtype: str) -> NDArray[Any]:
    largest = float(features.abs().max()) if features.numel() else 0.0
    if not largest <= float(np.finfo(dtype).max):
        raise OverflowError(f"a normalised feature of {largest:g} does not fit in {dtype}")
    return features.numpy().astype(dtype)


def data_digest(*tensors: Tensor) -> str:
    """Return a checksum of tensors: two clients with one have the same examples."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()
