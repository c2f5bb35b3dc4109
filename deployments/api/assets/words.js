// Numbers as people read them. Nothing known is a dash.

const NONE = "–";
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export const count = (value) => (known(value) ? grouped.format(value) : NONE);

export function decimal(value) {
  if (!known(value)) return NONE;
  return value >= 100 ? grouped.format(value) : value.toFixed(1);
}

export function ms(seconds) {
  if (!known(seconds)) return NONE;
  const value = seconds * 1000;
  return value >= 100 ? grouped.format(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export const percent = (share, digits = 1) => (known(share) ? `${(share * 100).toFixed(digits)} %` : NONE);

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export const blocks = (first, end) => (end - first === 1 ? `block ${first}` : `blocks ${first}–${end - 1}`);
