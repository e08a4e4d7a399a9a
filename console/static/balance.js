// What each broker carries, what the balancer would do about it, and drains; each with its dry run.

import { h } from "./dom.js";
import { any, change } from "./api.js";
import { bytes, command, count, moment, plural, short } from "./format.js";
import { badge, card, confirm, facts, head, link, meter, route, table } from "./ui.js";

export const every = 5000;

export async function load({ signal }) {
  const [status, brokers, plan, scale] = await Promise.all([
    any("balancer", null, signal), any("brokers", null, signal), any("balancer/plan", null, signal),
    any("scale", null, signal).catch((error) => ({ error })),
  ]);
  return { status, brokers: brokers.brokers, plan, scale };
}

export function draw({ status, brokers, plan, scale }, context) {
  const loads = new Map(status.brokers.map((each) => [each.id, each]));
  const most = (name) => Math.max(1, ...status.brokers.map((each) => each[name] || 0));
  const tops = { partitions: most("partitions"), bytes_in: most("bytes_in"), bytes_out: most("bytes_out") };
  return [
    head({
      title: "Balance", lead: ["Mode ", h("b", {}, status.mode), status.mode !== status.configured_mode && ` (configured: ${status.configured_mode})`,
        status.planned_at_ms ? `, last look ${moment(status.planned_at_ms)}` : ""],
      actions: [
        h("button", { type: "button", onclick: () => setMode(status, context) }, "Change the mode…"),
        h("button", { class: "primary", type: "button", disabled: !plan.total, onclick: () => run(plan, context) }, "Carry out the plan…"),
      ],
    }),
    h("section", { class: "card", "data-key": "loads" },
      h("h2", {}, "What brokers carry"),
      table({
        label: "Load of the brokers", rows: brokers, key: (row) => row.id,
        columns: [
          { name: "Broker", of: (row) => String(row.id) },
          { name: "State", of: (row) => badge({ alive: "ok", dead: "bad" }[row.state] || "warn", row.state[0].toUpperCase() + row.state.slice(1)) },
          { name: "Rack", wide: true, of: (row) => row.rack && h("span", { class: "user" }, row.rack) },
          { name: "Partitions", number: true, of: (row) => loaded(count(row.partitions), row.partitions, tops.partitions, "Partitions") },
          { name: "In", number: true, of: (row) => rate(loads.get(row.id), "bytes_in", tops) },
          { name: "Out", number: true, wide: true, of: (row) => rate(loads.get(row.id), "bytes_out", tops) },
          { name: "Requests", number: true, wide: true, of: (row) => loads.get(row.id)?.requests === null || !loads.has(row.id) ? null : `${short(loads.get(row.id).requests)}/s` },
          { name: "CPU", number: true, of: (row) => loads.get(row.id)?.cpu_percent === null || !loads.has(row.id) ? null : `${Math.round(loads.get(row.id).cpu_percent)} %` },
          { name: "Action", of: (row) => row.state === "dead" ? null : h("button", { class: "plain", type: "button", "aria-label": `${row.drain === "none" ? "Drain" : "End the drain of"} broker ${row.id}`, onclick: () => drain(row, context) }, row.drain === "none" ? "Drain…" : "End the drain…") },
        ],
      })),
    card("Plan, if it were made now",
      plan.findings.length > 0 && h("ul", { class: "stack muted" }, plan.findings.map((each) => h("li", {}, each))),
      planTable(plan)),
    card("Brokers wanted", scale.error ? h("p", { class: "muted" }, scale.error.message) : facts([
      ["Wanted for the load", count(scale.wanted)],
      ["There are", count(scale.brokers ?? scale.alive ?? brokers.filter((each) => each.state === "alive").length)],
      ["Why", h("span", { class: "user" }, Array.isArray(scale.why) ? scale.why.join("; ") : scale.why || scale.reason || "")],
    ], true)),
  ];
}

function loaded(text, value, most, label) {
  return h("div", { class: "stack", style: { gap: "2px", "min-width": "84px" } }, text, meter(value, most, `${label}, of the most that one has`, false));
}

