"use strict";
// Draws what is opened. Details of tests and graphs lie packed (base64 of zlib) in script tags of this page.

const CONTEXT = 3, CHUNK = 400, MOST_FOUND = 200, MOST_BARS = 24, MOST_TENSORS = 40, BLOCKS = 200;

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

// Make a row a button, for the mouse and for the keyboard.
function pressed(row, act) {
  row.tabIndex = 0;
  row.setAttribute("role", "button");
  row.addEventListener("click", act);
  row.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } });
}

const counted = (count, what) => `${bytes(count)} ${what}${count === 1 ? "" : "s"}`;

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

const known = new Map();
function graphText(key) {
  if (!known.has(key)) {
    const holder = document.getElementById("g-" + key);
    known.set(key, holder ? unpack(holder.textContent).then((text) => text.replace(/\n$/, "").split("\n")) : Promise.resolve([]));
  }
  return known.get(key);
}

// --- the list of tests ---------------------------------------------------------------------

const tests = [...document.querySelectorAll(".test")];

function sift() {
  const wanted = document.getElementById("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const outcomes = new Set([...document.querySelectorAll("[data-outcome]:checked")].map((box) => box.dataset.outcome));
  let shown = 0;
  for (const test of tests) {
    const words = test.dataset.words;
    test.hidden = !outcomes.has(test.dataset.outcome) || !wanted.every((word) => words.includes(word));
    shown += test.hidden ? 0 : 1;
  }
  document.getElementById("shown").textContent = shown === tests.length ? "" : `${shown} of ${tests.length} tests`;
}

async function toggle(test, open) {
  const body = test.querySelector(".body"), button = test.querySelector("h2 button");
  open = open === undefined ? body.hidden : open;
  body.hidden = !open;
  for (const part of test.querySelectorAll(".message, .picture")) part.hidden = open;  // the body has them, too
  button.setAttribute("aria-expanded", String(open));
  if (open && !body.dataset.drawn) {
    body.dataset.drawn = "drawing";
    try {
      draw(body, await detailsOf(test));
    } catch (error) {
      body.append(el("p", {}, `The details could not be read: ${error}`));
    }
    body.dataset.drawn = "done";
  }
}

const detailsOf = async (test) => JSON.parse(await unpack(document.getElementById("d" + test.id.slice(1)).textContent));

// What one sees of a failed test before opening it: where bits differ, or two payloads.
async function drawPicture(test) {
  const details = await detailsOf(test);
  const differing = details.comparisons.find((each) => each.differing.length && (each.must_differ ? each.outcome !== "different" : each.outcome !== "equal"));
  const paired = details.layouts.find((each) => each.problems.length && each.sides.length === 2);
  const parts = [differing && bitsMap(differing, ranksOf(differing)), paired && pairedSides(...paired.sides)[0]];
  test.querySelector(".picture").append(...parts.filter(Boolean));
}

// A page may have a thousand failed tests: each is drawn when it comes near the window.
const pictures = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
  pictures.unobserve(entry.target);
  drawPicture(entry.target);
}), { rootMargin: "600px" });

function draw(body, test) {
  const parts = [
    ...test.goldens.map((golden) => section(`Golden ${golden.name}: accepted, and obtained`, opened(golden.name, ...golden.keys, golden.changes))),
    test.earlier.lines.length ? section("Since the earlier report", el("ul", { class: "words" }, test.earlier.lines.map((line) => el("li", {}, line))),
      ...test.earlier.graphs.map(([name, was, now]) => folded(`${name}: then, and now`, () => opened(name, was, now, null)))) : null,
    ...test.failures.map(([when, text]) => section(when === "call" ? "Failure" : `Failure in ${when}`, el("pre", { class: "long" }, text))),
    ...test.comparisons.map((compared) => comparison(compared, test.failures)),
    ...test.layouts.map(layout),
    ...test.pipelines.map((pipeline, number) => passes(pipeline, number, test.pipelines.length)),
    test.memories.length ? section("Peak memory", test.memories.map((key) => folded("bytes by node", () => curves(["graph"], [key])))) : null,
    test.said.length ? section("What was checked", el("pre", {}, test.said.join("\n"))) : null,
    ...test.sections.map(([title, text]) => folded(title, () => el("pre", { class: "long" }, text))),
  ].filter(Boolean);
  body.append(...(parts.length ? parts : [el("p", { class: "dim" }, "This test has nothing to show: no pass, comparison, layout or output.")]));
}

function section(title, ...children) {
  return el("div", {}, el("h3", {}, title), ...children);
}

