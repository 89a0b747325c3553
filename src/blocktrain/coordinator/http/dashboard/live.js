// The connection: the event stream says that something happened, then the state is fetched again. When the
// coordinator goes away the page says so and tries again, ever more slowly; a hidden page lets go.

const KINDS = [
  "run", "join", "assign", "return", "commit", "reveal", "verdict", "merge", "snapshot", "ban", "remove",
];
const GAP_MS = 700; // between two refreshes while much is happening
const SLOW_MS = 3000; // progress and scores are in no event
const FINISHED_MS = 15000;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;
const CROWDED_MS = 5000; // the coordinator answers, but has no stream to spare
const ANSWER_MS = 15000;

export class Unanswered extends Error {}

export async function getJson(path) {
  return JSON.parse(await getText(path));
}

export async function getText(path) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (response.ok) return await response.text();
  } catch (error) {
    throw new Unanswered(`${path}: ${error.message}`);
  }
  throw new Unanswered(`${path} answered ${response.status}`);
}

export class Live {
  // `show` gets {status, workers, judged, newcomer, verdicts, run}; `tell` gets {state, waitMs}.
  constructor(show, tell) {
    this.show = show;
    this.tell = tell;
    this.source = null;
    this.run = null;
    this.attempt = 0;
    this.timer = null;
    this.due = Infinity;
    this.earliest = 0;
    this.refreshing = false;
    this.again = false;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.connect()));
  }

  // A background tab holds no stream: browsers allow six connections to a host.
  rest() {
    this.close();
    this.tell({ state: "resting" });
  }

  close() {
    this.source?.close();
    this.source = null;
    clearTimeout(this.timer);
    this.due = Infinity;
  }

  // The soonest wins.
  schedule(action, waitMs) {
    const due = performance.now() + waitMs;
    if (due >= this.due) return;
    clearTimeout(this.timer);
    this.due = due;
    this.timer = setTimeout(() => {
      this.due = Infinity;
      action();
    }, waitMs);
  }

  connect() {
    this.close();
    this.run = null;
    if (document.hidden) return;
    if (this.attempt === 0) this.tell({ state: "connecting" });
    const source = new EventSource("v1/events");
    let opened = false;
    this.source = source;
    source.onopen = () => {
      opened = true;
      this.refresh();
    };
    source.onerror = () => this.lost(source, opened);
    for (const kind of KINDS) source.addEventListener(kind, () => this.wake());
  }

  async lost(source, opened) {
    if (source === null || source !== this.source) return;
    this.close();
    if (!opened && (await this.refreshOnce())) {
      this.tell({ state: "crowded" });
      this.schedule(() => this.connect(), CROWDED_MS);
      return;
    }
    const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.attempt) * (0.5 + Math.random() / 2);
    this.attempt += 1;
    this.tell({ state: "reconnecting", waitMs: wait });
    this.schedule(() => this.connect(), wait);
  }

  // Something happened: look again, but not for every event of a busy swarm.
  wake() {
    if (this.source === null) return;
    if (this.refreshing) this.again = true;
    else this.schedule(() => this.refresh(), Math.max(0, this.earliest - performance.now()));
  }

  async refresh() {
    const source = this.source;
    if (source === null) return;
    if (this.refreshing) {
      this.again = true;
      return;
    }
    const begun = performance.now();
    let status = null;
    try {
      status = await this.refreshOnce();
    } finally {
      if (status === null) this.lost(source, true);
    }
    if (source !== this.source) {
      this.wake(); // reconnected meanwhile: this answer was for the stream before
      return;
    }
    this.attempt = 0;
    this.tell({ state: "live" });
    const ended = performance.now();
    this.earliest = ended + Math.max(GAP_MS, 5 * (ended - begun)); // a slow coordinator is asked less often
    const quiet = status.finished ? FINISHED_MS : SLOW_MS;
    this.schedule(() => this.refresh(), Math.max(this.again ? 0 : quiet, this.earliest - ended));
    this.again = false;
  }

  // The status shown, or null: whatever went wrong, asking again later is the remedy.
  async refreshOnce() {
    this.refreshing = true;
    try {
      // The recipe can change only when the coordinator starts again, and then this page connects again.
      this.run ??= await getJson("v1/run");
      const run = this.run;
      const [status, { workers, judged, newcomer_reputation: newcomer }, { verdicts }] = await Promise.all(
        ["v1/status", "v1/workers", "v1/verdicts"].map(getJson),
      );
      this.show({ status, workers, judged, newcomer, verdicts, run });
      return status;
    } catch (error) {
      if (!(error instanceof Unanswered)) throw error;
      return null;
    } finally {
      this.refreshing = false;
    }
  }
}
