// Membership: who was in the job when, and what each incident cost.

import { counted, element, ms, NONE, number } from "./format.js";
import { fillTable, Panel } from "./panel.js";

/** @typedef {import("./store.js").Store} Store */

const MEMBER = "member";
const STATES = ["empty", "starting", "replaying", "ready", MEMBER, "leaving", "given up"];
const RUNNING = 3;
/** Of an engine that hung; dark on dark pages, too. */
const SILENT = "#50555b";
const MAX_ROWS = 50;
const MAX_ANATOMIES = 12;
const LANES_PX = 330;
const MAX_LANE_PX = 24;
const MIN_LANE_PX = 4;
const HEAD_PX = 18;
/** Share of the chart's width that a generation's number takes. */
const LABEL_WIDTH = 0.03;
const PARTS = /** @type {const} */ ([
  ["detect_s", "detect", "#D55E00", " "],
  ["regroup_s", "regroup", "#0072B2", "/"],
  ["restore_s", "restore", "#009E73", "."],
]);
/** Of states other than member: colour, hatch. @type {Record<string, [string, string]>} */
const LOOKS = {
  empty: ["rgba(128,128,128,0.12)", "/"],
  starting: ["rgba(128,128,128,0.35)", "."],
  replaying: ["rgba(128,128,128,0.45)", "."],
  ready: ["rgba(128,128,128,0.55)", " "],
  leaving: ["rgba(128,128,128,0.35)", "/"],
  "given up": ["rgba(128,128,128,0.25)", "x"],
};