// A button, and the place where what it makes is shown and hidden.
function unfolding(title, make) {
  const place = el("div", { hidden: true });
  const button = el("button", { type: "button", onclick: () => {
    if (!place.childElementCount) place.append(make());
    place.hidden = !place.hidden;
    button.ariaExpanded = String(!place.hidden);
    button.firstChild.textContent = place.hidden ? "▸ " : "▾ ";
  } }, "▸ ", title);
  return [button, place];
}

function folded(title, make) {
  return el("div", { style: "margin-top:8px" }, unfolding(title, make));
}

// --- digests -------------------------------------------------------------------------------

const ranksOf = (compared) => [...new Set([...compared.actual, ...compared.expected].map((row) => row[1]))].sort((a, b) => a - b);

function comparison(compared, failures) {
  const verdict = compared.must_differ ? `${compared.outcome}, and it had to differ` : compared.outcome;
  const title = `Comparison${compared.what ? " of " + compared.what : ""}: ${verdict} (${counted(compared.tensors, "tensor")})`;
  const ranks = ranksOf(compared);
  const found = new Map();
  for (const [side, rows] of [["actual", compared.actual], ["expected", compared.expected]])
    for (const [step, rank, phase, digest] of rows) {
      const key = `${step}|${phase}`;
      if (!found.has(key)) found.set(key, { step, phase, cells: new Map() });
      const cell = found.get(key).cells;
      cell.set(rank, { ...cell.get(rank), [side]: digest });
    }
  const first = compared.first && [compared.first[0], compared.first[1], compared.first[2]].join("|");
  const rows = [...found.values()].map(({ step, phase, cells }) => el("tr", {}, el("td", { class: "number" }, String(step)), el("td", {}, phase),
    ranks.map((rank) => digestCell(cells.get(rank) || {}, `${step}|${rank}|${phase}` === first, compared.must_differ))));
  const head = el("tr", {}, el("th", {}, "step"), el("th", {}, "of"), ranks.map((rank) => el("th", {}, `rank ${rank}`)));
  const table = rows.length ? el("div", { class: "scroll" }, el("table", { class: "plain mono digests" }, head, rows)) : null;
  const isSaid = compared.verdict.split("\n").every((line) => failures.some(([, text]) => text.includes(line)));  // by the failure above
  const words = compared.outcome === "equal" || isSaid ? null : el("pre", {}, compared.verdict);
  return section(title, words, table, bitsMap(compared, ranks));
}

// Which tensors differ, and on which steps and ranks: a row a tensor, the one of the first difference on top.
function bitsMap(compared, ranks) {
  if (!compared.differing.length || !ranks.length) return null;
  const known = new Set([...compared.actual, ...compared.expected].map(([step, rank, phase]) => `${step}|${rank}|${phase}`));
  const steps = [...new Set([...compared.actual, ...compared.expected].map(([step]) => step))].sort((a, b) => a - b);
  const tensors = new Map(compared.first ? [[`${compared.first[2]} of ${compared.first[3]}`, new Set()]] : []);
  for (const [step, rank, phase, name] of compared.differing) {
    const tensor = `${phase} of ${name}`;
    if (!tensors.has(tensor)) tensors.set(tensor, new Set());
    tensors.get(tensor).add(`${step}|${rank}`);
  }
  const shown = [...tensors].slice(0, MOST_TENSORS), left = 330, top = 18, height = 16;
  const cell = Math.max(1, Math.min(16, 760 / (steps.length * (ranks.length + 0.5)))), group = cell * (ranks.length + 0.5);
  const picture = svg("svg", { class: "bits", role: "img", viewBox: `0 0 1100 ${top + shown.length * height + 2}`, width: "100%", style: "max-width:1400px" });
  const every = Math.ceil(24 / group);
  steps.forEach((step, nth) => {
    if (!nth || (nth % every === 0 && nth * group > 44)) picture.append(svg("text", { x: left + nth * group, y: 12, class: "dim" }, nth ? `${step}` : `step ${step}`));
  });
  shown.forEach(([tensor, places], row) => {
    const y = top + row * height, phase = tensor.slice(0, tensor.indexOf(" of "));
    picture.append(svg("text", { x: 0, y: y + 11, class: "name" }, tensor.length > 52 ? "…" + tensor.slice(-51) : tensor));
    steps.forEach((step, nth) => runs(ranks.map((rank) => [places.has(`${step}|${rank}`), known.has(`${step}|${rank}|${phase}`)])).forEach(([from, to, [differs, isThere]]) => {
      if (!differs && !isThere) return;
      const which = to - from > 1 ? `ranks ${ranks[from]} to ${ranks[to - 1]}` : `rank ${ranks[from]}`;
      picture.append(svg("rect", { x: left + nth * group + from * cell, y: y + 1, width: (to - from) * cell - Math.min(1, cell / 4), height: height - 3, class: differs ? compared.must_differ ? "meant" : "differs" : "equal" },
        svg("title", {}, `${tensor}: step ${step}, ${which}: ${differs ? "differs" : "equal"}`)));
    }));
  });
  if (compared.first) picture.append(svg("rect", { x: left + steps.indexOf(compared.first[0]) * group + ranks.indexOf(compared.first[1]) * cell - 1, y: top - 1, width: Math.max(cell, 4) + 1, height: height + 1, class: "first" },
    svg("title", {}, `the first that differs: step ${compared.first[0]}, rank ${compared.first[1]}, ${compared.first[2]} of ${compared.first[3]}`)));
  const more = [[tensors.size - shown.length, "more tensor"], [compared.more, "more difference"]].filter(([count]) => count);
  const words = `A row for each of ${counted(tensors.size, "tensor")} that differ${tensors.size === 1 ? "s" : ""} somewhere, a column for each of ${counted(ranks.length, "rank")} of each step.`;
  return el("div", { class: "map" }, el("h4", {}, "Where bits differ"), el("p", { class: "dim" }, words), picture,
    more.length ? el("p", { class: "dim" }, `Not drawn: ${more.map(([count, what]) => counted(count, what)).join(" and ")}.`) : null);
}

