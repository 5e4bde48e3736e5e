"""The trainer on real corpora: tokens per second under several plans, and BLEU after minutes.

    python benchmarks/measurements/translation.py --data FOLDER [--cache FOLDER] [--parts speed …]
        [--out FILE]

FOLDER holds `multi30k` (train, val and test_2016_flickr, .en and .de) and `3am` (train, val and
test, .en and .zh). Every figure is stored with its `headrace` command. `speed` trains `base` on
batches of 30 sentences under three plans, `tokens` on batches of some 25,000 target tokens;
`multi30k` and `3am` train to the end and score on the test set. `--help` lists all parts, and how
long each takes; `packed.py` compares the speed of packed and padded batches. Rates are from the
second half of a run, when all graphs are captured. The first two parts train on four numbered
copies of Multi30k, 116,000 pairs, which the script creates. `--quick` only shows that a part runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save, table

from headrace.translation import Trainer, TrainSettings, prepared_for, stored_values

INPUTS = Path(__file__).resolve().parents[1] / "inputs"
#: What each part does, and for about how long on an H200, with nothing compiled before. Estimated
#: for parts that train packed.
PARTS = {
    "speed": "base, batches of 30 sentences, two plans (90 s)",
    "tokens": "base, batches of 25,000 target tokens under max (200 s)",
    "multi30k": "train to the end, and score (190 s)",
    "3am": "the same (130 s)",
    "packed-quality-multi30k": "BLEU, packed and padded, for each of --seeds (60 s, each further "
    "seed 30 s)",
    "packed-quality-3am": "the same (60 s, 30 s)",
    "time-to-bleu": "packed on Multi30k until --bleu on its validation set (60 s)",
    "decode": "the test set with a model of another part, as graphs and step by step (30 s)",
}
#: Enough to see that a part runs.
QUICK: dict[str, Any] = {
    "preset": "tiny", "layers": 1, "vocabulary": 400, "tokens": 400, "max_steps": 4, "epochs": 2,
    "warmup": 2, "beam": 1, "valid_sentences": 4, "plan": "pipeline",
}  # fmt: skip
#: What `packed-quality` compares. Packed batches get as many tokens as the padded ones before them.
QUALITY_WAYS: dict[str, dict[str, Any]] = {
    "padded": {"packed": "off"},
    "padded-without-attention-dropout": {"packed": "off", "attention_dropout": 0.0},
    "packed": {"packed": "on", "plan": "max", "shapes": None},
}
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
    lines = epochs if len(epochs) > 2 else metrics(run, "step") or epochs
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


def first_pairs(corpus: Path) -> Path:
    """The first pairs of a corpus: enough to see that a benchmark runs."""
    small = corpus.parent / f"{corpus.name}-first"
    if not small.exists():
        small.mkdir()
        for path in corpus.iterdir():
            name = path.name.removesuffix(".gz")
            lines = _lines(path) if path.suffix == ".gz" else path.read_text("utf-8").split("\n")
            few = lines[: 400 if name.startswith("train") else 20]
            (small / name).write_text("\n".join(few) + "\n", encoding="utf-8")
    return small


def _lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")[:-1]


def quality(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    config, runs, cache = INPUTS / f"{name}.yaml", arguments.runs, arguments.cache
    shutil.rmtree(runs / name, ignore_errors=True)
    quick = [
        word
        for key, value in quick_values(arguments).items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    command, _, seconds = headrace(
        "train", corpus_of(name, arguments), "--config", config, "--project", runs, "--name", name,
        "--cache", cache, *quick, limit_s=320,
    )  # fmt: skip
    curve = [(line["step"], round(line["bleu"], 2)) for line in metrics(runs / name, "epoch")]
    scored, text, search_s = headrace(
        "evaluate", runs / name, "--lowercase", "--cache", cache, limit_s=100
    )
    bleu = re.search(r"^BLEU ([\d.]+)$", text, re.MULTILINE)
    lower = re.search(r"BLEU ([\d.]+) lowercased", text)
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


def packed_quality(corpus: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """BLEU with padded and with packed batches after as many updates, for each seed. A packed batch
    has as many real target tokens as a padded one has in the mean. Packed runs have no attention
    dropout, so padded ones train with and without. All runs are in this process: later seeds use
    the code that the first has compiled."""
    config = stored_values(INPUTS / f"{corpus}.yaml")
    common = {"data": str(corpus_of(corpus, arguments)), "max_steps": arguments.updates}
    common |= {"epochs": 1000, "valid_sentences": 0, "samples": 0}
    rows: dict[str, Any] = {}
    tokens: dict[str, int] = {}
    for seed in arguments.seeds:
        for way in (way for way in QUALITY_WAYS if way in arguments.ways):
            name = f"{corpus}-{way}-{seed}"
            choice = QUALITY_WAYS[way] | (tokens if way == "packed" else {})
            values = config | common | {"seed": seed} | choice | quick_values(arguments)
            rows[name] = train_here(TrainSettings.from_dict(values), name, arguments)
            if way != "packed":
                mean = rows[name]["target tokens"] / rows[name]["batches"]
                tokens["tokens"] = 8 * math.ceil((1.004 * mean + 4) / 8)
    return rows


def time_to_bleu(arguments: argparse.Namespace) -> dict[str, Any]:
    """How long packed batches take on Multi30k until BLEU on its validation set is reached."""
    values = stored_values(INPUTS / "multi30k.yaml") | {
        "data": str(corpus_of("multi30k", arguments)), "max_steps": arguments.updates,
        "epochs": 1000, "packed": "on", "plan": "max", "shapes": None, "tokens": 3200,
        "valid_sentences": 2000, "samples": 0,
    }  # fmt: skip
    values |= quick_values(arguments)
    row = train_here(TrainSettings.from_dict(values), "time-to-bleu", arguments)
    training_s = validation_s = 0.0
    for line in metrics(arguments.runs / "time-to-bleu", "epoch"):
        training_s += row["target tokens"] / line["tokens_per_s"]
        validation_s += line["validation_s"]
        if line["bleu"] >= arguments.bleu:
            break
    else:
        return {"time-to-bleu": {"highest BLEU": line["bleu"], **row}}
    # Both include what was compiled meanwhile.
    reached = {"updates": line["step"], "valid BLEU": round(line["bleu"], 2)}
    reached |= {"training s": round(training_s, 1), "validation s": round(validation_s, 1)}
    return {"time-to-bleu": row | reached}


def train_here(settings: TrainSettings, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in this process, and score on the test set."""
    begun = time.perf_counter()
    shutil.rmtree(arguments.runs / name, ignore_errors=True)
    trainer = Trainer.create(
        settings, project=arguments.runs, name=name, cache=arguments.cache, quiet=True
    )
    result = trainer.run()
    assert result.scores is not None
    epochs, starts = (metrics(arguments.runs / name, kind) for kind in ("epoch", "start"))
    train = prepared_for(settings, arguments.cache).splits["train"]
    return {
        "BLEU": round(result.scores.bleu, 2),
        "updates": result.updates,
        "batches": epochs[0]["step"],
        "target tokens": train.tokens[1] - len(train),
        "target tokens/s": round(statistics.median(line["tokens_per_s"] for line in epochs)),
        "compile s": round(starts[0].get("compile_s", 0), 1),
        "capture s": round(starts[0].get("capture_s", 0), 1),
        "validation s": round(sum(line["validation_s"] for line in epochs), 1),
        "seconds": round(time.perf_counter() - begun, 1),
        "settings": settings.to_dict(),
    }


