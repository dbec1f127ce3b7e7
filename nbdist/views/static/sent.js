// Loss against the bytes that all ranks have sent since the run began.

import { counted, dots, lossText, number, size } from "./format.js";
import { marks } from "./loss.js";
import { Panel } from "./panel.js";
import { scaleOf } from "./steps.js";
import { Table } from "./store.js";

/** @typedef {import("./store.js").Store} Store */
/** Rising steps, and what a slot has sent by the last attempt at each. @typedef {{steps: number[], bytes: number[]}} Told */
/** Of the first rows. @typedef {{x: Float64Array, loss: Float64Array, step: Float64Array}} Curve */

const MAX_TABLE_ROWS = 60;
/** Of a loss: one step differs little from the next. */
const TABLE_DIGITS = 5;
const ALONE = "One rank trains alone: nothing is sent.";
const NOT_YET = "Nothing has been sent yet, as far as is told. It comes with the first steps of a run of more than one rank.";
const GONE =
  "What a byte buys is not known: nothing was sent, as where one rank trains alone, or what was told of it is not kept, " +
  "as in records of earlier versions.";

/** Where steps are trained again, what they had cost before counts, too. @param {Table} sent @returns {Told[]} */
function told(sent) {
  const [steps, bytes, slots] = ["step", "sent_bytes", "slot"].map((name) => sent.get(name));
  /** @type {Map<number, [number, number][]>} */ const found = new Map();
  for (let i = 0; i < sent.length; i++) {
    const its = found.get(slots[i]);
    if (its) its.push([steps[i], bytes[i]]);
    else found.set(slots[i], [[steps[i], bytes[i]]]);
  }
  return [...found.values()].map((points) => {
    /** @type {Told} */ const its = { steps: [], bytes: [] };
    let most = 0;
    for (const [step, value] of points.sort((a, b) => a[0] - b[0])) {
      most = Math.max(most, value);
      if (its.steps[its.steps.length - 1] === step) its.bytes.pop();
      else its.steps.push(step);
      its.bytes.push(most);
    }
    return its;
  });
}

/** Add what a slot had sent at each of these steps, which rise. @param {Float64Array} sums @param {Float64Array} at @param {Told} its */
function add(sums, at, { steps, bytes }) {
  const last = steps.length - 1;
  let i = 0;
  at.forEach((step, place) => {
    while (i < last && steps[i + 1] <= step) i++;
    if (step < steps[0]) return;
    const share = i < last ? (step - steps[i]) / (steps[i + 1] - steps[i]) : 0;
    sums[place] += share ? bytes[i] + share * (bytes[i + 1] - bytes[i]) : bytes[i];
  });
}

/** Committed steps of which it is known what was sent until then. @param {Table} rows @param {Table} sent @returns {Curve} */
export function curve(rows, sent) {
  const all = told(sent);
  const last = all.reduce((most, { steps }) => Math.max(most, steps[steps.length - 1]), -Infinity);
  const steps = rows.get("step");
  let num = steps.length;
  while (num && steps[num - 1] > last) num--;
  const step = steps.subarray(0, num);
  const x = new Float64Array(num);
  for (const its of all) add(x, step, its);
  return { x, loss: rows.get("loss").subarray(0, num), step };
}

/** @param {Curve} curve */
function sentence({ x, loss, step }) {
  const known = [...loss.keys()].filter((i) => Number.isFinite(loss[i]));
  if (!known.length) return "";
  const [a, b] = [known[0], known[known.length - 1]];
  const each = b > a ? (x[b] - x[a]) / (step[b] - step[a]) : x[b];
  const half = known.find((i) => loss[i] <= (loss[a] + loss[b]) / 2) ?? b;
  const way = loss[b] < loss[a] ? `, half of the way with the first ${size(x[half])}` : "";
  return (
    `All ranks together have sent ${size(x[b])}, ${size(each)} in a step; ` +
    `the loss went from ${lossText(loss[a])} to ${lossText(loss[b])}${way}.`
  );
}

export class Sent extends Panel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code @param {import("./charts.js").Look} look */
  constructor(parent, code, look) {
    super({ parent, code, name: "bytes", question: "What does a byte buy?", figures: ["bytes"] });
    this.look = look;
    /** @type {{title: string, curve: Curve} | null} */ this.reference = null;
    /** @type {Curve} */ this.curve = curve(new Table(0), new Table(0));
    this.twin = () => this.numbers();
  }

  /** Another run, to be drawn beneath. @param {string} title @param {Record<string, import("./types").Columns>} tables */
  compare(title, tables) {
    const [rows, sent] = [new Table(Infinity), new Table(Infinity)];
    rows.append(tables.rows);
    sent.append(tables.sent);
    this.reference = { title, curve: curve(rows, sent) };
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    this.curve = curve(store.rows, store.sent);
    const said = sentence(this.curve);
    if (!said) {
      const isAlone = store.world?.world_size === 1 && store.rows.length > 0;
      this.explain(store.isOver ? GONE : isAlone ? ALONE : NOT_YET);
      return;
    }
    this.explain("");
    this.say(this.reference ? `${said} Beneath, in grey: ${this.reference.title}.` : said);
    this.fillTwin();
    if (this.isReady) this.draw(store);
  }

  /** @param {Store} store */
  draw(store) {
    const [chart] = this.charts;
    const other = this.reference?.curve;
    const most = [this.curve, other].reduce((high, one) => Math.max(high, one?.x[one.x.length - 1] ?? 0), 0);
    const [unit, scale] = scaleOf(most);
    const { loss, step } = this.curve;
    const x = this.curve.x.map((bytes) => bytes / scale);
    chart.figure.below[0].axis_label = `${unit} sent by all ranks`;
    chart.set("curve", { x, loss, step, ranks: store.rows.get("world_size").subarray(0, x.length), unit: Array(x.length).fill(unit) });
    chart.set("curve_dots", dots(x, loss));
    if (other) chart.set("reference", { x: other.x.map((bytes) => bytes / scale), value: other.loss });
    const places = new Float64Array(store.rows.length).fill(x[x.length - 1]); // of the last ones nothing may be told yet
    places.set(x);
    chart.set("marks", marks(store, this.look, loss, places));
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    const header = ["step", "loss", "sent by all ranks", "in a step"];
    const { x, loss, step } = this.curve;
    const stride = Math.max(1, Math.ceil(x.length / MAX_TABLE_ROWS));
    const places = [...x.keys()].filter((i) => i % stride === 0 || i === x.length - 1);
    const rows = places.map((i, at) => {
      const before = places[at - 1];
      const each = at ? (x[i] - x[before]) / (step[i] - step[before]) : NaN;
      return [number(step[i]), lossText(loss[i], TABLE_DIGITS), size(x[i]), size(each)];
    });
    const note = rows.length < x.length ? `${number(rows.length)} of ${counted(x.length, "step")}` : "";
    return { header, rows: rows.reverse(), note };
  }
}
