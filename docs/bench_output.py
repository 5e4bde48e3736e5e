"""Updates the `headrace bench` output in docs/measured.md from the committed result that it names.

    python docs/bench_output.py

Such a block follows a line like `<!-- bench: RESULT.json -->`. The tables of waits and
streams are left out; docs/bench.md has them.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path

from headrace.bench import text_of, verdict_of
from headrace.records import BenchResult

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measured.md"
BLOCK = re.compile(r"(<!-- bench: (\S+) -->\n```console\n).*?(```\n)", re.DOTALL)


@cache
def bench_block(name: str) -> str:
    """The command of a result, its main table and its verdict, as the command line prints them."""
    result = BenchResult.read(ROOT / "benchmarks" / "results" / name)
    # In the words of this version: a stored result keeps the sentences of the one that measured it.
    verdict = verdict_of(result.rows, "baseline", result.noise)
    result = dataclasses.replace(result, verdict=verdict)
    command = result.environment.command.replace(" --plans", " \\\n    --plans")
    title, table, *_, verdict = text_of(result).strip("\n").split("\n\n")
    return f"$ {command}\n{title}\n\n{table}\n…\n{verdict}\n"


def with_bench_blocks(text: str) -> str:
    return BLOCK.sub(lambda found: found[1] + bench_block(found[2]) + found[3], text)


def main() -> None:
    PAGE.write_text(with_bench_blocks(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
