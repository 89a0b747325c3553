// Workers and verdicts. Labels, devices and sentences are strangers' text: they are set as text and never parsed.

import { byId, element, keyed, setAttribute, setText } from "./dom.js";
import { amount, bytes, duration, reasonWords, short, total, verdictWord } from "./format.js";
import { getJson, Unanswered } from "./live.js";

const SHOWN_WORKERS = 50;
const SHOWN_VERDICTS = 8;
const OWN_VERDICTS = 20;
const COLUMNS = ["Worker", "State", "At work on", "Reputation", "Updates", "Last verdict", "Up", "Down"];

export class Workers {
  constructor() {
    this.all = false;
    this.open = new Map(); // worker id to its verdicts
    byId("all-workers").addEventListener("click", () => this.toggleAll());
    byId("refused-only").addEventListener("change", () => this.showVerdicts());
  }

  update({ status, workers, verdicts, judged, newcomer }, clock) {
    this.clock = clock;
    this.judged = judged;
    this.newcomer = newcomer;
    const scale = judged ? `from 0 to 1, newcomers begin at ${+newcomer.toPrecision(3)}` : "nothing is judged in this run";
    setText(byId("reputation-scale"), `Reputation: ${scale}.`);
    this.verdicts = verdicts;
    this.people = joined(status, workers, verdicts);
    this.names = new Map(this.people.map((one) => [one.worker_id, one.label]));
    this.showWorkers();
    this.showVerdicts();
    for (const id of this.open.keys()) this.fetchVerdicts(id);
  }

  toggleAll() {
    this.all = !this.all;
    this.showWorkers();
  }

  showWorkers() {
    const shown = this.all ? this.people : this.people.slice(0, SHOWN_WORKERS);
    const rows = shown.flatMap((one) => (this.open.has(one.worker_id) ? [one, { detailsOf: one }] : [one]));
    keyed(byId("worker-rows"), rows, keyOf, (row) => this.create(row), (node, row) => this.fill(node, row));
    byId("no-workers").hidden = this.people.length > 0;
    const button = byId("all-workers");
    button.hidden = this.people.length <= SHOWN_WORKERS;
    setText(button, this.all ? "Show fewer" : `Show all ${this.people.length} workers`);
  }

  create(row) {
    if (row.detailsOf) return detailsRow(row.detailsOf.worker_id);
    const toggle = element("button", { type: "button", class: "disclose", "aria-expanded": "false" },
      element("code", {}, short(row.worker_id)), element("span", { class: "label" }));
    toggle.title = row.worker_id;
    toggle.addEventListener("click", () => this.toggle(row.worker_id));
    const cells = COLUMNS.map((name, i) => element(
      i === 0 ? "th" : "td",
      { role: i === 0 ? "rowheader" : "cell", "data-label": name, class: i > 5 ? "number" : null },
    ));
    cells[0].append(toggle, element("span", { class: "device muted" }));
    cells[1].append(element("span", { class: "pill" }), element("span", { class: "why muted small" }));
    const meter = element("span", { class: "meter", "aria-hidden": "true" },
      element("span"), element("i", { class: "newcomer" }));
    cells[3].append(element("span", {}, meter, element("span", { class: "reputation" })));
    cells[5].append(element("span", { class: "pill" }), element("span", { class: "why small" }));
    return element("tr", { role: "row" }, ...cells);
  }

  fill(node, row) {
    if (row.detailsOf) {
      this.fillDetails(node, row.detailsOf);
      return;
    }
    const [who, state, work, reputation, updates, verdict, up, down] = node.children;
    setText(who.querySelector(".label"), row.label);
    setText(who.querySelector(".device"), row.device);
    setAttribute(who.firstElementChild, "aria-expanded", String(this.open.has(row.worker_id)));
    setAttribute(who.firstElementChild, "aria-controls", this.open.has(row.worker_id) ? `of-${row.worker_id}` : null);
    const standing = this.standing(row);
    pill(state.firstElementChild, standing.word, standing.tone);
    setText(state.lastElementChild, standing.why);
    setText(work, workOf(row));
    const meter = reputation.querySelector(".meter");
    meter.hidden = !this.judged;
    meter.firstElementChild.style.width = `${100 * row.reputation}%`;
    meter.lastElementChild.style.left = `${100 * this.newcomer}%`;
    setText(reputation.querySelector(".reputation"), this.judged ? row.reputation.toFixed(2) : "–");
    const made = `rating ${row.rating.toFixed(2)} × own text ${row.assigned_versus_other.toFixed(2)} × uptime ${row.uptime.toFixed(2)}`;
    setAttribute(reputation, "title", this.judged ? `${made}; a mark shows where newcomers begin` : null);
    node.classList.toggle("open", this.open.has(row.worker_id));
    setText(updates, updatesOf(row));
    showVerdict(verdict, row.last);
    setText(up, bytes(total(row.up)));
    setText(down, bytes(total(row.down)));
  }

