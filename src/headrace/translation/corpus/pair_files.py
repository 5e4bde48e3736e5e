"""Finds the files of a parallel corpus, and which split and which format each belongs to.

Only names count here. `pair_formats` looks into the files.
"""

from __future__ import annotations

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

#: The format of a file of pairs by its ending. One with another ending, such as .txt, is TSV.
FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv", ".csv": "csv"}
# File names that begin so belong to this split.
SPLITS = {"train": "train", "val": "valid", "dev": "valid", "test": "test"}


@dataclass(frozen=True, slots=True)
class PairFiles:
    """One file of pairs, or two text files (src, trg) whose lines correspond.

    `format` is json, jsonl, tsv, csv or, for two files, text.
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
    folders = [path for path in paths if _is_folder(path)]
    if folders and len(paths) > 1:
        raise CorpusError(
            f"{folders[0]}: is a folder among {len(paths)} paths; expected either one folder or "
            "only files"
        )
    if folders:
        return _split_by_name(_group_folder(paths[0], sides), require_train)
    for at, path in enumerate(paths):
        require_regular_file(path, CorpusError)
        if path in paths[:at]:
            raise CorpusError(f"{path}: is given twice; expected different files")
    if len(paths) == 2 and _are_texts(paths):
        return {"train": [PairFiles(_in_order(paths, sides), "text")]}
    groups, others = _group_by_ending(sorted(paths), sides)
    groups += [PairFiles((path,), "tsv") for path in others]
    return {"train": groups} if len(groups) == 1 else _split_by_name(groups, require_train)


def _is_folder(path: Path) -> bool:
    """Whether there is a folder at `path`. Raises if nothing is there."""
    try:
        path.stat()
    except FileNotFoundError as problem:
        hint = "; stdin is not read, so write the pairs to a file" if str(path) == "-" else ""
        raise CorpusError(
            f"{path}: does not exist; expected a file or folder of parallel text{hint}"
        ) from problem
    except (OSError, ValueError) as problem:  # a ValueError: a NUL
        reason = getattr(problem, "strerror", None) or problem
        raise CorpusError(f"{path}: cannot be read ({reason})") from problem
    return path.is_dir()


def _stem_and_ending(path: Path) -> tuple[str, str]:
    """The stem and the ending of a file name, without `.gz` and its like.

    `train.en.txt` counts as `train.en`.
    """
    name = path
    while name.suffix.lower() in COMPRESSED_ENDINGS:
        name = name.with_suffix("")
    if name.suffix.lower() == ".txt" and is_language(Path(name.stem).suffix[1:]):
        name = name.with_suffix("")
    return name.stem, name.suffix.lower()


# --- a folder -------------------------------------------------------------------------------------


def _group_folder(folder: Path, sides: Sides) -> list[PairFiles]:
    """The files of a folder that hold pairs. Files of other languages and formats are ignored."""
    try:
        found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as problem:
        raise CorpusError(f"{folder}: cannot be read ({problem.strerror})") from problem
    expected = (
        f"expected {', '.join(FORMATS)}, or a .{sides.src} and a .{sides.trg} file (each also "
        f"{', '.join(COMPRESSED_ENDINGS)})"
    )
    groups, others = _group_by_ending([path for path in found if path.is_file()], sides)
    splits = {_split_of(group.paths[0]) for group in groups}
    for path in others:
        # A file that is named like a split is meant to be used, unless the split is there already.
        if (split := _split_of(path)) is not None and split not in splits:
            if _stem_and_ending(path)[1] not in ("", ".txt"):
                raise CorpusError(f"{path}: has no known ending; {expected}")
            groups.append(PairFiles((path,), "tsv"))
    if not groups:
        names = [f"{path.name}/" if path.is_dir() else path.name for path in found[:8]]
        has = ", ".join(names) + (", …" if len(found) > 8 else "")
        raise CorpusError(f"{folder}: has {has or 'nothing'}; {expected}")
    return groups


def _group_by_ending(files: list[Path], sides: Sides) -> tuple[list[PairFiles], list[Path]]:
    """Pair up text files. Returns all groups, and the files with another ending."""
    groups: list[PairFiles] = []
    others: list[Path] = []
    texts: dict[Path, dict[str, Path]] = {}
    seen: dict[tuple[Path, str], Path] = {}
    for path in files:
        stem, ending = _stem_and_ending(path)
        kind = FORMATS.get(ending) or sides.side_of(ending[1:])
        if kind is None:
            others.append(path)
            continue
        earlier = seen.setdefault((path.with_name(stem), kind), path)
        if earlier is not path:
            raise CorpusError(
                f"{earlier} and {path}: hold the same data; expected only one of them"
            )
        if ending in FORMATS:
            groups.append(PairFiles((path,), kind))
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
    return groups, others


# --- two files ------------------------------------------------------------------------------------


def _are_texts(paths: list[Path]) -> bool:
    """Whether two files are the two sides of parallel text: neither's ending is that of a file of
    pairs, and their names are not those of two splits."""
    splits = {_split_of(path) for path in paths} - {None}
    return len(splits) < 2 and not any(_stem_and_ending(path)[1] in FORMATS for path in paths)


def _in_order(paths: list[Path], sides: Sides) -> tuple[Path, Path]:
    """Two text files as (src, trg): as their endings say, else as they were given."""
    first, second = paths
    endings = [_stem_and_ending(path)[1][1:] for path in paths]
    found = [sides.side_of(ending) for ending in endings]
    for path, ending, side in zip(paths, endings, found, strict=True):
        if is_language(ending) and side is None:
            raise CorpusError(
                f"{path}: its ending names the language {ending!r}; expected {sides}, as --src "
                "and --trg say"
            )
    if found[0] is not None and found[0] == found[1]:
        raise CorpusError(
            f"{first} and {second}: their names say the same language; expected {sides}"
        )
    return (second, first) if found[0] == "trg" or found[1] == "src" else (first, second)


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
