// Topics → the partitions of a topic → where the records of one partition are → where one record went.

import { h } from "./dom.js";
import { any, change, get, of } from "./api.js";
import { drawRecord, loadRecord, recordField } from "./explain.js";
import { bytes, command, count, duration, moment, plural } from "./format.js";
import { badge, card, confirm, facts, head, link, missing, route, table } from "./ui.js";

export const every = 4000;
let wanted = "";
let internal = false;
let pages = 1;

export async function load(context) {
  const [topic, partition, offset] = context.parts;
  if (topic && /^\d+$/.test(partition) && /^\d{1,19}$/.test(offset)) return loadRecord(topic, Number(partition), offset, context);
  if (topic && partition !== undefined && /^\d+$/.test(partition)) return loadPartition(topic, Number(partition), context);
  if (topic) return loadTopic(topic, context);
  const topics = [];
  let after = null;
  let total = 0;
  for (let page = 0; page < pages && (page === 0 || after); page += 1) {
    const found = await any("topics", { after, limit: 500 }, context.signal);
    topics.push(...found.topics);
    after = found.next_after;
    total = found.total;
  }
  return { kind: "list", topics, total, more: Boolean(after) };
}

export function draw(data, context) {
  return { list: drawList, topic: drawTopic, partition: drawPartition, record: drawRecord }[data.kind](data, context);
}

// --- all topics

function drawList({ topics, total, more }, context) {
  const shown = topics.filter((each) => (internal || !each.internal) && each.name.toLowerCase().includes(wanted.toLowerCase()));
  return [
    head({ title: "Topics", lead: `${plural(total, "topic")} in the cluster, internal ones included` }),
    h("section", { class: "card", "data-key": "topics" },
      h("div", { class: "row between" },
        h("label", { for: "find" }, "Find by name",
          h("input", { id: "find", type: "search", autocomplete: "off", spellcheck: "false", value: wanted, oninput: (event) => {
            wanted = event.target.value;
            context.redraw();
          } })),
        h("label", { class: "check" },
          h("input", { type: "checkbox", checked: internal, onchange: (event) => {
            internal = event.target.checked;
            context.redraw();
          } }), "Show internal topics")),
      table({
        label: "Topics", rows: shown, key: (row) => row.name,
        empty: total ? "No topic has this in its name." : "There is no topic yet. Create one: tidelog topic create orders",
        columns: [
          { name: "Topic", cell: "name", of: (row) => link(route("topics", row.name), row.name) },
          { name: "Partitions", number: true, of: (row) => count(row.partitions) },
          { name: "State", of: topicState },
          { name: "Led by", number: true, wide: true, of: (row) => several(row.brokers) },
          { name: "Cleanup", wide: true, of: (row) => h("span", { class: "user" }, row.configs["cleanup.policy"] || "delete") },
          { name: "Retention", number: true, wide: true, of: (row) => retention(row.configs) },
          { name: "Created", number: true, wide: true, of: (row) => moment(row.created_ms) },
        ],
      })),
    more && h("div", { class: "row" }, h("button", { type: "button", onclick: () => {
      pages += 1;
      context.redraw();
    } }, "Show more topics")),
  ];
}

function several(ids) {
  return ids.length > 6 ? `${ids.slice(0, 5).join(", ")} and ${ids.length - 5} more` : ids.join(", ");
}

function topicState(row) {
  if (row.leaderless) return badge("bad", `${count(row.leaderless)} without a leader`);
  if (row.moving) return badge("warn", `${count(row.moving)} moving`);
  return badge("ok", "Led");
}

function retention(configs) {
  const given = configs["retention.ms"];
  if (given === undefined) return "default";
  return given === "-1" ? "for ever" : duration(Number(given));
}

// --- one topic

async function loadTopic(topic, { signal }) {
  const [about, placed, offsets] = await Promise.all([
    any("topics", { name: topic }, signal),
    any("partitions", { topic }, signal),
    get("offsets", { topic }, signal).catch((error) => ({ error })),
  ]);
  return { kind: "topic", topic: about.topics[0], partitions: placed.partitions, offsets };
}

