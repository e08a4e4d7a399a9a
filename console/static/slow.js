// The slowest requests of the last hour on all brokers, and what each spent its time on.

import { h } from "./dom.js";
import { all } from "./api.js";
import { clock, command, count, duration, moment, plural } from "./format.js";
import { card, cli, head, link, missing, route, table } from "./ui.js";

export const every = 5000;
const ASKED = 25; // of each kind and broker
const SHOWN = 50;
let kind = "";
let topic = "";
let order = "took";
const kinds = new Set(["Produce", "Fetch"]); // that were seen: a list that is narrowed to one would lose the others

const ABOUT = {
  queue: "behind earlier requests of its connection",
  check: "CRC of large batches, and their recompression",
  append: "decoding, and the append to the log",
  room: "for room in the log or the cache, or for a partition that opens",
  sync: "until this broker's disk had it",
  replication: "until the quorum had it",
  read: "reads from the bucket",
  handler: "all other work on it",
  response: "from the answer to the socket",
};

export async function load({ signal }) {
  const found = await all("requests/slow", { limit: ASKED, api: kind, topic }, signal);
  for (const answer of Object.values(found.answers)) for (const each of answer.requests) kinds.add(each.api);
  return found;
}

const ORDERS = {
  took: ["Longest", (row) => row.duration_ms],
  ended: ["Newest", (row) => row.ended_ms],
};

function rank(row) {
  return ORDERS[order] ? ORDERS[order][1](row) : row.stages_ms[order] || 0;
}

export function draw({ answers, errors }, context) {
  const told = Object.entries(answers).map(([broker, answer]) => ({ ...answer, broker }));
  const stages = told.length ? told[0].stages : Object.keys(ABOUT);
  const found = told
    .flatMap((answer) => answer.requests.map((each) => ({ ...each, broker: answer.broker })))
    .filter((each) => (!kind || each.api === kind) && (!topic || each.topic === topic)) // what is drawn may be of before
    .sort((a, b) => b.duration_ms - a.duration_ms)
    .slice(0, SHOWN);
  const rows = [...found].sort((a, b) => rank(b) - rank(a));
  const running = told.flatMap((answer) => answer.running.map((each) => ({ ...each, broker: answer.broker })));
  return [
    head({ title: "Slow requests", lead: "The slowest of the last hour on each broker, and what they spent their time on. What a client asked to wait for does not count." }),
    missing(errors),
    running.length > 0 && h("section", { class: "card", "data-key": "running" },
      h("h2", {}, "Not answered yet, for more than a second"),
      table({ label: "Requests that are not answered yet", rows: running, key: (row) => `${row.broker}:${row.client_id}:${row.api}`, columns: [
        { name: "Request", of: (row) => row.api },
        { name: "For", number: true, of: (row) => duration(row.age_ms) },
        { name: "Broker", number: true, of: (row) => row.broker },
        { name: "Client", cell: "name", of: (row) => h("span", { class: "user" }, row.client_id) },
      ] })),
    rows.length > 0 && card("Where their time went", whole(rows, stages)),
    h("section", { class: "card", "data-key": "slow" },
      h("h2", {}, rows.length ? `The slowest ${count(rows.length)}` : "The slowest"),
      controls(stages, context),
      list(rows, stages, told)),
    card("On the command line", cli(command("tidelog", "explain", "--slow", "--limit", ASKED,
      ...(kind ? ["--api", kind] : []), ...(topic ? ["--topic", topic] : [])))),
    told.length > 0 && h("p", { class: "small muted" }, told.map(kept).join(" ")),
  ];
}

function kept(answer) {
  return `Broker ${answer.broker} keeps ${plural(answer.kept, "request")}, since ${moment(Math.max(answer.since_ms, answer.now_ms - 3600000))}.`;
}

function controls(stages, context) {
  const choice = (name, of) => (event) => {
    of(event.target.value);
    context.redraw();
  };
  return h("div", { class: "stack after-last" },
    h("div", { class: "fields" },
      h("label", { for: "kind" }, "Kind of request",
        h("select", { id: "kind", onchange: choice("kind", (value) => {
          kind = value;
        }) }, ["", ...[...kinds].sort()].map((each) => h("option", { value: each, selected: each === kind }, each || "All kinds")))),
      h("label", { for: "topic" }, "Topic",
        h("input", { id: "topic", type: "search", placeholder: "all", autocomplete: "off", spellcheck: "false", value: topic, onchange: choice("topic", (value) => {
          topic = value.trim();
        }) })),
      h("label", { for: "order" }, "First",
        h("select", { id: "order", onchange: choice("order", (value) => {
          order = value;
        }) },
          Object.entries(ORDERS).map(([value, [text]]) => h("option", { value, selected: value === order }, text)),
          stages.map((each) => h("option", { value: each, selected: each === order }, `Most ${each}`))))),
    h("p", { class: "small muted" }, "A request's topic is that of its first partition."));
}

