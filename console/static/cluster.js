// The map of the cluster: is it well, and if not, why not; its brokers and controllers; what it does now.

import { h } from "./dom.js";
import { all, any } from "./api.js";
import { bytes, count, duration, plural, short } from "./format.js";
import { badge, card, facts, head, link, meter, missing, route, table, tile } from "./ui.js";
import { divided, figure, histories, last, summed } from "./history.js";
import { plot, sparkline } from "./plot.js";

export const every = 4000;
let past = { at: 0, answer: { answers: {}, errors: {} } };

export async function load({ signal }) {
  const [statuses, brokers, sets, quorum] = await Promise.all([
    all("status", null, signal), any("brokers", null, signal), any("replica-sets", null, signal), any("controllers", null, signal),
  ]);
  if (Date.now() - past.at > 9000) past = { at: Date.now(), answer: await all("history", null, signal) };
  return { statuses, brokers: brokers.brokers, sets: sets.replica_sets, members: quorum.members, past: histories(past.answer) };
}

export function draw(data) {
  const answers = Object.values(data.statuses.answers);
  return [
    head({
      title: "Cluster",
      lead: answers[0] && ["Cluster ", h("code", { class: "user" }, answers[0].cluster_id), `, feature level ${answers[0].level}, ${plural(answers[0].topics, "topic")}`],
    }),
    verdict(data),
    tiles(data.past),
    h("section", { class: "stack", "aria-label": "Brokers" },
      h("h2", {}, "Brokers"),
      h("div", { class: "cards" }, data.brokers.map((broker) => brokerCard(broker, data)))),
    controllers(data.members),
    h("div", { class: "two" },
      card("Written, each broker", throughput(data.past, "produced_bytes")),
      card("Read, each broker", throughput(data.past, "fetched_bytes"))),
    replicaSets(data.sets),
    Object.keys(data.statuses.errors).length > 0 && missing(data.statuses.errors),
  ];
}

function verdict(data) {
  const problems = new Map();
  for (const [broker, status] of Object.entries(data.statuses.answers)) {
    for (const problem of status.problems) {
      problems.set(problem, [...(problems.get(problem) || []), broker]);
    }
  }
  for (const [broker, error] of Object.entries(data.statuses.errors)) {
    if (![...problems.keys()].some((each) => each.includes(`broker ${broker} is dead`))) problems.set(error, []);
  }
  const bad = data.brokers.filter((broker) => broker.state === "dead").length;
  if (!problems.size && !bad) {
    return h("div", { class: "verdict", role: "status", "data-key": "verdict" },
      h("div", {}, h("strong", {}, "All is well"), `${plural(data.brokers.length, "broker")} alive, and no operation fails.`));
  }
  return h("div", { class: `verdict ${bad ? "bad" : "warn"}`, role: "status", "data-key": "verdict" },
    h("div", {},
      h("strong", {}, problems.size === 1 ? "One thing is not well" : `${problems.size} things are not well`),
      h("ul", {}, [...problems].slice(0, 12).map(([problem, brokers]) => h("li", {}, h("span", { class: "user" }, problem),
        brokers.length > 0 && h("span", { class: "muted small" }, ` (told by ${brokers.length === 1 ? "broker" : "brokers"} ${brokers.join(", ")})`))),
        problems.size > 12 && h("li", { class: "muted" }, `and ${problems.size - 12} more: tidelog status`))));
}

function tiles(past) {
  const step = 10000;
  const sum = (name) => summed(past.map((each) => figure(each, name)), step);
  const written = sum("produced_bytes");
  const read = sum("fetched_bytes");
  const requests = summed([sum("produce_requests"), sum("fetch_requests")], step);
  const latency = divided(sum("produce_seconds"), sum("produce_requests"), step, 1000);
  const waiting = sum("not_uploaded_bytes");
  const now = (list, format) => {
    const value = last(list);
    return value === null ? "–" : format(value);
  };
  return h("section", { class: "tiles", "aria-label": "The cluster now, and the last hour" },
    tile("Written", now(written, bytes), "/s", sparkline(written, 0)),
    tile("Read", now(read, bytes), "/s", sparkline(read, 2)),
    tile("Produce and fetch", now(requests, short), "/s", sparkline(requests, 3)),
    tile("Produce, mean", now(latency, duration), null, sparkline(latency, 1)),
    tile("Not yet in the bucket", now(waiting, bytes), null, sparkline(waiting, 4)));
}

const STATES = { alive: ["ok", "Alive"], ready: ["ok", "Ready"], starting: ["warn", "Starting"], dead: ["bad", "Dead"],
  draining: ["warn", "Draining"], drained: ["warn", "Drained"] };

