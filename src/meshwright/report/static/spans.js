// Spans: the timeline's columns with names, and the answer to "why did this task start only now?".
"use strict";

Meshwright.Spans = class {
  static kinds = {
    F: "Forward", B: "Backward (inputs)", W: "Backward (weights)", BW: "Backward", recompute: "Recompute",
    send: "Send", all_reduce: "All-reduce", all_gather: "All-gather", reduce_scatter: "Reduce-scatter",
    all_to_all: "All-to-all", ring: "Ring exchange", optimizer: "Optimizer update", host: "Host", copy: "Copy",
  };
  static queues = {
    compute: "compute", tp: "tensor parallel", cp: "context parallel", ep: "expert parallel", dp: "data parallel",
    dp_gather: "gather", pp_forward: "to next stage", pp_backward: "to previous stage", copy: "copy", host: "host",
    link_forward: "to next pool", link_backward: "to previous pool",
  };

  static async load(id) {
    const data = Meshwright.columns.read(id);
    const { start, end, kind, key, waited, path, parts } = data;
    const columns = await Meshwright.columns.decodeAll({ start, end, kind, key, waited, path, parts });
    return new this(data, columns, await Meshwright.columns.decodeAll(data.attributes));
  }

  constructor(data, columns, attributes) {
    Object.assign(this, data, columns, { attributes });
    const scale = data.seconds / (2 ** 32 - 1);
    this.start = Float64Array.from(columns.start, (tick) => tick * scale);
    this.end = Float64Array.from(columns.end, (tick) => tick * scale);
    this.lane = new Uint16Array(this.count);
    this.lanes = data.lanes.map(([rank, queue, first, count], i) => {
      this.lane.fill(i, first, first + count);
      return { rank, queue, first, last: first + count - 1, name: data.queues[queue] };
    });
    this.latest = this.runningEnd();
    this.busy = new Float64Array(this.count + 1);
    for (let i = 0; i < this.count; i++) this.busy[i + 1] = this.busy[i] + this.end[i] - this.start[i];
    this.causeOfKey = data.keys.map((_, k) => this.mainCause(k));
    this.hasChunks = attributes.chunk.some((chunk) => chunk > 0);
    this.styles = new Map();
  }

  // The latest end so far in each lane: sorted, so that the first visible span is found by bisection.
  runningEnd() {
    const latest = Float64Array.from(this.end);
    for (const lane of this.lanes) {
      for (let i = lane.first + 1; i <= lane.last; i++) latest[i] = Math.max(latest[i], latest[i - 1]);
    }
    return latest;
  }

  // The first span of a lane that ends after `time`; last + 1 when there is none.
  firstAfter(lane, time, from = lane.first) {
    let low = from, high = lane.last + 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.latest[middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  // Of the spans i to next - 1, which share a pixel `length` seconds wide: the longest of the first few, how much
  // of the pixel they fill and whether one of the first few is on the critical path.
  crowd(i, next, length) {
    let longest = i, onPath = false;
    for (let j = i; j < Math.min(next, i + 4); j++) {
      if (this.end[j] - this.start[j] > this.end[longest] - this.start[longest]) longest = j;
      onPath = onPath || this.path[j] === 1;
    }
    return { longest, onPath, share: Math.min((this.busy[next] - this.busy[i]) / length, 1) };
  }

  at(lane, time, slack) {
    let best = -1, distance = slack;
    for (let i = this.firstAfter(lane, time - slack); i <= lane.last && this.start[i] <= time + slack; i++) {
      const away = Math.max(this.start[i] - time, time - this.end[i], 0);
      if (away <= distance) { distance = away; best = i; if (away === 0) break; }
    }
    return best;
  }

  part(cause, key) { return this.parts[cause * this.keys.length + key]; }

  mainCause(key) {
    let best = -1, most = 0;
    for (let c = 0; c < this.causes.length; c++) if (this.part(c, key) > most) { most = this.part(c, key); best = c; }
    return best;
  }

  // [text, colour] of a span: an operator has the colour of its main cause, a pass that of its kind, traffic that of
  // its queue.
  style(i) {
    const kind = this.kinds[this.kind[i]], { queue, name } = this.lanes[this.lane[i]];
    const code = [this.kind[i], queue, kind === "op" ? this.key[i] : ""].join();
    if (!this.styles.has(code)) {
      const cause = kind === "op" ? this.causeOfKey[this.key[i]] : -1;
      const own = this.kindColours[this.kind[i]], traffic = this.queueColours[queue];
      this.styles.set(code, cause >= 0 ? [this.causes[cause], this.causeColours[cause]]
        : own && !(kind === "op" && traffic) ? [kind === "op" ? "operator" : Meshwright.Spans.kinds[kind], own]
          : [Meshwright.Spans.queues[name] || name, traffic || "grey"]);
    }
    return this.styles.get(code);
  }

  colour(i) { return this.style(i)[1]; }

  // [text, colour] of what is drawn: causes of operators, kinds of passes, queues of traffic; one entry a colour.
  legend() {
    const texts = new Map();
    for (let i = 0; i < this.count; i++) {
      const [text, colour] = this.style(i);
      if (!texts.has(colour)) texts.set(colour, new Set());
      texts.get(colour).add(text);
    }
    return [...texts].map(([colour, names]) => [[...names].join(", "), colour]);
  }

  attribute(name, i) { return this.attributes[name][i]; }

  // As schedules write it: F3, or F3@5 where a rank holds several stages.
  short(i) {
    const kind = this.kinds[this.kind[i]];
    if (kind === "op") return this.keys[this.key[i]];
    const microbatch = this.attribute("microbatch", i);
    const stage = this.hasChunks && this.attribute("stage", i) >= 0 ? `@${this.attribute("stage", i)}` : "";
    return microbatch >= 0 ? `${kind}${microbatch}${stage}` : kind;
  }

  name(i) {
    const kind = this.kinds[this.kind[i]];
    if (kind === "op") return this.keys[this.key[i]];
    const words = [Meshwright.Spans.kinds[kind] || kind];
    for (const [name, word] of [["microbatch", "microbatch"], ["stage", "stage"], ["chunk", "chunk"], ["layer", "layer"], ["step", "step"]]) {
      if (this.attribute(name, i) >= 0) words.push(`${word} ${this.attribute(name, i)}`);
    }
    return words.join(" · ");
  }

  place(i) {
    const lane = this.lanes[this.lane[i]];
    return `${this.ranks[lane.rank]}, ${Meshwright.Spans.queues[lane.name] || lane.name} queue`;
  }

  // Seconds the queue stood idle before this span.
  gap(i) {
    const before = i > this.lanes[this.lane[i]].first ? this.end[i - 1] : 0;
    return Math.max(this.start[i] - before, 0);
  }

  why(i) {
    const gap = this.gap(i), cause = this.waited[i], own = i - 1;
    if (gap <= this.seconds * 2e-9) {
      if (i === this.lanes[this.lane[i]].first) return "Did not wait: it starts with the step.";
      return `Did not wait: it follows ${this.name(own)} on the same queue.`;
    }
    const isCompute = this.lanes[this.lane[i]].name === "compute";
    const waited = isCompute ? `Waited ${Meshwright.seconds(gap)} for` : `Queue idle for ${Meshwright.seconds(gap)}, until`;
    if (cause === -2) return `${waited} a task that is not shown.`;
    if (cause < 0) return `${waited} something that is not recorded.`;
    return `${waited} ${this.name(cause)} (${this.place(cause)})${isCompute ? ", which" : ""} ended at ${Meshwright.seconds(this.end[cause])}.`;
  }

  // [[cause, seconds], ...] of what the duration is made of, the largest first.
  causesOf(i) {
    return this.causes.map((name, c) => [name, this.part(c, this.key[i]), this.causeColours[c]])
      .filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
  }

  sentence(i) {
    return `${this.name(i)}, on ${this.place(i)}. Starts at ${Meshwright.seconds(this.start[i])}, ` +
      `takes ${Meshwright.seconds(this.end[i] - this.start[i])}. ${this.why(i)}`;
  }
};