function list(rows, stages, told) {
  const longest = Math.max(1, ...rows.map((each) => each.duration_ms));
  return table({
    label: "Slowest requests", rows, key: (row) => [row.broker, row.ended_ms, row.duration_ms, row.api, row.topic, row.partition, row.client_id].join(":"),
    empty: emptiness(told),
    columns: [
      { name: "Request", cell: "name", of: (row) => h("div", {}, row.api,
        row.error_code !== 0 && h("span", { class: "small bad-text" }, row.error_code < 0 ? " not answered" : ` error ${row.error_code}`),
        h("div", { class: "small" }, place(row))) },
      { name: "Took", number: true, of: (row) => duration(row.duration_ms) },
      { name: "Spent on", cell: "spend", of: (row) => spent(row, stages, longest) },
      { name: "Ended", number: true, wide: true, of: (row) => clock(row.ended_ms) },
      { name: "Broker", number: true, wide: true, of: (row) => row.broker },
      { name: "Client", cell: "name", wide: true, of: (row) => h("span", { class: "user" }, row.client_id || row.client_host) },
    ],
  });
}

function place(row) {
  if (row.topic === null) return h("span", { class: "muted" }, `on broker ${row.broker}`);
  return [link(route("topics", row.topic, row.partition), `${row.topic}:${row.partition}`),
    row.partitions > 1 && h("span", { class: "muted" }, ` and ${count(row.partitions - 1)} more`)];
}

function emptiness(told) {
  if (!told.length) return "No broker tells of slow requests; what each says is above. A broker with kafka.slow_requests = 0 records none.";
  if (kind || topic) return "None of the slowest requests of the last hour is so. The name of a topic has to be written in full.";
  return "No client has sent a request yet. The slowest of each minute are kept for an hour, from a broker's start on.";
}

// The parts of one bar, in the order in which they happen; its text says the longest ones, its label all.
function spent(row, stages, longest) {
  const parts = stages.map((name, at) => ({ name, at, ms: row.stages_ms[name] || 0 })).filter((each) => each.ms > 0);
  const most = [...parts].sort((a, b) => b.ms - a.ms).filter((each, at) => at === 0 || (at < 2 && each.ms * 20 >= row.duration_ms));
  return h("div", { class: "stages" },
    bar(parts, `${row.api} took ${duration(row.duration_ms)}: ${parts.map((each) => `${each.name} ${duration(each.ms)}`).join(", ")}`, row.duration_ms / longest),
    h("span", { class: "small muted" }, most.map((each) => `${each.name} ${duration(each.ms)}`).join(", ")));
}

function bar(parts, said, share) {
  return h("div", { class: "spent", role: "img", "aria-label": said, title: said, style: { width: `${Math.max(2, share * 100).toFixed(1)}%` } },
    parts.map((each) => h("i", { class: `b${each.at % 9}`, style: { "flex-grow": each.ms.toFixed(3) } })));
}

// All of them together, which is also the legend of the bars.
function whole(rows, stages) {
  const total = rows.reduce((sum, each) => sum + each.duration_ms, 0);
  const parts = stages.map((name, at) => ({ name, at, ms: rows.reduce((sum, each) => sum + (each.stages_ms[name] || 0), 0) })).filter((each) => each.ms > 0);
  const percent = (ms) => ms * 100 >= total ? `${Math.round((ms / total) * 100)} %` : "<1 %";
  return [
    h("div", { class: "stages" }, bar(parts, `Of all of them: ${parts.map((each) => `${each.name} ${percent(each.ms)}`).join(", ")}`, 1)),
    h("ul", { class: "keys" }, [...parts].sort((a, b) => b.ms - a.ms).map((each) =>
      h("li", {}, h("i", { class: `b${each.at % 9}` }), h("b", {}, each.name), h("span", { class: "num" }, percent(each.ms)),
        h("span", { class: "muted" }, ABOUT[each.name])))),
  ];
}
