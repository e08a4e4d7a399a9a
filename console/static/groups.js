// Consumer groups: how far behind they are, how that went in the last hour, and what resetting would do.

import { h, replace } from "./dom.js";
import { all, get, post } from "./api.js";
import { command, count, plural, short } from "./format.js";
import { badge, cli, failure, head, link, missing, route, table } from "./ui.js";
import { histories, last, points, summed } from "./history.js";
import { plot } from "./plot.js";

export const every = 4000;
const STATES = { stable: "ok", empty: "warn", dead: "bad", "preparing-rebalance": "warn", "completing-rebalance": "warn" };

export async function load({ parts, signal }) {
  if (!parts[0]) return { kind: "list", ...(await get("groups", null, signal)) };
  const found = await get("group", { name: parts[0] }, signal);
  const topics = [...new Set(found.partitions.map((each) => each.topic))];
  const past = topics.length ? await all("history/offsets", { topic: topics.slice(0, 100), group: found.group }, signal) : { answers: {}, errors: {} };
  return { kind: "group", found, past };
}

export function draw(data, context) {
  return data.kind === "list" ? drawList(data) : drawGroup(data, context);
}

function drawList({ groups, left_out: leftOut, errors }) {
  const sorted = [...groups].sort((a, b) => b.lag - a.lag || (a.group < b.group ? -1 : 1));
  return [
    head({ title: "Consumer groups", lead: "Lag is the high watermark minus the committed offset, over all partitions." }),
    errors.length > 0 && missing(Object.fromEntries(errors.entries())),
    h("section", { class: "card", "data-key": "groups" }, table({
      label: "Consumer groups", rows: sorted, key: (row) => row.group,
      empty: "No consumer group has committed an offset or joined yet.",
      columns: [
        { name: "Group", cell: "name", of: (row) => link(route("groups", row.group), row.group) },
        { name: "State", of: (row) => badge(STATES[row.state] || "warn", row.state) },
        { name: "Members", number: true, wide: true, of: (row) => count(row.members) },
        { name: "Lag", number: true, of: (row) => row.unknown ? `${count(row.lag)} and more` : count(row.lag) },
        { name: "Partitions", number: true, wide: true, of: (row) => count(row.partitions) },
        { name: "Topics", cell: "name", wide: true, of: (row) => h("span", { class: "user" }, row.topics.slice(0, 4).join(", ") + (row.topics.length > 4 ? ` and ${row.topics.length - 4} more` : "")) },
        { name: "Coordinator", number: true, wide: true, of: (row) => row.coordinator },
      ],
    })),
    leftOut > 0 && h("p", { class: "muted" }, `${count(leftOut)} more are not shown: tidelog group list`),
  ];
}

function lagSeries(found, past) {
  const all = histories(past);
  const step = 30000;
  const byTopic = new Map();
  for (const row of found.partitions) {
    const of = (name) => all.flatMap((each) => points(each, name)).sort((a, b) => a[0] - b[0]);
    const ends = new Map(of(`end/${row.topic}/${row.partition}`).map(([at, value]) => [Math.round(at / step), value]));
    const lag = of(`committed/${row.topic}/${row.partition}/${found.group}`)
      .map(([at, value]) => [at, ends.get(Math.round(at / step)), value])
      .filter(([, end]) => end !== undefined)
      .map(([at, end, value]) => [at, Math.max(0, end - value)]);
    if (lag.length) byTopic.set(row.topic, [...(byTopic.get(row.topic) || []), lag]);
  }
  return [...byTopic].map(([topic, lists]) => ({ name: topic, points: summed(lists, step) }));
}

