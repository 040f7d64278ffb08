"""What the benchmarks share. It needs only torch and numpy, and a checkout.

A program NAME.py writes results/NAME*.csv, .json with the machine, and .png; with _cuda for a GPU.
Where it says so, rows of cases that are not asked for stay. FOLDER is in torchvision's layout.
"""

import argparse
import csv
import datetime
import gzip
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
STEPS = (*range(100, 1001, 100), 1500, 2000)  # the strategies' own grid of t
CONF, RESULTS = ROOT / "simulations" / "conf", ROOT / "benchmarks" / "results"


def use_checkout() -> None:
    """Make ``fedntk.ntk`` this checkout's folder, whether fedntk is installed or not. TF32 off."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if "fedntk.ntk" in sys.modules:
        return
    folder = ROOT / "ntk"
    spec = importlib.util.spec_from_file_location(
        "fedntk.ntk", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("fedntk", type(sys)("fedntk"))
    sys.modules["fedntk.ntk"] = package
    spec.loader.exec_module(package)


def mlp() -> nn.Module:
    """784-100-10, the network of Yue et al. (2022)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def simple_cnn() -> nn.Module:
    """Two convolutions and two linear layers, the network of Yu et al. (2022) for Fashion-MNIST."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Residual(nn.Module):
    """Basic block of a ResNet with GroupNorm of 32 groups."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(32, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(32, width),
        )
        self.skip = nn.Sequential()
        if stride != 1 or channels != width:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.GroupNorm(32, width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Body plus skip connection."""
        return torch.relu(self.body(x) + self.skip(x))


def resnet18() -> nn.Module:
    """ResNet-18 with GroupNorm and a stem for 32 x 32 images."""
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    stages = [b for c, w, s in widths for b in (Residual(c, w, s), Residual(w, w, 1))]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp-100": (mlp, (1, 28, 28)),
    "simple-cnn": (simple_cnn, (1, 28, 28)),
    "resnet18-gn": (resnet18, (3, 32, 32)),
}


def make(network: str, n: int, device: str) -> tuple[nn.Module, Tensor]:
    """Network and n random examples, from one seed."""
    torch.manual_seed(0)
    factory, shape = NETWORKS[network]
    return factory().eval().to(device), torch.randn(n, *shape).to(device)


def fashion_mnist(data_dir: str, num_clients: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return images, labels and sizes of clients with about 200 examples each, Dirichlet(0.1)."""
    raw = []
    for kind in ("images-idx3", "labels-idx1"):
        file = next((Path(data_dir) / "FashionMNIST" / "raw").glob(f"train-{kind}-ubyte*"))
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            raw.append(np.frombuffer(stream.read(), np.uint8))
    pictures, labels = raw[0][16:].reshape(-1, 1, 28, 28), raw[1][8:]
    generator = np.random.default_rng(0)
    pools = [list(generator.permutation(np.nonzero(labels == c)[0])) for c in range(10)]
    chosen, sizes = [], []
    for _ in range(num_clients):
        counts = generator.multinomial(200, generator.dirichlet([0.1] * 10))
        some = [pools[c].pop() for c in range(10) for _ in range(min(counts[c], len(pools[c])))]
        chosen += some
        sizes.append(len(some))
    x = torch.from_numpy(pictures[chosen].astype(np.float32)) / 255
    return (x - 0.286) / 0.353, torch.from_numpy(labels[chosen].astype(np.int64)), sizes


def trained(config: Any) -> nn.Module:
    """Return the network of a configuration of the simulations after its rounds."""
    from fedntk.simulations import load_model, run
    from fedntk.simulations.engine.building import load_setup

    with tempfile.TemporaryDirectory() as folder:
        weights = load_model(run(config, out=folder, progress=False).folder)
    network = load_setup(config).network
    network.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    return network


def relative(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference to what was computed in float64, over that one's norm."""
    return float((found.double().cpu() - exact.cpu()).norm() / exact.norm())


def parse_options(
    doc: str,
    *,
    child: Callable[..., Any] | None = None,
    data_dir: bool | str = False,
    **defaults: Any,
) -> argparse.Namespace:
    """Parse the command line: ``--name`` for each default, of its type.

    A tuple is a list with commas (with semicolons, if a name has a comma) of numbers, or of some of
    its names. A list is a choice of one, by default the first; a mapping one of a key, which must
    come first. `data_dir=True` needs a folder in torchvision's layout. With ``--child``, measure
    that one case and exit.
    """
    if child is not None and sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(**json.loads(sys.argv[2]))))
        sys.exit()
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    if data_dir is True:
        parser.add_argument("--data-dir", required=True, help="in torchvision's layout")
    elif data_dir is not False:
        defaults["data_dir"] = data_dir
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, Mapping):
            parser.add_argument(name, choices=default)
        elif isinstance(default, list):
            parser.add_argument(flag, choices=default, default=default[0])
        elif isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, type=partial(_split, among=default), default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def _split(text: str, among: tuple[Any, ...]) -> list[Any]:
    separator = ";" if any("," in str(value) for value in among) else ","
    values = [type(among[0])(part) for part in text.split(separator) if part]
    unknown = set(values) - set(among)
    if unknown and isinstance(among[0], str):
        raise argparse.ArgumentTypeError(f"expected some of {separator.join(among)}, got {text}")
    return values


