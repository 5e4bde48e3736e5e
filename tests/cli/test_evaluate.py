"""`headrace evaluate`: what stands beside the score."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import CorpusError
from headrace.translation import TrainSettings, prepared_for
from support.storage.saved_runs import write_run


def test_sentences_longer_than_in_training_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path, max_length=20)
    pairs = tmp_path / "scored.tsv"
    lines = ["one and two\teins", "one " * 30 + "\teins", "one\t" + "eins " * 30]
    arguments = ["evaluate", str(run), str(pairs), "--device", "cpu", "--beam", "1"]
    for more, said in (
        ([], "3 sentences of scored.tsv, best weights; 2 longer than in training (over 20 tokens)"),
        (
            ["one " * 300 + "\teins"],
            "4 sentences of scored.tsv, best weights; 3 longer than in training (over 20 tokens); "
            "1 cut at 256 tokens, the model's maximum",
        ),
    ):
        pairs.write_text("\n".join([*lines, *more]), encoding="utf-8")
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code == 0, found.output
        assert found.stdout.splitlines()[0] == said
        assert found.stdout.splitlines()[-1].startswith("BLEU ")
    pairs.write_text(lines[0], encoding="utf-8")
    found = CliRunner().invoke(app, arguments)
    assert found.stdout.splitlines()[0] == "1 sentence of scored.tsv, best weights"
    found = CliRunner().invoke(app, [*arguments, "--split", "test"])
    assert isinstance(found.exception, CorpusError)
    assert found.exception.exit_code == 2
    assert str(found.exception).startswith(f"split test: {pairs} has no splits")


def test_empty_pairs_and_sentences_that_train_has_are_counted(tmp_path: Path) -> None:
    cache, scored = tmp_path / "cache", tmp_path / "scored.tsv"
    run = write_run(tmp_path, cache=cache)
    source, target = "one and two or three", "eins und zwei oder drei"  # not held out
    arguments = ["evaluate", str(run), str(scored), "--device", "cpu", "--beam", "1"]

    def said(*lines: str, cache: Path = cache) -> list[str]:
        scored.write_text("\n".join(lines) + "\n", encoding="utf-8")
        found = CliRunner().invoke(app, [*arguments, "--cache", str(cache)])
        assert found.exit_code == 0, found.output
        return found.stdout.splitlines()[:2]

    assert said("one one\tzwei zwei", "one\t", "\tzwei") == [
        "1 sentence of scored.tsv, best weights; 2 empty pairs left out",
        "scored.tsv: none of its 1 pair shares a sentence with train",
    ]
    assert said(f"{source}\tzwei zwei", f"one one\t{target}", "one one\tzwei zwei", "a\t")[1] == (
        "scored.tsv: 2 of 3 pairs have a source or a target sentence that train has, too; expect a "
        "lower score on new text"
    )
    elsewhere = tmp_path / "elsewhere"
    unchecked = "scored.tsv: could not check whether train has its sentences ("
    assert said(source + "\tzwei", cache=elsewhere)[1] == (
        f"{unchecked}{elsewhere}: has no prepared corpus of these files and settings)"
    )
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{n}\tx{n}\n" for n in range(1000, 1900)))
    prepared_for(TrainSettings.read(run / "config.yaml"), cache)
    assert said(source + "\tzwei")[1] == f"{unchecked}the corpus has changed since)"
    pairs.unlink()
    assert said(source + "\tzwei")[1].startswith(f"{unchecked}{pairs}: does not exist;")
