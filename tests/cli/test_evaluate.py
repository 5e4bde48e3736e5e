"""`headrace evaluate`: what stands beside the score."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from headrace.cli import app
from support.saved_runs import write_run


def test_sentences_longer_than_in_training_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path, max_length=20)
    pairs = tmp_path / "scored.tsv"
    lines = ["one and two\teins", "one " * 30 + "\teins", "one\t" + "eins " * 30]
    arguments = ["evaluate", str(run), str(pairs), "--device", "cpu", "--beam", "1"]
    for more, said in (
        ([], "3 sentences of test, best weights; 2 longer than in training (over 20 tokens)"),
        (
            ["one " * 300 + "\teins"],
            "4 sentences of test, best weights; 3 longer than in training (over 20 tokens); "
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
    assert found.stdout.splitlines()[0] == "1 sentences of test, best weights"
