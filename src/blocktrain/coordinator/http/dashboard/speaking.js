// Which block has the most say where, on a sample of the training text; shown where blocks are specialised.

import { byId, element } from "./dom.js";

const KINDS = 8;

export class Speaking {
  update(status) {
    const pieces = status.speaking ?? [];
    byId("speaking").hidden = pieces.length === 0;
    // A new sample comes with a new score; between two of them a reader's selection is left in peace.
    const told = JSON.stringify(pieces);
    if (told === this.told) return;
    this.told = told;
    byId("speaking-text").replaceChildren(...pieces.map(({ block, weight, text }) => element(
      "span", { class: `piece series-${block % KINDS}`, title: `block ${block}, ${Math.round(100 * weight)} % of the say` }, text,
    )));
    const blocks = [...new Set(pieces.map((piece) => piece.block))].sort((a, b) => a - b);
    byId("speaking-legend").replaceChildren(...blocks.map((block) => element(
      "li", {}, element("span", { class: `piece series-${block % KINDS}` }, `block ${block}`),
    )));
  }
}