def in_child(
    program: str, arguments: Mapping[str, Any], seconds: float | None = None
) -> dict[str, Any] | None:
    """Run one measurement in a process of its own; None, with the reason printed, if it fails.

    It also fails if it takes longer than some seconds.
    """
    try:
        done = subprocess.run(  # noqa: S603 - this very program
            [sys.executable, program, "--child", json.dumps(arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        print(arguments, "failed:", f"more than {error.timeout:g} s")
        return None
    if done.returncode:
        print(arguments, "failed:", (done.stderr.strip().splitlines() or ["killed"])[-1][:2000])
        return None
    return {**arguments, **json.loads(done.stdout.splitlines()[-1])}


def matrix_rate(device: str) -> float:
    """Measured rate of float32 products of 4,096 x 4,096 matrices, in GFLOP/s; TF32 off."""
    a = torch.randn(4096, 4096, device=device)
    out, seconds = torch.empty_like(a), list[float]()
    while sum(seconds) < 1 and len(seconds) < 20:
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return float(2 * 4096**3 / np.median(seconds) / 1e9)


def machine(device: str) -> dict[str, Any]:
    """Describe the machine."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if "model name" in line]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory-gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "date": str(datetime.date.today()),
        "float32-matrix-gflops": round(matrix_rate(device), 1),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def keep_rows(
    stem: str, rows: Iterable[Mapping[str, Any]], keys: Sequence[str], summary: Any = None
) -> Any:
    """Put rows into results/STEM.csv in place of all with the same keys; return the sorted table.

    A summary goes into a JSON file beside it, with the machine.
    """
    import pandas as pd

    path, table = RESULTS / f"{stem}.csv", pd.DataFrame(list(rows))
    if path.exists():
        old = pd.read_csv(path)
        new = pd.MultiIndex.from_frame(table[keys])
        table = pd.concat([old[~pd.MultiIndex.from_frame(old[keys]).isin(new)], table])
    table = table.sort_values(keys, kind="stable")
    table.to_csv(path, index=False, float_format="%.6g")
    if summary is not None:
        write(stem, summary=summary)
    return table


def write(stem: str, rows: Any = None, summary: Any = None, device: str = "cpu") -> None:
    """Write rows, or a table of pandas, as CSV, and a summary and the machine as JSON.

    Both go into results/STEM, with _cuda for a GPU. Print the summary.
    """
    stem += "" if device == "cpu" else f"_{device.split(':')[0]}"
    if hasattr(rows, "to_csv"):
        rows.to_csv(RESULTS / f"{stem}.csv", index=False, float_format="%.6g")
    elif rows is not None:
        keys = dict.fromkeys(key for row in rows for key in row)
        with (RESULTS / f"{stem}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, keys, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                cells = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow(cells)
    if summary is not None:
        text = json.dumps({"machine": machine(device), **summary}, indent=2)
        (RESULTS / f"{stem}.json").write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)
