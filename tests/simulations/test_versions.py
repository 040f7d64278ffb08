"""Three models over versions of Python, torch and NumPy: the promise about bits, and its limits.

What a machine may change of "one seed gives the same bits", as far as was measured:

- Python, Flower, torch and NumPy of other versions, on the same kind of processor: nothing
  (Python 3.11 with torch 2.8 and 2.15, Python 3.13 with torch 2.15).
- A processor of another make, or with other vector instructions: the last bits of a product of
  matrices, since its sums are in another order. What follows is near, by the tolerances below.
- Clients, their examples and all random draws: on no machine, so the rounds' counts are the same.

`python -m tests.simulations.test_versions` writes the file for this machine.
"""

import hashlib
import json
import platform
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedntk.simulations import Config, load_model, run

from ..conftest import ROOT

FILE = Path(__file__).with_name("digests.json")
CONF = ROOT / "simulations" / "conf"
# method -> settings that make it short
SHORT = {"fedavg": {"rounds": 3}, "ntk_fl": {"rounds": 2}, "one_exchange": {"random_features": 100}}
# Of probes, relative to the norm of their array. On one machine, without vector instructions and
# with MKL's and oneDNN's oldest code, they moved by 4e-7, 3e-7 and 8e-5, the last by the condition
# of the ridge's system: a tolerance is 25 times that. Another seed fails by far.
TOLERANCE = {"fedavg": 1e-5, "ntk_fl": 1e-5, "one_exchange": 2e-3}


def processor() -> str:
    """What decides the order of sums: the make, and the vector instructions that torch uses."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    vendor = re.search(r"^vendor_id\s*: (\w+)", text, re.MULTILINE)
    make = vendor[1] if vendor else platform.machine()
    return f"{platform.system()} {make} {torch.backends.cpu.get_cpu_capability()}"


def learned(name: str, folder: Path) -> dict[str, np.ndarray]:
    config = Config.load(CONF / f"{name}_digits.toml").replace(**SHORT[name])
    run(config, out=folder, progress=False)
    return {key: np.asarray(array) for key, array in sorted(load_model(folder).items())}


def described(arrays: dict[str, np.ndarray]) -> dict[str, dict[str, object]]:
    """Digest of each array's bits, its shape, its norm and a few projections on fixed vectors."""
    said = {}
    for key, array in arrays.items():
        flat = array.astype(np.float64).ravel()
        probes = np.cos(np.outer(np.arange(1, 9), np.arange(flat.size)))
        said[key] = {
            "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            "dtype": str(array.dtype),
            "shape": list(array.shape),
            "norm": float(np.linalg.norm(flat)),
            "probes": (probes @ flat / np.linalg.norm(probes, axis=1)).tolist(),
        }
    return said


@pytest.mark.parametrize("name", SHORT)
def test_models_are_those_of_other_versions(name, tmp_path):
    """To the bit on a processor whose digests are kept; near on any other.

    A probe is a product with a vector of norm 1, so it moves by no more than the array does.
    """
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    here = described(learned(name, tmp_path))
    if processor() in kept:
        assert here == kept[processor()][name]
    for models in kept.values():
        assert here.keys() == models[name].keys()
        for key, array in models[name].items():
            assert (here[key]["dtype"], here[key]["shape"]) == (array["dtype"], array["shape"])
            near = TOLERANCE[name] * array["norm"]
            np.testing.assert_allclose(here[key]["probes"], array["probes"], rtol=0, atol=near)


if __name__ == "__main__":
    models = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        models[processor()] = {name: described(learned(name, Path(place) / name)) for name in SHORT}
    FILE.write_text(json.dumps(models, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sys.stdout.write(f"{FILE}: {', '.join(models)}\n")
