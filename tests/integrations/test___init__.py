"""Modules that need a framework: an error says which, and how to install it."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace import extras, integrations
from headrace.errors import MissingPackageError


def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError,
        match=r"headrace\.lightning needs lightning, which is "
        r"not installed: pip install 'headrace\[lightning\]'",
    ):
        _ = hr.lightning
    with pytest.raises(MissingPackageError, match="needs transformers and accelerate"):
        _ = hr.transformers
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        _ = integrations.keras
