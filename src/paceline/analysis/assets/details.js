"use strict";
const evaluations = JSON.parse(document.getElementById("details-data").textContent);
const share = value => value === null ? "" : `${(100 * value).toFixed(2)}%`;
const count = value => value.toLocaleString("en");

/* A bar from 0 to 100% with a confidence interval and the value in it. */
function intervalBar(value, low, high) {
  const bar = element("span", { class: "ci", "aria-hidden": "true" });
  if (value === null) return bar;
  const [range, dot] = [element("i"), element("b")];
  range.style.cssText = `left:${100 * low}%;width:${100 * (high - low)}%`;
  dot.style.left = `${100 * value}%`;
  bar.append(range, dot);
  return bar;
}

/* A table whose columns can be sorted. columns: [title, first direction]; rows: arrays of [sort key, content]. */
function sortable(caption, columns, rows, sorted) {
  const body = element("tbody");
  const lines = rows.map(cells => {
    const line = element("tr", {}, ...cells.map(([, content], number) =>
      element(number ? "td" : "th", number ? {} : { scope: "row" }, content)));
    line.keys = cells.map(([key]) => key);
    return line;
  });
  const heads = columns.map(([title], number) => {
    const button = element("button", { type: "button" }, title);
    button.addEventListener("click", () => sort(number));
    return element("th", { scope: "col" }, button);
  });
  let order = [-1, 1];
  function sort(column) {
    const [before, direction] = order;
    order = [column, before === column ? -direction : columns[column][1]];
    lines.sort((a, b) => {
      const [x, y] = [a.keys[column], b.keys[column]];
      if (x === null || y === null) return (x === null) - (y === null);
      return order[1] * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
    heads.forEach((head, number) => head.setAttribute("aria-sort",
      number !== column ? "none" : order[1] > 0 ? "ascending" : "descending"));
    body.replaceChildren(...lines);
  }
  sort(sorted);
  const table = element("table", { class: "figures sortable" }, element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...heads)), body);
  return [element("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": caption }, table), lines];
}

function classTable(shown) {
  const rows = shown.classes.map(([recall, low, high, precision, f1, support, predicted], number) => [
    [shown.names[number], shown.names[number]], [recall, share(recall)],
    [recall, element("span", { title: recall === null ? "no images" : `95% CI: ${share(low)} to ${share(high)}` }, intervalBar(recall, low, high))],
    [precision, share(precision)], [f1, share(f1)], [support, count(support)], [predicted, count(predicted)]
  ]);
  const columns = [["class", 1], ["recall", 1], ["95% CI", 1], ["precision", 1], ["F1", 1], ["images", 1], ["predicted", -1]];
  const [box, lines] = sortable("Figures of each class; recall is the accuracy on its images", columns, rows, 1);
  if (rows.length <= 20) return [box];
  const filter = element("input", { type: "search", placeholder: "class name" });
  filter.addEventListener("input", () => lines.forEach(line => {
    line.hidden = !line.keys[0].toLowerCase().includes(filter.value.toLowerCase());
  }));
  return [element("label", { class: "tools" }, "show only ", filter), box];
}

function sliceTable({ slices, showsTop5 }) {
  const rows = slices.rows.map(row => [
    [row.slice ?? "", row.slice ?? "(no value)"], [row.top1, share(row.top1)],
    [row.top1, element("span", { title: `95% CI: ${row.interval.map(share).join(" to ")}` }, intervalBar(row.top1, ...row.interval))],
    ...(showsTop5 ? [[row.top5, share(row.top5)]] : []), [row.loss, row.loss.toFixed(4)], [row.samples, count(row.samples)]
  ]);
  const columns = [["slice", 1], ["top-1", 1], ["95% CI", 1], ...(showsTop5 ? [["top-5", 1]] : []), ["loss", -1], ["images", -1]];
  return sortable(`Slices by ${slices.by}`, columns, rows, 1)[0];
}

function picture(shown, index) {
  const image = shown.images[index], names = shown.names;
  const text = `${names[image.label]} predicted as ${names[image.predicted]} (${share(image.confidence)})`;
  const name = image.path || `image ${index}`;
  const small = shown.thumbnails[index]
    ? element("img", { src: `data:image/webp;base64,${shown.thumbnails[index]}`, alt: `${name}: ${text}`, loading: "lazy" })
    : element("span", { class: "missing" }, "no image");
  small.addEventListener("load", () => small.classList.toggle("tiny", small.naturalWidth < 48));
  const right = image.label === image.predicted;
  return element("figure", { class: "picture", title: `${name}\n${text}\nprobability of the label ${share(image.p_label)}, loss ${image.loss.toFixed(3)}` },
    small, element("figcaption", {}, element("span", {}, names[image.label]), element("span", { class: right ? "right" : "wrong" },
      `${(100 * image.confidence).toFixed(0)}% ${names[image.predicted]}`), element("small", {}, name.split("/").pop())));
}