function drawGroup({ found, past }, context) {
  const known = found.partitions.filter((each) => each.lag !== null);
  const lag = known.reduce((sum, each) => sum + each.lag, 0);
  const series = lagSeries(found, past);
  const trend = series.length ? growth(summed(series.map((each) => each.points), 30000)) : null;
  const leftOut = histories(past).reduce((sum, each) => sum + each.left_out, 0);
  const members = new Map(found.members.map((each) => [each.member_id, each]));
  return [
    head({
      title: found.group, user: true, crumbs: [["Consumer groups", "#/groups"]],
      lead: [badge(STATES[found.state] || "warn", found.state), ` ${plural(found.members.length, "member")}, ${plural(lag, "offset")} behind${trend ? `, ${trend}` : ""}`],
      actions: h("button", { type: "button", onclick: () => reset(found, context) }, "Reset offsets…"),
    }),
    missing(past.errors),
    h("section", { class: "card", "data-key": "lag" },
      h("h2", {}, "Lag in the last hour, by topic"),
      plot({ title: "Lag by topic", series, format: short, gap: 100000, key: "plot:lag", wide: true }),
      leftOut > 0 && h("p", { class: "small muted" }, `Brokers keep the history of 1,000 partitions and 1,000 committed offsets each; ${count(leftOut)} found no place in it.`)),
    h("section", { class: "card", "data-key": "partitions" },
      h("h2", {}, "Partitions"),
      table({
        label: "Partitions", rows: found.partitions, key: (row) => `${row.topic}:${row.partition}`,
        empty: "The group has no committed offset and no assignment.",
        columns: [
          { name: "Partition", cell: "name", of: (row) => link(route("topics", row.topic, row.partition), `${row.topic}:${row.partition}`) },
          { name: "Committed", number: true, of: (row) => row.committed === null ? null : count(row.committed) },
          { name: "High watermark", number: true, wide: true, of: (row) => row.high_watermark === null ? null : count(row.high_watermark) },
          { name: "Lag", number: true, of: (row) => row.lag === null ? null : count(row.lag) },
          { name: "Member", cell: "name", wide: true, of: (row) => row.member_id && h("span", { class: "user" }, members.get(row.member_id)?.client_id || row.member_id) },
        ],
      })),
    found.members.length > 0 && h("section", { class: "card", "data-key": "members" },
      h("h2", {}, "Members"),
      table({
        label: "Members", rows: found.members, key: (row) => row.member_id,
        columns: [
          { name: "Client", cell: "name", of: (row) => h("span", { class: "user" }, row.client_id) },
          { name: "Host", of: (row) => h("span", { class: "user" }, row.host) },
          { name: "Partitions", number: true, of: (row) => count(row.partitions) },
          { name: "Member id", cell: "name", wide: true, of: (row) => h("span", { class: "user small" }, row.instance_id || row.member_id) },
        ],
      })),
  ];
}

function growth(list) {
  const now = last(list, 120000);
  const before = list.filter(([at]) => at < Date.now() - 270000).pop();
  if (now === null || !before) return null;
  const minutes = (list[list.length - 1][0] - before[0]) / 60000;
  const each = (now - before[1]) / minutes;
  if (Math.abs(each) < 1) return "steady";
  return each > 0 ? `growing by ${short(each)} a minute` : `shrinking by ${short(-each)} a minute`;
}

