// Moves, drains and elections: what goes on now, the last 100 events, and what each cost in stall.

import { h } from "./dom.js";
import { all, any } from "./api.js";
import { ago, bytes, clock, count, duration, moment, plural } from "./format.js";
import { badge, card, head, link, missing, route, table } from "./ui.js";

export const every = 2000;

export async function load({ signal }) {
  const [timelines, moves, moving, brokers] = await Promise.all([
    all("timeline", null, signal), all("moves", null, signal), any("partitions", null, signal), any("brokers", null, signal),
  ]);
  return { timelines, moves, moving: moving.partitions, brokers: brokers.brokers };
}

// Every broker sees the same metadata; the one that has seen it for longest tells most.
function longest(timelines) {
  return Object.entries(timelines.answers)
    .filter(([, each]) => each.since_ms !== null)
    .sort((a, b) => a[1].since_ms - b[1].since_ms)[0];
}

export function draw({ timelines, moves, moving, brokers }) {
  const found = longest(timelines);
  const [teller, timeline] = found || [null, { events: [], leaderless: [], moving: 0, since_ms: null }];
  const done = Object.entries(moves.answers).flatMap(([broker, each]) => each.moves.map((one) => ({ ...one, broker })));
  return [
    head({
      title: "Moves and elections",
      lead: found && `As broker ${teller} saw it, since ${moment(timeline.since_ms)}`,
    }),
    missing(moves.errors),
    now(timeline, moving, done, brokers),
    h("section", { class: "card", "data-key": "timeline" },
      h("h2", {}, "The last 100 events"),
      timeline.events.length
        ? h("ol", { class: "events" }, timeline.events.map(event))
        : h("p", { class: "empty" }, "Nothing has happened since this broker started to look.")),
    card("What moves cost", finished(done)),
  ];
}

function now(timeline, moving, done, brokers) {
  const steps = new Map(done.filter((each) => !each.finished_ms).map((each) => [`${each.topic}:${each.partition}`, each]));
  const drains = brokers.filter((each) => each.state === "draining");
  if (!moving.length && !drains.length && !timeline.leaderless.length) {
    return h("p", { class: "verdict", role: "status", "data-key": "now" }, h("strong", {}, "Nothing moves, and every replica set has a leader."));
  }
  return h("section", { class: "card stack", "data-key": "now" },
    h("h2", {}, "Now"),
    timeline.leaderless.map((each) => h("p", { class: "notice bad" }, `Replica set ${each.replica_set} has had no leader for ${duration(each.for_ms)}.`)),
    drains.map((each) => h("p", { class: "notice warn" }, `Broker ${each.id} is being drained: ${plural(each.partitions, "partition")} left, ${count(each.leaving)} on their way.`)),
    moving.length > 0 && table({
      label: "Partitions on their way", rows: moving.slice(0, 100), key: (row) => `${row.topic}:${row.partition}`,
      columns: [
        { name: "Partition", cell: "name", of: (row) => link(route("topics", row.topic, row.partition), `${row.topic}:${row.partition}`) },
        { name: "From", number: true, of: (row) => row.leader ?? row.broker },
        { name: "To", number: true, of: (row) => row.to },
        { name: "Step", of: (row) => steps.get(`${row.topic}:${row.partition}`)?.phase },
        { name: "Since", number: true, of: (row) => ago(row.since_ms) },
        { name: "Problem", cell: "name", wide: true, of: (row) => {
          const error = steps.get(`${row.topic}:${row.partition}`)?.error;
          return error && h("span", { class: "user" }, error);
        } },
      ],
    }),
    moving.length > 100 && h("p", { class: "small muted" }, `${count(moving.length - 100)} more: tidelog partition list`));
}

const KINDS = {
  "broker dead": ["bad", (e) => `Broker ${e.broker}`],
  "broker back": ["ok", (e) => `Broker ${e.broker}`],
  "broker joined": ["ok", (e) => `Broker ${e.broker}`],
  "broker removed": ["", (e) => `Broker ${e.broker}`],
  "drain began": ["warn", (e) => `Broker ${e.broker}`],
  "drain ended": ["", (e) => `Broker ${e.broker}`],
  "leader lost": ["bad", (e) => `Replica set ${e.replica_set}, led by broker ${e.broker}`],
  elected: ["ok", (e) => `Broker ${e.broker} leads replica set ${e.replica_set} in epoch ${e.master_epoch}`],
  "move began": ["warn", moved],
  moved: ["ok", moved],
  "move cancelled": ["", moved],
};

function moved(e) {
  const what = e.partitions === 1 ? e.partition : `${plural(e.partitions, "partition")}, the first ${e.partition}`;
  return h("span", { class: "user" }, `${what}, from replica set ${e.from} to ${e.to}`);
}

function event(e) {
  const [kind, text] = KINDS[e.kind] || ["", () => ""];
  return h("li", { "data-key": `${e.at_ms}:${e.kind}:${e.replica_set ?? e.broker ?? e.partition}` },
    h("time", { class: "muted small num", datetime: new Date(e.at_ms).toISOString() }, clock(e.at_ms)),
    h("span", {}, badge(kind, e.kind[0].toUpperCase() + e.kind.slice(1))),
    h("span", { class: "what" }, text(e)),
    h("span", { class: "num small" }, cost(e)));
}

function cost(e) {
  if (e.kind === "elected") return e.stall_ms === null ? "no gap seen" : `${duration(e.stall_ms)} without a leader`;
  if (e.until_ms && e.until_ms > e.at_ms) return `within ${duration(e.until_ms - e.at_ms)}`;
  return "";
}

function finished(done) {
  const rows = done.filter((each) => each.finished_ms).sort((a, b) => b.finished_ms - a.finished_ms).slice(0, 100);
  const stalls = rows.filter((each) => each.phase === "done").map((each) => each.stall_ms).sort((a, b) => a - b);
  return [
    stalls.length > 0 && h("p", { class: "muted" },
      `Stall of the last ${count(stalls.length)}: median ${duration(stalls[Math.floor(stalls.length / 2)])}, longest ${duration(stalls[stalls.length - 1])}. It is the time from the close at the old broker to the hand-over; the new one's opening comes in addition.`),
    table({
      label: "Moves that ended", rows, key: (row) => `${row.topic}:${row.partition}:${row.finished_ms}`,
      empty: "No partition has moved away from a broker that runs now.",
      columns: [
        { name: "Ended", number: true, of: (row) => clock(row.finished_ms) },
        { name: "Partition", cell: "name", of: (row) => link(route("topics", row.topic, row.partition), `${row.topic}:${row.partition}`) },
        { name: "From", number: true, wide: true, of: (row) => row.broker },
        { name: "To", number: true, of: (row) => row.target },
        { name: "Stall", number: true, of: (row) => row.phase === "done" ? duration(row.stall_ms) : row.phase },
        { name: "Uploaded while closed", number: true, wide: true, of: (row) => bytes(row.drained_bytes) },
        { name: "Attempts", number: true, wide: true, of: (row) => count(row.attempts) },
      ],
    }),
  ];
}
