"""More stream bugs with their twins, as short programs.

A line that begins with `-` is in the bug only, one with `+` in the twin only. FIRST and SECOND mark
the two lines that the checker must name. The streams S, T and U have waited for the default stream
C, on which a program begins. `x`, `y` and `z` are device tensors of 64 floats, `p` and `q` pinned
ones, `m` a boolean mask, `i` 64 indices.
"""

from __future__ import annotations

import collections
import queue
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.nn import functional
from torch.utils import dlpack

from headrace.device import Device
from support.processes.process_groups import fake_process_group, gloo_process_group


@dataclass(frozen=True)
class Case:
    name: str
    code: str
    #: The process group that it needs.
    group: Callable[[], Any] | None = None

    def run(self, device: Device, *, bug: bool) -> list[float]:
        """Run it, and return what it has called `k`, as numbers."""
        torch.manual_seed(0)
        names = _names(device)
        exec(compile(self.text(bug=bug), self.name, "exec"), names)
        result = [] if bug else _numbers(device, names.get("k"))
        names.clear()
        return result

    def text(self, *, bug: bool) -> str:
        """The program, with an empty line for each that it does not have."""
        kept, dropped = ("-", "+") if bug else ("+", "-")
        lines = []
        for line in self.code.splitlines():
            if line.startswith(dropped):
                indent = len(line) - len(line[1:].lstrip())
                lines.append(" " * indent + "pass")
            else:
                lines.append(" " + line[1:] if line.startswith(kept) else line)
        # Marks column 0 for the signs: every line of a program is indented by two.
        return textwrap.dedent("\n".join(lines))

    def line(self, mark: str) -> int:
        (found,) = [n for n, line in enumerate(self.code.splitlines(), 1) if f"# {mark}" in line]
        return found


CASES: list[Case] = []


def _numbers(device: Device, result: object) -> list[float]:
    device.synchronize("result")
    if isinstance(result, torch.Tensor):
        numbers: list[float] = result.detach().double().cpu().flatten().tolist()
        return numbers
    if isinstance(result, (int, float)):
        return [result]
    return result if isinstance(result, list) else []


def _names(d: Device) -> dict[str, Any]:
    place = d.torch_device
    on = partial(torch.ones, device=place)
    c, s, t, u = d.current_stream(), d.stream("S"), d.stream("T"), d.stream("U")
    x, y, z = on(64), on(64), on(64)
    i, m = torch.arange(64, device=place), on(64) > 0
    p, q = torch.ones(64).pin_memory(), torch.ones(64).pin_memory()
    for stream in (s, t, u):
        stream.wait_stream(c)
    return {
        **{"d": d, "D": place, "on": on, "C": c, "S": s, "T": t, "U": u, "x": x, "y": y, "z": z},  # noqa: PIE800
        **{"i": i, "m": m, "p": p, "q": q, "torch": torch, "np": np, "dist": dist},  # noqa: PIE800
        **{"F": functional, "fc": _functional_collectives, "dlpack": dlpack, "queue": queue},  # noqa: PIE800
        **{"threading": threading, "collections": collections, "spin": _spin, "old": OLD},  # noqa: PIE800
        "DDP": torch.nn.parallel.DistributedDataParallel,
    }


def _spin(thread: threading.Thread) -> None:
    """Wait for a thread in a way that the checker does not see."""
    while thread.is_alive():
        continue


class OLD:
    """Made before any fake device is in use."""

    queue: queue.Queue[Any] = queue.Queue()
    event = threading.Event()
    condition = threading.Condition()
    semaphore = threading.Semaphore(0)


def _add(group: Callable[[], Any] | None, text: str) -> None:
    """Programs that are separated by lines `== name`."""
    for part in text.split("== ")[1:]:
        name, _, code = part.partition("\n")
        CASES.append(Case(name.strip(), code.rstrip(), group))


# --- events and streams ---------------------------------------------------------------------------

