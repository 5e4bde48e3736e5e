"""The lines at which a thread waits."""

from __future__ import annotations

import sys

from headrace.diagnosis.line_samples import LineSampler


def test_lines_that_wait_are_known_by_their_form() -> None:
    sampler = LineSampler()

    class Looking:
        def item(self) -> None:
            sampler.look(sys._getframe(1))

        def launch(self) -> None:
            sampler.look(sys._getframe(1))

    loss = Looking()
    for _ in range(2):
        loss.item()
    loss.launch()
    first, again, other = sampler.take()
    assert first.place is not None
    assert "test_line_samples.py:" in first.place.place
    assert first.place.title == ".item()"
    assert again.place == first.place
    assert first.at_ns < again.at_ns
    assert other.place is None
    assert sampler.take() == []