function brokerCard(broker, data) {
  const status = data.statuses.answers[broker.id];
  const error = data.statuses.errors[broker.id];
  const self = status && status.nodes.find((node) => node.id === broker.id);
  const state = self && broker.state === "alive" ? self.state : broker.state;
  const silent = !status && broker.state !== "dead";
  const [kind, word] = silent ? ["warn", "No answer"] : STATES[state] || ["warn", state];
  const set = data.sets.find((each) => each.id === broker.id);
  return h("article", { class: `card node ${kind}`, "data-key": `broker:${broker.id}`, "aria-label": `Broker ${broker.id}` },
    h("div", { class: "row between" }, h("h3", {}, `Broker ${broker.id}`), badge(kind, word)),
    facts([
      ["Address", h("span", { class: "user" }, broker.address)],
      broker.rack && ["Rack", h("span", { class: "user" }, broker.rack)],
      self && ["Roles", self.roles.join(", ")],
      ["Partitions led", count(broker.partitions)],
      (broker.leaving || broker.coming) ? ["Leaving, coming", `${broker.leaving}, ${broker.coming}`] : null,
      ["Replicas of others", count(broker.replicas)],
      status && ["To upload", bytes(status.upload.backlog_bytes)],
      status && ["Memory", bytes(status.memory.resident_bytes)],
    ]),
    status && h("div", {},
      h("div", { class: "row between small muted" }, h("span", {}, "Log cache"),
        h("span", {}, `${bytes(status.memory.log_cache_bytes)} of ${bytes(status.memory.log_cache_bound_bytes)}`)),
      meter(status.memory.log_cache_bytes, status.memory.log_cache_bound_bytes, "Log cache")),
    (broker.state === "dead" || silent) && h("p", { class: "small" },
      broker.state === "dead" ? deadText(set, data) : error || "It does not answer."),
    broker.state !== "dead" && h("p", { class: "small" }, link(route("balance"), "Partitions, drain")));
}

const WAITS = {
  electing: "an election is under way",
  recovering: "they are being recovered from the bucket",
  due: "another broker is about to recover them from the bucket",
  waiting: "they wait for it to come back",
};

function deadText(set, data) {
  if (set && set.state === "led") return `Its replica set is led by broker ${set.master}: nothing waits for it.`;
  if (!set || !set.partitions) return "It owns no partition.";
  const lost = Object.values(data.statuses.answers).flatMap((status) => status.failover.lost || []);
  const mine = lost.find((each) => each.broker === set.id);
  const what = `Its ${plural(set.partitions, "partition")} ${set.partitions === 1 ? "has" : "have"} no leader`;
  return mine && WAITS[mine.state] ? `${what}: ${WAITS[mine.state]}.` : `${what}.`;
}

function controllers(members) {
  const active = members.find((each) => each.state === "active");
  return card("Controllers",
    table({
      label: "Controllers", key: (row) => row.id, rows: members,
      columns: [
        { name: "Node", of: (row) => String(row.id) },
        { name: "State", of: (row) => badge(["active", "follower"].includes(row.state) ? "ok" : "bad", row.state) },
        { name: "Term", number: true, of: (row) => row.term === undefined ? null : count(row.term) },
        { name: "Behind", number: true, of: (row) => active && typeof row.applied_index === "number"
          ? count(Math.max(0, active.last_index - row.applied_index)) : null },
        { name: "Journal", number: true, wide: true, of: (row) => row.journal_bytes === undefined ? null : bytes(row.journal_bytes) },
        { name: "Address", wide: true, of: (row) => h("span", { class: "user" }, row.address) },
      ],
    }));
}

function throughput(past, name) {
  return plot({
    title: `${name}, bytes a second by broker`, key: `plot:${name}`,
    format: (value) => `${bytes(value)}/s`,
    series: past.map((each) => ({ name: `Broker ${each.broker}`, points: figure(each, name) })),
  });
}

const SET_STATES = { led: "ok", electing: "warn", recovering: "warn", leaderless: "bad" };

function replicaSets(sets) {
  return card("Replica sets", table({
    label: "Replica sets", key: (row) => row.id, rows: sets,
    empty: "No replica set: no broker has registered yet.",
    columns: [
      { name: "Set", of: (row) => String(row.id) },
      { name: "State", of: (row) => badge(SET_STATES[row.state] || "warn", row.state) },
      { name: "Master", number: true, of: (row) => row.master },
      { name: "Epoch", number: true, wide: true, of: (row) => count(row.master_epoch) },
      { name: "Members", number: true, of: (row) => row.members.join(", ") },
      { name: "In sync", number: true, of: (row) => row.in_sync.join(", ") },
      { name: "Quorum", number: true, wide: true, of: (row) => row.quorum },
      { name: "Partitions", number: true, of: (row) => count(row.partitions) },
    ],
  }));
}

