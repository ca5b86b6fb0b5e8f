// Recipes: papers as switches, each with what it would bring to the plan.
"use strict";

Meshwright.Recipes = class {
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    this.asked = "";
  }

  async refresh(asked) {
    const key = JSON.stringify(asked);
    if (key === this.asked) return;
    this.root.classList.add("is-waiting");
    const found = await Meshwright.ask.ask("recipes", { asked });
    if (!found) return;
    this.root.classList.remove("is-waiting");
    if (!found.answer) {
      this.root.replaceChildren(...found.errors.map((e) => Meshwright.make("p", "note", e.message)));
      return;
    }
    this.asked = key;
    const held = document.activeElement?.dataset?.recipe;
    const rows = found.answer.recipes, works = rows.filter((r) => !r.error), not = rows.filter((r) => r.error);
    const ul = Meshwright.make("ul", "card recipes");
    ul.append(...works.map((row) => this.row(row, asked.tries)));
    const rest = Meshwright.make("details"), out = Meshwright.make("ul", "recipes-not");
    out.append(...not.map((row) => {
      const item = Meshwright.make("li", "", row.title);
      item.append(Meshwright.make("span", "quiet", ` ${row.error}`));
      return item;
    }));
    rest.append(Meshwright.make("summary", "", `${not.length} that this plan gives nothing to work on`), out);
    this.root.replaceChildren(ul, ...(not.length ? [rest] : []));
    if (held) this.root.querySelector(`[data-recipe="${CSS.escape(held)}"]`)?.focus();
  }

  row(row, tries) {
    const item = Meshwright.make("li", row.changed ? "" : "is-idle"), label = Meshwright.make("label", "switch");
    const input = Object.assign(document.createElement("input"), { type: "checkbox", checked: row.on });
    input.setAttribute("role", "switch");
    input.dataset.recipe = row.id;
    input.addEventListener("change", () => {
      const others = tries.filter((id) => id !== row.id && !row.instead.includes(id));
      this.actions.tries(input.checked ? [...others, row.id] : others);
    });
    const text = Meshwright.make("span", "recipe-name", row.title);
    text.append(Meshwright.make("span", "quiet", `${row.cited}; ${row.state}`));
    label.append(input, text);
    const facts = Meshwright.make("span", "recipe-facts");
    facts.append(...this.facts(row));
    const why = Meshwright.make("p", "quiet", row.mechanism);
    if (row.changed) why.append(" ", Meshwright.make("code", "", row.sets));
    if (row.instead.length) why.append(` Instead of ${row.instead.join(", ")}.`);
    item.append(label, facts, why);
    return item;
  }

  facts(row) {
    if (!row.changed) return [Meshwright.make("span", "quiet", "the plan has it already")];
    const percent = (row.gain - 1) * 100, kind = percent > 0.05 ? "good" : percent < -0.05 ? "bad" : "quiet";
    const gain = Math.abs(percent) < 0.05 ? "as fast" : `${Math.abs(percent).toFixed(1)}% ${percent > 0 ? "faster" : "slower"}`;
    const gib = row.memory_bytes / 2 ** 30, memory = Math.abs(gib) < 0.05 ? "same memory" : `${gib > 0 ? "+" : "−"}${Math.abs(gib).toFixed(1)} GiB`;
    const out = [Meshwright.make("b", kind, gain), Meshwright.make("span", "", memory)];
    out.push(Meshwright.make("span", row.exact ? "quiet" : "flag", row.exact ? "exact" : "approximate"));
    if (!row.fits) out.push(Meshwright.make("span", "bad", "does not fit"));
    return out;
  }
};