_add(
    None,
    """
== no wait at all
  with d.use(S): x.mul_(2)  # FIRST
+ C.wait_stream(S)
  x.add_(1)  # SECOND
== the wait is the wrong way round
  with d.use(S): x.mul_(2)  # FIRST
- S.wait_stream(C)
+ C.wait_stream(S)
  x.add_(1)  # SECOND
== an event of an earlier record
  e = d.event(); e.record(S)
  with d.use(S): x.mul_(2)  # FIRST
+ e.record(S)
  C.wait_event(e)
  x.add_(1)  # SECOND
== an event recorded on the current stream instead
  e = d.event()
  with d.use(S): x.mul_(2)  # FIRST
- e.record()
+ e.record(S)
  C.wait_event(e)
  x.add_(1)  # SECOND
== the wait is on a stream that does not use it
  with d.use(S): x.mul_(2)  # FIRST
- U.wait_stream(S)
+ T.wait_stream(S)
  with d.use(T): x.add_(1)  # SECOND
== a chain whose middle comes too early
- U.wait_stream(T)
  T.wait_stream(S)
  with d.use(S): x.mul_(2)  # FIRST
+ T.wait_stream(S)
+ U.wait_stream(T)
  with d.use(U): x.add_(1)  # SECOND
== a read that nobody waits for before the write
  with d.use(S): k = x * 2  # FIRST
+ C.wait_stream(S)
  x.zero_()  # SECOND
== two readers, and the writer waits for one
  with d.use(S): k = x * 2
  with d.use(T): l = x * 2  # FIRST
  C.wait_stream(S)
+ C.wait_stream(T)
  x.zero_()  # SECOND
== two writers of one column
  a = on(8, 8); S.wait_stream(C); T.wait_stream(C)
  with d.use(S): a[:, 1].fill_(1)  # FIRST
- with d.use(T): a[:, 0:2].fill_(2)  # SECOND
+ with d.use(T): a[:, 2:4].fill_(2)
== one event for two streams
  e = d.event()
  with d.use(S): x.mul_(2)  # FIRST
+ C.wait_stream(S)
  with d.use(T): y.mul_(2)
  e.record(T); C.wait_event(e)
  k = x + y  # SECOND
== double buffering with one event too few
  slots = [x, y]; ready = [d.event(), d.event()]
  with d.use(S): slots[0].copy_(p, non_blocking=True)
  ready[0].record(S)
  with d.use(S): slots[1].copy_(p, non_blocking=True)  # FIRST
  ready[1].record(S)
  C.wait_event(ready[0]); k = slots[0] * 2
+ C.wait_event(ready[1])
  k = slots[1] * 2  # SECOND
== a wait under a condition that is false
  with d.use(S): x.mul_(2)  # FIRST
- if False: C.wait_stream(S)
+ if True: C.wait_stream(S)
  x.add_(1)  # SECOND
== the stream of a stage is not waited for by the one after the next
  with d.use(S): x.mul_(2)  # FIRST
  T.wait_stream(C)
+ T.wait_stream(S)
  with d.use(T): y.mul_(2)
  U.wait_stream(T)
  with d.use(U): k = x + y  # SECOND
""",
)

# --- views ----------------------------------------------------------------------------------------

for _write, _read, _apart in (
    ("x[8:]", "x", "x[:8]"),
    ("x[::2]", "x[::4]", "x[1::2]"),
    ("x[::3]", "x[1::2]", "x[1::3]"),
    ("x.view(8, 8)[:, 3]", "x.view(8, 8)[2]", "x.view(8, 8)[:, 4]"),
    ("x.view(8, 8).t()[3]", "x.view(8, 8)[:, 3]", "x.view(8, 8)[:, 2]"),
    ("x.view(8, 8).diagonal()", "x[9:10]", "x[1:9]"),
    ("x.view(4, 4, 4)[:, 1:3]", "x.view(4, 4, 4)[:, 2:]", "x.view(4, 4, 4)[:, 3:]"),
    ("x.view(4, 4, 4)[..., 0]", "x[::16]", "x[1::16]"),
    ("x[:32]", "x[31:33]", "x[32:]"),
    ("x.view(torch.int32)[:8]", "x[:8]", "x[8:]"),
    ("x.view(torch.uint8)[3:4]", "x[0]", "x[1:]"),
    ("x.as_strided((4, 4), (16, 1))", "x[16:17]", "x[4:16]"),
    ("x.unfold(0, 4, 4)[3]", "x[12:]", "x[16:]"),
    ("x.chunk(4)[1]", "x.split(20)[1]", "x.chunk(4)[2]"),
    ("x.expand(3, 64)[1, :5]", "x[4:]", "x[5:]"),
    ("x.unsqueeze(0).transpose(0, 1)[7]", "x[6:8]", "x[8:]"),
    ("x.detach()[3:]", "x[:4]", "x[:3]"),
    ("x.data.narrow(0, 4, 4)", "x[7]", "x[8]"),
):
    _add(
        None,
        f"""
== views {_write} and {_read}
  with d.use(S): {_write if "expand" not in _write else "x[:5]"}.fill_(1)  # FIRST
- k = {_read}.clone()  # SECOND
+ k = {_apart}.clone()
""",
    )

