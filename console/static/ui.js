// The parts that pages are made of.

import { h } from "./dom.js";

export function head({ title, lead, crumbs, actions, user }) {
  return h("header", { class: "head" },
    h("div", {},
      crumbs && h("nav", { class: "crumbs", "aria-label": "Where this page is" },
        crumbs.map(([text, href], at) => [at > 0 && h("span", { class: "muted", "aria-hidden": "true" }, "/"), h("a", { href, class: "user" }, text)])),
      h("h1", { class: user ? "user" : null }, title),
      lead && h("p", { class: "lead" }, lead)),
    actions && h("div", { class: "row" }, actions));
}

export function card(title, ...children) {
  return h("section", { class: "card", "data-key": `card:${title || ""}` }, title && h("h2", {}, title), children);
}

// `columns`: [{name, of: row => cell, number, wide, cell}]; `wide` columns are left out on a phone.
export function table({ label, columns, rows, empty, key }) {
  if (!rows.length) return h("p", { class: "empty" }, empty || "Nothing to show.");
  const look = (column) => [column.number && "n", column.wide && "wide-only", column.cell].filter(Boolean).join(" ") || null;
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {},
      h("caption", { class: "visually-hidden" }, label),
      h("thead", {}, h("tr", {}, columns.map((column) => h("th", { class: look(column), scope: "col" }, column.name)))),
      h("tbody", {}, rows.map((row) => h("tr", { "data-key": key ? `row:${key(row)}` : null },
        columns.map((column) => h("td", { class: look(column) }, cell(column.of(row)))))))));
}

function cell(value) {
  return value === null || value === undefined || value === "" ? h("span", { class: "muted" }, "–") : value;
}

export function badge(kind, text) {
  return h("span", { class: `badge ${kind}` }, text);
}

export function facts(pairs, wide) {
  return h("dl", { class: `facts${wide ? " wide" : ""}` },
    pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, cell(value))]));
}

export function tile(label, value, unit, picture) {
  return h("div", { class: "card tile" },
    h("div", { class: "label" }, label),
    h("div", { class: "value" }, value, unit && h("small", {}, ` ${unit}`)),
    picture);
}

// `bounded`: the whole is a bound, and to be near it is worth a look.
export function meter(part, whole, label, bounded = true) {
  const share = whole > 0 ? Math.min(1, part / whole) : 0;
  return h("div", { class: `meter${bounded && share > 0.85 ? " high" : ""}`, role: "img", "aria-label": `${label}: ${Math.round(share * 100)} %` },
    h("i", { style: { width: `${(share * 100).toFixed(1)}%` } }));
}

export function failure(error, again) {
  return h("div", { class: "notice bad", role: "alert" },
    h("strong", {}, error.message),
    error.hint && h("p", { class: "muted" }, error.hint),
    again && h("p", {}, h("button", { class: "plain", type: "button", onclick: again }, "Try again")));
}

// What some brokers did not answer, where the page shows what the others did.
export function missing(errors) {
  const rows = Object.entries(errors || {});
  if (!rows.length) return null;
  return h("div", { class: "notice warn", role: "status", "data-key": "missing" },
    h("strong", {}, "Not in these figures: "),
    h("span", { class: "user" }, rows.map(([who, text]) => /^\d+$/.test(who) && !text.startsWith(`broker ${who}`) ? `broker ${who}: ${text}` : text).join("; ")));
}

export function loading() {
  return h("div", { class: "page", "aria-busy": "true" },
    h("p", { class: "visually-hidden", role: "status" }, "Loading"),
    h("div", { class: "skeleton" }), h("div", { class: "skeleton" }));
}

// The line for a terminal that does the same.
export function cli(text) {
  const copied = h("span", { class: "visually-hidden", role: "status" });
  return h("div", { class: "cli" },
    h("code", { class: "user" }, text),
    h("button", { class: "plain", type: "button", "aria-label": "Copy the command", onclick: async (event) => {
      const button = event.currentTarget;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
        copied.textContent = "Copied";
      } catch {
        const range = document.createRange();
        range.selectNodeContents(button.parentElement.querySelector("code"));
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        button.textContent = "Selected";
      }
    } }, "Copy"),
    copied);
}

// Asks before something changes: shows what the dry run says, the command (`line()`), and a button that does it.
export function confirm({ title, preview, line, act, label, danger, done }) {
  const place = h("div", { class: "stack" }, h("div", { class: "skeleton" }));
  const state = h("div", { role: "status" });
  const go = h("button", { class: danger ? "danger" : "primary", type: "button", disabled: true }, label);
  const close = h("button", { type: "button" }, "Close");
  const name = `dialog-${Math.random().toString(36).slice(2)}`;
  const told = h("div", {}, cli(line()));
  const dialog = h("dialog", { "aria-labelledby": name, onchange: () => told.replaceChildren(cli(line())) },
    h("div", { class: "stack" },
      h("h2", { id: name }, title), place,
      h("div", {}, h("p", { class: "small muted" }, "On the command line"), told),
      state,
      h("div", { class: "row between" }, close, go)));
  close.onclick = () => dialog.close();
  dialog.onclose = () => dialog.remove();
  document.body.append(dialog);
  dialog.showModal();
  preview().then((found) => {
    place.replaceChildren(found.node);
    go.disabled = Boolean(found.hindrance);
    if (found.hindrance) state.replaceChildren(h("p", { class: "notice warn" }, found.hindrance));
  }, (error) => place.replaceChildren(failure(error)));
  go.onclick = async () => {
    go.disabled = true;
    state.replaceChildren(h("p", { class: "muted" }, "Working…"));
    try {
      const answer = await act();
      state.replaceChildren(h("p", { class: "notice" }, done ? done(answer) : "Done."));
    } catch (error) {
      go.disabled = false;
      state.replaceChildren(failure(error));
    }
  };
  return dialog;
}

export function link(href, text) {
  return h("a", { href, class: "user" }, text);
}

export function route(...parts) {
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;
}