function drawTopic({ topic, partitions, offsets }) {
  const spans = new Map((offsets.partitions || []).map((each) => [each.partition, each]));
  const most = Math.max(1, ...[...spans.values()].map((each) => each.end - each.start));
  const records = [...spans.values()].reduce((sum, each) => sum + each.end - each.start, 0);
  return [
    head({
      title: topic.name, user: true, crumbs: [["Topics", "#/topics"]],
      lead: `${plural(topic.partitions, "partition")}, ${plural(records, "offset")} from log start to high watermark`,
      actions: h("a", { class: "button", href: `#/records?topic=${encodeURIComponent(topic.name)}` }, "See records"),
    }),
    offsets.error && missing({ offsets: `Offsets are not known: ${offsets.error.message}` }),
    card("Partitions", table({
      label: "Partitions", rows: partitions, key: (row) => row.partition,
      columns: [
        { name: "Partition", of: (row) => link(route("topics", topic.name, row.partition), `Partition\u00a0${row.partition}`) },
        { name: "State", of: (row) => row.leader === null ? badge("bad", "No leader") : row.to !== null ? badge("warn", `To ${row.to}`) : badge("ok", "Led") },
        { name: "Leader", number: true, of: (row) => row.leader },
        { name: "Epoch", number: true, wide: true, of: (row) => count(row.leader_epoch) },
        { name: "Log start", number: true, wide: true, of: (row) => spans.has(row.partition) ? count(spans.get(row.partition).start) : null },
        { name: "High watermark", number: true, of: (row) => spans.has(row.partition) ? count(spans.get(row.partition).end) : null },
        { name: "Share", wide: true, of: (row) => spans.has(row.partition) && bar(spans.get(row.partition), most) },
      ],
    })),
    card("Configuration", Object.keys(topic.configs).length
      ? facts(Object.entries(topic.configs).map(([name, value]) => [h("code", {}, name), h("span", { class: "user" }, value)]), true)
      : h("p", { class: "muted" }, "Nothing is set for this topic: the defaults of the brokers count."),
    h("p", { class: "small muted" }, "All settings with their sources: ", h("code", { class: "user" }, command("tidelog", "topic", "describe", topic.name, "--configs")))),
  ];
}

function bar(span, most) {
  const share = (span.end - span.start) / most;
  return h("div", { class: "meter", role: "img", "aria-label": `${Math.round(share * 100)} % of the largest partition`, style: { width: "120px" } },
    h("i", { style: { width: `${(share * 100).toFixed(1)}%` } }));
}

// --- one partition

async function loadPartition(topic, partition, { signal }) {
  const seen = await any("partition", { topic, partition }, signal);
  if (seen.leader === null) return { kind: "partition", found: seen, error: null };
  try {
    const [found, brokers] = await Promise.all([
      of(seen.leader, "partition", { topic, partition }, signal), any("brokers", null, signal)]);
    return { kind: "partition", found, brokers: brokers.brokers };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { kind: "partition", found: seen, error };
  }
}

function drawPartition({ found, error, brokers }, context) {
  const { topic, partition, log, stored, wal, bucket } = found;
  return [
    head({
      title: `${topic}:${partition}`, user: true,
      crumbs: [["Topics", "#/topics"], [topic, route("topics", topic)]],
      lead: found.leader === null ? "No broker leads it now." : `Led by broker ${found.leader} in leader epoch ${found.leader_epoch}`,
      actions: [
        h("a", { class: "button", href: `#/records?topic=${encodeURIComponent(topic)}&partition=${partition}` }, "See records"),
        found.to === null && found.leader !== null && brokers && h("button", { type: "button", onclick: () => move(found, brokers, context) }, "Move…"),
      ],
    }),
    found.leader === null && h("p", { class: "notice bad" },
      `Replica set ${found.replica_set} has no living master. What is in the bucket is shown; the rest only its leader knows. The `,
      h("a", { href: "#/" }, "cluster's page"), " says what it waits for."),
    error && missing({ leader: `Broker ${found.leader} did not tell of its log: ${error.message}` }),
    found.to !== null && h("p", { class: "notice warn" }, `It moves to broker ${found.to}, since ${moment(found.since_ms)}.`),
    card("Where its records are", anatomy(found)),
    log && log.log_end_offset > log.log_start_offset && card("Where one record went",
      recordField(topic, partition, String(Math.max(log.log_start_offset, log.high_watermark - 1)))),
    h("div", { class: "two" },
      card("Offsets", log ? facts([
        ["Log start", count(log.log_start_offset)],
        ["Last stable offset", count(log.last_stable_offset)],
        ["High watermark", count(log.high_watermark)],
        ["Log end", count(log.log_end_offset)],
        ["Not confirmed yet", count(log.log_end_offset - log.high_watermark)],
        ["Held by open transactions", count(log.high_watermark - log.last_stable_offset)],
        ["Size", bytes(log.size_bytes)],
        ["Producers, open transactions", `${count(log.producers)}, ${count(log.open_transactions)}`],
      ]) : h("p", { class: "muted" }, "Only its leader knows.")),
      card("Replicas and write-ahead log", facts([
        ["Replica set", String(found.replica_set)],
        ["Members", found.members.join(", ")],
        ["In sync", found.in_sync.join(", ")],
        wal && ["Master epoch", count(wal.master_epoch)],
        wal && ["WAL, kept from", count(wal.start_offset)],
        wal && ["Committed to the bucket", `${bytes(wal.end_offset - wal.committed_offset)} behind`],
        wal && ["Confirmed", `${bytes(wal.end_offset - wal.confirm_offset)} behind`],
        wal && ["Durable here", `${bytes(wal.end_offset - wal.durable_offset)} behind`],
        wal && ["WAL, end", count(wal.end_offset)],
        stored && stored.quarantined && ["Quarantined", badge("bad", "Takes no appends")],
      ]))),
    h("section", { class: "card", "data-key": "objects" },
      h("h2", {}, "Objects in the bucket"),
      table({
        label: "Objects that hold its records", rows: bucket.objects, key: (row) => row.start_offset,
        empty: "None of its records is in the bucket yet.",
        columns: [
          { name: "Object", of: (row) => String(row.id) },
          { name: "Kind", wide: true, of: (row) => row.kind === "stream" ? "its own" : "shared" },
          { name: "First offset", number: true, of: (row) => count(row.start_offset) },
          { name: "Offsets", number: true, of: (row) => count(row.end_offset - row.start_offset) },
          { name: "Size of the object", number: true, of: (row) => bytes(row.size_bytes) },
        ],
      }),
      bucket.next_after !== null && h("p", { class: "small muted" }, `The first ${bucket.objects.length} are shown, up to offset ${count(bucket.next_after)}.`)),
  ];
}

