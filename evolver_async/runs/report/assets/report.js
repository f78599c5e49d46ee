"use strict";
// Curves and the trajectory browser. Text of the run is assigned as text only, never as HTML.

const ROLES = ["PROMPT", "EXPERIENCE", "ACTION", "OBSERVATION"];
const EXPERIENCE = 1, ACTION = 2, ROWS = 50, PREVIEW = 60;
const FORMAT_ERROR = 1, TOOL_ERROR = 2, INVALID_ACTION = 4;
const byId = (id) => document.getElementById(id);
const embedded = (id) => JSON.parse(byId(id).textContent);

function node(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// ---- parts: in the page, or in script files that call receiveTrajectories

const parts = new Map(), waiting = new Map();

globalThis.receiveTrajectories = (number, text) => waiting.get(number)?.(text);

function part(number) {
  if (!parts.has(number)) {
    const inline = byId(`part-${number}`);
    const text = inline ? Promise.resolve(inline.textContent) : new Promise((resolve, reject) => {
      waiting.set(number, resolve);
      const script = node("script", { src: `trajectories/${number}.js` });
      script.addEventListener("error", () => reject(new Error(`${script.src} cannot be loaded`)));
      document.head.append(script);
    });
    parts.set(number, text.then(unpack));
  }
  return parts.get(number);
}

// ---- figures

async function drawFigures() {
  const { docs, items } = embedded("figures");
  await Bokeh.embed.embed_items(docs, items);
  for (const drawn of Bokeh.documents) {
    for (const root of drawn.roots().filter((one) => one.name === "curve")) {
      root.on_event("tap", (event) => chooseStep(event.x));
    }
  }
}

function chooseStep(x) {
  const source = Bokeh.documents[0].get_model_by_name("steps");
  const steps = source ? Array.from(source.data.step) : [];
  if (!steps.length) return;
  const distance = (index) => Math.abs(steps[index] - x);
  let nearest = 0;
  steps.forEach((_, index) => { if (distance(index) < distance(nearest)) nearest = index; });
  source.selected.indices = [nearest];
  for (const name of Object.keys(filters)) filters[name].value = "";
  filters.step.value = steps[nearest];
  listTrajectories();
  byId("browser").scrollIntoView({ behavior: "smooth" });
}

// ---- the list

let index, columns, count = 0, shown = [], page = 0, chosen = -1;
const meta = embedded("meta");
const filters = {}, sorting = {};
const text = (name, row) => index.texts[name][columns[name][row]];
const label = (row) =>
  `${columns.group[row]}/${columns.member[row]}/${columns.attempt[row]}`;

function numberedVersion(name) {
  const [lineage, step] = name.split(".").map(Number);
  return name ? lineage * 1e9 + step : -1;
}

const KEYS = {
  "group": (row) => columns.group[row],
  "reward": (row) => columns.reward[row],
  "trained at step": (row) => columns.steps[row].at(-1) ?? -1,
  "lag": (row) => columns.lag[row],
  "version": (row) => numberedVersion(text("version", row)),
  "tokens": (row) => columns.tokens[row],
  "turns": (row) => columns.turns[row],
};

function select(title, options) {
  const made = node("select", {}, ...options.map(([value, name]) =>
    node("option", { value, textContent: name })));
  return [made, node("label", { textContent: title }, made)];
}

function makeFilters() {
  const form = byId("filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  const any = ["", "any"];
  const coded = (name) => [any, ...index.texts[name].map((one, place) => [place, one || "none"])];
  const add = (name, title, options) => {
    const [made, whole] = select(title, options);
    filters[name] = made;
    form.append(whole);
  };
  const addInput = (name, title, type) => {
    filters[name] = node("input", { type, placeholder: "any" });
    form.append(node("label", { textContent: title }, filters[name]));
  };
  addInput("step", "trained at step", "number");
  addInput("group", "group", "number");
  add("env", "environment", coded("env"));
  add("kind", "kind", coded("kind"));
  add("fate", "fate", coded("fate"));
  const versions = coded("version").slice(1)
    .sort((a, b) => numberedVersion(a[1]) - numberedVersion(b[1]));
  add("version", "oldest version", [any, ...versions]);
  add("success", "success", [any, [1, "yes"], [0, "no"]]);
  add("guided", "experience", [any, [1, "guided"], [0, "unguided"]]);
  add("measured", "ratio, advantage", [any, [1, "known"], [0, "unknown"]]);
  addInput("said", "text or task contains", "search");
  addInput("reward", "reward at least", "number");
  filters.reward.step = "any";
  const keys = Object.keys(KEYS).map((name) => [name, name]);
  for (const [name, title, options] of [
    ["key", "sort by", keys], ["order", "order", [[1, "ascending"], [-1, "descending"]]],
  ]) {
    const [made, whole] = select(title, options);
    sorting[name] = made;
    form.append(whole);
  }
  const clear = node("button", { type: "button", textContent: "clear" });
  clear.addEventListener("click", () => {
    for (const one of Object.values(filters)) one.value = "";
    listTrajectories();
  });
  form.append(clear);
  form.addEventListener("input", () => listTrajectories());
}

function matches(row) {
  const wanted = (name) => filters[name].value;
  if (wanted("step") !== "" && !columns.steps[row].includes(+wanted("step"))) return false;
  if (wanted("reward") !== "" && columns.reward[row] < +wanted("reward")) return false;
  const found = `${columns.said[row]}\n${text("task", row)}`.toLowerCase();
  if (!found.includes(wanted("said").toLowerCase())) return false;
  return ["group", "env", "kind", "fate", "version", "success", "guided", "measured"].every(
    (name) => wanted(name) === "" || columns[name][row] === +wanted(name));
}

function listTrajectories() {
  const key = KEYS[sorting.key.value], sign = +sorting.order.value;
  shown = Array.from({ length: count }, (_, row) => row).filter(matches);
  const keys = new Map(shown.map((row) => [row, key(row)]));
  shown.sort((a, b) => sign * (keys.get(a) - keys.get(b)) || a - b);
  page = 0;
  const step = filters.step.value;
  byId("summary").textContent = `${shown.length.toLocaleString("en")} of `
    + `${count.toLocaleString("en")} trajectories${step === "" ? "" : `, trained at step ${step}`}.`;
  showPage();
}

function showPage() {
  const heads = ["id", "env", "kind", "reward", "success", "turns", "tokens", "version", "lag",
    "step", "fate", "experience", "reply"];
  const rows = shown.slice(page * ROWS, (page + 1) * ROWS).map((row) => {
    const cells = [label(row), text("env", row), text("kind", row), columns.reward[row],
      columns.success[row] ? "yes" : "no", columns.turns[row], columns.tokens[row],
      text("version", row) || "–", columns.lag[row] < 0 ? "–" : columns.lag[row],
      columns.steps[row].join(", ") || "–", text("fate", row),
      columns.guided[row] ? "guided" : "",
      columns.said[row].slice(0, PREVIEW) + (columns.said[row].length > PREVIEW ? "…" : "")];
    const made = node("tr", { tabIndex: 0, className: row === chosen ? "chosen" : "" },
      ...cells.map((cell) => node("td", {
        textContent: cell, className: typeof cell === "number" ? "number" : "text" })));
    made.addEventListener("click", () => showTrajectory(row));
    made.addEventListener("keydown", (event) => { if (event.key === "Enter") showTrajectory(row); });
    return made;
  });
  byId("list").replaceChildren(
    node("tr", {}, ...heads.map((head) => node("th", { textContent: head }))), ...rows);
  const last = Math.max(0, Math.ceil(shown.length / ROWS) - 1);
  const turn = (title, to) => {
    const made = node("button", { type: "button", textContent: title, disabled: to < 0 || to > last });
    made.addEventListener("click", () => { page = to; showPage(); });
    return made;
  };
  byId("pager").replaceChildren(turn("previous", page - 1), ` page ${page + 1} of ${last + 1} `,
    turn("next", page + 1));
}

// ---- one trajectory

const MODES = ["role", "version", "log-prob", "label", "ratio", "advantage"];
let mode = "role";

function tokensOf(body) {
  // Flat list of tokens with what is known of each; measured values follow the ACTION tokens.
  const found = [];
  let measured = 0;
  body.s.forEach((sequence, number) => {
    let position = 0, action = 0, run = 0, left = sequence.v[0]?.[1] ?? 0;
    for (const [role, turn, length] of sequence.r) {
      for (const end = position + length; position < end; position++) {
        const one = { role, turn, sequence: number,
          text: sequence.o?.[position] ?? index.pieces[sequence.t[position]] };
        if (role === ACTION) {
          one.logprob = sequence.p[action++] / 1000;
          if (sequence.v.length) {
            while (left === 0) left = sequence.v[++run][1];
            one.version = index.versions[sequence.v[run][0]];
            left--;
          }
          one.ratio = body.measured?.ratios[measured];
          one.advantage = body.measured?.advantages[measured++];
        }
        found.push(one);
      }
    }
  });
  return found;
}

const clamp = (value) => Math.max(-1, Math.min(1, value));
function diverging(value) {  // -1 red, 0 white, 1 green
  const strength = Math.round(Math.abs(clamp(value)) * 55);
  return `hsl(${value < 0 ? 0 : 140} 75% ${97 - strength}%)`;
}

function colorOf(one, body, versions) {
  if (one.role !== ACTION) return "";
  switch (mode) {
    case "version": return one.version === undefined ? ""
      : `hsl(${(200 + 67 * versions.indexOf(one.version)) % 360} 70% 80%)`;
    case "log-prob": return `hsl(20 90% ${97 - Math.min(45, -18 * one.logprob)}%)`;
    case "label": return [diverging(-0.5), "", diverging(0.5)][1 + (body.labels[one.turn] ?? 0)];
    case "ratio": return one.ratio == null ? "" : diverging(Math.log(one.ratio) / Math.log(2));
    case "advantage": return one.advantage == null ? "" : diverging(one.advantage / 2);
    default: return "";
  }
}

function tipOf(one) {
  const tip = [ROLES[one.role]];
  if (one.version !== undefined) tip.push(`version ${one.version}`);
  if (one.logprob !== undefined) tip.push(`log-prob ${one.logprob}`);
  if (one.ratio != null) tip.push(`ratio ${one.ratio}`);
  if (one.advantage != null) tip.push(`advantage ${one.advantage}`);
  return tip.join(", ");
}

function turnHead(body, turn) {
  const reward = body.rewards[turn], flag = body.flags[turn], mark = body.labels[turn];
  const head = node("h4", { textContent: `Turn ${turn + 1}, reward ${reward}` });
  const badge = (name, kind) =>
    head.append(node("span", { className: `badge ${kind}`, textContent: name }));
  if (mark > 0) badge("GOOD", "good");
  if (mark < 0) badge("BAD", "bad");
  if (flag & FORMAT_ERROR) badge("format error", "error");
  if (flag & INVALID_ACTION) badge("invalid action", "error");
  if (flag & TOOL_ERROR) badge("tool error", "error");
  return head;
}

function viewOf(title, tokens, body, versions) {
  // The tokens of a view, in blocks: the prompt, each turn, what follows it.
  const view = node("div", {}, node("h3", { textContent: title }));
  let block, text, key = "";
  for (const one of tokens) {
    const now = `${one.sequence}/${one.turn}`;
    if (now !== key) {
      const player = body.of[one.sequence];
      if ((one.sequence !== 0 || player) && !key.startsWith(`${one.sequence}/`)) {
        const name = `Sequence ${one.sequence + 1}${player && `, player ${player}`}`;
        view.append(node("h4", { textContent: name }));
      }
      key = now;
      text = node("div", { className: "tokens" });
      block = one.turn < 0 ? text
        : node("div", { className: "turn" }, turnHead(body, one.turn), text);
      view.append(block);
    }
    const span = node("span", { textContent: one.text, title: tipOf(one) });
    if (mode === "role" || one.role !== ACTION) span.className = `role${one.role}`;
    const color = colorOf(one, body, versions);
    if (color) span.style.backgroundColor = color;
    text.append(span);
  }
  return view;
}

function sentencesOf(row, body) {
  const uses = body.uses.map(([step, lineage, lag, fate, abandoned]) =>
    `step ${step} of lineage ${lineage}: ${fate || "not reported"}`
    + `${lag == null ? "" : `, lag ${lag}`}${abandoned ? ", abandoned by a resume" : ""}`);
  const lines = [
    `Task ${text("task", row)}, ${text("kind", row)}, actor ${body.actor}, ${body.policy} policy.`,
    `Reward ${columns.reward[row]}, success ${columns.success[row] ? "yes" : "no"}, `
      + `${body.end}, ${body.seconds} s. Fate: ${text("fate", row)}.`,
    uses.length ? `Takes: ${uses.join("; ")}.` : "No take had it.",
  ];
  const terms = Object.entries(body.terms).map(([name, value]) => `${name} ${value}`);
  if (terms.length) lines.push(`Reward terms, without their weights: ${terms.join(", ")}.`);
  if (body.players.length) {
    lines.push(`Players: ${body.players.map(([name, reward]) => `${name} ${reward}`).join(", ")}.`);
  }
  if (body.source) lines.push(`Labels by ${body.source}.`);
  if (body.experience.length) lines.push(`Experience entries: ${body.experience.join(", ")}.`);
  if (!body.measured) {
    lines.push("Ratio and advantage of this trajectory were not recorded: it is not in samples/.");
  } else {
    lines.push(`Ratio and advantage are those of step ${body.measured.step}`
      + `${body.measured.stripped ? ", without the experience" : ""}.`);
  }
  return lines;
}

async function showTrajectory(row) {
  chosen = row;
  showPage();
  const detail = byId("detail");
  let body;
  try {
    body = (await part(columns.part[row]))[columns.slot[row]];
  } catch (error) {
    detail.replaceChildren(node("p", { className: "warning", textContent: String(error) }));
    return;
  }
  if (chosen === row) drawTrajectory(row, body);
}

function drawTrajectory(row, body) {
  const tokens = tokensOf(body);
  const versions = [...new Set(tokens.map((one) => one.version))].filter((one) => one !== undefined);
  const known = { ratio: body.measured, advantage: body.measured, version: versions.length,
    label: body.labels.some((one) => one !== 0) };
  const [chooser, whole] = select("colour by", MODES.map((one) =>
    [one, one in known && !known[one] ? `${one} (not recorded)` : one]));
  chooser.value = mode;
  chooser.addEventListener("change", () => { mode = chooser.value; drawTrajectory(row, body); });
  const legend = node("div");
  const swatch = (name, className, color) => {
    const made = node("span", { className: `swatch ${className}`, textContent: name });
    if (color) made.style.backgroundColor = color;
    legend.append(made);
  };
  if (mode === "role") ROLES.forEach((name, role) => swatch(name, `role${role}`));
  if (mode === "version") {
    for (const one of versions) swatch(one, "", colorOf({ role: ACTION, version: one }, body, versions));
  }
  if (mode === "ratio") [0.5, 1, 2].forEach((one) => swatch(one, "", diverging(Math.log2(one))));
  if (mode === "advantage") [-2, 0, 2].forEach((one) => swatch(one, "", diverging(one / 2)));
  if (mode === "label") { swatch("BAD", "", diverging(-0.5)); swatch("GOOD", "", diverging(0.5)); }
  if (mode === "log-prob") [0, -1, -2.5].forEach((one) =>
    swatch(one, "", colorOf({ role: ACTION, logprob: one }, body, versions)));
  const views = node("div", { className: "views" });
  const guided = tokens.some((one) => one.role === EXPERIENCE);
  views.append(viewOf(guided ? "Guided: as it was sampled" : "Tokens", tokens, body, versions));
  if (guided) {
    const plain = tokens.filter((one) => one.role !== EXPERIENCE);
    views.append(viewOf(`Stripped: without experience (experience.internalise=${meta.internalise})`,
      plain, body, versions));
  }
  byId("detail").replaceChildren(
    node("h3", { textContent: `Trajectory ${label(row)}` }),
    ...sentencesOf(row, body).map((line) => node("p", { textContent: line })),
    node("div", { className: "modes" }, whole, legend), views);
}

// A page of several runs leads here with the step of a point.
function followHash() {
  const asked = /^#step=(\d+)$/.exec(location.hash);
  if (asked && count) chooseStep(+asked[1]);
}

async function begin() {
  index = await unpack(byId("index").textContent);
  columns = index.columns;
  count = columns.group?.length ?? 0;
  if (count) {
    makeFilters();
    listTrajectories();
  } else {
    byId("split").remove();
  }
  await drawFigures();
  followHash();
  addEventListener("hashchange", followHash);
  document.body.dataset.ready = "yes";
}

function complain(error) {
  byId("summary").textContent = `This browser cannot show the page: ${error}`;
  document.body.dataset.ready = "failed";
}

begin().catch(complain);
