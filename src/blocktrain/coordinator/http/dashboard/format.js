// Numbers as people read them.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function bytes(count) {
  let unit = 0;
  let amount = count;
  while (amount >= 999.5 && unit < UNITS.length - 1) {
    amount /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || amount >= 100 ? 0 : amount >= 10 ? 1 : 2;
  return `${amount.toFixed(digits)} ${UNITS[unit]}`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function nats(loss) {
  return loss === null || loss === undefined ? "–" : loss.toFixed(loss < 10 ? 3 : 2);
}

// The status with its losses per byte of text, which compare with any other run's; `per_token` keeps the newest
// one as it came, where a token is more than a byte.
export function perByte(status) {
  const newest = status.evaluations.at(-1);
  const size = newest?.bytes_per_token ?? 1;
  if (size === 1) return { ...status, per_token: null };
  const evaluations = status.evaluations.map((one) => ({
    ...one,
    consensus_ce: one.consensus_ce / one.bytes_per_token,
    block_ce: one.block_ce.map((loss) => loss / one.bytes_per_token),
  }));
  const scaled = (loss) => (loss === null ? null : loss / size);
  const references = status.references.map((one) => ({ ...one, ce: one.ce / size }));
  const reports = status.reports.map((one) => ({ ...one, mean_loss: scaled(one.mean_loss) }));
  const workers = status.workers.map((one) => ({ ...one, loss: scaled(one.loss) }));
  return { ...status, evaluations, references, reports, workers, per_token: newest.consensus_ce };
}

export function percent(share) {
  return share === null ? "–" : `${Math.round(100 * share)} %`;
}

export function times(ratio) {
  return `${ratio >= 10 ? Math.round(ratio) : ratio.toFixed(1)}×`;
}

// 950, 12.3 k, 4.56 M: three digits are enough for a reader.
export function amount(number) {
  const units = ["", " k", " M", " G", " T"];
  let unit = 0;
  let left = number;
  while (left >= 999.5 && unit < units.length - 1) {
    left /= 1000;
    unit += 1;
  }
  return `${left >= 100 || (unit === 0 && Number.isInteger(left)) ? Math.round(left) : Number(left.toPrecision(3))}${units[unit]}`;
}

// How a verdict is told: `unused` does not count, and its worker did nothing wrong.
export function verdictWord(one) {
  return one.state === "refused" && !one.held_against ? "unused" : one.state;
}

export function reasonWords(reason) {
  return (reason ?? "").replaceAll("_", " ");
}

export function count(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}

export function short(id) {
  return id.slice(0, 8);
}

export function total(traffic) {
  return traffic.payload + traffic.snapshot + traffic.control;
}
