// Agreement: whether replicas are identical, block by block, and since when they are not.

import { number } from "./format.js";
import { Panel } from "./panel.js";
import { legendOf } from "./steps.js";

/** @typedef {import("./store.js").Store} Store */
/** @typedef {{step: number, blocks: number, stride: number, isAnchor: boolean, differs: Map<number, number[]>}} Look */

const EQUAL_COLOUR = "#0072B2";
const DIFFERS_COLOUR = "#D55E00";
/** As `protocol.looks` has it. */
const EVERY = 100;
const MAX_NAMED = 4;
const MAX_SLOTS = 64;
const LANES_PX = 330;
const MAX_LANE_PX = 30;
const MIN_LANE_PX = 4;
/** Lanes that are lower have no room for a letter. */
const LETTER_PX = 14;
const NOTHING =
  "No two replicas are known that were compared. They are where ranks hold the whole model each, as with DataParallel, or what they have " +
  `agreed on, as with LocalSGD: after a run's first step and its last, after the first in each new group, and every ${EVERY} steps.`;

/** @param {number} num @param {string} what */
const counted = (num, what) => `${number(num)} ${what}${num === 1 ? "" : "s"}`;
/** Slots that differ, and in what. @param {Look} look */
const found = ({ differs }) => [...differs].filter(([, blocks]) => blocks.length);

/** Oldest first. @param {Store} store @returns {Look[]} */
export function looks({ agreement }) {
  const names = ["at", "step", "blocks", "stride", "anchors", "slot", "differs"];
  const [at, step, blocks, stride, anchors, slot, differs] = names.map((name) => agreement.get(name));
  /** @type {Map<number, Look>} */ const known = new Map();
  for (const i of [...at.keys()].sort((a, b) => at[a] - at[b] || slot[a] - slot[b])) {
    const look = known.get(at[i]) ?? { step: step[i], blocks: blocks[i], stride: stride[i], isAnchor: anchors[i] > 0, differs: new Map() };
    known.set(at[i], look);
    const places = Array.from({ length: look.blocks }, (_, block) => block);
    look.differs.set(
      slot[i],
      places.filter((block) => Math.floor(differs[i] / 2 ** block) % 2),
    );
  }
  return [...known.values()];
}

/** @param {Look} look */
function who(look) {
  const all = found(look);
  const parts = all.slice(0, MAX_NAMED).map(([slot, blocks]) => `slot ${slot} differs in ${blocks.length === 1 ? "block" : "blocks"} ${blocks.join(", ")}`);
  if (all.length > MAX_NAMED) parts.push(`and ${counted(all.length - MAX_NAMED, "other")}`);
  return parts.join(", ");
}

/** @param {Look[]} looks at least one */
function sentence(looks) {
  const newest = looks[looks.length - 1];
  const first = looks.find((look) => found(look).length);
  const share = newest.stride === 1 ? "" : `, one value in ${number(newest.stride)} of each block, others each time`;
  const how = `looked at every ${EVERY} steps${share}`;
  if (first && found(newest).length) return `At step ${newest.step} ${who(newest)}; first seen at step ${first.step}; ${how}.`;
  const before = first ? `; but at step ${first.step} ${who(first)}` : "";
  const num = `${counted(newest.differs.size, "replica")} in ${counted(newest.blocks, "block")}`;
  const what = newest.isAnchor ? `what all ${num} had come to at the last outer step was` : `all ${num} were`;
  return `At step ${newest.step} ${what} identical, bit for bit${before}; ${how}.`;
}

export class Agreement extends Panel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code */
  constructor(parent, code) {
    super({ parent, code, name: "agreement", question: "Are replicas identical?", figures: ["agreement"] });
    const keys = /** @type {[string, string][]} */ ([[EQUAL_COLOUR, "✓ equal"]]);
    const others = /** @type {[string, string][]} */ ([[DIFFERS_COLOUR, "✗ not as most have it"]]);
    this.tools.append(legendOf(keys, others));
    /** @type {Look[]} */ this.looks = [];
    this.twin = () => this.numbers();
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    this.looks = looks(store);
    if (!this.looks.length) {
      this.explain(NOTHING);
      return;
    }
    this.explain("");
    this.say(sentence(this.looks));
    this.fillTwin();
    if (this.isReady) this.draw();
  }

  draw() {
    const [chart] = this.charts;
    const { step, blocks, differs } = this.looks[this.looks.length - 1];
    const shown = [...differs].slice(0, MAX_SLOTS);
    const each = Math.max(MIN_LANE_PX, Math.min(MAX_LANE_PX, LANES_PX / shown.length));
    const names = ["left", "right", "bottom", "top", "colour", "hatch", "slot", "what", "size", "detail"];
    /** @type {Record<string, (number | string)[]>} */ const cells = Object.fromEntries(names.map((name) => [name, []]));
    /** @type {Record<string, (number | string)[]>} */ const letters = { x: [], y: [], letter: [] };
    shown.forEach(([slot, others], lane) => {
      for (let block = 0; block < blocks; block++) {
        const isOther = others.includes(block);
        const [colour, hatch] = isOther ? [DIFFERS_COLOUR, "/"] : [EQUAL_COLOUR, " "];
        const what = `block ${block} ${isOther ? "differs from what most have" : "is equal"}`;
        const cell = { left: block + 0.04, right: block + 0.96, top: lane + 0.06, bottom: lane + 0.94, colour, hatch, slot, what, size: `step ${step}`, detail: "" };
        for (const [name, value] of Object.entries(cell)) cells[name].push(value);
        if (each < LETTER_PX) continue;
        letters.x.push(block + 0.5);
        letters.y.push(lane + 0.5);
        letters.letter.push(isOther ? "✗" : "✓");
      }
    });
    chart.figure.below[0].axis_label = `blocks of the model, at step ${step}`;
    chart.lanes(
      shown.map(([slot]) => `slot ${slot}`),
      each,
    );
    chart.set("lengths", cells);
    chart.set("letters", letters);
    chart.range(0, blocks);
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    const newest = this.looks[this.looks.length - 1];
    const first = this.looks.find((look) => found(look).length);
    const list = (/** @type {number[] | undefined} */ blocks) => blocks?.join(", ") || "none";
    return {
      header: ["slot", `blocks that differ at step ${newest.step}`, first ? `and at step ${first.step}, the first` : "and before"],
      rows: [...newest.differs].map(([slot, blocks]) => [`${slot}`, list(blocks), list(first?.differs.get(slot))]),
    };
  }
}
