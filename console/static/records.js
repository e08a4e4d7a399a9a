// Records of a topic: the newest, from a place, by key or text, live; and one record to write.
//
// What a record holds is shown as text and never as anything else.

import { h, replace } from "./dom.js";
import { any, post, stream } from "./api.js";
import { bytes, command, count, moment, plural } from "./format.js";
import { cli, failure, head, link, route } from "./ui.js";

const KEPT = 500; // records on the page; older ones of a live tail are dropped

export async function mount({ query, signal }) {
  const form = searchForm(query);
  const status = h("p", { class: "muted", role: "status" });
  const list = h("div", { class: "records" });
  const stop = h("button", { type: "button", hidden: true }, "Stop");
  const told = h("div", {});
  let running = null;
  signal.addEventListener("abort", () => running && running.abort());
  stop.onclick = () => running && running.abort();

  const line = () => told.replaceChildren(cli(consumeLine(form.values())));
  form.node.onchange = () => {
    const value = form.start.value;
    form.valueField.hidden = value !== "offset";
    form.whenField.hidden = value !== "time";
    try {
      line();
    } catch (error) {
      replace(told, failure(error));
    }
  };
  form.node.onsubmit = async (event) => {
    event.preventDefault();
    if (running) running.abort();
    let wanted;
    try {
      wanted = form.values();
      line();
    } catch (error) {
      replace(list, failure(error));
      return;
    }
    const mine = (running = new AbortController());
    replace(list);
    stop.hidden = false;
    status.textContent = wanted.follow ? "Waiting for new records…" : "Searching…";
    const seen = { shown: 0, dropped: 0 };
    try {
      await stream("records", wanted, mine.signal, (told) => take(told, wanted, list, status, seen));
    } catch (error) {
      if (error.name === "AbortError") status.textContent = `Stopped. ${plural(seen.shown, "record")} came.`;
      else {
        status.textContent = "";
        list.prepend(failure(error));
      }
    }
    if (running === mine) {
      running = null;
      stop.hidden = true;
    }
  };
  form.node.onchange();
  if (query.get("topic")) setTimeout(() => form.node.isConnected && form.node.requestSubmit(), 0); // once it is on the page
  fillTopics(form.topics, signal);
  return h("div", { class: "page" },
    head({ title: "Records", lead: "Read without a consumer group: nothing is committed." }),
    h("section", { class: "card stack" }, h("h2", {}, "Read"), form.node, told),
    h("section", { class: "card" },
      h("div", { class: "row between" }, h("h2", {}, "Found"), stop), status, list),
    h("section", { class: "card stack" }, h("h2", {}, "Write one record"), produceForm(query)));
}

async function fillTopics(datalist, signal) {
  try {
    const { topics } = await any("topics", { limit: 1000 }, signal);
    replace(datalist, topics.filter((each) => !each.internal).map((each) => h("option", { value: each.name })));
  } catch {
    // names can be typed without the list
  }
}

function searchForm(query) {
  const topics = h("datalist", { id: "topic-names" });
  const topic = h("input", { id: "topic", required: true, list: "topic-names", value: query.get("topic") || "", autocomplete: "off", spellcheck: "false" });
  const partition = h("input", { id: "partition", inputmode: "numeric", pattern: "[0-9]*", placeholder: "all", value: query.get("partition") || "" });
  const start = h("select", { id: "start" },
    [["last", "The newest"], ["follow", "New ones, live"], ["beginning", "The beginning"], ["time", "A time"], ["offset", "An offset"]]
      .map(([value, text]) => h("option", { value, selected: value === (query.get("start") || "last") }, text)));
  const value = h("input", { id: "value", inputmode: "numeric", pattern: "[0-9]*", value: query.get("value") || "0" });
  const when = h("input", { id: "when", type: "datetime-local", step: "1" });
  const key = h("input", { id: "key", placeholder: "any", autocomplete: "off", spellcheck: "false", "aria-describedby": "hexhint" });
  const contains = h("input", { id: "contains", placeholder: "any", autocomplete: "off", spellcheck: "false", "aria-describedby": "hexhint" });
  const limit = h("select", { id: "limit" }, [20, 100, 500].map((each) => h("option", { value: String(each), selected: each === 100 }, count(each))));
  const committed = h("input", { id: "committed", type: "checkbox" });
  const valueField = h("label", { for: "value" }, "Offset", value);
  const whenField = h("label", { for: "when" }, "Time, yours", when);
  const node = h("form", { class: "stack" },
    topics,
    h("div", { class: "fields" },
      h("label", { for: "topic" }, "Topic", topic),
      h("label", { for: "partition" }, "Partition", partition),
      h("label", { for: "start" }, "From", start), valueField, whenField,
      h("label", { for: "key" }, "Key is", key),
      h("label", { for: "contains" }, "Key or value contains", contains),
      h("label", { for: "limit" }, "At most", limit)),
    h("div", { class: "row between" },
      h("label", { class: "check" }, committed, "Committed transactions only"),
      h("button", { class: "primary", type: "submit" }, "Read")),
    h("p", { id: "hexhint", class: "small muted" }, "Text is matched as UTF-8; bytes are written as 0x and pairs of hexadecimal digits."));
  const values = () => {
    if (start.value === "time" && !when.value) throw new Error("Choose a time.");
    return {
      topic: topic.value.trim(), partition: partition.value,
      start: start.value === "follow" ? "end" : start.value,
      value: start.value === "offset" ? value.value || "0" : start.value === "time" ? String(new Date(when.value).getTime()) : "",
      key: key.value, contains: contains.value, limit: limit.value,
      follow: start.value === "follow" ? "true" : "false", committed: committed.checked ? "true" : "false",
    };
  };
  return { node, topics, start, valueField, whenField, values };
}

