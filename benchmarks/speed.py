"""Speed and memory of the cases in cases.py, all in results/speed.csv.

    python benchmarks/speed.py [--cases 'kernel*' 'engine*'] [--data-dir FOLDER] [--turns 5]
    python benchmarks/speed.py --device cuda [--data-dir FOLDER]     # `make gpu`

A case is a thing to compute, and its ways compute it. In each turn every way of a case is measured
once, in a fresh process of pyperf's, one after the other, so other work on the machine slows all
of them alike. A few cases report figures of their own instead, from a process each. Failing cases
are named and left out. `--cases` takes patterns of "group: name", which `--list` shows. Cases that
need Fashion-MNIST are left out without `--data-dir`, a folder in torchvision's layout. `--results`
names another file. Rows of other cases and devices stay.

On a GPU the float32 results of all mathematics are first compared with float64 on the CPU, TF32
switched on beforehand, since that must not matter; `--only` compares these cases and measures
nothing. Then this process measures in turns, as a new process takes seconds there: torch and numpy
suffice; `gpu_runs` needs fedntk with Flower. `--here` does so on a CPU, where memory that earlier
cases have freed does not count again.

seconds        median over all values; a value is the mean of repetitions for 0.1 s at least
peak-mb        the most memory at the first repetition, over that before
rival          another way of the case, with its seconds and memory
ratio          of seconds to the rival's, the median over turns; with the least and the most
error          relative to float64, or to the rival
more           further figures, which the case explains; `process-mb` is with data and libraries
machine        with the rate of float32 products of two 4,096 x 4,096 matrices; TF32 is off
"""

import argparse
import csv
import datetime
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

COLUMNS = (
    "group", "case", "way", "device", "seconds", "peak-mb", "rival", "rival-seconds",
    "rival-peak-mb", "ratio", "ratio-least", "ratio-most", "error", "more", "threads", "machine",
    "date",
)  # fmt: skip
KEYS = COLUMNS[:4]
AT_LEAST = 0.1  # seconds of a value
Row = dict[str, Any]


def peak_of(call: Callable[[], Any], device: str) -> float:
    """Call once; return the peak of memory over that before, in MB."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = memory("VmRSS")
    call()
    return (memory("VmHWM") - before) / 1e6


def memory(key: str) -> int:
    """Return a figure of this process in bytes, as the kernel reports it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def values_of(work: Any, device: str) -> Callable[[int], float]:
    """Return a function that measures one value, the mean seconds of repetitions."""

    def value(_: int = 1) -> float:
        if work.seconds is not None:
            return float(work.seconds())
        times, spent = 0, 0.0
        while spent < AT_LEAST:
            start = work.clock()
            work.call()
            if device.startswith("cuda"):
                sys.modules["torch"].cuda.synchronize()
            spent += work.clock() - start
            times += 1
        return spent / times

    return value


# ------------------------------------------------------------------ one way of a case, in a process


def worker(case: Any, way: str, chosen: Any, runner: Any) -> None:
    """Measure one way with pyperf, and write what else it found beside."""
    work = case.ways[way](chosen)
    found = {"peak-mb": peak_of(work.call, chosen.device)} if work.call else {}
    runner.bench_time_func(way, values_of(work, chosen.device))
    write_facts(chosen.folder, way, found | work.facts())


def write_facts(folder: str, way: str, found: Mapping[str, Any]) -> None:
    (Path(folder) / f"{way}.facts").write_text(json.dumps(found), encoding="utf-8")


def here(case: Any, chosen: Any) -> dict[str, list[tuple[list[float], Row]]]:
    """Measure all ways of a case in turns in this process; return what `in_turns` does."""
    works, peaks = {way: build(chosen) for way, build in case.ways.items()}, {}
    for way, work in works.items():
        peaks[way] = peak_of(work.call, chosen.device)
    turns: dict[str, list[tuple[list[float], Row]]] = {way: [] for way in works}
    for _ in range(chosen.turns):
        for way, work in works.items():
            turns[way].append(([values_of(work, chosen.device)()], {"peak-mb": peaks[way]}))
    for way, work in works.items():
        turns[way][0][1].update(work.facts())
    return turns


