// Line charts, drawn by uPlot. Pointer and arrow keys read values, dragging and + − zoom.
{
  const STRAND_PX = 14;
  const DASHES = { 1: [9, 3], 3: [3, 3], 5: [12, 3, 3, 3], 7: [6, 6], 9: [2, 4] };
  const root = getComputedStyle(document.documentElement); // live: follows the theme
  const color = (name) => root.getPropertyValue(`--${name}`).trim();

  // --- numbers as the tables write them -----------------------------------------------------------
  const rounded = (value, digits) =>
    value && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e15)
      ? value.toExponential(Math.min(2, digits))
      : value.toLocaleString("en", { maximumSignificantDigits: digits });
  const bytes = (value, digits) => {
    const power = Math.max(0, Math.min(4, Math.floor(Math.log10(Math.abs(value) || 1) / 3)));
    return `${rounded(value / 1000 ** power, digits)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
  };
  const clock = (value, digits) => {
    if (value < 60) return value ? `${rounded(value, digits)} s` : "0";
    const [hours, minutes, seconds] = [value / 3600, (value / 60) % 60, value % 60].map(Math.floor);
    const two = (part) => String(part).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(seconds)}` : `${minutes}:${two(seconds)}`;
  };
  const FORMATS = {
    number: rounded,
    share: (value, digits) => `${rounded(value * 100, digits)} %`,
    watts: (value, digits) => `${rounded(value, digits)} W`,
    bytes,
    clock,
  };
  // Distances between ticks. uPlot's own list ends at 1e15; losses that diverge go up to 1e38.
  function tickSteps(range, isWhole) {
    const power = range > 0 ? Math.floor(Math.log10(range)) : 0;
    const steps = [];
    for (let at = power - 4; at <= power + 1; at++)
      for (const nice of [1, 2, 2.5, 5]) steps.push(Number(`${nice}e${at}`));
    return isWhole ? steps.filter(Number.isInteger) : steps;
  }
  const clockSteps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800]
    .concat([1, 2, 3, 6, 12, 24, 48, 120, 240].map((hours) => hours * 3600));

  // --- one chart ----------------------------------------------------------------------------------
  const groups = new Map(); // charts that share cursor and zoom
  const charts = [];
  let active = null; // the chart under the pointer or with the focus

  function axis(spec, side, small) {
    const isX = side === 2;
    return {
      side,
      stroke: () => color("muted"),
      font: `${small ? 11 : 12}px ${getComputedStyle(document.body).fontFamily}`,
      grid: { show: !isX, stroke: () => color("rule"), width: 1 },
      ticks: { show: false },
      border: { show: true, stroke: () => color("rule"), width: 1 },
      gap: 4,
      size: isX ? 20 : (_, values) => 12 + 7 * Math.max(3, ...(values || []).map((text) => text.length)),
      space: isX ? (small ? 60 : 90) : small ? 17 : 45,
      incrs: (_, __, low, high) =>
        spec.format === "clock" ? clockSteps : tickSteps(high - low, isX),
      values: (_, splits) => splits.map((value) => FORMATS[spec.format](value, 6)),
    };
  }

  function series(line) {
    const stroke = () => color(`c${line.look}`);
    const [, count] = line.strand || [0, 1];
    const dash = line.strand ? [STRAND_PX, STRAND_PX * (count - 1)] : DASHES[line.look];
    return {
      label: line.name,
      stroke,
      width: line.width,
      dash: dash && dash.map((length) => length * devicePixelRatio),
      fill: line.area ? () => `${stroke()}38` : undefined,
      points: {
        show: line.dots || line.x.length === 1,
        size: 7, width: 2, stroke, fill: () => color("card"),
      },
    };
  }

  // The index nearest to `at` where the line has a value: lines need not share their places.
  function nearest(values, at) {
    for (let away = 0; away < values.length; away++) {
      if (values[at - away] != null) return at - away;
      if (values[at + away] != null) return at + away;
    }
    return at;
  }

  function span(spec, low, high, room) {
    if (!(high > low)) {
      const around = Math.abs(low) * 0.05 || 0.5;
      [low, high] = [low - around, low + around];
    }
    const margin = (high - low) * room;
    return [spec.low ?? low - margin, spec.high ?? high + margin];
  }

  function make(box) {
    const spec = JSON.parse(box.querySelector(".line-data").textContent);
    const frame = box.querySelector(".line-frame");
    const small = box.classList.contains("small");
    const lines = spec.lines.filter((line) => line.x.length);
    if (!lines.length) return;
    const data = uPlot.join(lines.map((line) => [line.x, line.y]));
    const whole = span(spec.x, data[0][0], data[0].at(-1), 0);
    const dashOffset = (u, index) => {
      const [which] = lines[index]?.strand || [0];
      u.ctx.lineDashOffset = -STRAND_PX * which * devicePixelRatio;
    };
    const plot = new uPlot(
      {
        width: frame.clientWidth,
        height: frame.clientHeight,
        padding: [10, small ? 16 : 24, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false },
          y: { range: (_, low, high) => (low == null ? [0, 1] : span(spec.y, low, high, 0.06)) },
        },
        axes: [axis(spec.x, 2, small), axis(spec.y, 3, small)],
        series: [{}, ...lines.map(series)],
        cursor: {
          y: false,
          drag: { x: true, y: false, setScale: false },
          dataIdx: (u, index, at) => nearest(u.data[index], at),
          points: { size: 8, width: 2, stroke: (u, index) => color(`c${lines[index - 1].look}`), fill: () => color("card") },
          bind: { dblclick: () => () => zoom(chart, ...whole) },
          ...(spec.sync && {
            sync: { key: spec.sync, scales: ["x", null], filters: { pub: (type) => /move|leave/.test(type) } },
          }),
        },
        hooks: {
          drawAxes: [(u) => dashOffset(u, 0)],
          drawSeries: [(u, index) => dashOffset(u, index)], // for the next one; series 0 is x
          setSelect: [(u) => {
            const { left, width } = u.select;
            if (width > 4) zoom(chart, u.posToVal(left, "x"), u.posToVal(left + width, "x"));
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          }],
          setCursor: [() => chart && showValues(chart)],
        },
      },
      data,
      frame,
    );
    const chart = { box, frame, plot, spec, lines, whole, group: spec.sync || box };
    charts.push(chart);
    groups.set(chart.group, [...(groups.get(chart.group) || []), chart]);
    plot.setScale("x", { min: whole[0], max: whole[1] });
    listen(chart);
  }

  function showValues({ plot, spec, lines }) {
    if (active?.plot !== plot) return;
    const { idx, left } = plot.cursor;
    if (idx == null || left < 0) return hideTip();
    const x = plot.data[0][idx];
    const values = lines.slice(0, 14).map((line, index) => {
      const value = plot.data[index + 1][plot.cursor.idxs[index + 1] ?? idx];
      return `${line.name}: ${value == null ? "–" : FORMATS[spec.y.format](value, 4)}`;
    });
    const where = spec.x.format === "clock" ? `at ${clock(x, 4)}` : `${spec.x.label} ${rounded(x, 9)}`;
    const place = plot.over.getBoundingClientRect();
    showTip(`${where}\n${values.join("\n")}`, place.left + left, place.top + 30);
  }

  // --- zoom: one window for all charts of a group --------------------------------------------------
  function zoom(chart, low, high) {
    const [first, last] = chart.whole;
    const size = Math.max((last - first) / 1e4, Math.min(last - first, high - low));
    const min = Math.max(first, Math.min(last - size, low));
    const isWhole = size >= (last - first) * 0.999;
    for (const { plot, box, whole } of groups.get(chart.group)) {
      plot.setScale("x", isWhole ? { min: whole[0], max: whole[1] } : { min, max: min + size });
      const button = box.querySelector(".line-reset");
      if (button) button.hidden = isWhole;
    }
  }

  function zoomBy(chart, factor) {
    const { min, max } = chart.plot.scales.x;
    const { left } = chart.plot.cursor;
    const around = left >= 0 ? chart.plot.posToVal(left, "x") : (min + max) / 2;
    zoom(chart, around - (around - min) * factor, around + (max - around) * factor);
  }

  // --- keys ---------------------------------------------------------------------------------------
  function choose({ plot }, index) {
    const { min, max } = plot.scales.x;
    const places = plot.data[0];
    const first = Math.max(0, places.findIndex((x) => x >= min));
    const last = places.findLastIndex((x) => x <= max);
    const chosen = Math.max(first, Math.min(last, index));
    plot.setCursor({ left: plot.valToPos(places[chosen], "x"), top: 0 });
  }

  function onKey(chart, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const count = chart.plot.data[0].length;
    const at = chart.plot.cursor.left >= 0 ? chart.plot.cursor.idx : null;
    const leap = Math.max(1, Math.round(count / 10));
    const keys = {
      ArrowRight: () => choose(chart, at == null ? 0 : at + 1),
      ArrowLeft: () => choose(chart, at == null ? count - 1 : at - 1),
      PageDown: () => choose(chart, (at ?? 0) + leap),
      PageUp: () => choose(chart, (at ?? count) - leap),
      Home: () => choose(chart, 0),
      End: () => choose(chart, count - 1),
      "+": () => zoomBy(chart, 0.5),
      "=": () => zoomBy(chart, 0.5),
      "-": () => zoomBy(chart, 2),
      0: () => zoom(chart, ...chart.whole),
      Escape: () => leave(chart),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  function leave({ plot }) {
    plot.setCursor({ left: -10, top: -10 });
    hideTip();
  }

  function listen(chart) {
    const { frame, box } = chart;
    frame.tabIndex = 0;
    frame.setAttribute("role", "application");
    frame.setAttribute("aria-roledescription", "chart");
    const label = frame.getAttribute("aria-label");
    frame.setAttribute("aria-label", `${label} Arrow keys read values, plus and minus zoom, 0 shows all.`);
    frame.addEventListener("pointerenter", () => (active = chart));
    frame.addEventListener("focus", () => (active = chart));
    frame.addEventListener("pointerleave", hideTip);
    frame.addEventListener("blur", () => leave(chart));
    frame.addEventListener("keydown", (event) => onKey(chart, event));
    box.querySelector(".line-reset")?.addEventListener("click", () => zoom(chart, ...chart.whole));
    new ResizeObserver(() => {
      chart.plot.setSize({ width: frame.clientWidth, height: frame.clientHeight });
    }).observe(frame);
  }

  document.querySelectorAll(".line-chart").forEach(make);
  const redraw = () => charts.forEach(({ plot }) => plot.redraw(false));
  document.addEventListener("themechange", redraw);
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", redraw);
}
