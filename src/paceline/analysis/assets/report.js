const data = JSON.parse(document.getElementById("data").textContent);
let shown = new Set(data.runs.keys());
const PARTS = { data: "#e8590c", compute: "#1c7ed6", sync: "#9c36b5", optimizer: "#2b8a3e" };
const WORDS = { data: "input wait", compute: "forward and backward", sync: "gradient synchronization", optimizer: "optimizer" };
const xAxis = document.getElementById("x-axis");
const training = document.querySelector("#thin input");
const uncut = document.querySelector("#uncut input");
const MAX_ROWS = 10, MIN_POINTS = 4;

/* A sample of a run's line, the same in charts, legend, tooltips and tables. */
function mark(run, thin) {
  const line = element("line", { x1: 1, x2: 29, y1: 5, y2: 5, class: thin ? "curve thin" : "curve" });
  stroke(line, run);
  return element("svg", { class: "mark", viewBox: "0 0 30 10", "aria-hidden": "true" }, line);
}

function stroke(line, run) {
  line.style.stroke = run.color;
  if (run.dashes) line.setAttribute("stroke-dasharray", run.dashes);
}

/* Limits of the y axis: the values plus a margin; percentages stay between 0 and 100%. */
function valueRange(values, percent, fromZero, floor) {
  const least = Math.max(floor, values.reduce((a, b) => Math.min(a, b))), most = values.reduce((a, b) => Math.max(a, b));
  const margin = 0.05 * (most - least) || Math.abs(most) * 0.05 || 1;
  const low = least >= 0 && (fromZero || least < 3 * margin) ? 0 : least - margin, high = most + margin;
  return percent ? [Math.min(least, Math.max(0, low)), Math.max(most, Math.min(1, high))] : [low, high];
}

/* Where an accuracy axis starts, so that the first epochs do not squeeze the later half. With several runs only
   validation curves count; with one run its training curve counts as well. */
function floorOf(lines) {
  const single = new Set(lines.map(line => line.run)).size === 1;
  const curves = lines.filter(line => single || !line.thin).map(line => line.points);
  if (!curves.some(points => points.length >= MIN_POINTS)) return -Infinity;
  const all = lines.flatMap(line => line.points.map(p => p[1]));
  const span = list => [list.reduce((a, b) => Math.min(a, b)), list.reduce((a, b) => Math.max(a, b))];
  const [least, most] = span(all);
  const late = points => points.filter(p => p[0] >= (points[0][0] + points[points.length - 1][0]) / 2);
  const [low, high] = span(curves.flatMap(late).map(p => p[1]));
  const floor = low - Math.max(high - low, 0.005);
  return most - least > 3 * (most - floor) ? floor : -Infinity;
}