function consumeLine(wanted) {
  const from = {
    last: ["--offset", `-${wanted.limit}`, "--exit"], end: [], beginning: ["--from-beginning", "--max-records", wanted.limit],
    offset: ["--offset", wanted.value, "--max-records", wanted.limit], time: ["--at", wanted.value, "--max-records", wanted.limit],
  }[wanted.start];
  return command("tidelog", "consume", wanted.topic || "TOPIC", ...(wanted.partition ? ["--partition", wanted.partition] : []), ...from, "--format", "json");
}

function take(told, wanted, list, status, seen) {
  if (told.event === "record") {
    seen.shown += 1;
    const row = record(told, wanted.topic);
    if (wanted.follow === "true") list.prepend(row);
    else insert(list, row, told.timestamp_ms ?? -1);
    while (list.childElementCount > KEPT) {
      list.lastElementChild.remove();
      seen.dropped += 1;
    }
  }
  if (told.event === "progress" || told.event === "end") {
    const parts = [`${plural(told.sent, "record")} found, ${count(told.scanned)} read`];
    if (told.skipped) parts.push(`${count(told.skipped)} not shown: more came than a page can show`);
    if (seen.dropped) parts.push(`${count(seen.dropped)} older ones dropped from the page`);
    if (told.event === "end" && !["end", "limit"].includes(told.reason)) parts.push(told.reason);
    if (told.event === "end" && told.reason === "limit") parts.push("there may be more");
    status.textContent = `${parts.join("; ")}.`;
    if (told.event === "end" && !told.sent) replace(list, h("p", { class: "empty" }, "No record matches."));
  }
}

// Newest first, whatever partition they come from.
function insert(list, row, at) {
  row.dataset.at = String(at);
  for (const each of list.children) {
    if (Number(each.dataset.at) <= at) {
      list.insertBefore(row, each);
      return;
    }
  }
  list.append(row);
}

function record(told, topic) {
  const value = h("div", {}, content(told.value));
  const whole = told.value.cut && h("button", { class: "plain", type: "button", onclick: async (event) => {
    event.currentTarget.disabled = true;
    try {
      await stream("records", { topic, partition: told.partition, start: "offset", value: told.offset, limit: 1, full: true }, undefined,
        (found) => found.event === "record" && found.offset === told.offset && replace(value, content(found.value)));
    } catch (error) {
      replace(value, failure(error));
    }
  } }, "Show more of it");
  return h("article", { class: "record" },
    h("div", { class: "about" },
      link(route("topics", topic, told.partition), `${topic}:${told.partition}`),
      h("b", {}, `@${told.offset}`),
      told.timestamp_ms !== null && h("span", {}, moment(told.timestamp_ms)),
      h("span", {}, told.value.kind === "null" ? "null value" : `${bytes(told.value.size_bytes)} ${told.value.kind}`),
      told.value.schema !== undefined && h("span", {}, `schema ${told.value.schema}`),
      h("a", { href: route("topics", topic, told.partition, told.offset), "aria-label": `Where did it go: ${topic}:${told.partition}@${told.offset}` }, "Where did it go")),
    h("div", { class: "small" }, h("span", { class: "muted" }, "Key "),
      told.key.kind === "null" ? h("span", { class: "muted" }, "null") : h("code", { class: "user" }, told.key.text),
      told.key.cut && h("span", { class: "muted" }, ` … cut at ${bytes(told.key.text.length)} of ${bytes(told.key.size_bytes)}`)),
    told.value.problem && h("p", { class: "notice warn small user" }, `Not read by its schema: ${told.value.problem}`),
    value, whole,
    told.headers_unreadable && h("p", { class: "notice warn small" }, "It has headers that are not shown: the name of one is no UTF-8."),
    told.headers.length > 0 && h("details", {},
      h("summary", { class: "small" }, plural(told.headers.length + told.headers_left_out, "header")),
      told.headers.map(([name, held]) => h("div", { class: "small" }, h("code", { class: "user" }, name), " ",
        h("code", { class: "user" }, held.kind === "null" ? "null" : held.text), held.cut && " … cut")),
      told.headers_left_out > 0 && h("p", { class: "small muted" }, `${count(told.headers_left_out)} more are not shown.`)));
}

