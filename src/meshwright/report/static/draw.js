// Drawing: the timeline's axis, lanes, spans and minimap on a canvas, only what is in view.
"use strict";

Meshwright.draw = (() => {
  const colour = (name) => Meshwright.theme.colour(name);
  const font = (size, weight = 400) => `${weight} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
  const AXIS = 24;

  // A canvas of the size it has on screen, in device pixels, cleared.
  function prepare(canvas, width, height) {
    const ratio = Math.min(devicePixelRatio || 1, 3);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.textBaseline = "middle";
    return context;
  }

  // Vertical places of the lanes: ranks as groups, compute lanes taller than traffic.
  function layout(spans) {
    const roomy = spans.ranks.length <= 2;
    const rows = [], groups = [];
    let y = 8, rank = -1;
    spans.lanes.forEach((lane, index) => {
      if (lane.rank !== rank) {
        if (rank >= 0) y += 10;
        groups.push({ rank: lane.rank, y });
        rank = lane.rank;
      }
      const height = lane.name === "compute" ? (roomy ? 34 : 24) : (roomy ? 24 : 11);
      rows.push({ lane, index, y, height });
      y += height + 2;
    });
    return { rows, groups, height: y + 8 };
  }

  function axis(context, view) {
    const { values, step } = Meshwright.ticks(view.t0, view.t1, view.plot / 110);
    context.font = font(11);
    context.textAlign = "center";
    for (const value of values) {
      const x = view.x(value);
      context.fillStyle = colour("line");
      context.fillRect(Math.round(x), AXIS, 1, view.height - AXIS);
      context.fillStyle = colour("muted");
      if (x > view.gutter + 20 && x < view.width - 24) context.fillText(tick(value, step, view.t1), x, AXIS / 2);
    }
  }

  // A time on an axis that ends at `last`: its unit, with as many digits as the step needs.
  function tick(value, step, last) {
    if (value === 0) return "0";
    const [scale, unit] = last >= 1 ? [1, "s"] : last >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    const digits = Math.ceil(-Math.log10(step * scale) - 1e-9);
    return `${(value * scale).toFixed(Math.min(Math.max(digits, 0), 9))} ${unit}`;
  }

  function lanes(context, view, plan, spans) {
    for (const row of plan.rows) {
      const y = view.y(row.y);
      if (y + row.height < AXIS || y > view.height) continue;
      context.fillStyle = colour("lane");
      context.fillRect(view.gutter, y, view.plot, row.height);
      spansOf(context, view, row, spans, y);
    }
  }

  // One lane. What is narrower than a pixel is drawn pixel by pixel, as dense as the lane is busy there: the
  // cost is pixels, not spans.
  function spansOf(context, view, row, spans, y) {
    const { lane, height } = row;
    const pixel = (view.t1 - view.t0) / view.plot;
    for (let i = spans.firstAfter(lane, view.t0); i <= lane.last && spans.start[i] < view.t1;) {
      const x0 = Math.max(view.x(spans.start[i]), view.gutter);
      const x1 = Math.min(view.x(spans.end[i]), view.width);
      const dim = view.onPath ? 0.18 : 1;
      if (x1 - x0 >= 1) {
        const width = x1 - x0, mark = spans.colour(i);
        context.globalAlpha = spans.path[i] ? 1 : dim;
        context.fillStyle = colour(`mark-${mark}`);
        context.fillRect(x0, y, width > 3 ? width - 1 : width, height);
        if (view.labels && width > 26 && height >= 11) label(context, spans, i, mark, x0, y, width, height);
        i += 1;
        continue;
      }
      const next = spans.firstAfter(lane, spans.start[i] + pixel, i + 1);
      const { longest, share, onPath } = spans.crowd(i, next, pixel);
      context.globalAlpha = Math.max(share, 0.3) * (onPath ? 1 : dim);
      context.fillStyle = colour(`mark-${spans.colour(longest)}`);
      context.fillRect(Math.floor(x0), y, 1, height);
      i = next;
    }
    context.globalAlpha = 1;
  }

  function label(context, spans, i, mark, x, y, width, height) {
    if (height < 20 && width < 60) return;
    const size = height >= 20 ? 11.5 : 9.5;
    context.font = font(size, 500);
    const texts = height >= 20 && width > 150 ? [spans.name(i), spans.short(i)] : [spans.short(i)];
    const text = texts.find((t) => context.measureText(t).width < width - 8);
    if (!text) return;
    context.fillStyle = colour(`on-${mark}`);
    context.textAlign = "left";
    context.fillText(text, x + 5, y + height / 2 + 0.5);
  }

  function gutter(context, view, plan, spans) {
    context.fillStyle = colour("surface");
    context.fillRect(0, AXIS, view.gutter - 1, view.height - AXIS);
    context.textAlign = "left";
    for (const row of plan.rows) {
      const y = view.y(row.y) + row.height / 2;
      if (y < AXIS - 6 || y > view.height + 6) continue;
      if (row.lane.name === "compute") continue;
      context.font = font(row.height >= 20 ? 11 : 9.5);
      context.fillStyle = colour("muted");
      context.fillText(row.lane.name, 14, y, view.gutter - 18);
    }
    for (const group of plan.groups) {
      const y = view.y(group.y) + 12;
      if (y < AXIS - 6 || y > view.height + 6) continue;
      context.font = font(12, 600);
      context.fillStyle = colour("ink");
      const name = shorten(context, spans.ranks[group.rank], view.gutter - 8);
      context.fillText(name, 2, y);
      const used = context.measureText(name).width, many = spans.multiplicity[group.rank];
      context.fillStyle = colour("muted");
      context.font = font(11);
      const count = ` ×${many.toLocaleString("en")}`;
      if (many > 1 && used + context.measureText(count).width < view.gutter - 6) context.fillText(count, 2 + used, y);
    }
    context.fillStyle = colour("surface");
    context.fillRect(0, 0, view.gutter, AXIS);
  }

  function shorten(context, text, width) {
    if (context.measureText(text).width <= width) return text;
    while (text.length > 1 && context.measureText(`${text}…`).width > width) text = text.slice(0, -1);
    return `${text}…`;
  }

  // The outline of a span, and the line from the end of what it waited for to its start.
  function focus(context, view, plan, spans, i) {
    const place = (j) => plan.rows[spans.lane[j]];
    const row = place(i), y = view.y(row.y);
    const cause = spans.waited[i];
    context.save();
    context.beginPath();
    context.rect(view.gutter, AXIS, view.plot, view.height - AXIS);
    context.clip();
    if (cause >= 0 && spans.gap(i) > spans.seconds * 2e-9) link(context, view, spans, place(cause), row, cause, i);
    context.strokeStyle = colour("ink");
    context.lineWidth = 2;
    const x0 = view.x(spans.start[i]), x1 = view.x(spans.end[i]);
    context.strokeRect(x0 - 1, y - 1, Math.max(x1 - x0, 2) + 1, row.height + 2);
    context.restore();
  }

  function link(context, view, spans, from, to, cause, i) {
    const x0 = view.x(spans.end[cause]), y0 = view.y(from.y) + from.height / 2;
    const x1 = view.x(spans.start[i]), y1 = view.y(to.y) + to.height / 2;
    const idle = x1 - view.x(spans.start[i] - spans.gap(i));
    context.fillStyle = colour("ink");
    context.globalAlpha = 0.1;
    context.fillRect(x1 - idle, view.y(to.y), idle, to.height);
    context.globalAlpha = 1;
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + 24, y0, x1 - 24, y1, x1, y1);
    context.stroke();
    context.setLineDash([]);
    context.strokeRect(view.x(spans.start[cause]), view.y(from.y), Math.max(x0 - view.x(spans.start[cause]), 2), from.height);
  }

  // All ranks in a strip; `kept` holds the strip while size, theme and highlight stay the same.
  function strip(spans, view, width, height, kept) {
    const name = [width, devicePixelRatio, colour("mark-blue"), view.onPath].join();
    if (kept.name === name) return kept.canvas;
    const canvas = document.createElement("canvas"), context = prepare(canvas, width, height);
    const rows = spans.lanes.filter((lane) => lane.name === "compute");
    const chosen = rows.length ? rows : spans.lanes, each = height / chosen.length;
    const whole = { t0: 0, t1: spans.seconds, gutter: 0, plot: width, width, onPath: view.onPath, x: (t) => (t / spans.seconds) * width };
    chosen.forEach((lane, k) => {
      spansOf(context, whole, { lane, height: Math.max(each - (each > 3 ? 1 : 0), 0.5) }, spans, k * each);
    });
    Object.assign(kept, { name, canvas });
    return canvas;
  }

  // The strip and, bright, the part in view.
  function minimap(canvas, spans, view, width, kept) {
    const height = 36, drawn = strip(spans, view, width, height, kept), context = prepare(canvas, width, height);
    context.drawImage(drawn, 0, 0, width, height);
    const x0 = (view.t0 / spans.seconds) * width, x1 = Math.max((view.t1 / spans.seconds) * width, x0 + 3);
    context.fillStyle = colour("page");
    context.globalAlpha = 0.72;
    context.fillRect(0, 0, x0, height);
    context.fillRect(x1, 0, width - x1, height);
    context.globalAlpha = 1;
    context.strokeStyle = colour("accent");
    context.lineWidth = 2;
    context.strokeRect(x0 + 1, 1, Math.max(x1 - x0 - 2, 1), height - 2);
  }

  return { AXIS, prepare, layout, axis, tick, lanes, gutter, focus, minimap, font };
})();