_add(
    None,
    """
== 200,000 disjoint pieces, and one that is not
  a = on(200_000, 2); S.wait_stream(C)
  with d.use(S): a[:, 0].fill_(1)  # FIRST
- k = a[100:200].sum()  # SECOND
+ k = a[:, 1].sum()
""",
)

# --- the host, and calls that do not wait ---------------------------------------------------------

for _call in (
    "x[m] = 0.5",
    "k = x.repeat_interleave(i, output_size=2016)",
    "k = F.one_hot(i, num_classes=64)",
    "k = torch.nonzero_static(x, size=64)",
    "k = x.masked_fill(m, 0.0)",
    "k = x.masked_scatter(m, y)",
    "k = torch.multinomial(x, 2)",
    "k = torch.linalg.cholesky_ex(torch.eye(4, device=D))",
    "k = x.topk(3)",
    "k = x.to('cpu', non_blocking=True)",
    "k = torch.scalar_tensor(1.0, device=D)",
    "x[3:5] = 1.0",
    "k = x.index_put((i,), y, accumulate=True)",
    "k = y.record_stream",
    "k = len(x), x.shape, x.is_contiguous()",
    "k = F.cross_entropy(x.view(8, 8), i[:8])",
    "k = torch.randperm(8, device=D)",
):
    _add(
        None,
        f"""
== no wait in {_call}
  p.copy_(y, non_blocking=True)  # FIRST
- {_call}
+ k = x.sum().item()
  k = p.tolist()  # SECOND
""",
    )

_add(
    None,
    """
== host reads before the copy
  p.copy_(x, non_blocking=True)  # FIRST
+ d.synchronize("test")
  k = p.sum()  # SECOND
== host writes what is still being copied
  x.copy_(p, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  p.zero_()  # SECOND
== numpy writes what is still being copied
  n = p.numpy()
  x.copy_(p, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  n[:] = 0  # SECOND
== numpy adds in place
  n = p.numpy()
  x.copy_(p, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  n += 1  # SECOND
== numpy copies into a staging buffer
  n = p.numpy()
  x.copy_(p, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  np.copyto(n, np.zeros(64))  # SECOND
== numpy writes with out=
  n = p.numpy()
  x.copy_(p, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  np.multiply(np.ones(64), 3, out=n)  # SECOND
== a function of numpy's writes with out=
  n = p.numpy()
  x.copy_(p, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  np.einsum("i,i->i", np.ones(64), np.ones(64), out=n, casting="same_kind")  # SECOND
== a method of an array writes with out=
  n = p.numpy()
  x.copy_(p, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  q.numpy().take(np.arange(64), out=n)  # SECOND
== numpy stores through flat
  n = p.numpy()
  x.copy_(p, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  n.flat = 3  # SECOND
== numpy reads through flat
  n = p.numpy()
  p.copy_(x, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  k = sum(n.flat)  # SECOND
== numpy reads too early
  n = p.numpy()
  p.copy_(x, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  k = float(n[3])  # SECOND
== numpy reads another part
  n = p.numpy()
  p[:32].copy_(x[:32], non_blocking=True)  # FIRST
- k = n[31:].sum()  # SECOND
+ k = n[32:].sum()
== a tensor of the array
  x.copy_(p, non_blocking=True)  # FIRST
+ d.synchronize("test", C)
  torch.from_numpy(p.numpy()).fill_(2)  # SECOND
== as_tensor of a part of the array
  n = p.numpy()
  x[:32].copy_(p[:32], non_blocking=True)  # FIRST
- torch.as_tensor(n[31:]).fill_(2)  # SECOND
+ torch.as_tensor(n[32:]).fill_(2)
== the host waits for another event
  one, two = d.event(), d.event()
  p.copy_(x, non_blocking=True)  # FIRST
  two.record(); one.record(S)
- d.wait(one, "test")
+ d.wait(two, "test")
  k = p[0].item()  # SECOND
== a query that was not waited for
  e = d.event()
  p.copy_(x, non_blocking=True)  # FIRST
  e.record()
- e.query()
+ while not e.query(): pass
  k = p.tolist()  # SECOND
== a stream's query
  p.copy_(x, non_blocking=True)  # FIRST
- C.query()
+ while not C.query(): pass
  k = p.tolist()  # SECOND
== .item() of another stream
- with d.use(S): p.copy_(y, non_blocking=True)  # FIRST
+ p.copy_(y, non_blocking=True)
  k = x.sum().item()
  k = p.tolist()  # SECOND
== pageable memory arrives later
  with d.use(S): x.copy_(torch.zeros(64), non_blocking=True)  # FIRST
+ C.wait_stream(S)
  k = x * 2  # SECOND
== a blocking copy in place of an asynchronous one
- with d.use(S): p.copy_(x, non_blocking=True)  # FIRST
+ with d.use(S): p.copy_(x)
  k = p.tolist()  # SECOND
== .to(non_blocking=True) is read at once
  k = x.to("cpu", non_blocking=True)  # FIRST
+ d.synchronize("test")
  k = k.tolist()  # SECOND
== a printed tensor
  p.copy_(x, non_blocking=True)  # FIRST
+ d.synchronize("test")
  k = str(p)  # SECOND
== a host scalar as an operand
  h = torch.zeros(()).pin_memory()
  h.copy_(x[0], non_blocking=True)  # FIRST
+ d.synchronize("test")
  k = y * h  # SECOND
""",
)

