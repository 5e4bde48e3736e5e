"""Frameworks of another version than those that were tested are told about, once."""

from __future__ import annotations

import pytest

from headrace.integrations import versions


@pytest.mark.parametrize(
    ("found", "is_told"), [("2.5.9", True), ("2.6.0", False), ("2.6.17rc1", False), ("2.7", True)]
)
def test_an_untested_version_is_a_warning(
    found: str,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda package: found)
    monkeypatch.setattr(versions, "_told", set())
    monkeypatch.setitem(versions.TESTED, "lightning", ("2.6", "2.6"))
    for _ in range(2):
        versions.warn_if_untested("lightning")
    assert len(caplog.records) == is_told
    if is_told:
        assert f"lightning {found} is installed, and Headrace is tested with 2.6" in caplog.text
