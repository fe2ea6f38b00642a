"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const shown = new Set(data.runs.keys());
const PARTS = { data: "#e8590c", compute: "#1c7ed6", sync: "#9c36b5", optimizer: "#2b8a3e" };
const WORDS = { data: "waiting for data", compute: "forward and backward", sync: "exchanging gradients", optimizer: "optimizer" };
const SVG = "http://www.w3.org/2000/svg";
const across = document.getElementById("across");

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "rect"].includes(name);
  const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function figure(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / count, magnitude = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(f => f * magnitude).find(s => s >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * span; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

/* Points are [epoch, step, images, minutes, value]; a chart of telemetry has minutes only. */
class Chart {
  constructor(chart) {
    this.chart = chart;
    this.zoom = null;
    this.cursor = null;
    this.svg = element("svg", { role: "img", tabindex: "0", viewBox: "0 0 560 240", preserveAspectRatio: "none" });
    this.tip = element("div", { class: "tip", role: "status" });
    this.tip.hidden = true;
    this.unit = element("small");
    this.box = element("figure", {}, element("figcaption", {}, chart.title, this.unit), this.svg, this.tip);
    document.getElementById("charts").append(this.box);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  get axis() { return this.chart.minutes ? 3 : Number(across.value); }

  lines() {
    return this.chart.lines.filter(line => shown.has(line.run)).map(line => ({
      ...line, points: line.points.filter(p => p[this.axis] !== null).map(p => [p[this.axis], p[4]])
    })).filter(line => line.points.length);
  }

  draw() {
    const width = this.svg.clientWidth || 560, height = 240, left = 56, right = 10, top = 8, bottom = 26;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const dashed = this.chart.lines.some(line => line.dashed) ? "dashed: training; across " : "";
    this.axisName = ["epochs", "steps", "images", "minutes"][this.axis];
    this.unit.textContent = dashed + this.axisName;
    const lines = this.lines();
    this.box.hidden = !lines.length;
    this.svg.setAttribute("aria-label", `${this.chart.title}: ${lines.map(l => l.name).join(", ")}`);
    if (!lines.length) return;
    const all = lines.flatMap(line => line.points);
    const range = this.zoom || all.reduce(([a, b], [x]) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
    const inside = all.filter(([x]) => x >= range[0] && x <= range[1]);
    const values = (inside.length ? inside : all).map(p => p[1]);
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    const margin = 0.05 * (high - low) || Math.abs(high) * 0.05 || 1;
    low = low >= 0 && (this.chart.minutes || low < 3 * margin) ? 0 : low - margin;
    high += margin;
    this.range = range;
    this.x = x => left + (range[1] > range[0] ? (x - range[0]) / (range[1] - range[0]) : 0.5) * (width - left - right);
    this.back = px => range[0] + (px - left) / (width - left - right) * (range[1] - range[0]);
    this.y = y => top + (1 - (y - low) / (high - low)) * (height - top - bottom);
    this.bands(top, height - bottom);
    for (const y of ticks(low, high, 5)) {
      this.svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: this.y(y), y2: this.y(y) }));
      this.svg.append(element("text", { x: left - 6, y: this.y(y) + 4, "text-anchor": "end" }, this.text(y)));
    }
    for (const x of ticks(range[0], range[1], Math.max(3, Math.floor(width / 110))))
      this.svg.append(element("text", { x: this.x(x), y: height - 8, "text-anchor": "middle" }, figure(x)));
    for (const line of lines) {
      const kept = line.points.filter(([x]) => x >= range[0] && x <= range[1]);
      const path = kept.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join("");
      const style = { d: path, fill: "none", stroke: data.runs[line.run].colour, "stroke-width": 2, "stroke-dasharray": line.dashed ? "5 4" : "none" };
      this.svg.append(element("path", style));
      if (kept.length < 30) for (const [x, y] of kept)
        this.svg.append(element("circle", { cx: this.x(x), cy: this.y(y), r: 2.5, fill: data.runs[line.run].colour }));
    }
    this.drawn = lines;
  }

  /* Phases of the first run that is shown and has several, as bands. */
  bands(top, bottom) {
    if (this.chart.minutes) return;
    const run = data.runs.find((r, number) => shown.has(number) && r.phases.length > 1);
    if (!run) return;
    run.phases.forEach((phase, number) => {
      const [from, to] = [phase.from[this.axis], phase.to[this.axis]].map(v => this.x(Math.min(Math.max(v, this.range[0]), this.range[1])));
      if (to <= from) return;
      if (number % 2 === 0) this.svg.append(element("rect", { x: from, y: top, width: to - from, height: bottom - top, fill: "var(--band)" }));
      if (to - from > 24) this.svg.append(element("text", { x: (from + to) / 2, y: top + 10, "text-anchor": "middle", class: "phase" },
        to - from > 60 ? `phase ${number}` : String(number)));
    });
  }

  text(value) { return this.chart.percent ? `${figure(100 * value)} %` : figure(value); }

  point(px) {
    if (!this.drawn || !this.drawn.length) return;
    const at = this.back(px);
    const rows = this.drawn.map(line => {
      const near = line.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      return [line, near];
    });
    const place = rows.reduce((a, b) => Math.abs(b[1][0] - at) < Math.abs(a[1][0] - at) ? b : a)[1][0];
    this.cursor = place;
    this.tip.replaceChildren(`${this.axisName} ${figure(place)}`, ...rows.map(([line, near]) => {
      const elsewhere = Math.abs(this.x(near[0]) - this.x(place)) > 3 ? ` (at ${figure(near[0])})` : "";
      const row = element("div", {}, `${line.name}: ${this.text(near[1])}${elsewhere}`);
      row.style.color = data.runs[line.run].colour;
      return row;
    }));
    this.tip.hidden = false;
    const x = this.x(place);
    this.tip.style.left = `${Math.min(x + 14, this.box.clientWidth - this.tip.offsetWidth - 6)}px`;
    this.tip.style.top = "34px";
    this.svg.querySelector(".cursor")?.remove();
    this.svg.append(element("line", { class: "cursor grid", x1: x, x2: x, y1: 8, y2: 214 }));
  }

  leave() { this.tip.hidden = true; this.svg.querySelector(".cursor")?.remove(); }

  /* Zoom out as far as there is something to see. */
  widen(middle, width) {
    const xs = this.drawn.flatMap(line => line.points.map(p => p[0]));
    const low = xs.reduce((a, b) => Math.min(a, b)), high = xs.reduce((a, b) => Math.max(a, b));
    const range = [Math.max(low, middle - width / 2), Math.min(high, middle + width / 2)];
    this.setZoom(range[0] <= low && range[1] >= high ? null : range);
  }

  setZoom(range) { this.zoom = range; this.leave(); this.draw(); }

  listen() {
    let from = null;
    const at = event => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") from = at(event); else this.point(at(event)); });
    this.svg.addEventListener("pointermove", event => this.point(at(event)));
    this.svg.addEventListener("pointerup", event => {
      if (from !== null && Math.abs(at(event) - from) > 8) this.setZoom([from, at(event)].map(px => this.back(px)).sort((a, b) => a - b));
      from = null;
    });
    this.svg.addEventListener("pointerleave", () => { from = null; this.leave(); });
    this.svg.addEventListener("dblclick", () => this.setZoom(null));
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", event => {
      const [a, b] = this.range, middle = this.cursor ?? (a + b) / 2, width = this.svg.clientWidth;
      if (event.key === "Escape") this.setZoom(null);
      else if (event.key === "+" || event.key === "=") this.setZoom([middle - (b - a) / 4, middle + (b - a) / 4]);
      else if (event.key === "-") this.widen(middle, 2 * (b - a));
      else if (event.key === "ArrowRight") this.point(this.x(middle) + width / 40);
      else if (event.key === "ArrowLeft") this.point(this.x(middle) - width / 40);
      else return;
      event.preventDefault();
    });
  }
}

