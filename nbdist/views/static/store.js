// What the page knows of a cluster: the frames put together. No drawing.

/** @typedef {import("./types").Columns} Columns */

const MAX_ROWS = 8000;
const MAX_STEPS = 24000;
const MAX_DETAILS = 8000;
const MAX_MEMORY = 24000;
/** So many of the last rows stay when others are thinned out. */
const NUM_LAST = 1000;
const SEND = 23;
const RECEIVE = 24;

/** Steps of a run that are missing for so long are told, where they are usually quicker. */
const STALL_S = 2;
const STALL_STEPS = 5;

/** Numbers in columns; grows at its end and forgets at its beginning. */
export class Table {
  /** @param {number} limit rows that are kept */
  constructor(limit) {
    this.limit = limit;
    this.length = 0;
    /** @type {Record<string, Float64Array>} */ this.columns = {};
  }

  /** @param {string} name @returns {Float64Array} */
  get(name) {
    return this.columns[name] ?? new Float64Array(0);
  }

  /** @param {Columns | undefined} added */
  append(added) {
    const names = Object.keys(added ?? {});
    if (!added || !names.length) return;
    const count = added[names[0]].length;
    const kept = Math.max(0, Math.min(this.length, this.limit - count));
    for (const name of names) {
      const next = new Float64Array(kept + Math.min(count, this.limit));
      next.set(this.get(name).subarray(this.length - kept));
      next.set(added[name].subarray(Math.max(0, count - this.limit)), kept);
      this.columns[name] = next;
    }
    this.length = kept + Math.min(count, this.limit);
  }

  /**
   * About half of the rows, where more are to come than there is room for: the first, the last ones, and of every four
   * that follow one another of an owner the least and the greatest.
   * @param {number} count that come @param {string} value a column @param {string} [owner] a column
   */
  makeRoom(count, value, owner) {
    if (this.length + count <= this.limit) return;
    const values = this.get(value);
    const owners = owner ? this.get(owner) : null;
    /** @type {Map<number, number[]>} */ const fours = new Map();
    /** @type {number[]} */ const places = [];
    const until = Math.max(0, this.length - NUM_LAST);
    for (let i = 0; i < until; i++) {
      const its = owners?.[i] ?? 0;
      const four = fours.get(its);
      if (!four) places.push(i); // the first of all
      if (!four || four.push(i) === 4) {
        if (four) places.push(...new Set([extreme(four, values, -1), extreme(four, values, 1)]));
        fours.set(its, []);
      }
    }
    for (const four of fours.values()) places.push(...four);
    places.sort((a, b) => a - b);
    for (let i = until; i < this.length; i++) places.push(i);
    for (const [name, column] of Object.entries(this.columns)) {
      this.columns[name] = Float64Array.from(places, (i) => column[i]);
    }
    this.length = places.length;
  }

  /** @param {number} length */
  cut(length) {
    for (const name of Object.keys(this.columns)) {
      this.columns[name] = this.columns[name].subarray(0, length);
    }
    this.length = Math.min(this.length, length);
  }
}

/** The place with the least value, or, with sign -1, the greatest. @param {number[]} places @param {Float64Array} values @param {number} sign */
function extreme(places, values, sign) {
  return places.reduce((a, b) => (sign * values[b] < sign * values[a] ? b : a));
}

/** Attempts come slot by slot; who looks at the last ones wants those of all slots. @param {Columns | undefined} added */
function byTime(added) {
  const ended = added?.ended_at;
  if (!added || !ended) return added;
  const order = [...ended.keys()].sort((a, b) => ended[a] - ended[b]);
  return Object.fromEntries(
    Object.entries(added).map(([name, values]) => [name, Float64Array.from(order, (i) => values[i])]),
  );
}

/** Everything that views draw from. */
export class Store {
  constructor() {
    this.rows = new Table(MAX_ROWS);
    this.steps = new Table(MAX_STEPS);
    this.buckets = new Table(MAX_DETAILS);
    this.spans = new Table(MAX_DETAILS);
    this.plans = new Table(MAX_DETAILS);
    this.traffic = new Table(MAX_DETAILS);
    this.sent = new Table(MAX_MEMORY);
    this.memory = new Table(MAX_MEMORY);
    this.distance = new Table(MAX_MEMORY);
    this.agreement = new Table(MAX_MEMORY);
    this.seats = new Table(MAX_ROWS);
    this.phases = new Table(MAX_ROWS);
    /** @type {Map<number, import("./types").Incident>} */ this.incidents = new Map();
    /** @type {import("./types").Header["evaluations"]} */ this.evaluations = [];
    /** @type {import("./types").Header | null} */ this.header = null;
    /** Why nothing new comes; empty where it does. */ this.lost = "";
    /** Of the steps up to this one only some have rows. */ this.sparseUntil = -1;
    /** When the run was seen to be paused last. */ this.pausedAt = -Infinity;
  }

  /** @param {import("./types").Frame} frame */
  take({ header, tables }) {
    if (header.kind === "snapshot") Object.assign(this, new Store(), { pausedAt: this.pausedAt });
    this.header = header;
    this.lost = "";
    if (this.isPaused) this.pausedAt = header.clock_s;
    for (const { number, incident } of header.incidents) this.incidents.set(number, incident);
    this.evaluations.push(...header.evaluations);
    this.takeRows(tables.rows);
    this.sent.makeRoom(tables.sent?.step?.length ?? 0, "sent_bytes", "slot");
    if (tables.agreement) this.agreement.cut(0); // a frame has all that there are, or none
    this.takeSteps(byTime(tables.steps), header.thinned.includes("steps"));
    for (const name of /** @type {const} */ (["buckets", "spans", "plans", "traffic", "sent", "memory", "distance", "agreement", "seats", "phases"])) {
      this[name].append(tables[name]);
    }
  }