def in_turns(case: Any, chosen: Any) -> dict[str, list[tuple[list[float], Row]]]:
    """Measure all ways of a case, each turn in a fresh process; values and facts of each."""
    import pyperf

    turns: dict[str, list[tuple[list[float], Row]]] = {way: [] for way in case.ways}
    for number in range(min(chosen.turns, case.turns)):
        for way in list(turns):
            out = Path(chosen.folder) / f"{way} {number}.json"
            command = [case.pythons.get(way, sys.executable), case.programs.get(way, __file__)]
            command += ["--worker", "--worker-task=0", "--loops=1", f"--output={out}"]
            command += [f"--values={case.values}", "--warmups=0"]
            if case.cores:
                cores = sorted(os.sched_getaffinity(0))[-case.cores :]
                command.append(f"--affinity={','.join(map(str, cores))}")
            if not run([*command, *asked(case, way, chosen)], case):
                del turns[way]
                continue
            facts = json.loads((Path(chosen.folder) / f"{way}.facts").read_text(encoding="utf-8"))
            turns[way].append((list(pyperf.Benchmark.load(str(out)).get_values()), facts))
    return turns


def asked(case: Any, way: str, chosen: Any) -> list[str]:
    options = {"one": f"{case.group}: {case.name}", "way": way, "folder": chosen.folder}
    options |= {name: getattr(chosen, name) for name in ("device", "data_dir", "pfllib")}
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def run(command: list[str], case: Any) -> bool:
    """Run a process of a case; False, with the reason printed, if it fails."""
    environment = dict(os.environ)
    if case.threads:
        environment["OMP_NUM_THREADS"] = str(case.threads)
        multi = str(case.threads > 1).lower()
        environment["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={multi}"
    try:
        done = subprocess.run(  # noqa: S603 - this very program, or a peer's
            command, capture_output=True, text=True, env=environment, timeout=case.timeout
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{case.group}: {case.name} failed: {str(error)[-200:]}", flush=True)
        return False
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["killed"])[-1][:2000]
        print(f"{case.group}: {case.name} failed: {reason}", flush=True)
    return not done.returncode


# ------------------------------------------------------------------ rows


def compared(case: Any, turns: Mapping[str, list[tuple[list[float], Row]]]) -> list[Row]:
    """Return a row for each way: medians over all values, and ratios of each turn's medians."""

    def seconds(way: str) -> float:
        return statistics.median(value for values, _ in turns[way] for value in values)

    rows = []
    for way, measured in turns.items():
        facts = dict(measured[0][1])
        row = {"case": case.name, "way": way, "seconds": seconds(way)}
        row |= {key: facts.pop(key) for key in ("peak-mb", "error") if key in facts}
        rival = case.rival if way != case.rival else ""
        if rival in turns:
            ratios = [
                statistics.median(ours) / statistics.median(others)
                for (ours, _), (others, _) in zip(measured, turns[rival], strict=True)
            ]
            row |= {"rival": rival, "rival-seconds": seconds(rival)}
            row |= {"rival-peak-mb": turns[rival][0][1].get("peak-mb")}
            row |= {"ratio": statistics.median(ratios)}
            row |= {"ratio-least": min(ratios), "ratio-most": max(ratios)}
        rows.append(row | facts)
    return rows


def cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def finished(row: Row, case: Any, chosen: Any, machine: Row) -> dict[str, str]:
    """Return a row as the file has it; what has no column of its own goes into `more`."""
    row = {"group": case.group, "device": chosen.device, **machine, **row}
    row["threads"] = case.threads or row["threads"]
    row["more"] = "; ".join(f"{k}={cell(v)}" for k, v in row.items() if k not in COLUMNS)
    return {column: cell(row.get(column)) for column in COLUMNS}


def keep(rows: list[dict[str, str]], path: Path) -> None:
    """Put rows into the file, in place of those of the same cases on the same device."""
    old: list[dict[str, str]] = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            old = list(csv.DictReader(file))
    new = {tuple(row[key] for key in KEYS): row for row in rows}
    merged = [new.pop(tuple(row[key] for key in KEYS), row) for row in old]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*merged, *new.values()])