  standing(row) {
    if (row.ban) {
      const left = duration(row.ban.until - this.clock());
      return { word: "banned", tone: "bad", why: `for ${left}: ${row.ban.reason}` };
    }
    const seen = `seen ${duration(this.clock() - row.last_seen)} ago`;
    if (!row.live) return { word: "away", tone: "dim", why: seen };
    if (row.probation) return { word: "probation", tone: "warn", why: "" };
    return { word: "live", tone: "good", why: "" };
  }

  // --- one worker's verdicts

  async toggle(id) {
    if (this.open.has(id)) this.open.delete(id);
    else {
      this.open.set(id, null);
      await this.fetchVerdicts(id);
    }
    this.showWorkers();
  }

  async fetchVerdicts(id) {
    try {
      const answer = await getJson(`v1/workers/${id}`);
      if (this.open.has(id)) this.open.set(id, answer.verdicts);
    } catch (error) {
      if (!(error instanceof Unanswered)) throw error;
    }
    this.showWorkers();
  }

  fillDetails(node, row) {
    const verdicts = this.open.get(row.worker_id);
    const [facts, list, note] = node.firstElementChild.children;
    const speed = row.tokens_per_second;
    setText(facts.lastElementChild, speed === null ? "" : `, ${amount(speed)} tokens/s while computing`);
    fillVerdicts(list, (verdicts ?? []).slice(0, OWN_VERDICTS), null, this.clock);
    setText(note, verdicts === null ? "Asking…" : verdicts.length === 0 ? "No update of it has arrived yet." : "");
  }

  // --- everybody's

  showVerdicts() {
    const only = byId("refused-only").checked;
    const wanted = (this.verdicts ?? []).filter((one) => !only || verdictWord(one) === "refused");
    fillVerdicts(byId("verdict-list"), wanted.slice(0, SHOWN_VERDICTS), this.names, this.clock);
    byId("no-verdicts").hidden = wanted.length > 0;
  }
}

function keyOf(row) {
  return row.detailsOf ? `of ${row.detailsOf.worker_id}` : row.worker_id;
}

// The live ones first, then by the time they joined, so that rows stay where they are.
function joined(status, workers, verdicts) {
  const standing = new Map(workers.map((one) => [one.worker_id, one]));
  const last = new Map();
  for (const one of verdicts) if (!last.has(one.worker_id)) last.set(one.worker_id, one);
  const people = status.workers
    .filter((one) => standing.has(one.worker_id))
    .map((one) => ({
      ...standing.get(one.worker_id), ...one, last: last.get(one.worker_id) ?? null, done: status.finished,
    }));
  return people.sort((one, other) => other.live - one.live || one.joined - other.joined);
}

function workOf(row) {
  if (!row.live || row.block === null || row.done) return "–";
  const step = row.step === null ? "" : `, step ${row.step}`;
  const loss = row.loss === null ? "" : `, loss ${row.loss.toFixed(2)}`;
  return `block ${row.block}${step}${loss}`;
}

function updatesOf(row) {
  const parts = [`${row.accepted} on time`];
  for (const word of ["late", "unused", "refused"]) if (row[word]) parts.push(`${row[word]} ${word}`);
  return parts.join(", ");
}

const TONES = { merged: "good", accepted: "good", late: "warn", refused: "bad", withheld: "bad" };

function pill(node, text, tone) {
  setText(node, text);
  setAttribute(node, "data-tone", tone);
}

function showVerdict(cell, verdict) {
  const [mark, why] = cell.children;
  mark.hidden = verdict === null;
  if (verdict !== null) pill(mark, verdictWord(verdict), TONES[verdictWord(verdict)] ?? "dim");
  setText(why, verdict === null ? "–" : reasonWords(verdict.reason));
  setAttribute(cell, "title", verdict?.sentence ?? null);
}

function detailsRow(id) {
  const cell = element("td", { role: "cell", colspan: COLUMNS.length, class: "details" },
    element("p", { class: "muted small" }, "id ", element("code", { class: "hash" }, id), element("span")),
    element("ol", { class: "verdicts", "aria-label": `Verdicts on ${short(id)}` }), element("p", { class: "empty" }));
  return element("tr", { role: "row", id: `of-${id}` }, cell);
}

function fillVerdicts(list, verdicts, names, clock) {
  keyed(list, verdicts, (one) => one.update_id, () => verdictItem(names !== null), (node, one) => {
    const part = (name) => node.querySelector(`.${name}`);
    pill(part("pill"), verdictWord(one), TONES[verdictWord(one)] ?? "dim");
    setText(part("reason"), reasonWords(one.reason));
    setText(part("sentence"), one.sentence ?? "");
    const when = one.revealed === null ? "" : `, ${duration(clock() - one.revealed)} ago`;
    setText(part("where"), `block ${one.block}, round ${one.round}${when}`);
    if (names === null) return;
    setText(part("who"), short(one.worker_id));
    setText(part("label"), names.get(one.worker_id) ?? "");
  });
}

function verdictItem(named) {
  const who = named ? [element("code", { class: "who" }), element("span", { class: "label" })] : [];
  return element(
    "li", {}, element("span", { class: "pill" }),
    element("div", {},
      element("p", {}, ...who, element("strong", { class: "reason" }), element("span", { class: "where muted small" })),
      element("p", { class: "sentence" })),
  );
}
