// Traffic: what each rank sends in a step, by collective and between whom.

import { element, ms, NONE, number, size } from "./format.js";
import { Panel } from "./panel.js";
import { Lengths, legendOf } from "./steps.js";

/** @typedef {import("./store.js").Store} Store */
/** @typedef {{op: number, axis: number, ranks: number}} Road */
/** @typedef {{slot: number, road: Road, calls: number, payload: number, sent: number, seconds: number}} Flow */

/** Steps over which a mean is taken. */
const NUM_RECENT = 20;
const MAX_LANES = 64;
const LANES_PX = 330;
const MAX_LANE_PX = 30;
const MIN_LANE_PX = 4;
const MAX_TABLE_ROWS = 100;
const COPIES = 5;
const COPIES_COLOUR = "#009E73";
/** By the numbers of `protocol.traffic`: name, colour, how much of its payload a rank sends. */
const OPS = /** @type {Record<number, [string, string, string]>} */ ({
  1: ["all-reduce", "#D55E00", "2(n−1)/n"],
  2: ["all-gather", "#0072B2", "n−1"],
  3: ["reduce-scatter", "#E69F00", "(n−1)/n"],
  4: ["all-to-all", "#CC79A7", "(n−1)/n"],
  5: ["broadcast", "#8c959f", "1"],
  6: ["send", "#56B4E9", "1"],
});
const AXES = /** @type {Record<number, string>} */ ({ 1: "data", 2: "pipeline", 3: "tensor", 4: "all ranks", 5: "copies" });
const ALONE = "One rank trains alone: nothing is sent.";
const NOT_YET = "No step has told yet of what was sent. It comes with the first steps of a run.";
const GONE = "What was sent is not known: no step was taken with company, or what was told is not kept.";

/** @param {Road} road */
const nameOf = ({ op, axis }) => `${OPS[op]?.[0] ?? "exchange"}, ${AXES[axis] ?? "others"}`;
/** @param {Road} road */
const colourOf = ({ op, axis }) => (axis === COPIES ? COPIES_COLOUR : (OPS[op]?.[1] ?? "gray"));
/** How many times its payload a rank sends; empty: once. @param {Road} road */
const shareOf = ({ op, ranks }) => (!OPS[op] || OPS[op][2] === "1" ? "" : ` × ${OPS[op][2]} with n = ${ranks}`);
/** What is sent while it goes on. @param {Flow} flow */
const rateOf = ({ sent, seconds }) => (seconds > 0 ? `${size(sent / seconds)}/s` : NONE);

/** What each slot sends in a step, on average over the newest steps of the newest group. @param {Store} store @returns {Flow[]} */
export function flows(store) {
  const { traffic } = store;
  const columns = ["step", "generation", "attempt", "slot", "op", "axis", "ranks", "calls", "payload_bytes", "sent_bytes", "seconds"];
  const [step, generation, attempt, slot, op, axis, ranks, ...rest] = columns.map((name) => traffic.get(name));
  if (!traffic.length) return [];
  const newest = generation.reduce((most, one) => Math.max(most, one), -Infinity);
  const key = (/** @type {number} */ i) => step[i] * 256 + attempt[i];
  const places = [...step.keys()].filter((i) => generation[i] === newest);
  const recent = new Set([...new Set(places.map(key))].sort((a, b) => a - b).slice(-NUM_RECENT));
  /** @type {Map<number, Set<number>>} */ const steps = new Map();
  /** @type {Map<string, Flow>} */ const found = new Map();
  for (const i of places) {
    if (!recent.has(key(i))) continue;
    const own = steps.get(slot[i]) ?? new Set();
    steps.set(slot[i], own.add(key(i)));
    const name = [slot[i], op[i], axis[i], ranks[i]].join();
    const road = { op: op[i], axis: axis[i], ranks: ranks[i] };
    const flow = found.get(name) ?? { slot: slot[i], road, calls: 0, payload: 0, sent: 0, seconds: 0 };
    const [calls, payload, sent, seconds] = rest.map((column) => column[i]);
    found.set(name, flow);
    flow.calls += calls;
    flow.payload += payload;
    flow.sent += sent;
    flow.seconds += seconds;
  }
  const order = (/** @type {Flow} */ { slot, road }) => slot * 1e6 + road.op * 1e5 + road.axis * 1e4 + road.ranks;
  return [...found.values()]
    .map((flow) => {
      const num = steps.get(flow.slot)?.size ?? 1;
      return { ...flow, calls: flow.calls / num, payload: flow.payload / num, sent: flow.sent / num, seconds: flow.seconds / num };
    })
    .sort((a, b) => order(a) - order(b));
}

