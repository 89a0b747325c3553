// Loss by round as a picture: one line for the composed model, one for each block, level lines for references.
// The same numbers stand in a table, and the arrow keys read them one by one.

import { byId, element, keyed, setText, svg } from "./dom.js";
import { nats } from "./format.js";

const COLOURS = 8;
const LABELLED_BLOCKS = 16; // beyond, lines are drawn alike and only the composed model has a label
const MARGIN = { top: 12, right: 58, bottom: 30, left: 44 };
const LABEL_GAP = 13;
const LABEL_WIDTH = 40;

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const roundOf = (evaluation) => mean(evaluation.versions);

export class Chart {
  constructor() {
    this.box = byId("chart");
    this.readout = byId("chart-readout");
    this.status = null;
    this.chosen = null;
    this.drawn = "";
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerleave", () => this.choose(null));
    this.box.addEventListener("blur", () => this.choose(null));
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  update(status) {
    const before = this.status;
    this.status = status;
    const marks = [status.run_id, status.evaluations.length, status.evaluations.at(-1)?.time, status.references.length];
    const content = marks.join("/");
    if (content === this.drawn) return;
    this.drawn = content;
    if (before !== null && before.run_id !== status.run_id) this.chosen = null;
    this.draw();
    this.legend();
    this.table();
    this.read();
  }

  series() {
    const { evaluations, blocks } = this.status;
    const lines = blocks.map(({ block }) => ({
      name: `block ${block}`,
      short: String(block),
      kind: blocks.length > LABELLED_BLOCKS ? "many" : `series-${block % COLOURS}`,
      points: evaluations.map((one) => [roundOf(one), one.block_ce[block]]),
    }));
    const composed = evaluations.map((one) => [roundOf(one), one.consensus_ce]);
    return [...lines, { name: "composed", short: "all", kind: "composed", points: composed }];
  }

  scales(width, height, series) {
    const { evaluations, references, rounds } = this.status;
    const levels = references.map((one) => one.ce);
    const losses = series.flatMap((line) => line.points.map(([, loss]) => loss));
    const low = Math.min(...losses, ...levels);
    // The first rounds are far above what matters; let them run out of the picture.
    const matters = Math.max(1.15 * Math.max(...levels, 0), 2 * evaluations.at(-1).consensus_ce);
    const high = Math.min(Math.max(...losses, ...levels), matters);
    const pad = Math.max(0.06 * (high - low), 0.02);
    const last = Math.max(1, Math.min(rounds, Math.ceil(1.15 * roundOf(evaluations.at(-1)))));
    const plotWidth = width - MARGIN.left - MARGIN.right;
    const plotHeight = height - MARGIN.top - MARGIN.bottom;
    return {
      low: low - pad,
      high: high + pad,
      last,
      x: (round) => MARGIN.left + (plotWidth * round) / last,
      y: (loss) => MARGIN.top + (plotHeight * (high + pad - loss)) / (high - low + 2 * pad),
    };
  }

  draw() {
    if (this.status === null) return;
    if (this.status.evaluations.length === 0) {
      const wait = this.status.finished ? "No scores." : "The first scores come after the first merge.";
      this.box.replaceChildren(element("p", { class: "empty" }, wait));
      return;
    }
    const width = Math.max(260, this.box.clientWidth);
    const height = width < 520 ? 240 : 320;
    const series = this.series();
    const scales = this.scales(width, height, series);
    this.axes = scales;
    const clip = svg("clipPath", { id: "plot" }, svg("rect", {
      x: MARGIN.left, y: 0, width: width - MARGIN.left, height: height - MARGIN.bottom,
    }));
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    const picture = svg(
      "svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true", focusable: "false" },
      svg("defs", {}, clip),
      ...grid(scales, width, height),
      ...this.status.references.map((one) => level(one, scales, width)),
      ...series.map((line) => path(line, scales)),
      ...labels(series, this.status.references, scales, width, this.status.blocks.length),
      this.cursor,
    );
    this.box.replaceChildren(picture);
    this.mark();
  }

  point(event) {
    if (this.status === null || this.status.evaluations.length === 0) return;
    const at = event.clientX - this.box.getBoundingClientRect().left;
    const away = (one) => Math.abs(this.axes.x(roundOf(one)) - at);
    const { evaluations } = this.status;
    this.choose(evaluations.reduce((best, one, i) => (away(one) < away(evaluations[best]) ? i : best), 0));
  }

