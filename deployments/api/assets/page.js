// Takes the newest state once a second, and draws it.

import { chart, empty, scroll, table, tableOfChart } from "./charts.js";
import { h, patch, roving } from "./dom.js";
import { drawPlan, planTable, planWords } from "./plan.js";
import { drawTry } from "./try.js";
import { clock, count, decimal, ms, percent, plural } from "./words.js";

const SCHEMA = 6;
const HISTORY_S = 120;
const STEADY_S = 3;
const STALE_MS = 6000; // the service is asked for up to 4 s
const AGAIN_MS = [1000, 2000, 4000, 8000];
const NO_ANSWERS = "No answers in the last 60 s.";

const at = (id) => document.getElementById(id);
const past = []; // one row per state of the last two minutes
let source = null;
let failures = 0;
let heardMs = 0;
let newest = null;

// Connection

function connect() {
  source?.close();
  if (document.hidden) return; // the service does no work for a hidden page
  tell(newest ? "reconnecting" : "connecting");
  source = new EventSource("dashboard/events");
  source.addEventListener("state", (event) => take(JSON.parse(event.data)));
  source.addEventListener("trouble", (event) => tell("trouble", JSON.parse(event.data).words));
  source.onerror = again;
}

function again() {
  source.close();
  source = null;
  failures += 1;
  if (failures > 1 || !newest) tell("lost"); // a stream ends now and then, and the next begins at once
  setTimeout(() => source ?? connect(), AGAIN_MS[Math.min(failures, AGAIN_MS.length) - 1]);
}

function pause() {
  if (!document.hidden) {
    connect();
    return;
  }
  source?.close();
  source = null;
}

function take(state) {
  if (state.schema !== SCHEMA) {
    location.reload(); // the service was replaced by another version
    return;
  }
  failures = 0;
  heardMs = performance.now();
  newest = state;
  remember(state);
  tell(state.service.ingresses ? "live" : "silent");
  at("main").setAttribute("aria-busy", "false");
  at("main").dataset.serial = state.serial;
  at("main").dataset.at = state.at_s;
  draw(state);
}

// The first seconds' rates are those of a second or two, which jump.
function remember(state) {
  if (!past.length && state.now.seconds < STEADY_S) return;
  past.push({ at_s: state.at_s, ...state.now });
  while (past.length && (past[0].at_s < state.at_s - HISTORY_S || past[0].at_s > state.at_s)) past.shift();
}

const CONNECTIONS = {
  connecting: () => "Connecting",
  reconnecting: () => "Reconnecting",
  live: () => "Live",
  silent: () => "No ingress answers",
  stale: () => `No news since ${clock(newest.at_s)}`,
  lost: () => (newest ? `Disconnected since ${clock(newest.at_s)}; trying again` : "No connection, or too many viewers; trying again"),
  trouble: (words) => words,
};

// Spoken by screen readers, so it is written only when it becomes another.
function tell(connection, ...words) {
  const text = CONNECTIONS[connection](...words);
  document.body.dataset.connection = connection;
  if (at("connection").textContent !== text) at("connection").textContent = text;
}

// Drawing

function draw(state) {
  patch(at("model"), state.service.model);
  document.title = `${state.service.model} – Offramp`;
  const { ingresses } = state.service;
  patch(at("facts"), ingresses === 1 ? "1 ingress" : `${count(ingresses)} ingresses`,
    h("span", { class: "time" }, ` · ${clock(state.at_s)}`));
  patch(at("notices"), notices(state).map((words) => h("p", { class: "notice" }, words)));
  drawFigures(state);
  drawPlan(at("plan"), state.plan);
  patch(at("plan-of"), planWords(state.plan, state.described));
  const details = at("plan-table");
  details.ontoggle ??= () => patch(details.querySelector("div"), planTable(newest.plan));
  if (details.open) details.ontoggle();
  drawBatches(state);
  drawExits(state);
  drawSurvival(state);
  drawTimes();
  drawNetworks(state);
  drawChanges(state);
  drawDrops(state);
  drawTry(state.service);
}

function notices({ service }) {
  return [
    service.suspended !== null && `Nothing is served: ${service.suspended}`,
    service.controller === "silent" && "The controller does not answer. Serving continues. Plan, forecast and agreement are from its last report.",
  ].filter(Boolean);
}

