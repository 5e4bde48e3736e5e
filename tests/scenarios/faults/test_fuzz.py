"""Configurations, data files and checkpoints, mutated at random: each is read, or refused by an
error of Headrace's own. No traceback, no hang, and nothing is written where it should not be.

In CI a few hundred inputs, always the same; `HEADRACE_FUZZ=10000` tries as many, drawn anew.
"""

from __future__ import annotations

import bz2
import contextlib
import copy
import gzip
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    weights_from_file,
    weights_to_file,
)
from headrace.checkpoint.content import checksum
from headrace.device import open_device
from headrace.errors import HeadraceError
from headrace.lifecycle import MetricsLog, RunFolder, read_metrics
from headrace.plan import load_plan
from headrace.translation import Trainer, TrainSettings, read_corpus, read_scored_pairs
from headrace.translation.build import check_policies
from headrace.translation.corpus.prepare import prepared_for
from headrace.translation.corpus.prepared import load_prepared
from headrace.translation.corpus.vocabulary import Vocabulary
from headrace.translation.result import stored_result
from support.training.engines import data, make_engine
from support.translation.trainers import SMALL

TARGETS = 9
ASKED = int(os.environ.get("HEADRACE_FUZZ", "0"))
fuzzed = settings(
    max_examples=-(-ASKED // TARGETS) if ASKED else 40,
    derandomize=not ASKED,
    deadline=timedelta(seconds=20),
    database=None,
    suppress_health_check=list(HealthCheck),
)
TOKENS = [
    b"../../../x", b"/etc/passwd", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"NaN", b"-Infinity",
    b"1e999", b"9" * 5000, b"-1", b"null", b"true", b"{}", b"[]", b'""', b"\n", b"\t", b": ",
    b"!!python/object/apply:os.system ['touch pwned']", b"cos\nsystem\n(S'touch pwned'\ntR.",
    b"&a [*a, *a]", b"[" * 3000, b"{" * 3000, b"- " * 2000, b"{\"$tuple\": [1]}", b"\xe2\x80\xa8",
    b'{"$tensor": "engine/model/0.weight", "dtype": "load", "shape": [1]}', b"2024-13-45", b"~",
]  # fmt: skip
change = st.tuples(
    st.sampled_from(["flip", "insert", "delete", "double", "cut", "token"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(TOKENS)),
)
changes = st.lists(change, min_size=1, max_size=4)


def mutated(content: bytes, how: list[tuple[str, float, float, bytes]]) -> bytes:
    for kind, where, length, piece in how:
        at = int(where * len(content))
        end = min(len(content), at + 1 + int(length * length * 64))
        if kind == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ (piece[0] or 1)]) + content[at + 1 :]
        elif kind == "delete":
            content = content[:at] + content[end:]
        elif kind == "double":
            content = content[:end] + content[at:end] + content[end:]
        elif kind == "cut":
            content = content[:at]
        else:
            content = content[:at] + piece + content[at:]
    return content


@contextlib.contextmanager
def guarded() -> Iterator[Path]:
    """A folder to work in. Beside it there is a file, and at the end that and nothing else."""
    with tempfile.TemporaryDirectory() as name:
        root, before = Path(name), Path.cwd()
        inside = root / "a" / "b" / "inside"
        inside.mkdir(parents=True)
        (root / "a" / "kept").write_text("kept")
        os.chdir(inside)
        try:
            yield inside
        finally:
            os.chdir(before)
        outside = {
            path.relative_to(root).as_posix()
            for path in root.rglob("*")
            if not path.is_relative_to(inside)
        }
        assert outside == {"a", "a/b", "a/kept"}
        assert not list(root.rglob("pwned"))
        assert (root / "a" / "kept").read_text() == "kept"


def read_or_refused(read: Callable[[], Any]) -> Any:
    """What it gives; None if it was refused as it should be. Anything else is a traceback."""
    try:
        return read()
    except HeadraceError as problem:
        said = str(problem)
    assert 0 < len(said) < 20_000
    return None


CONFIG = yaml.safe_dump({**SMALL, "data": ["a.tsv", "b"], "weights": None, "tokens": 100}).encode()
PLAN = b"plan:\n  preset: pipeline\n  graphs: auto\n  run_ahead_bytes: 100\nloader:\n  workers: 2\n"
TSV = b"en\tde\n" + "".join(f"one {n}\teins {n} \u00e4\n" for n in range(9)).encode()
JSONL = b"".join(b'{"en": "one %d", "de": "eins %d"}\n' % (n, n) for n in range(9))
JSON = json.dumps([{"en": f"one {n}", "de": f"eins {n}"} for n in range(9)], indent=1).encode()


