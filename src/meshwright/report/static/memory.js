// Memory over time: the stacked step function of one rank class against its capacity, with a cursor.
"use strict";

Meshwright.Memory = class {
  static async load(root) {
    const data = Meshwright.columns.read("memory-over-time");
    const ranks = await Promise.all(data.ranks.map(async (rank) => {
      const columns = await Meshwright.columns.decodeAll({ time: rank.time, values: rank.values });
      return { ...columns, capacity: rank.capacity };
    }));
    return new this(root, data, ranks);
  }

  constructor(root, data, ranks) {
    Object.assign(this, { root, data, ranks, rank: 0, cursor: -1 });
    this.find = (name) => root.querySelector(`[data-part="${name}"]`);
    this.canvas = this.find("canvas");
    this.colours = JSON.parse(root.dataset.colours);
    const select = this.find("rank");
    select.addEventListener("change", () => { this.rank = Number(select.value); this.cursor = -1; this.redraw(); });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { if (document.activeElement !== this.canvas) this.move(-1, false); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.redraw()).observe(this.canvas.parentElement);
    Meshwright.theme.onChange(() => this.redraw(), this.root);
  }

  get current() { return this.ranks[this.rank]; }

  bytes(category, i) { return this.current.values[category * this.current.time.length + i]; }

  total(i) {
    let sum = 0;
    for (let c = 0; c < this.data.categories.length; c++) sum += this.bytes(c, i);
    return sum;
  }

  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; this.paint(); });
  }

  paint() {
    const { draw, theme } = Meshwright;
    const width = this.canvas.parentElement.clientWidth, height = 220;
    if (width < 40 || !this.current) return;
    const context = draw.prepare(this.canvas, width, height);
    const left = 64, top = 12, bottom = height - 24, n = this.current.time.length;
    let highest = this.current.capacity;
    for (let i = 0; i < n; i++) highest = Math.max(highest, this.total(i));
    this.x = (t) => left + (t / this.data.seconds) * (width - left - 8);
    this.time = (x) => ((x - left) / (width - left - 8)) * this.data.seconds;
    this.y = (b) => bottom - (b / (highest * 1.04)) * (bottom - top);
    this.axes(context, width, left, bottom, highest);
    this.areas(context, n, bottom);
    this.line(context, left, width, theme);
    if (this.cursor >= 0) this.mark(context, top, bottom);
    this.read();
  }

  axes(context, width, left, bottom, highest) {
    const { colour } = Meshwright.theme;
    context.font = Meshwright.draw.font(11);
    context.textAlign = "right";
    for (const value of Meshwright.ticks(0, highest / 2 ** 30, 4).values) {
      const y = this.y(value * 2 ** 30);
      context.fillStyle = colour("line");
      context.fillRect(left, Math.round(y), width - left - 8, 1);
      context.fillStyle = colour("muted");
      context.fillText(`${value} GiB`, left - 8, y);
    }
    context.textAlign = "center";
    const { values, step } = Meshwright.ticks(0, this.data.seconds, width / 130);
    for (const value of values) {
      if (this.x(value) < width - 20) context.fillText(Meshwright.draw.tick(value, step, this.data.seconds), this.x(value), bottom + 13);
    }
  }

  areas(context, n, bottom) {
    const { time } = this.current, below = new Float64Array(n);
    this.data.categories.forEach((name, c) => {
      context.beginPath();
      context.moveTo(this.x(time[0]), this.y(below[0]));
      const points = [];
      for (let i = 0; i < n; i++) {
        const x0 = this.x(time[i]), x1 = this.x(i + 1 < n ? time[i + 1] : this.data.seconds);
        const low = this.y(below[i]);
        below[i] += this.bytes(c, i);
        points.push([x0, x1, low, this.y(below[i])]);
      }
      points.forEach(([x0, x1, , high]) => { context.lineTo(x0, high); context.lineTo(x1, high); });
      points.reverse().forEach(([x0, x1, low]) => { context.lineTo(x1, low); context.lineTo(x0, low); });
      context.closePath();
      context.fillStyle = Meshwright.theme.colour(`mark-${this.colours[name] || "grey"}`);
      context.fill();
    });
  }

  // The capacity, dashed on a lighter ground so that it is seen on every colour below it.
  line(context, left, width, theme) {
    if (!this.current.capacity) return;
    const y = this.y(this.current.capacity), text = `capacity ${Meshwright.gibibytes(this.current.capacity)}`;
    const stroke = (colour, thick, dash) => {
      context.strokeStyle = theme.colour(colour);
      context.lineWidth = thick;
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(width - 8, y);
      context.stroke();
      context.setLineDash([]);
    };
    stroke("surface", 4, []);
    stroke("ink", 1.5, [6, 4]);
    context.font = Meshwright.draw.font(11, 600);
    context.textAlign = "right";
    const long = context.measureText(text).width;
    context.fillStyle = theme.colour("surface");
    context.fillRect(width - 16 - long, y + 4, long + 8, 17);
    context.fillStyle = theme.colour("ink");
    context.fillText(text, width - 12, y + 13);
  }

  mark(context, top, bottom) {
    const x = this.x(this.current.time[this.cursor]);
    context.fillStyle = Meshwright.theme.colour("ink");
    context.fillRect(Math.round(x), top, 1.5, bottom - top);
  }

  // The line below the chart: what is alive at the cursor, or at the peak.
  read() {
    const i = this.cursor >= 0 ? this.cursor : this.peak();
    const parts = this.data.categories.map((name, c) => [name, this.bytes(c, i)]).filter(([, b]) => b > 0);
    const when = `${this.cursor >= 0 ? "At" : "Peak, at"} ${Meshwright.seconds(this.current.time[i])}`;
    this.find("reading").textContent = `${when}: ${Meshwright.gibibytes(this.total(i))} (` +
      `${parts.map(([name, b]) => `${name} ${Meshwright.gibibytes(b)}`).join(", ")})`;
  }

  peak() {
    let best = 0;
    for (let i = 1; i < this.current.time.length; i++) if (this.total(i) > this.total(best)) best = i;
    return best;
  }

  point(event) {
    const time = this.time(event.clientX - this.canvas.getBoundingClientRect().left);
    let low = 0, high = this.current.time.length - 1;
    while (low < high) { const m = (low + high + 1) >> 1; if (this.current.time[m] <= time) low = m; else high = m - 1; }
    this.move(low, false);
  }

  move(i, announce = true) {
    this.cursor = i;
    this.paint();
    if (announce && i >= 0) this.find("live").textContent = this.find("reading").textContent;
  }

  key(event) {
    const last = this.current.time.length - 1, at = this.cursor < 0 ? this.peak() : this.cursor;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, p: this.peak(), Escape: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.move(event.key === "Escape" ? -1 : Math.min(Math.max(to, 0), last));
  }
};
