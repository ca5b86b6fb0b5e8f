// UI: ties fields, answer and panels together. One question at a time, the newest wins.
"use strict";

(() => {
  const { state, ask } = Meshwright;
  const part = (name) => document.querySelector(`[data-part="${name}"]`);
  const TYPING = 120, SETTLED = 700, KEY = "meshwright-theme";
  let timer = 0, complaint = 0, latest = null;

  const actions = {
    plan(text) { state.write({ plan: text, tries: [] }); fields.typed = 0; changed(false); document.getElementById("answer").scrollIntoView({ block: "nearest" }); },
    now: () => latest?.verdict ?? null,
    tries(ids) { state.write({ tries: ids }); changed(false); },
  };
  const fields = new Meshwright.Fields(part("form"), changed);
  const answer = new Meshwright.Answer(document.getElementById("answer"), actions);
  const panels = new Meshwright.Panels(document.querySelector(".panels"), () => refresh());
  const recipes = new Meshwright.Recipes(part("recipes"), actions);
  new Meshwright.Search(panels.panel("search"), actions);

  // Something was typed (wait for the next key) or set (ask at once).
  function changed(typing) {
    clearTimeout(timer);
    if (typing) timer = setTimeout(request, TYPING); else request();
  }

  async function request() {
    clearTimeout(complaint);
    const began = performance.now(), late = setTimeout(() => answer.wait(true), 150);
    const found = await ask.ask("answer", state.request);
    clearTimeout(late);
    if (!found) return;
    answer.wait(false);
    if (!found.answer) { answer.show({ errors: found.errors, asked: state.asked }); return; }
    if (latest) answer.clock(performance.now() - began); // the first has waited for the start
    state.confirm(found.answer.asked);
    // While somebody types, an error waits until they have stopped; the last answer stays.
    const wait = found.answer.errors.length ? SETTLED - (performance.now() - fields.typed) : 0;
    if (wait > 0 && latest) complaint = setTimeout(() => show(found.answer), wait); else show(found.answer);
  }

  async function show(found) {
    latest = found;
    fields.show(found);
    answer.show(found);
    refresh();
    history.replaceState(null, "", await state.address());
  }

  function refresh() {
    if (!latest?.verdict) return;
    if (panels.shown === "recipes") recipes.refresh(latest.asked); else panels.refresh(latest.asked);
  }

  // The question as a link, a command or a file.
  async function take(what) {
    if (what === "file") { save("question.toml", latest?.toml || ""); return; }
    const text = what === "link" ? `${location.origin}/${await state.address()}` : latest?.command || "";
    try {
      await navigator.clipboard.writeText(text);
      toast(what === "link" ? "Link copied: it holds the whole question" : `Copied: ${text}`);
    } catch {
      prompt(what === "link" ? "The link of this question" : "The command of this question", text);
    }
  }

  function save(name, text) {
    const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(new Blob([text])) });
    link.click();
    URL.revokeObjectURL(link.href);
    const { config, cluster } = state.asked;
    const also = [config && "config.json", cluster && "cluster.toml"].filter(Boolean).join(" and ");
    toast(also ? `Saved ${name}; it names ${also}, save the pasted text beside it` : `Saved ${name}`);
  }

  function toast(text) {
    part("toast").textContent = text;
    part("toast").classList.add("is-shown");
    clearTimeout(toast.timer);
    toast.timer = setTimeout(() => part("toast").classList.remove("is-shown"), 3500);
  }

  function theme() {
    let kept;
    try { kept = localStorage.getItem(KEY); } catch { kept = null; }
    Meshwright.theme.start(["light", "dark"].includes(kept) ? kept : "auto");
    document.querySelector("[data-theme-button]").addEventListener("click", () => {
      try { localStorage.setItem(KEY, document.documentElement.dataset.theme); } catch { /* a private window keeps nothing */ }
    });
  }

  async function names() {
    const found = await (await fetch("/api/catalog")).json();
    for (const kind of ["models", "clusters", "frameworks"]) {
      document.getElementById(kind).append(...found[kind].map(([name, about]) => {
        const option = new Option(about, name);
        option.label = about;
        return option;
      }));
    }
  }

  async function open() {
    const said = await state.fromAddress(location.hash), start = Meshwright.columns.read("start");
    state.set(state.says(said) ? said : Object.keys(start).length ? start : state.EXAMPLE);
    fields.typed = 0;
    request();
  }

  theme();
  document.querySelectorAll("[data-take]").forEach((button) => button.addEventListener("click", () => take(button.dataset.take)));
  addEventListener("hashchange", open);
  open();
  names().catch(() => {});
})();
