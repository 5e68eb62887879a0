// SPDX-License-Identifier: Apache-2.0
"use strict";

// Text goes into the page by textContent alone, so that no name can become markup.

const data = JSON.parse(document.getElementById("data").textContent);
const rows = [...document.querySelectorAll("#operators tbody tr")];
const get = (id) => document.getElementById(id);

function make(tag, facts = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(facts)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawnAs(tag, facts = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(facts)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---- the table: search, filters, order

function narrow() {
  const words = get("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const state = get("state").value, owner = get("owner").value;
  let shown = 0;
  for (const row of rows) {
    const cells = row.cells, text = row.textContent.toLowerCase();
    const fits = words.every((word) => text.includes(word))
      && (!state || cells[3].textContent === state) && (!owner || cells[4].textContent === owner);
    row.hidden = !fits;
    shown += fits;
  }
  get("found").textContent = `${shown} of ${rows.length} operators`;
}

function sortBy(column, heads) {
  const old = heads[column].getAttribute("aria-sort");
  const order = old === "ascending" ? "descending" : old === "descending" ? null : "ascending";
  for (const head of heads) head.removeAttribute("aria-sort");
  if (order) heads[column].setAttribute("aria-sort", order);
  const sign = order === "descending" ? -1 : 1;
  const number = (row) => Number(row.id.slice(3));
  const listed = [...rows].sort((one, other) =>
    (order ? compareCells(one.cells[column], other.cells[column], sign) : 0) || number(one) - number(other));
  get("operators").tBodies[0].append(...listed);
}

// Empty cells stay at the end either way: they are no small numbers.
function compareCells(one, other, sign) {
  if (!one.textContent || !other.textContent) return !one.textContent - !other.textContent;
  if ("value" in one.dataset && "value" in other.dataset) {
    const [a, b] = [Number(one.dataset.value), Number(other.dataset.value)];
    return a === b ? 0 : sign * (a < b ? -1 : 1);
  }
  const [a, b] = [one.textContent, other.textContent];
  return a === b ? 0 : sign * (a < b ? -1 : 1);
}

function prepareTable() {
  const heads = [...get("operators").tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = make("button", { type: "button" }, head.textContent);
    button.addEventListener("click", () => sortBy(column, heads));
    head.replaceChildren(button);
  });
  for (const id of ["search", "state", "owner"]) get(id).addEventListener("input", narrow);
  narrow();
}

function showRow(number) {
  if (rows[number].hidden) {
    for (const id of ["search", "state", "owner"]) get(id).value = "";
    narrow();
  }
  rows[number].scrollIntoView({ block: "center" });
  rows[number].focus({ preventScroll: true });
}

// ---- the graph

const TALL = 44, STEP = 76, WIDE = data.graph.box, EDGE = 16;
const view = { level: 0, mode: "owner", scale: 1, picked: null, boxes: [], svg: null, near: null };
const level = () => data.graph.levels[view.level];
const across = (place) => place + EDGE;
const upper = (layer) => layer * STEP + EDGE;

const FONTS = { label: "600 13px system-ui, sans-serif", sub: "400 12px system-ui, sans-serif" };
const pen = document.createElement("canvas").getContext("2d");

// What fits into a box, with this part of the letters before the gap: of names the middle is left out, and of
// modules the beginning, since their ends tell them apart.
function fitting(text, font, before = 1) {
  pen.font = FONTS[font];
  let kept = text.length, shown = text;
  while (kept > 2 && pen.measureText(shown).width > WIDE - 18) {
    kept -= 1;
    const first = Math.ceil(kept * before);
    shown = `${text.slice(0, first)}…${text.slice(text.length - kept + first)}`;
  }
  return shown;
}

// The lane of a producer as far as the layer above a reader; its entries are where it bends.
function stopsOf(from, to) {
  const last = level().nodes[to].at[0] - 1, stops = level().nodes[from].lane.filter(([layer]) => layer <= last);
  if (stops.length && stops.at(-1)[0] < last) stops.push([last, stops.at(-1)[1]]);
  return stops;
}

// From the lower side of a producer, along its lane, to the upper side of a reader. A branch is the last part.
function wayOf(from, to, branch = false) {
  const nodes = level().nodes, stops = stopsOf(from, to);
  const [layer, place] = branch && stops.length ? stops.at(-1) : nodes[from].at;
  const [last, end] = nodes[to].at;
  let x = across(place), y = upper(layer) + TALL, way = `M${x} ${y}`;
  const curve = (nx, ny) => {
    const half = Math.min((ny - y) / 2, STEP / 2);
    way += nx === x || ny < y ? `L${nx} ${ny}` : `C${x} ${y + half} ${nx} ${ny - half} ${nx} ${ny}`;
    [x, y] = [nx, ny];
  };
  for (const [at, middle] of branch ? [] : stops) {
    curve(across(middle), upper(at));
    curve(across(middle), upper(at) + TALL);
  }
  curve(across(end), upper(last));
  return way;
}

// Each lane is drawn once, with the edge that goes farthest.
function allWays() {
  const { nodes, edges } = level(), farthest = new Map();
  for (const [from, to] of edges) {
    if (!farthest.has(from) || nodes[to].at[0] > nodes[farthest.get(from)].at[0]) farthest.set(from, to);
  }
  return edges.map(([from, to]) => wayOf(from, to, farthest.get(from) !== to));
}

function boxOf(node, number) {
  const [layer, place] = node.at, box = drawnAs("g", { transform: `translate(${across(place) - WIDE / 2} ${upper(layer)})` });
  const size = { width: WIDE, height: TALL, rx: 6 };
  box.append(
    drawnAs("rect", size),
    drawnAs("rect", { ...size, class: "fill" }),
    drawnAs("text", { x: 9, y: 18 }, fitting(node.label, "label", node.rows[1] - node.rows[0] > 1 ? 0 : 0.5)),
    drawnAs("text", { x: 9, y: 35, class: "sub" }),
    drawnAs("title", {}, node.label),
  );
  box.dataset.node = number;
  return box;
}

function paint() {
  level().nodes.forEach((node, number) => {
    const [style, words] = node.looks[view.mode], box = view.boxes[number];
    const borders = { full: "", dashed: "dash", dotted: "line" };
    box.setAttribute("class", `box ${style} ${borders[node.border]}${view.picked === number ? " picked" : ""}`);
    box.children[3].textContent = fitting(`${words} · ${node.kind.replace(/^\w+\./, "")}`, "sub");
  });
}

function draw() {
  const { width, layers, nodes } = level();
  view.wide = width + 2 * EDGE;
  view.tall = layers * STEP - STEP + TALL + 2 * EDGE;
  view.svg = drawnAs("svg", { viewBox: `0 0 ${view.wide} ${view.tall}` });
  const lines = drawnAs("g", { class: "edges" });
  lines.append(...allWays().map((way) => drawnAs("path", { class: "edge", d: way })));
  view.near = drawnAs("g");
  view.boxes = nodes.map(boxOf);
  view.svg.append(lines, view.near, ...view.boxes);
  get("canvas").replaceChildren(view.svg);
  view.picked = null;
  paint();
}

function zoom(scale) {
  const canvas = get("canvas"), old = view.scale;
  const middle = [canvas.scrollLeft + canvas.clientWidth / 2, canvas.scrollTop + canvas.clientHeight / 2];
  view.scale = Math.min(3, Math.max(0.05, scale));
  view.svg.setAttribute("width", Math.round(view.wide * view.scale));
  view.svg.setAttribute("height", Math.round(view.tall * view.scale));
  const factor = view.scale / old;
  canvas.scrollLeft = middle[0] * factor - canvas.clientWidth / 2;
  canvas.scrollTop = middle[1] * factor - canvas.clientHeight / 2;
}

// Words stay readable: what is wider than the canvas at that scale is scrolled to its middle.
function fit(least) {
  const canvas = get("canvas");
  zoom(Math.min(1, Math.max(least, (canvas.clientWidth - 4) / view.wide)));
  canvas.scrollTop = 0;
  const first = level().nodes[0];
  if (first) canvas.scrollLeft = across(first.at[1]) * view.scale - canvas.clientWidth / 2;
}

// ---- what a box stands for

function facts(number) {
  const node = level().nodes[number], [start, stop] = node.rows;
  const shown = [make("h3", {}, node.label)];
  if (stop - start === 1) shown.push(listOf(start), reads(start), link(start, "In the table"));
  else shown.push(...sumOf(start, stop));
  get("facts").replaceChildren(...shown);
}

function listOf(row) {
  const heads = [...get("operators").tHead.rows[0].cells], list = make("dl");
  [...rows[row].cells].forEach((cell, column) => {
    if (column && cell.textContent) {
      list.append(make("dt", {}, heads[column].textContent), make("dd", {}, ...[...cell.childNodes].map((n) => n.cloneNode(true))));
    }
  });
  return list;
}

function reads(row) {
  const inputs = data.report.rows[row].inputs;
  return make("p", { class: "hint" }, inputs.length ? `reads ${inputs.join(", ")}` : "reads no other operator");
}

function link(row, text) {
  const made = make("a", { href: `#row${row}` }, text);
  made.addEventListener("click", (event) => { event.preventDefault(); showRow(row); });
  return made;
}

function sumOf(start, stop) {
  const counted = new Map();
  for (const row of rows.slice(start, stop)) {
    const key = `${row.cells[4].textContent}: ${row.cells[3].textContent}`;
    counted.set(key, (counted.get(key) || 0) + 1);
  }
  const lines = [...counted].map(([key, count]) => make("li", {}, `${count} × ${key}`));
  const open = make("button", { type: "button" }, "Show its operators");
  open.addEventListener("click", () => reveal(start));
  return [make("p", {}, `${stop - start} operators`), make("ul", {}, ...lines), open];
}

function setLevel(number) {
  view.level = number;
  get("level").value = number;
  draw();
  fit(0.75);
}

// Go to one operator in the finest drawing.
function reveal(row) {
  setLevel(data.graph.levels.length - 1);
  pick(row);
  get("canvas").focus({ preventScroll: true });
}

function pick(number, follow = true) {
  view.picked = number;
  paint();
  near(number);
  facts(number);
  if (follow) {
    const canvas = get("canvas"), [layer, place] = level().nodes[number].at;
    canvas.scrollLeft = across(place) * view.scale - canvas.clientWidth / 2;
    canvas.scrollTop = (upper(layer) + TALL / 2) * view.scale - canvas.clientHeight / 2;
  }
}

function near(number) {
  const touching = level().edges.filter(([from, to]) => from === number || to === number);
  view.near.replaceChildren(...touching.map(([from, to]) => drawnAs("path", { class: "edge near", d: wayOf(from, to) })));
}

// ---- what the user does

function beside(number, side) {
  const [layer, place] = level().nodes[number].at;
  const others = level().nodes.map((node, i) => [node.at, i])
    .filter(([[at, x]]) => at === layer && (side < 0 ? x < place : x > place));
  others.sort((one, other) => Math.abs(one[0][1] - place) - Math.abs(other[0][1] - place));
  return others.length ? others[0][1] : number;
}

function onKey(event) {
  if (!level().nodes.length) return;
  const number = view.picked, edges = level().edges;
  const steps = {
    ArrowUp: () => (edges.find(([, to]) => to === number) || [number])[0],
    ArrowDown: () => (edges.find(([from]) => from === number) || [0, number])[1],
    ArrowLeft: () => beside(number, -1),
    ArrowRight: () => beside(number, 1),
  };
  if (event.key === "Enter" && number !== null) {
    const [start, stop] = level().nodes[number].rows;
    if (stop - start === 1) showRow(start); else reveal(start);
  } else if (event.key in steps) {
    pick(number === null ? 0 : steps[event.key]());
  } else return;
  event.preventDefault();
}

function boxAt(event) {
  const box = event.target.closest(".box");
  return box ? Number(box.dataset.node) : null;
}

function prepareGraph() {
  data.graph.levels.forEach(({ title, nodes }, number) => {
    get("level").append(make("option", { value: number }, `${title} (${nodes.length})`));
  });
  get("level").addEventListener("input", () => setLevel(Number(get("level").value)));
  get("mode").addEventListener("input", () => {
    view.mode = get("mode").value;
    for (const legend of document.querySelectorAll(".legend")) legend.hidden = legend.dataset.mode !== view.mode;
    paint();
  });
  get("smaller").addEventListener("click", () => zoom(view.scale / 1.3));
  get("larger").addEventListener("click", () => zoom(view.scale * 1.3));
  get("fit").addEventListener("click", () => fit(0.05));
  const canvas = get("canvas");
  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("click", (event) => { if (boxAt(event) !== null) pick(boxAt(event), false); });
  canvas.addEventListener("pointerover", (event) => {
    if (view.picked === null && boxAt(event) !== null) facts(boxAt(event));
  });
  for (const mark of document.querySelectorAll(".plot [data-row]")) {
    mark.addEventListener("click", () => {
      document.querySelectorAll(".plot .picked").forEach((other) => other.classList.remove("picked"));
      mark.classList.add("picked");
      showRow(Number(mark.dataset.row));
    });
  }
  for (const anchor of document.querySelectorAll('a[href^="#row"]')) {
    anchor.addEventListener("click", (event) => { event.preventDefault(); showRow(Number(anchor.hash.slice(4))); });
  }
  setLevel(data.graph.first);
}

prepareTable();
prepareGraph();
