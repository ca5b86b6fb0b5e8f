// State: the question, what was done to it since it was last answered, and the address that holds it.
"use strict";

Meshwright.state = (() => {
  const FIELDS = ["model", "on", "train", "plan", "framework", "tokens", "days", "budget", "price"];
  const PASTED = ["config", "cluster"];
  const EXAMPLE = { model: "llama3-70b", on: "64xh100", train: "batch=512,seq=8192", plan: "tp8 pp4 vpp5 zero1" };
  const empty = () => ({ ...Object.fromEntries([...FIELDS, ...PASTED].map((name) => [name, ""])), tries: [] });

  // `asked` is the question as the fields show it. `base` and `moves` are what is sent: controls are moved from the
  // question as it was before the first of them was touched, so that sliding there and back changes nothing.
  let asked = empty(), base = asked, moves = {}, answered = true;

  function write(changes) {
    asked = { ...asked, ...changes };
    base = { ...(answered ? asked : base), ...changes };
    if (answered) moves = {};
    answered = false;
  }

  function move(name, value) {
    const again = name in moves && Object.keys(moves).length === 1;
    if (answered && !again) { base = asked; moves = {}; }
    delete moves[name];
    moves[name] = value;
    answered = false;
  }

  function confirm(found) {
    asked = found;
    answered = true;
  }

  // The whole question in the part of the address that no server sees. What was pasted is packed.
  async function address() {
    const words = new URLSearchParams();
    for (const name of FIELDS) if (asked[name]) words.set(name, asked[name]);
    if (asked.tries.length) words.set("try", asked.tries.join(","));
    for (const name of PASTED) if (asked[name]) words.set(name, await packed(asked[name]));
    return `#${words.toString().replaceAll("%2C", ",").replaceAll("%3D", "=").replaceAll("%3A", ":")}`;
  }

  async function fromAddress(hash) {
    const words = new URLSearchParams(hash.replace(/^#/, ""));
    const found = empty();
    for (const name of FIELDS) found[name] = words.get(name) || "";
    if (words.get("try")) found.tries = words.get("try").split(",").filter(Boolean).slice(0, 20);
    for (const name of PASTED) if (words.get(name)) found[name] = await unpacked(words.get(name)).catch(() => "");
    return found;
  }

  const says = (question) => FIELDS.some((name) => question[name]) || PASTED.some((name) => question[name]);

  async function packed(text) {
    const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    let letters = "";
    for (const byte of bytes) letters += String.fromCharCode(byte);
    return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  }

  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return (await new Response(stream).text()).slice(0, 100000);
  }

  return {
    FIELDS, PASTED, EXAMPLE, empty, write, move, confirm, address, fromAddress, says,
    get asked() { return asked; },
    get request() { return { asked: base, moves }; },
    set: (question) => { asked = base = { ...empty(), ...question }; moves = {}; answered = false; },
  };
})();