@fuzzed
@given(changes)
def test_settings(how: list[Any]) -> None:
    with guarded() as folder:
        file = folder / "config.yaml"
        file.write_bytes(mutated(CONFIG, how))
        found = read_or_refused(lambda: TrainSettings.read(file))
        if found is not None:
            read_or_refused(found.model)
            read_or_refused(lambda: check_policies(found))
            assert TrainSettings.from_dict(yaml.safe_load(yaml.safe_dump(found.to_dict()))) == found


@fuzzed
@given(changes)
def test_plans(how: list[Any]) -> None:
    with guarded() as folder:
        (folder / "plan.yaml").write_bytes(mutated(PLAN, how))
        read_or_refused(lambda: load_plan(folder / "plan.yaml"))


names = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(["..", "/", "\\", "a", "~", ".", "\x00", " ", "C:", "\u202e"])).map(
        "".join
    ),
    st.sampled_from(["../../x", "/tmp/x", "a/../../x", "link/x", "link", ".lock", "x" * 300]),
)


@fuzzed
@given(names)
def test_names_of_runs(name: str) -> None:
    with guarded() as folder:
        (folder / "link").symlink_to("/")  # a name that leads elsewhere
        found = read_or_refused(lambda: RunFolder.create(folder, name))
        if found is not None:
            assert found.path.parent == folder
            assert found.path.resolve().parent == folder.resolve()


@fuzzed
@given(
    changes,
    st.sampled_from(
        [
            *("a.tsv", "a.jsonl", "a.json", "a.csv", "a.txt", "a.en"),
            *("a.tsv.gz", "a.csv.bz2", "a.json.xz", "a.tsv.utf-16"),
        ]
    ),
    st.booleans(),
    st.booleans(),
)
def test_data(how: list[Any], name: str, skip_bad: bool, packed_first: bool) -> None:
    csv = b"en,de\n" + TSV.replace(b"\t", b",")
    contents = {"tsv": TSV, "jsonl": JSONL, "json": JSON, "en": TSV, "csv": csv, "txt": TSV}
    content = contents[name.split(".")[1]]
    packings: dict[str, Any] = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "utf-16": lambda raw: raw.decode(errors="replace").encode("utf-16"),
    }
    pack = packings.get(name.split(".")[-1])
    if pack is not None:
        content = mutated(pack(content), how) if packed_first else pack(mutated(content, how))
    else:
        content = mutated(content, how)
    with guarded() as folder:
        (folder / name).write_bytes(content)
        files: Any = folder / name
        if name == "a.en":
            (folder / "a.de").write_bytes(TSV)
            files = [files, folder / "a.de"]
        for read in (
            lambda: read_corpus(files, src="en", trg="de", skip_bad=skip_bad),
            lambda: read_scored_pairs(files, src="en", trg="de", skip_bad=skip_bad),
        ):
            read_or_refused(read)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    lines = [f"one {n} and {n % 7}\teins {n} und {n % 7}" for n in range(60)]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = TrainSettings((str(folder / "pairs.tsv"),), src="en", trg="de", vocabulary=300)
    return prepared_for(settings, folder).folder


@fuzzed
@given(changes, st.data())
def test_prepared_folders(prepared: Path, how: list[Any], draw: st.DataObject) -> None:
    """All files but the vocabularies, which are SentencePiece's to read: those come next."""
    files = sorted(p.name for p in prepared.iterdir() if not p.name.endswith(".model"))
    name = draw.draw(st.sampled_from(files))
    with guarded() as folder:
        there = folder / "prepared"
        shutil.copytree(prepared, there)
        content = mutated((there / name).read_bytes(), how)
        if draw.draw(st.booleans()):  # of the right size: what only a look inside finds
            content = content[: (there / name).stat().st_size].ljust((there / name).stat().st_size)
        (there / name).write_bytes(content)
        found = read_or_refused(lambda: load_prepared(there))
        if found is not None:
            for split, ids in found.splits.items():
                assert [*map(len, ids)] == [2] * len(ids)
                assert all(
                    max(map(max, pair), default=0) < 400 for pair in ids if all(map(len, pair))
                )
                if split != "train":
                    read_or_refused(lambda split=split: found.texts(split))
            read_or_refused(found.table)


@fuzzed
@given(changes)
def test_vocabularies(prepared: Path, how: list[Any]) -> None:
    with guarded():
        model = mutated((prepared / "src.model").read_bytes(), how)
        found = read_or_refused(lambda: Vocabulary(model))
        if found is not None:
            read_or_refused(lambda: found.decode(found.encode(["one 3 und \u4e2d"])))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    engine = make_engine(open_device("cpu"), ema_decay=0.9, accumulate=2)
    for _ in engine.steps(data(3)):
        state = engine.state_dict()
        state = {"engine": state, "sums": [1.0, 2.0], "best": {}, "odd": torch.ones(2).cdouble()}
        save_checkpoint(folder, state, step=engine.updates)
    return folder


