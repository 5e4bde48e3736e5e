"""The race checker: finds accesses to memory that nothing orders, and explains them.

In: the launches, waits, allocations and frees of a program, with the lines that made them. Out:
races, each as a `Finding` with the missing call and a picture of the timelines, as text and as an
HTML page. It runs nothing itself; `fake/` is built on its modules and tells it what a program does.
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.races.findings import CodeLine as CodeLine
    from headrace.races.findings import Finding as Finding
    from headrace.races.findings import race_report as race_report
    from headrace.races.pages import race_page as race_page
    from headrace.races.race import Access as Access
    from headrace.races.race import HiddenWait as HiddenWait
    from headrace.races.race import Race as Race

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
