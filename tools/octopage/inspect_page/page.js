"use strict";
// Draws the report from the numbers in #data. Every text from the step goes through textContent.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const number = (value) => Number(value).toLocaleString("en-US");
const percent = (share) => (100 * share).toFixed(1) + " %";
const many = (count, word) => number(count) + " " + word + (count === 1 ? "" : "s");
const range = (first, last) => (first === last ? number(first) : number(first) + " – " + number(last));

const named = (word, first, last) => word + (first === last ? " " : "s ") + range(first, last);

function scaled(value, units, step) {
  let unit = 0;
  while (value >= step && unit + 1 < units.length) { value /= step; unit += 1; }
  return (unit === 0 && Number.isInteger(value) ? value : value.toPrecision(3)) + " " + units[unit];
}
const bytes = (value) => scaled(value, ["B", "KB", "MB", "GB", "TB", "PB"], 1000);
const flops = (value) => scaled(value, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], 1000);
const duration = (seconds) => scaled(seconds * 1e9, ["ns", "us", "ms", "s"], 1000);

// --- light and dark ---

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";

function showTheme() {
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  drawAll();
}
byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
prefersDark.addEventListener("change", showTheme);

// --- the hover value ---

const tip = byId("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4)) + "px";
  const below = event.clientY + 16;
  tip.style.top = (below + box.height < innerHeight ? below : event.clientY - box.height - 10) + "px";
}
function hideTip() { tip.hidden = true; }

/** Shows text(event) while the pointer is over the element. */
function hover(element, text) {
  const show = (event) => { const line = text(event); if (line) showTip(event, line); else hideTip(); };
  element.addEventListener("pointermove", show);
  element.addEventListener("pointerdown", show);
  element.addEventListener("pointerleave", hideTip);
}

// --- small helpers for SVG ---

function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** An empty drawing as wide as its box; returns it and its width. */
function drawing(id, height, label) {
  const box = byId(id);
  const width = Math.max(box.clientWidth, 200);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  box.replaceChildren(root);
  return { root, width };
}

function nothing(id) {
  byId(id).replaceChildren(Object.assign(document.createElement("p"), { className: "what", textContent: "Nothing to draw." }));
}

/** Upright bars: items of {label, value, outline, text, tip}. */
function bars(id, items, label) {
  const most = Math.max(0, ...items.map((item) => Math.max(item.value, item.outline || 0)));
  if (most === 0) { nothing(id); return; }
  const height = 210, top = 18, bottom = 24;
  const { root, width } = drawing(id, height, label);
  const slot = width / items.length;
  const every = Math.ceil(52 / slot);  // labels that fit
  const y = (value) => height - bottom - (height - top - bottom) * value / most;
  items.forEach((item, i) => {
    const x = i * slot + slot * 0.15, w = slot * 0.7;
    const group = svg("g", { class: "mark" });
    group.append(svg("rect", { x: i * slot, y: 0, width: slot, height: height - bottom, fill: "transparent" }));
    if (item.outline) {
      group.append(svg("rect", { x, y: y(item.outline), width: w, height: height - bottom - y(item.outline), fill: "none",
        stroke: "var(--line)", rx: 2 }));
    }
    group.append(svg("rect", { x, y: y(item.value), width: w, height: height - bottom - y(item.value), fill: "var(--one)", rx: 2 }));
    if (item.text) group.append(svg("text", { x: x + w / 2, y: y(item.value) - 5, "text-anchor": "middle" }, item.text));
    if (i % every === 0) group.append(svg("text", { x: x + w / 2, y: height - 7, "text-anchor": "middle" }, item.label));
    hover(group, () => item.tip);
    root.append(group);
  });
  root.append(svg("line", { class: "axis", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }));
}

// --- the selection map ---

