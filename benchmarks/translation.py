"""The trainer on real corpora: tokens per second under several plans, and BLEU after minutes.

    python benchmarks/translation.py --data FOLDER [--cache FOLDER] [--parts speed …] [--out FILE]

FOLDER holds `multi30k` (train, val and test_2016_flickr, .en and .de) and `3am` (train, val and
test, .en and .zh). Every figure is stored with its `headrace` command. `speed` trains `base` on
batches of 30 sentences under three plans, `tokens` on batches of some 25,000 target tokens;
`multi30k` and `3am` train to the end and score on the test set. `decode` then translates the test
set with the model of `multi30k`, with and without graphs. `packed-quality-multi30k` and
`packed-quality-3am` train with packed and with padded batches for as many updates, for each of
`--seeds`; `packed.py` compares their speed. Rates are from the second half of a
run, when all graphs are captured. The first two parts train on four numbered copies of Multi30k,
116,000 pairs, which the script creates.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measuring import header, save, table

ROOT = Path(__file__).resolve().parent
#: How `packed-quality` trains. Padded batches need not be compiled to have the same BLEU.
PACKED_AND_PADDED = {
    "packed": "--packed on --shapes 0 --plan max",
    "padded": "--packed off --plan graph",
}
UPDATES = 8000
SPEED = "--preset base --vocabulary 32000 --src en --trg de --valid-sentences 0 --beam 1"


def headrace(*words: str | Path, limit_s: float) -> tuple[str, str, float]:
    """Run a command. Returns the command line, its output, and the seconds it took."""
    command = [str(word) for word in words]
    begun = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "headrace", *command],
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    if run.returncode:
        raise SystemExit(f"headrace {' '.join(command)}: {run.stderr[-3000:]}")
    return "headrace " + " ".join(command), run.stdout + run.stderr, time.monotonic() - begun


def metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def rate_of(run: Path) -> dict[str, Any]:
    """Target tokens per second after the warm-up, without padding, and the host's waits."""
    epochs = metrics(run, "epoch")
    lines = epochs if len(epochs) > 2 else metrics(run, "step")
    warm = [line for line in lines if line["step"] > epochs[-1]["step"] / 2]
    return {
        "target tokens/s": round(statistics.median(line["tokens_per_s"] for line in warm)),
        "lowest": round(min(line["tokens_per_s"] for line in warm)),
        "highest": round(max(line["tokens_per_s"] for line in warm)),
        "data wait %": round(100 * epochs[-1]["data_wait_share"], 2),
        "blocked %": round(100 * epochs[-1]["host_blocked_share"], 2),
        "peak MB": round(max(line["peak_memory_bytes"] for line in epochs) / 1e6),
        "replays": epochs[-1]["replays"],
        "updates": epochs[-1]["step"],
    }


def measured(name: str, runs: Path, *words: str | Path) -> dict[str, Any]:
    command, text, seconds = headrace(
        "train", *words, "--project", runs, "--name", name, limit_s=240
    )
    found = re.search(r"(\d[\d,]*) batches per epoch, (\d+) shapes, ([\d.]+)% padding", text)
    row = {**rate_of(runs / name), "seconds": round(seconds, 1), "command": command}
    return row | ({"padding %": float(found[3])} if found else {})


def speed(data: Path, runs: Path, cache: Path) -> dict[str, Any]:
    """30 sentences per batch, with real lengths."""
    rows = {}
    for plan, steps in {"baseline": 500, "graph": 3500}.items():
        rows[plan] = measured(
            f"speed-{plan}", runs, four(data), *SPEED.split(), "--cache", cache,
            "--shapes", "16", "--plan", plan, "--max-steps", str(steps),
        )  # fmt: skip
    for row in rows.values():
        row["× baseline"] = round(row["target tokens/s"] / rows["baseline"]["target tokens/s"], 2)
    return rows