def described(device: str) -> Row:
    """Describe the machine in words, with the day."""
    import torch
    from common import machine

    found = machine(device)
    gpu = f"{found['gpu']}, " if found["gpu"] else ""
    words = f"{gpu}{found['cores']} cores of {found['processor']}, {found['memory-gb']} GB"
    words += f", {found['float32-matrix-gflops']} GFLOP/s, Python {found['python']}"
    words += f", torch {found['torch']}"
    day = str(datetime.date.today())
    return {"threads": torch.get_num_threads(), "machine": words, "date": day}


# ------------------------------------------------------------------ all cases


def parser_of(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from common import RESULTS

    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of group: name")
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", default="", help="in torchvision's layout")
    parser.add_argument("--pfllib", default="", help="a checkout of PFLlib")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--here", action="store_true", help="in this process, without pyperf")
    parser.add_argument(
        "--only", default="", help="on a GPU: compare these cases, and measure nothing"
    )
    parser.add_argument("--results", type=Path, default=RESULTS / "speed.csv")
    for name in ("--one", "--way", "--folder"):  # of a process that this program starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser


def comparison(device: str, names: list[str]) -> bool:
    """Compare the mathematics on a device with float64 on the CPU."""
    import torch
    from common import ROOT

    sys.path.insert(0, str(ROOT))
    from tests.ntk import on_device

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    good = on_device.report(device, names)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return good


def child(chosen: Any, runner: Any) -> None:
    """Measure one way of a case, or make a report."""
    import cases
    import reports

    of_name = {f"{c.group}: {c.name}": c for c in (*cases.cases(), *reports.reports())}
    case = of_name[chosen.one]
    if chosen.way:
        worker(case, chosen.way, chosen, runner)
    else:
        write_facts(chosen.folder, "report", {"rows": case.rows(chosen)})


def measured(case: Any, chosen: Any) -> list[Row]:
    """Return rows of a case or a report; none, with the reason printed, if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        chosen.folder = folder
        if not hasattr(case, "ways"):
            if not run([sys.executable, __file__, *asked(case, "", chosen)], case):
                return []
            text = (Path(folder) / "report.facts").read_text(encoding="utf-8")
            return list(json.loads(text)["rows"])
        try:
            case.prepare(chosen)
            turns = (here if chosen.here else in_turns)(case, chosen)
            rows = compared(case, turns)
            case.check(chosen, rows)
        except (RuntimeError, OSError) as error:  # of the GPU's memory as well
            print(f"{case.group}: {case.name} failed: {str(error).splitlines()[0][:200]}")
            return []
    if chosen.device.startswith("cuda"):
        gc.collect()
        sys.modules["torch"].cuda.empty_cache()
    return rows


def main() -> None:
    """Measure all that is asked for; the exit code says whether a comparison went wrong."""
    if "--worker" in sys.argv:
        import pyperf

        runner = pyperf.Runner()
        parser_of(runner.argparser)
        return child(runner.parse_args(), runner)
    try:
        import torch
    except ModuleNotFoundError:
        print(f"{sys.executable} has no torch: nothing was run")
        return None
    chosen = parser_of(argparse.ArgumentParser(description=__doc__.partition("\n")[0])).parse_args()
    if chosen.one:
        return child(chosen, None)
    on_gpu = chosen.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        print("torch finds no GPU here: nothing was run")
        return None
    import cases
    import reports

    chosen.here |= on_gpu
    everything = [
        case
        for case in (*cases.cases(), *reports.reports())
        if any(fnmatch(f"{case.group}: {case.name}", pattern) for pattern in chosen.cases)
    ]
    if chosen.list:
        print(*(f"{case.group}: {case.name}" for case in everything), sep="\n")
        return None
    names = [name for name in chosen.only.split(",") if name]
    good = not on_gpu or comparison(chosen.device, names)
    flower = importlib.util.find_spec("flwr") is not None
    machine = described(chosen.device)
    for case in [] if chosen.only else everything:
        if on_gpu and not (case.cuda and (flower or case.group != "gpu_runs")):
            continue
        if case.data and not chosen.data_dir:
            print(f"{case.group}: {case.name} is left out: no --data-dir")
            continue
        rows = [finished(row, case, chosen, machine) for row in measured(case, chosen)]
        keep(rows, chosen.results)
        for row in rows:
            print({k: v for k, v in row.items() if v and k not in ("machine", "date")}, flush=True)
    if on_gpu:
        print("all good" if good else "NOT all good: see above")
    sys.exit(not good)


if __name__ == "__main__":
    main()
