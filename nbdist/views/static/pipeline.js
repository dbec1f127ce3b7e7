// A pipeline: what each rank computed when, who waited for whom, beside what was planned.

import { element, median, ms, NONE, number, percent, size } from "./format.js";
import { Bars, legendOf, StepPanel } from "./steps.js";

/** @typedef {import("./store.js").Store} Store */
/** @typedef {import("./store.js").Table} Table */
/** @typedef {{slot: number, kind: number, microbatch: number, stage: number, from: number, to: number}} Part */
/** @typedef {{slot: number, whom: number, microbatch: number, from: number, to: number}} Wait */

const FORWARD = 3;
const BACKWARD = 4;
const INPUTS = 10;
const WEIGHTS = 11;
const SEND = 23;
const RECEIVE = 24;
/** Name, colour, colour of what is planned, how many forwards it takes. */
const KINDS = /** @type {Record<number, [string, string, string, number]>} */ ({
  [FORWARD]: ["forward", "#56B4E9", "rgba(86,180,233,0.4)", 1],
  [BACKWARD]: ["backward", "#0072B2", "rgba(0,114,178,0.4)", 2],
  [INPUTS]: ["backward to inputs", "#0072B2", "rgba(0,114,178,0.4)", 1],
  [WEIGHTS]: ["backward to weights", "#009E73", "rgba(0,158,115,0.4)", 1],
});
const WAIT_COLOUR = "rgba(128,128,128,0.25)";
/** Of the stages of one rank, the first, the second … */
const HATCHES = [" ", ".", "-", "x"];
const RECENT_STEPS = 20;
/** A formula that gives something else is not that of the plan. */
const LIKE_FORMULA = 0.005;
const LETTER_SHARE = 0.018;
const MAX_LANES = 16;
const LANES_PX = 340;
const NO_PIPELINE = "This run is no pipeline: its model is not cut into stages, as strategy=Pipeline(…) does.";
const NOT_YET = "No batch has gone through the stages yet; what is planned is known.";
const GONE = "No step of this pipeline is known: none was taken, or what was told of them is not kept.";

/** @param {Part} part */
function wording({ kind, microbatch, stage }) {
  return `${KINDS[kind][0]}, micro-batch ${microbatch}, stage ${stage}`;
}

/** @param {Part[]} parts */
function idle(parts) {
  if (!parts.length) return NaN;
  const slots = new Set(parts.map((part) => part.slot)).size;
  const from = parts.reduce((least, part) => Math.min(least, part.from), Infinity);
  const to = parts.reduce((most, part) => Math.max(most, part.to), -Infinity);
  const busy = parts.reduce((sum, part) => sum + part.to - part.from, 0);
  return to > from ? 1 - busy / (slots * (to - from)) : 0;
}

/** Slot → which of the pipelines side by side it is in: slots with the same stages are twins. @param {Part[]} parts */
function linesOf(parts) {
  /** @type {Map<number, Set<number>>} */ const stages = new Map();
  for (const { slot, stage } of parts) stages.set(slot, (stages.get(slot) ?? new Set()).add(stage));
  /** @type {Map<string, number>} */ const twins = new Map();
  /** @type {Map<number, number>} */ const lines = new Map();
  for (const slot of [...stages.keys()].sort((a, b) => a - b)) {
    const own = [...(stages.get(slot) ?? [])].sort((a, b) => a - b).join();
    lines.set(slot, twins.get(own) ?? 0);
    twins.set(own, 1 + (twins.get(own) ?? 0));
  }
  return lines;
}

/** What must have been done on whichever rank before it. @param {Part} part @param {number} stages */
function needed({ kind, stage }, stages) {
  if (kind === FORWARD) return stage ? { stage: stage - 1, kinds: [FORWARD] } : null;
  if (kind === WEIGHTS || stage + 1 >= stages) return null;
  return { stage: stage + 1, kinds: [BACKWARD, INPUTS] };
}

