"""Reports: valid pages that need nothing from outside, show the input's own numbers, and cannot be
broken by what is in a result."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import HeadraceError, ReportError, RunError
from headrace.report import render, try_report, write_perfetto, write_report
from support.report_samples import bench_sample, run_sample, tune_sample

SMALL = ("baseline", "graph")
NASTY = "</script><img src=x onerror=alert(1)>'\"&\u202e\x00\ud800"
MEDIAN = "rows.0.ms_per_step.median"
SPAN = "rows.0.timeline.spans.5"
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Reads a page; objects to tags that do not close as they opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice: {names}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            kind = self.tags[-1][1].get("class") or self.open[-1]
            self.scripts.setdefault(kind, []).append(data)
        else:
            self.text.append(data)

    def having(self, class_: str) -> list[dict[str, str | None]]:
        return [found for _, found in self.tags if class_ in (found.get("class") or "").split()]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def stored(folder: Path, content: dict[str, Any], name: str = "result.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def page_of(folder: Path, content: dict[str, Any]) -> Page:
    return Page(render(stored(folder, content)))


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return bench_sample()


@pytest.fixture(scope="module")
def bench_text(bench: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    return render(stored(tmp_path_factory.mktemp("bench"), bench))


@pytest.fixture(scope="module", params=["bench", "tune", "run"])
def any_text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("any")
    if request.param == "run":
        return render(run_sample(folder / "exp"))
    return render(stored(folder, bench_sample() if request.param == "bench" else tune_sample()))


class TestEveryPage:
    def test_is_balanced_and_has_its_landmarks(self, any_text: str) -> None:
        assert any_text.startswith("<!doctype html>")
        page = Page(any_text)
        names = [tag for tag, _ in page.tags]
        for once in ("header", "nav", "main", "footer", "h1", "title"):
            assert names.count(once) == 1, once
        ids = [found["id"] for _, found in page.tags if "id" in found]
        assert len(ids) == len(set(ids))
        targets = {found["href"] for tag, found in page.tags if tag == "a"}
        assert targets == {f"#{anchor}" for anchor in ids if f"#{anchor}" in targets}
        assert ids.index("verdict") == min(ids.index(i) for i in ids if f"#{i}" in targets)

    def test_reaches_nothing_outside(self, any_text: str) -> None:
        page = Page(any_text)
        addresses = set(re.findall(r"\w+://[^\s\"'`)]+", any_text))
        # A namespace, and the comment that names the chart library: nothing fetches them.
        assert addresses <= {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
        for tag, found in page.tags:
            assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
            assert "src" not in found
            assert "style" not in found
            assert not [name for name in found if name.startswith("on")]
            assert (found.get("href") or "#").startswith("#")

    def test_the_policy_allows_its_own_script_and_style_alone(self, any_text: str) -> None:
        page = Page(any_text)
        policy = next(
            found["content"] or ""
            for _, found in page.tags
            if found.get("http-equiv") == "Content-Security-Policy"
        )
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        for kind in ("script", "style"):
            (text,) = page.scripts[kind]
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy

    def test_data_for_the_script_is_json_without_an_angle(self, any_text: str) -> None:
        page = Page(any_text)
        blocks = page.scripts.get("line-data", []) + page.scripts.get("tl-data", [])
        for block in blocks:
            assert "<" not in block
            json.loads(block)

    def test_every_drawing_is_named_or_hidden(self, any_text: str) -> None:
        inside: list[bool] = []

        class Drawings(HTMLParser):
            def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
                found = dict(attrs)
                named = found.get("aria-hidden") == "true" or found.get("role") == "img"
                if found.get("role") == "img":
                    assert found.get("aria-label")
                inside.append(named or bool(inside and inside[-1]))
                if tag == "svg":
                    assert inside[-1], found
                if tag in VOID:
                    inside.pop()

            def handle_endtag(self, tag: str) -> None:
                inside.pop()

        Drawings().feed(any_text)

    def test_charts_have_tables(self, any_text: str) -> None:
        page = Page(any_text)
        large = [found for found in page.having("line-chart") if "small" not in found["class"]]
        assert len(page.having("no-script")) == len(large)  # what stands there without JavaScript
        assert any(tag == "table" for tag, _ in page.tags)
        assert sum(tag == "caption" for tag, _ in page.tags) == sum(
            tag == "table" for tag, _ in page.tags
        )


class TestBench:
    def test_every_chart_is_there(self, bench: dict[str, Any], bench_text: str) -> None:
        page = Page(bench_text)
        rows = len(bench["rows"])
        assert len(page.having("bar-row")) == 3 * rows  # time a step, GPU use, waits
        assert len(page.having("timeline")) == rows
        lanes = sum(len({s["lane"] for s in row["timeline"]["spans"]}) for row in bench["rows"])
        assert len(page.having("tl-plot")) == lanes
        charts = page.having("line-chart")
        assert len(charts) == 2 + 4 * rows  # losses, differences; four sensors of each plan
        assert len(page.having("line")) >= rows  # in the legend
        lines = json.loads(page.scripts["line-data"][0])["lines"]
        assert [line["name"] for line in lines] == [row["plan"] for row in bench["rows"]]
        assert [line["y"][0] for line in lines] == [
            pytest.approx(row["losses"][0]) for row in bench["rows"]
        ]
        sections = {found.get("id") for tag, found in page.tags if tag == "section"}
        assert sections == {
            *("verdict", "speed", "gpu", "timelines", "losses", "waits", "use", "streams"),
            *("score", "rows", "plans", "environment"),
        }

    def test_the_numbers_are_the_inputs(self, bench: dict[str, Any], bench_text: str) -> None:
        values = {
            float(value) for value in re.findall(r'<td[^>]* data-value="([^"]+)"', bench_text)
        }
        for row in bench["rows"]:
            expected = [
                row["ms_per_step"]["median"], row["ms_per_step"]["low"], row["speedup"],
                row["per_s"], row["waits"]["per_step"], row["host_blocked_ms"],
                row["gpu"]["busy_share"], row["gpu"]["over_busy_share"], row["nvml_share"],
                row["cpu_share"], row["power_w"], row["peak_memory_bytes"],
                row["overlap_share"], row["equal"]["largest"],
            ]  # fmt: skip
            expected += [stream["busy_share"] for stream in row["streams"]]
            expected += list((row["score"] or {}).values())
            expected += row["losses"][:1]
            for value in expected:
                assert float(value) in values, (row["plan"], value)

    def test_the_verdict_comes_first(self, bench: dict[str, Any], bench_text: str) -> None:
        words = Page(bench_text).words
        headline = "Take graph: 4.2 times as fast, with the same losses"
        assert headline in words
        assert "4.20×" in words
        for sentence in bench["verdict"]["sentences"]:
            assert " ".join(sentence.split()) in words
        assert words.index(headline) < words.index("Time per step How long")
        assert "Noise 0.6 % pipeline against itself" in words
        assert bench["environment"]["command"] in words

    def test_bars_are_as_long_as_the_figures(self, tmp_path: Path) -> None:
        content = bench_sample(SMALL, steps=1)
        text = render(stored(tmp_path, content))
        section = text[text.index('id="speed"') : text.index('id="gpu"')]
        top = max(row["ms_per_step"]["high"] for row in content["rows"])
        for look, of in (("compute", 0), ("idle", 1)):
            drawn = re.findall(
                rf'<rect x="[\d.]+%" y="3" width="([\d.]+)%"[^>]*fill {look}"', section
            )
            for width, row in zip(drawn, content["rows"], strict=True):
                busy = row["gpu"]["busy_ms_per_step"]
                length = (busy, row["ms_per_step"]["median"] - busy)[of]
                assert float(width) == pytest.approx(100 * length / top, abs=0.01)

    def test_timelines_share_one_scale(self, bench: dict[str, Any], bench_text: str) -> None:
        """Each lane's ground ends where its plan ends, on the longest one's scale."""
        page = Page(bench_text)
        ends = [max(s["end_ns"] for s in row["timeline"]["spans"]) for row in bench["rows"]]
        grounds = re.findall(r'<rect width="([\d.]+)" height="100" class="track"/>', bench_text)
        lanes_of = [len({s["lane"] for s in row["timeline"]["spans"]}) for row in bench["rows"]]
        expected = [
            end / max(ends) * 480 for end, n in zip(ends, lanes_of, strict=True) for _ in range(n)
        ]
        assert [float(width) for width in grounds] == pytest.approx(expected, abs=0.01)
        for block, row in zip(page.scripts["tl-data"], bench["rows"], strict=True):
            data = json.loads(block)
            spans = sum(len(lane["spans"]) for lane in data["lanes"]) // 3
            assert spans == len(row["timeline"]["spans"])

    def test_the_level_is_the_share_that_is_busy(self, tmp_path: Path) -> None:
        content = bench_sample(("baseline",), steps=1)
        span = {"lane": "compute", "name": "k", "kind": "kernel"}
        content["rows"][0]["timeline"]["spans"] = [
            span | {"start_ns": at * 1000, "end_ns": at * 1000 + 250} for at in range(48_000)
        ] + [span | {"lane": "x", "kind": "wait", "start_ns": 0, "end_ns": 48_000_000}]
        content["rows"][0]["timeline"]["spans"].sort(key=lambda one: one["start_ns"])
        text = render(stored(tmp_path, content))
        # A quarter of every part is covered, so the level is a quarter everywhere: one long step.
        assert 'd="M0 75H480V100H0Z" class="fill kernel"' in text
        assert 'd="M0 0H480V100H0Z" class="fill wait"' in text

    def test_failed_and_unequal_plans_are_said_first(self, tmp_path: Path) -> None:
        content = bench_sample((*SMALL, "max"), steps=1)
        content["rows"][1] = {"plan": "graph", "kind": "plan", "error": "out of memory: 3 GiB"}
        content["rows"][2]["equal"] |= {"verdict": "unequal", "first_step": 7, "largest": 0.25}
        content["verdict"]["take"] = "baseline"
        page = page_of(tmp_path, content)
        assert len(page.having("warning")) == 2
        assert "graph failed: out of memory: 3 GiB" in page.words
        assert "max does not compute the same: its losses differ from step 7 on, by up to 0.25" in (
            page.words
        )
        assert "Nothing to gain: no plan is clearly faster than baseline" in page.words

    def test_what_cannot_be_seen_on_a_cpu_is_said(self, tmp_path: Path) -> None:
        content = bench_sample(SMALL, steps=1)
        content["environment"] |= {"device": "cpu", "device_name": None}
        content["noise"] = None
        for row in content["rows"]:
            row |= dict.fromkeys(("gpu", "nvml_share", "power_w", "timeline", "score"))
            row |= {"streams": [], "samples": [], "losses": [], "waits": None}
        page = page_of(tmp_path, content)
        assert len(page.having("empty")) == 7
        assert "Measured on the CPU, which cannot show what a GPU did." in page.words
        assert "No losses were recorded" in page.words
        assert "The monitor recorded no samples here." in page.words
        assert len(page.having("bar-row")) == 2

    def test_nothing_but_names_still_makes_a_page(self, tmp_path: Path) -> None:
        content = {"kind": "headrace bench", "version": 1, "rows": [{"plan": "mine"}]}
        assert "No plan could be measured" in page_of(tmp_path, content).words


class TestLosses:
    """A plan may have been compared with other losses of the reference than those of its row."""

    def content(self) -> dict[str, Any]:
        content = bench_sample(SMALL, steps=1)
        content["rows"][0] |= {"losses": [4.0, 3.0]}
        why = "compared without dropout"
        equal = {"verdict": "within", "largest": 0.001, "tolerance": 0.01, "why": why}
        content["rows"][1] |= {"losses": [3.5, 2.5], "equal": equal}
        return content

    def test_a_difference_that_nobody_looked_at_is_not_shown(self, tmp_path: Path) -> None:
        content = self.content()
        content["rows"][1] |= {"reference_losses": [3.5, 2.5]}
        page = page_of(tmp_path, content)
        assert "Difference from baseline" not in page.words
        assert "(graph: compared without dropout.)" in page.words

    def test_the_difference_is_from_what_it_was_compared_with(self, tmp_path: Path) -> None:
        content = self.content()
        content["rows"][1] |= {"reference_losses": [3.5, 2.4975]}
        assert "Difference from baseline" in page_of(tmp_path, content).words


class TestSize:
    def test_large_results_stay_small(self, tmp_path: Path) -> None:
        content = bench_sample(steps=5, losses=20_000)
        for row in content["rows"]:
            row["samples"] *= 50
            for index, span in enumerate(row["timeline"]["spans"]):
                span["name"] = f"{index} void at::native::{'kernel' * 40}"
        text = render(stored(tmp_path, content))
        assert len(text.encode()) < 2_000_000

    def test_a_long_run_stays_small(self, tmp_path: Path) -> None:
        text = render(run_sample(tmp_path / "exp", steps=40_000))
        assert len(text.encode()) < 500_000


# What people and their files may put wherever there is a name.
texts = st.one_of(
    st.just(NASTY),
    st.text(max_size=20),
    st.sampled_from(["<b>", "&amp;", "]]>", "<!--", "--><script>", "\u2028", "'\"", "a" * 5000]),
)


class TestEscaping:
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(name=texts, other=texts)
    def test_no_name_becomes_markup(
        self, name: str, other: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("nasty")
        content = tiny_bench("plain")
        expected = [tag for tag, _ in page_of(folder, content).tags]
        page = page_of(folder, tiny_bench(name, other))
        assert [tag for tag, _ in page.tags] == expected
        for _, found in page.tags:
            assert not [key for key in found if key.startswith("on") or key == "style"]

    def test_the_classic_one(self, tmp_path: Path) -> None:
        text = render(stored(tmp_path, tiny_bench(NASTY, NASTY)))
        assert "<img" not in text
        assert "\u202e" not in text
        assert "\x00" not in text
        text.encode()  # no half of a surrogate pair
        page = Page(text)
        assert "</script><img src=x onerror=alert(1)>'\"&" in page.words
        names = json.loads(page.scripts["tl-data"][0])["names"]
        assert names[0][0].startswith("</script><img")

    def test_tune_and_runs_too(self, tmp_path: Path) -> None:
        content = tune_sample()
        content["trials"][1] |= {"changed": {NASTY: NASTY}, "why": NASTY, "id": NASTY}
        content["sentences"] = [NASTY]
        assert "<img" not in render(stored(tmp_path, content))
        run = run_sample(tmp_path / "exp", steps=80)
        result = json.loads((run / "result.json").read_text())
        result["examples"] = [[NASTY, NASTY, NASTY]]
        (run / "result.json").write_text(json.dumps(result))
        (run / "config.yaml").write_text("src: '<img src=x>'\n'<img>': '</style><script>'\n")
        text = render(run)
        Page(text)
        assert "<img" not in text
        assert text.count("<script>") == 1


def tiny_bench(name: str, other: str = "other") -> dict[str, Any]:
    """A small result with the names wherever names can be."""
    content = bench_sample(("baseline",), steps=1, losses=3)
    row = content["rows"][0]
    row["samples"] = row["samples"][:3]
    row["fields"] = {"streams": 2}
    row["timeline"]["spans"] = [
        {"lane": f"lane {name}", "name": f"{name} k", "kind": "kernel", "start_ns": 0, "end_ns": 9},
    ]
    row["plan"] = f"plan {name}"
    row["streams"][0]["name"] = name or "s"
    row["waits"]["by_reason"] = {f"reason {other}": {"per_step": 1.0, "ms_per_step": 2.0}}
    row["equal"]["why"] = f"why {other}"
    content["work"] |= {"name": f"work {other}", "description": f"description {name}"}
    content["environment"]["command"] = f"headrace bench {name}"
    content["environment"]["cpu"] = f"cpu {other}"
    content["verdict"] |= {"take": f"plan {name}", "sentences": [f"sentence {name}"]}
    content["noise"]["plan"] = other
    return content


class TestDamage:
    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            ("kind", "something", "kind = 'something': expected 'headrace bench'"),
            ("kind", None, "kind is missing: expected 'headrace bench'"),
            ("version", 2, "version = 2: expected 1, which this Headrace reads"),
            ("version", 0, "version = 0: expected 1"),
            ("rows", [], "rows = []: expected at least one plan"),
            ("rows", {}, "rows = {}: expected a list"),
            ("rows.1.plan", None, "rows[1].plan is missing: expected text"),
            ("rows.1.plan", "baseline", "rows[1].plan = 'baseline': expected a name that no"),
            (MEDIAN, "fast", "rows[0].ms_per_step.median = 'fast': expected a number"),
            (MEDIAN, 0, "rows[0].ms_per_step.median = 0.0: expected more than 0 ms"),
            (MEDIAN, True, "rows[0].ms_per_step.median = True: expected a number"),
            ("rows.0.gpu", [], "rows[0].gpu = []: expected a mapping"),
            ("rows.0.losses.3", "x", "rows[0].losses[3] = 'x': expected a number"),
            (
                f"{SPAN}.kind",
                "dream",
                "rows[0].timeline.spans[5].kind = 'dream': expected kernel, copy, wait",
            ),
            (
                f"{SPAN}.end_ns",
                -1,
                "rows[0].timeline.spans[5].end_ns = -1: expected at least start_ns",
            ),
            ("verdict.sentences", [1], "verdict.sentences[0] = 1: expected text"),
            ("rows.0.speedup", 10**400, "rows[0].speedup = 1000"),
        ],
    )
    def test_the_error_names_file_and_field(
        self, tmp_path: Path, path: str, value: object, message: str
    ) -> None:
        content = bench_sample(SMALL, steps=1)
        *parents, last = path.split(".")
        holder: Any = content
        for name in parents:
            holder = holder[int(name) if name.isdigit() else name]
        holder[int(last) if last.isdigit() else last] = value
        file = stored(tmp_path, content)
        with pytest.raises(ReportError) as caught:
            render(file)
        assert str(caught.value).startswith(f"{file}: {message}")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", ":1: is not JSON"),
            (b'{"kind": "headrace bench",\n "rows": [', ":2: is not JSON"),
            (b"\xff\xfe", ": is not UTF-8 text"),
            (b"[1, 2]", ": expected a mapping, found a list"),
            (b'{"a": ' + b"[" * 100_000, ": cannot be read as JSON"),
            (b'{"kind": "headrace bench", "version": 1, "rows": [{"plan": "a", "speedup": NaN}]}',
             ": rows[0].speedup = nan: expected a finite number"),
        ],
    )  # fmt: skip
    def test_files_that_are_none(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "bad.json"
        path.write_bytes(content)
        with pytest.raises(ReportError, match=re.escape(f"{path}{message}")):
            render(path)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data())
    def test_any_damage_is_a_page_or_one_line(
        self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """One value anywhere is replaced by anything that JSON can hold."""
        kind = data.draw(st.sampled_from(["bench", "tune"]))
        content = tiny_bench("x") if kind == "bench" else tune_sample()
        node: Any = content
        path: list[Any] = []
        while isinstance(node, dict | list) and node and (not path or data.draw(st.booleans())):
            keys = sorted(node) if isinstance(node, dict) else range(len(node))
            path.append(data.draw(st.sampled_from(list(keys))))
            node = node[path[-1]]
        holder = content
        for key in path[:-1]:
            holder = holder[key]
        plain = st.none() | st.booleans() | st.integers() | texts | st.floats(-1e308, 1e308)
        holder[path[-1]] = data.draw(
            st.recursive(
                plain,
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner),
                max_leaves=5,
            )
        )
        file = stored(tmp_path_factory.mktemp("damage"), content)
        said = None
        try:
            Page(render(file))
        except ReportError as problem:
            said = str(problem)
        assert said is None or (said.startswith(str(file)) and "\n" not in said)


class TestTune:
    def test_winner_and_trials(self, tmp_path: Path) -> None:
        content = tune_sample()
        page = page_of(tmp_path, content)
        assert "Take graph, prefetch depth 4: 1.05 times as fast as graph" in page.words
        measured = [trial for trial in content["trials"] if trial["runs_ms"]]
        tips = [found.get("data-tip") or "" for found in page.having("bar-row")]
        assert len(tips) == len(measured)
        assert "8.60, 8.61, 8.63" in page.words
        assert "CUDA out of memory: 4 GiB" in page.words
        assert "★ winner" in page.words

    def test_an_unfinished_search_says_so(self, tmp_path: Path) -> None:
        content = tune_sample()
        content["winner"] = None
        content["trials"][1]["status"] = "slower"
        page = page_of(tmp_path, content)
        assert "The search is not finished: this is the best so far." in page.words
        assert "There is no winner yet." in page.words

    def test_nothing_measured(self, tmp_path: Path) -> None:
        content = tune_sample()
        content["trials"] = content["trials"][4:]
        assert "Nothing could be measured" in page_of(tmp_path, content).words


class TestRuns:
    def test_a_finished_run(self, tmp_path: Path) -> None:
        page = Page(render(run_sample(tmp_path / "exp")))
        assert "BLEU 47.0 after 8 epochs, 4,000 updates" in page.words
        assert "我有三本书。" in page.words
        learned = " ".join(f"epoch {n} He has {n} cats." for n in (1, 3, 5, 6, 8))
        assert f"他有两只猫。 reference He has two cats. {learned}" in page.words
        assert "train, recent batches" in page.words
        assert "GPU busy 95 %" in page.words
        assert str(tmp_path / "exp" / "weights" / "best.safetensors") in page.words
        assert len(page.having("line-chart")) == 5 + 6  # two of losses, BLEU, speed, waits; sensors
        assert not page.having("empty")

    def test_a_stopped_run_on_a_cpu(self, tmp_path: Path) -> None:
        run = run_sample(tmp_path / "exp", steps=800, gpu=False, finished=False)
        page = Page(render(run))
        assert "Not finished: 800 updates so far" in page.words
        assert f"headrace train --resume {run}" in page.words
        assert "No profiler window was recorded" in page.words
        assert "By epoch" in page.words

    def test_a_run_that_only_began(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("preset: tiny\n")
        page = Page(render(tmp_path))
        assert "Not begun: nothing measured yet" in page.words
        assert "There are none before the run is finished." in page.words
        assert len(page.having("empty")) == 9

    def test_wrong_lines_are_named(self, tmp_path: Path) -> None:
        run = run_sample(tmp_path / "exp", steps=8)
        (run / "metrics.jsonl").write_text('{"kind": "epoch", "step": 1, "loss": "low"}\n')
        with pytest.raises(ReportError, match=r"metrics.jsonl:1: loss = .*: expected a number"):
            render(run)
        with pytest.raises(RunError, match="is not a run folder"):
            render(tmp_path)
        assert not (tmp_path / "report.html").exists()

    def test_a_real_run_has_its_report(self, tmp_path: Path) -> None:
        from headrace.translation import Trainer, TrainSettings

        trained = Trainer.create(
            TrainSettings(
                preset="tiny", width=16, heads=2, layers=1, inner=32, vocabulary=600, epochs=1,
                max_steps=3, valid_sentences=2, beam=1, device="cpu", tensorboard=False,
            ),
            project=tmp_path, name="real", cache=tmp_path / "cache", quiet=True,
        ).run()  # fmt: skip
        assert trained.scores is not None
        html = trained.folder.report.read_text(encoding="utf-8")
        page = Page(html)
        assert f"BLEU {trained.scores.bleu:.1f} after 1 epoch, 3 updates" in page.words
        assert trained.examples[0][1] in page.words
        assert " Test: none of its 500 pairs shares a sentence with train." in page.words
        assert html.count('<dd dir="auto"') == 3 * 8 + 3 * 3  # 8 examples, 3 samples
        assert "peak memory" not in page.words  # a CPU has none

    def test_a_report_that_cannot_be_made_fails_no_run(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = run_sample(tmp_path / "exp", steps=8)
        (run / "report.html").mkdir()
        try_report(run)
        assert "no report was written" in caplog.text


class TestFiles:
    def test_perfetto_files_load(self, tmp_path: Path) -> None:
        content = bench_sample((*SMALL, "lightning"), steps=1)
        content["rows"][2]["timeline"] = None
        content["rows"][1]["plan"] = "graph/../#2"
        traces = write_perfetto(stored(tmp_path, content), tmp_path / "traces")
        assert [trace.name for trace in traces] == [
            "result.baseline.trace.json",
            "result.graph_.._#2.trace.json",
        ]
        for trace, row in zip(traces, content["rows"], strict=False):
            loaded = json.loads(trace.read_text())
            spans = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
            assert len(spans) == len(row["timeline"]["spans"])
            first = min(row["timeline"]["spans"], key=lambda span: span["start_ns"])
            assert spans[0]["ts"] == first["start_ns"] / 1000

    def test_written_beside_and_renamed(self, tmp_path: Path) -> None:
        source = stored(tmp_path, bench_sample(SMALL, steps=1))
        other = tmp_path / "other.v2"
        other.write_bytes(source.read_bytes())
        assert write_report(source) == tmp_path / "result.html"
        assert write_report(other) == tmp_path / "other.v2.html"
        assert write_report(source, tmp_path / "deep" / "er.html").exists()
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"result.json", "result.html", "other.v2", "other.v2.html", "deep"}

    def test_the_input_is_never_overwritten(self, tmp_path: Path) -> None:
        source = stored(tmp_path, bench_sample(SMALL, steps=1))
        before = source.read_bytes()
        with pytest.raises(ReportError, match="is the result itself"):
            write_report(source, source)
        with pytest.raises(ReportError, match="is a folder"):
            write_report(source, tmp_path)
        assert source.read_bytes() == before

    def test_the_same_input_gives_the_same_bytes(self, tmp_path: Path) -> None:
        source = stored(tmp_path, bench_sample(SMALL, steps=1))
        assert render(source) == render(source)


class TestCommand:
    def run(self, *arguments: object) -> Any:
        return CliRunner().invoke(app, ["report", *map(str, arguments)])

    def test_it_says_where_the_files_are(self, tmp_path: Path) -> None:
        source = stored(tmp_path, bench_sample(SMALL, steps=1))
        done = self.run(source, "--perfetto", tmp_path / "traces")
        assert done.exit_code == 0, done.output
        lines = done.stdout.splitlines()
        assert lines[-1] == str(tmp_path / "result.html")
        assert len(lines) == 3
        assert all(Path(line).exists() for line in lines)

    def test_a_browser_is_opened_when_asked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        monkeypatch.setattr("webbrowser.open", asked.append)
        source = stored(tmp_path, tune_sample())
        assert self.run(source, "--open", "--out", tmp_path / "a.html").exit_code == 0
        assert asked == [(tmp_path / "a.html").as_uri()]

    @pytest.mark.parametrize("name", ["missing.json", "."])
    def test_errors_are_headraces_own(self, tmp_path: Path, name: str) -> None:
        done = self.run(tmp_path / name)
        assert isinstance(done.exception, HeadraceError)
        assert str(tmp_path) in str(done.exception)

    def test_a_run_has_no_timelines_to_give(self, tmp_path: Path) -> None:
        run = run_sample(tmp_path / "exp", steps=8)
        done = self.run(run, "--perfetto", tmp_path / "traces")
        assert isinstance(done.exception, ReportError)


def test_samples_are_not_changed_by_rendering(tmp_path: Path) -> None:
    content = bench_sample(SMALL, steps=1)
    before = copy.deepcopy(content)
    page_of(tmp_path, content)
    assert content == before
