// How the run went: round time, participation and throughput over time, each as a small picture.

import { byId, element } from "./dom.js";
import { amount, duration, percent } from "./format.js";
import { grid, path, picture, scales, ticks, timeTicks } from "./plot.js";

const POINTS = 60;
const HEIGHT = 120;
const MARGIN = { top: 8, right: 8, bottom: 26, left: 52 };

const sum = (rounds, ...keys) => rounds.reduce((all, one) => all + keys.reduce((part, key) => part + one[key], 0), 0);

const PICTURES = [
  {
    id: "round-time", places: timeTicks, // in steps of ten it said "1 min 40 s": too long here
    value: (rounds) => sum(rounds, "seconds") / rounds.length,
  },
  {
    id: "participation-over-time", tick: percent, high: 1,
    // What was lent in a round; updates of another round's lease may come in it too.
    value: (rounds) => {
      const due = rounds.reduce((all, one) => all + Math.max(one.assigned, sum([one], "on_time", "unused", "refused")), 0);
      return due ? sum(rounds, "on_time") / due : null;
    },
  },
  {
    id: "throughput", tick: amount,
    value: (rounds, seconds, perUpdate) => seconds > 0
      ? (sum(rounds, "on_time", "late", "unused", "refused") * perUpdate) / seconds : null,
  },
];

export class History {
  constructor() {
    this.status = null;
    this.perUpdate = 0;
    new ResizeObserver(() => this.draw()).observe(byId("round-time"));
  }

  // `perUpdate`: training tokens behind one update.
  update(status, perUpdate) {
    this.status = status;
    this.perUpdate = perUpdate;
    this.draw();
  }

  draw() {
    if (this.status === null) return;
    const { created, reports, blocks } = this.status;
    const rounds = reports.filter((one) => one.closed !== null);
    // A point is a round of every block, or more: two blocks that close one after the other are no peak.
    const size = Math.max(blocks.length, Math.ceil(rounds.length / POINTS));
    const groups = Array.from({ length: Math.floor(rounds.length / size) }, (_, i) => rounds.slice(i * size, (i + 1) * size));
    byId("history").hidden = groups.length < 2;
    if (groups.length < 2) return;
    for (const one of PICTURES) {
      const points = groups.map((group, i) => {
        const before = i === 0 ? Math.min(...group.map((round) => round.closed - round.seconds)) : groups[i - 1].at(-1).closed;
        const end = group.at(-1).closed;
        return [end - created, one.value(group, end - before, this.perUpdate)];
      }).filter(([, value]) => value !== null);
      show(one, points);
    }
  }
}

function show(one, points) {
  const box = byId(one.id);
  const values = points.map(([, value]) => value);
  const high = one.high ?? Math.max(...values) * 1.1;
  const [x, y] = [{ low: points[0]?.[0] ?? 0, high: points.at(-1)?.[0] ?? 1 }, { low: 0, high: high || 1 }];
  const plot = { ...scales(Math.max(200, box.clientWidth), HEIGHT, MARGIN, x, y), clip: `${one.id}-plot` };
  const down = one.places ? one.places(y.high, 2) : ticks(0, y.high, 2).map((at) => ({ at, text: one.tick(at) }));
  const across = [x.low, x.high].map((at) => ({ at, text: duration(at) }));
  const drawn = picture(plot, plot.clip, [...grid(plot, [], down), path(plot, "composed", points)]);
  const ends = element("p", { class: "ends muted small" }, ...across.map(({ text }) => element("span", {}, text)));
  box.replaceChildren(drawn, ends);
}
