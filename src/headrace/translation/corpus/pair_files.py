"""Finds the files of a parallel corpus, and which split each belongs to.

Only names count here. `pair_formats` looks into the files.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import CorpusError, usage_errors
from headrace.schema import require_regular_file
from headrace.translation.corpus.languages import Sides, is_language
from headrace.translation.corpus.text_files import COMPRESSED_ENDINGS

#: A sentence in both languages: (src, trg).
Pair = tuple[str, str]
#: Called with the current task, how much of it is done, and the total (0 if unknown).
OnProgress = Callable[[str, int, int], None]

FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv", ".csv": "csv"}
# File names that begin so belong to this split.
SPLITS = {"train": "train", "val": "valid", "dev": "valid", "test": "test"}


@dataclass(frozen=True, slots=True)
class PairFiles:
    """One file of pairs, or two text files (src, trg) whose lines correspond.

    `format` is what the name says: json, jsonl, tsv, csv, text (two files) or, if the name says
    nothing, "unknown".
    """

    paths: tuple[Path, ...]
    format: str

    def __str__(self) -> str:
        return " and ".join(str(path) for path in self.paths)


@usage_errors()  # the files were named on the command line
def find_pair_files(
    data: Path | Sequence[Path], sides: Sides, *, require_train: bool = True
) -> dict[str, list[PairFiles]]:
    """The files of each split.

    One file, or two text files, are the train split. In a folder or a longer list, the beginning of
    each name says which split it is: train, val, dev or test.
    """
    paths = [Path(data)] if isinstance(data, str | Path) else [Path(path) for path in data]
    if len(paths) == 1 and _is_folder(paths[0]):
        groups = _group_folder(paths[0], sides)
        return _split_by_name(groups, require_train)
    for path in paths:
        if _is_folder(path):
            raise CorpusError(
                f"{path}: is a folder among {len(paths)} paths; expected either one folder or "
                "only files"
            )
        require_regular_file(path, CorpusError)
    groups = _group_given(paths, sides)
    if len(groups) == 1:
        return {"train": groups}
    return _split_by_name(groups, require_train)


def _is_folder(path: Path) -> bool:
    """Whether there is a folder at `path`. Raises if nothing is there."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError as problem:
        hint = "; stdin is not read, so write the pairs to a file" if str(path) == "-" else ""
        raise CorpusError(
            f"{path}: does not exist; expected a file or folder of parallel text{hint}"
        ) from problem
    except OSError as problem:
        raise CorpusError(f"{path}: cannot be read ({problem.strerror})") from problem
    except ValueError as problem:  # a NUL
        raise CorpusError(f"{str(path)!r}: is not a path ({problem})") from problem


def _expected(sides: Sides) -> str:
    return (
        f"{', '.join(FORMATS)}, or a .{sides.src} and a .{sides.trg} file "
        "(each also .gz, .bz2, .xz or .zst)"
    )


def _stem_and_ending(path: Path) -> tuple[str, str]:
    """The stem and the ending of a file name, without `.gz` and its like.

    `train.en.txt` counts as `train.en`.
    """
    name = path.name
    for ending in COMPRESSED_ENDINGS:
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
    stem, dot, ending = name.rpartition(".")
    if ending.lower() == "txt" and is_language(stem.rpartition(".")[2]) and "." in stem:
        stem, dot, ending = stem.rpartition(".")
    return (stem, f".{ending.lower()}") if dot else (name, "")


# --- a folder -------------------------------------------------------------------------------------