# --- the allocator --------------------------------------------------------------------------------

_add(
    None,
    """
== freed while another stream reads
  with d.use(S): k = x * 2  # FIRST
+ d.record_stream(x, S)
  del x
  l = on(64)  # SECOND
== a smaller request
  with d.use(S): k = x * 2  # FIRST
+ d.record_stream(x, S)
  del x
  l = on(3)  # SECOND
== a larger request, of merged neighbors
  with d.use(S): k = x * 2  # FIRST
+ d.record_stream(x, S)
  del x
  l = on(5000)  # SECOND
== the second request after the free
  with d.use(S): k = x * 2  # FIRST
+ d.record_stream(x, S)
  del x
  e = torch.empty(64, device=D)
  l = on(64)  # SECOND
== the result of an operator
  with d.use(S): k = x * 2  # FIRST
+ d.record_stream(x, S)
  del x
  l = y + z  # SECOND
== written by the other stream
  with d.use(S): x.mul_(2)  # FIRST
+ C.wait_stream(S)
  del x
  l = on(64)  # SECOND
== recorded for a stream that has not waited
- d.record_stream(x, T)
+ d.record_stream(x, S)
  with d.use(S): k = x * 2  # FIRST
  del x
  l = on(64)  # SECOND
== recorded for a stream that waits too early
  T.wait_stream(S)
  with d.use(S): k = x * 2  # FIRST
+ T.wait_stream(S)
  d.record_stream(x, T)
  del x
  l = on(64)  # SECOND
== the owner waits after it has allocated and written
  with d.use(S): k = x * 2  # FIRST
  del x
+ C.wait_stream(S)
  l = on(64)  # SECOND
  C.wait_stream(S)
== the host waits after the free
  with d.use(S): k = x * 2  # FIRST
  del x
+ d.synchronize("test")
  l = on(64)  # SECOND
== a view keeps it
  v = x[3:]
  with d.use(S): k = v * 2  # FIRST
- del v
  del x
  l = on(64)  # SECOND
== the large pool
  a = on(1 << 19); S.wait_stream(C)
  with d.use(S): k = a.sum()  # FIRST
+ d.record_stream(a, S)
  del a
  l = on(1 << 20)  # SECOND
== the other pool is not used
  a = on(1 << 19); S.wait_stream(C)
  with d.use(S): k = a.sum()  # FIRST
  del a
- l = on(1 << 18 | 1)  # SECOND
+ l = on(64)
== a side stream's memory is read on the main one
  with d.use(S): a = torch.zeros(64, device=D)
  C.wait_stream(S)
  k = a * 2  # FIRST
+ d.record_stream(a, C)
  del a
  with d.use(S): l = torch.zeros(64, device=D)  # SECOND
== prefetched batch is dropped too early
  with d.use(S): a = p.to(D, non_blocking=True)
  C.wait_stream(S)
  k = (a * a).sum()  # FIRST
+ S.wait_stream(C)
  del a
  with d.use(S): l = p.to(D, non_blocking=True)  # SECOND
== fresh memory on another stream
  k = x * 2
  l = torch.empty(64, device=D)  # FIRST
+ S.wait_stream(C)
  with d.use(S): l.zero_()  # SECOND
== storage.resize_(0) frees
  with d.use(S): k = x * 2  # FIRST
+ C.wait_stream(S)
  x.untyped_storage().resize_(0)
  l = on(64)  # SECOND
== storage.resize_ back is new memory
  x.untyped_storage().resize_(0)
  k = y * 2
  x.untyped_storage().resize_(256)  # FIRST
+ S.wait_stream(C)
  with d.use(S): x.zero_()  # SECOND
== a parameter is gathered again too early
  x.untyped_storage().resize_(0)
  with d.use(S):
      x.untyped_storage().resize_(256)
      x.copy_(y)  # FIRST
+ C.wait_stream(S)
  k = x * 2  # SECOND
== tensor.resize_ grows
  with d.use(S): k = x * 2  # FIRST
+ C.wait_stream(S)
  x.resize_(100)
  l = on(64)  # SECOND
== out= grows
  e = on(1); S.wait_stream(C)
  with d.use(S): k = e * 2  # FIRST
+ C.wait_stream(S)
  torch.add(x, 1, out=e)
  l = on(64)  # SECOND
== out= grows, beside an alias of other memory
  e, v = on(1), torch.from_dlpack(y); S.wait_stream(C)
  with d.use(S): k = e * 2  # FIRST
+ C.wait_stream(S)
  torch.add(x, 1, out=e)
  l = on(64)  # SECOND
== set_ drops the old memory
  with d.use(S): k = x * 2  # FIRST
+ C.wait_stream(S)
  x.set_(y)
  l = on(64)  # SECOND
== x.data = drops the old memory
  with d.use(S): k = x * 2  # FIRST
+ C.wait_stream(S)
  x.data = y
  l = on(64)  # SECOND
== set_ shares the memory
  v = torch.empty(0, device=D).set_(x.untyped_storage(), 8, (8,))
  with d.use(S): v.mul_(2)  # FIRST
- k = x[15:].clone()  # SECOND
+ k = x[16:].clone()
== from_dlpack shares the memory
  v = torch.from_dlpack(x)
  with d.use(S): v.mul_(2)  # FIRST
+ C.wait_stream(S)
  x.add_(1)  # SECOND
== a capsule shares the memory
  v = dlpack.from_dlpack(dlpack.to_dlpack(x[8:16]))
  with d.use(S): v.mul_(2)  # FIRST
- k = x[15:].clone()  # SECOND
+ k = x[16:].clone()
== an alias keeps the memory
  v = torch.from_dlpack(x)
  with d.use(S): k = v * 2  # FIRST
- del v
  del x
  l = on(64)  # SECOND
""",
)