export class Membership extends Panel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code @param {import("./charts.js").Look} look */
  constructor(parent, code, look) {
    super({
      parent,
      code,
      name: "membership",
      question: "Who was in the job when, and what did each failure cost?",
      figures: ["membership", "incidents"],
    });
    this.look = look;
    this.keys = element("div", "nbdist-tools nbdist-legend", "What each incident took:");
    for (const [, part, colour, hatch] of PARTS) {
      const item = this.keys.appendChild(element("span", "nbdist-key", part));
      item.style.setProperty("--nbdist-slot", colour);
      item.classList.toggle("nbdist-hatched", hatch === "/");
    }
    this.charts[1].place.before(this.keys);
    this.tools.append("Bars in colour: member of the group. Grey: in no group. Dark: silent. Numbers: generations.");
    this.list = element("table", "nbdist-table nbdist-incidents");
    const place = element("div", "nbdist-scroller");
    place.append(this.list);
    this.root.append(place);
    this.twin = () => this.numbers();
    this.written = "";
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    this.writeIncidents(store);
    const incidents = [...store.incidents.values()];
    const stalls = incidents.flatMap((i) => (i.stall_s === null ? [] : [i.stall_s]));
    const worst = stalls.length ? `, the longest stall ${ms(Math.max(...stalls))} ms` : "";
    this.explain("");
    this.say(
      `${counted(store.world?.world_size ?? 0, "rank")} in generation ${store.world?.generation ?? NONE}; ` +
        `${counted(store.numIncidents, "incident")}${worst}.`,
    );
    this.fillTwin();
    if (!this.isReady) return;
    this.drawLives(store);
    this.drawParts(store);
  }

  /** @param {Store} store */
  drawLives(store) {
    const { slots, seats, began, now } = store;
    const [chart] = this.charts;
    chart.place.hidden = !seats.length; // a run that is over is told without them
    /** @type {Record<string, (number | string)[]>} */
    const lives = { left: [], right: [], bottom: [], top: [], colour: [], hatch: [], slot: [], state: [] };
    slots.forEach((slot, lane) => {
      const places = [...seats.get("slot").keys()].filter((i) => seats.get("slot")[i] === slot);
      places.forEach((i, order) => {
        const next = places[order + 1];
        const end = next === undefined ? now : seats.get("at")[next];
        const state = STATES[seats.get("state")[i]] ?? "";
        const [colour, hatch] = state === MEMBER ? [this.look.colour(slot), " "] : LOOKS[state] ?? ["gray", " "];
        const generation = state === MEMBER ? `, generation ${seats.get("generation")[i]}` : "";
        const values = { left: seats.get("at")[i] - began, right: end - began, bottom: lane + 0.85, top: lane + 0.15 };
        const more = { colour, hatch, slot, state: `${state}${generation}` };
        for (const [name, value] of Object.entries({ ...values, ...more })) lives[name].push(value);
      });
    });
    for (const { slot, from, to } of store.silences) {
      const lane = slots.indexOf(slot);
      const values = { left: from - began, right: to - began, bottom: lane + 0.85, top: lane + 0.15, slot };
      const more = { colour: SILENT, hatch: "x", state: "silent, until it was ended" };
      for (const [name, value] of Object.entries({ ...values, ...more })) lives[name].push(value);
    }
    const each = Math.max(MIN_LANE_PX, Math.min(MAX_LANE_PX, LANES_PX / slots.length));
    chart.lanes(slots.map((slot) => `slot ${slot}`), each, HEAD_PX);
    chart.set("lives", lives);
    chart.set("generations", this.generations(store, -HEAD_PX / each));
  }

  /** A line where each generation begins to run. @param {Store} store @param {number} top of the chart */
  generations({ phases, began, now }, top) {
    /** @type {{x: number[], y: number[], text: string[], ink: string[]}} */
    const found = { x: [], y: [], text: [], ink: [] };
    const near = (now - began) * LABEL_WIDTH;
    let [last, first] = [-1, -1];
    for (let i = 0; i < phases.length; i++) {
      const generation = phases.get("generation")[i];
      if (phases.get("phase")[i] !== RUNNING || generation === last) continue;
      last = generation;
      const x = phases.get("at")[i] - began;
      const place = found.x.length - 1;
      if (place >= 0 && x - found.x[place] < near) found.text[place] = ""; // one label for both
      else first = generation;
      found.x.push(x);
      found.y.push(top * 0.95);
      found.text.push(first === generation ? `${generation}` : `${first}–${generation}`);
      found.ink.push(this.look.text);
    }
    return found;
  }

  /** @param {Store} store */
  drawParts(store) {
    const chart = this.charts[1];
    const shown = [...store.incidents].slice(-MAX_ANATOMIES);
    /** @type {Record<string, (number | string)[]>} */
    const parts = { left: [], right: [], bottom: [], top: [], colour: [], hatch: [], number: [], part: [], ms: [] };
    const lengths = shown.flatMap(([, incident]) => PARTS.map(([key]) => (incident[key] ?? 0) * 1000)).filter((length) => length > 0);
    const least = 10 ** Math.floor(Math.log10(Math.min(...lengths, 10)));
    const each = 0.76 / PARTS.length;
    shown.forEach(([count, incident], lane) => {
      PARTS.forEach(([key, part, colour, hatch], i) => {
        const length = (incident[key] ?? 0) * 1000;
        if (!length) return;
        const top = lane + 0.12 + i * each;
        const values = { left: least, right: length, bottom: top + each, top, colour, hatch };
        const more = { number: `${count}`, part, ms: length };
        for (const [name, value] of Object.entries({ ...values, ...more })) parts[name].push(value);
      });
    });
    chart.place.hidden = this.keys.hidden = !shown.length;
    chart.lanes(shown.map(([count, incident]) => `${count} ${incident.kind}`), 30);
    chart.range(least, Math.max(...lengths, 10 * least) * 1.2);
    chart.set("parts", parts);
  }

  /** Always there: what to look at after a kill. @param {Store} store */
  writeIncidents(store) {
    const header = ["#", "what", "slots", "stall ms", "detect ms", "regroup ms", "restore ms", "step", "gen", "cause"];
    header.push("steps again", "samples lost / again");
    const rows = [...store.incidents].slice(-MAX_ROWS).reverse().map(([count, i]) => {
      const symbol = this.look.settings.symbols[i.kind] ?? "";
      const after = i.generation_after === null ? "…" : `${i.generation_after}`;
      return [
        `${count}`,
        `${symbol} ${i.kind}`,
        i.slots.join(", ") || NONE,
        ms(i.stall_s),
        ms(i.detect_s),
        ms(i.regroup_s),
        ms(i.restore_s),
        i.step === null ? NONE : number(i.step),
        `${i.generation_before} → ${after}`,
        i.cause,
        number(i.steps_repeated),
        `${i.samples_lost} / ${i.samples_repeated}`,
      ];
    });
    const text = JSON.stringify(rows);
    if (text === this.written) return;
    this.written = text;
    if (rows.length) fillTable(this.list, { header, rows });
    else this.list.replaceChildren(element("caption", "", "No incident so far: kill a rank to see one."));
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    const header = ["slot", "from s", "state", "rank", "generation"];
    const { store } = this;
    if (!store) return { header, rows: [] };
    const { seats } = store;
    const rows = [...seats.get("slot").keys()].slice(-MAX_ROWS).map((i) => [
      `${seats.get("slot")[i]}`,
      number(seats.get("at")[i] - store.began, 2),
      STATES[seats.get("state")[i]] ?? NONE,
      seats.get("rank")[i] >= 0 ? `${seats.get("rank")[i]}` : NONE,
      `${seats.get("generation")[i]}`,
    ]);
    return { header, rows: rows.reverse() };
  }
}