/** One attempt at a step: the way of a batch through all stages. */
class Passage {
  /** @param {number} step @param {number} generation @param {number} attempt */
  constructor(step, generation, attempt) {
    this.step = step;
    this.generation = generation;
    this.attempt = attempt;
    /** @type {Part[]} */ this.parts = [];
    /** @type {Part[]} in forwards */ this.planned = [];
    /** @type {Map<number, number>} */ this.sent = new Map();
    /** @type {Map<number, number>} */ this.received = new Map();
    /** @type {Wait[] | undefined} */ this.foundWaits = undefined;
  }

  /** Its parts in order, from when the first began. */
  settle() {
    const zero = this.parts.reduce((least, part) => Math.min(least, part.from), Infinity);
    this.parts = this.parts.map((part) => ({ ...part, from: part.from - zero, to: part.to - zero }));
    this.parts.sort((a, b) => a.to - b.to);
  }

  /** Each stage went backward as often as forward, all as often as was planned. */
  get isWhole() {
    /** @type {Map<number, number>} */ const counts = new Map();
    for (const { kind, stage } of this.parts) {
      if (kind !== WEIGHTS) counts.set(stage, (counts.get(stage) ?? 0) + 1);
    }
    const each = [...counts.values()];
    const planned = this.planned.filter(({ kind }) => kind !== WEIGHTS).length;
    const isEven = new Set(each).size === 1 && Math.max(...counts.keys()) + 1 === each.length;
    return isEven && (!planned || planned === each.reduce((sum, count) => sum + count, 0));
  }

  /** From the first stage on. @returns {number[]} */
  get slots() {
    /** @type {Map<number, number>} */ const first = new Map();
    for (const { slot, stage } of [...this.planned, ...this.parts]) {
      first.set(slot, Math.min(stage, first.get(slot) ?? stage));
    }
    return [...first.keys()].sort((a, b) => (first.get(a) ?? 0) - (first.get(b) ?? 0) || a - b);
  }

  /** @param {number} slot @returns {number[]} */
  stages(slot) {
    const all = [...this.planned, ...this.parts].filter((part) => part.slot === slot);
    return [...new Set(all.map((part) => part.stage))].sort((a, b) => a - b);
  }

  get end() {
    return this.parts.reduce((most, part) => Math.max(most, part.to), 0);
  }

  /** What a unit of the plan lasted. */
  get forward_s() {
    const units = this.parts.reduce((sum, part) => sum + KINDS[part.kind][3], 0);
    return this.parts.reduce((sum, part) => sum + part.to - part.from, 0) / units;
  }

  /** Times in which a slot waited for what another one sends. @returns {Wait[]} */
  get waits() {
    return (this.foundWaits ??= this.findWaits());
  }

  /** How long a slot waited for others, in s. @param {number} slot */
  waited(slot) {
    return this.waits.reduce((sum, wait) => sum + (wait.slot === slot ? wait.to - wait.from : 0), 0);
  }

  findWaits() {
    const { lines } = this;
    const whose = new Map(this.parts.map((part) => [`${lines.get(part.slot)}:${part.stage}`, part.slot]));
    const num = new Set(this.parts.map((part) => part.stage)).size;
    /** @type {Map<number, number>} */ const until = new Map();
    /** @type {Wait[]} */ const found = [];
    for (const part of [...this.parts].sort((a, b) => a.from - b.from)) {
      const before = needed(part, num);
      const whom = before ? (whose.get(`${lines.get(part.slot)}:${before.stage}`) ?? part.slot) : part.slot;
      const from = until.get(part.slot) ?? 0;
      if (whom !== part.slot && part.from > from) {
        found.push({ slot: part.slot, whom, microbatch: part.microbatch, from, to: part.from });
      }
      until.set(part.slot, part.to);
    }
    return found;
  }

  /** Which slot is in which of the pipelines side by side. */
  get lines() {
    return linesOf(this.planned.length ? this.planned : this.parts);
  }

