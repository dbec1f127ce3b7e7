// Throughput, and who holds the others up.

import { counted, dots, lonely, median, ms, NONE, number, percent } from "./format.js";
import { marks } from "./loss.js";
import { Panel } from "./panel.js";

/** @typedef {import("./store.js").Store} Store */

const WINDOW_S = 4;
const MIN_STEPS = 5;
const MAX_STEPS = 50;
const SLOW_SHARE = 0.05;
/** So much of a run must be missing at its beginning to be told. */
const MISSING_SHARE = 0.02;
/** A part of the delay as large as this tells whose it is; the rest may be the others' medians. */
const EXPLAINED = 4;
const MAX_LINES = 16;
const MAX_POINTS = 2000;
const MAX_TABLE_ROWS = 60;

/** @typedef {{compute: number[], waits: number[], rates: number[], lags: number[], data: number[], steps: number[]}} Times */

/**
 * What each slot did of late: the steps of the last seconds, but at least some.
 * @param {Store} store @returns {Map<number, Times>}
 */
export function recent(store) {
  const { steps } = store;
  const [step, slot, ended, ready] = ["step", "slot", "ended_at", "ready_at"].map((n) => steps.get(n));
  const [generation, attempt] = ["generation", "attempt"].map((n) => steps.get(n));
  const [whole, compute, wait, data, samples] = ["step_s", "compute_s", "wait_s", "data_s", "samples"].map((n) =>
    steps.get(n),
  );
  /** @type {Map<string, number[]>} */
  const groups = new Map();
  /** Of each slot the first step of those that follow one another without a gap, up to its last one. */
  const lowest = new Map();
  const newest = ended.length ? ended.reduce((a, b) => Math.max(a, b), -Infinity) : 0;
  for (let i = steps.length - 1; i >= 0; i--) {
    const low = lowest.get(slot[i]) ?? step[i];
    if (step[i] < low - 1) continue; // before a gap only some steps are known: those that stand out
    lowest.set(slot[i], Math.min(low, step[i]));
    const key = `${generation[i]}:${step[i]}:${attempt[i]}`;
    const group = groups.get(key);
    if (group) group.push(i);
    else if (groups.size >= MAX_STEPS || (groups.size >= MIN_STEPS && ended[i] < newest - WINDOW_S)) break;
    else groups.set(key, [i]);
  }
  /** @type {Map<number, Times>} */
  const found = new Map();
  for (const places of groups.values()) {
    const first = Math.min(...places.map((i) => ready[i]).filter(Number.isFinite));
    for (const i of places) {
      let own = found.get(slot[i]);
      if (!own) found.set(slot[i], (own = { compute: [], waits: [], rates: [], lags: [], data: [], steps: [] }));
      own.compute.push(compute[i]);
      own.waits.push(wait[i] / whole[i]);
      own.rates.push(samples[i] / (whole[i] - wait[i]));
      own.lags.push(ready[i] - first);
      own.data.push(data[i]);
      own.steps.push(whole[i]);
    }
  }
  return found;
}