@fuzzed
@given(changes, st.sampled_from(["state.json", "tensors.safetensors"]))
def test_checkpoints(stored: Path, how: list[Any], name: str) -> None:
    with guarded() as folder:
        shutil.copytree(stored, folder / "state")
        newest = max((folder / "state").glob("step-*"))
        before = (newest / name).read_bytes()
        (newest / name).write_bytes(mutated(before, how))
        found = latest_checkpoint(folder / "state")
        assert found is not None  # the one before, if not this
        load_checkpoint(found)
        read_or_refused(lambda: load_checkpoint(newest))
        if name == "tensors.safetensors":
            read_or_refused(lambda: weights_from_file(newest / name))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    inner: Any = ()
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inner:
        found += places(part, (*path, key))
    return found


wrong = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from(
        [[], {}, {"$tuple": [1]}, {"$tensor": "none"}, {"$dict": [[[], 1]]}, {"$int": "zz"},
         {"$Counter": 3}, {"$tensor": "odd", "dtype": "load", "shape": [2]},
         {"$tensor": "odd", "dtype": "complex128", "shape": [-7]}, {"$str": "0"}]
    ),
)  # fmt: skip


@fuzzed
@given(st.lists(st.tuples(st.floats(0, 0.999), wrong), min_size=1, max_size=3))
def test_states_whose_checksum_is_right(stored: Path, how: list[Any]) -> None:
    """What somebody has made on purpose: no code of theirs runs, and what is wrong is said."""
    with guarded() as folder:
        shutil.copytree(stored, folder / "state")
        newest = max((folder / "state").glob("step-*"))
        document = json.loads((newest / "state.json").read_text())
        content = document["content"]
        for where, value in how:
            known = places(content)
            if not known:
                break
            *inner, last = known[int(where * len(known))]
            parent = content
            for key in inner:
                parent = parent[key]
            parent[last] = copy.deepcopy(value)
        with contextlib.suppress(ValueError):
            document["sha256"] = checksum(content)
        (newest / "state.json").write_text(json.dumps(document))
        found = read_or_refused(lambda: load_checkpoint(newest))
        if isinstance(found, dict):
            engine = make_engine(open_device("cpu"), ema_decay=0.9, accumulate=2)
            read_or_refused(lambda: engine.load_state_dict(found.get("engine")))


@fuzzed
@given(changes, st.sampled_from(["metrics", "result", "weights", "config"]))
def test_files_of_a_run(how: list[Any], which: str) -> None:
    with guarded() as folder:
        run = RunFolder.create(folder, "run")
        run.write_config(TrainSettings.from_dict(SMALL).to_dict())
        if which == "metrics":
            run.metrics.write_bytes(mutated(b'{"kind": "step", "step": 1, "loss": 2.0}\n' * 5, how))
            list(read_metrics(run.metrics))
            with MetricsLog(run.metrics) as log:
                log.rewind(1)
                log.write("step", 2, loss=1.0)
            assert list(read_metrics(run.metrics))[-1]["step"] == 2
        elif which == "result":
            scores = {"bleu": 1.0, "chrf": 1.0, "bleu_signature": "a", "chrf_signature": "b"}
            text = json.dumps({"updates": 3, "scores": scores, "examples": [["a", "b", "c"]]})
            (run.path / "result.json").write_bytes(mutated(text.encode(), how))
            read_or_refused(lambda: stored_result(run))
        elif which == "weights":
            path = run.weights / "best.safetensors"
            weights_to_file(path, {"a": torch.ones(3), "b": torch.zeros(2, 2)})
            path.write_bytes(mutated(path.read_bytes(), how))
            read_or_refused(lambda: weights_from_file(path))
        else:
            run.config.write_bytes(mutated(run.config.read_bytes(), how))
            read_or_refused(lambda: Trainer.resume(run.path, quiet=True))


def test_found_before(prepared: Path) -> None:
    """What many inputs once found, and few may not find again."""
    with guarded() as folder:
        there = folder / "prepared"
        shutil.copytree(prepared, there)
        meta = (there / "prepared.json").read_text(encoding="utf-8")
        (there / "prepared.json").write_text(meta.replace('"src":', '"sic":', 1), encoding="utf-8")
        with pytest.raises(HeadraceError, match=r"settings\.src is missing: expected text"):
            load_prepared(there)
        run = RunFolder.create(folder, "run")
        (run.path / "result.json").write_text("[" * 100_000, encoding="utf-8")
        with pytest.raises(HeadraceError, match="is not the result of a finished run"):
            stored_result(run)