// Neighbours that are equal, as [from, to, what they are].
function runs(values) {
  const found = [];
  values.forEach((value, place) => {
    const last = found[found.length - 1];
    if (last && String(last[2]) === String(value)) last[1] = place + 1; else found.push([place, place + 1, value]);
  });
  return found;
}

function digestCell({ actual, expected }, isFirst, mustDiffer) {
  const same = actual === expected;
  const shown = same ? actual.slice(0, 8) : `${(actual || "none").slice(0, 8)} ≠ ${(expected || "none").slice(0, 8)}`;
  const kind = same ? "equal" : mustDiffer ? "meant" : "differs";
  return el("td", { class: isFirst ? `${kind} first` : kind, title: `actual ${actual}, expected ${expected}` }, isFirst ? `first: ${shown}` : shown);
}

// --- layouts -------------------------------------------------------------------------------

// One colour for a parameter of all layers, in turn around the circle.
const hues = new Map();
function colour(parameter) {
  const name = parameter.replace(/\d+/g, "N");
  if (!hues.has(name)) hues.set(name, (hues.size * 137.5) % 360);
  return `hsl(${hues.get(name)} 55% 68%)`;
}

const bytes = (count) => count.toLocaleString("en-US");

function layout(fact) {
  const title = fact.problems.length ? "Bucket layouts: who sits at which byte, and what differs" : "Bucket layout: who sits at which byte";
  const problems = fact.problems.length ? el("pre", { class: "long" }, fact.problems.join("\n")) : null;
  return section(title, problems, ...(fact.sides.length === 2 ? pairedSides(...fact.sides) : fact.sides.map(([name, payloads]) => bars(name, payloads))));
}

// Two layouts, payload by payload as the comparison pairs them: those that differ above each other, the others folded.
function pairedSides([name, actual], [other, expected]) {
  const rest = [...actual], pairs = [];
  for (const wanted of expected) {
    const names = new Set(wanted.slots.map(([parameter]) => parameter));
    const shared = rest.map((each) => each.collective === wanted.collective ? new Set(each.slots.map(([parameter]) => parameter).filter((each) => names.has(each))).size : 0);
    const most = Math.max(0, ...shared);
    pairs.push([most ? rest.splice(shared.indexOf(most), 1)[0] : null, wanted]);
  }
  pairs.push(...rest.map((each) => [each, null]));
  const alike = ([ours, theirs]) => ours && theirs && String([ours.slots, ours.dtype, ours.ranks]) === String([theirs.slots, theirs.dtype, theirs.ranks]);
  const differing = pairs.filter((pair) => !alike(pair)), same = pairs.filter(alike);
  return [differing.length ? bars(`${name} above, ${other} below`, differing, pairOfBars(name, other)) : null,
    same.length ? folded(`${counted(same.length, "payload")} alike on both sides`, () => bars(`${name} and ${other}`, same.map(([ours]) => ours))) : null];
}

