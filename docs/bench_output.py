"""Updates the `headrace bench` output in docs/ from the committed results that the pages name.

    python docs/bench_output.py

Such a block follows a line like `<!-- bench: RESULT.json -->`. The tables of waits and streams are
left out, unless the line ends with `whole`.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path

from headrace.bench import text_of, verdict_of
from headrace.records import BenchResult

ROOT = Path(__file__).parents[1]
PAGES = tuple(ROOT / "docs" / name for name in ("measured.md", "bench.md"))
BLOCK = re.compile(r"(<!-- bench: (\S+)( whole)? -->\n```console\n).*?(```\n)", re.DOTALL)


@cache
def bench_block(name: str, whole: bool) -> str:
    """The command of a result and what it printed: at least its main table and its verdict."""
    result = BenchResult.read(ROOT / "benchmarks" / "results" / name)
    # In the words of this version: a stored result keeps the sentences of the one that measured it.
    verdict = verdict_of(result.rows, "baseline", result.noise)
    result = dataclasses.replace(result, verdict=verdict)
    command = result.environment.command.replace(" --plans", " \\\n    --plans")
    printed = text_of(result).strip("\n")
    if not whole:
        title, table, *_, verdict = printed.split("\n\n")
        printed = f"{title}\n\n{table}\n…\n{verdict}"
    return f"$ {command}\n{printed}\n"


def with_bench_blocks(text: str) -> str:
    def anew(found: re.Match[str]) -> str:
        return found[1] + bench_block(found[2], bool(found[3])) + found[4]

    return BLOCK.sub(anew, text)


def main() -> None:
    for page in PAGES:
        page.write_text(with_bench_blocks(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
