// Figures as people read them. Every unit is said; nothing is rounded to a zero that is none.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let at = 0;
  let left = Math.abs(value);
  while (left >= 1024 && at < UNITS.length - 1) {
    left /= 1024;
    at += 1;
  }
  const digits = at === 0 ? Math.round(left) : left < 10 ? left.toFixed(1) : Math.round(left);
  return `${value < 0 ? "−" : ""}${digits} ${UNITS[at]}`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  if (size >= 10 || size === 0) return String(Math.round(value));
  return size < 1 ? String(Number(value.toFixed(size < 0.1 ? 3 : 2))) : value.toFixed(1);
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function clock(ms) {
  if (ms === null || ms === undefined) return "–";
  return new Date(ms).toLocaleTimeString("en-GB");
}

export function moment(ms) {
  if (ms === null || ms === undefined || ms < 0) return "–";
  const date = new Date(ms);
  if (Number.isNaN(date.getTime())) return String(ms);
  return `${date.toLocaleDateString("en-CA")} ${date.toLocaleTimeString("en-GB")}`;
}

export function ago(ms, now = Date.now()) {
  if (ms === null || ms === undefined) return "–";
  const past = now - ms;
  return past < 1500 ? "now" : `${duration(past)} ago`;
}

export function money(value, currency) {
  if (value === null || value === undefined) return "–";
  let digits = 2;
  while (digits < 8 && value !== 0 && Math.abs(value) < 10 ** (1 - digits)) digits += 1;
  return `${value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}${currency ? ` ${currency}` : ""}`;
}

export function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many || `${one}s`}`;
}

// A word as a POSIX shell takes it unchanged. Control characters, which a terminal might obey, are written as escapes.
export function quoted(text) {
  const word = String(text);
  if (/[\u0000-\u001f\u007f-\u009f]/.test(word)) {
    const escaped = word.replace(/[\\'\u0000-\u001f\u007f-\u009f]/g, (each) =>
      each === "\\" || each === "'" ? `\\${each}` : [...new TextEncoder().encode(each)].map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join(""));
    return `$'${escaped}'`;
  }
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

export function command(...words) {
  return words.filter((each) => each !== null && each !== undefined).map(quoted).join(" ");
}
