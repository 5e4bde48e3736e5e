"""Equality of losses: bit for bit or within a tolerance, and the first step that is off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.equality import compare, difference, remove_dropout


class TestCompare:
    def test_bit_for_bit(self) -> None:
        assert compare([1.0, 2.0], [1.0, 2.0], exact=True, tolerance=0.1).verdict == "identical"
        found = compare([1.0, 2.0, 3.0], [1.0, 2.0000001, 3.0], exact=True, tolerance=0.1)
        assert (found.verdict, found.first_step, found.tolerance) == ("unequal", 2, None)

    def test_within(self) -> None:
        found = compare([1.0, 2.0], [1.0, 2.01], exact=False, tolerance=0.01, why="compiled")
        assert (found.verdict, found.why, found.tolerance) == ("within", "compiled", 0.01)
        assert found.largest == pytest.approx(0.005)
        found = compare([1.0, 2.0], [1.0, 2.1], exact=False, tolerance=0.01)
        assert (found.verdict, found.first_step) == ("unequal", 2)

    def test_what_is_not_finite(self) -> None:
        nan, infinite = float("nan"), float("inf")
        assert difference(nan, nan) == difference(infinite, infinite) == 0.0
        assert difference(1.0, nan) == difference(infinite, -infinite) == infinite
        assert compare([1.0], [nan], exact=False, tolerance=0.5).largest is None

    @given(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
        st.data(),
        st.booleans(),
    )
    def test_the_first_step_that_is_off_is_named(
        self, losses: list[float], data: st.DataObject, exact: bool
    ) -> None:
        assert compare(losses, losses, exact=exact, tolerance=0.01).verdict == "identical"
        at = data.draw(st.integers(0, len(losses) - 1))
        off = losses[at] * 1.5 + 1.0 if losses[at] >= 0 else losses[at] * 1.5 - 1.0
        found = compare(losses, [*losses[:at], off, *losses[at + 1 :]], exact=exact, tolerance=0.01)
        assert (found.verdict, found.first_step) == ("unequal", at + 1)
        assert found.why.startswith(f"step {at + 1}: ")

    def test_a_loss_too_few(self) -> None:
        found = compare([1.0, 2.0], [1.0], exact=True, tolerance=0.0)
        assert (found.verdict, found.first_step) == ("unequal", 2)
        assert found.why == "1 losses, the reference has 2"

    def test_dropout_goes(self) -> None:
        from headrace.translation import ModelSettings, Translator

        model = Translator(ModelSettings.preset("tiny"), 20, 20)
        # Embeddings; 2 encoder layers of 4 places, 2 decoder layers of 6.
        assert remove_dropout(model) == 1 + 2 * 4 + 2 * 6
        assert remove_dropout(model) == 0
