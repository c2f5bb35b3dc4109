// One kind of chart: series over positions from 0 to 1, drawn at the container's own width, every position of which
// can be pointed at and reached with the keyboard.

import { h, patch, roving } from "./dom.js";

const HEIGHT = 190;
const LEFT = 40;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 24;
const MARK = ".hit";

export function chart(container, spec) {
  const drawn = container.chart ?? begin(container);
  drawn.spec = spec;
  draw(container);
}

export function empty(container, ...words) {
  container.chart = undefined;
  patch(container, h("p", { class: "empty" }, ...words));
}

function begin(container) {
  container.replaceChildren();
  if (!container.listens) listen(container);
  container.chart = { pointed: null };
  return container.chart;
}

function listen(container) {
  container.listens = true;
  roving(container, MARK);
  const point = (event) => show(container, event.target.closest?.(MARK)?.getAttribute("data-index") ?? null);
  container.addEventListener("mouseover", point);
  container.addEventListener("focusin", point);
  container.addEventListener("mouseleave", () => show(container, focused(container)));
  container.addEventListener("focusout", () => show(container, null));
  container.addEventListener("keydown", (event) => event.key === "Escape" && show(container, null));
  new ResizeObserver(() => container.chart && draw(container)).observe(container);
}

const focused = (container) => container.querySelector(`${MARK}:focus`)?.getAttribute("data-index") ?? null;

function show(container, index) {
  if (!container.chart || container.chart.pointed === index) return;
  container.chart.pointed = index;
  draw(container);
}

function draw(container) {
  const { spec, pointed } = container.chart;
  const index = pointed === null || Number(pointed) >= spec.xs.length ? null : Number(pointed);
  const space = measure(container, spec);
  patch(container, legend(spec), picture(space, spec, index), tip(space, spec, index));
}

function measure(container, spec) {
  const width = Math.max(200, container.clientWidth);
  const values = [...spec.series.flatMap((one) => one.values), ...(spec.band?.high ?? []), spec.rule?.value];
  const top = round(Math.max(spec.least ?? 0, ...values.filter(Number.isFinite)));
  return {
    width,
    top,
    x: (share) => LEFT + share * (width - LEFT - RIGHT),
    y: (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM),
  };
}

// The next of 1, 2, 4, 5, 8 times a power of ten: halves of it are short numbers too.
function round(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].find((step) => step * power >= value * 0.999) * power;
}

function legend(spec) {
  const key = (name, css) => h("li", {}, h("svg", { width: 18, height: 10, "aria-hidden": "true" },
    css.startsWith("bar") || css === "band"
      ? h("rect", { x: 1, y: 1, width: 16, height: 8, class: css })
      : h("path", { d: "M0 5H18", class: css })), name);
  const shown = spec.series.filter((one) => !one.isUnnamed);
  return h("ul", { class: "legend" }, shown.map((one) => key(one.name, one.css)), spec.band && key(spec.band.name, "band"));
}

// What may be there or not is in a group that always is: marks keep their places, and so the focus.
function picture(space, spec, index) {
  return h("svg", { width: space.width, height: HEIGHT, role: "group", "aria-label": spec.label },
    grid(space, spec),
    h("g", {}, spec.band && h("path", { class: "band", d: area(space, spec) })),
    h("g", {}, spec.rule && rule(space, spec.rule)),
    h("g", {}, index !== null && h("path", { class: "guide", d: `M${space.x(spec.xs[index])} ${TOP}V${HEIGHT - BOTTOM}` })),
    h("g", { "aria-hidden": "true" }, spec.series.map((one) => series(space, spec, one))),
    h("g", {}, spec.xs.map((share, at) => hit(space, spec, share, at))));
}

function grid(space, spec) {
  const rows = [0, 0.5, 1].map((share) => share * space.top);
  return h("g", { "aria-hidden": "true" },
    rows.map((value) => h("path", { class: "grid", d: `M${LEFT} ${space.y(value)}H${space.width - RIGHT}` })),
    rows.map((value) => h("text", { x: LEFT - 6, y: space.y(value) + 4, "text-anchor": "end" }, spec.yText(value))),
    spec.ticks.map((tick) => h("text", { x: space.x(tick.at), y: HEIGHT - 6, "text-anchor": tick.anchor ?? "middle" }, tick.text)));
}

