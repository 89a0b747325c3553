// The dashboard: what the coordinator's public API says, drawn and kept up to date.

import { About } from "./about.js";
import { Blocks } from "./blocks.js";
import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { announce, byId, setText } from "./dom.js";
import { duration, perByte } from "./format.js";
import { History } from "./history.js";
import { Ledger } from "./ledger.js";
import { Live } from "./live.js";
import { Overview } from "./overview.js";
import { Speaking } from "./speaking.js";
import { Workers } from "./workers.js";

const PROTOCOL = 1;
const TICK_MS = 1000;

const parts = { overview: new Overview(), chart: new Chart(), blocks: new Blocks(), workers: new Workers() };
const about = new About();
const history = new History();
const ledger = new Ledger();
const chat = new Chat();
const speaking = new Speaking();

// The coordinator's time, going on between its answers; this machine's clock may be wrong.
let serverTime = 0;
let heardAt = 0;
const clock = () => serverTime + (performance.now() - heardAt) / 1000;

let before = null;

function show(received) {
  const status = perByte(received.status);
  const state = { ...received, status };
  if (status.protocol !== PROTOCOL) {
    setText(byId("subtitle"), "The coordinator is of another version than this page: reload it.");
    return;
  }
  serverTime = status.server_time;
  heardAt = performance.now();
  parts.overview.update(state, clock);
  parts.chart.update(status);
  parts.blocks.update(status, clock);
  parts.workers.update(state, clock);
  about.update(state);
  history.update(status, about.perUpdate);
  ledger.update(status);
  chat.update(status);
  speaking.update(status);
  if (before !== null && status.finished && !before.finished) announce("The run is finished.");
  before = status;
}

// --- the connection's state, in words

let retryAt = null;
let shownState = "";

function tell({ state, waitMs }) {
  retryAt = state === "reconnecting" ? performance.now() + waitMs : null;
  byId("connection").dataset.state = state;
  byId("retry").hidden = state !== "reconnecting";
  document.body.classList.toggle("stale", state === "reconnecting");
  if (shownState === "reconnecting" && state === "live") announce("Connected again.");
  if (shownState !== "reconnecting" && state === "reconnecting") announce("Connection lost. Trying again.");
  if (state !== "connecting" || shownState !== "reconnecting") shownState = state;
  sayConnection(state);
}

function sayConnection(state) {
  const words = { live: "Live", connecting: "Connecting…", resting: "Paused", crowded: "Every few seconds" };
  const wait = retryAt === null ? 0 : (retryAt - performance.now()) / 1000;
  const again = wait >= 1 ? `Reconnecting in ${duration(wait)}` : "Reconnecting…";
  setText(byId("connection-text"), state === "reconnecting" ? again : words[state]);
}

const live = new Live(show, tell);
byId("retry").addEventListener("click", () => live.connect());
setInterval(() => {
  parts.overview.tick();
  parts.blocks.tick();
  if (retryAt !== null) sayConnection("reconnecting");
}, TICK_MS);
live.connect();