/** Who is slow, and why, as far as the numbers tell. @param {Store} store */
export function verdict(store) {
  const members = new Set(store.world?.seats.filter((s) => s.rank !== null).map((s) => s.slot));
  const scores = [...recent(store)]
    .filter(([slot]) => members.has(slot))
    .map(([slot, times]) => {
      const lag = median(times.lags);
      return { slot, times, lag, score: lag / median(times.steps) };
    })
    .filter(({ score }) => Number.isFinite(score))
    .sort((a, b) => b.score - a.score);
  const [mute] = store.stall_s ? store.silent : [];
  if (mute) {
    const since = `nothing was heard of it for ${number(mute.silent_s)} s`;
    const sentence = `Slot ${mute.slot} holds the others up: ${since}, and no step was committed for ${number(store.stall_s)} s.`;
    return { slot: mute.slot, name: `slot ${mute.slot}`, detail: since, sentence };
  }
  const [worst, next] = scores;
  if (!worst || !next) return { slot: null, name: NONE, detail: "needs two ranks with steps", sentence: "" };
  if (worst.score < SLOW_SHARE || worst.score < 2 * next.score) {
    const most = percent(worst.score);
    const sentence = `Nobody holds the others up: the last one comes ${ms(worst.lag)} ms after the first (${most} of a step).`;
    return { slot: null, name: "nobody", detail: `last comes ${ms(worst.lag)} ms after first`, sentence };
  }
  const seat = store.world?.seats.find((s) => s.slot === worst.slot);
  /** @param {(times: Times) => number[]} part */
  const longer = (part) =>
    median(part(worst.times)) - median(scores.slice(1).map(({ times }) => median(part(times))));
  const [data, computing] = [longer((t) => t.data), longer((t) => t.compute)];
  const isData = data > worst.lag / 2;
  const asked = (seat?.slow_factor ?? 1) > 1;
  if (!asked && data + computing < worst.lag / EXPLAINED) {
    const late = `slot ${worst.slot} comes ${ms(worst.lag)} ms after the first`;
    return {
      slot: null,
      name: "nobody alone",
      detail: `${late}, but computes no longer`,
      sentence:
        `Though ${late} (${percent(worst.score)} of a step), neither its computing nor its data takes longer: ` +
        `it waits for others within the step${store.isPipeline ? ", as the first stage of a pipeline does" : ""}.`,
    };
  }
  const cause = asked ? `it was made ${seat?.slow_factor} times as slow` : isData ? "it waits for data" : "its computing takes longer";
  return {
    slot: worst.slot,
    name: `slot ${worst.slot}`,
    detail: `${ms(worst.lag)} ms late; ${cause}`,
    sentence:
      `Slot ${worst.slot} holds the others up: it comes ${ms(worst.lag)} ms after the first ` +
      `(${percent(worst.score)} of a step), because ${cause}.`,
  };
}

/** Of which steps compute times are known, where not of all. @param {Store} store */
function known({ rows, steps }) {
  if (!rows.length || !steps.length) return "";
  const [begin, end] = [rows.get("step")[0], rows.get("step")[rows.length - 1]];
  const first = steps.get("step").reduce((a, b) => Math.min(a, b), Infinity);
  // Of a long run only some steps are sent: the first need not be among them.
  const isLate = first - begin > Math.max(MIN_STEPS, (end - begin) * MISSING_SHARE);
  return isLate ? `Compute times are known from step ${number(first)} on.` : "";
}

