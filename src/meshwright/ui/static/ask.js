// Ask: requests to the page's server, the newest of each kind only.
"use strict";

Meshwright.ask = (() => {
  const page = [...crypto.getRandomValues(new Uint8Array(9))].map((b) => b.toString(36)).join("").slice(0, 20);
  const newest = {};

  // An error as the server says it, or as nobody answered.
  const failed = (message, help) => ({ errors: [{ code: "", message, help, place: "", controls: [] }] });

  function post(task, body, signal) {
    return fetch(`/api/${task}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ page, body }), signal,
    });
  }

  // The answer to the newest request of a task; null for one that a newer one has replaced.
  async function ask(task, body) {
    newest[task]?.abort();
    const mine = newest[task] = new AbortController();
    try {
      const response = await post(task, body, mine.signal);
      if (response.status === 409) return null;
      const found = await response.json();
      return newest[task] === mine ? found : null;
    } catch (error) {
      if (error.name === "AbortError" || newest[task] !== mine) return null;
      return failed("The server of this page does not answer.", "Start meshwright ui again, then reload.");
    }
  }

  // Reads a search's events until it ends: `told(name, value)` for each.
  async function events(body, told, signal) {
    const response = await post("search", body, signal);
    if (!response.ok) { told("answer", await response.json()); return; }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(text.slice(0, end)) || [];
        text = text.slice(end + 2);
        if (name) told(name, JSON.parse(data));
      }
    }
  }

  return { ask, events, failed, stop: () => post("search/stop", {}) };
})();
