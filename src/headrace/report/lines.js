// Line charts: the values at one place, under the pointer or by arrow keys.
for (const chart of document.querySelectorAll(".line-chart")) {
  const data = JSON.parse(chart.querySelector(".line-data").textContent);
  const plot = chart.querySelector("svg.plot");
  const frame = chart.querySelector(".plot-frame");
  const [low, high, unit] = data.x;
  const places = [...new Set(data.lines.flatMap((line) => line.p.map((point) => point[0])))].sort((a, b) => a - b);
  if (!places.length) continue;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y2", "100%");
  let chosen = -1;

  const nearest = (points, x) => {
    let best = points[0];
    for (const point of points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
    return best;
  };
  const choose = (index) => {
    chosen = Math.max(0, Math.min(places.length - 1, index));
    const x = places[chosen];
    const share = (x - low) / (high - low || 1);
    cursor.setAttribute("x1", `${share * 100}%`);
    cursor.setAttribute("x2", `${share * 100}%`);
    plot.append(cursor);
    const values = data.lines
      .filter((line) => line.p.length)
      .map((line) => `${line.n}: ${nearest(line.p, x)[2]}`)
      .slice(0, 14);
    const box = frame.getBoundingClientRect();
    const at = unit === "time" ? `at ${x.toPrecision(4)} s` : `${unit} ${x.toLocaleString("en")}`;
    showTip(`${at}\n${values.join("\n")}`, box.left + share * box.width, box.top + 30);
  };
  const leave = () => {
    cursor.remove();
    hideTip();
  };
  const place = (clientX) => {
    const box = frame.getBoundingClientRect();
    const x = low + ((clientX - box.left) / box.width) * (high - low);
    let best = 0;
    places.forEach((at, index) => {
      if (Math.abs(at - x) < Math.abs(places[best] - x)) best = index;
    });
    return best;
  };
  frame.tabIndex = 0;
  frame.setAttribute("role", "application");
  frame.setAttribute("aria-roledescription", "chart");
  frame.setAttribute("aria-label", `${plot.getAttribute("aria-label")} Arrow keys read values.`);
  frame.addEventListener("pointermove", (event) => choose(place(event.clientX)));
  frame.addEventListener("pointerleave", leave);
  frame.addEventListener("blur", leave);
  frame.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const leap = Math.max(1, Math.round(places.length / 10));
    const to = {
      ArrowRight: chosen + 1,
      ArrowLeft: chosen < 0 ? places.length - 1 : chosen - 1,
      PageDown: chosen + leap,
      PageUp: chosen - leap,
      Home: 0,
      End: places.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
  });
}
