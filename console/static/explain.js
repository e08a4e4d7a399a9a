// Where one record went, and when: the stages of its way, as the leader of its partition and the groups' brokers tell them.

import { h } from "./dom.js";
import { all, any, of } from "./api.js";
import { bytes, command, count, duration, moment, plural } from "./format.js";
import { badge, card, cli, facts, head, link, missing, route, table } from "./ui.js";

const SHOWN_GROUPS = 200;

export async function loadRecord(topic, partition, offset, { signal }) {
  const seen = await any("partition", { topic, partition }, signal);
  const story = { kind: "record", topic, partition, offset, leader: seen.leader, told: null, error: null, groups: { answers: {}, errors: {} } };
  if (seen.leader === null) return story;
  const end = (error) => {
    if (error.name === "AbortError" || error.status === 401) throw error;
    return error;
  };
  [story.told, story.groups] = await Promise.all([
    of(seen.leader, "explain", { topic, partition, offset }, signal).catch((error) => {
      story.error = end(error);
      return null;
    }),
    all("explain/groups", { topic, partition }, signal)
      .catch((error) => ({ answers: {}, errors: { groups: `Groups are not known: ${end(error).message}` } })),
  ]);
  return story;
}

// The field that leads here. `newest`: an offset to begin with.
export function recordField(topic, partition, newest) {
  const input = h("input", { id: "explained", inputmode: "numeric", pattern: "[0-9]{1,19}", required: true, autocomplete: "off", value: newest });
  return h("form", { class: "row", "data-key": "explain", onsubmit: (event) => {
    event.preventDefault();
    location.hash = route("topics", topic, partition, event.currentTarget.querySelector("input").value);
  } },
    h("label", { for: "explained", class: "inline" }, "Offset", input),
    h("button", { type: "submit" }, "Where did it go"));
}

export function drawRecord(story) {
  const { topic, partition, offset, told, error, groups } = story;
  const name = `${topic}:${partition}@${offset}`;
  const from = `#/records?topic=${encodeURIComponent(topic)}&partition=${partition}&start=offset&value=${offset}`;
  return [
    head({
      title: name, user: true, crumbs: [["Topics", "#/topics"], [topic, route("topics", topic)], [`${topic}:${partition}`, route("topics", topic, partition)]],
      lead: told ? `Now: ${told.summary}.` : "Where it went, and when",
      actions: [
        h("a", { class: "button", href: from }, "See it"),
        ...neighbours(topic, partition, offset, told),
      ],
    }),
    story.leader === null && h("p", { class: "notice bad" }, "Nobody leads this partition now, and only a leader knows of its records. The ",
      h("a", { href: "#/" }, "cluster's page"), " says what it waits for."),
    error && h("div", { class: "notice bad", role: "alert" }, h("strong", { class: "user" }, error.message),
      error.hint && h("p", { class: "muted user" }, error.hint)),
    missing(groups.errors),
    told && h("section", { class: "card", "data-key": "way" },
      h("h2", {}, "Its way"),
      h("ol", { class: "way" }, told.stages.map(stage)),
      h("p", { class: "small muted" }, `Broker ${told.broker}, leader epoch ${told.leader_epoch}, remembers since ${moment(told.remembers_since_ms)}. A time with a span lies between two moments that are known.`)),
    told && h("div", { class: "two" }, card("Record and batch", about(told)), card("Object in the bucket", object(told.object))),
    told && h("section", { class: "card", "data-key": "groups" }, h("h2", {}, "Groups that read it"), readers(groups.answers, offset)),
    card("On the command line", cli(command("tidelog", "explain", name))),
  ];
}

function neighbours(topic, partition, offset, told) {
  const at = BigInt(offset);
  const to = (next, text, label) => h("a", { class: "button", href: route("topics", topic, partition, next), "aria-label": label }, text);
  return [
    at > 0n && to(at - 1n, "Previous", "Previous offset"),
    told && at + 1n < BigInt(told.log.log_end) && to(at + 1n, "Next", "Next offset"),
  ];
}

