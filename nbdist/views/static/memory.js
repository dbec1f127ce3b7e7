// Memory: what each engine holds, how close that is to what it can have, and what grew.

import { element, median, NONE, number, percent, size } from "./format.js";
import { Panel } from "./panel.js";
import { Lengths, legendOf, scaleOf } from "./steps.js";

/** @typedef {import("./store.js").Store} Store */
/** @typedef {{x: number[], y: number[]}} Curve */

/** Numbers of `telemetry.Kind`. */
const RESIDENT = 45;
const ON_DEVICE = 46;
const PEAK = 48;
const LIMIT = 49;
const USED = 50;
const DEVICE_LIMIT = 51;
const DEVICE_COLOUR = "#CC79A7";
const PEAK_COLOUR = "rgba(128,128,128,0.3)";
const RUNNING = 3;
const MAX_LINES = 16;
const LANES_PX = 330;
const MAX_LANE_PX = 30;
const MIN_LANE_PX = 4;
/** Of what it can have: more is worth a warning. */
const FULL = 0.9;
const NOTHING = "What engines hold is not known: it is told once a second while a run goes on.";

/** What one slot holds. */
class Holding {
  /** @param {number} slot */
  constructor(slot) {
    this.slot = slot;
    /** @type {Map<number, Curve>} by kind */ this.curves = new Map();
  }

  /** @param {number} kind */
  last(kind) {
    return this.curves.get(kind)?.y.at(-1) ?? NaN;
  }

  /** Since the run began, of what grows on the GPU where there is one. */
  get growth() {
    const curve = this.curves.get(this.curves.has(ON_DEVICE) ? ON_DEVICE : RESIDENT);
    return curve ? (curve.y.at(-1) ?? NaN) - curve.y[0] : NaN;
  }

  /** How much is taken of what it can have, by whichever is nearer to its end. */
  get share() {
    const shares = [this.last(RESIDENT) / this.last(LIMIT), this.last(ON_DEVICE) / this.last(DEVICE_LIMIT)];
    return Math.max(...shares.filter(Number.isFinite), -Infinity);
  }
}

/** By slot. @param {Store} store */
export function holdings(store) {
  const { memory } = store;
  const [at, bytes, slot, kind] = ["at", "bytes", "slot", "kind"].map((name) => memory.get(name));
  /** @type {Map<number, Holding>} */ const found = new Map();
  for (let i = 0; i < memory.length; i++) {
    let own = found.get(slot[i]);
    if (!own) found.set(slot[i], (own = new Holding(slot[i])));
    let curve = own.curves.get(kind[i]);
    if (!curve) own.curves.set(kind[i], (curve = { x: [], y: [] }));
    curve.x.push(at[i]);
    curve.y.push(bytes[i]);
  }
  return [...found.values()].filter(({ curves }) => curves.has(RESIDENT)).sort((a, b) => a.slot - b.slot);
}

