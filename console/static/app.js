// The shell: who is signed in, which page is open, and drawing it anew while it is looked at.
//
// A page is a module with `title`, `every` (ms between two loads), `load(context)` and `draw(data, context)`; or with
// `mount(context)`, which returns an element that lives until the page is left.

import { h, patch, replace } from "./dom.js";
import { ApiError, get, post, remove } from "./api.js";
import { failure, loading } from "./ui.js";
import * as cluster from "./cluster.js";
import * as topics from "./topics.js";
import * as groups from "./groups.js";
import * as records from "./records.js";
import * as events from "./events.js";
import * as slow from "./slow.js";
import * as balance from "./balance.js";
import * as bucket from "./bucket.js";

const PAGES = [
  { name: "", label: "Cluster", page: cluster },
  { name: "topics", label: "Topics", page: topics },
  { name: "groups", label: "Groups", page: groups },
  { name: "records", label: "Records", page: records },
  { name: "events", label: "Moves", page: events },
  { name: "slow", label: "Slow requests", page: slow },
  { name: "balance", label: "Balance", page: balance },
  { name: "bucket", label: "Bucket", page: bucket },
];

const root = document.getElementById("app");
let main = null;
let session = null;
let open = null;

function theme(chosen) {
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}

function stored(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // storage is switched off: the system's theme is used
  }
}

function toggleTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(dark ? "light" : "dark");
  try {
    localStorage.setItem("tidelog-theme", dark ? "light" : "dark");
  } catch {
    // it lasts until the page is closed
  }
}

function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { parts, query: new URLSearchParams(query || "") };
}

function shell() {
  main = h("main", { id: "main", tabindex: "-1" });
  replace(root, h("div", { class: "shell" },
    h("header", { class: "side" },
      h("div", { class: "brand" }, h("img", { src: "icon.svg", alt: "" }), "Tidelog"),
      h("nav", { "aria-label": "Pages" }, h("ul", {}, PAGES.map((each) =>
        h("li", {}, h("a", { href: `#/${each.name}`, "data-page": each.name }, each.label))))),
      h("div", { class: "foot" },
        h("span", { class: "where" }, `Version ${session.version}`),
        h("div", { class: "row" },
          h("button", { class: "plain", type: "button", onclick: toggleTheme }, "Theme"),
          session.needs_token && h("button", { class: "plain", type: "button", onclick: signOut }, "Sign out")))),
    main));
}

function mark(name) {
  for (const each of root.querySelectorAll("nav [data-page]")) {
    if (each.dataset.page === name) {
      each.setAttribute("aria-current", "page");
      each.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else each.removeAttribute("aria-current");
  }
}

async function show() {
  if (open) open.abort();
  const mine = new AbortController();
  open = mine;
  const { parts, query } = place();
  const found = PAGES.find((each) => each.name === parts[0]);
  mark(found ? found.name : "");
  if (!found) {
    document.title = "Not found – Tidelog";
    replace(main, h("div", { class: "page" }, h("h1", {}, "No such page"), h("p", {}, h("a", { href: "#/" }, "Go to the cluster"))));
    return;
  }
  const context = { parts: parts.slice(1), query, signal: mine.signal, redraw: () => {} };
  document.title = `${[...context.parts].reverse().filter(Boolean).concat(found.label).join(" – ")} – Tidelog`;
  if (found.page.mount) {
    const node = await found.page.mount(context);
    if (!mine.signal.aborted) replace(main, node);
    return;
  }
  replace(main, loading());
  await keepDrawing(found.page, context, mine.signal);
}

async function keepDrawing(page, context, signal) {
  let wake = null;
  let drawn = null;
  const put = (fresh) => {
    if (main.firstElementChild) patch(main.firstElementChild, fresh);
    else replace(main, fresh);
  };
  // Draws what is known at once, and then loads it anew.
  context.redraw = () => {
    if (drawn && !signal.aborted) put(h("div", { class: "page" }, page.draw(drawn, context)));
    if (wake) wake();
  };
  while (!signal.aborted) {
    let fresh;
    try {
      const data = await page.load(context);
      drawn = data;
      fresh = h("div", { class: "page" }, page.draw(data, context));
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status === 401) return;
      if (!(error instanceof ApiError)) console.error(error);
      const old = drawn ? page.draw(drawn, context) : h("h1", {}, PAGES.find((each) => each.page === page).label);
      fresh = h("div", { class: "page" }, failure(error, () => wake && wake()), old);
    }
    if (signal.aborted) return;
    put(fresh);
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, page.every);
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
      signal.addEventListener("abort", wake, { once: true });
    });
    while (document.hidden && !signal.aborted) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    }
  }
}

async function signOut() {
  await remove("session").catch(() => null);
  signIn();
}

function signIn(problem) {
  if (open) open.abort();
  document.title = "Sign in – Tidelog";
  const state = h("div", {}, problem && failure(problem));
  const token = h("input", { type: "password", name: "token", autocomplete: "current-password", required: true, id: "token" });
  replace(root, h("main", { class: "signin", id: "main", tabindex: "-1" },
    h("form", { class: "card", onsubmit: async (event) => {
      event.preventDefault();
      try {
        await post("session", { token: token.value });
        await begin();
      } catch (error) {
        replace(state, failure(error));
      }
    } },
      h("div", { class: "brand" }, h("img", { src: "icon.svg", alt: "" }), h("h1", {}, "Tidelog console")),
      h("p", { class: "muted" }, "This cluster has a secret. On a machine that has its file, ", h("code", {}, "tidelog cluster admin-token"), " prints the token."),
      h("label", { for: "token" }, "Token"), token, state,
      h("button", { class: "primary", type: "submit" }, "Sign in"))));
  token.focus();
}

async function begin() {
  try {
    const key = /^#key=([\w-]+)$/.exec(location.hash);
    if (key) {
      history.replaceState(null, "", location.pathname);
      await post("session", { key: key[1] }).catch(() => null); // used or old: the page asks for the token
    }
    session = await get("session");
  } catch (error) {
    replace(root, h("main", { class: "signin", id: "main", tabindex: "-1" },
      h("div", { class: "stack" }, h("h1", {}, "Tidelog console"), failure(error, begin))));
    setTimeout(() => !session && begin(), 5000);
    return;
  }
  if (!session.signed_in) {
    signIn();
    return;
  }
  shell();
  await show();
}

theme(stored("tidelog-theme"));
addEventListener("hashchange", () => {
  if (!main || !session || !session.signed_in) return;
  show();
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
addEventListener("signed-out", () => {
  if (session && session.signed_in) {
    session.signed_in = false;
    signIn();
  }
});
begin();
