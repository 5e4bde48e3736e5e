"""How long a run takes to start: what it prepares, builds, compiles and captures.

While the data is prepared, PyTorch's compiler is loaded and its worker processes start. The rest
comes one after the other: compiling needs the vocabulary's size and the shapes of batches, which
come from the prepared data, and PyTorch's compiler is not thread-safe. From the second run on, the
prepared data and the compiled code come from caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine import Engine


@dataclass(frozen=True, slots=True)
class StartUp:
    """The parts of a start-up, in seconds. `compile_s` and `capture_s` are None if the plan does
    not compile or capture. `from_cache`: the compiled code was in the compiler's cache."""

    data_s: float
    build_s: float
    compile_s: float | None = None
    capture_s: float | None = None
    from_cache: bool = False

    def with_first_batches(self, engine: Engine) -> StartUp:
        """The same, with what the first batches have compiled and captured."""
        compiled, graphs = engine.compiled, engine.graphs
        is_compiled = compiled is not None and compiled.compiled
        is_captured = graphs is not None and graphs.captures > 0
        return StartUp(
            self.data_s,
            self.build_s,
            compiled.seconds if compiled is not None and is_compiled else None,
            graphs.seconds if graphs is not None and is_captured else None,
            compiled is not None and compiled.from_cache == compiled.compilations > 0,
        )

    @property
    def values(self) -> dict[str, float]:
        """The parts that there are, by name."""
        parts = {
            "data_s": self.data_s,
            "build_s": self.build_s,
            "compile_s": self.compile_s,
            "capture_s": self.capture_s,
        }
        return {name: seconds for name, seconds in parts.items() if seconds is not None}

    def __str__(self) -> str:
        parts = [f"{name.removesuffix('_s')} {value:.1f} s" for name, value in self.values.items()]
        cached = "; compiled nothing, the code was in the cache" if self.from_cache else ""
        return f"start-up {sum(self.values.values()):.1f} s: {', '.join(parts)}{cached}"