function mapCounts() {
  const raw = atob(data.map.counts.base64);
  const view = new DataView(Uint8Array.from(raw, (c) => c.charCodeAt(0)).buffer);
  const width = data.map.counts.bytes;
  return Array.from({ length: raw.length / width }, (_, i) =>
    width === 2 ? view.getUint16(2 * i, true) : width === 4 ? view.getUint32(4 * i, true) : Number(view.getBigUint64(8 * i, true)));
}
const map = data.map;
const counts = mapCounts();
const groupCount = data.groups_shown[1] - data.groups_shown[0];
const rowsOf = (line) => map.lines[line].end - map.lines[line].begin;
const regionsOf = (column) => Math.min(map.regions_per_bin, map.regions - column * map.regions_per_bin);
const ownRegion = (line) => Math.floor(map.lines[line].greatest_position / 8);

function colourAt(shade) {
  const stops = data.colours[isDark() ? "dark" : "light"].stops;
  const place = Math.min(Math.max(shade, 0), 1) * (stops.length - 1);
  const below = Math.min(Math.floor(place), stops.length - 2);
  return stops[below].map((from, c) => Math.round(from + (stops[below + 1][c] - from) * (place - below)));
}

function mapBitmap() {
  const canvas = document.createElement("canvas");
  canvas.width = map.region_bins;
  canvas.height = map.row_bins;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const beyond = data.colours[isDark() ? "dark" : "light"].beyond;
  for (let line = 0; line < map.row_bins; ++line) {
    for (let column = 0; column < map.region_bins; ++column) {
      const i = line * map.region_bins + column;
      const share = counts[i] / (rowsOf(line) * regionsOf(column));
      const past = column * map.regions_per_bin > ownRegion(line);
      const colour = past ? beyond : colourAt(share > 0 ? Math.sqrt(share / map.densest_share) : 0);
      image.data.set([...colour, 255], 4 * i);
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const mapHeight = () => Math.min(520, Math.max(180, map.row_bins));

function drawMap() {
  const canvas = byId("map");
  const width = canvas.parentElement.clientWidth, height = mapHeight();
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  const context = canvas.getContext("2d");
  if (map.row_bins === 0 || map.region_bins === 0) { canvas.style.height = "0"; return; }
  // Enlarged, bins stay sharp; reduced, thin columns must not vanish between pixels.
  context.imageSmoothingEnabled = canvas.width < map.region_bins || canvas.height < map.row_bins;
  context.imageSmoothingQuality = "high";
  context.drawImage(mapBitmap(), 0, 0, canvas.width, canvas.height);
  drawScale();
}

function drawScale() {
  const canvas = byId("map-scale"), context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; ++x) {
    context.fillStyle = `rgb(${colourAt(x / (canvas.width - 1)).join(",")})`;
    context.fillRect(x, 0, 1, canvas.height);
  }
}

function owners(line) {
  return named("request", line.first_owner, line.last_owner);
}

function mapText(event) {
  const box = byId("map").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / box.width * map.region_bins);
  const row = Math.floor((event.clientY - box.top) / box.height * map.row_bins);
  if (column < 0 || row < 0 || column >= map.region_bins || row >= map.row_bins) return "";
  const line = map.lines[row];
  const first = column * map.regions_per_bin, last = first + regionsOf(column) - 1;
  const count = counts[row * map.region_bins + column], cells = rowsOf(row) * regionsOf(column) * groupCount;
  return `${named("row", line.begin, line.end - 1)} (${owners(line)}, ${named("position", line.least_position, line.greatest_position)})\n` +
    `${named("region", first, last)} (tokens ${range(8 * first, 8 * last + 7)})\n` +
    `${number(count)} of ${number(cells)} selected, ${percent(count / cells)}` + (first > ownRegion(row) ? "\npast every row here" : "");
}

// --- the other pictures ---

function drawOverlap() {
  const lines = map.lines.filter((line) => line.overlap.compared > 0);
  if (lines.length === 0) { nothing("overlap"); return; }
  const height = 150, left = 40, bottom = 22, top = 8;
  const { root, width } = drawing("overlap", height, "Overlap of neighbouring rows along the step");
  const x = (place) => left + (width - left - 4) * place / Math.max(map.rows, 1);
  const y = (share) => top + (height - top - bottom) * (1 - share);
  for (const share of [0, 0.5, 1]) {
    root.append(svg("line", { class: "axis", x1: left, x2: width, y1: y(share), y2: y(share) }));
    root.append(svg("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, 100 * share + " %"));
  }
  root.append(svg("text", { x: left, y: height - 5 }, "row 0"));
  root.append(svg("text", { x: width - 4, y: height - 5, "text-anchor": "end" }, "row " + number(map.rows - 1)));
  const points = lines.map((line) => `${x((line.begin + line.end) / 2)},${y(line.overlap.share)}`);
  root.append(svg("polyline", { points: points.join(" "), fill: "none", stroke: "var(--one)", "stroke-width": 1.8, "stroke-linejoin": "round" }));
  const dot = svg("circle", { r: 4, fill: "var(--one)", visibility: "hidden" });
  root.append(dot);
  hover(root, (event) => {
    const at = (event.clientX - root.getBoundingClientRect().left - left) / (width - left - 4) * map.rows;
    const line = lines.reduce((best, next) =>
      Math.abs((next.begin + next.end) / 2 - at) < Math.abs((best.begin + best.end) / 2 - at) ? next : best);
    dot.setAttribute("cx", x((line.begin + line.end) / 2));
    dot.setAttribute("cy", y(line.overlap.share));
    dot.setAttribute("visibility", "visible");
    return `${named("row", line.begin, line.end - 1)} (${owners(line)})\n${percent(line.overlap.share)} shared with the row before`;
  });
  root.addEventListener("pointerleave", () => dot.setAttribute("visibility", "hidden"));
}

function drawBars() {
  const sharing = data.sharing, table = data.block_table;
  bars("unions", sharing.union_factors.filter((tile) => tile.rows > 1).map((tile) => ({
    label: tile.rows + " rows", value: tile.factor, outline: tile.factor > 0 ? tile.rows : 0, text: tile.factor.toFixed(2),
    tip: `${tile.rows} rows: ${tile.factor.toFixed(3)} selections\n${number(tile.tiles)} tiles; all tiles load ${number(tile.loaded_regions)} regions`,
  })), "Union factor by tile height");
  bars("ages", sharing.ages.map((bin) => ({
    label: number(bin.begin), value: bin.entries,
    tip: `${range(bin.begin, bin.end - 1)} regions back (${number(8 * bin.begin)} tokens or more)\n` +
      `${number(bin.entries)} entries, ${percent(bin.entries / Math.max(data.entries.valid, 1))}`,
  })), "Ages of selected regions");
  bars("runs", table.run_lengths.map((bin) => ({
    label: number(bin.begin), value: bin.blocks,
    tip: `runs of ${range(bin.begin, bin.end - 1)} blocks\n${number(bin.runs)} runs with ${number(bin.blocks)} blocks`,
  })), "Blocks by the length of their run");
}

function drawCache() {
  const bins = data.block_table.cache;
  if (bins.length === 0) { nothing("cache"); return; }
  const height = 90, bar = 56;
  const { root, width } = drawing("cache", height, "Cache blocks in use");
  const step = width / bins.length;
  bins.forEach((bin, i) => {
    const total = bin.end - bin.begin;
    const group = svg("g", { class: "mark" });
    group.append(svg("rect", { x: i * step, y: 0, width: step, height: bar, fill: "var(--beyond)" }));
    const used = bar * bin.used / total, shared = bar * bin.shared / total;
    group.append(svg("rect", { x: i * step, y: bar - used, width: step, height: used, fill: "var(--one)" }));
    group.append(svg("rect", { x: i * step, y: bar - shared, width: step, height: shared, fill: "var(--two)" }));
    hover(group, () => `blocks ${range(bin.begin, bin.end - 1)} of the cache\n${number(bin.used)} in use, ${number(bin.shared)} named more than once`);
    root.append(group);
  });
  root.append(svg("text", { x: 0, y: height - 12 }, "block 0"));
  root.append(svg("text", { x: width, y: height - 12, "text-anchor": "end" }, "block " + number(data.blocks - 1)));
}

const roofKinds = [
  { key: "memory_seconds", name: "memory", colour: "var(--three)" },
  { key: "gather_seconds", name: "L2 gather", colour: "var(--two)" },
  { key: "matrix_seconds", name: "tensor core", colour: "var(--one)" },
];
const wayName = (way) => way.load_rows === 1 ? "row by row"
  : way.load_rows === way.compute_rows ? `tiles of ${way.load_rows}` : `load ${way.load_rows}, multiply ${way.compute_rows}`;

function drawRoofs() {
  const roofs = data.roofs;
  const most = Math.max(...roofs.ways.map((way) => way.seconds));
  if (!(most > 0)) { nothing("roofs"); return; }
  const line = 15, gap = 16, left = 132, right = 150;
  const height = roofs.ways.length * (3 * line + gap);
  const { root, width } = drawing("roofs", height, "Predicted least times");
  const narrow = width < 520;
  const from = narrow ? 0 : left, space = width - from - (narrow ? 90 : right);
  roofs.ways.forEach((way, i) => {
    const y = i * (3 * line + gap) + (narrow ? 14 : 0);
    root.append(svg("text", { x: narrow ? 0 : left - 10, y: narrow ? y - 3 : y + 26, "text-anchor": narrow ? "start" : "end" }, wayName(way)));
    roofKinds.forEach((kind, k) => {
      const seconds = way[kind.key], binds = way.binds === kind.name;
      const group = svg("g", { class: "mark" });
      const length = Math.max(space * seconds / most, 1);
      group.append(svg("rect", { x: 0, y: y + k * line, width, height: line, fill: "transparent" }));
      group.append(svg("rect", { x: from, y: y + k * line, width: length, height: line - 3, rx: 2, fill: kind.colour }));
      const label = duration(seconds) + (binds ? " binds" : "");
      group.append(svg("text", { x: from + length + 6, y: y + k * line + 10, "font-weight": binds ? 700 : 400 }, label));
      hover(group, () => `${wayName(way)}: ${kind.name} ${duration(seconds)}\n${kind.key === "matrix_seconds" ? flops(way.matrix_flops)
        : bytes(kind.key === "gather_seconds" ? way.gather_bytes : roofs.memory_bytes)}${binds ? "\nthis one binds" : ""}`);
      root.append(group);
    });
  });
}

// --- texts ---

function figure(value, label) {
  const box = document.createElement("div");
  box.append(Object.assign(document.createElement("b"), { textContent: value }), Object.assign(document.createElement("span"), { textContent: label }));
  byId("figures").append(box);
}

function writeAlerts() {
  const entries = data.entries, lines = [];
  const kinds = [[entries.invalid_region, "with an invalid region"], [entries.invalid_owner, "in rows whose owner is no request"],
    [entries.invalid_table, "without a block"], [entries.duplicate, "that name a region twice"]].filter(([count]) => count > 0);
  if (kinds.length > 0) {
    lines.push(`${number(entries.skipped)} of ${number(entries.counted)} entries are not counted in the pictures: ` +
      kinds.map(([count, text]) => number(count) + " " + text).join(", ") + ".");
  }
  if (data.rows === 0) lines.push("The step has no rows.");
  if (data.padding_rows > 0) lines.push(`${number(data.padding_rows)} padding rows select nothing.`);
  if (data.empty_rows > 0) lines.push(`${number(data.empty_rows)} other rows have no valid entry.`);
  if (data.block_table.outside > 0) lines.push(`${number(data.block_table.outside)} table entries name no block of the cache.`);
  lines.push(...data.notes.map((note) => "Note: " + note));
  byId("alerts").hidden = lines.length === 0;
  byId("alerts").replaceChildren(...lines.map((text) => Object.assign(document.createElement("p"), { textContent: text })));
}

function writeTexts() {
  const roofs = data.roofs, table = data.block_table, union = roofs.ways[roofs.ways.length - 1];
  const shown = groupCount === data.groups ? many(data.groups, "KV head") : `KV head ${data.groups_shown[0]} of ${data.groups}`;
  document.title = "octopage inspect: " + data.step;
  byId("subtitle").textContent = `${data.step} · ${many(data.heads, "head")}, ${shown}, dim ${number(data.dim)}, query ${data.query_type}, ` +
    `cache ${data.cache_type}, blocks of ${number(data.block_size)}`;
  figure(number(data.rows), "rows");
  figure(number(data.requests), "requests");
  figure(number(data.region_count), "regions a row may select");
  figure(percent(data.sharing.neighbour_overlap.share), "shared with the row before");
  figure(data.sharing.union_factors.find((tile) => tile.rows === 8).factor.toFixed(2), "union of 8 rows");
  figure(flops(roofs.useful_flops), "useful work");
  figure(union.seconds > 0 ? union.binds : "–", "binds on " + roofs.card);
  byId("map-what").textContent = `Rows downwards by request and position, regions of eight tokens to the right. ` +
    `One dot: ${many(map.rows_per_bin, "row")} by ${many(map.regions_per_bin, "region")}; the colour grows with the square root of the share selected.`;
  byId("map-densest").textContent = percent(map.densest_share / Math.max(groupCount, 1));
  byId("roofs-what").textContent = `Least time on ${roofs.card} if nothing but one part took any: memory ${bytes(roofs.memory_bytes_per_second)}/s, ` +
    `page gathers from L2 ${bytes(roofs.gather_bytes_per_second)}/s, matrix unit ${flops(roofs.matrix_flops_per_second)}/s. The longest binds.`;
  byId("roofs-source").textContent = "Figures of the card: " + roofs.source + ".";
  byId("roofs-legend").replaceChildren(...roofKinds.flatMap((kind) => {
    const swatch = Object.assign(document.createElement("span"), { className: "swatch" });
    swatch.style.background = kind.colour;
    return [swatch, Object.assign(document.createElement("span"), { textContent: kind.name })];
  }));
  byId("runs-what").textContent = `Blocks by the length of their run. ${percent(table.adjacent_share)} of neighbouring blocks are neighbours in the cache; ` +
    `${number(table.runs)} runs.`;
  byId("cache-what").textContent = `${number(table.used)} of ${number(data.blocks)} blocks are in use, ${number(table.shared)} of them named more than once (orange).`;
}

function writeRequests() {
  const columns = [["request", "request"], ["tokens", "length"], ["rows", "rows"], ["blocks", "blocks"], ["runs", "runs"],
    ["entries", "entries"], ["not counted", "skipped"], ["overlap", "overlap"]];
  const row = (cells, kind) => {
    const line = document.createElement("tr");
    line.append(...cells.map((text) => Object.assign(document.createElement(kind), { textContent: text })));
    return line;
  };
  byId("requests").replaceChildren(row(columns.map(([title]) => title), "th"), ...data.request_table.map((request) =>
    row(columns.map(([, key]) => key !== "overlap" ? number(request[key]) : request.overlap.compared > 0 ? percent(request.overlap.share) : "–"), "td")));
  const missing = data.requests - data.request_table.length;
  byId("requests-what").textContent = missing > 0 ? `${number(missing)} more are in the output of --json.` : "";
}

function drawAll() {
  drawMap();
  drawOverlap();
  drawBars();
  drawCache();
  drawRoofs();
}

hover(byId("map"), mapText);
writeAlerts();
writeTexts();
writeRequests();
showTheme();
let widthBefore = innerWidth;
addEventListener("resize", () => { if (innerWidth !== widthBefore) { widthBefore = innerWidth; drawAll(); } });
document.documentElement.dataset.drawn = "yes";
