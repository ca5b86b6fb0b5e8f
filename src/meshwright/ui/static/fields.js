// Fields: the controls of the question. They show what the last answer understood, and say what was done to them.
"use strict";

Meshwright.Fields = class {
  constructor(form, changed) {
    this.form = form;
    this.changed = changed;
    this.stops = {};
    this.typed = 0;
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const name of Meshwright.state.FIELDS) this.text(name);
    for (const name of Meshwright.state.PASTED) this.paste(name);
    form.querySelectorAll("[data-slider]").forEach((row) => this.slider(row));
    form.querySelectorAll("[data-choice]").forEach((row) => this.choice(row));
    form.querySelectorAll("[data-switch]").forEach((row) => this.toggle(row));
    form.querySelectorAll("[data-number]").forEach((row) => this.number(row));
  }

  find(kind, name) { return this.form.querySelector(`[data-${kind}="${name}"]`); }

  text(name) {
    const input = this.find("field", name).querySelector("input");
    input.addEventListener("input", () => {
      this.typed = performance.now();
      Meshwright.state.write({ [name]: input.value });
      this.changed(true);
    });
    input.addEventListener("change", () => { this.typed = 0; this.changed(false); });
  }

  // A pasted file goes before the name beside it; taking it away brings the name back.
  paste(name) {
    const area = this.find("paste", name).querySelector("textarea");
    area.addEventListener("input", () => {
      this.typed = performance.now();
      Meshwright.state.write({ [name]: area.value });
      this.changed(true);
    });
  }

  slider(row) {
    const name = row.dataset.slider, input = row.querySelector("input");
    input.addEventListener("input", () => {
      const stop = this.stops[name][Number(input.value)];
      row.querySelector("output").textContent = stop[0];
      input.setAttribute("aria-valuetext", stop[1] ? `${stop[0]}, with ${stop[1]}` : String(stop[0]));
      this.said(stop[1] ? `${name}${stop[0]} also sets ${stop[1]}` : "");
      Meshwright.state.move(name, stop[0]);
      this.changed(false);
    });
    input.addEventListener("pointerdown", () => { row.dataset.held = ""; });
    for (const end of ["pointerup", "pointercancel", "blur"]) {
      input.addEventListener(end, () => { delete row.dataset.held; if (this.last) this.slide(row, this.last); });
    }
  }

  choice(row) {
    const name = row.dataset.choice, select = row.querySelector("select");
    select.addEventListener("change", () => {
      const stop = this.stops[name].find(([value]) => String(value) === select.value);
      if (!stop) return;
      this.said(stop[1] ? `also sets ${stop[1]}` : "");
      Meshwright.state.move(name, stop[0]);
      this.changed(false);
    });
  }

  toggle(row) {
    const name = row.dataset.switch, input = row.querySelector("input");
    input.addEventListener("change", () => { Meshwright.state.move(name, input.checked); this.changed(false); });
  }

  number(row) {
    const name = row.dataset.number, input = row.querySelector("input");
    const send = (value) => {
      if (!(value >= 1 && value <= 1e9)) return;
      input.value = value;
      Meshwright.state.move(name, value);
      this.changed(false);
    };
    const now = () => Number.parseInt(input.value, 10) || 0;
    input.addEventListener("change", () => send(now()));
    input.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp") { event.preventDefault(); send(now() * 2); }
      if (event.key === "ArrowDown") { event.preventDefault(); send(Math.max(1, Math.floor(now() / 2))); }
    });
    row.querySelectorAll("[data-step]").forEach((button) => button.addEventListener("click", () => {
      send(button.dataset.step === "double" ? now() * 2 : Math.max(1, Math.floor(now() / 2)));
    }));
  }

  said(text) { this.form.querySelector('[data-part="moved"]').textContent = text || "\u00a0"; }

  // Shows an answer: texts (not where somebody types), hints, values with their stops, and what is wrong where.
  show(found) {
    this.last = found;
    const { asked, hints = {} } = found, wrong = this.byControl(found.errors);
    this.unfold(asked, wrong);
    for (const name of Meshwright.state.FIELDS) this.showText(name, asked, hints, wrong);
    for (const name of Meshwright.state.PASTED) this.showPaste(name, asked);
    this.form.querySelectorAll("[data-slider]").forEach((row) => { if (!("held" in row.dataset)) this.slide(row, found); });
    this.form.querySelectorAll("[data-choice]").forEach((row) => this.showChoice(row, found));
    this.form.querySelectorAll("[data-switch]").forEach((row) => {
      const control = found.controls?.[row.dataset.switch], input = row.querySelector("input");
      input.disabled = !control;
      if (control) { this.stops[row.dataset.switch] = control.stops; input.checked = control.value; }
      if (control) input.disabled = control.stops.length < 2;
    });
    this.form.querySelectorAll("[data-number]").forEach((row) => {
      const input = row.querySelector("input"), value = found.workload?.[row.dataset.number];
      row.querySelectorAll("input, button").forEach((part) => { part.disabled = false; });
      if (value !== undefined && document.activeElement !== input) input.value = value;
    });
    this.form.querySelectorAll("[data-slider], [data-choice]").forEach((row) => {
      this.complain(row, row.querySelector("input, select"), wrong[row.dataset.slider || row.dataset.choice]);
    });
  }

  byControl(errors) {
    const found = {};
    for (const error of errors) for (const name of error.controls || []) (found[name] ||= []).push(error);
    found.train = [...(found.train || []), ...(found.batch || []), ...(found.seq || [])];
    return found;
  }

  showText(name, asked, hints, wrong) {
    const row = this.find("field", name), input = row.querySelector("input"), hint = row.querySelector("[data-hint]");
    row.dataset.usual ||= hint.textContent;
    if (document.activeElement !== input || !this.typed) input.value = asked[name];
    const said = wrong[name]?.length ? wrong[name].map((e) => e.message).join("; ") : "";
    hint.textContent = said || hints[name] || row.dataset.usual;
    row.classList.toggle("is-wrong", Boolean(said));
    input.setAttribute("aria-invalid", String(Boolean(said)));
  }

  showPaste(name, asked) {
    const box = this.find("paste", name), area = box.querySelector("textarea");
    if (document.activeElement !== area) area.value = asked[name];
    if (asked[name]) box.open = true;
  }

  // What is said or wrong inside a fold is not hidden by it.
  unfold(asked, wrong) {
    this.form.querySelectorAll("details.more").forEach((fold) => {
      const inside = [...fold.querySelectorAll("[data-field]")].map((row) => row.dataset.field);
      if (inside.some((name) => asked[name] || wrong[name]?.length)) fold.open = true;
    });
  }

  slide(row, found) {
    const name = row.dataset.slider, control = found.controls?.[name], input = row.querySelector("input");
    input.disabled = !control || control.stops.length < 2;
    row.classList.toggle("is-fixed", input.disabled);
    if (!control) return;
    const places = control.stops.map(([value]) => value);
    this.stops[name] = control.stops;
    input.max = String(places.length - 1);
    input.value = String(Math.max(places.indexOf(control.value), 0));
    row.querySelector("output").textContent = control.value;
    input.setAttribute("aria-valuetext", String(control.value));
    row.querySelector(".stops").replaceChildren(...control.stops.map(([value, also], i) => {
      const dot = Meshwright.make("span", also ? "stop also" : "stop");
      dot.style.setProperty("--at", places.length > 1 ? String(i / (places.length - 1)) : "0");
      dot.title = also ? `${value}, with ${also}` : String(value);
      return dot;
    }));
  }

  showChoice(row, found) {
    const name = row.dataset.choice, control = found.controls?.[name], select = row.querySelector("select");
    select.disabled = !control;
    if (!control) return;
    this.stops[name] = control.stops;
    const offered = new Map(control.stops.map(([value, also]) => [String(value), also]));
    if (![...select.options].some((o) => o.value === String(control.value))) {
      select.append(new Option(String(control.value), String(control.value)));
    }
    for (const option of select.options) {
      option.dataset.text ||= option.textContent;
      const also = offered.get(option.value);
      option.disabled = also === undefined;
      option.textContent = also ? `${option.dataset.text}, with ${also}` : option.dataset.text;
      if (option.value === String(control.value)) option.textContent = option.dataset.text;
    }
    select.value = String(control.value);
  }

  // An error's text stands at the first of its controls, its mark at all of them; how to mend it is said above.
  complain(row, input, errors = []) {
    const place = row.querySelector(".wrong"), name = row.dataset.slider || row.dataset.choice;
    const mine = errors.filter((e) => e.controls[0] === name);
    place.hidden = !mine.length;
    place.replaceChildren(...mine.map((e) => Meshwright.make("span", "", Meshwright.sentence(e.message))));
    input.setAttribute("aria-invalid", String(errors.length > 0));
    row.classList.toggle("is-wrong", errors.length > 0);
  }
};
