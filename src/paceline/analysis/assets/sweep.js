const sweep = JSON.parse(document.getElementById("data").textContent);
const percent = sweep.metric !== "loss";
const sign = sweep.metric === "loss" ? -1 : 1;
const measured = sweep.trials.filter(trial => trial.value !== null);
const complete = measured.filter(trial => trial.state === "complete");
const HEIGHT = 320, TOP = 34, BOTTOM = 300;

function shownValue(value) { return percent ? `${Number((100 * value).toFixed(2))}%` : figure(value); }

function text(x, y, words, kind) { return element("text", { x: x.toFixed(1), y: y.toFixed(1), class: kind }, words); }

/* Limits around numbers, also if all of them are equal. */
function limits(values) {
  const least = Math.min(...values), most = Math.max(...values), margin = 0.06 * (most - least) || Math.abs(most) * 0.05 || 1;
  return [least - margin, most + margin];
}

/* 1 for the best complete trial, 0 for the worst. */
function quality(trial) {
  const values = complete.map(other => sign * other.value), least = Math.min(...values), most = Math.max(...values);
  return most > least ? Math.max(0, Math.min(1, (sign * trial.value - least) / (most - least))) : 1;
}

function choose(number) {
  for (const old of document.querySelectorAll(".chosen")) old.classList.remove("chosen");
  for (const found of document.querySelectorAll(`[data-trial="${number}"]:not(.hit)`)) found.classList.add("chosen");
}

/* A figure with a tooltip about the trial under the cursor. */
function makeFigure(title, note, ...parts) {
  const plot = element("svg", { class: "plot", role: "img", "aria-label": title }, ...parts);
  const tip = element("div", { class: "tip", role: "status" });
  tip.hidden = true;
  const box = element("figure", {}, element("figcaption", {}, title, element("small", {}, note)), plot, tip);
  const show = event => {
    const number = event.target.dataset?.trial;
    tip.hidden = number === undefined;
    if (tip.hidden) return;
    choose(number);
    const trial = sweep.trials.find(other => other.number === Number(number));
    const rows = Object.entries(trial.values).map(([field, value]) => element("div", {}, element("span", {}, field), element("b", {}, value)));
    tip.replaceChildren(`trial ${number}, ${trial.state}: ${sweep.label} ${shownValue(trial.value)}`, ...rows);
    const place = box.getBoundingClientRect(), x = event.clientX - place.left, y = event.clientY - place.top;
    tip.style.left = `${Math.max(6, Math.min(x + 14, box.clientWidth - tip.offsetWidth - 6))}px`;
    tip.style.top = `${Math.max(6, Math.min(y + 14, box.clientHeight - tip.offsetHeight - 6))}px`;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { tip.hidden = true; choose(-1); });
  return { box, plot };
}

class History {
  constructor() {
    ({ box: this.box, plot: this.plot } = makeFigure(`${sweep.label} of each trial`, "The line is the best so far; hollow: pruned."));
    document.getElementById("history").append(this.box);
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight || 260, left = 52, right = width - 12, bottom = height - 34;
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const [low, high] = limits(measured.map(trial => trial.value)), last = Math.max(1, ...sweep.trials.map(trial => trial.number));
    const x = number => left + 8 + (right - left - 16) * number / last, y = value => 8 + (bottom - 8) * (1 - (value - low) / (high - low));
    const parts = [];
    for (const at of ticks(low, high, 5)) {
      parts.push(element("line", { x1: left, x2: right, y1: y(at), y2: y(at), class: "grid" }), text(left - 6, y(at) + 4, shownValue(at), "end"));
    }
    for (const at of ticks(0, last, Math.min(10, width / 60)).filter(Number.isInteger)) parts.push(text(x(at), bottom + 16, at, "middle"));
    parts.push(text((left + right) / 2, height - 3, "trial", "middle"));
    let best = null, path = "";
    for (const trial of complete) {
      if (best !== null && sign * trial.value <= sign * best) continue;
      path += best === null ? `M${x(trial.number)},${y(trial.value)}` : `H${x(trial.number)}V${y(trial.value)}`;
      best = trial.value;
    }
    if (path) parts.push(element("path", { d: `${path}H${x(last)}`, class: "steps" }));
    for (const trial of measured) {
      parts.push(element("circle", { cx: x(trial.number), cy: y(trial.value), r: 4, class: trial.state === "complete" ? "dot" : "dot pruned", "data-trial": trial.number }));
    }
    this.plot.replaceChildren(...parts);
  }
}