  /** @param {Columns | undefined} added @param {boolean} isThinned some were left out */
  takeSteps(added, isThinned) {
    const last = this.steps.length ? this.steps.get("step")[this.steps.length - 1] : -1;
    const known = this.steps.length;
    this.steps.makeRoom(added?.step?.length ?? 0, "compute_s", "slot");
    if (this.steps.length < known) this.sparseUntil = Math.max(this.sparseUntil, last);
    this.steps.append(added);
    if (isThinned) for (const step of added?.step ?? []) this.sparseUntil = Math.max(this.sparseUntil, step);
  }

  /** A step that is committed again stands over the earlier row, and what followed that one. */
  takeRows(/** @type {Columns | undefined} */ added) {
    if (!added?.step?.length) return;
    /** @type {number[]} */
    const places = [];
    let least = Infinity;
    for (let i = added.step.length - 1; i >= 0; i--) {
      if (added.step[i] >= least) continue;
      places.push(i);
      least = added.step[i];
    }
    places.reverse();
    const known = this.rows.get("step");
    let kept = this.rows.length;
    while (kept && known[kept - 1] >= least) kept--;
    if (kept < this.rows.length) this.rows.cut(kept);
    const isWhole = places.length === added.step.length;
    const chosen = Object.entries(added).map(([name, values]) => [
      name,
      isWhole ? values : Float64Array.from(places, (i) => values[i]),
    ]);
    this.rows.makeRoom(places.length, "loss");
    this.rows.append(Object.fromEntries(chosen));
  }

  get world() {
    return this.header?.world ?? null;
  }

  get run() {
    return this.header?.run ?? null;
  }

  get now() {
    return this.header?.clock_s ?? 0;
  }

  /** A run that is over, or a cluster that ended: nothing new will come. */
  get isOver() {
    const state = this.run?.state ?? "";
    return !this.header?.is_live || ["finished", "stopped", "failed"].includes(state);
  }

  /** Its model is cut into stages: its ranks have told of plans, or of what they sent on. */
  get isPipeline() {
    return this.plans.length > 0 || this.spans.get("kind").some((kind) => kind === SEND || kind === RECEIVE);
  }

  /** Since the run began; of very many only the last ones are sent. */
  get numIncidents() {
    return Math.max(0, ...this.incidents.keys());
  }

  /** Orders may be given. */
  get isLive() {
    return Boolean(this.header?.is_live) && !this.lost;
  }

  /** It stands because somebody wanted it to. */
  get isPaused() {
    return this.run?.state === "paused";
  }

  /** So long no step was committed though one was due, in seconds; 0: it goes on as it should. */
  get stall_s() {
    const { run, rows, now } = this;
    const at = Math.max(rows.get("at")[rows.length - 1], this.pausedAt);
    if (!run || !["running", "recovering"].includes(run.state) || !this.isLive || !rows.length) return 0;
    return now - at > Math.max(STALL_S, STALL_STEPS * run.usual_s) ? now - at : 0;
  }

  /** Members of the group of which nothing is heard. */
  get silent() {
    return this.world?.seats.filter((seat) => seat.silent_s > 0) ?? [];
  }

  /** When engines hung: until they were ended, or until now. @returns {{slot: number, from: number, to: number}[]} */
  get silences() {
    const over = [...this.incidents.values()].flatMap(({ kind, slots, began_at, detect_s }) =>
      kind === "hung" && began_at !== null && detect_s ? slots.map((slot) => ({ slot, from: began_at - detect_s, to: began_at })) : [],
    );
    return [...over, ...this.silent.map(({ slot, silent_s }) => ({ slot, from: this.now - silent_s, to: this.now }))];
  }

  /** When the cluster's story begins. */
  get began() {
    return this.phases.get("at")[0] ?? this.seats.get("at")[0] ?? this.rows.get("at")[0] ?? this.now;
  }

  /** Slots that anything is known of, in order. @returns {number[]} */
  get slots() {
    const found = new Set(this.world?.seats.map((seat) => seat.slot) ?? []);
    for (const slot of this.steps.get("slot")) found.add(slot);
    for (const slot of this.seats.get("slot")) found.add(slot);
    return [...found].sort((a, b) => a - b);
  }

  /** A slot left the group after the first of two generations, and is back in the second. @param {number} slot @param {number} from @param {number} to */
  wasAway(slot, from, to) {
    return [...this.incidents.values()].some(
      ({ kind, slots, generation_before: last }) => kind !== "joined" && slots.includes(slot) && from <= last && last < to,
    );
  }

  /** The step at which an incident belongs: its own, or the first of the generation after it. */
  place(/** @type {import("./types").Incident} */ incident) {
    if (incident.step !== null) return incident.step;
    if (incident.generation_after === null) return null;
    const generations = this.rows.get("generation");
    for (let i = 0; i < generations.length; i++) {
      if (generations[i] >= incident.generation_after) return this.rows.get("step")[i];
    }
    return null;
  }
}