/* Points are [epoch, step, images, minutes, value]; telemetry has minutes only. */
class Chart {
  constructor(chart) {
    this.chart = chart;
    this.zoom = null;
    this.cursor = null;
    this.svg = element("svg", { class: "plot", role: "img", tabindex: "0", viewBox: "0 0 560 260", preserveAspectRatio: "none" });
    this.tip = element("div", { class: "tip", role: "status" });
    this.tip.hidden = true;
    this.note = element("small", {}, chart.note || "");
    this.box = element("figure", {}, element("figcaption", {}, chart.title, this.note), this.svg, this.tip);
    document.getElementById("charts").append(this.box);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  get cuttable() { return this.chart.percent && !this.chart.minutes; }

  get axis() { return this.chart.minutes ? 3 : Number(xAxis.value); }

  lines() {
    return this.chart.lines.filter(line => shown.has(line.run) && (!line.thin || training.checked)).map(line => ({
      ...line, points: line.points.filter(p => p[this.axis] !== null).map(p => [p[this.axis], p[4]])
    })).filter(line => line.points.length);
  }

  draw() {
    const width = this.svg.clientWidth || 560, height = 260, left = 60, right = 12, top = 8, bottom = 40;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    this.axisName = ["epoch", "step", "images", "minutes"][this.axis];
    const lines = this.drawn = this.lines();
    this.box.hidden = !lines.length;
    if (!lines.length) return;
    const some = new Set(lines.map(line => line.run)).size;
    this.svg.setAttribute("aria-label", `${this.chart.title} by ${this.axisName}: ${some} run${some > 1 ? "s" : ""}`);
    const all = lines.flatMap(line => line.points);
    const range = this.range = this.zoom || all.reduce(([a, b], [x]) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
    const inside = all.filter(([x]) => x >= range[0] && x <= range[1]);
    const floor = this.zoom || uncut.checked || !this.cuttable ? -Infinity : floorOf(lines);
    const [low, high] = valueRange((inside.length ? inside : all).map(p => p[1]), this.chart.percent, this.chart.fromZero, floor);
    this.note.textContent = [this.chart.note, floor > -Infinity ? `The axis starts at ${figure(Math.round(1000 * low) / 10)}%.` : ""].join(" ");
    this.x = x => left + (range[1] > range[0] ? (x - range[0]) / (range[1] - range[0]) : 0.5) * (width - left - right);
    this.back = px => range[0] + (px - left) / (width - left - right) * (range[1] - range[0]);
    this.y = y => top + (1 - (y - low) / (high - low)) * (height - top - bottom);
    this.bands(top, height - bottom);
    for (const y of ticks(low, high, 5)) {
      this.svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: this.y(y), y2: this.y(y) }));
      this.svg.append(element("text", { x: left - 6, y: this.y(y) + 4, "text-anchor": "end" }, this.text(y)));
    }
    for (const x of ticks(range[0], range[1], Math.max(3, Math.floor(width / 110))))
      this.svg.append(element("text", { x: this.x(x), y: height - 24, "text-anchor": "middle" }, figure(x)));
    this.svg.append(element("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle", class: "axis" }, this.axisName));
    // the nested document clips curves below the axis; its margin leaves room for dots at the edges
    const [x, y, w, h] = [left - 4, top - 4, width - left - right + 8, height - top - bottom + 8];
    this.area = element("svg", { x, y, width: w, height: h, viewBox: `${x} ${y} ${w} ${h}` });
    this.svg.append(this.area);
    for (const line of lines) this.curve(line);
  }

  curve(line) {
    const run = data.runs[line.run];
    const kept = line.points.filter(([x]) => x >= this.range[0] && x <= this.range[1]);
    const path = kept.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join("");
    const drawn = [element("path", { d: path, class: line.thin ? "curve thin" : "curve" })];
    stroke(drawn[0], run);
    if (kept.length < 30 && !line.thin) for (const [x, y] of kept) {
      const dot = element("circle", { cx: this.x(x), cy: this.y(y), r: 2.5 });
      dot.style.fill = run.color;
      drawn.push(dot);
    }
    for (const each of drawn) each.dataset.run = line.run;
    this.area.append(...drawn);
  }

  /* Bring one run to the front; null: show all alike. */
  emphasize(number) {
    this.svg.classList.toggle("one-run", number !== null);
    this.svg.querySelectorAll("[data-run]").forEach(each => each.classList.toggle("behind", Number(each.dataset.run) !== number));
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

  text(value) { return this.chart.percent ? `${figure(100 * value)}%` : figure(value); }

  /* A row of the tooltip; the name of a run may be cut, the kind of line may not. */
  row(line, near, position) {
    const run = data.runs[line.run], several = data.runs.length > 1;
    const elsewhere = Math.abs(this.x(near[0]) - this.x(position)) > 3 ? ` at ${figure(near[0])}` : "";
    return element("div", {}, mark(run, line.thin), element("span", {}, several || !line.name ? run.name : line.name),
      several && line.name ? element("em", {}, line.name.split(" ")[0]) : "",
      element("b", {}, this.chart.percent ? `${(100 * near[1]).toFixed(2)}%` : figure(near[1])), element("small", {}, elsewhere));
  }

  /* Show the values at a position; of many lines, those nearest to the pointer. */
  point(px, py = null) {
    if (!this.drawn || !this.drawn.length) return;
    const at = this.back(px);
    let rows = this.drawn.map(line => [line, line.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)]);
    const position = rows.reduce((a, b) => Math.abs(b[1][0] - at) < Math.abs(a[1][0] - at) ? b : a)[1][0];
    this.cursor = position;
    const more = rows.length - MAX_ROWS;
    if (more > 0 && py !== null) rows.sort((a, b) => Math.abs(this.y(a[1][1]) - py) - Math.abs(this.y(b[1][1]) - py));
    if (more > 0) rows = rows.slice(0, MAX_ROWS);
    rows.sort((a, b) => b[1][1] - a[1][1]);
    const rest = more > 0 ? [element("div", {}, `and ${more} more`)] : [];
    this.tip.replaceChildren(`${this.axisName} ${figure(position)}`, ...rows.map(([line, near]) => this.row(line, near, position)), ...rest);
    this.tip.hidden = false;
    this.placeTip(this.x(position));
    this.svg.querySelector(".cursor")?.remove();
    this.svg.append(element("line", { class: "cursor grid", x1: this.x(position), x2: this.x(position), y1: 8, y2: 220 }));
  }

  /* Place the tooltip beside the cursor, within the figure and the window. */
  placeTip(x) {
    const box = this.box.getBoundingClientRect(), plot = this.svg.getBoundingClientRect();
    const offset = plot.left - box.left + x, [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const left = offset + 14 + width <= this.box.clientWidth - 6 ? offset + 14 : offset - 14 - width;
    const top = Math.min(plot.top - box.top + 4, window.innerHeight - 8 - box.top - height);
    this.tip.style.left = `${Math.max(6, Math.min(left, this.box.clientWidth - width - 6))}px`;
    this.tip.style.top = `${Math.max(top, 8 - box.top)}px`;
  }

  leave() { this.tip.hidden = true; this.svg.querySelector(".cursor")?.remove(); }

  /* Zoom out, at most to the range of the data. */
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
    const show = event => this.point(at(event), event.clientY - this.svg.getBoundingClientRect().top);
    this.svg.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") from = at(event); else show(event); });
    this.svg.addEventListener("pointermove", show);
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
xAxis.addEventListener("change", redraw);
training.addEventListener("change", redraw);
uncut.addEventListener("change", redraw);
document.getElementById("thin").hidden = !data.charts.some(chart => chart.lines.some(line => line.thin));
document.getElementById("uncut").hidden = !charts.some(chart => chart.cuttable);
document.querySelectorAll("i[data-run]").forEach(slot => slot.replaceWith(mark(data.runs[slot.dataset.run])));

const buttons = data.runs.map((run, number) => {
  const button = element("button", { type: "button", title: run.name }, mark(run), element("span", {}, run.name));
  button.addEventListener("click", () => show(shown.has(number) ? [...shown].filter(other => other !== number) : [...shown, number]));
  button.addEventListener("pointerenter", () => charts.forEach(chart => chart.emphasize(shown.has(number) ? number : null)));
  button.addEventListener("pointerleave", () => charts.forEach(chart => chart.emphasize(null)));
  return button;
});
const bulkButton = (word, numbers) => {
  const button = element("button", { type: "button" }, word);
  button.addEventListener("click", () => show(numbers));
  return button;
};
document.getElementById("runs").append(...buttons,
  ...(data.runs.length > 3 ? [bulkButton("all", [...data.runs.keys()]), bulkButton("none", [])] : []));

function show(numbers) {
  shown = new Set(numbers);
  buttons.forEach((button, number) => button.setAttribute("aria-pressed", shown.has(number)));
  charts.forEach(chart => chart.setZoom(chart.zoom));
  ranks();
}

function ranks() {
  const box = document.getElementById("ranks");
  box.querySelectorAll(".bar, .keys, h3").forEach(old => old.remove());
  const keys = Object.entries(WORDS).map(([part, word]) => {
    const mark = element("i");
    mark.style.background = PARTS[part];
    return element("span", {}, mark, word);
  });
  box.append(element("div", { class: "keys" }, ...keys, "right: peak memory"));
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
      const memory = rank.gigabytes === null ? "" : `${rank.gigabytes.toFixed(2)} GB`;
      const label = data.runs.length > 1 ? `${run.name}, ${rank.name}` : rank.name;
      box.append(element("div", { class: "bar", role: "img", "aria-label": `${run.name}, ${rank.name}: ${split}${memory && ", peak memory " + memory}` },
        element("span", { title: label }, mark(run), element("span", {}, label)), bar, element("small", {}, memory)));
    });
  });
}
show([...shown]);
