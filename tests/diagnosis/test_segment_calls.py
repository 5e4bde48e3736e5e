"""Which calls begin a segment."""

from __future__ import annotations

import pytest
import torch

from headrace.device import open_device
from headrace.diagnosis.segment_calls import watching_edges
from headrace.diagnosis.segments import PAGEABLE_COPY, PINNED_COPY, TO_HOST, HostEdges


def test_copies_begin_segments_and_the_functions_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    edges = HostEdges(open_device("cpu"))
    to = torch.Tensor.to
    large = torch.ones(20_000)
    with watching_edges(edges):
        large.to("meta")
        large.to(device=torch.device("meta"), dtype=torch.half)
        torch.ones(2).to("meta")  # the driver takes it, and the host goes on
        large.to("cpu").to(torch.half).copy_(large)  # within the host
        large.to(torch.half, non_blocking=True)
        torch.empty(2, device="meta").copy_(torch.ones(2))
        with pytest.raises(NotImplementedError):  # there is nothing to copy
            torch.empty(2, device="meta").cpu()
    kinds = [edge.key for edge in edges.edges if edge.key[0] != "after copy"]
    assert kinds == [
        (PAGEABLE_COPY, 0),
        (PAGEABLE_COPY, 1),
        (PINNED_COPY, 0),
        (PINNED_COPY, 1),
        (TO_HOST, 0),
    ]
    assert len(edges.edges) == 10
    assert torch.Tensor.to is to
