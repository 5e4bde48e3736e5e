({ // What look.py asks of a page: each function lists what is wrong with it.
  // Everything that is drawn has a size, paths something in them, labels their own place.
  drawn() {
    const wrong = [];
    const all = (selector, inside = document) =>
      [...inside.querySelectorAll(selector)].filter((node) => node.checkVisibility());
    for (const svg of all("svg.bar, svg.tl-plot, svg.axis, .meter svg")) {
      const { width, height } = svg.getBoundingClientRect();
      if (!(width > 5 && height > 5))
        wrong.push(`${svg.getAttribute("class")} is ${width} × ${height}`);
    }
    for (const frame of all(".line-frame")) {
      const canvas = frame.querySelector("canvas") ?? { width: 0, height: 0 };
      const { width, height } = canvas;
      const copy = new OffscreenCanvas(width || 1, height || 1).getContext("2d", { willReadFrequently: true });
      if (width && height) copy.drawImage(canvas, 0, 0);
      if (!copy.getImageData(0, 0, width || 1, height || 1).data.some((value) => value > 0))
        wrong.push("an empty line chart");
    }
    for (const path of document.querySelectorAll("svg.tl-plot path"))
      if ((path.getAttribute("d") || "").length < 4) wrong.push("an empty path");
    for (const rect of all("svg.bar rect"))
      if (!(rect.getBoundingClientRect().width > 0)) wrong.push("a bar without length");
    for (const axis of all(".tl-axis, .axis")) {
      const boxes = all("text", axis).map((text) => text.getBoundingClientRect());
      if (boxes.some((box, index) => index && box.left < boxes[index - 1].right))
        wrong.push(`labels of an axis lie over each other (${axis.textContent})`);
    }
    return wrong;
  },

  // WCAG contrast of every piece of text against what lies behind it.
  contrast() {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const parse = (color) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const weights = [0.2126, 0.7152, 0.0722];
    const light = (color) =>
      weights
        .map((weight, index) => [weight, color[index] / 255])
        .map(([weight, v]) => weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part) => sum + part, 0);
    const behind = (node) => {
      for (; node; node = node.parentElement) {
        const color = parse(getComputedStyle(node).backgroundColor);
        if (color[3] > 250) return color;
      }
      return [255, 255, 255, 255];
    };
    const wrong = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || node.closest("script, style")) continue;
      if (!node.checkVisibility()) continue;
      const style = getComputedStyle(node);
      const front = parse(node instanceof SVGElement ? style.fill : style.color);
      const [more, less] = [light(front), light(behind(node))].sort((a, b) => b - a);
      const ratio = (more + 0.05) / (less + 0.05);
      const size = parseFloat(style.fontSize);
      const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
      const name = `${node.tagName}.${node.className.baseVal ?? node.className}`;
      if (ratio < least) wrong.set(name, `${name} has a contrast of ${ratio.toFixed(2)}`);
    }
    return [...wrong.values()];
  },

  // What a screen reader needs: one h1, no level left out, names, landmarks, no id twice.
  structure() {
    const wrong = [];
    const levels = [...document.querySelectorAll("h1,h2,h3,h4,h5,h6")].map((h) => +h.tagName[1]);
    if (levels.filter((level) => level === 1).length !== 1) wrong.push("not one h1");
    levels.forEach((level, index) => {
      if (index && level > levels[index - 1] + 1) wrong.push(`h${level} after h${levels[index - 1]}`);
    });
    const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
    for (const id of new Set(ids))
      if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(`id ${id} is there twice`);
    const named = "button, a, nav, [role=img], [role=application], [role=region], [role=list]";
    for (const node of document.querySelectorAll(named))
      if (!(node.getAttribute("aria-label") || node.textContent).trim())
        wrong.push(`${node.tagName} without a name`);
    for (const node of document.querySelectorAll("svg"))
      if (!node.closest("[aria-hidden=true], [role=img], [role=application]"))
        wrong.push("an svg that is neither named nor hidden");
    for (const link of document.querySelectorAll('a[href^="#"]'))
      if (!document.getElementById(link.hash.slice(1))) wrong.push(`${link.hash} leads nowhere`);
    for (const landmark of ["header", "nav", "main", "footer"])
      if (!document.querySelector(landmark)) wrong.push(`no ${landmark}`);
    return wrong;
  },
})
