// JSON without losing anything, and its canonical form: sorted keys, no spaces, floats as Python prints them.
// JSON.parse would read 1.0 as 1 and round large integers, and then no hash would fit.

class Exact {
  constructor(lexeme) {
    this.lexeme = lexeme;
  }

  get isFloat() {
    return /[.eE]/.test(this.lexeme);
  }
}

const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"/y;
const SPACE = /[ \t\r\n]*/y;
const MAX_DEPTH = 64;

// The value of a JSON text, with numbers as Exact and objects as Map.
export function parseExact(text) {
  const reader = { text, at: 0 };
  const value = readValue(reader, 0);
  skip(reader);
  if (reader.at !== text.length) throw new SyntaxError("something follows the JSON value");
  return value;
}

function skip(reader) {
  SPACE.lastIndex = reader.at;
  SPACE.exec(reader.text);
  reader.at = SPACE.lastIndex;
}

function take(reader, pattern) {
  pattern.lastIndex = reader.at;
  const found = pattern.exec(reader.text);
  if (found === null) throw new SyntaxError(`no JSON at character ${reader.at}`);
  reader.at = pattern.lastIndex;
  return found[0];
}

function readValue(reader, depth) {
  if (depth > MAX_DEPTH) throw new SyntaxError("JSON nested too deeply");
  skip(reader);
  const next = reader.text[reader.at];
  if (next === "{") return readObject(reader, depth);
  if (next === "[") return readArray(reader, depth);
  if (next === '"') return JSON.parse(take(reader, STRING));
  for (const [word, value] of [["true", true], ["false", false], ["null", null]]) {
    if (reader.text.startsWith(word, reader.at)) {
      reader.at += word.length;
      return value;
    }
  }
  return new Exact(take(reader, NUMBER));
}

// Whether another item follows a comma, or the end is reached.
function goesOn(reader, end, first) {
  skip(reader);
  if (reader.text[reader.at] === end) {
    reader.at += 1;
    return false;
  }
  if (!first && reader.text[reader.at++] !== ",") throw new SyntaxError(`no comma at character ${reader.at}`);
  return true;
}

function readArray(reader, depth) {
  const items = [];
  reader.at += 1;
  while (goesOn(reader, "]", items.length === 0)) items.push(readValue(reader, depth + 1));
  return items;
}

function readObject(reader, depth) {
  const members = new Map();
  reader.at += 1;
  while (goesOn(reader, "}", members.size === 0)) {
    skip(reader);
    const key = JSON.parse(take(reader, STRING));
    skip(reader);
    if (reader.text[reader.at++] !== ":") throw new SyntaxError(`no colon at character ${reader.at}`);
    members.set(key, readValue(reader, depth + 1));
  }
  return members;
}

export function canonical(value) {
  if (value instanceof Exact) return value.isFloat ? pythonFloat(Number(value.lexeme)) : value.lexeme;
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value instanceof Map) {
    const keys = [...value.keys()].sort(byCodePoints);
    return `{${keys.map((key) => `${JSON.stringify(key)}:${canonical(value.get(key))}`).join(",")}}`;
  }
  return JSON.stringify(value);
}

function byCodePoints(one, other) {
  const left = Array.from(one, (character) => character.codePointAt(0));
  const right = Array.from(other, (character) => character.codePointAt(0));
  for (let i = 0; i < Math.min(left.length, right.length); i++) if (left[i] !== right[i]) return left[i] - right[i];
  return left.length - right.length;
}

// Both languages print the shortest digits that read back as the same number; they differ in notation.
export function pythonFloat(number) {
  if (number === 0) return Object.is(number, -0) ? "-0.0" : "0.0";
  const sign = number < 0 ? "-" : "";
  const [mantissa, exponentText] = Math.abs(number).toExponential().split("e");
  const digits = mantissa.replace(".", "");
  const exponent = Number(exponentText);
  if (exponent < -4 || exponent >= 16) {
    const fraction = digits.length > 1 ? `.${digits.slice(1)}` : "";
    const size = String(Math.abs(exponent)).padStart(2, "0");
    return `${sign}${digits[0]}${fraction}e${exponent < 0 ? "-" : "+"}${size}`;
  }
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`;
  const whole = digits.slice(0, exponent + 1).padEnd(exponent + 1, "0");
  return `${sign}${whole}.${digits.slice(exponent + 1) || "0"}`;
}
