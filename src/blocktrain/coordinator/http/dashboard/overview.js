// The heading, the key figures, traffic and participation.

import { byId, element, keyed, setAttribute, setText } from "./dom.js";
import { amount, bytes, count, duration, nats, percent, short, times, total } from "./format.js";

const KINDS = [["payload", "updates"], ["snapshot", "snapshots"], ["control", "control"]];

export class Overview {
  update({ status, workers }, clock) {
    this.status = status;
    this.clock = clock;
    setText(byId("name"), status.name);
    const done = Math.min(...status.blocks.map((block) => block.head_version));
    document.title = `${status.finished ? "✓" : `${done}/${status.rounds}`} ${status.name} · BlockTrain`;
    const state = byId("run-state");
    state.hidden = false;
    setText(state, status.finished ? "finished" : status.workers.some((one) => one.live) ? "training" : "waiting for workers");
    setAttribute(state, "data-tone", status.finished ? "good" : "accent");
    this.tick();
    const moved = movedBytes(status);
    figures(status, workers, moved);
    traffic(status, moved);
    participation(status);
  }

  tick() {
    if (this.status === undefined) return;
    const { created, ended, run_id: id } = this.status;
    const ago = (time) => duration(this.clock() - time);
    const times = ended === null ? `begun ${ago(created)} ago`
      : `finished ${ago(ended)} ago, after ${duration(ended - created)}`;
    setText(byId("subtitle"), `run ${short(id)}, ${times}`);
  }
}

function movedBytes(status) {
  const sum = (way, kind) => status.workers.reduce((moved, worker) => moved + worker[way][kind], 0);
  const by = Object.fromEntries(KINDS.map(([kind]) => [kind, { up: sum("up", kind), down: sum("down", kind) }]));
  const all = KINDS.reduce((moved, [kind]) => moved + by[kind].up + by[kind].down, 0);
  return { by, all };
}

function figures(status, workers, moved) {
  const full = status.full_checkpoint_bytes;
  const items = [
    loss(status), rounds(status), people(status, workers),
    throughput(status),
    { name: "Participation", value: percent(status.participation), note: "of the work that was lent counted on time" },
    {
      name: "Traffic",
      value: moved.all && full ? `${times(full / moved.all)} less` : "–",
      note: `${bytes(moved.all)}, not ${bytes(full)} of full checkpoints`,
    },
  ];
  keyed(byId("figures"), items, (item) => item.name, figure, (node, item) => {
    setText(node.querySelector(".value"), item.value);
    setText(node.querySelector(".note"), item.note);
  });
}

function figure(item) {
  return element("div", { class: "card" },
    element("dt", {}, item.name), element("dd", { class: "value" }), element("dd", { class: "note muted small" }));
}

function loss(status) {
  const newest = status.evaluations.at(-1);
  const known = status.references.find((one) => one.name === "end to end") ?? status.references[0];
  let note = "nats per byte, held out";
  if (newest && known) {
    const gap = newest.consensus_ce - known.ce;
    note = `${known.name} ${nats(known.ce)}, ${nats(Math.abs(gap))} ${gap > 0 ? "above" : "below"} it`;
  }
  if (status.per_token !== null) note += `; ${nats(status.per_token)} per token`;
  // Where it will change no more, a number of older rounds would be taken for the last one.
  const behind = newest && newest.versions.some((version, i) => version !== status.blocks[i].head_version);
  if (status.finished && behind) note += "; the last rounds are being scored";
  return { name: "Composed loss", value: nats(newest?.consensus_ce), note };
}

function rounds(status) {
  const versions = status.blocks.map((block) => block.head_version);
  const slowest = Math.min(...versions);
  const fastest = Math.max(...versions);
  const parts = [slowest === fastest ? count(versions.length, "block", "blocks") : `fastest block at ${fastest}`];
  if (!status.finished && status.seconds_left !== null) parts.unshift(`about ${duration(status.seconds_left)} left`);
  return { name: "Rounds", value: `${slowest} of ${status.rounds}`, note: parts.join(", ") };
}

function throughput(status) {
  const speed = status.tokens_per_second;
  return {
    name: "Throughput", value: speed === null ? "–" : `${amount(speed)}/s`,
    note: "training tokens, in the last rounds",
  };
}

function people(status, workers) {
  const live = status.workers.filter((worker) => worker.live).length;
  const banned = workers.filter((worker) => worker.ban !== null).length;
  const newcomers = workers.filter((worker) => worker.live && worker.probation && !worker.ban).length;
  const parts = [count(status.work.refused, "update refused", "updates refused")];
  if (newcomers) parts.push(`${newcomers} on probation`);
  if (banned) parts.push(`${banned} banned`);
  return { name: "Workers", value: `${live} live`, note: parts.join(", ") };
}

function traffic(status, moved) {
  const full = status.full_checkpoint_bytes;
  const largest = Math.max(full, moved.all, 1);
  const bars = [
    { name: "Full fp32 checkpoints", amount: full, tone: "dim" }, { name: "Moved", amount: moved.all, tone: "accent" },
  ];
  keyed(byId("traffic-bars"), bars, (bar) => bar.name, barItem, (node, bar) => {
    setText(node.querySelector(".value"), bytes(bar.amount));
    node.querySelector(".bar").firstElementChild.style.width = `${Math.max(0.4, (100 * bar.amount) / largest)}%`;
  });
  const heads = ["By kind", "Up", "Down"].map((text) => element("th", { scope: "col" }, text));
  const rows = KINDS.map(([kind, name]) => element(
    "tr", {}, element("th", { scope: "row" }, name),
    element("td", {}, bytes(moved.by[kind].up)), element("td", {}, bytes(moved.by[kind].down)),
  ));
  byId("traffic-table").replaceChildren(
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows),
  );
}

function barItem(bar) {
  return element("div", { class: "bar-line" },
    element("p", {}, element("span", {}, bar.name), element("strong", { class: "value" })),
    element("div", { class: `bar ${bar.tone}`, "aria-hidden": "true" }, element("span")));
}

function participation(status) {
  const { accepted, late, unused, refused, missing } = status.work;
  const parts = [
    { name: "on time", amount: accepted, tone: "good" }, { name: "late", amount: late, tone: "warn" },
    { name: "unused", amount: unused, tone: "neutral" }, { name: "refused", amount: refused, tone: "bad" },
    { name: "not delivered", amount: missing, tone: "dim" },
  ];
  setText(byId("participation"), percent(status.participation));
  const all = parts.reduce((updates, part) => updates + part.amount, 0);
  keyed(byId("participation-bar"), parts, (part) => part.name, () => element("span"), (node, part) => {
    node.dataset.tone = part.tone;
    node.style.width = all ? `${(100 * part.amount) / all}%` : "0";
  });
  keyed(byId("participation-parts"), parts, (part) => part.name, legendItem,
    (node, part) => setText(node.lastElementChild, String(part.amount)));
  const ages = Object.entries(status.ages).map(([age, updates]) => `${updates} of age ${age}`);
  setText(byId("ages"), ages.length ? `Merged updates by age in rounds: ${ages.join(", ")}.` : "Nothing merged yet.");
}

function legendItem(part) {
  return element(
    "li", {}, element("span", { class: "swatch", "data-tone": part.tone, "aria-hidden": "true" }),
    element("span", {}, part.name), element("span", { class: "value" }),
  );
}