# --- inference mode -------------------------------------------------------------------------------

_add(
    None,
    """
== in inference mode
  with torch.inference_mode():
      a = torch.ones(64).to(D); S.wait_stream(C)
      with d.use(S): a.mul_(2)  # FIRST
+     C.wait_stream(S)
      k = a + 1  # SECOND
== a prefetched batch in inference mode
  with torch.inference_mode():
      with d.use(S): a = p.to(D, non_blocking=True)  # FIRST
+     C.wait_stream(S)
      k = F.linear(a.view(8, 8), y.view(8, 8))  # SECOND
== read back in inference mode
  with torch.inference_mode():
      k = x.to("cpu", non_blocking=True)  # FIRST
+     d.synchronize("test")
      k = k.tolist()  # SECOND
""",
)

# --- training -------------------------------------------------------------------------------------

_add(
    None,
    """
== the gradient is read on another stream
  x.requires_grad_(); (x * y).sum().backward()  # FIRST
+ S.wait_stream(C)
  with d.use(S): k = x.grad.clone()  # SECOND
== a buffer changes under backward
  x.requires_grad_()
  with d.use(S): l = (x * y).sum()
  C.wait_stream(S); l.backward()
  with d.use(T), torch.no_grad(): k = x.grad * 1 if False else None
  (x * z).sum().backward()  # FIRST
+ T.wait_stream(C)
  with d.use(T): z.zero_()  # SECOND
== the optimizer on a stream of its own
  x.requires_grad_(); o = torch.optim.SGD([x], lr=0.1)
  x.grad = torch.ones_like(x); S.wait_stream(C)
  with d.use(S): o.step()  # FIRST
+ C.wait_stream(S)
  k = x * 2  # SECOND
== an LSTM's input
  a, r = on(3, 2, 4), torch.nn.LSTM(4, 4).to(D)
  S.wait_stream(C)
  with d.use(S): a.copy_(torch.ones(3, 2, 4).pin_memory(), non_blocking=True)  # FIRST
+ C.wait_stream(S)
  k = r(a)  # SECOND
== gradients are clipped too early
  x.requires_grad_(); x.grad = torch.ones_like(x); S.wait_stream(C)
  with d.use(S): x.grad.mul_(2)  # FIRST
+ C.wait_stream(S)
  k = torch.nn.utils.clip_grad_norm_([x], 1.0)  # SECOND
== weights are averaged during the update
  x.requires_grad_(); o = torch.optim.AdamW([x], fused=True); x.grad = torch.ones_like(x)
  o.step()  # FIRST
+ S.wait_stream(C)
  with d.use(S), torch.no_grad(): y.lerp_(x, 0.1)  # SECOND
""",
)

