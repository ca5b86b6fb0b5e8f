// Tabs: the sections of the report about the answer that is shown, each asked for when it is looked at.
"use strict";

Meshwright.Panels = class {
  constructor(root, looked) {
    this.root = root;
    this.shown = "time";
    this.asked = {};
    this.select = Meshwright.tabs(root.querySelector('[data-part="tabs"]'), (tab) => {
      this.shown = tab.dataset.tab;
      tab.scrollIntoView({ block: "nearest", inline: "nearest" });
      looked(this.shown);
    });
  }

  panel(name) { return this.root.querySelector(`[data-panel="${name}"]`); }

  // Asks for the section in view, unless it is there already.
  async refresh(asked) {
    const name = this.shown, key = JSON.stringify(asked), panel = this.panel(name);
    if (!["time", "memory", "step", "layers", "basis"].includes(name) || this.asked[name] === key) return;
    const late = setTimeout(() => panel.classList.add("is-waiting"), 150);
    const found = await Meshwright.ask.ask("panel", { asked, panel: name });
    clearTimeout(late);
    if (!found) return;
    panel.classList.remove("is-waiting");
    if (!found.answer) { this.refuse(panel, found.errors); return; }
    this.asked[name] = key;
    this.draw(panel, found.answer.html);
  }

  // What was unfolded stays so, and the page does not move while the old section makes way for the new one.
  draw(panel, html) {
    const open = new Set([...panel.querySelectorAll("details[open] > summary")].map((s) => s.textContent));
    const tab = panel.querySelector('[role="tab"][aria-selected="true"]')?.id;
    panel.style.setProperty("min-height", `${panel.offsetHeight}px`);
    Meshwright.place(panel, html);
    panel.querySelectorAll("details > summary").forEach((s) => { s.parentElement.open = open.has(s.textContent); });
    Meshwright.enliven(panel);
    if (tab && tab !== "tab-1") document.getElementById(tab)?.click();
    requestAnimationFrame(() => panel.style.removeProperty("min-height"));
  }

  refuse(panel, errors) {
    panel.replaceChildren(...errors.map((e) => Meshwright.make("p", "note", e.help ? `${e.message}: ${e.help}` : e.message)));
  }
};