function content(held) {
  if (held.kind === "null") return h("p", { class: "muted small" }, "null: a tombstone on a compacted topic");
  if (held.text === "") return h("p", { class: "muted small" }, "empty");
  return h("div", {},
    h("pre", { class: "user", tabindex: "0" }, held.text),
    held.cut && h("p", { class: "muted small" }, `The first part of ${bytes(held.size_bytes)}.`));
}

function produceForm(query) {
  const topic = h("input", { id: "p-topic", required: true, list: "topic-names", value: query.get("topic") || "", autocomplete: "off", spellcheck: "false" });
  const partition = h("input", { id: "p-partition", inputmode: "numeric", pattern: "[0-9]*", placeholder: "by key" });
  const key = h("input", { id: "p-key", autocomplete: "off", spellcheck: "false" });
  const noKey = h("input", { id: "p-nokey", type: "checkbox", checked: true });
  const value = h("textarea", { id: "p-value", spellcheck: "false" });
  const tombstone = h("input", { id: "p-null", type: "checkbox" });
  const headers = h("textarea", { id: "p-headers", spellcheck: "false", placeholder: "name=value, one a line", style: { "min-height": "52px" } });
  const result = h("div", { role: "status" });
  const told = h("div", {});
  const go = h("button", { class: "primary", type: "button", disabled: true }, "Write it");

  const order = () => ({
    topic: topic.value.trim(), partition: partition.value ? Number(partition.value) : null,
    key: noKey.checked ? null : key.value, value: tombstone.checked ? null : value.value,
    headers: headers.value.split("\n").filter(Boolean).map((each) => {
      const at = each.indexOf("=");
      if (at < 1) throw new Error(`A header is name=value, one a line, not ${JSON.stringify(each)}.`);
      return [each.slice(0, at), each.slice(at + 1)];
    }),
  });
  const line = (wanted) => {
    const document = JSON.stringify({
      ...(wanted.key === null ? {} : { key: wanted.key }), value: wanted.value,
      ...(wanted.headers.length ? { headers: wanted.headers.map(([name, text]) => ({ key: name, value: text })) } : {}),
      ...(wanted.partition === null ? {} : { partition: wanted.partition }),
    });
    return `${command("printf", "%s\\n", document)} | ${command("tidelog", "produce", wanted.topic, "--format", "json")}`;
  };
  const changed = () => {
    key.disabled = noKey.checked;
    value.disabled = tombstone.checked;
    go.disabled = true;
  };
  const form = h("form", { class: "stack", oninput: changed, onsubmit: async (event) => {
    event.preventDefault();
    try {
      const wanted = order();
      const planned = await post("produce", wanted);
      told.replaceChildren(cli(line(wanted)));
      const where = planned.partition === null ? "any partition, for it has no key" : `partition ${planned.partition}`;
      replace(result, h("p", { class: "notice" }, `Dry run: ${bytes(planned.size_bytes)} would go to ${where} of ${wanted.topic}. Nothing is written yet.`));
      go.disabled = false;
    } catch (error) {
      replace(result, failure(error));
    }
  } },
    h("div", { class: "fields" },
      h("label", { for: "p-topic" }, "Topic", topic),
      h("label", { for: "p-partition" }, "Partition", partition),
      h("label", { for: "p-key" }, "Key", key),
      h("label", { class: "check" }, noKey, "No key"),
      h("label", { class: "full", for: "p-value" }, "Value, as UTF-8", value),
      h("label", { class: "full", for: "p-headers" }, "Headers", headers)),
    h("label", { class: "check" }, tombstone, "Null value (a tombstone on a compacted topic)"),
    result, told,
    h("div", { class: "row between" }, h("button", { type: "submit" }, "Dry run"), go));
  go.onclick = async () => {
    go.disabled = true;
    try {
      const wanted = order();
      const done = await post("produce", { ...wanted, dry_run: false });
      replace(result, h("p", { class: "notice" }, "Written: ", link(route("topics", wanted.topic, done.partition), `${wanted.topic}:${done.partition}`), ` @${done.offset}`));
    } catch (error) {
      replace(result, failure(error));
    }
  };
  changed();
  return form;
}