export class Throughput extends Panel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code @param {import("./charts.js").Look} look */
  constructor(parent, code, look) {
    super({
      parent,
      code,
      name: "throughput",
      question: "Who is slow, and does it matter?",
      figures: ["rate", "compute"],
    });
    this.look = look;
    this.twin = () => this.numbers();
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    if (!store.rows.length && !store.steps.length) {
      const isOver = store.run && store.isOver;
      this.explain(isOver ? "No step was committed." : "No step is committed yet. Throughput comes with the first steps of a run.");
      return;
    }
    this.explain("");
    const { sentence } = verdict(store);
    const curves = this.curves(store);
    const isMany = curves.length > MAX_LINES;
    const how = isMany ? "A strip for each slot below: the lighter, the longer it computes." : "";
    const stands = store.isPaused ? `The run is paused after step ${number((store.run?.step ?? 0) - 1)}; until then: ` : "";
    this.say(`${stands}${sentence} In synchronous training all ranks share one pace; compute time tells them apart. ${how} ${known(store)}`.trim());
    this.fillTwin();
    if (!this.isReady) return;
    const [rate, compute] = this.charts;
    const { rows } = store;
    const rates = rows.get("samples").map((n, i) => n / rows.get("seconds")[i]);
    const x = rows.get("step");
    rate.set("rate", { x, rate: rates, step: x, generation: rows.get("generation"), ranks: rows.get("world_size") });
    rate.set("rate_dots", dots(x, rates));
    rate.set("marks", marks(store, this.look, rates, x));
    compute.figure.left[0].axis_label = isMany ? "slot" : "compute, ms";
    compute.set("compute", isMany ? EMPTY : this.lines(curves));
    compute.set("compute_dots", isMany ? NO_DOTS : this.dots(curves));
    compute.set("heat", isMany ? this.heat(curves) : NO_HEAT);
  }

  /** Compute time of each slot over steps. @param {Store} store */
  curves(store) {
    const { steps } = store;
    const [step, slot, value, generation] = ["step", "slot", "compute_s", "generation"].map((n) => steps.get(n));
    /** Of each slot, the generation of its last step. @type {Map<number, number>} */
    const last = new Map();
    /** @type {Map<number, {slot: number, x: number[], y: number[]}>} */
    const found = new Map();
    for (let i = 0; i < steps.length; i++) {
      let own = found.get(slot[i]);
      if (!own) found.set(slot[i], (own = { slot: slot[i], x: [], y: [] }));
      const before = own.x[own.x.length - 1];
      const isMissing = before !== undefined && step[i] > before + 1;
      // Of a long run only some steps are sent: there, what is missing was not missed.
      if (isMissing && (step[i] > store.sparseUntil || store.wasAway(slot[i], last.get(slot[i]) ?? 0, generation[i]))) {
        own.x.push(before + 0.5); // it was away for some steps: no line across them
        own.y.push(NaN);
      }
      last.set(slot[i], generation[i]);
      own.x.push(step[i]);
      own.y.push(value[i] * 1000);
    }
    return [...found.values()].sort((a, b) => a.slot - b.slot);
  }

  /** @param {ReturnType<Throughput["curves"]>} curves */
  lines(curves) {
    return {
      xs: curves.map(({ x }) => x.slice(-MAX_POINTS)),
      ys: curves.map(({ y }) => y.slice(-MAX_POINTS)),
      colour: curves.map(({ slot }) => this.look.colour(slot)),
      dash: curves.map(({ slot }) => this.look.dash(slot)),
      slot: curves.map(({ slot }) => slot),
    };
  }

  /** Of steps that stand alone. @param {ReturnType<Throughput["curves"]>} curves */
  dots(curves) {
    const found = curves.flatMap(({ slot, x, y }) => lonely(y).map((i) => ({ x: x[i], y: y[i], colour: this.look.colour(slot) })));
    return { x: found.map(({ x }) => x), y: found.map(({ y }) => y), colour: found.map(({ colour }) => colour) };
  }

  /** Too many for lines: a strip for each. @param {ReturnType<Throughput["curves"]>} curves */
  heat(curves) {
    /** @type {Record<keyof NO_HEAT, (number | string)[]>} */
    const cells = { left: [], right: [], bottom: [], top: [], colour: [], slot: [], ms: [] };
    const recentOnes = curves.map(({ slot, x, y }) => ({ slot, x: x.slice(-200), y: y.slice(-200) }));
    const known = recentOnes.flatMap(({ y }) => y.filter(Number.isFinite));
    const low = Math.min(...known);
    const height = Math.max(...known) - low || 1;
    recentOnes.forEach(({ slot, x, y }, lane) => {
      y.forEach((value, i) => {
        if (!Number.isFinite(value)) return;
        cells.left.push(x[i] - 0.5);
        cells.right.push(x[i] + 0.5);
        cells.bottom.push(lane - 0.5);
        cells.top.push(lane + 0.5);
        cells.colour.push(this.look.heat((value - low) / height));
        cells.slot.push(slot);
        cells.ms.push(value);
      });
    });
    return cells;
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    const header = ["slot", "samples/s while not waiting", "compute ms", "data ms", "waiting", "comes after first ms", "of a step"];
    if (!this.store) return { header, rows: [] };
    const rows = [...recent(this.store)].sort((a, b) => a[0] - b[0]).map(([slot, t]) => {
      const lag = median(t.lags);
      const of = percent(lag / median(t.steps));
      return [`${slot}`, number(median(t.rates)), ms(median(t.compute)), ms(median(t.data)), percent(median(t.waits)), ms(lag), of];
    });
    const note = rows.length > MAX_TABLE_ROWS ? `${MAX_TABLE_ROWS} of ${counted(rows.length, "slot")}` : "";
    return { header, rows: rows.slice(0, MAX_TABLE_ROWS), note };
  }
}

const NO_DOTS = { x: [], y: [], colour: [] };
const EMPTY = { xs: [], ys: [], colour: [], dash: [], slot: [] };
const NO_HEAT = { left: [], right: [], bottom: [], top: [], colour: [], slot: [], ms: [] };
