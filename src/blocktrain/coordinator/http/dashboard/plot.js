// Pieces of a line picture: scales, grid, lines, and labels that do not collide.

import { svg } from "./dom.js";

export const LABEL_GAP = 13;

export function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

// People count time in these steps, in seconds.
const TIME_STEPS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

// In one unit, that of the highest: "90 s" between "1 min" and "2 min" has to be worked out.
export function timeTicks(high, wanted) {
  const step = TIME_STEPS.find((size) => high / size <= wanted) ?? 86400 * Math.ceil(high / 86400 / wanted);
  const count = Math.floor(high / step);
  const [name, size] = [["d", 86400], ["h", 3600], ["min", 60]].find((unit) => 2 * unit[1] <= count * step) ?? ["s", 1];
  return Array.from({ length: count + 1 }, (_, i) => (
    { at: i * step, text: `${Number(((i * step) / size).toFixed(1))} ${name}` }
  ));
}

// `x` and `y` are {low, high}; the plot is what the margins leave of the picture.
export function scales(width, height, margin, x, y) {
  const across = width - margin.left - margin.right;
  const down = height - margin.top - margin.bottom;
  const span = (range) => range.high - range.low || 1;
  return {
    width, height, margin,
    x: (value) => margin.left + (across * (value - x.low)) / span(x),
    y: (value) => margin.top + (down * (y.high - value)) / span(y),
  };
}

// Each tick is {at, text}.
export function grid(plot, across, down) {
  const { margin, width, height } = plot;
  const lines = down.flatMap(({ at, text }) => [
    svg("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: plot.y(at), y2: plot.y(at) }),
    svg("text", { class: "tick", x: margin.left - 8, y: plot.y(at) + 4, "text-anchor": "end" }, text),
  ]);
  const below = across.map(({ at, text }) => svg(
    "text", { class: "tick", x: plot.x(at), y: height - 10, "text-anchor": "middle" }, text,
  ));
  return [...lines, ...below];
}

// `points` are [x, y]; one alone is a spot.
export function path(plot, kind, points) {
  const clip = { "clip-path": `url(#${plot.clip})` };
  if (points.length === 1) {
    const [x, y] = points[0];
    return svg("circle", { class: `spot ${kind}`, cx: plot.x(x), cy: plot.y(y), r: 3, ...clip });
  }
  const text = points.map(([x, y]) => `${plot.x(x).toFixed(1)},${plot.y(y).toFixed(1)}`).join(" ");
  return svg("polyline", { class: `line ${kind}`, points: text, ...clip });
}

export function picture(plot, clip, children) {
  const { width, height, margin } = plot;
  return svg(
    "svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true", focusable: "false" },
    svg("defs", {}, svg("clipPath", { id: clip }, svg("rect", {
      x: margin.left, y: 0, width: width - margin.left, height: height - margin.bottom,
    }))),
    ...children,
  );
}

// Names beside the right edge: pushed apart, then up again where they would leave the plot at the bottom.
export function edgeLabels(plot, labels) {
  const { margin, width, height } = plot;
  const placed = labels.map((one) => ({ ...one, y: plot.y(one.at) + 4 })).sort((one, other) => one.y - other.y);
  const push = (limit, wanted) => (label, i, all) => {
    label.y = i === 0 ? limit(label.y) : wanted(label.y, all[i - 1].y);
  };
  const top = margin.top + 8;
  const bottom = height - margin.bottom;
  placed.forEach(push((y) => Math.max(y, top), (y, above) => Math.max(y, above + LABEL_GAP)));
  placed.toReversed().forEach(push((y) => Math.min(y, bottom), (y, below) => Math.min(y, below - LABEL_GAP)));
  return placed.map(({ text, kind, y }) => svg(
    "text", { class: `line-name ${kind}`, x: width - margin.right + 7, y }, text,
  ));
}
