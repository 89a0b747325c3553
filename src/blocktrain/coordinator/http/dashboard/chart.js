// Loss as a picture, by time or by round: the composed model, each block alone, the training loss that workers
// report between two scores, and level lines for references. The scores stand in a table too, and the arrow
// keys read them one by one.

import { byId, element, keyed, setText, svg } from "./dom.js";
import { duration, nats } from "./format.js";
import { edgeLabels, grid, LABEL_GAP, path, picture, scales, ticks, timeTicks } from "./plot.js";

const COLOURS = 8;
const LABELLED_BLOCKS = 16; // beyond, lines are drawn alike and only the composed model has a label
const MARGIN = { top: 12, right: 58, bottom: 30, left: 44 };
const NARROW = 520;
const CLIP = "loss-plot";

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

export class Chart {
  constructor() {
    this.box = byId("chart");
    this.readout = byId("chart-readout");
    this.status = null;
    this.chosen = null;
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerleave", () => this.choose(null));
    this.box.addEventListener("blur", () => this.choose(null));
    this.box.addEventListener("keydown", (event) => this.key(event));
    byId("loss-axis").addEventListener("change", () => this.draw());
  }

  update(status) {
    if (this.status !== null && this.status.run_id !== status.run_id) this.chosen = null;
    this.status = status;
    this.draw();
    this.legend();
    this.table();
    this.read();
  }

  get byTime() {
    return byId("axis-time").checked;
  }

  // Where something stands on the axis: seconds since the run began, or rounds.
  at(time, round) {
    return this.byTime ? Math.max(0, time - this.status.created) : round;
  }

  place(evaluation) {
    return this.at(evaluation.time, mean(evaluation.versions));
  }

  series() {
    const { evaluations, blocks } = this.status;
    const kind = (block) => (blocks.length > LABELLED_BLOCKS ? "many" : `series-${block % COLOURS}`);
    const scored = (lossOf) => evaluations.map((one) => [this.place(one), lossOf(one)]);
    const trained = blocks.map(({ block }) => ({
      kind: `training ${kind(block)}`, points: this.training(block),
    }));
    const alone = blocks.map(({ block }) => ({
      short: String(block), kind: kind(block), points: scored((one) => one.block_ce[block]),
    }));
    const composed = { short: "all", kind: "composed", points: scored((one) => one.consensus_ce) };
    return [...trained, ...alone, composed].filter((line) => line.points.length > 0);
  }

  // What workers reported for a block: the mean of each round, and what those at work on it say now.
  training(block) {
    const { reports, workers, server_time: now, blocks } = this.status;
    const points = reports.filter((one) => one.block === block && one.mean_loss !== null && one.closed !== null)
      .map((one) => [this.at(one.closed, one.version), one.mean_loss]);
    const live = workers.filter((one) => one.live && one.block === block && one.loss !== null);
    const version = blocks[block].head_version;
    if (live.length && !blocks[block].finished) {
      points.push([this.at(now, version + 0.5), mean(live.map((one) => one.loss))]);
    }
    return points;
  }

  plot(width, height, series) {
    const levels = this.status.references.map((one) => one.ce);
    const losses = series.flatMap((line) => line.points.map(([, loss]) => loss));
    const low = Math.min(...losses, ...levels);
    // The first rounds are far above what matters; let them run out of the picture.
    const newest = series.at(-1).points.at(-1)[1];
    const high = Math.min(Math.max(...losses, ...levels), Math.max(1.15 * Math.max(...levels, 0), 2 * newest));
    const pad = Math.max(0.06 * (high - low), 0.02);
    const last = Math.max(...series.map((line) => line.points.at(-1)[0]), this.byTime ? 1e-3 : 1);
    return {
      low: low - pad, high: high + pad, last, clip: CLIP,
      ...scales(width, height, MARGIN, { low: 0, high: last }, { low: low - pad, high: high + pad }),
    };
  }

  draw() {
    if (this.status === null) return;
    const series = this.series();
    this.axes = this.cursor = undefined;
    if (series.length === 0) {
      const wait = this.status.finished ? "No scores." : "Losses come with the first steps, scores after a merge.";
      this.box.replaceChildren(element("p", { class: "empty" }, wait));
      return;
    }
    const width = Math.max(260, this.box.clientWidth);
    const height = width < NARROW ? 240 : 320;
    const plot = this.plot(width, height, series);
    this.axes = plot;
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    this.box.replaceChildren(picture(plot, CLIP, [
      ...this.grid(plot),
      ...this.status.references.map((one) => level(one, plot)),
      ...series.map((line) => path(plot, line.kind, line.points)),
      ...edgeLabels(plot, this.labels(plot, series)),
      this.cursor,
    ]));
    this.mark();
  }

