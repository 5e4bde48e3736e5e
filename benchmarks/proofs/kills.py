"""Runs of the trainer, killed with SIGKILL at random moments and resumed each time.

    python benchmarks/proofs/kills.py --kills 100 --out kills.json

Each process is killed at a random moment within the first three quarters of an uninterrupted run's
time; since a resumed run is shorter, kills also happen near the end. The run is resumed and killed
until it finishes. Then its weights (bit for bit), losses and scores must be those of an
uninterrupted run. No process and no lock may be left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save, table

SETTINGS: dict[str, Any] = {
    "src": "en",
    "trg": "de",
    "vocabulary": 300,
    "preset": "tiny",
    "width": 16,
    "heads": 2,
    "layers": 1,
    "inner": 32,
    "sentences": 8,
    "epochs": 3,
    "warmup": 10,
    "beam": 2,
    "valid_sentences": 4,
    "device": "cpu",
    "save_every": 0,
}
WAYS: list[dict[str, Any]] = [
    {"plan": "pipeline", "workers": 0},
    {"plan": "pipeline", "workers": 2, "ema": 0.9},
    {"plan": "baseline", "workers": 0, "accumulate": 3},
    {"plan": "streams4", "workers": 2, "dropout": 0.3, "average_last": 2},
    {"plan": "graph", "workers": 0, "on_nonfinite": "tolerate:3"},
]
# One in so many is killed while Python still starts, all others after the run has its folder.
EARLY = 10


@dataclass
class Tally:
    """The results of one configuration."""

    kills: int = 0
    runs: int = 0
    same: int = 0
    left_behind: int = 0
    moments: list[float] = field(default_factory=list)


class Killing:
    """The runs of one configuration, in a folder of their own."""

    def __init__(self, folder: Path, way: dict[str, Any], draw: random.Random) -> None:
        self.folder, self.way, self.draw = folder, way, draw
        folder.mkdir()
        self.corpus = folder / "pairs.tsv"
        self.corpus.write_text(corpus(), encoding="utf-8")
        self.tally = Tally()
        self.children: list[psutil.Process] = []

    def new(self, name: str) -> Path:
        """A new run that has its folder and has not started."""
        from headrace.translation import Trainer, TrainSettings

        settings = TrainSettings.from_dict({**SETTINGS, **self.way, "data": str(self.corpus)})
        cache = self.folder / "cache"
        trainer = Trainer.create(settings, project=self.folder, name=name, cache=cache, quiet=True)
        return trainer.folder.path

    def start(self, run: Path) -> subprocess.Popen[bytes]:
        words = ["train", "--resume", str(run), "--cache", str(self.folder / "cache"), "--quiet"]
        return subprocess.Popen(
            [sys.executable, "-m", "headrace", *words],
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "stderr").open("ab"),
        )

    def undisturbed(self) -> tuple[Path, float]:
        """The run that the others are compared with, and how long it trains, in seconds."""
        run = self.new("whole")
        process = self.start(run)
        begun = self.when_locked(run, process)
        if process.wait() != 0:
            raise SystemExit((self.folder / "stderr").read_text())
        return run, time.monotonic() - begun

    def when_locked(self, run: Path, process: subprocess.Popen[bytes]) -> float:
        """Wait until the process has started the run."""
        mark = f"process {process.pid} ".encode()
        while process.poll() is None:
            lock = run / ".lock"
            if lock.exists() and lock.read_bytes().startswith(mark):
                break
            time.sleep(0.005)
        return time.monotonic()

    def disturb(self, kills: int) -> Tally:
        whole, seconds = self.undisturbed()
        while self.tally.kills < kills:
            self.tally.runs += 1
            run = self.new(f"killed-{self.tally.runs}")
            while not self.life(run, seconds, may_kill=self.tally.kills < kills):
                pass
            self.tally.same += left_by(run) == left_by(whole)
        _, alive = psutil.wait_procs(self.children, timeout=30)
        self.tally.left_behind = len(alive)
        return self.tally

    def life(self, run: Path, seconds: float, *, may_kill: bool) -> bool:
        """Run one process and kill it. Returns whether it finished the run first."""
        process = self.start(run)
        early = self.draw.randrange(EARLY) == 0
        begun = time.monotonic() if early else self.when_locked(run, process)
        moment = self.draw.uniform(
            0, 0.75 * seconds
        )  # most processes start in the middle of the run
        if may_kill:
            try:
                process.wait(timeout=max(0.0, begun + moment - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill(process)
                self.tally.kills += 1
                self.tally.moments.append(round(moment, 3))
                return False
        if process.wait() != 0:
            raise SystemExit((self.folder / "stderr").read_text())
        return True

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.children += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()


def corpus() -> str:
    german = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
    english = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    return "".join(
        f"{english[a]} and {english[b]} or {english[c]}\t"
        f"{german[a]} und {german[b]} oder {german[c]}\n"
        for a in range(10)
        for b in range(5)
        for c in range(4)
    )


def left_by(run: Path) -> dict[str, Any]:
    """What a finished run wrote, except what depends on the clock: all weight files, the losses and
    scores of every epoch, and the result."""
    found: dict[str, Any] = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((run / "weights").glob("*.safetensors"))
    }
    kept = ("kind", "step", "epoch", "loss", "valid_loss", "bleu", "chrf")
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    found["metrics"] = [
        {name: line.get(name) for name in kept}
        for line in lines
        if line["kind"] in ("epoch", "valid")  # the others are written by the clock
    ]
    found["result"] = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="number of kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    arguments = parser.parse_args()
    draw, rows = random.Random(arguments.seed), {}
    started, total = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        for at, way in enumerate(WAYS):
            kills = arguments.kills * (at + 1) // len(WAYS) - arguments.kills * at // len(WAYS)
            tally = Killing(Path(folder) / str(at), way, draw).disturb(kills)
            total += tally.kills
            name = ", ".join(f"{key}={value}" for key, value in way.items())
            rows[name] = vars(tally)
            print(
                f"{name}: {tally.kills} kills of {tally.runs} runs, {tally.same} as if undisturbed",
                flush=True,
            )
    shown = {
        name: {key: value for key, value in row.items() if key != "moments"}
        for name, row in rows.items()
    }
    print(table(shown))
    good = all(row["same"] == row["runs"] and not row["left_behind"] for row in rows.values())
    elapsed = round(time.monotonic() - started)
    result = {"kills": total, "all_the_same": good, "elapsed_s": elapsed, "ways": rows}
    save(arguments.out, {**header("kills.py"), **result})
    if not good:
        raise SystemExit("a run that was killed is not the one that was not")


if __name__ == "__main__":
    main()
