// Start: theme first, then the canvases, then tabs.
"use strict";

(() => {
  Meshwright.theme.start();
  const canDecode = typeof DecompressionStream === "function";
  if (!canDecode) document.querySelectorAll("[data-needs-decompression]").forEach((note) => { note.hidden = false; });

  if (canDecode) {
    document.querySelectorAll("[data-timeline]").forEach(async (root) => {
      root.meshwright = new Meshwright.Timeline(root, await Meshwright.Spans.load(root.dataset.timeline));
    });
  }

  const memory = document.querySelector("[data-memory]");
  if (memory && canDecode) Meshwright.Memory.load(memory);

  // Tabs as the ARIA practices ask: arrows move and select, one tab stop.
  document.querySelectorAll('[role="tablist"]').forEach((list) => {
    const tabs = [...list.querySelectorAll('[role="tab"]')];
    const select = (chosen) => {
      for (const tab of tabs) {
        const on = tab === chosen;
        tab.setAttribute("aria-selected", String(on));
        tab.tabIndex = on ? 0 : -1;
        document.getElementById(tab.getAttribute("aria-controls")).hidden = !on;
      }
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
  });
})();
