// Distance: how late updates come to a parameter server, or how far replicas drift that train apart.

import { element, number } from "./format.js";
import { Panel } from "./panel.js";
import { legendOf } from "./steps.js";

/** @typedef {import("./store.js").Store} Store */
/** @typedef {{slot: number, last: number, most: number}} Drift */

/** Numbers of `telemetry.Kind`. */
const STALENESS = 52;
const DRIFT = 53;
const COLOUR = "#0072B2";
const PEAK_COLOUR = "rgba(128,128,128,0.3)";
const MAX_AGES = 16;
const MAX_SLOTS = 64;
const LANES_PX = 330;
const MAX_LANE_PX = 30;
const MIN_LANE_PX = 4;
const NOTHING = "Nothing is known of ranks that are apart: all have the same parameters in each step.";

/** @param {number} num @param {string} what */
const counted = (num, what) => `${number(num)} ${what}${num === 1 ? "" : "s"}`;
/** @param {number} share */
const fine = (share) => `${(100 * share).toFixed(2)}%`;

/** Rows of one kind, in their order. @param {Store} store @param {number} kind */
function rowsOf({ distance }, kind) {
  const [kinds, slots, values] = ["kind", "slot", "value"].map((name) => distance.get(name));
  return Array.from({ length: distance.length }, (_, i) => ({ kind: kinds[i], slot: slots[i], value: values[i] })).filter((row) => row.kind === kind);
}

/** How many updates came after so many others. @param {Store} store @returns {Map<number, number>} */
export function ages(store) {
  /** @type {Map<number, number>} */ const found = new Map();
  for (const { value } of rowsOf(store, STALENESS)) found.set(value, (found.get(value) ?? 0) + 1);
  return new Map([...found].sort((a, b) => a[0] - b[0]));
}

/** By slot. @param {Store} store @returns {Drift[]} */
export function drifts(store) {
  /** @type {Map<number, Drift>} */ const found = new Map();
  for (const { slot, value } of rowsOf(store, DRIFT)) {
    found.set(slot, { slot, last: value, most: Math.max(value, found.get(slot)?.most ?? 0) });
  }
  return [...found.values()].sort((a, b) => a.slot - b.slot);
}

/** Bars from zero, each in a lane. */
class Amounts {
  constructor() {
    /** @type {Record<string, (number | string)[]>} */
    this.columns = { left: [], right: [], bottom: [], top: [], colour: [], hatch: [], slot: [], what: [], size: [], detail: [] };
  }

  /** @param {number} lane @param {number} top @param {number} bottom @param {number} right @param {string} colour @param {string} what @param {string} size */
  put(lane, top, bottom, right, colour, what, size) {
    const all = { left: 0, right, top: lane + top, bottom: lane + bottom, colour, hatch: " ", slot: "", what, size, detail: "" };
    for (const [name, value] of Object.entries(all)) this.columns[name].push(value);
  }
}

export class Distance extends Panel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code @param {import("./charts.js").Look} look */
  constructor(parent, code, look) {
    super({ parent, code, name: "distance", question: "How far apart are ranks?", figures: ["distance"] });
    this.look = look;
    this.legend = this.tools.appendChild(element("span"));
    /** @type {Map<number, number>} */ this.ages = new Map();
    /** @type {Drift[]} */ this.drifts = [];
    this.twin = () => this.numbers();
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    this.ages = ages(store);
    this.drifts = drifts(store);
    if (!this.ages.size && !this.drifts.length) {
      this.explain(NOTHING);
      return;
    }
    this.explain("");
    if (this.ages.size) this.sumAges();
    else this.sumDrifts();
    this.fillTwin();
    if (!this.isReady) return;
    if (this.ages.size) this.drawAges();
    else this.drawDrifts();
  }

  sumAges() {
    const total = [...this.ages.values()].reduce((sum, num) => sum + num, 0);
    let [left, middle] = [Math.floor((total - 1) / 2), 0];
    for (const [age, num] of this.ages) {
      middle = age;
      if (left < num) break;
      left -= num;
    }
    this.say(
      `Of ${counted(total, "update")} ${((100 * (this.ages.get(0) ?? 0)) / total).toFixed(0)}% came at once; half after at most ` +
        `${counted(middle, "other")} that their worker had not seen, and none after more than ${Math.max(...this.ages.keys())}.`,
    );
    this.legend.replaceChildren();
  }

  sumDrifts() {
    const farthest = this.drifts.reduce((a, b) => (b.last > a.last ? b : a));
    const most = this.drifts.reduce((high, drift) => Math.max(high, drift.most), 0);
    this.say(
      `At the last outer step slot ${farthest.slot} was farthest from the mean of all, by ${fine(farthest.last)} of the ` +
        `parameters' length; at most it was ${fine(most)} for any.`,
    );
    if (!this.legend.childElementCount) this.legend.replaceChildren("In colour: at the last outer step ", legendOf([[PEAK_COLOUR, "most so far"]], []));
  }

  /** A lane for each age from 0 on, and one for all that are older than have room. @returns {[string, number][]} */
  get counts() {
    const oldest = Math.max(...this.ages.keys());
    const last = Math.min(oldest, MAX_AGES - 1);
    const rest = [...this.ages].reduce((sum, [age, num]) => sum + (age >= last ? num : 0), 0);
    /** @type {[string, number][]} */
    const lanes = Array.from({ length: last }, (_, age) => [`${age} between`, this.ages.get(age) ?? 0]);
    return [...lanes, [`${last}${oldest === last ? "" : " and more"} between`, rest]];
  }

  drawAges() {
    const amounts = new Amounts();
    this.counts.forEach(([name, num], lane) => amounts.put(lane, 0.15, 0.85, num, COLOUR, counted(num, "update"), name));
    this.fill(amounts, this.counts.map(([name]) => name), "updates that came after so many others");
  }

  drawDrifts() {
    const amounts = new Amounts();
    const shown = this.drifts.slice(0, MAX_SLOTS);
    shown.forEach(({ slot, last, most }, lane) => {
      amounts.put(lane, 0.1, 0.9, 100 * most, PEAK_COLOUR, `slot ${slot}, most so far`, fine(most));
      amounts.put(lane, 0.2, 0.8, 100 * last, this.look.colour(slot), `slot ${slot}, at the last outer step`, fine(last));
    });
    this.fill(amounts, shown.map(({ slot }) => `slot ${slot}`), "% of the parameters' length from the mean");
  }

  /** @param {Amounts} amounts @param {string[]} names @param {string} unit */
  fill({ columns }, names, unit) {
    const [chart] = this.charts;
    chart.figure.below[0].axis_label = unit;
    chart.lanes(names, Math.max(MIN_LANE_PX, Math.min(MAX_LANE_PX, LANES_PX / names.length)));
    chart.set("lengths", columns);
    chart.range(0, columns.right.map(Number).reduce((a, b) => Math.max(a, b), 0) * 1.02 || 1);
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    if (this.ages.size) {
      const rows = [...this.ages].map(([age, num]) => [number(age), number(num)]);
      return { header: ["others between", "updates"], rows };
    }
    const rows = this.drifts.map(({ slot, last, most }) => [`${slot}`, fine(last), fine(most)]);
    return { header: ["slot", "at the last outer step", "most so far"], rows };
  }
}