function drawFigures({ now, totals, drops, agreement, described, service }) {
  const observed = described?.observed ?? { agreement };
  const slo = service.slo_s === null ? "no SLO" : `SLO ${ms(service.slo_s)} ms`;
  const budget = observed.accuracy_budget == null ? "no budget" : `budget: at least ${percent(1 - observed.accuracy_budget)}`;
  const seen = observed.inputs_seen == null ? "" : `, ${plural(observed.inputs_seen, "input")} seen`;
  const pruned = observed.pruned_agreement == null ? ""
    : `; ${percent(observed.pruned_agreement, 2)} get the same answer without the pruned words`;
  const dropped = drops.reduce((sum, drop) => sum + drop.total, 0);
  const isLate = now.goodput_per_s < 0.99 * now.answered_per_s; // exact, while percentiles are ends of buckets
  patch(at("figures-of"), now.seconds === null ? "" : `over ${now.seconds.toFixed(0)} s`);
  patch(at("figures"),
    figure("goodput", "Goodput", decimal(now.goodput_per_s), "/s", `of ${decimal(now.arrived_per_s)}/s arriving`),
    figure("p50", "Latency p50", ms(now.p50_s), "ms", slo),
    figure("p90", "p90", ms(now.p90_s), "ms", ""),
    figure("p99", "p99", ms(now.p99_s), "ms", isLate ? "beyond the SLO" : "", isLate),
    figure("waiting", "Queue", count(now.waiting + now.waiting_in_stages), "",
      `${count(now.waiting)} in ingresses, ${count(now.waiting_in_stages)} in stages`),
    figure("dropped", "Drops", decimal(drops.reduce((sum, drop) => sum + drop.per_s, 0)), "/s", `${count(dropped)} so far`),
    figure("agreement", "Agreement", percent(observed.agreement, 2).replace(" %", ""), observed.agreement == null ? "" : "%",
      (observed.within_budget === false ? "below the " : "") + budget + seen + pruned, observed.within_budget === false),
    figure("answered", service.generates ? "Steps" : "Answers", count(totals.answered), "",
      `${count(totals.in_slo)} in time${service.generates ? "; each a token or a part of a prompt" : ""}`));
}

function figure(name, title, value, unit, beside, isAlarm = false) {
  return h("div", { class: isAlarm ? "figure alarm" : "figure", "data-figure": name }, h("dt", {}, title),
    h("dd", {}, h("b", {}, value), unit && h("span", { class: "unit" }, unit)), h("dd", { class: "quiet" }, beside));
}

const perBlock = (numbers) => ({
  xs: numbers.map((_, at) => (at + 0.5) / numbers.length),
  names: numbers.map((block) => `block ${block}`),
  ticks: numbers.map((block, at) => ({ at: (at + 0.5) / numbers.length, text: block }))
    .filter((_, at) => at % Math.ceil(numbers.length / 16) === 0),
});

function drawBatches({ blocks, plan }) {
  if (!blocks.some((one) => one.fused !== null)) {
    empty(at("batches"), NO_ANSWERS, " Batches are shown once they have run.");
    return;
  }
  if (plan.chains.length > 1) {
    drawBatchesOfChains(blocks, plan.chains);
    return;
  }
  const spec = {
    ...perBlock(blocks.map((one) => one.block)), // a plan may leave networks out
    label: "Batch size per block, with fusing and without",
    series: [
      { name: "target", css: "line target", values: blocks.map((one) => one.target), text: count },
      { name: "without fusing", css: "line second", values: blocks.map((one) => one.unfused), text: decimal, dots: () => true },
      { name: "fused", css: "line first", values: blocks.map((one) => one.fused), text: decimal, dots: (block) => blocks[block].is_first },
    ],
    yText: count,
  };
  chart(at("batches"), spec);
  tableOfChart(at("batches-table"), "Mean batch size, last 60 s; fused is measured where a split begins", "Block", spec);
}