const pictures = (shown, indices) => element("div", { class: "pictures" },
  ...indices.filter(index => index in shown.images).map(index => picture(shown, index)));

/* Accuracy by confidence; bars below the diagonal mean that the model is too confident. */
function reliability(title, bins, error) {
  const [width, height, left, top, side] = [300, 250, 44, 8, 200];
  const plot = element("svg", { class: "reliability", role: "img", viewBox: `0 0 ${width} ${height}`,
    "aria-label": `${title}: expected calibration error ${share(error)}` });
  const y = value => top + (1 - value) * side;
  const most = Math.max(...bins.map(bin => bin.count));
  bins.forEach((bin, number) => {
    if (!bin.count) return;
    const x = left + number / bins.length * side, bar = element("rect", { x: x + 1, y: y(bin.accuracy), width: side / bins.length - 2,
      height: bin.accuracy * side, class: "accuracy", "fill-opacity": 0.35 + 0.65 * Math.sqrt(bin.count / most) });
    const tip = document.createElementNS(SVG, "title");
    tip.textContent = `confidence ${share(bin.confidence)}, accuracy ${share(bin.accuracy)}, ${count(bin.count)} image${bin.count === 1 ? "" : "s"}`;
    bar.append(tip);
    plot.append(bar, element("line", { x1: x + 1, x2: x + side / bins.length - 1, y1: y(bin.confidence), y2: y(bin.confidence), class: "confidence" }));
  });
  plot.append(element("line", { x1: left, y1: y(0), x2: left + side, y2: y(1), class: "grid" }));
  for (const value of [0, 0.5, 1]) {
    plot.append(element("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, `${100 * value}%`));
    plot.append(element("text", { x: left + value * side, y: top + side + 16, "text-anchor": "middle" }, `${100 * value}%`));
  }
  plot.append(element("text", { x: left + side / 2, y: height - 6, "text-anchor": "middle" }, "confidence"));
  return element("figure", {}, element("figcaption", {}, title, element("small", {}, `expected calibration error ${share(error)} (15 bins of equal width)`)), plot);
}

function calibration(found) {
  const plots = [reliability("Accuracy by confidence", found.bins, found.ece)];
  if (found.temperature !== null && found.bins_after)
    plots.push(reliability(`At temperature ${figure(found.temperature)}`, found.bins_after, found.ece_after));
  return [element("p", {}, "Bars: accuracy; lines: mean confidence; stronger colors mean more images. The temperature is fitted to the same images."),
    element("div", { class: "plots" }, ...plots)];
}

function fill(box, shown) {
  box.append(element("ul", {}, ...shown.lines.map(line => element("li", {}, line))));
  const part = (title, ...content) => box.append(element("h4", {}, title), ...content);
  part("Classes", ...classTable(shown));
  if (shown.slices) part("Slices", sliceTable(shown));
  if (shown.cells.length) part("Confusion matrix", element("p", {}, "Rows are labels, columns are predictions. Colors are fractions of the label's images. Drag to move, double-click or Ctrl and wheel to zoom."), new Matrix(shown).box);
  part("Calibration", ...calibration(shown.calibration));
  const pairs = shown.pairs.map(pair => element("li", {}, `${shown.names[pair.label]} predicted as ${shown.names[pair.predicted]}: ${count(pair.count)} (${share(pair.fraction)} of its images)`, pictures(shown, pair.images)));
  if (pairs.length) part("Most confused", element("ol", { class: "pairs" }, ...pairs));
  for (const gallery of shown.galleries) {
    if (!gallery.images.length) continue;
    const total = gallery.total > gallery.images.length ? ` (${gallery.images.length} of ${count(gallery.total)})` : "";
    part(gallery.title + total, element("p", {}, gallery.note), pictures(shown, gallery.images));
  }
}

evaluations.forEach((shown, number) => {
  const box = element("div"), whole = element("details", { class: "evaluation" }, element("summary", {}, `${shown.title}: top-1 ${share(shown.top1)}`), box);
  whole.addEventListener("toggle", () => { if (whole.open && !box.hasChildNodes()) fill(box, shown); });
  document.getElementById("details").append(whole);
  whole.open = number === 0;
});
