// Timelines: zoom, drag, keys and tips. All plans show the same stretch of time, so that their lengths
// compare at every zoom.
for (const group of document.querySelectorAll(".timelines")) {
  const SVG = "http://www.w3.org/2000/svg";
  const KINDS = ["kernel", "copy", "wait", "host"];
  const length = Number(group.dataset.length); // in 0.1 µs, as all times in this file
  const view = { from: 0, to: length };
  const shortest = Math.min(length, 20);
  const tools = group.querySelector(".tl-tools");
  const windowText = group.querySelector(".tl-window");
  const charts = [...group.querySelectorAll(".timeline")].map(unpack);
  let isScheduled = false;

  const time = (ticks) => {
    const us = ticks / 10;
    return us >= 1000 ? `${(us / 1000).toFixed(us >= 1e5 ? 1 : 2)} ms` : `${us.toFixed(1)} µs`;
  };

  function unpack(figure) {
    const data = JSON.parse(figure.querySelector(".tl-data").textContent);
    const lanes = data.lanes.map((lane, index) => {
      const spans = [];
      let start = 0;
      for (let at = 0; at < lane.spans.length; at += 3) {
        start += lane.spans[at];
        const [name, kind] = data.names[lane.spans[at + 2]];
        spans.push({ start, end: start + lane.spans[at + 1], name, kind });
      }
      return { name: lane.lane, spans, plot: figure.querySelectorAll(".tl-plot")[index] };
    });
    const end = Math.max(...lanes.flatMap((lane) => lane.spans.map((span) => span.end)), 0);
    return {
      figure, lanes, end,
      box: figure.querySelector(".tl-lanes"),
      axis: figure.querySelector(".tl-axis"),
      detail: figure.querySelector(".tl-detail"),
      at: { lane: 0, span: -1 },
    };
  }

  // --- drawing ---------------------------------------------------------------------------------
  function draw() {
    isScheduled = false;
    for (const chart of charts) {
      const bins = Math.max(60, Math.round(chart.lanes[0].plot.getBoundingClientRect().width));
      for (const lane of chart.lanes) drawLane(chart, lane, bins);
      drawAxis(chart);
    }
    const all = view.from === 0 && view.to === length;
    windowText.textContent = all
      ? `All of it: ${time(length)}`
      : `${time(view.from)} to ${time(view.to)} (${time(view.to - view.from)})`;
  }

  function scheduleDraw() {
    if (!isScheduled) requestAnimationFrame(draw);
    isScheduled = true;
  }

  function drawLane(chart, lane, bins) {
    const width = (view.to - view.from) / bins;
    const base = new Float32Array(bins);
    const parts = [];
    KINDS.forEach((kind, number) => {
      const level = new Float32Array(bins);
      let any = false;
      for (const span of lane.spans) {
        if (span.kind !== number || span.end < view.from || span.start > view.to) continue;
        any = true;
        const start = (span.start - view.from) / width;
        const end = (span.end - view.from) / width;
        const last = Math.min(bins - 1, Math.floor(end));
        for (let bin = Math.max(0, Math.floor(start)); bin <= last; bin++)
          level[bin] += Math.max(0, Math.min(bin + 1, end) - Math.max(bin, start));
      }
      if (any) parts.push([kind, stepped(base, level, bins)]);
    });
    lane.plot.setAttribute("viewBox", `0 0 ${bins} 100`);
    const end = ((chart.end - view.from) / (view.to - view.from)) * bins;
    lane.plot.replaceChildren(
      element("rect", { width: Math.max(0, Math.min(bins, end)), height: 100, class: "track" }),
      ...parts.map(([kind, d]) => element("path", { d, class: `fill ${kind}`, "data-kind": kind })),
    );
    if (end > 0 && end < bins - 1)
      lane.plot.append(element("line", { x1: end, x2: end, y1: 0, y2: 100, class: "tl-end" }));
    const chosen = chart.lanes[chart.at.lane] === lane && lane.spans[chart.at.span];
    if (chosen) {
      const x = (chosen.start - view.from) / width;
      const wide = Math.max(1, (chosen.end - chosen.start) / width);
      lane.plot.append(element("rect", { x, y: 2, width: wide, height: 96, class: "tl-chosen" }));
    }
  }

  function stepped(base, level, bins) {
    const parts = [];
    let at = 0;
    while (at < bins) {
      const low = Math.round(100 * base[at]);
      const high = Math.round(100 * Math.min(1, base[at] + level[at]));
      let end = at;
      let any = false;
      do {
        any = any || level[end] > 0;
        base[end] = Math.min(1, base[end] + level[end]);
        end++;
      } while (
        end < bins &&
        level[end] > 0 === any &&
        Math.round(100 * base[end]) === low &&
        Math.round(100 * Math.min(1, base[end] + level[end])) === high
      );
      if (any) parts.push(`M${at} ${100 - Math.max(high, low + 2)}H${end}V${100 - low}H${at}Z`);
      at = end;
    }
    return parts.join("");
  }

  function element(name, attributes) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  function drawAxis(chart) {
    const about = chart.axis.getBoundingClientRect().width / 110;
    const rough = (view.to - view.from) / Math.max(1, about);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((nice) => nice * power).find((nice) => nice >= rough);
    const labels = [];
    for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
      const share = (at - view.from) / (view.to - view.from);
      const anchor = share < 0.03 ? "start" : share > 0.96 ? "end" : "middle";
      const label = element("text", { x: `${share * 100}%`, y: 14, "text-anchor": anchor });
      const us = at / 10;
      label.textContent = at === 0 ? "0" : step >= 10000 ? `${+(us / 1000).toFixed(3)} ms` : step >= 10 ? `${+(us / 1000).toFixed(3)} ms` : `${+us.toFixed(1)} µs`;
      labels.push(label);
    }
    chart.axis.replaceChildren(...labels);
  }

  // --- zoom and pan ----------------------------------------------------------------------------
  function zoom(factor, around = (view.from + view.to) / 2) {
    const size = Math.min(length, Math.max(shortest, (view.to - view.from) * factor));
    const share = (around - view.from) / (view.to - view.from);
    moveTo(around - size * share, size);
  }

  function moveTo(from, size = view.to - view.from) {
    view.from = Math.max(0, Math.min(length - size, from));
    view.to = view.from + size;
    scheduleDraw();
  }

  function pan(share) {
    moveTo(view.from + share * (view.to - view.from));
  }

  const actions = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => pan(-0.3),
    right: () => pan(0.3),
    all: () => moveTo(0, length),
  };

  // --- spans under the pointer and by key ------------------------------------------------------
  const placeOf = (chart, event) => {
    const box = chart.lanes[0].plot.getBoundingClientRect();
    return view.from + ((event.clientX - box.left) / box.width) * (view.to - view.from);
  };

  function laneAt(chart, y) {
    return chart.lanes.find((lane) => {
      const box = lane.plot.getBoundingClientRect();
      return y >= box.top - 2 && y <= box.bottom + 2;
    });
  }

  function described(lane, span) {
    return `${span.name}\n${KINDS[span.kind]} on ${lane.name}: ${time(span.end - span.start)}, from ${time(span.start)}`;
  }

  function under(chart, lane, at) {
    const reach = (view.to - view.from) / lane.plot.getBoundingClientRect().width;
    const near = lane.spans.filter((span) => span.end >= at - reach && span.start <= at + reach);
    if (!near.length) return `${lane.name}: nothing at ${time(at)}`;
    const longest = near.reduce((best, span) => (span.end - span.start > best.end - best.start ? span : best));
    if (near.length === 1) return described(lane, longest);
    return `${near.length} here, the longest:\n${described(lane, longest)}`;
  }

  function choose(chart, laneIndex, spanIndex) {
    const lane = chart.lanes[laneIndex];
    const span = lane.spans[spanIndex];
    if (!span) return;
    chart.at = { lane: laneIndex, span: spanIndex };
    const size = view.to - view.from;
    if (span.start < view.from || span.end > view.to) moveTo(span.start - size / 3);
    chart.detail.textContent = `${described(lane, span).replace("\n", ": ")} (${spanIndex + 1} of ${lane.spans.length})`;
    scheduleDraw();
  }

  function step(chart, by) {
    const spans = chart.lanes[chart.at.lane].spans;
    const first = spans.findIndex((span) => span.end >= view.from);
    const from = chart.at.span < 0 ? first - (by > 0 ? 1 : 0) : chart.at.span;
    choose(chart, chart.at.lane, Math.max(0, Math.min(spans.length - 1, from + by)));
  }

  function changeLane(chart, by) {
    const to = Math.max(0, Math.min(chart.lanes.length - 1, chart.at.lane + by));
    const before = chart.lanes[chart.at.lane].spans[chart.at.span];
    const spans = chart.lanes[to].spans;
    const near = before ? spans.findIndex((span) => span.end >= before.start) : 0;
    choose(chart, to, near < 0 ? spans.length - 1 : near);
  }

  function onKey(chart, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      "+": actions.in, "=": actions.in, "-": actions.out, "0": actions.all,
      ArrowRight: () => (event.shiftKey ? actions.right() : step(chart, 1)),
      ArrowLeft: () => (event.shiftKey ? actions.left() : step(chart, -1)),
      ArrowDown: () => changeLane(chart, 1),
      ArrowUp: () => changeLane(chart, -1),
      Home: () => choose(chart, chart.at.lane, 0),
      End: () => choose(chart, chart.at.lane, chart.lanes[chart.at.lane].spans.length - 1),
      Escape: hideTip,
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  // --- pointers: hover, drag, pinch ------------------------------------------------------------
  function listen(chart) {
    const { box } = chart;
    const down = new Map();
    box.tabIndex = 0;
    box.setAttribute("role", "application");
    box.setAttribute("aria-roledescription", "timeline");
    box.setAttribute(
      "aria-label",
      `${box.getAttribute("aria-label")}. Left and right go from span to span, up and down change lanes, plus and minus zoom, shift and arrows move, 0 shows all.`,
    );
    box.addEventListener("keydown", (event) => onKey(chart, event));
    box.addEventListener("blur", hideTip);
    box.addEventListener("pointerdown", (event) => {
      down.set(event.pointerId, event);
      box.setPointerCapture(event.pointerId);
    });
    const up = (event) => down.delete(event.pointerId);
    box.addEventListener("pointerup", up);
    box.addEventListener("pointercancel", up);
    box.addEventListener("pointerleave", hideTip);
    box.addEventListener("pointermove", (event) => {
      const before = down.get(event.pointerId);
      if (!before) {
        const lane = laneAt(chart, event.clientY);
        if (!lane) return hideTip();
        return showTip(under(chart, lane, placeOf(chart, event)), event.clientX, event.clientY);
      }
      hideTip();
      const wide = chart.lanes[0].plot.getBoundingClientRect().width;
      const other = [...down.values()].find((one) => one.pointerId !== event.pointerId);
      if (other) {
        const apart = Math.abs(event.clientX - other.clientX);
        const apartBefore = Math.abs(before.clientX - other.clientX);
        if (apart > 8 && apartBefore > 8) zoom(apartBefore / apart, placeOf(chart, other));
      } else pan((before.clientX - event.clientX) / wide);
      down.set(event.pointerId, event);
    });
    // The wheel scrolls the page until a timeline is clicked, or Ctrl is held.
    box.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey && document.activeElement !== box) return;
        event.preventDefault();
        if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
          return pan((event.deltaX || event.deltaY) / 600);
        zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) / 250), placeOf(chart, event));
      },
      { passive: false },
    );
  }

  // --- a file for ui.perfetto.dev ---------------------------------------------------------------
  function save(chart) {
    const events = chart.lanes.flatMap((lane, tid) => [
      { ph: "M", pid: 0, tid, name: "thread_name", args: { name: lane.name } },
      ...lane.spans.map((span) => ({
        ph: "X", pid: 0, tid, name: span.name, cat: KINDS[span.kind],
        ts: span.start / 10, dur: (span.end - span.start) / 10,
      })),
    ]);
    const text = JSON.stringify({ traceEvents: events, displayTimeUnit: "ms" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = `${chart.figure.dataset.plan}.trace.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  for (const chart of charts) {
    const button = chart.figure.querySelector(".tl-save");
    button.hidden = false;
    button.addEventListener("click", () => save(chart));
  }
  tools.hidden = false;
  for (const button of tools.querySelectorAll("button"))
    button.addEventListener("click", () => actions[button.dataset.zoom]());
  charts.forEach(listen);
  new ResizeObserver(scheduleDraw).observe(group);
  scheduleDraw();
}
