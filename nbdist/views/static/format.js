// Numbers, durations and small pieces of a page. Pure, but for `element`.

export const NONE = "–";

/** @param {number | null | undefined} value @param {number} [digits] @returns {string} */
export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return new Intl.NumberFormat(undefined, {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  }).format(value);
}

/** "1 rank", "2 ranks". @param {number} count @param {string} word @returns {string} */
export function counted(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

/** How far a run is, by the rule of `facts.py`. @param {import("./types").Run} run */
export function stepsText({ first, step, target }) {
  const text = target ? `${number(step - first)} of ${counted(target - first, "step")}` : counted(step - first, "step");
  return first ? `${text}, from step ${number(first)} on` : text;
}

/** Samples a second over a whole run, stalls included, as `facts.pace` has it. @param {import("./types").Run | null} run */
export function runPace(run) {
  return run && run.seconds > 0 ? run.samples / run.seconds : NaN;
}

/**
 * Places of numbers without one beside them, which a line would not show; by the rule of `facts.lonely`.
 * @param {ArrayLike<number>} values @returns {number[]}
 */
export function lonely(values) {
  /** @type {number[]} */ const places = [];
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i]) && !Number.isFinite(values[i - 1]) && !Number.isFinite(values[i + 1])) places.push(i);
  }
  return places;
}

/** Those, as a chart draws them. @param {ArrayLike<number>} x @param {ArrayLike<number>} y */
export function dots(x, y) {
  const places = lonely(y);
  return { x: places.map((i) => x[i]), y: places.map((i) => y[i]) };
}

/** A duration in ms. @param {number | null | undefined} seconds @returns {string} */
export function ms(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const value = seconds * 1000;
  return number(value, value < 10 ? 2 : value < 100 ? 1 : 0);
}

/**
 * A loss, to so many digits that say something, by the rule of `facts.py`.
 * @param {number | null | undefined} value @param {number} [digits]
 */
export function lossText(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const text = value.toExponential(digits - 1);
  const power = Number(text.slice(text.indexOf("e") + 1));
  return value && (power < -3 || power > 4) ? text : number(value, Math.max(0, digits - 1 - power));
}

/**
 * For each interval the first row that is free when it begins, so that none is drawn over another; `lanes.stacked`.
 * @param {[number, number][]} intervals @returns {number[]}
 */
export function stacked(intervals) {
  /** @type {number[]} */ const free = [];
  /** @type {number[]} */ const rows = [];
  const order = [...intervals.keys()].sort((a, b) => intervals[a][0] - intervals[b][0] || intervals[a][1] - intervals[b][1]);
  for (const i of order) {
    const found = free.findIndex((since) => since <= intervals[i][0]);
    rows[i] = found < 0 ? free.length : found;
    free[rows[i]] = intervals[i][1];
  }
  return rows;
}

/** @param {number} bytes @returns {string} */
export function size(bytes) {
  if (!Number.isFinite(bytes) || bytes <= 0) return NONE;
  if (bytes >= 2 ** 30) return `${number(bytes / 2 ** 30, 2)} GiB`;
  const [value, unit] = bytes >= 2 ** 20 ? [bytes / 2 ** 20, "MiB"] : [bytes / 1024, "KiB"];
  return `${number(value, value < 100 ? 1 : 0)} ${unit}`;
}

/** @param {number} share of one @returns {string} */
export function percent(share) {
  return Number.isFinite(share) ? `${number(share * 100)} %` : NONE;
}

/** Of the finite ones; NaN where there is none. @param {Iterable<number>} values */
export function median(values) {
  const known = [...values].filter(Number.isFinite).sort((a, b) => a - b);
  if (!known.length) return NaN;
  const half = known.length >> 1;
  return known.length % 2 ? known[half] : (known[half - 1] + known[half]) / 2;
}

/** Parts of time that belong to at least one of the spans. @param {[number, number][]} spans */
export function union(spans) {
  const sorted = spans.filter(([a, b]) => b > a).sort((x, y) => x[0] - y[0]);
  /** @type {[number, number][]} */
  const joined = [];
  for (const [start, end] of sorted) {
    const last = joined[joined.length - 1];
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else joined.push([start, end]);
  }
  return joined;
}

/** @param {[number, number][]} spans apart from one another */
export function total(spans) {
  return spans.reduce((sum, [start, end]) => sum + end - start, 0);
}

/** Time that two unions have in common. @param {[number, number][]} a @param {[number, number][]} b */
export function common(a, b) {
  let sum = 0;
  for (const [s, e] of a) for (const [t, f] of b) sum += Math.max(0, Math.min(e, f) - Math.max(s, t));
  return sum;
}

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {string} [className] @param {string} [text]
 * @returns {HTMLElementTagNameMap[T]}
 */
export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