const charts = data.charts.map(chart => new Chart(chart));
const redraw = () => charts.forEach(chart => chart.setZoom(null));
across.addEventListener("change", redraw);

data.runs.forEach((run, number) => {
  const mark = element("i");
  mark.style.background = run.colour;
  const button = element("button", { type: "button", "aria-pressed": "true" }, mark, run.name);
  button.addEventListener("click", () => {
    shown.has(number) ? shown.delete(number) : shown.add(number);
    button.setAttribute("aria-pressed", shown.has(number));
    charts.forEach(chart => chart.setZoom(chart.zoom));
    ranks();
  });
  document.getElementById("runs").append(button);
});

function ranks() {
  const box = document.getElementById("ranks");
  box.querySelectorAll(".bar, .keys, h3").forEach(old => old.remove());
  const keys = Object.entries(WORDS).map(([part, word]) => {
    const mark = element("i");
    mark.style.background = PARTS[part];
    return element("span", {}, mark, word);
  });
  box.append(element("div", { class: "keys" }, ...keys));
  const total = rank => Object.values(rank.seconds).reduce((a, b) => a + b, 0);
  const longest = Math.max(...data.runs.flatMap((run, number) => shown.has(number) ? run.ranks.map(total) : []));
  data.runs.forEach((run, number) => {
    if (!shown.has(number)) return;
    run.ranks.forEach(rank => {
      const bar = element("div");
      for (const part of Object.keys(PARTS)) {
        if (!(part in rank.seconds)) continue;
        const piece = element("b", { title: `${WORDS[part]}: ${figure(rank.seconds[part])} s` });
        piece.style.cssText = `width:${100 * rank.seconds[part] / longest}%;background:${PARTS[part]}`;
        bar.append(piece);
      }
      const split = Object.entries(rank.seconds).map(([part, seconds]) => `${WORDS[part]} ${figure(seconds)} s`).join(", ");
      box.append(element("div", { class: "bar", role: "img", "aria-label": `${run.name}, ${rank.name}: ${split}` },
        element("span", {}, `${data.runs.length > 1 ? run.name + ", " : ""}${rank.name}`), bar));
    });
  });
}
ranks();

const theme = document.getElementById("theme");
function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  theme.setAttribute("aria-pressed", dark);
}
theme.addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