// A line per chain; the figures without fusing are in the table.
function drawBatchesOfChains(blocks, chains) {
  const numbers = [...new Set(blocks.map((one) => one.block))].sort((a, b) => a - b);
  const series = chains.map((_, chain) => {
    const own = new Map(blocks.filter((one) => one.chain === chain).map((one) => [one.block, one]));
    return { name: `chain ${chain}`, css: `line ${["first", "second", "third"][chain]}`, text: decimal,
      values: numbers.map((block) => own.get(block)?.fused ?? null), dots: (at) => own.get(numbers[at])?.is_first };
  });
  chart(at("batches"), { ...perBlock(numbers), label: "Batch size per block of each chain", series, yText: count });
  table(at("batches-table"), "Mean batch size, last 60 s; fused is measured where a split begins, unfused by the survival of all inputs",
    ["Block", "target", "without fusing", "fused"],
    blocks.map((one) => [`chain ${one.chain}, block ${one.block}`, count(one.target), decimal(one.unfused), decimal(one.fused)]));
}

function drawExits({ exits, early, service, plan, networks }) {
  const saved = early.share === null ? "" : `: ${percent(early.share)} before the end, after ${decimal(early.mean_blocks)} of ${service.num_blocks} blocks on average`;
  patch(at("exits-of"), `share of ${service.generates ? "steps" : "answers"}, 60 s${saved}${plan.after_answer === "stay" ? "; inputs stay" : ""}`);
  if (!exits.some((one) => one.answers)) {
    empty(at("exits"), NO_ANSWERS, " Try: ", h("code", {}, service.generates ? "offramp generate 'Hello'" : "offramp predict 'some text'"));
    return;
  }
  const where = (one) => (one.kind === "end" ? "end" : one.block);
  const spec = {
    xs: exits.map((_, index) => (index + 0.5) / exits.length),
    names: exits.map((one) => (one.kind === "end" ? "the model's end" : `${one.kind} ${one.block}`) + (networks.length ? ` (${one.network})` : "")),
    ticks: exits.map((one, index) => ({ at: (index + 0.5) / exits.length, text: where(one) })),
    label: "Share of answers by the ramp they left at",
    series: [{ name: "answers", css: "bar", isUnnamed: true, values: exits.map((one) => one.share),
      text: (share) => percent(share), short: (share) => percent(share, 0) }],
    yText: (share) => percent(share, 0),
    least: 0.1,
  };
  chart(at("exits"), spec);
  table(at("exits-table"), "Answers of the last 60 s", ["Left at", "Answers", "Share"],
    exits.map((one, index) => [spec.names[index], count(one.answers), percent(one.share)]));
}

// For each network of a cascade: its answers, and the crossings to it.
function drawNetworks({ networks }) {
  at("networks-panel").hidden = !networks.length;
  if (!networks.length) return;
  patch(at("networks"), scroll("Networks of the chain, last 60 s",
    ["Network", "Blocks", "Answers", "Share of answers", "Share of its inputs", "Crossings", "Time of a crossing", "Words pruned"],
    networks.map((one) => [one.name, `${one.first} to ${one.end - 1}${one.used ? "" : ", left out by the plan"}`, count(one.answers),
      percent(one.share), percent(one.returned), one.first === 0 ? "–" : `${decimal(one.crossings_per_s)}/s`,
      one.crossing_s === null ? "–" : `${ms(one.crossing_s)} ms`, percent(one.pruned_words)])));
}

function drawSurvival({ survival, described, service }) {
  const forecast = described?.forecast;
  const all = [
    { name: "forecast", css: "line second", values: forecast?.survival },
    { name: "probes", css: "line first", values: described?.observed?.survival, dots: () => true },
    { name: "answers", css: "line third", values: survival },
  ];
  const series = all.filter((one) => one.values?.length).map((one) => ({ ...one, text: (share) => percent(share) }));
  const without = service.controller === "none" ? "no forecast without a controller" : "no forecast yet";
  patch(at("survival-of"), forecast?.survival ? `forecast: ${forecast.how}` : without);
  if (!series.length) {
    empty(at("survival"), NO_ANSWERS);
    return;
  }
  const spec = {
    ...perBlock(Array.from({ length: service.num_blocks }, (_, block) => block)),
    label: "Share of inputs that reach each block, forecast and observed",
    series,
    band: forecast?.survival_low && { name: "interval", low: forecast.survival_low, high: forecast.survival_high },
    yText: (share) => percent(share, 0),
    least: 1,
  };
  chart(at("survival"), spec);
  tableOfChart(at("survival-table"), "Share that reaches the block; answers: by the active ramps alone", "Block", spec);
}