  grid(plot) {
    const wanted = plot.width < NARROW ? 4 : 9;
    const rounds = () => ticks(0, plot.last, wanted).filter(Number.isInteger)
      .map((at) => ({ at, text: at === 0 ? "round 0" : String(at) }));
    const times = () => timeTicks(plot.last, wanted - 1).map((tick) => (tick.at === 0 ? { at: 0, text: "start" } : tick));
    const losses = ticks(plot.low, plot.high, 5).map((at) => ({ at, text: String(Number(at.toFixed(3))) }));
    return grid(plot, this.byTime ? times() : rounds(), losses);
  }

  // As many as have room: the composed model and the references first.
  labels(plot, series) {
    const words = { reference: "e2e", bigram: "bigram" };
    const named = series.filter((line) => line.short !== undefined && line.kind !== "many").toReversed();
    const lines = named.map((line) => ({ text: line.short, kind: line.kind, at: line.points.at(-1)[1] }));
    const levels = this.status.references.map((one) => ({ text: words[kindOf(one)], kind: kindOf(one), at: one.ce }));
    const room = Math.floor((plot.height - MARGIN.top - MARGIN.bottom) / LABEL_GAP);
    return [...lines.slice(0, 1), ...levels, ...lines.slice(1)].slice(0, room);
  }

  point(event) {
    if (this.axes === undefined || this.status.evaluations.length === 0) return;
    const at = event.clientX - this.box.getBoundingClientRect().left;
    const away = (one) => Math.abs(this.axes.x(this.place(one)) - at);
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
    const x = this.axes.x(this.place(chosen));
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
  }

  read() {
    const chosen = this.chosen === null ? undefined : this.status?.evaluations[this.chosen];
    setText(this.readout, chosen === undefined ? "" : this.sentence(chosen));
  }

  sentence(evaluation) {
    const blocks = evaluation.block_ce.map((loss, block) => `block ${block} ${nats(loss)}`);
    const shown = blocks.length > LABELLED_BLOCKS ? [] : blocks;
    const when = `After ${duration(evaluation.time - this.status.created)}, round ${roundsOf(evaluation)}`;
    return [`${when}: composed ${nats(evaluation.consensus_ce)}`, ...shown].join(", ");
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
    const note = "What workers report of the text they train on: each block's mean by round, and those at work now";
    items.push({ name: "training loss", kind: "training many", ce: undefined, note });
    keyed(byId("legend"), items, (item) => item.name, legendItem, (node, item) => {
      node.title = item.note ?? "";
      setText(node.lastElementChild, item.ce === undefined ? "" : nats(item.ce));
    });
  }

  table() {
    const { evaluations, blocks, references, created } = this.status;
    const heads = ["After", "Round", "Composed", ...blocks.map(({ block }) => `Block ${block}`)];
    const rows = evaluations.toReversed().map((one) => [
      element("th", { scope: "row" }, duration(one.time - created)), element("td", {}, roundsOf(one)),
      ...[one.consensus_ce, ...one.block_ce].map((loss) => element("td", {}, nats(loss))),
    ]);
    const levels = references.map((one) => [
      element("th", { scope: "row", colspan: 2 }, one.name), element("td", {}, nats(one.ce)),
      element("td", { colspan: blocks.length, class: "muted" }, one.source),
    ]);
    byId("loss-table").replaceChildren(
      element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...[...levels, ...rows].map((cells) => element("tr", {}, ...cells))),
    );
  }
}

// "4", or "4 to 6" where blocks are apart.
function roundsOf(evaluation) {
  const [first, last] = [Math.min(...evaluation.versions), Math.max(...evaluation.versions)];
  return first === last ? String(first) : `${first} to ${last}`;
}

function kindOf(reference) {
  return reference.name === "end to end" ? "reference" : "bigram";
}

function legendItem(item) {
  return element(
    "li", {}, svg("svg", { width: 22, height: 10, "aria-hidden": "true" },
      svg("line", { x1: 0, y1: 5, x2: 22, y2: 5, class: `line ${item.kind}` })),
    element("span", {}, item.name), element("span", { class: "value" }),
  );
}

function level(reference, plot) {
  const y = plot.y(reference.ce);
  return svg("line", {
    class: `line ${kindOf(reference)}`, x1: MARGIN.left, x2: plot.width - MARGIN.right, y1: y, y2: y,
    "clip-path": `url(#${CLIP})`,
  });
}
