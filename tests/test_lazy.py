"""The lazy names of a package: listed once, loaded when they are used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def test_a_name_is_loaded_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from headrace.lazy import lazy\n"
        "TYPE_CHECKING = False\n"
        "if TYPE_CHECKING:\n"
        "    from lazily.part import late as late\n"
        "    from lazily.part import extra as extra  # extra\n"
        "__all__, __getattr__, __dir__ = lazy(__name__, __file__, 'own')\n"
        "own = 1\n"
    )
    (package / "part.py").write_text("late = 2\nextra = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazily  # type: ignore[import-not-found]

    assert lazily.__all__ == dir(lazily) == ["late", "own"]
    assert "lazily.part" not in sys.modules
    assert (lazily.own, lazily.late, lazily.extra) == (1, 2, 3)
    assert "lazily.part" in sys.modules
    with pytest.raises(AttributeError, match="module 'lazily' has no attribute 'later'"):
        _ = lazily.later
