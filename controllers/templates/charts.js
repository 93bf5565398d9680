// Charts of JSON series: axes with numbers, the values under the pointer, zoom by dragging, reset by a double-click.
//
// new Chart(figure).show({title, unit, x, scale, shaded, curves, spans})
//   x        what the horizontal axis shows: "step", "seconds", …; "time" are seconds since 1970, shown as the clock
//   scale    "linear", "from zero" or "log"
//   curves   [{name, color, x: [], y: [], spread: [], stacked}]; spread is half the width of a band; a y of null is no point
//   spans    [{row, name, color, from, to}] instead of curves
//   shaded   {name, from, to} or null
//   legend   true: a single curve has a legend, too
// Jinja includes this file, so it has no double braces.
"use strict";

function numberText(value) {
  const size = Math.abs(value);
  if (size >= 1e9 || (size < 1e-3 && size > 0)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function clockText(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString("en-GB");
}

function element(name, attributes, ...children) {
  const isDrawn = ["svg", "path", "line", "rect", "circle", "text", "g"].includes(name);
  const made = isDrawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function ticks(low, high, most, steps = []) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = steps.find((each) => each >= rough) || power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + 1e-6 * step; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = {1: [], 2: [], 5: []};
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of [1, 2, 5]) found[digit].push(Number(`${digit}e${power}`));
  const [ones, twos, fives] = Object.values(found).map((each) => each.filter((tick) => tick >= low && tick <= high));
  const chosen = ones.length > 1 ? ones : [...ones, ...twos, ...fives];
  return chosen.length > 1 ? chosen.filter((_, i) => i % Math.ceil(chosen.length / 6) === 0) : ticks(low, high, 4);
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.range = null; // the zoomed part of the horizontal axis
    this.drag = null; // pixel at which the pointer went down
    this.at = null; // pixel of the pointer: [x, y]
    this.title = element("b", {});
    this.unit = element("span", {class: "muted"});
    this.reset = element("button", {type: "button"}, "reset zoom");
    this.svg = element("svg", {role: "img"});
    this.legend = element("div", {class: "legend"});
    this.tip = element("div", {class: "tip", hidden: ""});
    figure.classList.add("chart");
    figure.append(element("figcaption", {}, this.title, this.unit, this.reset), this.svg, this.legend, this.tip);
    this.reset.addEventListener("click", () => this.zoom(null));
    this.svg.addEventListener("dblclick", () => this.zoom(null));
    this.svg.addEventListener("pointerdown", (event) => { if (event.button === 0) this.drag = this.pixel(event)[0]; });
    this.svg.addEventListener("pointermove", (event) => { this.at = this.pixel(event); this.point(); });
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.point(); });
    addEventListener("pointerup", (event) => this.drop(this.pixel(event)[0]));
    addEventListener("pointercancel", () => { this.drag = null; });
    // In the next frame, because drawing changes the size that is observed.
    new ResizeObserver(() => requestAnimationFrame(() => this.room() !== this.width && this.draw())).observe(figure);
  }

  show(chart) {
    const text = JSON.stringify(chart);
    if (text === this.shown) return;
    [this.shown, this.chart] = [text, chart];
    this.draw();
  }

  zoom(range) {
    this.range = range;
    this.draw();
  }

  room() {
    return Math.max(200, this.figure.clientWidth - 28);
  }

  pixel(event) {
    const box = this.svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  drop(x) {
    const start = this.drag;
    this.drag = null;
    if (start === null) return;
    if (Math.abs(x - start) > 5) this.zoom([Math.min(x, start), Math.max(x, start)].map((each) => this.valueAt(each)));
    else this.point();
  }

  valueAt(pixel) {
    const {left, inner, low, high} = this;
    return low + (high - low) * Math.min(1, Math.max(0, (pixel - left) / inner));
  }

  draw() {
    if (!this.chart) return;
    const {title, unit, x, curves, spans = [], shaded} = this.chart;
    this.title.textContent = title;
    this.unit.textContent = unit;
    this.reset.hidden = this.range === null;
    this.svg.setAttribute("aria-label", title);
    this.rows = [...new Set(spans.map((span) => span.row))];
    this.width = this.room();
    this.height = spans.length ? 60 + 32 * this.rows.length : 220;
    this.bottom = this.height - 36;
    this.points = this.stack(curves);
    const all = [...this.points.flatMap((curve) => curve.points.map((point) => point.x)), ...spans.flatMap((span) => [span.from, span.to])];
    [this.low, this.high] = this.range || extent(all, [0, 1]);
    if (this.low === this.high) [this.low, this.high] = [this.low - 0.5, this.high + 0.5];
    const labels = this.scaleVertical();
    const longest = Math.max(0, ...labels.map((label) => label.text.length));
    this.left = Math.min(this.width / 3, 10 + 7 * longest);
    this.inner = this.width - this.left - 12;
    this.across = (value) => this.left + this.inner * (value - this.low) / (this.high - this.low);
    const {left, inner, bottom, width, height} = this;
    const plot = element("svg", {x: left - 3, y: 4, width: inner + 6, height: bottom - 4, viewBox: `${left - 3} 4 ${inner + 6} ${bottom - 4}`});
    const children = labels.flatMap((label) => [
      element("line", {class: "grid", x1: left, x2: left + inner, y1: label.y, y2: label.y}),
      element("text", {class: "y", x: left - 6, y: label.y + 4, "text-anchor": "end"}, label.text)]);
    const steps = {time: [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600], seconds: []}[x] || [1, 2, 5];
    for (const tick of ticks(this.low, this.high, inner / (x === "time" ? 80 : 60), steps)) {
      const text = x === "time" ? clockText(tick) : numberText(tick), room = text.length * 3.5;
      const at = Math.min(Math.max(this.across(tick), room), width - room);
      children.push(element("text", {class: "x", x: at, y: bottom + 16, "text-anchor": "middle"}, text));
    }
    children.push(element("text", {class: "name", x: left + inner / 2, y: bottom + 32, "text-anchor": "middle"}, x));
    this.shaded = shaded && shaded.to > this.low && shaded.from < this.high && (shaded.from > this.low || shaded.to < this.high);
    if (this.shaded) plot.append(this.block(shaded.from, shaded.to, 0, bottom, "shaded"));
    this.points.forEach((curve) => this.drawCurve(plot, curve));
    for (const span of spans) {
      const block = this.block(span.from, span.to, 10 + 32 * this.rows.indexOf(span.row), 22, "");
      block.style.fill = `var(--${span.color})`;
      plot.append(block);
    }
    this.marks = element("g", {});
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...children, plot, this.marks);
    this.drawLegend();
    this.point();
  }

  // Points without those that are null; stacked curves stand on the curves before them.
  stack(curves) {
    const tops = new Map();
    return curves.map((curve) => {
      const points = [];
      curve.x.forEach((x, i) => {
        if (curve.y[i] === null) return;
        const below = curve.stacked ? tops.get(x) || 0 : 0, y = below + curve.y[i], spread = curve.spread && curve.spread[i] || 0;
        if (curve.stacked) tops.set(x, y);
        points.push({x, y, value: curve.y[i], low: curve.stacked ? below : y - spread, high: curve.stacked ? y : y + spread});
      });
      return {...curve, points, isBand: curve.stacked || Boolean(curve.spread && curve.spread.length)};
    });
  }

  // Sets `this.down`, the pixel of a value, and returns the labels of the vertical axis.
  scaleVertical() {
    const {bottom, rows} = this;
    if (rows.length) return rows.map((text, i) => ({text, y: 21 + 32 * i}));
    const inside = this.points.map((curve) => curve.points.filter((point) => point.x >= this.low && point.x <= this.high)).flat();
    const values = (inside.length ? inside : this.points.flatMap((curve) => curve.points)).flatMap((point) => [point.low, point.high]);
    let [low, high] = extent(values, [0, 1]);
    const isLog = this.chart.scale === "log" && low > 0;
    if (isLog) [low, high] = [low / 1.3, high * 1.3];
    else {
      const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      const hasFloor = low >= 0 && (this.chart.scale === "from zero" || this.points.some((curve) => curve.stacked));
      [low, high] = [hasFloor ? 0 : low - room, high + room];
    }
    const place = isLog ? Math.log : (value) => value;
    this.down = (value) => bottom - (bottom - 8) * (place(value) - place(low)) / (place(high) - place(low));
    return (isLog ? logTicks(low, high) : ticks(low, high, 8)).map((tick) => ({text: numberText(tick), y: this.down(tick)}));
  }

  drawCurve(plot, curve) {
    const {points, color} = curve, at = (key) => points.map((point) => `${this.across(point.x).toFixed(1)} ${this.down(point[key]).toFixed(1)}`);
    if (!points.length) return;
    if (curve.isBand) {
      const band = element("path", {class: curve.stacked ? "area" : "band", d: `M${[...at("high"), ...at("low").reverse()].join("L")}Z`});
      band.style.fill = `var(--${color})`;
      plot.append(band);
    }
    const line = element("path", {class: "line", d: `M${at("y").join("L")}`});
    line.style.stroke = `var(--${color})`;
    plot.append(line);
    const visible = points.filter((point) => point.x >= this.low && point.x <= this.high);
    if (visible.length <= this.inner / 12) plot.append(...visible.map((point) => this.dot(point, color)));
  }

  dot(point, color) {
    const dot = element("circle", {cx: this.across(point.x), cy: this.down(point.y), r: 2.4});
    dot.style.fill = `var(--${color})`;
    return dot;
  }

  block(from, to, y, height, name) {
    const start = this.across(from);
    return element("rect", {class: name, x: start, y, width: Math.max(0.5, this.across(to) - start), height});
  }

  drawLegend() {
    const {curves, spans = [], shaded} = this.chart;
    const named = new Map([...curves, ...spans].map((each) => [each.name, each.color]));
    const isNeeded = curves.length !== 1 || this.chart.legend;
    const items = isNeeded ? [...named] : [];
    if (this.shaded) items.push([shaded.name, "gray"]);
    this.legend.replaceChildren(...items.map(([name, color]) => element("span", {}, swatch(color), name)));
  }

  // Shows the values under the pointer, or the range that is being chosen.
  point() {
    this.marks.replaceChildren();
    this.tip.hidden = true;
    if (this.at === null) return;
    const [pixel, height] = this.at;
    if (this.drag !== null && Math.abs(pixel - this.drag) > 5) {
      const [from, to] = [pixel, this.drag].map((each) => this.valueAt(each)).sort((a, b) => a - b);
      this.marks.append(this.block(from, to, 4, this.bottom - 4, "chosen"));
      return;
    }
    const x = this.valueAt(pixel), lines = [];
    let head = "";
    for (const span of this.chart.spans || []) {
      const row = this.rows.indexOf(span.row);
      if (x < span.from || x > span.to || height < 4 + 32 * row || height > 36 + 32 * row) continue;
      head = span.row;
      lines.push([span.color, `${span.name} ${numberText(span.from)} to ${numberText(span.to)} s`]);
    }
    const inside = this.points.flatMap((curve) => curve.points).filter((point) => point.x >= this.low && point.x <= this.high);
    if (inside.length) {
      const near = inside.reduce((best, point) => Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best).x, place = this.across(near);
      head = this.chart.x === "time" ? clockText(near) : `${this.chart.x} ${numberText(near)}`;
      this.marks.append(element("line", {class: "cursor", x1: place, x2: place, y1: 4, y2: this.bottom}));
      for (const curve of this.points)
        for (const point of curve.points.filter((each) => each.x === near)) {
          this.marks.append(this.dot(point, curve.color));
          const spread = curve.stacked ? 0 : point.high - point.y;
          lines.push([curve.color, `${curve.name} ${numberText(point.value)}${spread ? ` ± ${numberText(spread)}` : ""}`]);
        }
    }
    if (!lines.length) return;
    this.tip.replaceChildren(element("b", {}, head), ...lines.map(([color, text]) => element("div", {}, swatch(color), text)));
    this.tip.style.left = pixel < this.width / 2 ? `${pixel + 28}px` : "auto";
    this.tip.style.right = pixel < this.width / 2 ? "auto" : `${this.width - pixel + 28}px`;
    this.tip.hidden = false;
  }
}

function extent(values, otherwise) {
  if (!values.length) return otherwise;
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function swatch(color) {
  const made = element("i", {class: "swatch"});
  made.style.background = `var(--${color})`;
  return made;
}

// Draws the charts of the JSON in the element `data` into the element `charts`.
function showCharts(charts, data) {
  const shown = JSON.parse(data.textContent).map((chart) => [new Chart(charts.appendChild(element("figure", {}))), chart]);
  for (const [drawn, chart] of shown) drawn.show(chart);
}