# --- graphs ---------------------------------------------------------------------------------------

_add(
    None,
    """
== a graph's input is refilled before the replay
  g, k = d.capture(lambda: x * 2, d.graph_pool())
  with d.use(S): x.copy_(p, non_blocking=True)  # FIRST
+ C.wait_stream(S)
  g.replay()  # SECOND
== a graph's input is refilled during the replay
  g, k = d.capture(lambda: x * 2, d.graph_pool())
  g.replay()  # FIRST
+ S.wait_stream(C)
  with d.use(S): x.copy_(p, non_blocking=True)  # SECOND
== a graph's output is read on another stream
  g, k = d.capture(lambda: x * 2, d.graph_pool())
  g.replay()  # FIRST
+ S.wait_stream(C)
  with d.use(S): l = k + 1  # SECOND
== a graph's input is freed before the replay
  g, k = d.capture(lambda: x * 2, d.graph_pool())  # FIRST
- del x
  g.replay()  # SECOND
== a graph's input is replaced before the replay
  g, k = d.capture(lambda: x * 2, d.graph_pool())  # FIRST
- x = on(64)
+ x.copy_(on(64))
  g.replay()  # SECOND
== a graph's staging buffer is freed before the replay
  g, k = d.capture(lambda: x.copy_(p, non_blocking=True), d.graph_pool())  # FIRST
- del p
  g.replay()  # SECOND
== two graphs of one pool
  o = d.graph_pool(); g, k = d.capture(lambda: x * 2, o); h, l = d.capture(lambda: y * 2, o)
  with d.use(S): g.replay()  # FIRST
+ T.wait_stream(S)
  with d.use(T): h.replay()  # SECOND
== a branch of a graph writes what another reads
  def f():
   c = d.current_stream(); S.wait_stream(c)
   with d.use(S): x.mul_(2)  # FIRST
+  c.wait_stream(S)
   k = x + 1  # SECOND
   c.wait_stream(S)
   return k
  g, k = d.capture(f, d.graph_pool()); g.replay()
== a branch of a graph leaves it at an older event
  def f():
   c, e = d.current_stream(), d.event()
-  e.record(); y.mul_(2)  # FIRST
+  y.mul_(2); e.record()
   S.wait_event(e)
   with d.use(S): y.add_(1)  # SECOND
   c.wait_stream(S)
   return y
  g, k = d.capture(f, d.graph_pool()); g.replay()
== two branches of a graph fill one result
  def f():
   c, r = d.current_stream(), on(2, 8)
   S.wait_stream(c); T.wait_stream(c)
   with d.use(S): r[0].fill_(2)  # FIRST
-  with d.use(T): r[:, 0].fill_(3)  # SECOND
+  with d.use(T): r[1].fill_(3)
   c.wait_stream(S); c.wait_stream(T)
   return r
  g, k = d.capture(f, d.graph_pool()); g.replay()
== a replay on a stream that has not waited for the weights
  r = torch.nn.Linear(64, 1).to(D)
  with torch.no_grad(): g, k = d.capture(lambda: r(x), d.graph_pool())
  S.wait_stream(C)
  with torch.no_grad(): r.weight.mul_(2)  # FIRST
+ S.wait_stream(C)
  with d.use(S): g.replay()  # SECOND
== an LSTM under replay
  a, r = on(3, 2, 4), torch.nn.LSTM(4, 4).to(D)
  with torch.no_grad(): g, k = d.capture(lambda: r(a)[0], d.graph_pool())
  S.wait_stream(C)
  with d.use(S): a.zero_()  # FIRST
+ C.wait_stream(S)
  g.replay()  # SECOND
== a pinned result of a graph
  g, k = d.capture(lambda: p.copy_(x, non_blocking=True), d.graph_pool())
  g.replay()  # FIRST
+ d.synchronize("test")
  l = p.tolist()  # SECOND
""",
)

# --- host threads ---------------------------------------------------------------------------------