// Three lanes over one axis of offsets. The axis is not to scale: the newest offsets, where the lanes differ, would be too
// narrow to see beside a history of millions. Each piece between two marks is as wide as the square root of its length.
function anatomy({ log, stored, bucket }) {
  const start = log ? log.log_start_offset : bucket.start_offset;
  const end = log ? log.log_end_offset : bucket.committed_end;
  if (end <= start) return h("p", { class: "empty" }, "It holds no record.");
  const edges = [start, end, Math.max(start, bucket.start_offset), Math.max(start, bucket.committed_end)];
  if (stored) edges.push(stored.cache_start, stored.committed_end);
  if (log) edges.push(log.last_stable_offset, log.high_watermark);
  const marks = [...new Set(edges.filter((each) => each >= start && each <= end))].sort((a, b) => a - b);
  const widths = marks.slice(1).map((each, at) => Math.max(Math.sqrt(each - marks[at]), 0));
  const whole = widths.reduce((sum, each) => sum + each, 0);
  const least = 0.06 * whole;
  const padded = widths.map((each) => Math.max(each, least));
  const total = padded.reduce((sum, each) => sum + each, 0);
  const x = (offset) => {
    let at = 0;
    for (let index = 1; index < marks.length; index += 1) {
      if (offset <= marks[index - 1]) break;
      const part = Math.min(1, (offset - marks[index - 1]) / (marks[index] - marks[index - 1]));
      at += padded[index - 1] * part;
    }
    return (at / total) * 100;
  };
  const lane = (name, kind, from, to, text) => [
    h("span", {}, name),
    h("div", { class: "track", role: "img", "aria-label": `${name}: ${text}` },
      from < to && h("i", { class: kind, style: { left: `${x(from).toFixed(2)}%`, width: `${(x(to) - x(from)).toFixed(2)}%` } })),
    h("span", {}), h("span", { class: "small muted" }, text),
  ];
  const span = (from, to) => from < to ? `${count(from)} to ${count(to)}: ${plural(to - from, "offset")}` : "nothing";
  const inBucket = stored ? Math.max(stored.committed_end, bucket.committed_end) : bucket.committed_end;
  return h("div", { class: "stack" },
    h("div", { class: "lane" },
      lane("Bucket", "bucket", Math.max(start, bucket.start_offset), inBucket, span(Math.max(start, bucket.start_offset), inBucket)),
      stored && lane("WAL only", "wal", inBucket, end, span(inBucket, end)),
      stored && lane("Memory", "memory", Math.max(start, stored.cache_start), end, span(Math.max(start, stored.cache_start), end))),
    h("p", { class: "small muted" }, stored
      ? "Not to scale: pieces are drawn by the square root of their length. What is in memory is also in the WAL or the bucket."
      : "Only its leader knows what is in its WAL and memory."));
}

function move(found, brokers, context) {
  const targets = brokers.filter((each) => each.state === "alive" && each.id !== found.leader);
  if (!targets.length) return;
  const choice = h("select", { id: "target" }, targets.map((each) => h("option", { value: String(each.id) }, `Broker ${each.id}, ${each.address}`)));
  const name = `${found.topic}:${found.partition}`;
  const target = () => Number(choice.value);
  confirm({
    title: `Move ${name}`, label: "Move it", line: () => command("tidelog", "partition", "move", name, "--to", target()),
    preview: async () => {
      const { estimate } = await of(found.leader, "moves");
      return { node: h("div", { class: "stack" },
        h("label", { for: "target" }, "To"), choice,
        h("p", {}, `No data is copied. ${bytes(estimate.upload_bytes)} are uploaded first, while it serves; then it takes no writes for about ${duration(estimate.stall_ms)} (by ${estimate.basis}).`),
        h("p", { class: "small muted" }, "Dry run: nothing has changed yet.")) };
    },
    act: async () => {
      const answer = await change("moves", {}, { moves: [{ topic: found.topic, partition: found.partition, to: target() }] });
      if (answer.results[0].error) throw Object.assign(new Error(answer.results[0].error), { hint: null });
      context.redraw();
      return answer;
    },
    done: () => "The move is committed; the brokers carry it out.",
  });
}
