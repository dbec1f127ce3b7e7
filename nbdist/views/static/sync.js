// Gradient sync: when each bucket is reduced, and whether the backward hides it.

import { common, median, ms, NONE, percent, size, stacked, total, union } from "./format.js";
import { Bars, legendOf, StepPanel } from "./steps.js";

/** @typedef {import("./store.js").Store} Store */
/** @typedef {[number, number]} Interval */

const FORWARD = 3;
const BACKWARD = 4;
const KINDS = /** @type {Record<number, [string, string, string, string]>} */ ({
  3: ["forward", "F", "#56B4E9", " "],
  4: ["backward", "B", "#0072B2", " "],
  5: ["vote", "V", "#CC79A7", "."],
  6: ["optimizer", "O", "#009E73", " "],
  7: ["evaluation", "E", "#F0E442", "."],
  8: ["waiting for data", "D", "#8c959f", "."],
  9: ["checkpoint", "C", "#8c959f", " "],
});
const BUCKET_COLOUR = "#D55E00";
const RECENT_STEPS = 20;
const LETTER_SHARE = 0.03;
const MAX_LANES = 16;
const MAX_ROWS = 5;
const LANES_PX = 340;
/** Of a slot's lane: what computing has, and each row of buckets that overlap; with the gaps. */
const COMPUTE_PX = 24;
const ROW_PX = 14;
/** A row that is lower has no room for a letter. */
const LETTER_PX = 9;
const [COMPUTE_SHARE, BUCKETS_SHARE] = [0.4, 0.5];
const ALONE = "One rank has nobody to sum its gradients with: there is no gradient sync.";
const NOT_YET = "No bucket of gradients has been summed yet. Buckets come with a trainer that uses data parallelism.";
const GONE = "No bucket of this run is known: it summed no gradients in buckets, or what was told of them is not kept.";

/** What one slot did in one attempt at a step. */
class Part {
  constructor() {
    /** @type {{kind: number, ident: number, from: number, to: number}[]} */ this.spans = [];
    /** @type {{bucket: number, ready: number, from: number, to: number, bytes: number}[]} */
    this.buckets = [];
  }

  get began() {
    const starts = [...this.spans, ...this.buckets].map((part) => part.from);
    return Math.min(...starts);
  }

  get isSummed() {
    return this.buckets.length > 0 && this.buckets.every((bucket) => Number.isFinite(bucket.to));
  }

  /** Communication, how much of it the slot's own computing hid, and what was left. */
  measure() {
    const sums = union(this.buckets.map((b) => /** @type {Interval} */ ([b.from, b.to])));
    const own = this.spans.filter((s) => s.kind === FORWARD || s.kind === BACKWARD);
    const computing = union(own.map((s) => /** @type {Interval} */ ([s.from, s.to])));
    const all = total(sums);
    const hidden = common(sums, computing);
    const ready = this.buckets.map((b) => b.ready);
    const done = this.buckets.map((b) => b.to);
    return {
      all,
      hidden: all > 0 ? hidden / all : NaN,
      exposed: all - hidden,
      queue: median(this.buckets.map((b) => b.from - b.ready)),
      tail: ready.length ? Math.max(0, Math.max(...done) - Math.max(...ready)) : NaN,
      bytes: this.buckets.reduce((sum, b) => sum + b.bytes, 0),
    };
  }
}

/** Attempts at steps of which buckets are known, oldest first. @param {Store} store */
export function attempts(store) {
  /** @type {Map<string, {step: number, generation: number, attempt: number, slots: Map<number, Part>}>} */
  const found = new Map();
  /** @param {import("./store.js").Table} table @param {number} i @param {boolean} adds */
  const part = (table, i, adds) => {
    const [step, generation, attempt] = ["step", "generation", "attempt"].map((n) => table.get(n)[i]);
    const key = `${generation}:${step}:${attempt}`;
    let entry = found.get(key);
    if (!entry) {
      if (!adds) return null;
      entry = { step, generation, attempt, slots: new Map() };
      found.set(key, entry);
    }
    const slot = table.get("slot")[i];
    let own = entry.slots.get(slot);
    if (!own) entry.slots.set(slot, (own = new Part()));
    return own;
  };
  const { buckets, spans } = store;
  for (let i = 0; i < buckets.length; i++) {
    part(buckets, i, true)?.buckets.push({
      bucket: buckets.get("bucket")[i],
      ready: buckets.get("ready_at")[i],
      from: buckets.get("launch_at")[i],
      to: buckets.get("done_at")[i],
      bytes: buckets.get("size_bytes")[i],
    });
  }
  for (let i = 0; i < spans.length; i++) {
    part(spans, i, false)?.spans.push({
      kind: spans.get("kind")[i],
      ident: spans.get("ident")[i],
      from: spans.get("began_at")[i],
      to: spans.get("ended_at")[i],
    });
  }
  const all = [...found.values()];
  const whole = all.filter((entry) => [...entry.slots.values()].every((its) => its.isSummed));
  return whole.length ? whole : all; // of the last one of a run some slots may not have told all
}

/** Over the last steps and all slots: the share of communication that was hidden. @param {Store} store */
export function shares(store) {
  if ((store.world?.world_size ?? 0) < 2) return { hidden: NaN, why: "one rank: nothing to sum" };
  const parts = attempts(store).slice(-RECENT_STEPS).flatMap((entry) => [...entry.slots.values()]);
  const measured = parts.map((part) => part.measure());
  const all = measured.reduce((sum, m) => sum + m.all, 0);
  if (!(all > 0)) return { hidden: NaN, why: "no bucket yet" };
  const exposed = measured.reduce((sum, m) => sum + m.exposed, 0);
  const each = ms(median(measured.map((m) => m.exposed)));
  return { hidden: 1 - exposed / all, why: `mean of the last ${RECENT_STEPS} steps; usually ${each} ms in the open` };
}