_add(
    None,
    """
== two threads write one tensor on one stream
  def write(): x.mul_(2)  # FIRST
  t = threading.Thread(target=write); t.start()
- spin(t)
+ t.join()
  x.add_(1)  # SECOND
  t.join()
== two threads write two halves on one stream
- def write(): x[:33].mul_(2)  # FIRST
+ def write(): x[:32].mul_(2)
  t = threading.Thread(target=write); t.start(); spin(t)
  x[32:].add_(1)  # SECOND
  t.join()
== two threads read and write on one stream
  def read(): x.sum()  # FIRST
  t = threading.Thread(target=read); t.start()
- spin(t)
+ t.join()
  x.add_(1)  # SECOND
  t.join()
== a deque that nobody looks into
  done = collections.deque()
  def write(): x.mul_(2); done.append(1)  # FIRST
  t = threading.Thread(target=write); t.start(); spin(t)
+ done.popleft()
  x.add_(1)  # SECOND
  t.join()
== a queue from before the block
  def write(): x.mul_(2); old.queue.put(1)  # FIRST
  t = threading.Thread(target=write); t.start(); spin(t)
+ old.queue.get()
  x.add_(1)  # SECOND
  t.join()
- old.queue.get()
== an event from before the block
  def write(): x.mul_(2); old.event.set()  # FIRST
  t = threading.Thread(target=write); t.start(); spin(t)
+ while not old.event.is_set(): pass
  x.add_(1)  # SECOND
  t.join(); old.event.clear()
== a condition from before the block
  def write():
      x.mul_(2)  # FIRST
      with old.condition: old.condition.notify()
  t = threading.Thread(target=write); t.start(); spin(t)
+ with old.condition: pass
  x.add_(1)  # SECOND
  t.join()
== a semaphore from before the block
  def write(): x.mul_(2); old.semaphore.release()  # FIRST
  t = threading.Thread(target=write); t.start(); spin(t)
+ old.semaphore.acquire()
  x.add_(1)  # SECOND
  t.join()
- old.semaphore.acquire()
== a lock that only one side takes
  lock = threading.Lock()
  def write():
      with lock: x.mul_(2)  # FIRST
  t = threading.Thread(target=write); t.start(); spin(t)
+ lock.acquire()
  x.add_(1)  # SECOND
  t.join()
== an event recorded in a thread
  e = d.event()
  def write():
      with d.use(S): x.mul_(2)  # FIRST
      e.record(S)
  t = threading.Thread(target=write); t.start(); t.join()
+ C.wait_event(e)
  x.add_(1)  # SECOND
== a thread has its own current stream
  def write():
      with d.use(d.current_stream() if bug else S): x.mul_(2)  # FIRST
- bug = True
+ bug = False
  with d.use(S):
      t = threading.Thread(target=write); t.start(); t.join()
  T.wait_stream(S)
  with d.use(T): x.add_(1)  # SECOND
== a thread fills the staging buffer
  def fill(): p.fill_(2)  # FIRST
  t = threading.Thread(target=fill); t.start()
- spin(t)
+ t.join()
  x.copy_(p, non_blocking=True)  # SECOND
  t.join()
== a thread frees what its copy reads
  l = [x]; del x
  def save():
      with d.use(S): p.copy_(l[0], non_blocking=True)  # FIRST
+     d.synchronize("test", S)
      l.clear()
  t = threading.Thread(target=save); t.start(); t.join()
  k = on(64)  # SECOND
== a batch made by a thread needs its event still
  got = collections.deque()
  def load():
      with d.use(S): got.append(p.to(D, non_blocking=True))  # FIRST
  t = threading.Thread(target=load); t.start()
  while not got: pass
  a = got.popleft()
+ C.wait_stream(S)
  k = a * 2  # SECOND
  t.join()
""",
)

# --- collectives ----------------------------------------------------------------------------------

for _call, _use in (
    ("dist.all_reduce(x, async_op=True)", "x * 2"),
    ("dist.broadcast(x, 1, async_op=True)", "x * 2"),
    ("dist.broadcast(x, 0, async_op=True)", "x.zero_()"),
    ("dist.reduce(x, 0, async_op=True)", "x * 2"),
    ("dist.all_gather_into_tensor(z, x[:32], async_op=True)", "z * 2"),
    ("dist.all_gather_into_tensor(z, x[:32], async_op=True)", "x.zero_()"),
    ("dist.all_gather([y, z], x, async_op=True)", "z * 2"),
    ("dist.reduce_scatter_tensor(x[:32], z, async_op=True)", "x * 2"),
    ("dist.reduce_scatter_tensor(x[:32], z, async_op=True)", "z.zero_()"),
    ("dist.reduce_scatter(x, [y, z], async_op=True)", "y.zero_()"),
    ("dist.all_to_all_single(x, z, async_op=True)", "x * 2"),
    ("dist.isend(x, 1)", "x.zero_()"),
    ("dist.irecv(x, 1)", "x * 2"),
    ("dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])[0]", "x * 2"),
    ("dist.all_reduce(x[:32], async_op=True)", "x[31:] * 2"),
):
    _add(
        fake_process_group,
        f"""
== {_call} before {_use}
  w = {_call}  # FIRST
+ w.wait()
  k = {_use}  # SECOND
  w.wait()
""",
    )

