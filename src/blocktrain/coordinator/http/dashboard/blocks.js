// The block map: version, replicas, deadline with its reason, age and loss of every block.

import { byId, element, keyed, setAttribute, setText } from "./dom.js";
import { duration, nats } from "./format.js";

export class Blocks {
  update(status, clock) {
    this.status = status;
    this.clock = clock;
    keyed(byId("block-map"), status.blocks, (block) => block.block, create, (node, block) => this.fill(node, block));
  }

  // Deadlines and ages move on between two answers.
  tick() {
    if (this.status === undefined) return;
    const nodes = byId("block-map").children;
    this.status.blocks.forEach((block, i) => nodes[i] && this.times(nodes[i], block));
  }

  fill(node, block) {
    const { rounds, evaluations } = this.status;
    const part = (name) => node.querySelector(`.${name}`);
    setText(part("version"), String(block.head_version));
    setText(part("rounds"), `of ${rounds} rounds`);
    part("bar").firstElementChild.style.width = `${(100 * block.head_version) / rounds}%`;
    setText(part("replicas"), String(block.round.workers));
    setText(part("arrived"), arrived(block));
    setText(part("loss"), nats(evaluations.at(-1)?.block_ce[block.block]));
    setText(part("reason"), block.finished ? "" : block.round.deadline_reason);
    for (const name of ["replicas", "arrived", "deadline"]) part(name).parentElement.hidden = block.finished;
    setAttribute(node, "data-state", stateOf(block));
    setAttribute(node, "title", `snapshot ${block.head_hash}`);
    this.times(node, block);
  }

  times(node, block) {
    const now = this.clock();
    const merged = block.head_version > 0;
    setText(node.querySelector(".age"), merged ? `${duration(now - block.head_made)} ago` : "none yet");
    setText(node.querySelector(".deadline"), deadline(block, now));
  }
}

function create(block) {
  const line = (name, kind) => element(
    "div", {}, element("dt", {}, name), element("dd", { class: kind }),
  );
  return element(
    "li", { class: "card block" },
    element("div", { class: "block-head" },
      element("h3", {}, `Block ${block.block}`),
      element("p", {}, element("span", { class: "version" }), " ", element("span", { class: "rounds muted" }))),
    element("div", { class: "bar", "aria-hidden": "true" }, element("span")),
    element("dl", { class: "lines" },
      line("Replicas", "replicas"), line("Arrived", "arrived"), line("Closes", "deadline"), line("Last merge", "age"),
      line("Loss alone", "loss")),
    element("p", { class: "reason muted small" }),
  );
}

function arrived(block) {
  const { accepted, late, wanted } = block.round;
  return `${accepted} of ${wanted}${late ? `, ${late} late` : ""}`;
}

function stateOf(block) {
  if (block.finished) return "finished";
  if (block.round.merging) return "merging";
  return block.round.begun === null ? "waiting" : "training";
}

function deadline(block, now) {
  if (stateOf(block) === "merging") return "merging now";
  if (block.round.deadline === null) return "not begun";
  return block.round.deadline > now ? `in ${duration(block.round.deadline - now)}` : "any moment";
}
