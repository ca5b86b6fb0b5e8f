// Panels: brings the canvases and tabs below an element to life.
"use strict";

Meshwright.enliven = (root) => {
  const canDecode = typeof DecompressionStream === "function";
  if (!canDecode) root.querySelectorAll("[data-needs-decompression]").forEach((note) => { note.hidden = false; });

  if (canDecode) {
    root.querySelectorAll("[data-timeline]").forEach(async (figure) => {
      figure.meshwright = new Meshwright.Timeline(figure, await Meshwright.Spans.load(figure.dataset.timeline));
    });
  }

  const memory = root.querySelector("[data-memory]");
  if (memory && canDecode) Meshwright.Memory.load(memory);
  root.querySelectorAll('[role="tablist"]').forEach((list) => Meshwright.tabs(list));
};

// Tabs as the ARIA practices ask: arrows move and select, one tab stop. `chosen` is told which tab was selected.
Meshwright.tabs = (list, chosen = () => {}) => {
  const tabs = [...list.querySelectorAll('[role="tab"]')];
  const select = (wanted) => {
    for (const tab of tabs) {
      const on = tab === wanted;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !on;
    }
    chosen(wanted);
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = tabs[(to + tabs.length) % tabs.length];
      next.focus();
      select(next);
    });
  });
  return select;
};
