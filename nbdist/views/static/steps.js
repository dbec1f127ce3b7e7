// A panel that shows one step at a time: the newest one, or one that is gone to; bars of such a step.

import { element, number } from "./format.js";
import { Panel } from "./panel.js";

/** @typedef {{step: number, generation: number, attempt: number}} Attempt */

/** A step is shown for so long: chart, sentence and table are of the same one, and can be read. */
const SHOWN_MS = 1000;

/** @param {Attempt} entry */
function keyOf(entry) {
  return `${entry.generation}:${entry.step}:${entry.attempt}`;
}

/**
 * Has `known`, the attempts at steps that it can show, oldest first, and `draw`.
 * @template {Attempt} T
 */
export class StepPanel extends Panel {
  /** @param {ConstructorParameters<typeof Panel>[0]} options @param {HTMLElement} legend */
  constructor(options, legend) {
    super(options);
    /** @type {string | null} */ this.pinned = null;
    /** @type {T[]} */ this.known = [];
    this.knownSince = -Infinity;
    /** The chart that has shown some of them. @type {unknown} */ this.shownOn = null;
    this.button(this.tools, "‹", "The step before", () => this.move(-1));
    this.label = this.tools.appendChild(element("span", "nbdist-step"));
    this.button(this.tools, "›", "The step after", () => this.move(1));
    this.follow = this.button(this.tools, "Newest", "Follow the newest step", () => this.pin(null));
    this.tools.append(legend);
    this.root.tabIndex = 0;
    this.root.addEventListener("keydown", (event) => {
      if (event.target !== this.root) return;
      if (event.key === "ArrowLeft") this.move(-1);
      else if (event.key === "ArrowRight") this.move(1);
      else if (event.key === "l") this.pin(null);
      else return;
      event.preventDefault();
    });
  }

  /** Overridden by each view. */
  draw() {}

  /** @param {T[]} known @param {string} none why there are none, where there are none @param {boolean} isLast no more will come for now */
  take(known, none, isLast) {
    this.explain(known.length ? "" : none);
    if (!known.length) {
      this.known = [];
      return;
    }
    const chart = this.isReady ? this.charts[0] : null;
    const isShown = this.known.length > 0 && this.shownOn === chart;
    if (isShown && !isLast && performance.now() - this.knownSince < SHOWN_MS) return;
    this.known = known;
    this.knownSince = performance.now();
    this.shownOn = chart;
    if (chart && !this.pinned) this.draw();
    this.fillTwin(true);
  }

  /** @returns {T | undefined} */
  get chosen() {
    const pinned = this.known.find((entry) => keyOf(entry) === this.pinned);
    return pinned ?? this.known[this.known.length - 1];
  }

  /** @param {string | null} key */
  pin(key) {
    this.pinned = key;
    this.draw();
  }

  /** @override */
  whole() {
    super.whole();
    this.draw(); // a pinned step is drawn at no frame
  }

  /** @param {number} by */
  move(by) {
    const place = this.known.findIndex((entry) => entry === this.chosen) + by;
    if (place >= 0 && place < this.known.length) this.pin(keyOf(this.known[place]));
  }

  /** @param {Attempt} entry */
  tell(entry) {
    const again = entry.attempt ? `, attempt ${entry.attempt + 1}` : "";
    this.label.textContent = `step ${number(entry.step)}${again}`;
    this.follow.disabled = !this.pinned;
  }
}

/** Bars of a timeline, in ms. */
export class Bars {
  constructor() {
    /** @type {Record<string, (number | string)[]>} */
    this.columns = { left: [], right: [], bottom: [], top: [], colour: [], hatch: [], what: [], who: [] };
    Object.assign(this.columns, { ms: [], size: [], letter: [] });
  }

  /**
   * @param {number} from @param {number} to @param {number} top @param {number} height @param {string} colour
   * @param {string} hatch @param {string} what @param {number} slot @param {string} letter @param {string} bytes
   */
  add(from, to, top, height, colour, hatch, what, slot, letter, bytes) {
    const { columns } = this;
    const values = { left: from * 1000, right: to * 1000, bottom: top + height, top, colour, hatch };
    const more = { what, who: `slot ${slot}`, ms: (to - from) * 1000, size: bytes, letter };
    for (const [name, value] of Object.entries({ ...values, ...more })) columns[name].push(value);
  }

  /** Names of the bars that have room for one. @param {number} room */
  letters(room) {
    const { left, right, top, bottom, letter } = this.columns;
    /** @type {{x: number[], y: number[], letter: (string | number)[]}} */
    const found = { x: [], y: [], letter: [] };
    left.forEach((from, i) => {
      if (Number(right[i]) - Number(from) < room) return;
      found.x.push((Number(from) + Number(right[i])) / 2);
      found.y.push((Number(top[i]) + Number(bottom[i])) / 2);
      found.letter.push(letter[i]);
    });
    return found;
  }
}

/** A unit for values up to this, and how many bytes it has. @param {number} most @returns {[string, number]} */
export function scaleOf(most) {
  if (most >= 2 ** 30) return ["GiB", 2 ** 30];
  return most >= 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
}

/** Bars of bytes, in a lane for each slot. */
export class Lengths {
  /** @param {number[]} slots in the order of their lanes @param {number} most bytes of the longest bar, about */
  constructor(slots, most) {
    const [unit, scale] = scaleOf(most);
    this.unit = unit;
    this.scale = scale;
    this.lanes = new Map(slots.map((slot, lane) => [slot, lane]));
    /** @type {Map<number, number>} */ this.ends = new Map();
    /** @type {Record<string, (number | string)[]>} */
    this.columns = { left: [], right: [], bottom: [], top: [], colour: [], hatch: [], slot: [], what: [], size: [], detail: [] };
  }

  /** Of the longest, in its unit. */
  get end() {
    return this.columns.right.map(Number).reduce((most, right) => Math.max(most, right), 0);
  }

  /** Behind the slot's other ones. @param {number} slot @param {number} bytes @param {string} colour @param {Record<string, string>} more */
  add(slot, bytes, colour, more) {
    const from = this.ends.get(slot) ?? 0;
    this.ends.set(slot, from + bytes);
    this.put(slot, 0.15, 0.85, bytes, colour, more, from);
  }

  /**
   * @param {number} slot @param {number} top @param {number} bottom in its lane @param {number} bytes @param {string} colour
   * @param {Record<string, string>} more what it is, in words @param {number} [from]
   */
  put(slot, top, bottom, bytes, colour, more, from = 0) {
    const lane = this.lanes.get(slot);
    if (lane === undefined || !bytes) return;
    const values = { left: from / this.scale, right: (from + bytes) / this.scale, top: lane + top, bottom: lane + bottom };
    const all = { ...values, colour, hatch: " ", slot, ...more };
    for (const [name, value] of Object.entries(all)) this.columns[name].push(value);
  }
}

/** @param {[string, string][]} keys colour and what it stands for @param {[string, string][]} hatched likewise */
export function legendOf(keys, hatched) {
  const made = element("span", "nbdist-legend");
  for (const [list, more] of /** @type {const} */ ([[keys, ""], [hatched, " nbdist-hatched"]])) {
    for (const [colour, what] of list) {
      made.appendChild(element("span", `nbdist-key${more}`, what)).style.setProperty("--nbdist-slot", colour);
    }
  }
  return made;
}