export class Memory extends Panel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code @param {import("./charts.js").Look} look */
  constructor(parent, code, look) {
    super({ parent, code, name: "memory", question: "How close is memory to its end, and what grew?", figures: ["memory", "growth"] });
    this.look = look;
    this.legend = this.tools.appendChild(element("span"));
    /** @type {Holding[]} */ this.known = [];
    this.twin = () => this.numbers();
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    this.known = holdings(store);
    if (!this.known.length) {
      this.explain(NOTHING);
      return;
    }
    this.explain("");
    this.sum();
    this.fillTwin();
    if (!this.isReady) return;
    this.drawNow();
    this.drawGrowth(store);
  }

  sum() {
    const most = this.known.reduce((a, b) => (b.last(RESIDENT) > a.last(RESIDENT) ? b : a));
    const grown = this.known.reduce((a, b) => (b.growth > a.growth ? b : a));
    const fullest = this.known.reduce((a, b) => (b.share > a.share ? b : a));
    const limit = most.last(LIMIT);
    const of = Number.isFinite(limit) ? ` of ${size(limit)} that it can have` : "";
    const all = this.known.reduce((sum, one) => sum + one.last(RESIDENT), 0);
    const end = fullest.share > FULL ? ` Slot ${fullest.slot} is close to its end: ${percent(fullest.share)} are taken.` : "";
    this.say(
      `Slot ${most.slot} holds most, ${size(most.last(RESIDENT))}${of}; all together ${size(all)}, usual ` +
        `${size(median(this.known.map((one) => one.last(RESIDENT))))}. Since the run began slot ${grown.slot} has grown most, ` +
        `by ${grown.growth > 0 ? size(grown.growth) : "nothing"}.${end}`,
    );
    const hasDevice = this.known.some(({ curves }) => curves.has(ON_DEVICE));
    if (this.legend.childElementCount && this.legend.dataset.device === `${hasDevice}`) return;
    this.legend.dataset.device = `${hasDevice}`;
    /** @type {[string, string][]} */
    const keys = [[PEAK_COLOUR, "most so far"]];
    if (hasDevice) keys.push([DEVICE_COLOUR, "on its GPU"]);
    this.legend.replaceChildren("In colour: resident now ", legendOf(keys, []));
  }

  drawNow() {
    const [chart] = this.charts;
    const slots = this.known.map(({ slot }) => slot);
    const ends = this.known.map((one) => Math.max(one.last(RESIDENT), one.last(PEAK) || 0, one.last(ON_DEVICE) || 0));
    const lengths = new Lengths(slots, Math.max(...ends));
    for (const one of this.known) {
      const hasDevice = one.curves.has(ON_DEVICE);
      const say = (/** @type {string} */ what, /** @type {number} */ value, /** @type {number} */ limit) => ({
        what,
        size: size(value),
        detail: Number.isFinite(limit) ? `${percent(value / limit)} of ${size(limit)}` : "",
      });
      const [now, peak, device] = [RESIDENT, PEAK, ON_DEVICE].map((kind) => one.last(kind));
      if (Number.isFinite(peak)) lengths.put(one.slot, 0.1, 0.9, peak, PEAK_COLOUR, say("the most that was resident", peak, one.last(LIMIT)));
      lengths.put(one.slot, 0.2, hasDevice ? 0.48 : 0.8, now, this.look.colour(one.slot), say("resident", now, one.last(LIMIT)));
      if (hasDevice) lengths.put(one.slot, 0.52, 0.8, device, DEVICE_COLOUR, say("held by torch on its GPU", device, one.last(DEVICE_LIMIT)));
    }
    chart.figure.below[0].axis_label = `${lengths.unit} now`;
    chart.lanes(slots.map((slot) => `slot ${slot}`), Math.max(MIN_LANE_PX, Math.min(MAX_LANE_PX, LANES_PX / slots.length)));
    chart.set("lengths", lengths.columns);
    chart.range(0, lengths.end * 1.02);
  }

  /** @param {Store} store */
  drawGrowth(store) {
    const chart = this.charts[1];
    const shown = [...this.known].sort((a, b) => b.last(RESIDENT) - a.last(RESIDENT)).slice(0, MAX_LINES);
    const curves = shown.map(({ curves }) => /** @type {Curve} */ (curves.get(curves.has(ON_DEVICE) ? ON_DEVICE : RESIDENT)));
    const most = curves.reduce((high, { y }) => y.reduce((a, b) => Math.max(a, b), high), 0);
    const [unit, scale] = scaleOf(most);
    const { began } = store;
    chart.figure.left[0].axis_label = unit;
    chart.set("growth", {
      xs: curves.map(({ x }) => x.map((at) => at - began)),
      ys: curves.map(({ y }) => y.map((bytes) => bytes / scale)),
      colour: shown.map(({ slot }) => this.look.colour(slot)),
      dash: shown.map(({ slot }) => this.look.dash(slot)),
      slot: shown.map(({ slot }) => slot),
    });
    /** @type {{x: number[], text: string[]}} */
    const marks = { x: [], text: [] };
    let last = -1;
    for (let i = 0; i < store.phases.length; i++) {
      const [phase, generation, at] = ["phase", "generation", "at"].map((name) => store.phases.get(name)[i]);
      if (phase !== RUNNING || generation === last) continue;
      last = generation;
      marks.x.push(at - began);
      marks.text.push(`generation ${generation}`);
    }
    chart.set("moments", marks);
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    const header = ["slot", "resident", "most so far", "can have", "taken", "grown", "on GPU", "of that tensors", "GPU has"];
    const text = (/** @type {number} */ value) => (Number.isFinite(value) ? size(value) : NONE);
    const rows = this.known.map((one) => [
      `${one.slot}`,
      ...[RESIDENT, PEAK, LIMIT].map((kind) => text(one.last(kind))),
      Number.isFinite(one.share) ? percent(one.share) : NONE,
      one.growth > 0 ? size(one.growth) : number(0),
      ...[ON_DEVICE, USED, DEVICE_LIMIT].map((kind) => text(one.last(kind))),
    ]);
    return { header, rows };
  }
}
