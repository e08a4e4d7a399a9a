// Plots as inline SVG. Gaps in the data are gaps in the line. The newest value of each series is in the legend as text,
// so that a plot says something without being seen, and without colour.

import { h, s } from "./dom.js";
import { clock } from "./format.js";

const WIDTH = 600;
const NARROW = 340; // of a phone: letters keep their size
const PAD = { left: 54, right: 8, top: 8, bottom: 20 };

function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= value);
}

function pieces(list, gap) {
  const found = [];
  let current = [];
  for (const point of list) {
    if (current.length && point[0] - current[current.length - 1][0] > gap) {
      found.push(current);
      current = [];
    }
    current.push(point);
  }
  if (current.length) found.push(current);
  return found;
}

// `series`: [{name, points: [[ms, value]]}]; `format` makes text of a value; `gap` in ms separates pieces of a line.
// `wide`: for a plot that has the whole width of a page.
export function plot({ title, series, format, height = 180, gap = 45000, key, wide }) {
  const width = innerWidth <= 760 ? NARROW : wide ? 1200 : WIDTH;
  const shown = series.filter((each) => each.points.length);
  const names = legend(series, format);
  if (!shown.length) {
    return h("div", { class: "stack", "data-key": key },
      h("div", { class: "empty" }, "No samples yet. The first ones come within half a minute of a broker's start."));
  }
  const times = shown.flatMap((each) => each.points.map((point) => point[0]));
  const end = Math.max(...times);
  const start = Math.min(Math.min(...times), end - 300000);
  const top = ceiling(Math.max(...shown.flatMap((each) => each.points.map((point) => point[1]))));
  const x = (at) => PAD.left + ((at - start) / (end - start)) * (width - PAD.left - PAD.right);
  const y = (value) => height - PAD.bottom - (value / top) * (height - PAD.top - PAD.bottom);
  const said = shown.map((each) => `${each.name}: now ${format(each.points[each.points.length - 1][1])}`).join("; ");
  const cursor = s("line", { class: "cursor", y1: PAD.top, y2: height - PAD.bottom, visibility: "hidden" });
  const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}. ${said}` },
    [0, 0.5, 1].map((part) => [
      s("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(top * part), y2: y(top * part) }),
      s("text", { x: PAD.left - 8, y: y(top * part) + 4, "text-anchor": "end" }, format(top * part)),
    ]),
    [start, end].map((at, side) =>
      s("text", { x: x(at), y: height - 5, "text-anchor": side ? "end" : "start" }, clock(at))),
    series.map((each, number) => pieces(each.points, gap).map((piece) => {
      const path = piece.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      const only = series.length === 1;
      return [
        only && s("path", { class: `area f${number % 9}`, d: `${path}L${x(piece[piece.length - 1][0]).toFixed(1)} ${y(0)}L${x(piece[0][0]).toFixed(1)} ${y(0)}Z` }),
        piece.length === 1
          ? s("circle", { class: `f${number % 9}`, cx: x(piece[0][0]), cy: y(piece[0][1]), r: 2.5 })
          : s("path", { class: `line c${number % 9}`, d: path }),
      ];
    })),
    cursor);
  picture.onpointermove = (event) => {
    const box = picture.getBoundingClientRect();
    const at = start + (((event.clientX - box.left) / box.width) * width - PAD.left) / (width - PAD.left - PAD.right) * (end - start);
    const near = Math.min(Math.max(at, start), end);
    cursor.setAttribute("x1", x(near));
    cursor.setAttribute("x2", x(near));
    cursor.setAttribute("visibility", "visible");
    const place = picture.parentElement.querySelector(".legend");
    if (place) place.replaceWith(legend(series, format, near));
  };
  picture.onpointerleave = () => {
    cursor.setAttribute("visibility", "hidden");
    const place = picture.parentElement.querySelector(".legend");
    if (place) place.replaceWith(legend(series, format));
  };
  return h("div", { class: "plot stack", "data-key": key }, picture, names);
}

function legend(series, format, at) {
  return h("div", { class: "legend" }, series.map((each, number) => {
    const value = at === undefined ? each.points[each.points.length - 1] : nearest(each.points, at);
    return h("span", {}, h("i", { class: `b${number % 9}` }), h("span", { class: "user" }, each.name), h("b", {}, value ? format(value[1]) : "–"));
  }), at === undefined ? null : h("span", {}, clock(at)));
}

function nearest(list, at) {
  let found = null;
  for (const point of list) if (!found || Math.abs(point[0] - at) < Math.abs(found[0] - at)) found = point;
  return found && Math.abs(found[0] - at) < 90000 ? found : null;
}

export function sparkline(list, number = 0) {
  const height = 28;
  const width = 150;
  if (list.length < 2) return s("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
  const start = list[0][0];
  const end = list[list.length - 1][0];
  const top = Math.max(...list.map((point) => point[1])) || 1;
  const x = (at) => ((at - start) / (end - start || 1)) * width;
  const y = (value) => height - 2 - (value / top) * (height - 5);
  const path = list.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  return s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", height, "aria-hidden": "true" },
    s("path", { class: `area f${number}`, d: `${path}L${width} ${height}L0 ${height}Z` }),
    s("path", { class: `line c${number}`, d: path, "vector-effect": "non-scaling-stroke" }));
}