function drawTimes() {
  if (!past.length) {
    for (const id of ["rates", "latency", "queue"]) empty(at(id), "Waiting for the first seconds.");
    return;
  }
  const rates = [["arriving", "line second", "arrived_per_s"], ["goodput", "line first", "goodput_per_s"]];
  overTime("rates", "Inputs that arrive and answers in time, per second", rates, (value) => value, decimal);
  const latencies = [["p99", "line second", "p99_s"], ["p90", "line third", "p90_s"], ["p50", "line first", "p50_s"]];
  const slo = newest.service.slo_s;
  const near = past.some((row) => row.p99_s > 0.4 * slo);
  overTime("latency", "Latency percentiles, milliseconds", latencies, (seconds) => seconds && seconds * 1000, decimal,
    slo !== null && near ? { value: slo * 1000, text: "SLO" } : undefined);
  const inside = [["unanswered", "line second", "unanswered"], ["queued in stages", "line third", "waiting_in_stages"],
    ["waiting in ingresses", "line first", "waiting"]];
  overTime("queue", "Inputs inside the service", inside, (value) => value, count);
}

function overTime(id, label, lines, value, text, rule) {
  const last = past.at(-1).at_s;
  const share = (row) => 1 - (last - row.at_s) / HISTORY_S;
  const spec = {
    xs: past.map(share),
    names: past.map((row) => clock(row.at_s)),
    ticks: [{ at: 0, text: "−2 min", anchor: "start" }, { at: 0.5, text: "−1 min" }, { at: 1, text: "now", anchor: "end" }],
    label,
    series: lines.map(([name, css, key]) => ({ name, css, values: past.map((row) => value(row[key])), text })),
    yText: count,
    gap: 5 / HISTORY_S,
    rule,
  };
  chart(at(id), spec);
  tableOfChart(at(`${id}-table`), label, "Time", spec);
}

function drawChanges({ history, described, service }) {
  if (!history.length) {
    patch(at("changes"), h("p", { class: "empty" }, service.controller === "none"
      ? "This service has no controller, so its plan stays. A service file has one: offramp serve service.yaml."
      : "No plan was made yet."));
    return;
  }
  const present = history.find((one) => one.outcome === "in force" && one.epoch === described?.epoch); // epochs may repeat
  const rows = history.map((one) => {
    const isPresent = one === present;
    return [
      [h("span", { class: "time" }, clock(one.at_s)), h("small", {}, ` epoch ${one.epoch}`)],
      [h("span", { class: isPresent ? "tag present" : "tag" }, isPresent ? "now" : OUTCOMES[one.outcome]), ` ${one.reason}`],
      h("span", { class: "words" }, one.words),
      promised(one.predicted),
      measured(one.gained ?? (isPresent ? soFar(described.observed) : null), isPresent ? "too early" : "–"),
    ];
  });
  patch(at("changes"), scroll("Last plans, newest first", ["When", "Outcome", "Verdict", "Expected", "Gave"], rows));
}

const OUTCOMES = { "in force": "taken", proposed: "turned down" };

function promised(predicted) {
  if (predicted.rate_per_s == null) return "–";
  return [`${decimal(predicted.rate_per_s)}/s`, h("small", {}, ` in ${ms(predicted.latency_s)} ms`)];
}

// The figures of the present plan, in the names of a plan that ended.
const soFar = (observed) => observed && {
  goodput_rps: observed.goodput_per_s,
  offered_rps: observed.rate_per_s,
  dropped: Object.values(observed.drops ?? {}).reduce((sum, drops) => sum + drops, 0),
};

function measured(gained, unknown) {
  if (gained?.goodput_rps == null) return unknown;
  return [`${decimal(gained.goodput_rps)}/s`,
    h("small", {}, ` of ${decimal(gained.offered_rps)}/s offered, ${count(gained.dropped)} dropped`)];
}

function drawDrops({ drops, totals }) {
  if (!drops.length) {
    patch(at("drops"), h("p", { class: "empty" }, `None of ${plural(totals.arrived, "input")}.`));
    return;
  }
  patch(at("drops"), scroll("Drops by reason", ["Reason", "Now", "So far"],
    drops.map((drop) => [drop.reason.replaceAll("_", " "), `${decimal(drop.per_s)}/s`, count(drop.total)])));
}

document.addEventListener("visibilitychange", pause);
setInterval(() => newest && source && document.body.dataset.connection === "live"
  && performance.now() - heardMs > STALE_MS && tell("stale"), 1000);
roving(at("plan"), "button.replica");
connect();
