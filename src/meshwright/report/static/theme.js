// Theme: follows the system until the button says otherwise; `#theme=dark` or `#theme=light` sets it at load.
"use strict";
const Meshwright = {};

Meshwright.theme = (() => {
  const root = document.documentElement;
  const order = ["auto", "light", "dark"];
  let listeners = [];
  let colours = new Map();

  function changed() {
    colours = new Map();
    listeners.forEach(([listener]) => listener());
  }

  // `listener` is called when the theme changes, as long as `owner` is part of the page.
  function onChange(listener, owner = root) {
    listeners = listeners.filter(([, other]) => other.isConnected);
    listeners.push([listener, owner]);
  }

  function set(name) {
    root.dataset.theme = name;
    const button = document.querySelector("[data-theme-button]");
    if (button) {
      button.querySelector("[data-theme-name]").textContent = name[0].toUpperCase() + name.slice(1);
      button.setAttribute("aria-label", `Colour theme: ${name}. Change`);
    }
    changed();
  }

  function start(kept = "auto") {
    const asked = /theme=(light|dark)/.exec(location.hash);
    set(asked ? asked[1] : kept);
    document.querySelector("[data-theme-button]").addEventListener("click", () => {
      set(order[(order.indexOf(root.dataset.theme) + 1) % order.length]);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  }

  // The value of a custom property in the present theme, e.g. colour("mark-blue").
  function colour(name) {
    if (!colours.has(name)) colours.set(name, getComputedStyle(root).getPropertyValue(`--${name}`).trim());
    return colours.get(name);
  }

  return { start, colour, onChange };
})();

Meshwright.calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
