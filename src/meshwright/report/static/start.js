// Start: theme first, then tabs, then the canvases as they come into view.
"use strict";

(() => {
  Meshwright.theme.start();
  const canDecode = typeof DecompressionStream === "function";
  if (!canDecode) document.querySelectorAll("[data-needs-decompression]").forEach((note) => { note.hidden = false; });

  function timeline(root) {
    if (root.dataset.ready || !canDecode) return;
    root.dataset.ready = "yes";
    Meshwright.Spans.load(root.dataset.timeline).then((spans) => { root.meshwright = new Meshwright.Timeline(root, spans); });
  }

  const seen = new IntersectionObserver((entries) => {
    entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
      seen.unobserve(entry.target);
      timeline(entry.target);
    });
  }, { rootMargin: "600px" });
  document.querySelectorAll("[data-timeline]").forEach((root) => seen.observe(root));

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
