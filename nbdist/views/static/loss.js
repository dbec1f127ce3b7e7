// Loss over steps, samples or seconds.

import { counted, dots, element, lossText, NONE, number } from "./format.js";
import { Panel } from "./panel.js";
import { Table } from "./store.js";

/** @typedef {import("./store.js").Store} Store */

const MAX_TABLE_ROWS = 60;
/** Of a loss: one step differs little from the next. */
const TABLE_DIGITS = 5;
/** Shares of a chart's width and height that a marker with its number takes. */
const MARK_WIDTH = 0.05;
const MARK_DROP = 0.1;
const MARK_LEVELS = 4;

/**
 * A line and a numbered marker for each incident; those that are close stand below one another.
 * @param {Store} store @param {import("./charts.js").Look} look
 * @param {Float64Array} values that the chart shows @param {Float64Array} x of each committed step
 */
export function marks(store, look, values, x) {
  const known = values.filter(Number.isFinite);
  const high = known.length ? Math.max(...known) : 1;
  const drop = (high - (known.length ? Math.min(...known) : 0)) * MARK_DROP;
  const near = ((x[x.length - 1] ?? 0) - (x[0] ?? 0)) * MARK_WIDTH;
  let level = 0;
  /** @type {Record<string, (string | number)[]>} */
  const columns = { x: [], y: [], number: [], what: [], colour: [], marker: [], ink: [] };
  const steps = store.rows.get("step");
  for (const [count, incident] of store.incidents) {
    const step = store.place(incident);
    if (step === null || !steps.length) continue;
    let place = 0;
    while (place < steps.length - 1 && steps[place] < step) place++;
    const last = columns.x[columns.x.length - 1];
    level = last !== undefined && x[place] - Number(last) < near ? (level + 1) % MARK_LEVELS : 0;
    columns.x.push(x[place]);
    columns.y.push(high - level * drop);
    columns.number.push(`${count}`);
    columns.what.push(`${incident.kind}: slot ${incident.slots.join(", ")}; ${incident.cause}`);
    columns.colour.push(incident.slots.length ? look.colour(incident.slots[0]) : "gray");
    columns.ink.push(look.text);
    columns.marker.push(look.settings.markers[incident.kind] ?? "circle");
  }
  return columns;
}

/** From the first that is known to the last; of many not all have a row. @param {Table} rows */
function numSteps(rows) {
  const steps = rows.get("step");
  return steps.length ? steps[steps.length - 1] - steps[0] + 1 : 0;
}

export class Loss extends Panel {
  /** @param {HTMLElement} parent @param {import("./types").Code} code @param {import("./charts.js").Look} look */
  constructor(parent, code, look) {
    super({
      parent,
      code,
      name: "loss",
      question: "Is it learning, and did recovery disturb it?",
      figures: ["loss"],
    });
    this.look = look;
    /** @type {{title: string, rows: Table} | null} */ this.reference = null;
    const label = this.tools.appendChild(element("label", "", "over "));
    this.over = label.appendChild(element("select"));
    for (const name of ["steps", "samples", "seconds"]) this.over.append(new Option(name));
    this.over.addEventListener("change", () => this.store && this.update(this.store));
    this.twin = () => this.numbers();
  }

  /** Another run, to be drawn beneath. @param {string} title @param {import("./types").Columns} rows */
  compare(title, rows) {
    this.reference = { title, rows: new Table(Infinity) };
    this.reference.rows.append(rows);
  }

  /** @param {Table} rows */
  x(rows) {
    if (this.over.value === "steps") return rows.get("step");
    if (this.over.value === "seconds") return rows.get("at").map((at) => at - rows.get("at")[0]);
    let sum = 0;
    const steps = rows.get("step"); // of many not all have a row: those between are as large
    return rows.get("samples").map((n, i) => (sum += n * (i ? steps[i] - steps[i - 1] : 1)));
  }

  /** @override @param {Store} store */
  update(store) {
    this.store = store;
    const { rows } = store;
    if (!rows.length) {
      const none = store.run ? "No step is committed yet." : "No run has begun: %dist_train begins one.";
      const isOver = store.run && store.isOver;
      this.explain(isOver ? "No step was committed." : `${none} The loss comes with the first committed step.`);
      return;
    }
    this.explain("");
    const losses = rows.get("loss");
    const bad = losses.findIndex((value) => !Number.isFinite(value));
    const wild = bad < 0 ? "" : ` It is not a number from step ${number(rows.get("step")[bad])} on.`;
    const repeated = [...store.incidents.values()].reduce((sum, i) => sum + i.samples_lost + i.samples_repeated, 0);
    const beneath = this.reference ? ` Beneath, in grey: ${this.reference.title}.` : "";
    this.say(
      `From ${lossText(losses[0])} to ${lossText(losses[losses.length - 1])} in ${counted(numSteps(rows), "step")}; ` +
        `${counted(store.numIncidents, "incident")}, ${counted(repeated, "sample")} lost or repeated.${wild}${beneath}`,
    );
    this.fillTwin();
    if (!this.isReady) return;
    const [chart] = this.charts;
    const x = this.x(rows);
    chart.figure.below[0].axis_label = this.over.value === "steps" ? "step" : this.over.value;
    const shown = { x, loss: losses, step: rows.get("step") };
    chart.set("loss", { ...shown, generation: rows.get("generation"), ranks: rows.get("world_size") });
    chart.set("loss_dots", dots(x, losses));
    if (this.reference) {
      const { rows: other } = this.reference;
      chart.set("reference", { x: this.x(other), value: other.get("loss") });
    }
    chart.set("marks", marks(store, this.look, losses, x));
  }

  /** @returns {import("./panel.js").Twin} */
  numbers() {
    const header = ["step", "loss", "samples", "ms", "lr", "ranks", "generation"];
    const rows = this.store?.rows;
    if (!rows) return { header, rows: [] };
    const stride = Math.max(1, Math.ceil(rows.length / MAX_TABLE_ROWS));
    const places = [...Array(rows.length).keys()].filter((i) => i % stride === 0 || i === rows.length - 1);
    const texts = places.map((i) => [
      number(rows.get("step")[i]),
      lossText(rows.get("loss")[i], TABLE_DIGITS),
      number(rows.get("samples")[i]),
      number(rows.get("seconds")[i] * 1000),
      Number.isFinite(rows.get("lr")[i]) ? rows.get("lr")[i].toPrecision(3) : NONE,
      number(rows.get("world_size")[i]),
      number(rows.get("generation")[i]),
    ]);
    const num = numSteps(rows);
    return { header, rows: texts.reverse(), note: texts.length < num ? `${number(texts.length)} of ${counted(num, "step")}` : "" };
  }
}
