// The ledger's head, and its verification in this browser: chain, signatures, and the head seen last time.

import { blake3, fromHex, toHex } from "./blake3.js";
import { canonical, parseExact } from "./canonical.js";
import { byId, setText } from "./dom.js";
import { count } from "./format.js";
import { getJson, getText, Unanswered } from "./live.js";

const GENESIS = "00".repeat(32);
const SIGNATURE_CONTEXT = new TextEncoder().encode("blocktrain ledger 1\n");
const STORAGE = "blocktrain ledger ";

class Broken extends Error {}

export class Ledger {
  constructor() {
    this.button = byId("verify");
    this.result = byId("verify-result");
    this.bar = byId("verify-progress");
    this.runId = null;
    this.button.addEventListener("click", () => this.verify());
    setText(byId("verify-command"), `blocktrain ledger verify ${location.origin}`);
  }

  update(status) {
    setText(byId("ledger-length"), String(status.ledger_length));
    setText(byId("ledger-head"), status.ledger_head);
    if (status.run_id === this.runId) return;
    this.runId = status.run_id;
    this.tell("", null);
    this.showKey();
  }

  async showKey() {
    try {
      setText(byId("ledger-key"), (await getJson("v1/run")).coordinator_key);
    } catch (error) {
      if (!(error instanceof Unanswered)) throw error;
      this.runId = null; // asked again with the next status
    }
  }

  tell(text, tone) {
    setText(this.result, text);
    this.result.dataset.tone = tone ?? "";
  }

  async verify() {
    if (this.button.getAttribute("aria-disabled") === "true") return;
    this.button.setAttribute("aria-disabled", "true");
    this.bar.hidden = false;
    this.tell("Verifying…", null);
    const begun = performance.now();
    try {
      const { coordinator_key: key, run_id: runId } = await getJson("v1/run");
      const found = await verifyLedger(key, readHead(runId), (share) => (this.bar.value = share));
      writeHead(runId, found);
      this.tell(verdictOn(found, (performance.now() - begun) / 1000), "good");
    } catch (error) {
      if (error instanceof Broken) this.tell(`The ledger does not hold: ${error.message}`, "bad");
      else if (error instanceof Unanswered) this.tell(`Not verified: ${error.message}`, "warn");
      else throw error;
    } finally {
      this.bar.hidden = true;
      this.button.removeAttribute("aria-disabled");
    }
  }
}

function verdictOn(found, seconds) {
  const signatures = found.signed
    ? "Every signature is the coordinator's."
    : "Signatures were not checked: browsers do so only on https:// or this machine.";
  const before = found.known ? ` It continues the ${found.known} entries seen before.` : "";
  const entries = count(found.length, "entry holds", "entries hold");
  return `${entries}, in ${seconds.toFixed(1)} s: each follows from the one before. ${signatures}${before}`;
}

// --- what this browser saw last

function readHead(runId) {
  try {
    const seen = JSON.parse(localStorage.getItem(STORAGE + runId));
    return Number.isInteger(seen?.length) && typeof seen.head === "string" ? seen : null;
  } catch {
    return null; // storage is switched off, or holds something else
  }
}

function writeHead(runId, { length, head }) {
  try {
    localStorage.setItem(STORAGE + runId, JSON.stringify({ length, head }));
  } catch {
    return; // without storage the next visit starts afresh
  }
}

// --- verification

export async function verifyLedger(key, seen, progress) {
  const checkSignature = await signatureChecker(key);
  let head = GENESIS;
  let at = 0;
  let length = Infinity;
  while (at < length) {
    const page = parseExact(await getText(`v1/ledger?since=${at}`));
    const entries = page.get("entries");
    length = Number(page.get("length").lexeme);
    if (entries.length === 0) throw new Broken(`it says to have ${length} entries, and shows ${at}`);
    const checks = [];
    for (const entry of entries) {
      head = checkEntry(entry, at, head);
      if (at === 0) checkFirst(entry, key);
      if (seen?.length === at + 1 && seen.head !== head) {
        throw new Broken(`entry ${at} is not the one this browser verified before: the ledger was rewritten`);
      }
      checks.push(checkSignature?.(at, head, entry.get("signature")));
      at += 1;
    }
    await Promise.all(checks);
    progress(at / length);
  }
  if (seen !== null && seen.length > at) {
    throw new Broken(`it has ${at} entries; this browser verified ${seen.length} before`);
  }
  return { length: at, head, signed: checkSignature !== null, known: seen?.length ?? null };
}

function checkEntry(entry, expected, previous) {
  const number = entry.get("sequence").lexeme;
  if (number !== String(expected)) throw new Broken(`entry ${expected} calls itself ${number}`);
  const content = new Map(["sequence", "time", "kind", "body"].map((name) => [name, entry.get(name)]));
  const text = new TextEncoder().encode(canonical(content));
  const bytes = new Uint8Array(32 + text.length);
  bytes.set(fromHex(previous));
  bytes.set(text, 32);
  const digest = toHex(blake3(bytes));
  if (digest !== entry.get("entry_hash")) {
    const name = `entry ${expected} (${entry.get("kind")})`;
    throw new Broken(`the hash of ${name} does not follow from its content and the entry before it`);
  }
  return digest;
}

function checkFirst(entry, key) {
  if (entry.get("body").get("coordinator_key") !== key) throw new Broken("entry 0 names another coordinator's key");
}

// Null where this browser has no Ed25519 for this page.
async function signatureChecker(key) {
  if (!globalThis.isSecureContext || globalThis.crypto?.subtle === undefined) return null;
  let imported;
  try {
    imported = await crypto.subtle.importKey("raw", fromHex(key), { name: "Ed25519" }, false, ["verify"]);
  } catch (error) {
    if (error.name === "NotSupportedError") return null;
    throw new Broken(`the coordinator's key cannot be read: ${error.message}`);
  }
  return async (number, head, signature) => {
    const digest = fromHex(head);
    const signed = new Uint8Array(SIGNATURE_CONTEXT.length + digest.length);
    signed.set(SIGNATURE_CONTEXT);
    signed.set(digest, SIGNATURE_CONTEXT.length);
    if (!(await crypto.subtle.verify("Ed25519", imported, fromHex(signature), signed))) {
      throw new Broken(`entry ${number} is not signed by the coordinator`);
    }
  };
}
