// The brokers' own short histories, brought onto one time axis. Brokers sample at different moments, so values are put
// into slots of the wall clock as long as the interval; a slot without a value stays empty.

export function points(history, name) {
  const values = history.series[name];
  if (!values) return [];
  const step = history.interval_s * 1000;
  const found = [];
  values.forEach((value, at) => {
    if (value !== null) found.push([history.end_ms - (values.length - 1 - at) * step, value]);
  });
  return found;
}

// What a counter grew by, per second. A counter that became smaller began anew.
export function rates(list) {
  const found = [];
  for (let at = 1; at < list.length; at += 1) {
    const seconds = (list[at][0] - list[at - 1][0]) / 1000;
    const grown = list[at][1] - list[at - 1][1];
    if (seconds > 0 && grown >= 0) found.push([list[at][0], grown / seconds]);
  }
  return found;
}

export function figure(history, name) {
  const list = points(history, name);
  return history.counters && history.counters.includes(name) ? rates(list) : list;
}

// The sum of several series; in each slot of those that have a value there.
export function summed(lists, step) {
  const slots = new Map();
  for (const list of lists) {
    const mine = new Map();
    for (const [at, value] of list) mine.set(Math.round(at / step), value);
    for (const [slot, value] of mine) slots.set(slot, (slots.get(slot) || 0) + value);
  }
  return [...slots].sort((a, b) => a[0] - b[0]).map(([slot, value]) => [slot * step, value]);
}

// `top` / `below` in each slot where both are known and something was counted.
export function divided(top, below, step, factor = 1) {
  const other = new Map(below.map(([at, value]) => [Math.round(at / step), value]));
  return top
    .map(([at, value]) => [at, value, other.get(Math.round(at / step))])
    .filter(([, , count]) => count > 0)
    .map(([at, value, count]) => [at, (value / count) * factor]);
}

export function last(list, newerThan = 60000, now = Date.now()) {
  const newest = list[list.length - 1];
  return newest && now - newest[0] < newerThan ? newest[1] : null;
}

export function histories(answer) {
  return Object.entries(answer.answers).map(([broker, history]) => ({ broker: Number(broker), ...history }));
}
