// Search: started, watched and stopped here; what it found can be loaded as the plan.
"use strict";

Meshwright.Search = class {
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    this.find = (name) => root.querySelector(`[data-part="${name}"]`);
    this.form = this.find("search-form");
    this.form.addEventListener("submit", (event) => { event.preventDefault(); if (this.running) this.stop(); else this.start(); });
  }

  async start() {
    const { objective, across, up, fix, engines, headroom } = Object.fromEntries(new FormData(this.form));
    const asked = { ...Meshwright.state.asked, plan: "", tries: [] };
    this.running = new AbortController();
    this.find("go").textContent = "Stop";
    this.find("progress").hidden = false;
    this.find("progress").querySelector("progress").removeAttribute("value");
    this.find("line").textContent = "Starting";
    this.find("found").replaceChildren();
    try {
      await Meshwright.ask.events({ asked, objective, pareto: [across, up], fix, engines, headroom }, (name, value) => this.told(name, value), this.running.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.refuse(Meshwright.ask.failed("The search broke off.", "The server of this page does not answer.").errors);
    }
    this.running = null;
    this.find("go").textContent = "Search";
    this.find("go").disabled = false;
    this.find("progress").hidden = true;
  }

  // Ends with the best of what was looked at.
  stop() {
    this.find("go").disabled = true;
    this.find("line").textContent = "Ending with what was found";
    Meshwright.ask.stop();
  }

  told(name, value) {
    if (name === "progress") {
      this.find("progress").querySelector("progress").value = value.share;
      if (!this.find("go").disabled) this.find("line").textContent = value.progress;
    }
    if (name !== "answer") return;
    if (value.answer) this.show(value.answer); else this.refuse(value.errors);
  }

  refuse(errors) {
    this.find("found").replaceChildren(...errors.map((e) => Meshwright.make("p", "note", e.help ? `${e.message}: ${e.help}` : e.message)));
  }

  show(found) {
    const verdict = Meshwright.make("p", `answer ${found.fits ? "good" : "bad"}`);
    verdict.append(Meshwright.make("strong", "", found.verdict));
    const out = [verdict, Meshwright.make("p", "quiet", found.coverage)];
    out.push(...found.remarks.map((text) => Meshwright.make("p", "quiet", text)));
    if (found.recommended) out.push(this.recommended(found.recommended));
    if (found.rows.length) out.push(this.table(found));
    for (const one of found.excluded) {
      const box = Meshwright.make("div", "warnings");
      box.append(Meshwright.make("h2", "", one.title), Meshwright.make("p", "", one.text));
      out.push(box);
    }
    if (found.points.length) {
      out.push(Meshwright.make("h3", "", `Pareto front: ${found.objectives[0].title} and ${found.objectives[1].title}`));
      out.push(Meshwright.pareto(found.objectives, found.points, (plan) => this.actions.plan(plan), this.actions.now()));
    }
    if (found.misses.length) out.push(this.misses(found.misses));
    out.push(this.rejected(found.rejected));
    this.find("found").replaceChildren(...out);
    this.find("said").textContent = found.verdict;
  }

  recommended(row) {
    const box = Meshwright.make("div", "tried"), text = Meshwright.make("p");
    text.append(Meshwright.make("b", "", "Recommended: "), Meshwright.make("code", "", row.text), Meshwright.make("span", "sets quiet", row.why));
    box.append(text, this.load(row.plan));
    return box;
  }

  load(plan) {
    const button = Object.assign(Meshwright.make("button", "", "Load"), { type: "button" });
    button.setAttribute("aria-label", `Load the plan ${plan}`);
    button.addEventListener("click", () => this.actions.plan(plan));
    return button;
  }

  table(found) {
    const box = Meshwright.make("div", "card scroll"), table = Meshwright.make("table", "found"), head = Meshwright.make("tr");
    head.append(...["", ...found.heads.slice(0, -1), "plan", ""].map((text) => Object.assign(Meshwright.make("th", "", text), { scope: "col" })));
    const thead = Meshwright.make("thead"), tbody = Meshwright.make("tbody");
    thead.append(head);
    found.rows.forEach((row, i) => {
      const line = Meshwright.make("tr"), plan = Meshwright.make("td");
      line.append(Meshwright.make("td", "quiet", row.tie ? "=" : String(i + 1)));
      line.append(...row.cells.slice(0, -1).map((text) => Meshwright.make("td", "n", text)));
      plan.append(Meshwright.make("code", "", row.text), Meshwright.make("span", "quiet delta", row.delta));
      if (row.variants.length) plan.append(this.variants(row));
      line.append(plan);
      const last = Meshwright.make("td");
      last.append(this.load(row.plan));
      line.append(last);
      tbody.append(line);
    });
    const caption = Meshwright.make("caption", "", "The best plan of each family; = cannot be told from the first");
    table.append(caption, thead, tbody);
    box.append(table);
    return box;
  }

  // The others of a plan's family, which take hardly longer.
  variants(row) {
    const details = Meshwright.make("details"), ul = Meshwright.make("ul", "recipes-not");
    ul.append(...row.variants.map((v) => {
      const item = Meshwright.make("li");
      item.append(Meshwright.make("code", "", v.text), " ", this.load(v.plan));
      return item;
    }));
    details.append(Meshwright.make("summary", "", row.cells.at(-1)), ul);
    return details;
  }

  misses(rows) {
    const box = Meshwright.make("div", "card"), ul = Meshwright.make("ul", "recipes-not");
    ul.append(...rows.map((row) => {
      const item = Meshwright.make("li");
      item.append(Meshwright.make("code", "", row.plan), ` lacks ${Meshwright.gibibytes(row.lacks)} `, Meshwright.make("span", "quiet", row.remedy), " ", this.load(row.plan));
      return item;
    }));
    box.append(Meshwright.make("h3", "", "Closest"), ul);
    return box;
  }

  rejected(rows) {
    const details = Meshwright.make("details"), dl = Meshwright.make("dl", "lines");
    dl.append(...rows.map(([why, count]) => {
      const pair = Meshwright.make("div");
      pair.append(Meshwright.make("dt", "", why), Meshwright.make("dd", "", count));
      return pair;
    }));
    details.append(Meshwright.make("summary", "", "Why plans were rejected"), dl);
    return details;
  }
};
