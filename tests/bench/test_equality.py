"""Equality of losses: bit for bit or within a tolerance, and the first step that is off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.equality import compare, compare_weights, difference, remove_dropout
from headrace.device import open_device
from headrace.records import Equality


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


def _parameters(**changes: float) -> dict[str, torch.Tensor]:
    """Weights of about 0.1, a bias of 1e-8, a count and a buffer of large numbers. Each change is
    added to all elements of a tensor."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {
        "weight": torch.nn.Parameter(torch.randn(64, 64, generator=generator) * 0.1),
        "key_bias": torch.nn.Parameter(torch.randn(64, generator=generator) * 1e-8),
        "batches": torch.tensor(8),
        "mask": torch.full((64, 64), -1e9),
    }
    with torch.no_grad():
        for name, change in changes.items():
            weights[name] += int(change) if name == "batches" else change
    return weights


class TestCompareWeights:
    within = Equality("within", 0.01, 0.001, None, "rounding")

    @pytest.mark.parametrize(
        ("changes", "differs"),
        [
            ({}, None),
            ({"key_bias": 1e-7}, None),  # ten times itself, and noise beside the weights
            ({"key_bias": 0.01}, "key_bias"),  # as an update moves it
            ({"weight": 1e-5}, None),
            ({"weight": 0.01}, "weight"),
            ({"batches": 1}, "batches"),
            ({"mask": 1e8}, "mask"),
            ({"key_bias": float("nan")}, "key_bias"),
            ({"key_bias": float("inf")}, "key_bias"),
        ],
    )
    def test_a_difference_counts_beside_the_tensors_size_and_the_parameters(
        self, changes: dict[str, float], differs: str | None
    ) -> None:
        device = open_device("cpu")
        found = compare_weights(
            device, _parameters(), _parameters(**changes), self.within, tolerance=0.01
        )
        if differs is None:
            assert found is self.within
        else:
            assert found.verdict == "unequal"
            assert f"{differs!r} differs by" in found.why

    def test_bit_for_bit_there_is_no_noise(self) -> None:
        identical, off = Equality("identical"), _parameters(key_bias=1e-7)
        found = compare_weights(open_device("cpu"), _parameters(), off, identical, tolerance=0.01)
        assert found.verdict == "unequal"

    def test_an_infinite_element_hides_no_other(self) -> None:
        one, other = _parameters(), _parameters(weight=0.05)
        with torch.no_grad():
            one["weight"][0, 0] = other["weight"][0, 0] = float("inf")
        found = compare_weights(open_device("cpu"), one, other, self.within, tolerance=0.01)
        assert "'weight' differs" in found.why
