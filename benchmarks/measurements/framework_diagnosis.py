"""What `headrace diagnose` says about scripts of Lightning, Hugging Face, Accelerate and timm.

    python benchmarks/measurements/framework_diagnosis.py --out result.json
    python benchmarks/measurements/framework_diagnosis.py --scripts timm_loop --fake

Each script of `framework_scripts/` runs unchanged, in a process and a folder of its own. The result
has each diagnosis without its timeline. The last lines are a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save

from headrace.diagnosis import text_of
from headrace.records import DiagnosisResult, TimeParts
from headrace.text_table import text_table

FOLDER = Path(__file__).resolve().parents[1] / "inputs" / "framework_scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
LIBRARIES = ("lightning", "transformers", "accelerate", "timm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", default=",".join(SCRIPTS))
    parser.add_argument("--fake", action="store_true", help="on the fake device: lines, no times")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each script")
    parser.add_argument("--html", type=Path, help="write the pages to this folder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    versions = {name: metadata.version(name) for name in LIBRARIES}
    result: dict[str, Any] = header("framework_diagnosis.py") | {
        "libraries": versions,
        "scripts": {},
    }
    for name in options.scripts.split(","):
        result["scripts"][name] = found = diagnosed(name, options)
        print(f"== {name}\n{found.pop('text')}\n", flush=True)
        save(options.out, result)
    print(text_table(("script", "ms", "parts %", "waits", "worst line"), map(row, *rows(result))))


def diagnosed(name: str, options: Any) -> dict[str, Any]:
    """The diagnosis of a script as plain values, and as text."""
    command = [sys.executable, "-m", "headrace", "diagnose"]
    if options.fake:
        command.append("--fake")
    if options.html is not None:
        options.html.mkdir(parents=True, exist_ok=True)
        command += ["--html", str(options.html.resolve() / f"{name}.html")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_MININTERVAL": "5"}
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "diagnosis.json"
        command += ["--out", str(stored), str(FOLDER / f"{name}.py")]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=options.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as problem:
            return {"error": f"took longer than {problem.timeout:.0f} s", "text": problem.stderr}
        if not stored.exists():
            return {"error": f"exit code {done.returncode}", "text": done.stderr[-3000:]}
        diagnosis = DiagnosisResult.read(stored)
    # Without paths of this machine.
    values = json.loads(json.dumps(diagnosis.to_dict()).replace(f"{FOLDER}{os.sep}", ""))
    values["environment"]["command"] = f"headrace diagnose {name}.py"
    del values["timeline"]
    return {"exit_code": done.returncode, "diagnosis": values, "text": text_of(diagnosis)}


def rows(result: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    return list(result["scripts"]), list(result["scripts"].values())


def row(name: str, found: dict[str, Any]) -> list[object]:
    if "error" in found:
        return [name, None, found["error"], None, None]
    values = found["diagnosis"]
    parts, step_ms = values["parts"], values["step_ms"]
    shares = ""
    if parts and step_ms:
        shares = " ".join(
            f"{part[:5]} {100 * parts[part] / step_ms:.0f}"
            for part in TimeParts.__slots__
            if parts[part] >= 0.01 * step_ms
        )
    return [name, step_ms, shares, values["waits_per_step"], worst_line(values)]


def worst_line(values: dict[str, Any]) -> str:
    if not values["lines"]:
        return "–"
    line = values["lines"][0]
    place = line["called_from"] or line["line"] or {"file": "?", "line": 0}
    gain = "" if line["gain_ms"] is None else f" gains {line['gain_ms']:.2f} ms"
    return f"{Path(place['file']).name}:{place['line']} {line['title']}{gain}"


if __name__ == "__main__":
    main()