function rule(space, { value, text }) {
  const y = space.y(value);
  return h("g", { "aria-hidden": "true" }, h("path", { class: "rule", d: `M${LEFT} ${y}H${space.width - RIGHT}` }),
    h("text", { x: LEFT + 4, y: y < TOP + 12 ? y + 12 : y - 4 }, text));
}

function series(space, spec, one) {
  if (one.css.startsWith("bar")) return h("g", {}, one.values.map((value, at) => bar(space, spec, one, value, at)));
  const dots = one.dots ? one.values.map((value, at) => Number.isFinite(value) && one.dots(at) &&
    h("circle", { class: one.css, cx: space.x(spec.xs[at]), cy: space.y(value), r: 3.5 })) : [];
  return h("g", {}, h("path", { class: one.css, d: line(space, spec, one.values) }), dots);
}

function bar(space, spec, one, value, at) {
  if (!Number.isFinite(value)) return null;
  const width = Math.min(44, (0.62 * (space.width - LEFT - RIGHT)) / spec.xs.length);
  const [x, y] = [space.x(spec.xs[at]), space.y(value)];
  return h("g", {}, h("rect", { class: one.css, x: x - width / 2, y, width, height: HEIGHT - BOTTOM - y }),
    width > 22 && h("text", { x, y: y - 5, "text-anchor": "middle", class: "value" }, one.short(value)));
}

function line(space, spec, values) {
  let pen = "M";
  return values.map((value, at) => {
    const isGap = at > 0 && spec.xs[at] - spec.xs[at - 1] > (spec.gap ?? 1);
    if (!Number.isFinite(value)) {
      pen = "M";
      return "";
    }
    const step = `${isGap ? "M" : pen}${space.x(spec.xs[at]).toFixed(1)} ${space.y(value).toFixed(1)}`;
    pen = "L";
    return step;
  }).join("");
}

function area(space, spec) {
  const edge = (values) => values.map((value, at) => `${space.x(spec.xs[at]).toFixed(1)} ${space.y(value).toFixed(1)}`);
  return `M${[...edge(spec.band.low), ...edge(spec.band.high).reverse()].join("L")}Z`;
}

function hit(space, spec, share, at) {
  const left = at ? (spec.xs[at - 1] + share) / 2 : 0;
  const right = at < spec.xs.length - 1 ? (share + spec.xs[at + 1]) / 2 : 1;
  const words = spec.series.map((one) => `${one.name} ${one.text(one.values[at])}`);
  return h("rect", {
    class: "hit", "data-index": at, tabindex: at === spec.xs.length - 1 ? 0 : -1, role: "img",
    "aria-label": `${spec.names[at]}: ${words.join(", ")}`,
    x: space.x(left), y: TOP, width: Math.max(1, space.x(right) - space.x(left)), height: HEIGHT - TOP - BOTTOM,
  });
}

function tip(space, spec, index) {
  if (index === null) return null;
  const x = space.x(spec.xs[index]);
  const side = x > space.width / 2 ? { right: `${space.width - x + 10}px`, left: "auto" } : { left: `${x + 10}px`, right: "auto" };
  return h("div", { class: "tip", "aria-hidden": "true", style: side }, h("b", {}, spec.names[index]),
    spec.series.map((one) => h("span", {}, h("span", {}, one.name), h("span", {}, one.text(one.values[index])))));
}

// The figures of a chart as a table; only drawn while it is open.
export function table(details, caption, heads, rows) {
  details.fill = () => patch(details.querySelector("div"), scroll(caption, heads, rows));
  if (!details.ontoggle) details.ontoggle = () => details.open && details.fill();
  if (details.open) details.fill();
}

// Roles are said although the elements have them: drawn as cards on a small screen, tables would lose them.
export function scroll(caption, heads, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", { role: "table" }, h("caption", {}, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads.map((head) => h("th", { scope: "col", role: "columnheader" }, head)))),
      h("tbody", { role: "rowgroup" }, rows.map((row) => h("tr", { role: "row" }, row.map((cell, at) =>
        at === 0 ? h("th", { scope: "row", role: "rowheader" }, cell) : h("td", { role: "cell", "data-head": heads[at] }, cell)))))));
}

export function tableOfChart(details, caption, head, spec) {
  const rows = spec.xs.map((_, at) => [spec.names[at], ...spec.series.map((one) => one.text(one.values[at]))]);
  table(details, caption, [head, ...spec.series.map((one) => one.name)], rows);
}
