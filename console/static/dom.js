// Elements without markup: every text becomes a text node, so nothing that a record, key or topic holds is ever parsed.
// `h` makes an element, `s` one of SVG, and `patch` changes a tree into another one where they differ, so that a page
// that is drawn anew keeps its focus, its selection and its scrolling.

const SVG = "http://www.w3.org/2000/svg";
const HANDLERS = ["onclick", "onsubmit", "oninput", "onchange", "onkeydown", "onpointermove", "onpointerleave", "onclose"];
const URL_ATTRIBUTES = new Set(["href", "src", "action", "formaction"]);

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (HANDLERS.includes(name)) element[name] = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name.startsWith("on")) throw new Error(`${name} is no handler that patch knows`);
    else if (URL_ATTRIBUTES.has(name) && !/^(#|\.\/|[a-z0-9_-]+\.(svg|css|js)$)/i.test(value)) {
      throw new Error(`${name} leads out of the console`);
    } else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

// Makes `old` equal to `fresh`. Elements with `data-keep` belong to themselves: a form that is being filled in, a result.
export function patch(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || key(old) !== key(fresh)) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE || old.hasAttribute("data-keep")) return;
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value && name !== "value" && name !== "style") old.setAttribute(name, value);
  }
  if (old.style && old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  for (const name of HANDLERS) if (old[name] !== fresh[name]) old[name] = fresh[name];
  patchChildren(old, fresh);
}

function patchChildren(old, fresh) {
  const wanted = [...fresh.childNodes];
  const keyed = new Map([...old.childNodes].filter(key).map((each) => [key(each), each]));
  wanted.forEach((child, at) => {
    let present = old.childNodes[at];
    const same = key(child) && keyed.get(key(child));
    keyed.delete(key(child)); // of two with one key the second is a new one
    if (same && same !== present) {
      old.insertBefore(same, present || null);
      present = same;
    }
    if (present) patch(present, child);
    else old.append(child);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

function key(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null;
}