  /** The longest chain of what waits for what, back from what ended last. @returns {Part[]} */
  get chain() {
    const num = new Set(this.parts.map((part) => part.stage)).size;
    const { lines } = this;
    const name = (/** @type {Omit<Part, "from" | "to">} */ { slot, kind, stage, microbatch }) => [lines.get(slot), kind, stage, microbatch].join();
    const known = new Map(this.parts.map((part) => [name(part), part]));
    /** @type {Map<number, Part>} */ const last = new Map();
    /** @type {Map<Part, Part | undefined>} */ const before = new Map();
    for (const part of this.parts) {
      before.set(part, last.get(part.slot));
      last.set(part.slot, part);
    }
    const found = [];
    let part = this.parts[this.parts.length - 1];
    while (part && found.length < this.parts.length) {
      found.push(part);
      const { slot, microbatch } = part;
      const other = needed(part, num);
      const sent = other?.kinds.map((kind) => known.get(name({ slot, kind, stage: other.stage, microbatch }))) ?? [];
      const earlier = [before.get(part), ...sent].flatMap((one) => (one ? [one] : []));
      part = earlier.reduce((a, b) => (b.to > a.to ? b : a), earlier[0]);
    }
    return found;
  }

  /** Micro-batches that have gone forward on a slot's stages and not yet backward, at most. @param {number} slot */
  most(slot) {
    let now = 0;
    let most = 0;
    for (const part of this.parts) {
      if (part.slot !== slot || part.kind === WEIGHTS) continue;
      now += part.kind === FORWARD ? 1 : -1;
      most = Math.max(most, now);
    }
    return most;
  }

  get idle() {
    return idle(this.parts);
  }

  get idlePlanned() {
    return idle(this.planned);
  }

  /** By which the plan's idle share comes about; empty where no formula gives it. */
  get formula() {
    const lines = linesOf(this.planned);
    const ranks = Math.floor(lines.size / (1 + Math.max(0, ...lines.values())));
    if (ranks < 2) return "";
    const each = Math.floor(new Set(this.planned.map((part) => part.stage)).size / ranks);
    const num = 1 + this.planned.reduce((most, part) => Math.max(most, part.microbatch), 0);
    const halves = this.planned.some((part) => part.kind === WEIGHTS) ? 3 : 1;
    const share = (ranks - 1) / (halves * each * num + ranks - 1);
    if (Math.abs(share - this.idlePlanned) > LIKE_FORMULA) return "";
    const factors = `${halves > 1 ? "3·" : ""}${each > 1 ? "v·" : ""}`;
    const ofAll = lines.size > ranks ? ` of ${lines.size} ranks` : "";
    return `(p−1)/(${factors}m+p−1) with p = ${ranks}${ofAll}${each > 1 ? `, v = ${each}` : ""}, m = ${num}`;
  }
}

/** @param {Table} table @param {number} i @param {string} stage @param {string} from @param {string} to @returns {Part} */
function partOf(table, i, stage, from, to) {
  const [slot, kind, microbatch] = ["slot", "kind", "ident"].map((name) => table.get(name)[i]);
  return { slot, kind, microbatch, stage: table.get(stage)[i], from: table.get(from)[i], to: table.get(to)[i] };
}

/** @type {WeakMap<object, Passage[]>} Of a frame's header: overview and panel want the same. */
const KNOWN = new WeakMap();

/** Attempts at steps of a pipeline, oldest first; those that went through, if any did. @param {Store} store */
function passages(store) {
  if (!store.header) return [];
  let known = KNOWN.get(store.header);
  if (!known) KNOWN.set(store.header, (known = found(store)));
  return known;
}