const pairOfBars = (name, other) => ([ours, theirs], largest, hint) => {
  const picture = svg("svg", { class: "pair", role: "img", viewBox: "0 0 1100 66", width: "100%", style: "max-width:1400px" });
  const sides = [ours, theirs].map((payload, side) => payload ? row(picture, payload, largest, hint, side * 40) : absent(picture, side ? other : name, side * 40));
  for (const [key, [from, offset, parameter, part]] of sides[0]) {
    const [to, wanted] = sides[1].get(key) || [];
    if (to === undefined) { if (theirs) part.classList.add("alone"); continue; }
    if (offset === wanted) continue;
    const words = `${parameter}: byte ${bytes(offset)} in ${name}, byte ${bytes(wanted)} in ${other}`;
    const line = svg("line", { x1: from, y1: 20, x2: to, y2: 43, class: "moved", stroke: colour(parameter) }, svg("title", {}, words));
    line.addEventListener("mouseenter", () => { hint.textContent = words; });
    picture.append(line);
  }
  for (const [key, [, , , part]] of sides[1]) if (ours && !sides[0].has(key)) part.classList.add("alone");
  return picture;
};

function absent(picture, name, y) {
  picture.append(svg("text", { x: LEFT, y: y + 15, class: "dim" }, `${name} has no such payload`));
  return new Map();
}

function bars(name, payloads, draw = bar) {
  const place = el("div", {}), hint = el("p", { class: "hint dim" }, "Point at a part to read it.");
  const largest = Math.max(1, ...payloads.flat().filter(Boolean).map(size));
  const more = () => {
    const drawn = place.querySelectorAll("svg").length;
    place.append(...payloads.slice(drawn, drawn + MOST_BARS).map((payload) => draw(payload, largest, hint)));
    button.hidden = drawn + MOST_BARS >= payloads.length;
    button.textContent = `show more of ${counted(payloads.length, "payload")}`;
  };
  const button = el("button", { type: "button", onclick: more });
  more();
  return el("div", { class: "layout" }, el("h4", {}, name), place, button, hint);
}

const WIDTH = 1100, LEFT = 330;
// The bytes of a payload: up to the end of its last part.
const size = (payload) => Math.max(0, ...payload.slots.map(([, offset, length]) => offset + length));

function bar(payload, largest, hint) {
  const picture = svg("svg", { role: "img", viewBox: `0 0 ${WIDTH} 24`, width: "100%", style: "max-width:1400px" });
  row(picture, payload, largest, hint, 0);
  return picture;
}

// Draw a payload at a height: the middle, offset, parameter and rectangle of each part, by parameter and how often it came before.
function row(picture, payload, largest, hint, y) {
  const room = WIDTH - LEFT - 8, total = size(payload), parts = new Map();
  const what = `${payload.label}: ${payload.collective}${payload.op ? " " + payload.op : ""} ${payload.dtype}, ${counted(payload.ranks, "rank")}${payload.directions.length ? ", " + payload.directions.join(" and ") : ""}`;
  const text = svg("text", { x: 0, y: y + 15, class: "name" }, what.length > 60 ? what.slice(0, 59) + "…" : what);
  text.append(svg("title", {}, what));
  picture.append(text);
  for (const [parameter, offset, length] of payload.slots) {
    const [x, wide] = [LEFT + (room * offset) / largest, Math.max(0.6, (room * length) / largest)];
    const part = svg("rect", { x, y: y + 3, width: wide, height: 17, fill: colour(parameter), stroke: "#fff", "stroke-width": 0.5 });
    const words = `${parameter}: bytes ${bytes(offset)} to ${bytes(offset + length)} (${bytes(length)} of ${bytes(total)})`;
    part.append(svg("title", {}, words));
    part.addEventListener("mouseenter", () => { hint.textContent = words; });
    picture.append(part);
    const before = [...parts.keys()].filter((key) => key.startsWith(parameter + "|")).length;
    parts.set(`${parameter}|${before}`, [x + wide / 2, offset, parameter, part]);
  }
  return parts;
}

// --- passes --------------------------------------------------------------------------------