def corpus_of(name: str, arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.data / name
    return first_pairs(folder) if arguments.quick else folder


def quick_values(arguments: argparse.Namespace) -> dict[str, Any]:
    return QUICK if arguments.quick else {}


def decoding(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds to translate the test set with beam 3, as graphs and step by step, in turns; loading
    apart. The model is that of `multi30k`, or of a part that trains on the same corpus."""
    from headrace.translation import TrainedModel, saved_model
    from headrace.translation import decode as decode_module

    sentences = _lines(arguments.data / "multi30k" / "test_2016_flickr.en.gz")
    sentences = sentences[: 4 if arguments.quick else None]
    trained = ("multi30k", "multi30k-packed-0", "time-to-bleu")
    run = next((name for name in trained if (arguments.runs / name / "result.json").exists()), None)
    if run is None:
        raise SystemExit(f"{arguments.runs}: expected a finished run, one of {', '.join(trained)}")
    begun = time.perf_counter()
    model = TrainedModel.load(arguments.runs / run)
    model.device.synchronize("bench")
    loaded_s = time.perf_counter() - begun
    worth, search = decode_module._WORTH_CAPTURING, decode_module.translate_ids
    # Steps from which on a capture is worth it, and tokens per batch.
    ways = {
        "graph": (worth, 16_384),
        "graph, batches × 2": (worth, 32_768),
        "graph, batches × 4": (worth, 65_536),
        "eager": (1 << 30, 16_384),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    translations: dict[str, list[str]] = {}
    for _ in range(2 if arguments.quick else 4):
        for way, (steps, batch_tokens) in ways.items():
            decode_module._WORTH_CAPTURING = steps
            saved_model.translate_ids = partial(search, batch_tokens=batch_tokens)
            begun = time.perf_counter()
            translations[way] = model.translate(sentences, beam=3)
            times[way].append(time.perf_counter() - begun)
    return {
        way: {
            "load s": round(loaded_s, 2),
            "first s": round(found[0], 2),
            "median s": round(statistics.median(found[1:]), 2),
            "sentences": len(sentences),
            "as eager": sum(map(str.__eq__, translations[way], translations["eager"])),
        }
        for way, found in times.items()
    }


def main() -> None:
    width = max(map(len, PARTS))
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="parts:\n" + "\n".join(f"  {n:<{width}}  {text}" for n, text in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("build/cache"))
    parser.add_argument("--runs", type=Path, default=Path("build/runs"))
    parser.add_argument(
        "--parts", nargs="+", default=["speed", "tokens", "multi30k", "3am"], choices=PARTS
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of packed-quality")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=QUALITY_WAYS,
        default=list(QUALITY_WAYS),
        help="of packed-quality",
    )
    parser.add_argument(
        "--updates", type=int, default=3000, help="of packed-quality and time-to-bleu"
    )
    parser.add_argument("--bleu", type=float, default=40.0, help="of time-to-bleu")
    parser.add_argument("--quick", action="store_true", help="tiny models, a few pairs and updates")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.ways == ["packed"]:
        parser.error("--ways packed: expected a padded way, too; packed batches get its tokens")
    result: dict[str, Any] = header("translation.py")
    for part in arguments.parts:
        if part == "decode":
            rows = decoding(arguments)
        elif part == "time-to-bleu":
            rows = time_to_bleu(arguments)
        elif part.startswith("packed-quality-"):
            rows = packed_quality(part.removeprefix("packed-quality-"), arguments)
        elif part in ("speed", "tokens"):
            rows = {"speed": speed, "tokens": tokens}[part](
                arguments.data, arguments.runs, arguments.cache
            )
        else:
            rows = {part: quality(part, arguments)}
            print(rows[part]["evaluate printed"])
        result[part] = rows[part] if part in ("multi30k", "3am") else rows
        save(arguments.out, result)
        print(table({name: _short(row) for name, row in rows.items()}), flush=True)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    main()