/** @param {Store} store */
function found(store) {
  /** @type {Map<string, Passage>} */ const entries = new Map();
  const { spans, plans } = store;
  const [steps, generations, attempts, kinds] = ["step", "generation", "attempt", "kind"].map((name) => spans.get(name));
  for (let i = 0; i < spans.length; i++) {
    const isPassedOn = kinds[i] === SEND || kinds[i] === RECEIVE;
    if (!isPassedOn && !(kinds[i] in KINDS)) continue;
    const key = `${generations[i]}:${steps[i]}:${attempts[i]}`;
    let entry = entries.get(key);
    if (!entry) entries.set(key, (entry = new Passage(steps[i], generations[i], attempts[i])));
    if (!isPassedOn) entry.parts.push(partOf(spans, i, "value", "began_at", "ended_at"));
    else (kinds[i] === SEND ? entry.sent : entry.received).set(spans.get("slot")[i], spans.get("value")[i]);
  }
  /** @type {Map<number, Part[]>} */ const planned = new Map();
  for (let i = 0; i < plans.length; i++) {
    const generation = plans.get("generation")[i];
    let parts = planned.get(generation);
    if (!parts) planned.set(generation, (parts = []));
    parts.push(partOf(plans, i, "stage", "began", "ended"));
  }
  const all = [...entries.values()].filter((entry) => entry.parts.length);
  for (const entry of all) {
    entry.planned = planned.get(entry.generation) ?? [];
    entry.settle();
  }
  const whole = all.filter((entry) => entry.isWhole);
  return whole.length ? whole : all;
}

/** Over the last steps: the bubble, and what was planned. @param {Store} store */
export function bubble(store) {
  const recent = passages(store).slice(-RECENT_STEPS);
  const newest = recent[recent.length - 1];
  if (!newest) return { idle: NaN, why: "no step yet" };
  const planned = newest.planned.length ? `${percent(newest.idlePlanned)} planned` : "its plan is not known";
  return { idle: median(recent.map((entry) => entry.idle)), why: planned };
}