/** @extends {StepPanel<ReturnType<typeof attempts>[0]>} */
export class Sync extends StepPanel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code @param {import("./charts.js").Look} look */
  constructor(parent, code, look) {
    const options = {
      parent,
      code,
      name: "sync",
      question: "When is each bucket summed, and does the backward hide it?",
      figures: ["sync"],
    };
    super(options, legend());
    this.look = look;
    this.twin = () => this.numbers();
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    const alone = (store.world?.world_size ?? 0) < 2;
    const none = store.isOver ? GONE : NOT_YET;
    this.take(attempts(store), alone ? ALONE : none, store.isOver || store.isPaused);
  }

  /** @override */
  draw() {
    const entry = this.chosen;
    if (!entry || !this.isReady) return;
    const [chart] = this.charts;
    const slots = [...entry.slots.keys()].sort((a, b) => a - b).slice(0, MAX_LANES);
    const begins = slots.map((slot) => entry.slots.get(slot)?.began ?? Infinity);
    const zero = Math.min(...begins);
    const bars = new Bars();
    const rows = slots.map((slot) => stacked((entry.slots.get(slot)?.buckets ?? []).map((b) => [b.from, Math.max(b.from, b.to || 0)])));
    const numRows = Math.max(1, ...rows.flat().map((row) => row + 1));
    const most = Math.max(...slots.map((slot) => entry.slots.get(slot)?.buckets.length ?? 0));
    // By the number of buckets, which is always the same, and not by how many overlap just now.
    const wanted = COMPUTE_PX + ROW_PX * Math.max(2, Math.min(most, MAX_ROWS));
    const each = Math.max(20, Math.min(wanted, Math.round(LANES_PX / slots.length)));
    const high = BUCKETS_SHARE / numRows;
    let end = 0;
    slots.forEach((slot, lane) => {
      const part = entry.slots.get(slot);
      if (!part) return;
      for (const span of part.spans) {
        const [what, letter, colour, hatch] = KINDS[span.kind] ?? [`kind ${span.kind}`, "", "#8c959f", " "];
        const name = span.kind <= BACKWARD && span.ident >= 0 ? `${what}, micro-batch ${span.ident}` : what;
        bars.add(span.from - zero, span.to - zero, lane + 0.05, COMPUTE_SHARE, colour, hatch, name, slot, letter, NONE);
        end = Math.max(end, span.to - zero);
      }
      part.buckets.forEach((b, i) => {
        const top = lane + 0.46 + rows[lane][i] * high;
        const letter = high * each < LETTER_PX ? "" : `${b.bucket}`;
        bars.add(b.from - zero, b.to - zero, top, 0.9 * high, BUCKET_COLOUR, "/", `bucket ${b.bucket}`, slot, letter, size(b.bytes));
        end = Math.max(end, b.to - zero);
      });
    });
    chart.lanes(slots.map((slot) => `slot ${slot}`), each);
    chart.set("bars", bars.columns);
    chart.set("letters", bars.letters(end * 1000 * LETTER_SHARE));
    chart.range(0, Math.max(end * 1000, 0.001) * 1.01);
    this.sum(entry, slots);
  }

  /** @param {ReturnType<typeof attempts>[0]} entry @param {number[]} slots */
  sum(entry, slots) {
    this.tell(entry);
    const measured = slots.map((slot) => ({ slot, ...(entry.slots.get(slot) ?? new Part()).measure() }));
    const worst = measured.reduce((a, b) => (b.exposed > a.exposed ? b : a), measured[0]);
    const hidden = median(measured.map((m) => m.hidden));
    const buckets = Math.max(...slots.map((slot) => entry.slots.get(slot)?.buckets.length ?? 0));
    const left = entry.slots.size > slots.length ? ` The first ${slots.length} of ${entry.slots.size} slots are shown.` : "";
    this.say(
      `In this step ${percent(hidden)} of the communication is hidden behind computing, by the median of its slots; at most ${ms(worst.exposed)} ms are in ` +
        `the open (slot ${worst.slot}). ${buckets} ${buckets === 1 ? "bucket" : "buckets"}, ${size(worst.bytes)} together.${left} Waiting for slower slots counts; times are the host's.`,
    );
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    const entry = this.chosen;
    const header = ["slot", "buckets", "size", "communication ms", "hidden", "in the open ms", "queue ms", "tail ms"];
    if (!entry) return { header, rows: [] };
    const slots = [...entry.slots.keys()].sort((a, b) => a - b);
    const rows = slots.map((slot) => {
      const part = entry.slots.get(slot) ?? new Part();
      const m = part.measure();
      return [
        `${slot}`,
        `${part.buckets.length}`,
        size(m.bytes),
        ms(m.all),
        percent(m.hidden),
        ms(m.exposed),
        ms(m.queue),
        ms(m.tail),
      ];
    });
    return { header, rows };
  }
}

function legend() {
  /** @type {[string, string][]} */
  const keys = [8, 3, 4, 5, 6].map((kind) => [KINDS[kind][2], `${KINDS[kind][1]} ${KINDS[kind][0]}`]);
  return legendOf(keys, [[BUCKET_COLOUR, "n bucket being summed"]]);
}