def tokens(data: Path, runs: Path, cache: Path) -> dict[str, Any]:
    """Some 25,000 target tokens per batch, padding not counted."""
    row = measured(
        "tokens-max", runs, four(data), *SPEED.split(), "--cache", cache, "--tokens", "29500",
        "--shapes", "12", "--plan", "max", "--epochs", "5",
    )  # fmt: skip
    return {"max": row | {"updates an epoch": row["updates"] // 5}}


def four(data: Path) -> Path:
    """Four copies of Multi30k. A hundred of its held-out pairs are enough here."""
    corpus = data / "four"
    if not corpus.exists():
        corpus.mkdir()
        for side in ("en", "de"):
            lines = _lines(data / "multi30k" / f"train.{side}.gz")
            copies = [f"{line} {copy}\n" for copy in range(1, 5) for line in lines]
            (corpus / f"train.{side}").write_text("".join(copies), encoding="utf-8")
            held_out = _lines(data / "multi30k" / f"val.{side}.gz")[:100]
            (corpus / f"val.{side}").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    return corpus


def paragraphs(data: Path) -> Path:
    """Four copies of Multi30k's pairs, five of them joined to one."""
    corpus = data / "paragraphs"
    if not corpus.exists():
        corpus.mkdir()
        for side in ("en", "de"):
            for split, copies in (("train", 4), ("val", 1)):
                lines = _lines(data / "multi30k" / f"{split}.{side}.gz")
                lines = lines if split == "train" else lines[:500]
                joined = [
                    f"{' '.join(lines[at : at + 5])} {copy}\n"
                    for copy in range(copies)
                    for at in range(copy, len(lines) - 4, 5)
                ]
                (corpus / f"{split}.{side}").write_text("".join(joined), encoding="utf-8")
    return corpus


def first_pairs(corpus: Path, count: int = 400) -> Path:
    """The first pairs of a corpus: enough to see that a benchmark runs."""
    small = corpus.parent / f"{corpus.name}-first"
    if not small.exists():
        small.mkdir()
        for path in corpus.iterdir():
            name = path.name.removesuffix(".gz")
            lines = _lines(path) if path.suffix == ".gz" else path.read_text("utf-8").split("\n")
            (small / name).write_text("\n".join(lines[:count]) + "\n", encoding="utf-8")
    return small


def _lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")[:-1]


def quality(name: str, data: Path, runs: Path, cache: Path) -> dict[str, Any]:
    config = ROOT / f"{name}.yaml"
    command, _, seconds = headrace(
        "train", data / name, "--config", config, "--project", runs, "--name", name,
        "--cache", cache, limit_s=320,
    )  # fmt: skip
    curve = [(line["step"], round(line["bleu"], 2)) for line in metrics(runs / name, "epoch")]
    scored, text, search_s = headrace(
        "evaluate", runs / name, "--lowercase", "--cache", cache, limit_s=100
    )
    bleu = re.search(r"^BLEU ([\d.]+)$", text, re.MULTILINE)
    lower = re.search(r"BLEU ([\d.]+) in lower case", text)
    assert bleu
    assert lower
    return {
        "training seconds, start to end": round(seconds, 1),
        "BLEU": float(bleu[1]),
        "BLEU lower case": float(lower[1]),
        "evaluate seconds, start to end": round(search_s, 1),
        "evaluate printed": text,
        "commands": [command, scored],
        "settings": config.read_text(encoding="utf-8"),
        "rate": rate_of(runs / name),
        "valid BLEU by update": curve,
    }


def packed_quality(
    corpus: str, data: Path, runs: Path, cache: Path, seeds: list[int]
) -> dict[str, Any]:
    """BLEU with packed and with padded batches after as many updates, for each seed."""
    rows: dict[str, Any] = {}
    for seed in seeds:
        for way, flags in PACKED_AND_PADDED.items():
            name = f"{corpus}-{way}-{seed}"
            command, text, seconds = headrace(
                "train", data / corpus, "--config", ROOT / f"{corpus}.yaml", *flags.split(),
                "--seed", str(seed), "--epochs", "1000", "--max-steps", str(UPDATES),
                "--project", runs, "--name", name, "--cache", cache, limit_s=500,
            )  # fmt: skip
            bleu = re.search(r"^BLEU ([\d.]+)$", text, re.MULTILINE)
            assert bleu
            rows[name] = {
                "BLEU": float(bleu[1]),
                "updates": metrics(runs / name, "epoch")[-1]["step"],
                "seconds": round(seconds, 1),
                "target tokens/s": rate_of(runs / name)["target tokens/s"],
                "command": command,
            }
    return rows


def decoding(data: Path, runs: Path) -> dict[str, Any]:
    """Seconds to translate the test set with beam 3, as graphs and step by step, in turns; loading
    apart."""
    from headrace.translation import TrainedModel
    from headrace.translation import decode as decode_module

    sentences = _lines(data / "multi30k" / "test_2016_flickr.en.gz")
    begun = time.perf_counter()
    model = TrainedModel.load(runs / "multi30k")
    model.device.synchronize("bench")
    loaded_s = time.perf_counter() - begun
    worth, times = decode_module._WORTH_CAPTURING, {"graph": [], "eager": []}
    translations: dict[str, list[str]] = {}
    for _ in range(4):
        for way, steps in (("graph", worth), ("eager", 1 << 30)):
            decode_module._WORTH_CAPTURING = steps
            begun = time.perf_counter()
            translations[way] = model.translate(sentences, beam=3)
            times[way].append(time.perf_counter() - begun)
    equal = sum(map(str.__eq__, translations["graph"], translations["eager"]))
    return {
        way: {
            "load s": round(loaded_s, 2),
            "first s": round(found[0], 2),
            "median s": round(statistics.median(found[1:]), 2),
            "sentences": len(sentences),
            "equal": equal,
        }
        for way, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("build/cache"))
    parser.add_argument("--runs", type=Path, default=Path("build/runs"))
    parser.add_argument("--parts", nargs="+", default=["speed", "tokens", "multi30k", "3am"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of packed-quality")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = header("translation.py")
    for part in arguments.parts:
        if part == "decode":
            result[part] = decoding(arguments.data, arguments.runs)
            print(table(result[part]))
        elif part.startswith("packed-quality-"):
            corpus = part.removeprefix("packed-quality-")
            result[part] = packed_quality(
                corpus, arguments.data, arguments.runs, arguments.cache, arguments.seeds
            )
            print(table({name: _short(row) for name, row in result[part].items()}))
        elif part in ("speed", "tokens"):
            rows = {"speed": speed, "tokens": tokens}[part](
                arguments.data, arguments.runs, arguments.cache
            )
            print(table({name: _short(row) for name, row in rows.items()}))
            result[part] = rows
        else:
            result[part] = quality(part, arguments.data, arguments.runs, arguments.cache)
            print(table({part: _short(result[part])}), result[part]["evaluate printed"])
        save(arguments.out, result)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    main()