/** @extends {StepPanel<Passage>} */
export class Pipeline extends StepPanel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code @param {import("./charts.js").Look} look */
  constructor(parent, code, look) {
    const options = { parent, code, name: "pipeline", question: "Where is the bubble?", figures: ["pipeline"] };
    const legend = element("span");
    super(options, legend);
    this.legend = legend;
    this.look = look;
    this.twin = () => this.numbers();
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    const none = store.isOver ? GONE : NOT_YET;
    const known = store.isPipeline ? passages(store) : [];
    this.take(known, store.isPipeline ? none : NO_PIPELINE, store.isOver || store.isPaused);
  }

  /** @override */
  draw() {
    const entry = this.chosen;
    if (!entry || !this.isReady) return;
    const [chart] = this.charts;
    const slots = entry.slots.slice(0, MAX_LANES);
    const lanes = new Map(slots.map((slot, lane) => [slot, lane]));
    const bars = new Bars();
    for (const wait of entry.waits) {
      const lane = lanes.get(wait.slot);
      if (lane === undefined) continue;
      const what = `waits for micro-batch ${wait.microbatch} from slot ${wait.whom}`;
      bars.add(wait.from, wait.to, lane + 0.16, 0.34, WAIT_COLOUR, "/", what, wait.slot, "", NONE);
    }
    for (const part of entry.parts) {
      const lane = lanes.get(part.slot);
      if (lane === undefined) continue;
      const [, colour] = KINDS[part.kind];
      const hatch = HATCHES[entry.stages(part.slot).indexOf(part.stage) % HATCHES.length];
      bars.add(part.from, part.to, lane + 0.08, 0.5, colour, hatch, wording(part), part.slot, `${part.microbatch}`, NONE);
    }
    const unit_s = entry.forward_s;
    for (const part of entry.planned) {
      const lane = lanes.get(part.slot);
      if (lane === undefined) continue;
      const [, , colour] = KINDS[part.kind];
      const what = `planned: ${wording(part)}`;
      bars.add(part.from * unit_s, part.to * unit_s, lane + 0.64, 0.28, colour, " ", what, part.slot, "", NONE);
    }
    const end = 1000 * entry.planned.reduce((most, part) => Math.max(most, part.to * unit_s), entry.end);
    const each = Math.max(26, Math.min(56, Math.round(LANES_PX / slots.length)));
    chart.lanes(slots.map((slot) => `slot ${slot}`), each);
    chart.set("bars", { ...bars.columns, edge: bars.columns.what.map(() => this.look.ground) });
    chart.set("chain", this.outline(entry, lanes));
    chart.set("letters", bars.letters(end * LETTER_SHARE));
    chart.range(0, Math.max(end, 0.001) * 1.01);
    this.sum(entry);
  }

  /** @param {Passage} entry @param {Map<number, number>} lanes */
  outline(entry, lanes) {
    const shown = entry.chain.filter((part) => lanes.has(part.slot));
    const tops = shown.map((part) => (lanes.get(part.slot) ?? 0) + 0.08);
    return {
      left: shown.map((part) => part.from * 1000),
      right: shown.map((part) => part.to * 1000),
      top: tops,
      bottom: tops.map((top) => top + 0.5),
      ink: shown.map(() => this.look.text),
    };
  }

  /** @param {Passage} entry */
  sum(entry) {
    this.tell(entry);
    this.key(entry);
    const slots = entry.slots;
    if (slots.length < 2) return this.say("One rank has all stages: nothing is sent, nobody waits.");
    const formula = entry.formula ? ` = ${entry.formula}` : " with equal forwards";
    const planned = entry.planned.length ? `planned are ${percent(entry.idlePlanned)}${formula}` : "what was planned is not known";
    const waited = slots.map((slot) => ({ slot, wait: entry.waited(slot), most: entry.most(slot) }));
    const longest = waited.reduce((a, b) => (b.wait > a.wait ? b : a), waited[0]);
    const fullest = waited.reduce((a, b) => (b.most > a.most ? b : a), waited[0]);
    const broken = entry.isWhole ? "" : "This attempt did not come to its end. ";
    const left = slots.length > MAX_LANES ? ` The first ${MAX_LANES} of ${slots.length} slots are shown.` : "";
    this.say(
      `${broken}The bubble is ${percent(entry.idle)} of the ranks' time; ${planned}. Slot ${longest.slot} waits longest for ` +
        `others, ${ms(longest.wait)} ms; slot ${fullest.slot} holds ${fullest.most} micro-batch${fullest.most === 1 ? "" : "es"} at once. ` +
        `Outlined is the chain of what had to come one after another.${left}`,
    );
  }

  /** Of the kinds that there are. @param {Passage} entry */
  key(entry) {
    const kinds = [FORWARD, BACKWARD, INPUTS, WEIGHTS].filter((kind) => entry.parts.some((part) => part.kind === kind));
    const text = kinds.join();
    if (this.legend.dataset.kinds === text) return;
    this.legend.dataset.kinds = text;
    /** @type {[string, string][]} */
    const keys = kinds.map((kind) => [KINDS[kind][1], `n ${KINDS[kind][0]}`]);
    this.legend.replaceChildren(legendOf([...keys, [KINDS[BACKWARD][2], "planned"]], [[WAIT_COLOUR, "waits"]]));
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    const header = ["slot", "stages", "computing ms", "waiting ms", "idle", "idle as planned", "micro-batches at once", "sent", "received"];
    const entry = this.chosen;
    if (!entry) return { header, rows: [] };
    const end = entry.end;
    const plannedEnd = entry.planned.reduce((most, part) => Math.max(most, part.to), 0);
    const busy = (/** @type {Part[]} */ parts, /** @type {number} */ slot) =>
      parts.reduce((sum, part) => sum + (part.slot === slot ? part.to - part.from : 0), 0);
    const rows = entry.slots.map((slot) => [
      `${slot}`,
      entry.stages(slot).join(", "),
      ms(busy(entry.parts, slot)),
      ms(entry.waited(slot)),
      percent(1 - busy(entry.parts, slot) / end),
      plannedEnd ? percent(1 - busy(entry.planned, slot) / plannedEnd) : NONE,
      number(entry.most(slot)),
      size(entry.sent.get(slot) ?? 0),
      size(entry.received.get(slot) ?? 0),
    ]);
    return { header, rows };
  }
}
