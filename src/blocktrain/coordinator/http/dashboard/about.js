// How to take part, the model to take away, what the run trains and on which machines, and who gave most.

import { byId, element, keyed, setText } from "./dom.js";
import { amount, bytes, count, percent, short } from "./format.js";

const LEADERS = 10;

const JOIN = {
  open: (link) => ["Anybody may join:", `blocktrain join ${link}`],
  invite: () => ["By invitation: ask the operator for a link, then", "blocktrain join LINK"],
  allowlist: (link) => ["Only listed workers: send the operator your id, which this prints:", `blocktrain join ${link}`],
};

export class About {
  constructor() {
    this.run = null;
  }

  // Training tokens behind one update.
  get perUpdate() {
    if (this.run === null) return 0;
    const { swarm, training, model } = this.run.recipe;
    return swarm.steps_per_round * training.batch * model.context;
  }

  update({ status, workers, run }) {
    this.run = run;
    const link = status.pin ? `${location.origin}#pin=${status.pin}` : location.origin;
    const [who, command] = status.finished ? ["The run is finished: nobody is needed any more.", ""]
      : JOIN[run.recipe.trust.admission](link);
    setText(byId("join-who"), who);
    setText(byId("join-command"), command);
    setText(byId("model-command"), `blocktrain checkpoint ${location.origin} --to model`);
    setText(byId("model-size"), `about ${bytes(4 * values(run))}, round ${rounds(status)}`);
    lines(byId("recipe"), recipeLines(run, status));
    lines(byId("hardware"), hardwareLines(status));
    leaders(workers);
  }
}

const values = (run) => run.blocks.flatMap((block) => block.tensors)
  .reduce((all, tensor) => all + tensor.shape.reduce((size, side) => size * side, 1), 0);

function rounds(status) {
  const versions = status.blocks.map((block) => block.head_version);
  const [first, last] = [Math.min(...versions), Math.max(...versions)];
  return first === last ? String(first) : `${first} to ${last}`;
}

function recipeLines(run, status) {
  const { model, swarm, training, trust, objective, data } = run.recipe;
  const vocabulary = run.vocabulary ?? 256;
  return [
    ["Model", `${count(model.blocks, "block", "blocks")} of ${model.block_layers ? `${model.block_layers.join(", ")} layers` : count(model.layers_per_block, "layer", "layers")}, width ${model.block_widths?.join(", ") ?? model.width}, ${model.block_heads?.join(", ") ?? model.heads} heads, context ${model.context}`],
    ["Parameters", `${amount(values(run))} in all blocks`],
    ["Objective", String(objective?.kind ?? "–")],
    // The last part only: where the text lies on the operator's disk is nobody's affair.
    ["Text", `${String(data.dataset ?? data.corpus).split("/").at(-1)}, ${vocabulary === 256 ? "bytes" : `${amount(vocabulary)} tokens in the vocabulary`}`],
    ["Round", `${swarm.steps_per_round} steps of ${training.batch} × ${model.context} tokens, ${count(swarm.replicas, "replica", "replicas")} wanted`],
    ["Updates", `codec ${swarm.codec}, ${trust.judge === "off" ? "not judged" : `judged by ${trust.judge === "external" ? "judges elsewhere" : "the coordinator"}`}`],
    ["Run id", status.run_id],
  ];
}

function hardwareLines(status) {
  const live = status.workers.filter((one) => one.live);
  const kinds = Map.groupBy(live, (one) => one.device + (one.memory_bytes ? `, ${bytes(one.memory_bytes)}` : ""));
  const found = [...kinds].sort(([, one], [, other]) => other.length - one.length).map(([kind, people]) => {
    const speeds = people.map((one) => one.tokens_per_second).filter((speed) => speed !== null);
    const speed = speeds.reduce((all, one) => all + one, 0);
    return [`${people.length} × ${kind}`, speeds.length ? `${amount(speed)} tokens/s while computing` : "–"];
  });
  return found.length ? found : [["Nobody is at work", "–"]];
}

function lines(list, rows) {
  keyed(list, rows, ([name]) => name, ([name]) => element("div", {}, element("dt", {}, name), element("dd")),
    (node, [, text]) => setText(node.lastElementChild, text));
}

function leaders(workers) {
  const all = workers.reduce((tokens, one) => tokens + one.tokens, 0);
  const best = workers.filter((one) => one.tokens > 0).sort((one, other) => other.tokens - one.tokens).slice(0, LEADERS);
  byId("leaders-section").hidden = best.length === 0;
  keyed(byId("leaders"), best, (one) => one.worker_id, leader, (node, one) => {
    setText(node.querySelector(".label"), one.label);
    setText(node.querySelector(".value"), `${percent(one.tokens / all)}, ${amount(one.tokens)} tokens`);
    node.querySelector(".bar").firstElementChild.style.width = `${(100 * one.tokens) / best[0].tokens}%`;
  });
}

function leader(one) {
  return element("li", { class: "bar-line" },
    element("p", {},
      element("span", { title: one.worker_id }, element("code", {}, short(one.worker_id)), " ", element("span", { class: "label" })),
      element("span", { class: "value" })),
    element("div", { class: "bar accent", "aria-hidden": "true" }, element("span")));
}
