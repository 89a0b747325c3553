// BLAKE3 (unkeyed, 32 bytes out), after the reference implementation. Browsers have no such function, and the
// ledger's hashes must not be checked by the one who made them.

const IV = Uint32Array.of(
  0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
);
const CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8;
const BLOCK_BYTES = 64, CHUNK_BYTES = 1024;
const PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
// Which message words each of the seven rounds takes, in order.
const SCHEDULE = [[...Array(16).keys()]];
for (let round = 1; round < 7; round++) SCHEDULE.push(PERMUTATION.map((from) => SCHEDULE[round - 1][from]));

const state = new Uint32Array(16);

function mix(a, b, c, d, x, y) {
  let turned;
  state[a] = state[a] + state[b] + x;
  turned = state[d] ^ state[a];
  state[d] = (turned >>> 16) | (turned << 16);
  state[c] = state[c] + state[d];
  turned = state[b] ^ state[c];
  state[b] = (turned >>> 12) | (turned << 20);
  state[a] = state[a] + state[b] + y;
  turned = state[d] ^ state[a];
  state[d] = (turned >>> 8) | (turned << 24);
  state[c] = state[c] + state[d];
  turned = state[b] ^ state[c];
  state[b] = (turned >>> 7) | (turned << 25);
}

// The first eight words of the output: a chaining value, or with ROOT the hash.
function compress(chaining, words, counter, length, flags) {
  state.set(chaining, 0);
  state.set(IV.subarray(0, 4), 8);
  state[12] = counter;
  state[13] = Math.floor(counter / 2 ** 32);
  state[14] = length;
  state[15] = flags;
  for (const order of SCHEDULE) {
    mix(0, 4, 8, 12, words[order[0]], words[order[1]]);
    mix(1, 5, 9, 13, words[order[2]], words[order[3]]);
    mix(2, 6, 10, 14, words[order[4]], words[order[5]]);
    mix(3, 7, 11, 15, words[order[6]], words[order[7]]);
    mix(0, 5, 10, 15, words[order[8]], words[order[9]]);
    mix(1, 6, 11, 12, words[order[10]], words[order[11]]);
    mix(2, 7, 8, 13, words[order[12]], words[order[13]]);
    mix(3, 4, 9, 14, words[order[14]], words[order[15]]);
  }
  const out = new Uint32Array(8);
  for (let i = 0; i < 8; i++) out[i] = state[i] ^ state[i + 8];
  return out;
}

function blockWords(bytes, start, end) {
  const block = new Uint8Array(BLOCK_BYTES);
  block.set(bytes.subarray(start, end));
  const view = new DataView(block.buffer);
  return Uint32Array.from({ length: 16 }, (_, i) => view.getUint32(4 * i, true));
}

function hashChunk(bytes, start, counter, rootFlag) {
  const end = Math.min(bytes.length, start + CHUNK_BYTES);
  let chaining = IV;
  let at = start;
  do {
    const next = Math.min(end, at + BLOCK_BYTES);
    const first = at === start ? CHUNK_START : 0;
    const last = next === end ? CHUNK_END | rootFlag : 0;
    chaining = compress(chaining, blockWords(bytes, at, next), counter, next - at, first | last);
    at = next;
  } while (at < end);
  return chaining;
}

function hashParent(left, right, rootFlag) {
  const words = new Uint32Array(16);
  words.set(left, 0);
  words.set(right, 8);
  return compress(IV, words, 0, BLOCK_BYTES, PARENT | rootFlag);
}

// A subtree of `chunks` chunks; the left side holds the largest power of two that leaves something.
function hashTree(bytes, first, chunks, rootFlag) {
  if (chunks === 1) return hashChunk(bytes, first * CHUNK_BYTES, first, rootFlag);
  let left = 1;
  while (left * 2 < chunks) left *= 2;
  return hashParent(
    hashTree(bytes, first, left, 0), hashTree(bytes, first + left, chunks - left, 0), rootFlag,
  );
}

export function blake3(bytes) {
  const words = hashTree(bytes, 0, Math.max(1, Math.ceil(bytes.length / CHUNK_BYTES)), ROOT);
  const out = new DataView(new ArrayBuffer(32));
  words.forEach((word, i) => out.setUint32(4 * i, word, true));
  return new Uint8Array(out.buffer);
}

export function toHex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function fromHex(text) {
  return Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}
