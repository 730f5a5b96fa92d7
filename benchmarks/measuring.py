"""What all benchmarks share: timings in turn, peak memory of a fresh process, a result file, and the page made of them."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dodo.evaluation.record import about_machine, commit, short_commit, today, write_json

ROOT = Path(__file__).parent.parent


def side_by_side(tasks: dict[str, Callable[[], Any]], *, rounds: int = 5) -> dict[str, float]:
    """Median seconds of each task; rounds alternate between the tasks, so that what else the machine does hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for task in tasks.values():
        task()
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_memory(code: str) -> int:
    """Highest resident bytes of a fresh Python process that runs `code`. Linux.

    VmHWM belongs to the process's own memory; getrusage's figure would include what its parent held when it forked.
    """
    code += "\nprint('PEAK', next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return 1024 * int(done.stdout.rsplit("PEAK", 1)[1])


def process_memory() -> dict[str, int]:
    """VmRSS and VmHWM of this process: bytes resident now, and at most so far. Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: 1024 * int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines) if name in ("VmRSS", "VmHWM")
    }


def seconds_of_command(*command: str, rounds: int = 7) -> float:
    """Median seconds of a command, process start and end included."""

    def run() -> None:
        subprocess.run(command, capture_output=True, check=True, cwd=ROOT)

    return side_by_side({"command": run}, rounds=rounds)["command"]


def write_result(name: str, measured: dict[str, Any], *, settings: dict[str, Any]) -> Path:
    """One JSON file under results/, with everything needed to judge and repeat it."""
    record = {
        "name": name,
        "date": today(),
        "commit": commit(),
        "command": f"python {Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "settings": settings,
        "measured": measured,
        **about_machine(),
    }
    path = ROOT / "results" / f"{name}.json"
    write_json(path, record)
    return path


def write_page() -> Path:
    """docs/benchmarks.md, from all benchmark results: no number in it is typed."""
    lines = ["# Benchmarks", "", "Written by `make bench`. Ratios are measured side by side in one run.", ""]
    for path in sorted((ROOT / "results").glob("benchmark-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
        settings = "; ".join(f"{name}: {value}" for name, value in record["settings"].items())
        hardware = f"{record['hardware']['cpu']}, {record['hardware']['threads']} threads"
        lines += [
            f"## {record['name']}",
            "",
            f"{record['date']}, commit {short_commit(record['commit'], 12)}, {hardware}; {versions}.",
            "",
            f"{settings}.",
            "",
        ]
        for group, values in record["measured"].items():
            lines += [f"| {group} | |", "| --- | ---: |"]
            lines += [
                f"| {name} | {value:,.4g} |" if isinstance(value, float) else f"| {name} | {value:,} |"
                for name, value in values.items()
            ]
            lines.append("")
    path = ROOT / "docs" / "benchmarks.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