/* An axis of the parallel coordinates: where a trial meets it, and its labels. */
function fieldAxis(field) {
  const words = measured.map(trial => trial.values[field]), numbers = words.map(Number);
  const isRange = sweep.space[field].includes(".."), log = sweep.space[field].startsWith("log:");
  if (!isRange || numbers.some(Number.isNaN)) {
    const names = isRange ? [...new Set(words)] : sweep.choices[field];
    return { name: field, at: trial => (names.indexOf(trial.values[field]) + 0.5) / names.length, labels: names.map((name, place) => [(place + 0.5) / names.length, name]) };
  }
  const scale = log ? Math.log10 : value => value, [low, high] = limits(numbers.map(scale));
  const place = value => (scale(value) - low) / (high - low);
  let round = ticks(low, high, 6);
  if (log) {
    const factors = high - low > 2 ? [1] : [1, 2, 5], powers = [];
    for (let power = Math.floor(low); power <= high; power++) powers.push(...factors.map(factor => factor * 10 ** power));
    round = powers.filter(value => place(value) >= 0 && place(value) <= 1);
  }
  return { name: field, at: trial => place(Number(trial.values[field])), labels: round.map(value => [place(value), figure(value)]) };
}

function resultAxis() {
  const [low, high] = limits(measured.map(trial => trial.value)), place = value => (value - low) / (high - low);
  return { name: sweep.label, at: trial => place(trial.value), labels: ticks(low, high, 6).map(value => [place(value), shownValue(value)]) };
}

class Parallel {
  constructor() {
    this.axes = [...Object.keys(sweep.space).map(fieldAxis), resultAxis()];
    ({ box: this.box, plot: this.plot } = makeFigure("Parallel coordinates", `From the fields to ${sweep.label}.`));
    this.box.style.setProperty("--least", `${120 * this.axes.length}px`);
    document.querySelector("#parallel .scroll").append(this.box);
  }

  draw() {
    const width = this.plot.clientWidth, left = 62, step = (width - left - 66) / (this.axes.length - 1);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const x = number => left + step * number, y = place => BOTTOM - (BOTTOM - TOP) * place;
    const sorted = [...measured].sort((one, other) => quality(one) - quality(other)), lines = [], hits = [];
    for (const trial of sorted) {
      const d = this.axes.map((axis, number) => `${number ? "L" : "M"}${x(number).toFixed(1)},${y(axis.at(trial)).toFixed(1)}`).join("");
      const line = element("path", { d, class: trial.state === "complete" ? "trial" : "trial pruned", "data-trial": trial.number });
      const part = Math.round(20 + 80 * quality(trial));
      line.style.stroke = `color-mix(in srgb, var(--run-0) ${part}%, var(--line))`;
      lines.push(line);
      hits.push(element("path", { d, class: "hit", "data-trial": trial.number }));
    }
    const axes = this.axes.flatMap((axis, number) => {
      const kind = number === this.axes.length - 1 ? "start" : "end", beside = kind === "end" ? -6 : 6;
      const name = axis.name.length > step / 7 ? axis.name.split(".").pop() : axis.name;
      return [
        element("line", { x1: x(number), x2: x(number), y1: TOP, y2: BOTTOM, class: "axis" }),
        text(x(number), 18, name, "middle name"),
        ...axis.labels.map(([place, label]) => text(x(number) + beside, y(place) + 4, label, kind)),
      ];
    });
    this.plot.replaceChildren(...lines, ...axes, ...hits);
  }
}

for (const row of document.querySelectorAll("#trials tbody tr")) {
  row.addEventListener("pointerenter", () => choose(row.dataset.trial));
  row.addEventListener("pointerleave", () => choose(-1));
}
if (complete.length) {
  const charts = [new History(), new Parallel()];
  const draw = () => charts.forEach(chart => chart.draw());
  new ResizeObserver(draw).observe(document.querySelector("main"));
  draw();
} else {
  for (const name of ["history", "parallel"]) document.getElementById(name).hidden = true;
}
