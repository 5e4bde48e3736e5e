"""Checks reports in a real browser: are they drawn, readable and usable?

    python benchmarks/tools/look.py report.html … --out shots # exits with 1 if anything is wrong

It needs playwright and a Chromium. `--browser PATH` or HEADRACE_BROWSER names an installed one
(`apt install chromium`); otherwise playwright's own is used. It imports nothing of Headrace, so it
can run in an environment of its own.

It opens each page in both themes at 320, 360 and 1400 pixels and checks: nothing is logged to the
console, nothing is requested, the page does not scroll sideways, every chart is drawn, text has
enough contrast, tips come by pointer and by keyboard, line charts and timelines zoom by button,
key, wheel and drag, the Perfetto file is saved. Then it checks the page without scripts and in
print.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = (320, 360, 1400)
THEMES = ("light", "dark")

# Functions that run in the page: `drawn`, `contrast` and `structure` each list what is wrong.
ASKED = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")


class Findings:
    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.checks = 0

    def expect(self, holds: object, where: str, what: str) -> None:
        self.checks += 1
        if not holds:
            self.wrong.append(f"{where}: {what}")

    def none(self, found: list[str], where: str) -> None:
        self.checks += 1
        self.wrong += [f"{where}: {what}" for what in sorted(set(found))]


@contextmanager
def opened(
    browser: Browser, file: Path, findings: Findings, where: str, **options: Any
) -> Iterator[Page]:
    """Opens the page in a context of its own. Whatever it logs or requests is a finding."""
    context = browser.new_context(accept_downloads=True, **options)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: (
            problems.append(f"asked for {request.url[:80]}")
            if request.url != file.absolute().as_uri() and not request.url.startswith("blob:")
            else None
        ),
    )
    page.goto(file.absolute().as_uri())
    page.wait_for_timeout(150)
    yield page
    findings.none(problems, where)
    context.close()


def asked(page: Page, question: str) -> list[str]:
    return page.evaluate(f"{ASKED.strip()}.{question}()")


def look_at(browser: Browser, file: Path, out: Path | None, findings: Findings) -> None:
    for width in WIDTHS:
        for theme in THEMES:
            where = f"{file.name} {width} {theme}"
            size = {"width": width, "height": 900}
            with opened(
                browser, file, findings, where,
                viewport=size, color_scheme=theme, reduced_motion="reduce",
            ) as page:  # fmt: skip
                check_page(page, findings, where, width)
                if out is not None and width != 320:
                    page.screenshot(path=out / f"{file.stem}-{width}-{theme}.png", full_page=True)
                if width == 1400:
                    check_use(page, findings, where)
                    check_toggle(page, findings, where, theme)
    check_without_script(browser, file, findings)
    check_paper(browser, file, findings, out)


def check_page(page: Page, findings: Findings, where: str, width: int) -> None:
    wide = page.evaluate("document.documentElement.scrollWidth")
    findings.expect(wide <= width, where, f"{wide} pixels wide: scrolls sideways")
    findings.none(asked(page, "drawn"), where)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    wide = page.evaluate("document.documentElement.scrollWidth")
    findings.expect(wide <= width, where, f"{wide} pixels wide with all tables open")
    findings.none(asked(page, "contrast"), where)
    findings.none(asked(page, "structure"), where)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = false; })")


def check_use(page: Page, findings: Findings, where: str) -> None:
    tip = page.locator(".tip")
    bars = page.locator(".mark")
    if bars.count():
        bars.first.hover()
        findings.expect(tip.is_visible(), where, "no tip over a bar")
        page.mouse.move(1, 1)
        bars.first.focus()
        first = tip.text_content()
        findings.expect(tip.is_visible() and first, where, "no tip on a focused bar")
        if page.locator(".marks").first.locator(".mark").count() > 1:
            page.keyboard.press("ArrowDown")
            findings.expect(tip.text_content() != first, where, "the arrow key does not move on")
        page.keyboard.press("Escape")
        findings.expect(not tip.is_visible(), where, "Escape does not close the tip")
    if page.locator(".line-frame").count():
        check_lines(page, findings, where)
    if page.locator(".timelines").count():
        check_timelines(page, findings, where)


def check_lines(page: Page, findings: Findings, where: str) -> None:
    tip, chart = page.locator(".tip"), page.locator(".line-chart").first
    frame, reset = chart.locator(".line-frame"), chart.locator(".line-reset")
    frame.hover()
    findings.expect(tip.is_visible() and ":" in tip.text_content(), where, "no values over a line")
    page.mouse.move(1, 1)
    findings.expect(not tip.is_visible(), where, "the values stay when the pointer leaves")
    frame.focus()
    page.keyboard.press("Home")
    first = tip.text_content()
    page.keyboard.press("End")
    findings.expect(tip.text_content() != first, where, "keys do not read a line's values")
    page.keyboard.press("+")
    findings.expect(reset.is_visible(), where, "the key + does not zoom a line chart")
    page.keyboard.press("0")
    findings.expect(not reset.is_visible(), where, "the key 0 does not show all of a line chart")
    page.keyboard.press("Escape")
    findings.expect(not tip.is_visible(), where, "Escape does not close a line's values")
    box = frame.bounding_box()
    assert box is not None
    before = frame.screenshot()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    page.mouse.up()
    page.mouse.move(1, 1)
    page.wait_for_timeout(80)
    findings.expect(reset.is_visible(), where, "dragging does not zoom a line chart")
    findings.expect(frame.screenshot() != before, where, "a zoomed line chart looks the same")
    reset.click()
    findings.expect(not reset.is_visible(), where, "Show all does not show all")


def check_timelines(page: Page, findings: Findings, where: str) -> None:
    window, lanes = page.locator(".tl-window"), page.locator(".tl-lanes").first

    def changes(what: str, act: Any) -> None:
        before = window.text_content(), page.locator(".tl-plot path").first.get_attribute("d")
        act()
        page.wait_for_timeout(80)
        after = window.text_content(), page.locator(".tl-plot path").first.get_attribute("d")
        findings.expect(before != after, where, f"timelines: {what} changes nothing")

    whole = window.text_content()
    changes("the button +", lambda: page.locator("[data-zoom=in]").click())
    changes("the button →", lambda: page.locator("[data-zoom=right]").click())
    changes("the button All", lambda: page.locator("[data-zoom=all]").click())
    findings.expect(window.text_content() == whole, where, "timelines: All does not show all")
    lanes.scroll_into_view_if_needed()
    lanes.focus()
    changes("the key +", lambda: page.keyboard.press("+"))
    changes("shift and an arrow", lambda: page.keyboard.press("Shift+ArrowRight"))
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(80)
    detail = page.locator(".tl-detail").first.text_content()
    findings.expect("of" in (detail or ""), where, "timelines: an arrow key tells nothing")
    changes("the key 0", lambda: page.keyboard.press("0"))
    box = page.locator(".tl-plot").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 60, box["y"] + 10)
    findings.expect(page.locator(".tip").is_visible(), where, "timelines: no tip under the pointer")
    changes("the wheel", lambda: page.mouse.wheel(0, -300))

    def drag() -> None:
        page.mouse.down()
        page.mouse.move(box["x"] + 5, box["y"] + 10, steps=4)
        page.mouse.up()

    changes("dragging", drag)
    findings.none(asked(page, "drawn"), f"{where} zoomed")
    with page.expect_download() as download:
        page.locator(".tl-save").first.click()
    trace = json.loads(Path(download.value.path()).read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    findings.expect(spans and all(s["dur"] >= 0 for s in spans), where, "the saved trace is empty")


def check_toggle(page: Page, findings: Findings, where: str, theme: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.locator("button.theme").click()
    findings.expect(page.evaluate(ground) != before, where, "the theme button changes nothing")
    findings.none(asked(page, "contrast"), f"{where} toggled")
    page.locator("button.theme").click()
    findings.expect(page.evaluate(ground) == before, where, f"pressed twice it is not {theme}")


def check_without_script(browser: Browser, file: Path, findings: Findings) -> None:
    where = f"{file.name} without script"
    # This turns off the page's own script, not what playwright evaluates.
    with opened(browser, file, findings, where, java_script_enabled=False) as page:
        sizes = page.locator("svg.bar, svg.tl-plot")
        for index in range(sizes.count()):
            box = sizes.nth(index).bounding_box()
            findings.expect(box and box["width"] > 5, where, "a chart is not drawn")
        notes = page.locator(".line-chart:not(.small) .no-script")
        for index in range(page.locator(".line-chart:not(.small)").count()):
            findings.expect(notes.nth(index).is_visible(), where, "nothing in place of a chart")
        for hidden in (".tl-tools", ".theme", ".tip", ".line-frame"):
            for index in range(page.locator(hidden).count()):
                shown = page.locator(hidden).nth(index).is_visible()
                findings.expect(not shown, where, f"{hidden} is shown, and does nothing")


def check_paper(browser: Browser, file: Path, findings: Findings, out: Path | None) -> None:
    where = f"{file.name} on paper"
    with opened(browser, file, findings, where, color_scheme="dark") as page:
        page.emulate_media(media="print")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        findings.expect(ground == "rgb(255, 255, 255)", where, f"the paper is {ground}")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        closed = page.locator("details:not([open])").count()
        findings.expect(closed == 0, where, f"{closed} tables are closed")
        findings.none(asked(page, "contrast"), where)
        paper = page.pdf(format="A4", print_background=True)
        findings.expect(len(paper) > 10_000, where, "nothing was printed")
        if out is not None:
            (out / f"{file.stem}.pdf").write_bytes(paper)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="a folder for pictures")
    parser.add_argument("--browser", default=os.environ.get("HEADRACE_BROWSER"))
    options = parser.parse_args()
    for file in options.files:
        if not file.is_file():
            parser.error(f"{file}: is not there")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    findings = Findings()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        version = browser.version
        for file in options.files:
            look_at(browser, file, options.out, findings)
        browser.close()
    for wrong in findings.wrong:
        print(wrong)
    print(
        f"Chromium {version}: {len(options.files)} pages, {findings.checks} checks, "
        f"{len(findings.wrong)} wrong"
    )
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
