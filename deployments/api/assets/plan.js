// The plan: a card per stage in order, with its blocks, their splits and batches, and a square per replica. Several chains
// have a heading each.

import { scroll } from "./charts.js";
import { h, patch } from "./dom.js";
import { blocks, clock, count, decimal, ms, percent, plural } from "./words.js";

export function drawPlan(container, plan) {
  const cards = plan.stages.map(stageCard);
  const stagesOf = (chain) => h("ol", { class: "stages" }, cards.filter((_, index) => plan.stages[index].chain === chain));
  patch(container, plan.chains.length === 1 ? stagesOf(0)
    : plan.chains.map((one, chain) => h("section", { class: "chain" }, h("h3", {}, chainWords(one, chain)), stagesOf(chain))));
}

function chainWords(one, chain) {
  const planned = percent(one.planned, 0);
  const share = one.share === null ? `${planned} of the inputs planned` : `${percent(one.share, 0)} of the inputs (planned ${planned})`;
  const used = one.limit ? `, ${percent(one.cost / one.limit, 0)} of the admission limit` : "";
  return [`Chain ${chain}: `, h("span", { class: "quiet" }, `${share} · ${count(one.unanswered)} unanswered${used}`)];
}

export function planWords(plan, described) {
  const told = described?.epoch === plan.epoch ? described : {}; // the controller may describe another plan
  const promised = plan.predicted.rate_per_s == null ? null
    : `promised ${decimal(plan.predicted.rate_per_s)}/s in ${ms(plan.predicted.latency_s)} ms`;
  const since = told.in_force_since_s == null ? null : `since ${clock(told.in_force_since_s)}`;
  const reason = told.reason == null ? null : `because: ${told.reason}`;
  const stays = plan.after_answer === "stay" ? "answered inputs stay" : null;
  const words = [`epoch ${plan.epoch}`, plan.policy, tuningWords(described?.tuning), plan.dispatch, stays, since, reason, promised];
  return words.filter(Boolean).join(" · ");
}

function tuningWords(tuning) {
  if (!tuning || tuning.how === "off") return null;
  const alarms = tuning.alarms ? `, ${plural(tuning.alarms, "alarm")}` : "";
  return (tuning.safe ? "thresholds safe: no input leaves early" : `thresholds tuned (${tuning.how})`) + alarms;
}

export function planTable(plan) {
  const rows = plan.stages.flatMap((stage, index) => stage.splits.map((split) => [
    `${plan.chains.length > 1 ? `chain ${stage.chain}, ` : ""}stage ${index}, ${blocks(split.first, split.end)}`, device(stage), `${stage.running} of ${stage.wanted}`,
    split.ramps.join(", ") || "none", budgetWords(split), meanWords(split), percent(fillOf(split)), decimal(split.batches_per_s),
  ]));
  const heads = ["Split", "Accelerator", "Replicas", "Ramps", "Batch", "Mean batch", "Fill", "Batches per s"];
  return [scroll("Splits of the plan, last 60 s", heads, rows), scroll("Replicas", ["Replica", "Stage", "Busy", "Queue", "Node", "Process"],
    plan.stages.flatMap((stage, index) => stage.replicas.map((one) =>
      [short(one.name) + (one.rests ? " (rests)" : ""), count(index), percent(one.busy, 0), count(one.waiting), short(one.node), one.pid])))];
}

// Where tokens bound a split's batches they are what fills them; an input larger than the budget fills more than one.
const countsTokens = (split) => typeof split.tokens === "number";
const fillOf = (split) => (countsTokens(split) ? split.token_fill : split.fill);
const budgetWords = (split) => (countsTokens(split) ? `${count(split.batch)}, ${count(split.tokens)} tokens` : count(split.batch));
const meanWords = (split) =>
  (countsTokens(split) ? `${decimal(split.size)}, ${rounded(split.size_tokens)} tokens` : decimal(split.size));
const rounded = (number) => count(number === null ? null : Math.round(number));

const short = (name) => name.slice(-8);

const device = (stage) => ((stage.time_scale ?? 1) === 1 ? stage.device : `${stage.device} (${stage.time_scale} × slower)`);

function stageCard(stage, index) {
  return h("li", { class: "stage", style: { "flex-grow": String(stage.end - stage.first) } },
    h("div", { class: "stage-head" },
      h("h3", {}, `Stage ${index}`),
      h("span", { class: "device" }, stage.device),
      h("span", { class: stage.running < stage.wanted ? "alarm" : "quiet" }, replicaWords(stage)),
      h("span", { class: "quiet" }, stage.waiting ? `${count(stage.waiting)} queued` : "no queue")),
    h("div", { class: "splits" }, stage.splits.map(splitBox)),
    h("ul", { class: "replicas", "aria-label": `Replicas of stage ${index}` },
      stage.replicas.map((one, at) => replicaSquare(one, at)),
      Array.from({ length: Math.max(0, stage.wanted - stage.running) }, () => missing()),
      stage.running > stage.replicas.length && h("li", { class: "more" }, `and ${count(stage.running - stage.replicas.length)} more`)));
}

function replicaWords(stage) {
  return stage.running < stage.wanted ? `${stage.running} of ${plural(stage.wanted, "replica")}` : plural(stage.running, "replica");
}

function splitBox(split) {
  const cells = Array.from({ length: split.end - split.first }, (_, at) => split.first + at);
  return h("div", { class: "split", style: { "flex-grow": String(cells.length) } },
    h("div", { class: "blocks", role: "img", "aria-label": splitWords(split) },
      cells.map((block) => h("span", { class: split.ramps.includes(block) ? "block ramp" : "block" }, block))),
    h("div", { class: "fill", "aria-hidden": "true" }, h("i", { style: { width: `${100 * Math.min(1, fillOf(split) ?? 0)}%` } })),
    h("div", { class: "batch" }, h("b", {}, decimal(split.size)), countsTokens(split) ? " inputs" : ` of ${split.batch}`,
      !countsTokens(split) && percentOf(split)),
    countsTokens(split) && h("div", { class: "batch tokens" }, h("b", {}, rounded(split.size_tokens)), ` of ${count(split.tokens)} tokens`,
      percentOf(split)));
}

const percentOf = (split) => h("span", { class: "quiet" }, fillOf(split) === null ? "" : ` ${percent(fillOf(split), 0)}`);

function splitWords(split) {
  const ramps = split.ramps.length ? `active ramps after ${split.ramps.join(", ")}` : "no active ramp";
  return `${blocks(split.first, split.end)} of ${split.network}, ${ramps}`;
}

function replicaSquare(one, at) {
  const words = `replica ${at}, ${short(one.name)}: ${percent(one.busy, 0)} busy, ${count(one.waiting)} queued, `
    + `process ${one.pid} on node ${short(one.node)}${one.rests ? ", rests because it is slow" : ""}`;
  return h("li", {}, h("button", { type: "button", tabindex: at ? -1 : 0, class: one.rests ? "replica rests" : "replica", "aria-label": words },
    h("i", { style: { height: `${100 * (one.busy ?? 0)}%` } }), h("span", { class: "tip", "aria-hidden": "true" }, words)));
}

const missing = () => h("li", {}, h("span", { class: "replica missing", role: "img", "aria-label": "a replica that does not run" }));