export class Traffic extends Panel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code @param {import("./charts.js").Look} look */
  constructor(parent, code, look) {
    super({ parent, code, name: "traffic", question: "How much is sent, by what, and between whom?", figures: ["traffic"] });
    this.look = look;
    this.legend = this.tools.appendChild(element("span"));
    /** @type {Flow[]} */ this.flows = [];
    this.twin = () => this.numbers();
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    this.flows = flows(store);
    if (!this.flows.some(({ sent }) => sent > 0)) {
      const isAlone = store.world?.world_size === 1 && store.rows.length > 0;
      this.explain(store.isOver ? GONE : isAlone ? ALONE : NOT_YET);
      return;
    }
    this.explain("");
    this.sum();
    this.fillTwin();
    if (this.isReady) this.draw();
  }

  sum() {
    /** @type {Map<number, number>} */ const sums = new Map();
    for (const { slot, sent } of this.flows) sums.set(slot, (sums.get(slot) ?? 0) + sent);
    const [fullest, total] = [...sums].reduce((a, b) => (b[1] > a[1] ? b : a));
    const most = this.flows.filter(({ slot }) => slot === fullest).reduce((a, b) => (b.sent > a.sent ? b : a));
    const rate = rateOf(most) === NONE ? "" : `, ${rateOf(most)} while it goes on`;
    this.say(
      `Slot ${fullest} sends most, ${size(total)} in a step, the largest part by ${nameOf(most.road)}: ` +
        `${size(most.payload)}${shareOf(most.road)}${rate}. On average over the last ${NUM_RECENT} steps.`,
    );
    const roads = new Map(this.flows.map(({ road }) => [nameOf(road), road]));
    const text = [...roads.keys()].join();
    if (this.legend.dataset.roads === text) return;
    this.legend.dataset.roads = text;
    this.legend.replaceChildren(legendOf([...roads].map(([name, road]) => [colourOf(road), name]), []));
  }

  draw() {
    const [chart] = this.charts;
    const slots = [...new Set(this.flows.map(({ slot }) => slot))].slice(0, MAX_LANES);
    const lengths = new Lengths(slots, this.flows.reduce((most, { sent }) => Math.max(most, sent), 0));
    for (const { slot, road, calls, payload, sent } of this.flows) {
      const more = { what: nameOf(road), size: size(sent), detail: `${number(calls, calls % 1 ? 1 : 0)} calls, payload ${size(payload)}${shareOf(road)}` };
      lengths.add(slot, sent, colourOf(road), more);
    }
    chart.figure.below[0].axis_label = `${lengths.unit} that a slot sends in a step`;
    chart.lanes(slots.map((slot) => `slot ${slot}`), Math.max(MIN_LANE_PX, Math.min(MAX_LANE_PX, LANES_PX / slots.length)));
    chart.set("lengths", lengths.columns);
    chart.range(0, lengths.end * 1.02);
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    const header = ["slot", "exchange", "calls", "payload in a step", "has to be sent", "goes on for ms", "sent meanwhile"];
    const rows = this.flows.slice(0, MAX_TABLE_ROWS).map((flow) => [
      `${flow.slot}`,
      nameOf(flow.road),
      number(flow.calls, flow.calls % 1 ? 1 : 0),
      `${size(flow.payload)}${shareOf(flow.road)}`,
      size(flow.sent),
      ms(flow.seconds),
      rateOf(flow),
    ]);
    return { header, rows };
  }
}
