"use strict";
// Theme switch, tips of bars, copying, printing. All text and tables are there without it. Text from
// a result is only ever set as textContent.

const tip = document.querySelector(".tip");
document.documentElement.classList.add("js");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8));
  const above = y - box.height - 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : Math.min(y + 18, innerHeight - box.height - 8)}px`;
}

function hideTip() {
  tip.hidden = true;
}

// --- theme: the system's, until the button is pressed --------------------------------------------
{
  const button = document.querySelector("button.theme");
  const root = document.documentElement;
  const stored = () => {
    try {
      return localStorage.getItem("headrace-theme");
    } catch {
      return null; // browsers may refuse storage to a page that was opened from a file
    }
  };
  const dark = () =>
    root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
  const label = () => {
    button.textContent = dark() ? "Light theme" : "Dark theme";
  };
  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  button.hidden = false;
  label();
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("headrace-theme", root.dataset.theme);
    } catch {
      // not stored: the choice lasts until the page is closed
    }
    label();
    document.dispatchEvent(new Event("themechange"));
  });
}

// --- tips of bars: Tab goes to a chart, arrow keys to its bars -----------------------------------
for (const group of document.querySelectorAll(".marks")) {
  const marks = [...group.querySelectorAll(".mark")];
  marks.forEach((mark, index) => {
    mark.tabIndex = index ? -1 : 0;
    mark.addEventListener("mousemove", (event) => showTip(mark.dataset.tip, event.clientX, event.clientY));
    mark.addEventListener("mouseleave", hideTip);
    mark.addEventListener("focus", () => {
      const box = mark.querySelector("svg").getBoundingClientRect();
      showTip(mark.dataset.tip, box.left, box.top);
    });
    mark.addEventListener("blur", hideTip);
    mark.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hideTip();
      const to = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: marks.length - 1 }[event.key];
      if (to === undefined || !marks[to]) return;
      event.preventDefault();
      mark.tabIndex = -1;
      marks[to].tabIndex = 0;
      marks[to].focus();
    });
  });
}

// --- copying a command --------------------------------------------------------------------------
for (const button of document.querySelectorAll("button.copy")) {
  if (!navigator.clipboard) break;
  button.hidden = false;
  button.addEventListener("click", async () => {
    const text = button.parentElement.querySelector("code").textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
  });
}

// --- printing opens all tables ------------------------------------------------------------------
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) {
    part.open = true;
    part.dataset.printed = "";
  }
});
addEventListener("afterprint", () => {
  for (const part of document.querySelectorAll("details[data-printed]")) {
    part.open = false;
    delete part.dataset.printed;
  }
});
