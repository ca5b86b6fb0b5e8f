// The timeline: zoom and pan by wheel, drag, pinch and keys; moves between spans; says what each one waited for.
"use strict";

Meshwright.Timeline = class {
  constructor(root, spans) {
    this.root = root;
    this.spans = spans;
    this.find = (name) => root.querySelector(`[data-part="${name}"]`);
    this.canvas = this.find("canvas");
    this.scroller = this.find("scroller");
    this.t0 = 0;
    this.t1 = spans.seconds;
    this.chosen = -1;
    this.hovered = -1;
    this.onPath = false;
    this.strip = {};
    this.plan = Meshwright.draw.layout(spans);
    this.find("spacer").style.height = `${this.plan.height}px`;
    this.scroller.style.setProperty("--content", `${this.plan.height + Meshwright.draw.AXIS}px`);
    this.legend();
    this.listen();
    new ResizeObserver(() => this.redraw()).observe(this.scroller);
    Meshwright.theme.onChange(() => this.redraw(), this.root);
    this.describe(-1);
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.hover(-1));
    canvas.addEventListener("dblclick", (event) => { const i = this.pick(event); if (i >= 0) this.zoomTo(i); });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => { if (this.chosen < 0) this.choose(this.firstInView(), false); });
    this.scroller.addEventListener("scroll", () => this.redraw());
    this.pointers = new Map();
    this.root.querySelectorAll("[data-do]").forEach((button) => {
      button.addEventListener("click", () => this.command(button.dataset.do));
    });
    const map = this.find("minimap");
    const jump = (event) => {
      if (event.type === "pointermove" && !event.buttons) return;
      const box = map.getBoundingClientRect();
      const middle = ((event.clientX - box.left) / box.width) * this.spans.seconds;
      this.show(middle - (this.t1 - this.t0) / 2, middle + (this.t1 - this.t0) / 2);
    };
    map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); jump(event); });
    map.addEventListener("pointermove", jump);
  }

  legend() {
    for (const [text, colour] of this.spans.legend()) {
      const item = Meshwright.make("li", "", text), swatch = Meshwright.make("span", "swatch");
      swatch.style.setProperty("--mark", `var(--mark-${colour})`);
      item.prepend(swatch);
      this.find("legend").append(item);
    }
  }

  // What is in view, as the drawing functions take it.
  get view() {
    const width = this.scroller.clientWidth, height = this.scroller.clientHeight;
    const gutter = width < 520 ? 74 : 132;
    const plot = width - gutter, scroll = this.scroller.scrollTop;
    const scale = plot / (this.t1 - this.t0);
    return {
      width, height, gutter, plot, t0: this.t0, t1: this.t1, onPath: this.onPath, labels: true,
      x: (t) => gutter + (t - this.t0) * scale,
      y: (y) => y + Meshwright.draw.AXIS - scroll,
      time: (x) => this.t0 + (x - gutter) / scale,
    };
  }

  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; this.paint(); });
  }

  paint() {
    const view = this.view, { draw } = Meshwright;
    if (view.plot < 10) return;
    const context = draw.prepare(this.canvas, view.width, view.height);
    draw.axis(context, view);
    draw.lanes(context, view, this.plan, this.spans);
    const shown = this.hovered >= 0 ? this.hovered : this.chosen;
    if (shown >= 0) draw.focus(context, view, this.plan, this.spans, shown);
    draw.gutter(context, view, this.plan, this.spans);
    draw.minimap(this.find("minimap"), this.spans, view, this.find("minimap").clientWidth, this.strip);
    this.find("range").textContent = `${Meshwright.seconds(this.t0)} – ${Meshwright.seconds(this.t1)}`;
  }

  show(t0, t1) {
    const whole = this.spans.seconds;
    const length = Math.min(Math.max(t1 - t0, whole * 1e-7), whole);
    this.t0 = Math.min(Math.max(t0, 0), whole - length);
    this.t1 = this.t0 + length;
    this.redraw();
  }

  // Glides to a range, or jumps there when motion is not wanted.
  glide(t0, t1) {
    cancelAnimationFrame(this.gliding);
    if (Meshwright.calm()) { this.show(t0, t1); return; }
    const from = [this.t0, this.t1], began = performance.now();
    const step = (now) => {
      const k = Math.min((now - began) / 160, 1), ease = 1 - (1 - k) ** 3;
      this.show(from[0] + (t0 - from[0]) * ease, from[1] + (t1 - from[1]) * ease);
      if (k < 1) this.gliding = requestAnimationFrame(step);
    };
    this.gliding = requestAnimationFrame(step);
  }

  zoom(factor, around = (this.t0 + this.t1) / 2, glide = false) {
    const range = [around - (around - this.t0) * factor, around + (this.t1 - around) * factor];
    if (glide) this.glide(...range); else this.show(...range);
  }

  zoomTo(i) {
    const length = Math.max(this.spans.end[i] - this.spans.start[i], this.spans.seconds * 1e-7);
    this.glide(Math.max(this.spans.start[i] - length, 0), Math.min(this.spans.end[i] + length, this.spans.seconds));
  }

  command(name) {
    const middle = this.chosen >= 0 ? (this.spans.start[this.chosen] + this.spans.end[this.chosen]) / 2 : undefined;
    const inView = middle > this.t0 && middle < this.t1 ? middle : undefined;
    if (name === "in") this.zoom(0.5, inView, true);
    if (name === "out") this.zoom(2, inView, true);
    if (name === "fit") this.glide(0, this.spans.seconds);
    if (name === "path") this.togglePath();
  }

  togglePath() {
    this.onPath = !this.onPath;
    this.root.querySelector('[data-do="path"]').setAttribute("aria-pressed", String(this.onPath));
    this.redraw();
  }

  // A plain wheel scrolls the page until the timeline has the focus; with Ctrl or a pinch it always zooms.
  wheel(event) {
    const wanted = event.ctrlKey || event.metaKey || document.activeElement === this.canvas;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const length = this.t1 - this.t0;
      this.show(this.t0 + (event.deltaX / this.view.plot) * length, this.t1 + (event.deltaX / this.view.plot) * length);
    } else if (wanted && !event.shiftKey) {
      this.zoom(Math.exp(event.deltaY * (event.ctrlKey ? 0.01 : 0.0022)), this.view.time(this.local(event).x));
    } else return;
    event.preventDefault();
  }

  local(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.clientX, from: event.clientX });
    this.hover(-1);
  }

  move(event) {
    const held = this.pointers.get(event.pointerId);
    if (!held) { if (event.pointerType === "mouse") this.hover(this.pick(event), event); return; }
    const before = [...this.pointers.values()].map((p) => p.x);
    const shift = event.clientX - held.x;
    held.x = event.clientX;
    held.moved = held.moved || Math.abs(event.clientX - held.from) > 4;
    const now = [...this.pointers.values()].map((p) => p.x);
    if (now.length === 2) {
      const box = this.canvas.getBoundingClientRect();
      const spread = Math.abs(before[0] - before[1]) / Math.max(Math.abs(now[0] - now[1]), 1);
      this.zoom(spread, this.view.time((now[0] + now[1]) / 2 - box.left));
    } else {
      const time = (shift / this.view.plot) * (this.t1 - this.t0);
      this.show(this.t0 - time, this.t1 - time);
    }
  }

  release(event) {
    const held = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    if (held && !held.moved) this.choose(this.pick(event), false);
  }

  pick(event) {
    const { x, y } = this.local(event), view = this.view;
    if (x < view.gutter || y < Meshwright.draw.AXIS) return -1;
    const row = this.plan.rows.find((r) => y >= view.y(r.y) - 1 && y <= view.y(r.y) + r.height + 1);
    return row ? this.spans.at(row.lane, view.time(x), (3 * (this.t1 - this.t0)) / view.plot) : -1;
  }

  hover(i, event) {
    const tip = this.find("tip");
    tip.hidden = i < 0;
    if (i >= 0) this.tell(tip, i, event);
    if (i === this.hovered) return;
    this.hovered = i;
    this.canvas.style.cursor = i >= 0 ? "pointer" : "";
    this.redraw();
  }

  tell(tip, i, event) {
    if (i !== this.hovered) tip.replaceChildren(...this.facts(i));
    const box = this.root.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    tip.style.left = `${Math.max(8, Math.min(x + 14, box.width - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + 18}px`;
  }

  choose(i, announce = true) {
    this.chosen = i;
    this.describe(i);
    if (i >= 0) this.reveal(i);
    if (i >= 0 && announce) this.find("live").textContent = this.spans.sentence(i);
    this.redraw();
  }

  // Scrolls and pans just enough to have the span in view.
  reveal(i) {
    const length = this.t1 - this.t0, { start, end } = this.spans;
    if (end[i] <= this.t0 || start[i] >= this.t1) {
      const middle = (start[i] + end[i]) / 2;
      this.show(middle - length / 2, middle + length / 2);
    }
    const row = this.plan.rows[this.spans.lane[i]], room = this.scroller.clientHeight - Meshwright.draw.AXIS;
    if (row.y < this.scroller.scrollTop) this.scroller.scrollTop = row.y - 8;
    if (row.y + row.height > this.scroller.scrollTop + room) this.scroller.scrollTop = row.y + row.height - room + 8;
  }

  describe(i) {
    const panel = this.find("inspector");
    if (i < 0) { panel.replaceChildren(Object.assign(document.createElement("p"), { className: "quiet", textContent: panel.dataset.empty })); return; }
    panel.replaceChildren(...this.facts(i));
  }

  // Name, times, reason and causes of a span, as elements.
  facts(i) {
    const { spans } = this, make = Meshwright.make, length = spans.end[i] - spans.start[i];
    const list = make("dl", "facts");
    const add = (term, value) => {
      const pair = make("div");
      pair.append(make("dt", "", term), make("dd", "", value));
      list.append(pair);
    };
    add("Starts", Meshwright.seconds(spans.start[i]));
    add("Takes", Meshwright.seconds(length));
    add("On", spans.place(i));
    if (spans.kinds[spans.kind[i]] !== "op") add("Cost", spans.keys[spans.key[i]]);
    const out = [make("p", "span-name", spans.name(i)), make("p", "why", spans.why(i)), list];
    const causes = spans.causesOf(i);
    if (causes.length) {
      const bar = make("div", "parts"), whole = causes.reduce((sum, [, seconds]) => sum + seconds, 0);
      for (const [name, seconds, colour] of causes) {
        const part = make("span", "part", `${name} ${Meshwright.seconds(seconds)}`);
        part.style.setProperty("--share", `${(100 * seconds) / whole}%`);
        part.style.setProperty("--mark", `var(--mark-${colour})`);
        bar.append(part);
      }
      out.push(bar);
    }
    return out;
  }

  firstInView() {
    const lane = this.spans.lanes[0];
    return lane ? Math.min(this.spans.firstAfter(lane, this.t0), lane.last) : -1;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = this.actions[event.key];
    if (!action) return;
    event.preventDefault();
    action.call(this);
  }

  actions = {
    ArrowLeft() { this.along(-1); }, ArrowRight() { this.along(1); },
    ArrowUp() { this.across(-1); }, ArrowDown() { this.across(1); },
    Home() { this.end(false); }, End() { this.end(true); },
    "+"() { this.command("in"); }, "="() { this.command("in"); }, "-"() { this.command("out"); }, _() { this.command("out"); },
    0() { this.command("fit"); }, c() { this.togglePath(); },
    Enter() { if (this.chosen >= 0) this.zoomTo(this.chosen); },
    w() { const cause = this.spans.waited[this.chosen]; if (cause >= 0) this.choose(cause); },
    Escape() { this.choose(-1); },
  };

  along(step) {
    if (this.chosen < 0) { this.choose(this.firstInView()); return; }
    const lane = this.spans.lanes[this.spans.lane[this.chosen]];
    this.choose(Math.min(Math.max(this.chosen + step, lane.first), lane.last));
  }

  across(step) {
    if (this.chosen < 0) { this.choose(this.firstInView()); return; }
    const { spans } = this, lane = spans.lanes[spans.lane[this.chosen] + step];
    if (lane) this.choose(Math.min(spans.firstAfter(lane, spans.start[this.chosen]), lane.last));
  }

  end(last) {
    const lane = this.spans.lanes[this.spans.lane[Math.max(this.chosen, 0)]];
    this.choose(last ? lane.last : lane.first);
  }
};

Meshwright.make = (tag, className = "", text = "") => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
};
