// Columns: typed arrays from their compressed form in the page, and numbers in the unit that reads best.
"use strict";

Meshwright.columns = (() => {
  const types = { u1: Uint8Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array };

  async function decode([type, text]) {
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new types[type](await new Response(stream).arrayBuffer());
  }

  async function decodeAll(record) {
    const names = Object.keys(record);
    const arrays = await Promise.all(names.map((name) => decode(record[name])));
    return Object.fromEntries(names.map((name, i) => [name, arrays[i]]));
  }

  const read = (id) => JSON.parse(document.getElementById(id).textContent);

  return { decode, decodeAll, read };
})();

Meshwright.seconds = (value) => {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${(value * 1e6).toPrecision(3)} µs`;
  if (size < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  return `${value.toFixed(3)} s`;
};

Meshwright.gibibytes = (value) => `${(value / 2 ** 30).toFixed(1)} GiB`;

// At least `count` round numbers between two values.
Meshwright.ticks = (low, high, count) => {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || power * 10;
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
  return { step, values: found };
};