_add(
    fake_process_group,
    """
== waited for on another stream
  w = dist.all_reduce(x, async_op=True)  # FIRST
- with d.use(S): w.wait()
+ w.wait()
  k = x * 2  # SECOND
== not async, but on another stream
  with d.use(S): dist.all_reduce(x)  # FIRST
+ C.wait_stream(S)
  k = x * 2  # SECOND
== its input is not ready
  with d.use(S): x.mul_(2)  # FIRST
+ C.wait_stream(S)
  dist.all_reduce(x)  # SECOND
== a collective keeps its tensors until the wait
  w = dist.all_reduce(x, async_op=True)  # FIRST
- with d.use(S): w.wait()
  del x
  y = on(64)  # SECOND
  w.wait()
== a collective on a side stream keeps nothing
  S.wait_stream(C)
  with d.use(S): dist.all_reduce(x)  # FIRST
+ d.record_stream(x, S)
  del x
  y = on(64)  # SECOND
== a functional collective reads its input
  k = fc.all_reduce(x, "sum", dist.group.WORLD)  # FIRST
+ k = fc.wait_tensor(k)
  x.zero_()  # SECOND
- k = fc.wait_tensor(k)
== the host reads after wait
  w = dist.all_reduce(x, async_op=True); w.wait()
  p.copy_(x, non_blocking=True)  # FIRST
- w.wait()
+ d.synchronize("test")
  k = p.tolist()  # SECOND
== a barrier is a wait, a collective is none
  p.copy_(x, non_blocking=True)  # FIRST
- dist.all_reduce(y)
+ dist.barrier()
  k = p.tolist()  # SECOND
== polled until it is done
  p.copy_(x, non_blocking=True)  # FIRST
  w = dist.all_reduce(y, async_op=True)
- w.wait()
+ while not w.is_completed(): pass
  k = p.tolist()  # SECOND
""",
)

_add(
    gloo_process_group,
    """
== DDP's gradients are read on another stream
  r = DDP(torch.nn.Linear(8, 8).to(D)); r(x.view(8, 8)).sum().backward()  # FIRST
+ S.wait_stream(C)
  with d.use(S): k = r.module.weight.grad.clone()  # SECOND
== DDP's input is not ready
  r = DDP(torch.nn.Linear(8, 8).to(D))
  with d.use(S): x.mul_(2)  # FIRST
+ C.wait_stream(S)
  r(x.view(8, 8)).sum().backward()  # SECOND
== gloo's own arithmetic in wait() is no work of this stream
  w = dist.reduce_scatter_tensor(x, z, async_op=True)  # FIRST
+ w.wait()
  k = x * 2  # SECOND
  w.wait()
== DDP's hook uses the bucket before its all-reduce is done
  r = DDP(torch.nn.Linear(8, 8).to(D))
  def hook(state, bucket):
      f = dist.all_reduce(bucket.buffer(), async_op=True).get_future()  # FIRST
-     bucket.buffer().mul_(2)  # SECOND
-     return f.then(lambda f: f.value()[0])
+     return f.then(lambda f: f.value()[0].mul_(2))
  r.register_comm_hook(None, hook)
  r(x.view(8, 8)).sum().backward()
  k = r.module.weight.grad.clone()
== DDP's hook sends a copy that its callback alone has
  r = DDP(torch.nn.Linear(8, 8).to(D))
  def hook(state, bucket):
      whole = bucket.buffer()
      f = dist.all_reduce(whole.half(), async_op=True).get_future()
      return f.then(lambda f: whole.copy_(f.value()[0]))
  r.register_comm_hook(None, hook)
  for _ in range(2): r(x.view(8, 8)).sum().backward()  # FIRST
+ S.wait_stream(C)
  with d.use(S): k = r.module.weight.grad.clone()  # SECOND
== a bucket is reduced beside the copy into it
  with d.use(S):
      x.copy_(y)  # FIRST
+     w = dist.all_reduce(x, async_op=True)
- w = dist.all_reduce(x, async_op=True)  # SECOND
  w.wait()
== a future's callback is not waited for
  f = dist.all_reduce(x, async_op=True).get_future()
  g = f.then(lambda f: x.mul_(2))  # FIRST
+ g.wait()
  k = x + 1  # SECOND
""",
)
