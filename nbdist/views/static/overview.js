// The overview card: six numbers that say how the run stands.

import { counted, element, lossText, median, ms, NONE, number, percent, runPace, size, stepsText } from "./format.js";
import { bubble } from "./pipeline.js";
import { shares } from "./sync.js";
import { verdict } from "./throughput.js";

/** @typedef {import("./store.js").Store} Store */

const RECENT_STEPS = 20;
const PHASE_WORDS = { running: "whole", forming: "forming", restoring: "restoring" };

/** Samples a second over the last steps, stalls included, also the one that goes on. @param {Store} store */
export function pace(store) {
  const seconds = store.rows.get("seconds").slice(-RECENT_STEPS);
  const samples = store.rows.get("samples").slice(-RECENT_STEPS);
  const time = seconds.reduce((sum, s) => sum + s, store.stall_s);
  return time > 0 ? samples.reduce((sum, n) => sum + n, 0) / time : NaN;
}

/** How the run stands, or stood when the kernel was lost, in two lines. @param {Store} store @returns {string[]} */
export function summary(store) {
  const { world, run, rows, incidents } = store;
  if (!world) return [];
  const losses = rows.get("loss");
  const stalls = [...incidents.values()].flatMap(({ stall_s }) => (stall_s === null ? [] : [stall_s]));
  const longest = stalls.length ? `, longest stall ${ms(Math.max(...stalls))} ms` : "";
  return [
    run ? `${run.name || "run"}: ${store.lost || run.state} after ${stepsText(run)}` : store.lost || "no run",
    [
      `${counted(world.world_size, "rank")}, generation ${world.generation}`,
      ...(losses.length ? [`loss ${lossText(losses[0])} to ${lossText(losses[losses.length - 1])}`] : []),
      ...(losses.length ? [`${number(runPace(run))} samples/s over the run, stalls included`] : []),
      `${counted(store.numIncidents, "incident")}${longest}`,
    ].join("   ·   "),
  ];
}

export class Overview {
  /** @param {HTMLElement} parent */
  constructor(parent) {
    this.root = parent.appendChild(element("section", "nbdist-overview"));
    this.root.setAttribute("aria-label", "How does the run stand?");
    this.chip = this.root.appendChild(element("div", "nbdist-chip"));
    this.cards = this.root.appendChild(element("div", "nbdist-cards"));
    /** @type {Map<string, {label: HTMLElement, value: HTMLElement, detail: HTMLElement}>} */ this.shown = new Map();
    for (const name of ["step", "loss", "pace", "ranks", "overlap", "slowest", "memory"]) {
      const card = this.cards.appendChild(element("div", `nbdist-card nbdist-card-${name}`));
      const label = card.appendChild(element("div", "nbdist-label"));
      const value = card.appendChild(element("div", "nbdist-value", NONE));
      const detail = card.appendChild(element("div", "nbdist-detail"));
      label.textContent = LABELS[name];
      this.shown.set(name, { label, value, detail });
    }
    this.spark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.spark.setAttribute("class", "nbdist-spark");
    this.spark.setAttribute("viewBox", "0 0 100 24");
    this.spark.setAttribute("preserveAspectRatio", "none");
    this.spark.setAttribute("aria-hidden", "true");
    this.path = this.spark.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
    this.cards.querySelector(".nbdist-card-loss")?.append(this.spark);
  }

  /** @param {string} name @param {string} value @param {string} detail */
  set(name, value, detail) {
    const card = this.shown.get(name);
    if (!card) return;
    if (card.value.textContent !== value) card.value.textContent = value;
    if (card.detail.textContent !== detail) card.detail.textContent = detail;
  }

  /** @param {Store} store */
  update(store) {
    const { world, run, rows } = store;
    if (!world) return;
    const state = run ? run.state : "no run";
    const phase = PHASE_WORDS[/** @type {keyof PHASE_WORDS} */ (world.phase)] ?? world.phase;
    const reason = run?.fault || (world.healthy ? "" : world.reason);
    const { stall_s, silent, lost } = store;
    const stalls = stall_s ? [`no step for ${number(stall_s)} s`] : [];
    const silences = silent.map(({ rank, silent_s }) => `rank ${rank} silent for ${number(silent_s)} s`);
    const words = lost ? [lost] : [state, `the group is ${phase}`, reason, [...stalls, ...silences].join("; ")];
    this.chip.dataset.state = lost ? "lost" : stall_s || silent.length ? "stalled" : world.phase === "running" ? state : world.phase;
    this.chip.textContent = words.filter(Boolean).join(" · ");
    const losses = rows.get("loss");
    const first = losses.length ? `from ${lossText(losses[0])}` : store.isOver ? "no step was committed" : "no step is committed yet";
    const [steps, ...of] = run ? stepsText(run).split(" ") : [NONE, "no run"];
    this.set("step", steps, of.join(" "));
    this.set("loss", lossText(losses[losses.length - 1]), first);
    if (store.isOver) this.set("pace", number(runPace(run)), "samples/s over the run, stalls included");
    else if (store.isPaused) this.set("pace", "paused", `until then ${number(pace(store))} samples/s, last ${RECENT_STEPS} steps`);
    else this.set("pace", number(pace(store)), stall_s ? `samples/s; no step for ${number(stall_s)} s` : `samples/s, last ${RECENT_STEPS} steps`);
    this.set("ranks", `${world.world_size}`, `of ${world.size}; generation ${world.generation}`);
    this.setOverlap(store);
    const slow = verdict(store);
    this.set("slowest", slow.name, slow.detail);
    const used = world.seats.map((seat) => seat.memory_bytes).filter((bytes) => bytes > 0);
    const most = used.length ? Math.max(...used) : NaN;
    const owner = world.seats.find((seat) => seat.memory_bytes === most);
    this.set("memory", size(most), owner ? `slot ${owner.slot}; usual ${size(median(used))}` : "");
    this.drawSpark(losses);
  }

  /** What of the sums is hidden; of a pipeline, which sums none, what of the time is bubble. @param {Store} store */
  setOverlap(store) {
    const label = this.shown.get("overlap")?.label;
    const name = store.isPipeline ? "bubble" : LABELS.overlap;
    if (label && label.textContent !== name) label.textContent = name;
    if (store.isPipeline) {
      const { idle, why } = bubble(store);
      return this.set("overlap", percent(idle), why);
    }
    const { hidden, why } = shares(store);
    return this.set("overlap", percent(hidden), why);
  }

  /** @param {Float64Array} losses */
  drawSpark(losses) {
    const stride = Math.max(1, Math.ceil(losses.length / 100));
    const known = losses.filter((value, i) => i % stride === 0 && Number.isFinite(value));
    if (known.length < 2) return this.path.setAttribute("d", "");
    const low = Math.min(...known);
    const height = Math.max(...known) - low || 1;
    const points = [...known].map((value, i) => {
      const x = (100 * i) / (known.length - 1);
      return `${x.toFixed(1)} ${(23 - (22 * (value - low)) / height).toFixed(1)}`;
    });
    this.path.setAttribute("d", `M${points.join("L")}`);
  }
}

/** @type {Record<string, string>} */
const LABELS = {
  step: "steps",
  loss: "loss",
  pace: "throughput",
  ranks: "ranks",
  overlap: "sync hidden",
  slowest: "slowest",
  memory: "most memory",
};
