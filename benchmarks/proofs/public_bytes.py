"""Public programs by `python` and by `headrace run` on the CPU: the same output to the byte.

    python benchmarks/proofs/public_bytes.py --checkouts scratch/public --out public-bytes.json
    python benchmarks/proofs/public_bytes.py TCN "cleanrl ppo"

The programs are those that run unchanged (`UNCHANGED` in `public_programs.py`), made small. Each is
started as a command in two copies of its folder, once as `python SCRIPT` and once as
`python -m headrace run --check 20 SCRIPT`. Stdout, the files that it leaves and its exit code must
be the same. It ends after some steps, and its clock goes on by a second with each, since programs
print how long they took. A program that needs CUDA fails, and must fail the same.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[1:1] = map(str, BENCHMARKS.glob("*/"))  # its sister folders

from measuring import header, save
from public_programs import UNCHANGED, Program
from public_run import prepare

from headrace.text_table import text_table

#: Python runs this first in both: it makes up torchvision's data sets, and ends the program.
_FIRST = """
import random, sys, time
before = list(sys.path)
sys.path[:0] = {tools!r}
import public_run
import numpy, torch
sys.path[:] = before
made_up = public_run.made_up_data(False)
made_up.__enter__()
random.seed(0); numpy.random.seed(0); torch.manual_seed(0)
steps, truth = [], torch.Tensor.backward

def backward(self, *args, **kwargs):
    truth(self, *args, **kwargs)
    steps.append(None)
    if len(steps) == {steps}:
        sys.exit(7)

torch.Tensor.backward = backward
time.time = lambda: 1.7e9 + len(steps)
"""
#: TensorBoard's files end with the number of a process.
_PROCESS = re.compile(r"\.\d+\.\d+$")


def ran(program: Program, folder: Path, prefix: list[str], options: Any) -> dict[str, Any]:
    """What a command has printed and left, started in a copy of the program's folder. All copies
    are at the same place, one after the other: programs print it."""
    here = folder / "files"
    shutil.copytree(folder / "prepared", here)
    roots = [folder / "first", *([here] if program.file else []), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, roots)), "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "80",
        "PYTHONHASHSEED": "0",
    }  # fmt: skip
    arguments = shlex.split(f"{program.arguments} {program.small}")
    done = subprocess.run(
        [sys.executable, *prefix, Path(program.script).name, *arguments],
        cwd=here / program.folder, env=environment, capture_output=True, check=False,
        stdin=subprocess.DEVNULL, timeout=options.limit,
    )  # fmt: skip
    left = {
        _PROCESS.sub("", str(path.relative_to(here))): path.read_bytes()
        for path in sorted(here.rglob("*"))
        if path.is_file()
    }
    shutil.rmtree(here)
    return {"exit code": done.returncode, "stdout": done.stdout, "files": left,
            "stderr": done.stderr.decode(errors="replace")}  # fmt: skip


def compared(program: Program, options: Any) -> dict[str, Any]:
    """What of a program is not the same in both ways."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first").mkdir()
        tools = [*map(str, BENCHMARKS.glob("*/")), str(BENCHMARKS.parent / "tests")]
        first = _FIRST.format(tools=tools, steps=options.steps)
        (folder / "first" / "sitecustomize.py").write_text(first, encoding="utf-8")
        prepare(program, options.checkouts, folder / "prepared", small=True)
        try:
            plain = ran(program, folder, [], options)
            sped_up = ran(program, folder, ["-m", "headrace", "run", "--check", "20"], options)
        except subprocess.TimeoutExpired:
            return {"verdict": f"more than {options.limit} s"}
    differs = [name for name in ("exit code", "stdout") if plain[name] != sped_up[name]]
    names = plain["files"].keys() | sped_up["files"].keys()
    ours, theirs = sped_up["files"], plain["files"]
    differs += [one for one in sorted(names) if ours.get(one) != theirs.get(one)]
    return {
        "verdict": "differs: " + ", ".join(differs) if differs else "the same",
        "exit code": plain["exit code"],
        "stdout": len(plain["stdout"]),
        "files": len(plain["files"]),
        "ended": (plain["stderr"].strip().splitlines() or [""])[-1][:100],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which programs [default: all]")
    parser.add_argument("--checkouts", type=Path, default=Path("scratch/public"))
    parser.add_argument("--steps", type=int, default=40, help="a program ends after so many")
    parser.add_argument("--limit", type=float, default=300, help="a run takes at most so long")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    options = parser.parse_args()
    programs = [one for one in UNCHANGED if not options.names or one.name in options.names]
    result: dict[str, Any] = header("public_bytes.py") | {"programs": {}}
    with ThreadPoolExecutor(options.at_once) as pool:
        for program, found in zip(
            programs, pool.map(lambda one: compared(one, options), programs), strict=True
        ):
            result["programs"][program.name] = found
            save(options.out, result)
            print(f"{program.name:28} {found['verdict'][:120]}  {found.get('ended')}", flush=True)
    columns = ("program", "exit code", "stdout, bytes", "files", "")
    rows = [
        (name, *(str(one.get(key, "")) for key in ("exit code", "stdout", "files", "verdict")))
        for name, one in result["programs"].items()
    ]
    print("\n" + text_table(columns, rows))
    sys.exit(any(one["verdict"] != "the same" for one in result["programs"].values()))


if __name__ == "__main__":
    main()
