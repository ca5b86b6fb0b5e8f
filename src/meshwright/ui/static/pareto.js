// Pareto: the front as points on two axes with ticks and units; each point is a button that loads its plan.
"use strict";

Meshwright.pareto = (objectives, points, load, now = null) => {
  const W = 640, H = 300, L = 76, R = 20, T = 16, B = 46, NS = "http://www.w3.org/2000/svg";
  const make = (tag, attributes, text = "") => {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  };
  const figure = Meshwright.make("figure", "card pareto"), tip = Meshwright.make("figcaption", "reading");
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": `Pareto front of ${objectives[0].title} and ${objectives[1].title}` });
  const mine = now?.fits && objectives.every(({ name }) => now.values[name] !== null) ? objectives.map(({ name }) => now.values[name]) : null;
  const scales = [0, 1].map((axis) => scale(objectives[axis].name, [...points.map((p) => p.values[axis]), ...(mine ? [mine[axis]] : [])]));
  const x = (v) => L + scales[0].place(v) * (W - L - R), y = (v) => H - B - scales[1].place(v) * (H - T - B);

  for (const { at, text } of scales[0].ticks) {
    svg.append(make("line", { x1: x(at), x2: x(at), y1: T, y2: H - B, class: "grid" }), make("text", { x: x(at), y: H - B + 18, "text-anchor": "middle" }, text));
  }
  for (const { at, text } of scales[1].ticks) {
    svg.append(make("line", { x1: L, x2: W - R, y1: y(at), y2: y(at), class: "grid" }), make("text", { x: L - 8, y: y(at) + 4, "text-anchor": "end" }, text));
  }
  svg.append(make("text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle", class: "axis" }, `${objectives[0].title} (${scales[0].unit}), less is better`));
  svg.append(make("text", { x: 14, y: (T + H - B) / 2, "text-anchor": "middle", class: "axis", transform: `rotate(-90 14 ${(T + H - B) / 2})` }, `${objectives[1].title} (${scales[1].unit})`));
  svg.append(make("polyline", { class: "front", points: stairs().map(([a, b]) => `${x(a)},${y(b)}`).join(" ") }));
  if (mine) {
    svg.append(make("circle", { cx: x(mine[0]), cy: y(mine[1]), r: 10, class: "now" }));
    svg.append(make("text", { x: x(mine[0]) + 14, y: y(mine[1]) + 4 }, "the plan above"));
  }

  const marks = points.map((point, i) => {
    const mark = make("circle", { cx: x(point.values[0]), cy: y(point.values[1]), r: 6, tabindex: i === 0 ? 0 : -1, role: "button", "aria-label": `${point.shown.join(", ")}: ${point.text}. Load this plan` });
    const tell = () => { tip.textContent = `${point.shown.join(", ")}: ${point.text}`; };
    mark.addEventListener("pointerenter", tell);
    mark.addEventListener("focus", tell);
    mark.addEventListener("click", () => load(point.plan));
    mark.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowUp: i - 1, ArrowLeft: i - 1, ArrowDown: i + 1, Home: 0, End: points.length - 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); load(point.plan); }
      if (to === undefined || !marks[to]) return;
      event.preventDefault();
      mark.setAttribute("tabindex", "-1");
      marks[to].setAttribute("tabindex", "0");
      marks[to].focus();
    });
    return mark;
  });
  svg.append(...marks);
  tip.textContent = "Point at a plan, or tab in and use the arrow keys; click or Enter loads it.";
  figure.append(svg, tip);
  return figure;

  // What is as good as a point in one and worse in the other objective: the front is not between its points.
  function stairs() {
    return points.flatMap(({ values: [a, b] }, i) => (i ? [[a, points[i - 1].values[1]], [a, b]] : [[a, b]]));
  }

  // Values of an objective as places from 0 to 1, its unit and round ticks. Headroom is kept negative: more is better.
  function scale(name, values) {
    const [factor, unit] = { step: [1, "s"], headroom: [-1 / 2 ** 30, "GiB free"], cost: [1, "$ per million tokens"], energy: [1, "J a token"] }[name];
    const shown = values.map((v) => v * factor), low = Math.min(...shown), high = Math.max(...shown);
    const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1, from = low - room, to = high + room;
    const { step, values: at } = Meshwright.ticks(from, to, 4);
    const digits = Math.min(Math.max(Math.ceil(-Math.log10(step) - 1e-9), 0), 6);
    return { unit, place: (v) => (v * factor - from) / (to - from), ticks: at.map((t) => ({ at: t / factor, text: t.toFixed(digits) })) };
  }
};
