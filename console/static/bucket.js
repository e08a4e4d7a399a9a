// Requests to the bucket and what they cost, by purpose and by topic; what is stored.

import { h } from "./dom.js";
import { all, get } from "./api.js";
import { bytes, count, duration, money, short } from "./format.js";
import { card, facts, head, link, missing, route, table, tile } from "./ui.js";
import { figure, histories, last, summed } from "./history.js";
import { plot } from "./plot.js";

export const every = 10000;
const KINDS = ["put", "list", "get", "head", "delete"];

export async function load({ signal }) {
  const [cost, past] = await Promise.all([get("cost", null, signal), all("history", null, signal)]);
  return { cost, past: histories(past) };
}

export function draw({ cost, past }) {
  const measured = Math.max(...cost.nodes.map((each) => each.seconds));
  const requests = summed(past.map((each) => figure(each, "bucket_requests")), 10000);
  const rough = measured < 600;
  return [
    head({ title: "Bucket", lead: [h("code", { class: "user" }, cost.bucket), `, measured over ${duration(measured * 1000)}`] }),
    missing(cost.errors),
    h("section", { class: "tiles", "aria-label": "Costs" },
      tile("So far", money(cost.total.cost), cost.currency),
      tile(rough ? "A month, roughly" : "A month", money(cost.total.cost_per_month), cost.currency),
      tile("A GB written", money(cost.total.cost_per_gb_written), cost.total.cost_per_gb_written === null ? null : cost.currency),
      tile("Stored", bytes(cost.stored.bytes), `${short(cost.stored.objects)} objects`),
      tile("Requests now", last(requests) === null ? "–" : short(last(requests)), "/s")),
    rough && h("p", { class: "small muted" }, "Uploads and compactions come in bursts: a month is a good guess only after ten minutes or more."),
    h("div", { class: "two" },
      card("Requests, each broker", plot({ title: "Requests to the bucket by broker", key: "plot:requests", format: (value) => `${short(value)}/s`,
        series: past.map((each) => ({ name: `Broker ${each.broker}`, points: figure(each, "bucket_requests") })) })),
      card("Bytes", plot({ title: "Bytes to and from the bucket", key: "plot:bytes", format: (value) => `${bytes(value)}/s`,
        series: [["Sent", "bucket_sent_bytes"], ["Received", "bucket_received_bytes"]].map(([name, of]) => ({ name, points: summed(past.map((each) => figure(each, of)), 10000) })) }))),
    h("section", { class: "card", "data-key": "purposes" }, h("h2", {}, "By purpose"),
      costs("Costs by purpose", cost.purposes.filter((each) => Object.keys(each.requests).length), "Purpose", (row) => row.purpose, cost.currency)),
    h("section", { class: "card", "data-key": "topics" }, h("h2", {}, "By topic"),
      costs("Costs by topic", cost.topics.slice(0, 200), "Topic", (row) => row.topic === null ? h("span", { class: "muted" }, "shared by several") : row.topic === "__other__" ? "other topics" : link(route("topics", row.topic), row.topic), cost.currency, true),
      cost.topics.length > 200 && h("p", { class: "small muted" }, `${count(cost.topics.length - 200)} more: tidelog cost`)),
    card("Prices", facts([
      ["Table", h("span", { class: "user" }, cost.prices.name)],
      ...Object.entries(cost.prices.requests_per_1000).map(([kind, price]) => [`1,000 ${kind} requests`, money(price, cost.currency)]),
      ["A GB received", money(cost.prices.transfer_per_gb.received, cost.currency)],
      ["A GB sent", money(cost.prices.transfer_per_gb.sent, cost.currency)],
      ["A GB stored for a month", money(cost.prices.storage_per_gb_month.stored, cost.currency)],
    ], true)),
  ];
}

function costs(label, rows, first, name, currency, isTopic) {
  return table({
    label, rows, key: (row) => row.purpose || String(row.topic), empty: "No request to the bucket yet.",
    columns: [
      { name: first, cell: "name", of: name },
      ...KINDS.map((kind) => ({ name: kind.toUpperCase(), number: true, wide: true, of: (row) => row.requests[kind] ? count(Math.round(row.requests[kind] * 10) / 10) : "0" })),
      { name: "Received", number: true, wide: true, of: (row) => bytes(row.received_bytes) },
      { name: "Sent", number: true, wide: true, of: (row) => bytes(row.sent_bytes) },
      isTopic && { name: "Stored", number: true, of: (row) => bytes(row.stored_bytes) },
      { name: "So far", number: true, of: (row) => money(row.cost) },
      { name: `A month, ${currency}`, number: true, of: (row) => money(row.cost_per_month) },
    ].filter(Boolean),
  });
}
