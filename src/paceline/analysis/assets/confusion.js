/* The confusion matrix on a canvas: a row per label, a column per prediction. `view` is in cells. */
class Matrix {
  constructor(shown) {
    this.shown = shown;
    this.size = shown.names.length;
    this.counts = new Map();
    this.totals = shown.classes.map(row => row[5]);
    for (const right of [false, true])  // the diagonal is drawn last
      for (let i = 0; i < shown.cells.length; i += 3) {
        const [label, predicted, value] = shown.cells.slice(i, i + 3);
        if ((label === predicted) === right) this.counts.set(label * this.size + predicted, value);
      }
    this.canvas = element("canvas", { tabindex: "0", role: "application", "aria-label":
      `Confusion matrix of ${this.size} classes, a row per label, a column per prediction. Arrow keys move, + and - zoom, Escape resets.` });
    this.status = element("p", { role: "status", class: "cell" }, "Point at a cell, or use the arrow keys.");
    this.choice = element("select", {}, element("option", { value: "grouped" }, "confused classes together"),
      element("option", { value: "given" }, "classes in order"));
    this.choice.addEventListener("change", () => this.arrange());
    const button = (text, label, action) => {
      const made = element("button", { type: "button", "aria-label": label }, text);
      made.addEventListener("click", action);
      return made;
    };
    this.box = element("div", { class: "matrix" }, element("div", { class: "tools" }, element("label", {}, "order: ", this.choice),
      button("+", "zoom in", () => this.zoom(0.5)), button("-", "zoom out", () => this.zoom(2)),
      button("reset", "show the whole matrix", () => this.reset())), this.canvas, this.status);
    this.listen();
    this.arrange();
    new ResizeObserver(() => this.draw()).observe(this.box);
    new MutationObserver(() => this.draw()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  arrange() {
    this.order = this.choice.value === "grouped" ? this.shown.order : this.shown.names.map((_, number) => number);
    this.place = new Map(this.order.map((number, position) => [number, position]));
    this.cursor = null;
    this.reset();
  }

  reset() { this.view = { x: 0, y: 0, span: this.size }; this.draw(); }

  zoom(factor, x = this.view.x + this.view.span / 2, y = this.view.y + this.view.span / 2) {
    const span = Math.min(this.size, Math.max(Math.min(4, this.size), this.view.span * factor));
    const ratio = span / this.view.span;
    this.view = { x: x - (x - this.view.x) * ratio, y: y - (y - this.view.y) * ratio, span };
    this.clamp();
  }

  clamp() {
    for (const side of ["x", "y"]) this.view[side] = Math.min(Math.max(0, this.view[side]), this.size - this.view.span);
    this.draw();
  }

  draw() {
    const whole = Math.min(this.box.clientWidth, 680, 110 + 90 * this.size);
    if (!whole) return;
    const scale = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
    const color = name => style.getPropertyValue(name).trim();
    this.margin = whole / this.view.span >= 13 ? Math.min(110, whole / 4) : 18;
    this.cell = (whole - this.margin) / this.view.span;
    Object.assign(this.canvas, { width: whole * scale, height: whole * scale });
    this.canvas.style.width = this.canvas.style.height = `${whole}px`;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.fillStyle = color("--panel");
    pen.fillRect(this.margin, this.margin, whole, whole);
    pen.save();
    pen.beginPath();
    pen.rect(this.margin, this.margin, whole, whole);
    pen.clip();
    const least = Math.max(this.cell, 2), faintest = this.cell < 3 ? 0.45 : 0.18;  // small cells need more contrast
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = "11px system-ui, sans-serif";
    for (const [key, value] of this.counts) {
      const [label, predicted] = [Math.floor(key / this.size), key % this.size];
      const [x, y] = [this.px(this.place.get(predicted), "x"), this.px(this.place.get(label), "y")];
      if (x + least < this.margin || y + least < this.margin || x > whole || y > whole) continue;
      const alpha = faintest + (1 - faintest) * Math.sqrt(value / this.totals[label]);
      pen.globalAlpha = alpha;
      pen.fillStyle = color(label === predicted ? "--good" : "--bad");
      pen.fillRect(x, y, least, least);
      if (this.cell < 26) continue;
      pen.globalAlpha = 1;
      pen.fillStyle = color(alpha > 0.65 ? "--ground" : "--ink");
      pen.fillText(count(value), x + this.cell / 2, y + this.cell / 2, this.cell - 2);
    }
    pen.globalAlpha = 1;
    if (this.cursor) {
      pen.strokeStyle = color("--ink");
      pen.lineWidth = 2;
      const side = Math.max(this.cell, 5);
      pen.strokeRect(this.px(this.cursor.x, "x"), this.px(this.cursor.y, "y"), side, side);
    }
    pen.restore();
    this.labels(pen, whole, color("--faint"));
  }

  px(position, side) { return this.margin + (position - this.view[side]) * this.cell; }

  /* Names of rows and columns if there is room, else the names of the axes. */
  labels(pen, whole, color) {
    pen.fillStyle = color;
    const turned = (text, x, y, width) => {
      pen.save();
      pen.translate(x, y);
      pen.rotate(-Math.PI / 2);
      pen.fillText(text, 0, 0, width);
      pen.restore();
    };
    if (this.cell < 11) {
      pen.fillText("prediction", (whole + this.margin) / 2, this.margin / 2);
      turned("label", this.margin / 2, (whole + this.margin) / 2);
      return;
    }
    const fits = name => name.length > 18 ? `${name.slice(0, 17)}…` : name;
    for (let position = Math.ceil(this.view.x - 0.5); position < this.view.x + this.view.span - 0.5; position++) {
      pen.textAlign = "left";
      turned(fits(this.shown.names[this.order[position]]), this.px(position + 0.5, "x"), this.margin - 4, this.margin - 6);
    }
    for (let position = Math.ceil(this.view.y - 0.5); position < this.view.y + this.view.span - 0.5; position++) {
      pen.textAlign = "right";
      pen.fillText(fits(this.shown.names[this.order[position]]), this.margin - 4, this.px(position + 0.5, "y"), this.margin - 6);
    }
  }

  select(x, y) {
    const inside = value => Math.min(this.size - 1, Math.max(0, value));
    this.cursor = { x: inside(x), y: inside(y) };
    const [label, predicted] = [this.order[this.cursor.y], this.order[this.cursor.x]];
    const value = this.counts.get(label * this.size + predicted) || 0, total = this.totals[label];
    const part = total ? ` (${share(value / total)} of ${count(total)})` : "";
    this.status.textContent = `${this.shown.names[label]} predicted as ${this.shown.names[predicted]}: ${count(value)} image${value === 1 ? "" : "s"}${part}`;
    this.draw();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top].map((px, side) =>
      this.view[side ? "y" : "x"] + (px - this.margin) / this.cell);
  }

  listen() {
    let drag = null;
    this.canvas.addEventListener("pointerdown", event => {
      drag = [event.clientX, event.clientY, { ...this.view }];
      if (this.view.span < this.size) this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", event => {
      if (drag && this.view.span < this.size) {
        this.view.x = drag[2].x - (event.clientX - drag[0]) / this.cell;
        this.view.y = drag[2].y - (event.clientY - drag[1]) / this.cell;
        this.clamp();
      } else this.select(...this.at(event).map(Math.floor));
    });
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, () => { drag = null; });
    this.canvas.addEventListener("click", event => this.select(...this.at(event).map(Math.floor)));
    this.canvas.addEventListener("dblclick", event => this.zoom(0.5, ...this.at(event)));
    this.canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return;  // the page scrolls
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, ...this.at(event));
    }, { passive: false });
    this.canvas.addEventListener("keydown", event => {
      const { x, y } = this.cursor || { x: -1, y: 0 };
      const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (event.key in steps) {
        this.select(x + steps[event.key][0], y + steps[event.key][1]);
        this.follow();
      } else if (["+", "=", "-"].includes(event.key)) {
        this.zoom(event.key === "-" ? 2 : 0.5, ...this.middle());
        if (this.cursor) this.follow();
      } else if (event.key === "Escape") this.reset();
      else return;
      event.preventDefault();
    });
  }

  middle() { return this.cursor ? [this.cursor.x + 0.5, this.cursor.y + 0.5] : []; }

  /* Move the view so that the selected cell is visible. */
  follow() {
    for (const side of ["x", "y"]) this.view[side] = Math.min(this.cursor[side], Math.max(this.view[side], this.cursor[side] + 1 - this.view.span));
    this.clamp();
  }
}