const STATES = { done: ["ok", "Done"], pending: ["warn", "Not yet"], unknown: ["", "Not known"], gone: ["", "Not there"] };

function stage(each) {
  const [look, text] = STATES[each.state] || ["", each.state];
  return h("li", { "data-key": each.stage },
    h("b", {}, each.stage[0].toUpperCase() + each.stage.slice(1)),
    badge(look, text),
    h("span", { class: "num when" }, when(each)),
    h("span", { class: "what" }, h("span", { class: "user" }, each.detail),
      each.source && h("span", { class: "muted small" }, each.detail ? " – " : "", `from: ${each.source}`)));
}

function when({ after_ms: after, by_ms: by }) {
  if (after === null && by === null) return "";
  if (after === null) return `by ${precise(by)}`;
  if (by === null) return `after ${precise(after)}`;
  return after === by ? precise(by) : `${precise(after)} + ${duration(by - after)}`;
}

function precise(ms) {
  return `${moment(ms)}.${String(((ms % 1000) + 1000) % 1000).padStart(3, "0")}`;
}

function about({ batch, record }) {
  if (!batch) return h("p", { class: "muted" }, "No batch of the log has this offset now.");
  const size = (value) => value === null ? "null" : bytes(value);
  return facts([
    record && record.marker !== null && ["Marker of a transaction", record.marker],
    record && record.marker === null && ["Key, value", `${size(record.key_bytes)}, ${size(record.value_bytes)}`],
    record && record.marker === null && ["Headers", count(record.headers)],
    ["Its batch", `offsets ${batch.base_offset} to ${batch.last_offset}`],
    ["Size of the batch", `${bytes(batch.size_bytes)}, ${batch.compression}`],
    ["Leader epoch", count(batch.leader_epoch)],
    batch.producer_id !== null && ["Producer, its epoch", `${batch.producer_id}, ${batch.producer_epoch}`],
    batch.sequence !== null && ["Sequence", String(batch.sequence)],
    batch.transaction !== null && ["Transaction", batch.transaction],
  ]);
}

function object(held) {
  if (!held) return h("p", { class: "muted" }, "None yet: what holds it is the write-ahead log.");
  return facts([
    ["Object", String(held.id)],
    ["Kind", held.kind],
    ["Key", h("code", { class: "user" }, held.key)],
    ["Size", bytes(held.size_bytes)],
    ["Committed", moment(held.since_ms)],
    held.block && ["Block", `${bytes(held.block.length_bytes)} at byte ${count(held.block.position)}`],
    held.problem && ["Problem", h("span", { class: "user" }, held.problem)],
  ]);
}

function readers(answers, offset) {
  const told = Object.values(answers);
  const rows = told.flatMap((answer) => answer.groups)
    .map((each) => ({ ...each, has_read: BigInt(each.committed) > BigInt(offset) }))
    .sort((a, b) => Number(b.has_read) - Number(a.has_read) || (a.group < b.group ? -1 : 1));
  const more = told.reduce((sum, each) => sum + each.more, 0) + Math.max(0, rows.length - SHOWN_GROUPS);
  const loading = told.filter((each) => each.loading.length).map((each) => `broker ${each.broker}`);
  return [
    table({
      label: "Groups", rows: rows.slice(0, SHOWN_GROUPS), key: (row) => row.group,
      empty: "No group has committed an offset of this partition.",
      columns: [
        { name: "Group", cell: "name", of: (row) => link(route("groups", row.group), row.group) },
        { name: "Read", of: (row) => row.has_read ? badge("ok", "Yes") : badge("warn", "Not yet") },
        { name: "Committed", number: true, of: (row) => count(row.committed) },
        { name: "Last commit", number: true, wide: true, of: (row) => moment(row.commit_ms) },
      ],
    }),
    more > 0 && h("p", { class: "small muted" }, `${plural(more, "more group")} not shown.`),
    loading.length > 0 && h("p", { class: "small muted" }, `Still being loaded, and not shown: groups of ${loading.join(", ")}.`),
  ];
}
