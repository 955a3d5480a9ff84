// An SVG line chart of the last minutes, with a grid, a legend with the newest values, and a tooltip at the pointer.
import { clock } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
export const WINDOW_S = 180;
const LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;

export function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shape(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Returns a round step for at most four grid lines up to the largest value.
function niceStep(largest) {
  const rough = Math.max(largest, 1e-9) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map(factor => factor * power).find(step => step >= rough * 0.999);
}

const axisLabel = value => value >= 10000 ? `${+(value / 1000).toFixed(1)}k` : `${+value.toPrecision(3)}`;

export class LineChart {
  // `lines`: key, name and color (1 to 7) of each; `format` writes one value.
  constructor(host, { label, format, lines, least = 1, isFilled = false }) {
    Object.assign(this, { label, format, lines, least, isFilled, points: [], now: 0, under: null });
    this.svg = shape("svg", { role: "img", tabindex: 0, "aria-label": label });
    this.tip = make("div", { class: "tip", hidden: "" });
    this.legend = make("ul", { class: "legend" });
    host.append(this.svg, this.tip, this.legend);
    this.svg.addEventListener("pointermove", event => this.point(event.clientX));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", event => this.step(event));
    new ResizeObserver(() => this.render()).observe(host);
  }

  draw(points, now) {
    this.points = points;
    this.now = now;
    this.render();
  }

  x(at) { return LEFT + (this.width - LEFT - RIGHT) * (1 - (this.now - at) / WINDOW_S); }

  y(value) { return TOP + (this.height - TOP - BOTTOM) * (1 - value / this.top); }

  render() {
    this.width = this.svg.clientWidth;
    this.height = this.svg.clientHeight;
    if (!this.width || !this.now) return;
    const values = this.points.flatMap(point => this.lines.map(line => point.values[line.key] ?? 0));
    const step = niceStep(Math.max(this.least, ...values));
    this.top = Math.max(step, Math.ceil(Math.max(this.least, ...values) / step - 1e-9) * step);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren(...this.grid(step), ...this.lines.flatMap(line => this.line(line)), ...this.rule());
    this.showLegend();
    this.showTip();
  }

  grid(step) {
    const found = [];
    for (let value = 0; value <= this.top + step / 2; value += step) {
      const y = Math.round(this.y(value)) + 0.5;
      found.push(shape("line", { class: "gridline", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      found.push(shape("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, axisLabel(value)));
    }
    for (let minute = 0; minute <= WINDOW_S / 60; minute++) {
      const anchor = minute === 0 ? "end" : minute === WINDOW_S / 60 ? "start" : "middle";
      const text = minute === 0 ? "now" : `−${minute} min`;
      found.push(shape("text", { x: this.x(this.now - 60 * minute), y: this.height - 4, "text-anchor": anchor }, text));
    }
    return found;
  }

  line({ key, color }) {
    const runs = [];
    let before = null;
    for (const point of this.points) {
      const value = point.values[key] ?? null;
      if (value === null) { before = null; continue; }
      if (before === null || point.at - before > 3 * point.seconds + 1) runs.push([]);
      before = point.at;
      runs.at(-1).push([this.x(point.at).toFixed(1), this.y(value).toFixed(1)]);
    }
    const paths = runs.map(run => `M${run[0].join(" ")}h0${run.slice(1).map(at => `L${at.join(" ")}`).join("")}`); // h0 draws a dot for a single point
    const line = shape("path", { class: `l${color}`, d: paths.join("") });
    if (!this.isFilled) return [line];
    const areas = runs.map((run, index) => `${paths[index]}V${this.y(0)}H${run[0][0]}Z`);
    return [shape("path", { class: `area f${color}`, d: areas.join("") }), line];
  }

  rule() {
    if (this.under === null) return [];
    const x = this.x(this.under.at);
    return [shape("line", { class: "rule", x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM })];
  }

  point(clientX) {
    const x = clientX - this.svg.getBoundingClientRect().left;
    const distance = point => Math.abs(this.x(point.at) - x);
    this.under = this.points.reduce((best, point) => !best || distance(point) < distance(best) ? point : best, null);
    this.render();
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.points.length) return event.key === "Escape" && this.leave();
    event.preventDefault();
    const index = this.under ? this.points.indexOf(this.under) + by : this.points.length - 1;
    this.under = this.points[Math.max(0, Math.min(this.points.length - 1, index))];
    this.render();
  }

  leave() {
    this.under = null;
    this.render();
  }

  showTip() {
    this.tip.hidden = this.under === null;
    if (this.under === null) return;
    const rows = this.lines.map(line => make("div", {}, make("span", { class: `key k${line.color}` }), line.name,
      make("b", {}, this.format(this.under.values[line.key] ?? null))));
    this.tip.replaceChildren(make("div", { class: "quiet" }, clock(this.under.at)), ...rows);
    const x = this.x(this.under.at);
    this.tip.style.left = x < this.width / 2 ? `${x + 12}px` : "auto";
    this.tip.style.right = x < this.width / 2 ? "auto" : `${this.width - x + 12}px`;
  }

  showLegend() {
    const newest = this.points.at(-1)?.values ?? {};
    const said = this.lines.map(line => `${line.name} ${this.format(newest[line.key] ?? null)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.label}: ${said}`);
    this.legend.replaceChildren(...this.lines.map(line => make("li", {},
      make("span", { class: `key k${line.color}` }), line.name, make("b", {}, this.format(newest[line.key] ?? null)))));
  }
}
