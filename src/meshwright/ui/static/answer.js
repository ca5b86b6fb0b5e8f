// Answer: the verdict, what is wrong, what would mend it, and what to know before believing it.
"use strict";

Meshwright.Answer = class {
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    this.open = {};
    // In a narrow window the answer is out of sight while controls are moved: then it is repeated at the edge.
    this.peek = document.querySelector('[data-part="peek"]');
    new IntersectionObserver(([box]) => this.peek.classList.toggle("is-shown", !box.isIntersecting)).observe(root);
    this.find = (name) => root.querySelector(`[data-part="${name}"]`);
  }

  // Old figures stay, dimmed, until there are new ones: nothing jumps.
  wait(on) {
    this.root.classList.toggle("is-waiting", on);
    clearTimeout(this.compiling);
    if (on && !this.answered) {
      this.compiling = setTimeout(() => this.fit("", "…", "Starting: a new installation compiles once, some seconds"), 2500);
    }
  }

  show(found) {
    const { verdict } = found;
    this.answered = true;
    this.root.classList.toggle("is-stale", !verdict);
    if (verdict) {
      this.fit(verdict.fits ? "good" : "bad", verdict.fits ? "✓" : "✕", Meshwright.sentence(verdict.fit));
      Meshwright.place(this.find("tiles"), found.html);
      this.find("plan").textContent = verdict.plan;
      this.find("run").textContent = verdict.run.length ? `Training run: ${verdict.run[0][1]} (${verdict.run[0][2]})` : "";
      document.title = `${verdict.title} · Meshwright`;
      this.summarise(verdict.short, verdict.fits);
      this.speak(verdict.said);
    } else {
      const count = found.errors.length;
      this.fit("bad", "!", count === 1 ? "One thing is wrong with this question" : `${count} things are wrong with this question`);
      this.find("run").textContent = "";
      this.summarise(found.errors[0]?.message || "", false);
      this.speak(found.errors.map((e) => e.message).join(". "));
    }
    this.find("notes").replaceChildren(...this.notes(found));
  }

  fit(kind, mark, text) {
    const line = this.find("fit");
    line.classList.toggle("good", kind === "good");
    line.classList.toggle("bad", kind === "bad");
    line.querySelector(".badge").textContent = mark;
    line.querySelector("strong").textContent = text;
  }

  summarise(text, good) {
    this.peek.textContent = Meshwright.sentence(text);
    this.peek.classList.toggle("good", good);
    this.peek.classList.toggle("bad", !good);
  }

  clock(milliseconds) { this.find("clock").textContent = `${Math.round(milliseconds)} ms`; }

  // Said once typing and sliding have come to rest.
  speak(text) {
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => { this.find("live").textContent = text; }, 700);
  }

  notes(found) {
    const out = [];
    if (found.errors.length) out.push(this.errors(found));
    const { verdict } = found;
    if (verdict?.tried) out.push(this.tried(verdict.tried));
    for (const { said, met } of verdict?.limits || []) {
      out.push(Meshwright.make("p", `limit-met ${met ? "good" : "bad"}`, `${met ? "✓" : "✕"} ${Meshwright.sentence(said)}`));
    }
    const folds = Meshwright.make("div", "folds");
    if (verdict?.remedies.length) {
      const [need, ...ways] = verdict.remedies;
      folds.append(this.fold("ways", `What would make it fit: ${ways.length || 1} ${ways.length > 1 ? "ways" : "way"}`, list("remedies", need, ways)));
    }
    const count = found.warnings?.length;
    if (count) folds.append(this.fold("notes", `Before you believe it: ${count} ${count === 1 ? "note" : "notes"}`, list("warnings", "", found.warnings)));
    if (verdict) out.push(folds);
    return out;
  }

  // Stays as it was left: what is below does not move while controls do.
  fold(name, title, content) {
    const details = Meshwright.make("details", `fold ${name}`);
    details.append(Meshwright.make("summary", "", title), content);
    details.open = Boolean(this.open[name]);
    details.addEventListener("toggle", () => { this.open[name] = details.open; });
    return details;
  }

  errors(found) {
    const box = Meshwright.make("div", "remedies"), ul = Meshwright.make("ul", "errors");
    for (const error of found.errors) {
      const item = Meshwright.make("li", "", `${Meshwright.sentence(error.message)}. `);
      if (error.code) item.append(Meshwright.make("code", "quiet", error.code), " ");
      if (error.help) item.append(Meshwright.make("span", "quiet", error.help));
      ul.append(item);
    }
    box.append(ul);
    if (found.mended) {
      const button = Meshwright.make("button", "primary", `Use the nearest legal plan: ${found.mended}`);
      button.type = "button";
      button.addEventListener("click", () => this.actions.plan(found.mended));
      box.append(button);
    }
    return box;
  }

  tried(tried) {
    const box = Meshwright.make("div", "tried"), faster = tried.gain >= 1;
    const change = `${(Math.abs(tried.gain - 1) * 100).toFixed(1)}% ${faster ? "faster" : "slower"} than ${tried.before} without`;
    const text = `With ${Meshwright.state.asked.tries.join(", ")}: ${change}, ${tried.memory} on the fullest device, ${tried.exact ? "training stays exact" : "training is approximate"}.`;
    const keep = Meshwright.make("button", "", "Keep this plan"), drop = Meshwright.make("button", "", "Without");
    keep.type = drop.type = "button";
    keep.addEventListener("click", () => this.actions.plan(tried.plan));
    drop.addEventListener("click", () => this.actions.tries([]));
    box.append(Meshwright.make("p", "", text), keep, drop);
    return box;
  }
};

// HTML of the report in its place. Styles of attributes are set one by one, as the page's policy wants it.
Meshwright.place = (root, html) => {
  root.innerHTML = html;
  root.querySelectorAll("[data-style]").forEach((element) => {
    for (const rule of element.dataset.style.split(";")) {
      const at = rule.indexOf(":");
      if (at > 0) element.style.setProperty(rule.slice(0, at).trim(), rule.slice(at + 1).trim());
    }
    delete element.dataset.style;
  });
};

// A text with a capital, unless it begins with a name such as tp=3.
Meshwright.sentence = (text) => (/^[a-z]+\b(?![=\d])/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text);

function list(name, title, rows) {
  const box = Meshwright.make("div", name), ul = Meshwright.make("ul");
  if (title) box.append(Meshwright.make("p", "", Meshwright.sentence(title)));
  ul.append(...rows.map((row) => Meshwright.make("li", "", Meshwright.sentence(row))));
  box.append(ul);
  return box;
}
