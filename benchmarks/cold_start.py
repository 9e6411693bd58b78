"""How long from nothing to a trained model, and where the time goes: `python benchmarks/cold_start.py`.

A fresh clone of the committed tree in an empty folder, with empty caches (tools, images, Python packages), runs `make up`; then the same
clone, with everything built and its node stopped, runs `make up` for a run of another name. Prints a table and writes it to
`benchmarks/cold_start.md`. It needs the machine for itself: there is one node on a machine, so `make down` comes first.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
RESULT = PROJECT / "benchmarks" / "cold_start.md"
GOALS = {"cold": 15 * 60, "warm": 45}
"""Seconds: from nothing to the end of `make up`; warm to the first training step."""


@dataclass(frozen=True)
class Measured:
    """One `make up`: its phases, when the first step was made, and when it ended, in seconds from its start."""

    phases: dict[str, float]
    first_step: float
    end: float


def make_up(clone: Path, environment: dict[str, str], log: Path) -> Measured:
    """Run `make up` and measure it; its output goes to the log."""
    begun = time.time()
    with log.open("w") as output:
        subprocess.run(["make", "up"], cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True)
    end = time.time() - begun
    steps = [time for time in _step_times(clone, environment) if time > begun]
    phases = json.loads((clone / ".trainyard" / "phases.json").read_text())
    return Measured(phases, min(steps) - begun, end)


def _step_times(clone: Path, environment: dict[str, str]) -> list[float]:
    script = (
        "from local import stack\nfrom local.view.ledger import Ledger\ntarget = stack.target()\n"
        "for run in target.runs:\n    for event in Ledger.merge(target.store.ledger_lines(run)).every('step'): print(event.time)"
    )
    command = [clone / ".trainyard" / "venv" / "bin" / "python", "-c", script]
    printed = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=True).stdout
    return [float(line) for line in printed.split()]


def table(cold: Measured, warm: Measured, tools: str) -> str:
    """Return the result as Markdown."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{os.cpu_count()} cores of {model[1] if model else platform.processor()}, {memory:.0f} GiB, Linux {platform.release()}"
    names = list(dict.fromkeys([*cold.phases, *warm.phases]))
    rows = [f"| {name} | {cold.phases.get(name, 0):.0f} | {warm.phases.get(name, 0):.0f} |" for name in names]
    return "\n".join(
        [
            "# From nothing to a trained model",
            "",
            f"Written by `benchmarks/cold_start.py` on {time.strftime('%Y-%m-%d')}. Machine: {machine}.",
            "Tools and image are made side by side, so the phases add up to more than the whole.",
            "",
            "| seconds | cold: empty caches | warm: built, node stopped, new run |",
            "|---|---|---|",
            *rows,
            f"| **start to first training step** | **{cold.first_step:.0f}** | **{warm.first_step:.0f}** (goal {GOALS['warm']}) |",
            f"| **start to end of `make up`** | **{cold.end:.0f}** (goal {GOALS['cold']}) | **{warm.end:.0f}** |",
            "",
            "Tools as built in the cold run:",
            "",
            "```",
            tools.rstrip(),
            "```",
            "",
        ]
    )


def main() -> None:
    """Measure in a temporary clone and write the table."""
    folder = Path(tempfile.mkdtemp(prefix="cold-"))
    clone = folder / "trainyard"
    environment = {**os.environ, "TRAINYARD_CACHE": str(folder / "cache"), "UV_CACHE_DIR": str(folder / "uv"), "PIP_NO_CACHE_DIR": "1"}
    subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(clone)], check=True)
    logs = PROJECT / ".trainyard" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        cold = make_up(clone, environment, logs / "cold_start-cold.log")
        tools = subprocess.run(["make", "--silent", "tools"], cwd=clone, env=environment, capture_output=True, text=True, check=True).stdout
        subprocess.run(["make", "down"], cwd=clone, env=environment, check=True)
        run = clone / "runs" / "smoke.yaml"
        run.write_text(run.read_text().replace("name: smoke", "name: warm"))
        warm = make_up(clone, environment, logs / "cold_start-warm.log")
    finally:
        subprocess.run(["make", "purge"], cwd=clone, env=environment, check=False)
        shutil.rmtree(folder, ignore_errors=True)
    RESULT.write_text(table(cold, warm, tools))
    print(RESULT.read_text())


if __name__ == "__main__":
    sys.exit(main())