function passes(pipeline, number, of) {
  const seconds = pipeline.passes.reduce((sum, each) => sum + each.seconds, 0);
  const rows = pipeline.passes.map((each, place) => passRow(each, place));
  const head = el("tr", {}, ["", "pass", "seconds", "nodes before", "after", "what changed"].map((name) => el("th", {}, name)));
  const parts = [el("div", { class: "scroll" }, el("table", { class: "plain passes" }, head, rows.map((row) => row.row)))];
  parts.push(...rows.flatMap((row) => row.places.filter(Boolean)));
  const [first, last] = [pipeline.passes[0], pipeline.passes[pipeline.passes.length - 1]];
  if (first && pipeline.passes.length > 1) parts.push(whole(first, last));
  const timing = first ? schedules("schedule under a cost model, before all passes and after", "all passes", first.before, last.after) : null;
  if (timing) parts.push(el("div", { style: "margin-top:8px" }, timing));
  if (first) parts.push(el("div", { style: "margin-top:8px" }, memories("memory by liveness, before all passes and after", "all passes", first.before, last.after)));
  const title = `Passes${of > 1 ? ` of graph ${number + 1}` : ""}: ${pipeline.passes.length} in ${seconds.toFixed(3)} s`;
  return section(title, ...parts, ...pipeline.layouts.map(layout));
}

function passRow(each, place) {
  const panel = el("div", { class: "panel", hidden: true });
  const changed = each.before !== each.after;
  const button = el("button", { type: "button", onclick: () => openPanel(panel, each.name, each.before, each.after, each.changes) }, changed ? "side by side" : "graph");
  const words = changed ? el("ul", { class: "words" }, each.words.map((word) => el("li", {}, word))) : el("span", { class: "dim" }, "nothing");
  const [timing, lanes] = (changed && schedules("schedule", each.name, each.before, each.after)) || [];
  const row = el("tr", {}, el("td", { class: "number" }, String(place + 1)), el("td", { title: each.fingerprint }, el("div", {}, each.name), button, " ", timing),
    el("td", { class: "number" }, each.seconds.toFixed(4)), ...each.nodes.map((count) => el("td", { class: "number" }, bytes(count))), el("td", {}, words));
  return { row, places: [panel, lanes] };
}

function whole(first, last) {
  return folded("graph before all passes and after", () => opened("all passes", first.before, last.after, null));
}

function opened(name, before, after, changes) {
  const panel = el("div", { class: "panel", hidden: true });
  openPanel(panel, name, before, after, changes);
  return panel;
}

async function openPanel(panel, name, before, after, changes) {
  panel.hidden = !panel.hidden;
  if (panel.dataset.drawn) return;
  panel.dataset.drawn = "yes";
  const [old, now] = await Promise.all([graphText(before), graphText(after)]);
  new SideBySide(panel, name, old, now, changes || roughChanges(old, now));
}

// Common head and tail kept; in between lines that stand once on either side and in the same order.
function roughChanges(old, now) {
  const count = (lines) => lines.reduce((seen, line) => seen.set(line, (seen.get(line) || 0) + 1), new Map());
  const [a, b] = [count(old), count(now)], places = new Map(now.map((line, place) => [line, place]));
  const anchors = [];
  old.forEach((line, place) => {
    const other = places.get(line);
    if (a.get(line) === 1 && b.get(line) === 1 && (!anchors.length || other > anchors[anchors.length - 1][1])) anchors.push([place, other]);
  });
  const found = [];
  let [i, j] = [0, 0];
  for (const [p, q] of [...anchors, [old.length, now.length]]) {
    while (i < p && j < q && old[i] === now[j]) { i++; j++; }
    let [e, f] = [p, q];
    while (e > i && f > j && old[e - 1] === now[f - 1]) { e--; f--; }
    if (e > i || f > j) found.push([i, e, j, f]);
    [i, j] = [p, q];
  }
  return found;
}