function rate(row, name, tops) {
  if (!row || row[name] === null) return null;
  return loaded(`${bytes(row[name])}/s`, row[name], tops[name], name === "bytes_in" ? "In" : "Out");
}

function planTable(plan) {
  return [
    table({
      label: "Planned moves", rows: plan.moves.slice(0, 100), key: (row) => `${row.topic}:${row.partition}`,
      empty: "Nothing to move.",
      columns: [
        { name: "Partition", cell: "name", of: (row) => link(route("topics", row.topic, row.partition), `${row.topic}:${row.partition}`) },
        { name: "From", number: true, of: (row) => row.from },
        { name: "To", number: true, of: (row) => row.to },
        { name: "Goal", of: (row) => row.goal },
        { name: "Why", cell: "name", wide: true, of: (row) => row.why },
      ],
    }),
    plan.total > 100 && h("p", { class: "small muted" }, `${count(plan.total - 100)} more: tidelog balancer plan`),
  ];
}

function run(plan, context) {
  confirm({
    title: "Carry out the plan", label: `Move ${plural(plan.total, "partition")}`,
    line: () => command("tidelog", "balancer", "run", "--no-wait"),
    preview: async () => {
      const fresh = await any("balancer/plan");
      return { node: h("div", { class: "stack" }, h("p", {}, `${plural(fresh.total, "partition")} would move.`), planTable(fresh)), hindrance: fresh.total ? null : "Nothing is to be moved." };
    },
    act: () => change("balancer/run"),
    done: (answer) => {
      context.redraw();
      return `${plural(answer.total, "move")} begun. The page of moves shows them.`;
    },
  });
}

function setMode(status, context) {
  const choice = h("select", { id: "mode" }, [["off", "off: nothing is planned"], ["advise", "advise: planned and told"], ["on", "on: planned and carried out"], ["", `configured: ${status.configured_mode}`]]
    .map(([value, text]) => h("option", { value, selected: value === status.mode }, text)));
  confirm({
    title: "Mode of the balancer", label: "Set it",
    line: () => command("tidelog", "balancer", "mode", choice.value || "configured"),
    preview: async () => ({ node: h("div", { class: "stack" }, h("label", { for: "mode" }, "Mode", choice), h("p", { class: "muted small" }, "It holds for the whole cluster and over restarts. Nothing has changed yet.")) }),
    act: () => change("balancer/mode", choice.value ? { set: choice.value } : {}),
    done: (answer) => {
      context.redraw();
      return `The mode is ${answer.mode} now.`;
    },
  });
}

function drain(broker, context) {
  const cancel = broker.drain !== "none";
  confirm({
    title: cancel ? `End the drain of broker ${broker.id}` : `Drain broker ${broker.id}`,
    label: cancel ? "End it" : "Drain it", danger: !cancel,
    line: () => command("tidelog", "broker", "drain", broker.id, ...(cancel ? ["--cancel"] : ["--no-wait"])),
    preview: async () => {
      if (cancel) return { node: h("p", {}, "Partitions that are on their way go on; the others stay, and new ones may come.") };
      const { moves } = await any("brokers/plan", { id: broker.id });
      const targets = new Map();
      for (const each of moves) targets.set(each.to, (targets.get(each.to) || 0) + 1);
      return { node: h("div", { class: "stack" },
        h("p", {}, `${plural(moves.length, "partition")} would leave, and nothing new would be placed on it.`),
        table({ label: "Where they would go", rows: [...targets].sort((a, b) => a[0] - b[0]), key: (row) => row[0],
          empty: "It owns no partition.",
          columns: [{ name: "To broker", number: true, of: (row) => String(row[0]) }, { name: "Partitions", number: true, of: (row) => count(row[1]) }] })) };
    },
    act: () => change("brokers/drain", cancel ? { id: String(broker.id), cancel: "true" } : { id: String(broker.id) }),
    done: () => {
      context.redraw();
      return cancel ? "The drain has ended." : "The cluster drains it, also when this page is closed.";
    },
  });
}
