// Formats numbers for people. A missing value is a dash, never a zero.
const NONE = "–";

export function count(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(size >= 10 ? 1 : 2);
}

export function ms(value) {
  const [number, unit] = msParts(value);
  return number === NONE ? NONE : `${number} ${unit}`;
}

export function msParts(value) {
  if (value === null || value === undefined) return [NONE, "ms"];
  if (value >= 10000) return [(value / 1000).toFixed(1), "s"];
  if (value >= 100) return [Math.round(value).toLocaleString("en"), "ms"];
  if (value < 0.1) return [Math.round(value * 1000), "µs"];
  return [value.toFixed(value >= 10 ? 1 : 2), "ms"];
}

// For tables with the unit in the header.
export function msNumber(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 0.1 ? value.toPrecision(3) : value.toFixed(3);
}

export function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${unit}`;
  return `${value} B`;
}

export const percent = value => value === null || value === undefined ? NONE : (100 * value).toFixed(value < 0.0995 ? 1 : 0);

export const clock = at => new Date(at * 1000).toLocaleTimeString("en-GB");