// The module that each line of a graph's text belongs to, from the headings above it.
function modulesOf(lines) {
  let layer = "", owner = "";
  return lines.map((line) => {
    if (line.startsWith("for i in ")) { layer = (line.match(/^for i in \w+\.(.*?):(  #|$)/) || [])[1] || ""; owner = layer; return ""; }
    if (!line.startsWith(" ")) { layer = owner = ""; return ""; }
    const heading = line.match(/^  with (.*):$/);
    if (heading) { owner = heading[1].replace(/\bL\b/, layer || "L"); return ""; }
    if (line.startsWith("  ") && !line.startsWith("    ")) return (line.match(/^  [PB]\.(.*?)(\.\w+)?: /) || [])[1]?.replace(/^L\b/, layer) || layer;
    return owner;
  });
}

class SideBySide {
  constructor(panel, name, old, now, changes) {
    this.sides = [old, now];
    this.modules = [modulesOf(old), modulesOf(now)];
    this.blocks = this.cut(changes);
    this.list = el("div", { class: "found-list mono", hidden: true });
    const input = el("input", { type: "search", placeholder: "search both graphs", "aria-label": "search both graphs",
      oninput: () => this.search(input.value), onkeydown: (event) => { if (event.key === "Escape") { input.value = ""; this.search(""); } } });
    this.count = el("span", { class: "dim" });
    const bar = el("div", { class: "bar" }, el("strong", {}, name), el("span", { class: "dim" }, `${counted(old.length, "line")} before, ${bytes(now.length)} after`), input, this.count);
    this.body = el("tbody", {});
    this.drawAll();
    panel.append(bar, this.list, el("p", { class: "dim" }, "A line's number lists everything else of its module, by a click, or by arrows and Enter."), el("table", { class: "lines" },
      el("colgroup", {}, el("col", { style: "width:52px" }), el("col"), el("col", { style: "width:52px" }), el("col")), this.body));
  }

  // Equal stretches and changed ones, in order: {old: [from, to], now: [from, to], equal}.
  cut(changes) {
    const blocks = [];
    let [i, j] = [0, 0];
    for (const [first, last, begin, end] of [...changes, [this.sides[0].length, this.sides[0].length, this.sides[1].length, this.sides[1].length]]) {
      if (first > i) blocks.push({ old: [i, first], now: [j, begin], equal: true });
      if (last > first || end > begin) blocks.push({ old: [first, last], now: [begin, end], equal: false });
      [i, j] = [last, end];
    }
    return blocks;
  }

  drawAll() {
    this.rows = new Map();
    this.body.replaceChildren(...this.some(0));
    const first = this.body.querySelector("td[data-module]");
    if (first) first.tabIndex = 0;
    this.body.addEventListener("keydown", (event) => this.key(event));
  }

  // One number is a tab stop; the arrows move it, and Enter lists its module.
  key(event) {
    const cell = event.target.closest("td[data-module]"), step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!cell || (!step && event.key !== "Enter")) return;
    event.preventDefault();
    if (!step) return this.module(cell.dataset.module);
    const cells = [...this.body.querySelectorAll(`td[data-side="${cell.dataset.side}"]`)], next = cells[cells.indexOf(cell) + step];
    if (!next) return;
    [cell.tabIndex, next.tabIndex] = [-1, 0];
    next.focus();
  }

  // The rows of the next stretches from one on, and a row that draws those behind them.
  some(from) {
    const to = Math.min(from + BLOCKS, this.blocks.length);
    const rows = this.blocks.slice(from, to).flatMap((block, place) => this.block(block, from + place));
    if (to === this.blocks.length) return rows;
    this.more = el("tr", { class: "gap" }, el("td", { colspan: 4 }, `⋯ ${counted(this.blocks.length - to, "more stretch").replace("stretchs", "stretches")}, changed and equal in turn`));
    pressed(this.more, () => this.drawMore(to));
    this.next = to;
    return [...rows, this.more];
  }

  drawMore(from) {
    const row = this.more;
    this.more = null;
    row.replaceWith(...this.some(from));
  }

  block(block, place) {
    const length = Math.max(block.old[1] - block.old[0], block.now[1] - block.now[0]);
    if (!block.equal) return this.stretch(block, 0, Math.min(length, CHUNK), length);
    const only = this.blocks.length === 1, head = place === 0 && !only ? 0 : only ? CHUNK : CONTEXT;
    const tail = place === this.blocks.length - 1 ? 0 : CONTEXT;
    if (length <= head + tail + 1) return this.stretch(block, 0, length, length);
    return [...this.lines(block, 0, head), this.gap(block, head, length - tail), ...this.lines(block, length - tail, length)];
  }

  stretch(block, from, to, length) {
    return to < length ? [...this.lines(block, from, to), this.gap(block, to, length)] : this.lines(block, from, to);
  }

  gap(block, from, to) {
    const row = el("tr", { class: "gap" }, el("td", { colspan: 4 }, `⋯ ${counted(to - from, block.equal ? "equal line" : "changed line")}${to - from > CHUNK ? `, show ${CHUNK}` : ""}`));
    pressed(row, () => row.replaceWith(...this.stretch(block, from, Math.min(from + CHUNK, to), to)));
    row.gap = { block, from, to };
    return row;
  }

  lines(block, from, to) {
    const rows = [];
    for (let place = from; place < to; place++) {
      const cells = [0, 1].flatMap((side) => {
        const [start, end] = side ? block.now : block.old, number = start + place;
        if (number >= end) return [el("td", { class: "no none" }), el("td", { class: "none" })];
        const text = this.sides[side][number], kind = block.equal ? "" : side ? "gained" : "lost";
        return [this.number(side, number), el("td", { class: /^\S|^  with /.test(text) ? `${kind} heading` : kind }, text)];
      });
      const row = el("tr", {}, cells);
      [block.old, block.now].forEach(([start, end], side) => { if (start + place < end) this.rows.set(`${side}:${start + place}`, row); });
      rows.push(row);
    }
    return rows;
  }

  number(side, number) {
    const module = this.modules[side][number];
    if (!module) return el("td", { class: "no" }, String(number + 1));
    return el("td", { class: "no", tabindex: -1, "data-module": module, "data-side": String(side), title: `everything of ${module}`, onclick: () => this.module(module) }, String(number + 1));
  }

  module(name) { this.showFound(`${name}:`, (side, number) => this.modules[side][number] === name); }

  search(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) { this.list.hidden = true; this.count.textContent = ""; return; }
    this.showFound("", (side, number) => this.sides[side][number].toLowerCase().includes(wanted));
  }

  showFound(title, fits) {
    const found = [];
    this.sides.forEach((lines, side) => lines.forEach((_, number) => { if (fits(side, number)) found.push([side, number]); }));
    this.count.textContent = `${title} ${counted(found.length, "line")}${found.length > MOST_FOUND ? `, the first ${MOST_FOUND} listed` : ""}`;
    this.list.hidden = false;
    this.list.replaceChildren(...found.slice(0, MOST_FOUND).map(([side, number]) => el("div", {}, el("button", { type: "button", class: "link",
      onclick: () => this.reveal(side, number) }, `${side ? "after " : "before"} ${String(number + 1).padStart(6)}  ${this.modules[side][number]}  ${this.sides[side][number].trim()}`))));
  }

  reveal(side, number) {
    const holder = this.blocks.findIndex((block) => number < (side ? block.now : block.old)[1]);
    while (this.more && holder >= this.next) this.drawMore(this.next);
    if (!this.rows.has(`${side}:${number}`)) {
      for (const row of [...this.body.querySelectorAll("tr.gap")].filter((gap) => gap.gap)) {
        const { block, from, to } = row.gap, [start] = side ? block.now : block.old, place = number - start;
        if (place < from || place >= to) continue;
        const [low, high] = [Math.max(from, place - 20), Math.min(to, place + 20)];
        const rest = high < to ? [this.gap(block, high, to)] : [], before = low > from ? [this.gap(block, from, low)] : [];
        row.replaceWith(...before, ...this.lines(block, low, high), ...rest);
        break;
      }
    }
    const row = this.rows.get(`${side}:${number}`);
    if (!row) return;
    this.body.querySelectorAll("tr.found").forEach((other) => other.classList.remove("found"));
    row.classList.add("found");
    row.scrollIntoView({ block: "center" });
  }
}

// --- schedules -----------------------------------------------------------------------------

const PAINT = { compute: "#8fb8de", collective: "#7fbf7b", exposed: "#e5786d" };

// The schedules of two graphs side by side, to one scale: a button and its place; null where neither communicates.
function schedules(title, name, before, after) {
  const keys = before === after ? [before] : [before, after];
  const holders = keys.map((key) => document.getElementById("s-" + key)).filter(Boolean);
  if (!holders.length) return null;
  return unfolding(title, () => {
    const place = el("div", { class: "panel schedule" }, el("p", { class: "dim" }, "drawing…"));
    Promise.all(holders.map((holder) => unpack(holder.textContent).then(JSON.parse))).then((sides) => {
      const longest = Math.max(...sides.map((side) => side.seconds));
      const names = sides.length > 1 ? [`before ${name}`, `after ${name}`] : [name];
      place.replaceChildren(el("p", { class: "dim" }, `Estimated, not measured: ${sides[0].model}.`),
        el("p", { class: "legend" }, [["compute", "compute"], ["collective", "communication"], ["exposed", "compute waits: exposed communication"]].map(([kind, name]) =>
          el("span", {}, el("i", { style: `background:${PAINT[kind]}` }), name))),
        el("div", { class: "sides" }, sides.map((side, number) => schedule(names[number], side, longest))));
    });
    return place;
  });
}

function schedule(name, side, longest) {
  const width = 580, left = 84, room = width - left - 6, height = 24;
  const hint = el("p", { class: "hint dim" }, "Point at a span to read it.");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${side.lanes.length * height + 18}`, width: "100%" });
  const scale = room / (longest * 1e6 || 1);
  side.lanes.forEach((lane, number) => picture.append(svg("text", { x: 0, y: number * height + 16, class: "name" }, lane)));
  for (const [lane, start, duration, label, kind] of side.spans) {
    const part = svg("rect", { x: left + start * scale, y: lane * height + 3, width: Math.max(0.4, duration * scale), height: height - 6, fill: PAINT[kind] });
    const words = `${label}: ${start.toFixed(1)} to ${(start + duration).toFixed(1)} µs (${duration.toFixed(1)} µs)`;
    part.append(svg("title", {}, words));
    part.addEventListener("mouseenter", () => { hint.textContent = words; });
    picture.append(part);
  }
  const end = side.lanes.length * height + 13;
  picture.append(svg("text", { x: left, y: end, class: "dim" }, "0"), svg("text", { x: left + Math.max(side.seconds * 1e6 * scale, 60), y: end, class: "dim", "text-anchor": "end" }, `${(side.seconds * 1000).toFixed(2)} ms`));
  const left_out = side.left_out ? el("p", { class: "dim" }, `Not drawn: ${counted(side.left_out, "span")}, the shortest.`) : null;
  return el("div", {}, el("h4", {}, name), el("p", {}, side.summary), picture, hint, left_out,
    el("button", { type: "button", onclick: () => save(name, side) }, "save as Chrome trace"));
}

function save(name, side) {
  const names = side.lanes.map((name, tid) => ({ ph: "M", pid: 0, tid, name: "thread_name", args: { name } }));
  const spans = side.spans.map(([tid, ts, dur, name, cat]) => ({ ph: "X", pid: 0, tid, ts, dur, name, cat }));
  const text = JSON.stringify({ traceEvents: [...names, ...spans], otherData: { "cost model": side.model } });
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: `${name.replace(/\W+/g, "-")}.trace.json` });
  link.click();
}

// --- memory --------------------------------------------------------------------------------

// The memory curves of two graphs side by side, to one scale: a button and its place; null where none could be computed.
function memories(title, name, before, after) {
  const sides = [[before === after ? name : `before ${name}`, before], [`after ${name}`, after]].filter(([, key], nth) => document.getElementById("m-" + key) && (!nth || before !== after));
  return sides.length ? unfolding(title, () => curves(sides.map(([side]) => side), sides.map(([, key]) => key))) : null;
}

function curves(names, keys) {
  const place = el("div", { class: "panel schedule" }, el("p", { class: "dim" }, "drawing…"));
  Promise.all(keys.map((key) => unpack(document.getElementById("m-" + key).textContent).then(JSON.parse))).then((sides) => {
    const highest = Math.max(...sides.flatMap((side) => side.curve[side.at]), 1);
    place.replaceChildren(el("p", { class: "dim" }, "Bytes alive while each node runs, from the graph alone."),
      el("div", { class: "sides" }, sides.map((side, nth) => curve(names[nth], side, highest))));
  });
  return place;
}

function curve(name, side, highest) {
  const width = 580, height = 120, bins = Math.min(width, side.curve.length), scale = (height - 8) / highest;
  const x = (node) => ((node + 0.5) / side.curve.length) * width, y = (held) => height - held * scale;
  const tops = Array.from({ length: bins }, (_, bin) => {
    const [from, to] = [bin, bin + 1].map((edge) => Math.floor((edge * side.curve.length) / bins));
    return `L${((bin + 0.5) / bins) * width} ${y(side.curve.slice(from, to).reduce((most, held) => Math.max(most, held), 0))}`;
  });
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%" },
    svg("path", { d: `M0 ${height}${tops.join("")}L${width} ${height}Z`, fill: PAINT.compute }),
    svg("circle", { cx: x(side.at), cy: y(side.curve[side.at]), r: 4, fill: PAINT.exposed }));
  return el("div", {}, el("h4", {}, name), picture, el("pre", { class: "long" }, side.summary));
}

// --- start ---------------------------------------------------------------------------------

document.getElementById("search").addEventListener("input", sift);
document.querySelectorAll("input[data-outcome]").forEach((box) => box.addEventListener("change", sift));
document.getElementById("fold").addEventListener("click", () => tests.forEach((test) => toggle(test, false)));
for (const test of tests) {
  test.querySelector("h2 button").addEventListener("click", () => toggle(test));
  if (test.querySelector(".picture")) pictures.observe(test);
}
for (const place of location.hash.slice(1).split(",").filter(Boolean)) {
  const [id, ...rest] = place.split(".");
  const test = document.getElementById(id);
  if (test) toggle(test, true).then(() => rest.forEach((nth) => [...test.querySelectorAll(".body button")][Number(nth)]?.click()));
}