def _group_folder(folder: Path, sides: Sides) -> list[PairFiles]:
    """The files of a folder that hold pairs. Files of other languages and formats are ignored."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as problem:
        raise CorpusError(f"{folder}: cannot be read ({problem.strerror})") from problem
    found.sort(key=lambda entry: entry.name)
    files = [Path(entry.path) for entry in found if _is_file(entry)]
    groups, unknown = _group_by_ending(files, sides)
    splits = {_split_of(group.paths[0]) for group in groups}
    for path in unknown:
        # A file that is named like a split is meant to be used, unless the split is there already.
        split = _split_of(path)
        if split is None or split in splits:
            continue
        if _stem_and_ending(path)[1] not in ("", ".txt"):
            raise CorpusError(f"{path}: has no known ending; expected {_expected(sides)}")
        groups.append(PairFiles((path,), "unknown"))
    if not groups:
        raise CorpusError(f"{folder}: {_describe_folder(found)}; expected {_expected(sides)}")
    return groups


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError as problem:  # a symbolic link that leads back to itself, for example
        raise CorpusError(
            f"{entry.path}: cannot be read ({problem.strerror}); expected a file or folder, or "
            "nothing of this name"
        ) from problem


def _describe_folder(found: list[os.DirEntry[str]]) -> str:
    """What a folder without usable files has, and what to do about it."""
    folders = [entry.name for entry in found if entry.is_dir()]
    files = [entry.name for entry in found if not entry.is_dir()]
    if folders and not files:
        return f"has only the folders {_listed(folders)}. Give one of them"
    there = f"has {_listed(files) if files else 'nothing'}"
    return there + (f" and the folders {_listed(folders)}" if folders else "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _group_by_ending(files: list[Path], sides: Sides) -> tuple[list[PairFiles], list[Path]]:
    """Pair up text files. Returns all groups, and the files with an unknown ending."""
    groups: list[PairFiles] = []
    unknown: list[Path] = []
    texts: dict[Path, dict[str, Path]] = {}
    seen: dict[tuple[Path, str], Path] = {}
    for path in files:
        stem, ending = _stem_and_ending(path)
        side = sides.side_of(ending[1:])
        if ending not in FORMATS and side is None:
            unknown.append(path)
            continue
        kind = ending if ending in FORMATS else str(side)
        earlier = seen.setdefault((path.with_name(stem), kind), path)
        if earlier is not path:
            raise CorpusError(
                f"{earlier} and {path}: hold the same data; expected only one of them"
            )
        if ending in FORMATS:
            groups.append(PairFiles((path,), FORMATS[ending]))
        else:
            texts.setdefault(path.with_name(stem), {})[kind] = path
    for stem_path, found in texts.items():
        if len(found) == 1:
            other = sides.trg if "src" in found else sides.src
            raise CorpusError(
                f"{next(iter(found.values()))}: is one side of parallel text; "
                f"expected {stem_path.name}.{other} beside it"
            )
        groups.append(PairFiles((found["src"], found["trg"]), "text"))
    return groups, unknown


# --- files given by name --------------------------------------------------------------------------


def _group_given(paths: list[Path], sides: Sides) -> list[PairFiles]:
    """The groups of files that were given by name. Two of any ending may be a pair of texts."""
    for at, path in enumerate(paths):
        if path in paths[:at]:
            raise CorpusError(f"{path}: is given twice; expected different files")
    if len(paths) == 2 and _are_texts(paths):
        return [PairFiles(_in_order(paths, sides), "text")]
    groups, unknown = _group_by_ending(sorted(paths), sides)
    return groups + [PairFiles((path,), "unknown") for path in unknown]


def _are_texts(paths: list[Path]) -> bool:
    """Whether two files are the two sides of parallel text: neither's ending is that of a file of
    pairs, and their names are not those of two splits."""
    first, second = (_split_of(path) for path in paths)
    if first is not None and second is not None and first != second:
        return False
    return not any(_stem_and_ending(path)[1] in FORMATS for path in paths)


def _in_order(paths: list[Path], sides: Sides) -> tuple[Path, Path]:
    """Two text files as (src, trg): as their names say, else as they were given."""
    first, second = paths
    for path in paths:
        ending = _stem_and_ending(path)[1][1:]
        if is_language(ending) and sides.side_of(ending) is None:
            raise CorpusError(
                f"{path}: its ending names the language {ending!r}; expected {sides}, as --src "
                "and --trg say"
            )
    found = [_side_in_name(path, sides) for path in paths]
    if found[0] is not None and found[0] == found[1]:
        raise CorpusError(
            f"{first} and {second}: their names say the same language; expected {sides}"
        )
    return (second, first) if found[0] == "trg" or found[1] == "src" else (first, second)


def _side_in_name(path: Path, sides: Sides) -> str | None:
    """The side that a file's ending names, or else any part of its name."""
    side = sides.side_of(_stem_and_ending(path)[1][1:])
    if side is not None:
        return side
    named = {sides.side_of(word) for word in re.split(r"[._\s-]+", path.name)} - {None}
    return named.pop() if len(named) == 1 else None


# --- splits ---------------------------------------------------------------------------------------


def _split_of(path: Path) -> str | None:
    return next((s for begin, s in SPLITS.items() if path.name.lower().startswith(begin)), None)


def _split_by_name(groups: list[PairFiles], require_train: bool) -> dict[str, list[PairFiles]]:
    splits: dict[str, list[PairFiles]] = {}
    without_split = []
    for files in groups:
        split = _split_of(files.paths[0])
        if split is None:
            without_split.append(files)
        else:
            splits.setdefault(split, []).append(files)
    if len(without_split) == 1 and "train" not in splits:
        splits["train"] = without_split
    elif without_split:
        raise CorpusError(
            f"{without_split[0]}: its name gives no split; "
            f"expected names that begin with {', '.join(SPLITS)}"
        )
    if "train" not in splits and require_train:
        found = ", ".join(path.name for files in groups for path in files.paths)
        raise CorpusError(f"no train split: found {found}; expected a name like train.jsonl")
    return {split: splits[split] for split in ("train", "valid", "test") if split in splits}
