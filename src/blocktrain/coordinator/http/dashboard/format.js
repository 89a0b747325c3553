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

export function percent(share) {
  return share === null ? "–" : `${Math.round(100 * share)} %`;
}

export function times(ratio) {
  return `${ratio >= 10 ? Math.round(ratio) : ratio.toFixed(1)}×`;
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
