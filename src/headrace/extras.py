"""Packages that only some commands need, and the extra of Headrace that installs each."""

from __future__ import annotations

from importlib.util import find_spec

from headrace.errors import MissingPackageError

#: The extra that installs a package, by the package's import name.
EXTRAS = {
    "sacrebleu": "translate",
    "sentencepiece": "translate",
    "tensorboard": "translate",
    "zstandard": "translate",
    "ctranslate2": "export",
    "jinja2": "report",
    "pynvml": "monitor",
    "transformers": "transformers",
    "accelerate": "transformers",
    "lightning": "lightning",
}


def install_command(*packages: str) -> str:
    """The command that installs optional packages with their extras."""
    extras = dict.fromkeys(EXTRAS[package] for package in packages)
    return f"pip install 'headrace[{','.join(extras)}]'"


def require(wanted_by: str, *packages: str) -> None:
    """Raise an error that names the extra if a package is not installed.

    `wanted_by` is what needs the packages, such as "headrace train".
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise MissingPackageError(
            f"{wanted_by} needs {' and '.join(missing)}, which {are} not installed: "
            f"{install_command(*missing)}"
        )