function reset(found, context) {
  const topics = [...new Set(found.partitions.map((each) => each.topic))];
  const topic = topics.length
    ? h("select", { id: "reset-topic" }, topics.map((each) => h("option", { value: each }, each)))
    : h("input", { id: "reset-topic", required: true });
  const to = h("select", { id: "reset-to" },
    [["earliest", "The earliest offset"], ["latest", "The latest offset"], ["time", "A time"], ["offset", "An offset"], ["shift", "Shift by"]]
      .map(([value, text]) => h("option", { value }, text)));
  const value = h("input", { id: "reset-value", inputmode: "numeric", placeholder: "e.g. -100" });
  const when = h("input", { id: "reset-when", type: "datetime-local", step: "1" });
  const valueField = h("label", { for: "reset-value" }, "Value", value);
  const whenField = h("label", { for: "reset-when" }, "Time, yours", when);
  const only = h("input", { id: "reset-partitions", placeholder: "all", inputmode: "numeric" });
  const result = h("div", {});
  const go = h("button", { class: "danger", type: "button", disabled: true }, "Reset");
  const told = h("div", {});
  const dialog = h("dialog", { "aria-labelledby": "reset-title" });

  function order() {
    const chosen = only.value.split(/[\s,]+/).filter(Boolean);
    if (chosen.some((each) => !/^\d+$/.test(each))) throw new Error("Partitions are numbers, separated by commas.");
    const wanted = { group: found.group, topic: topic.value, to: to.value };
    if (chosen.length) wanted.partitions = chosen.map(Number);
    if (to.value === "time") {
      if (!when.value) throw new Error("Choose a time.");
      wanted.value = new Date(when.value).getTime();
    } else if (to.value === "offset" || to.value === "shift") {
      if (!/^-?\d{1,15}$/.test(value.value.trim())) throw new Error("The value is a whole number.");
      wanted.value = Number(value.value.trim());
    }
    return wanted;
  }

  function line() {
    const wanted = order();
    const flag = { earliest: ["--to-earliest"], latest: ["--to-latest"], time: ["--to-datetime", wanted.value], offset: ["--to-offset", wanted.value], shift: ["--shift-by", wanted.value] }[wanted.to];
    return command("tidelog", "group", "reset-offsets", found.group, "--topic", wanted.topic, ...(wanted.partitions || []).flatMap((each) => ["--partition", each]), ...flag);
  }

  let asked = 0;
  async function preview() {
    valueField.hidden = !["offset", "shift"].includes(to.value);
    whenField.hidden = to.value !== "time";
    go.disabled = true;
    const number = (asked += 1);
    try {
      const wanted = order();
      told.replaceChildren(cli(line()));
      const planned = await post("group/reset", wanted);
      if (number !== asked) return;
      replace(result,
        planned.hindrance && h("p", { class: "notice warn" }, `${planned.hindrance}. Stop them first.`),
        effect(planned.partitions));
      go.disabled = Boolean(planned.hindrance);
    } catch (error) {
      if (number === asked) replace(result, failure(error));
    }
  }

  go.onclick = async () => {
    go.disabled = true;
    try {
      const done = await post("group/reset", { ...order(), dry_run: false });
      replace(result, h("p", { class: "notice", role: "status" }, `Done: ${plural(done.partitions.length, "partition")} changed.`), effect(done.partitions));
      context.redraw();
    } catch (error) {
      replace(result, failure(error));
    }
  };
  dialog.append(h("div", { class: "stack", onchange: preview },
    h("h2", { id: "reset-title", class: "user" }, `Reset offsets of ${found.group}`),
    h("div", { class: "fields" },
      h("label", { for: "reset-topic" }, "Topic", topic),
      h("label", { for: "reset-to" }, "To", to), valueField, whenField,
      h("label", { for: "reset-partitions" }, "Partitions", only)),
    h("h3", {}, "What it would do"), result,
    h("div", {}, h("p", { class: "small muted" }, "On the command line"), told),
    h("div", { class: "row between" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close"), go)));
  dialog.onclose = () => dialog.remove();
  document.body.append(dialog);
  dialog.showModal();
  preview();
}

function effect(rows) {
  const again = rows.reduce((sum, row) => sum + Math.max(0, (row.before ?? row.high_watermark) - row.after), 0);
  const skipped = rows.reduce((sum, row) => sum + Math.max(0, row.after - (row.before ?? row.log_start_offset)), 0);
  return h("div", { class: "stack" },
    h("p", {}, again ? `${plural(again, "offset")} would be read again. ` : "", skipped ? `${plural(skipped, "offset")} would be skipped.` : "", !again && !skipped ? "Nothing would change." : ""),
    table({
      label: "Offsets before and after", rows, key: (row) => row.partition,
      columns: [
        { name: "Partition", number: true, of: (row) => String(row.partition) },
        { name: "Before", number: true, of: (row) => row.before === null ? null : count(row.before) },
        { name: "After", number: true, of: (row) => count(row.after) },
        { name: "Lag after", number: true, of: (row) => count(row.high_watermark - row.after) },
      ],
    }));
}