  key(event) {
    const last = (this.status?.evaluations.length ?? 0) - 1;
    const at = this.chosen ?? last + (event.key === "ArrowLeft" ? 1 : 0);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, next)));
  }

  choose(index) {
    this.chosen = index;
    this.mark();
    this.read();
  }

  mark() {
    const chosen = this.chosen === null ? undefined : this.status?.evaluations[this.chosen];
    if (this.cursor === undefined) return;
    this.cursor.setAttribute("visibility", chosen === undefined ? "hidden" : "visible");
    if (chosen === undefined) return;
    const x = this.axes.x(roundOf(chosen));
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
  }

  read() {
    const chosen = this.chosen === null ? undefined : this.status?.evaluations[this.chosen];
    setText(this.readout, chosen === undefined ? "" : sentence(chosen));
  }

  legend() {
    const { evaluations, references, blocks } = this.status;
    const newest = evaluations.at(-1);
    const items = [{ name: "composed model", kind: "composed", ce: newest?.consensus_ce, note: null }];
    for (const one of references) items.push({ name: one.name, kind: kindOf(one), ce: one.ce, note: one.source });
    if (blocks.length <= LABELLED_BLOCKS) {
      for (const { block } of blocks) {
        const ce = newest?.block_ce[block];
        items.push({ name: `block ${block}`, kind: `series-${block % COLOURS}`, ce, note: null });
      }
    } else items.push({ name: `${blocks.length} blocks`, kind: "many", ce: undefined, note: null });
    keyed(byId("legend"), items, (item) => item.name, legendItem, (node, item) => {
      node.title = item.note ?? "";
      setText(node.lastElementChild, item.ce === undefined ? "" : nats(item.ce));
    });
  }

  table() {
    const { evaluations, blocks, references } = this.status;
    const heads = ["Round", "Composed", ...blocks.map(({ block }) => `Block ${block}`)];
    const rows = evaluations.toReversed().map((one) => [
      element("th", { scope: "row" }, String(Number(roundOf(one).toFixed(2)))),
      ...[one.consensus_ce, ...one.block_ce].map((loss) => element("td", {}, nats(loss))),
    ]);
    const levels = references.map((one) => [
      element("th", { scope: "row" }, one.name), element("td", {}, nats(one.ce)),
      element("td", { colspan: blocks.length, class: "muted" }, one.source),
    ]);
    byId("loss-table").replaceChildren(
      element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...[...levels, ...rows].map((cells) => element("tr", {}, ...cells))),
    );
  }
}

function kindOf(reference) {
  return reference.name === "end to end" ? "reference" : "bigram";
}

function sentence(evaluation) {
  const blocks = evaluation.block_ce.map((loss, block) => `block ${block} ${nats(loss)}`);
  const shown = blocks.length > LABELLED_BLOCKS ? [] : blocks;
  const round = Number(roundOf(evaluation).toFixed(2));
  return [`Round ${round}: composed ${nats(evaluation.consensus_ce)}`, ...shown].join(", ");
}

function legendItem(item) {
  return element(
    "li", {}, svg("svg", { width: 22, height: 10, "aria-hidden": "true" },
      svg("line", { x1: 0, y1: 5, x2: 22, y2: 5, class: `line ${item.kind}` })),
    element("span", {}, item.name), element("span", { class: "value" }),
  );
}

function grid(scales, width, height) {
  const parts = [];
  for (const loss of ticks(scales.low, scales.high, 5)) {
    const y = scales.y(loss);
    parts.push(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
    parts.push(svg("text", { class: "tick", x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" },
      String(Number(loss.toFixed(3)))));
  }
  const wanted = width < 520 ? 5 : 9;
  for (const round of ticks(0, scales.last, wanted).filter(Number.isInteger)) {
    const at = { class: "tick", x: scales.x(round), y: height - 10, "text-anchor": "middle" };
    parts.push(svg("text", at, round === 0 ? "round 0" : String(round)));
  }
  return parts;
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function level(reference, scales, width) {
  const y = scales.y(reference.ce);
  return svg("line", {
    class: `line ${kindOf(reference)}`, x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y,
    "clip-path": "url(#plot)",
  });
}

function path(line, scales) {
  const points = line.points.map(([round, loss]) => `${scales.x(round).toFixed(1)},${scales.y(loss).toFixed(1)}`);
  if (points.length === 1) {
    const [x, y] = points[0].split(",");
    return svg("circle", { class: `spot ${line.kind}`, cx: x, cy: y, r: 3, "clip-path": "url(#plot)" });
  }
  return svg("polyline", { class: `line ${line.kind}`, points: points.join(" "), "clip-path": "url(#plot)" });
}

// Names at the right ends, pushed apart where they would overlap.
function labels(series, references, scales, width, blocks) {
  const shown = series.filter((line) => blocks <= LABELLED_BLOCKS || line.kind === "composed");
  const placed = shown.map((line) => {
    const [round, loss] = line.points.at(-1);
    return { text: line.short, kind: line.kind, x: scales.x(round) + 7, y: scales.y(loss) + 4 };
  });
  const words = { reference: "e2e", bigram: "bigram" };
  for (const one of references) {
    placed.push({ text: words[kindOf(one)], kind: kindOf(one), x: width - MARGIN.right + 7, y: scales.y(one.ce) + 4 });
  }
  placed.sort((one, other) => one.y - other.y);
  placed.forEach((label, i) => {
    const above = placed.slice(0, i).filter((other) => Math.abs(other.x - label.x) < LABEL_WIDTH);
    label.y = Math.max(label.y, ...above.map((other) => other.y + LABEL_GAP));
  });
  return placed.map(({ text, kind, x, y }) => svg("text", { class: `line-name ${kind}`, x, y }, text));
}
