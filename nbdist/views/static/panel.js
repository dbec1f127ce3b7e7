// A panel: its question as the title, a chart or a sentence why there is none, a table twin.

import { Chart } from "./charts.js";
import { element } from "./format.js";

/** @typedef {import("./store.js").Store} Store */
/** @typedef {{header: string[], rows: (string | Node)[][], note?: string}} Twin */

/** @param {HTMLTableElement} table @param {Twin} twin */
export function fillTable(table, { header, rows, note }) {
  const head = element("thead");
  const line = head.appendChild(element("tr"));
  for (const name of header) {
    const cell = line.appendChild(element("th", "", name));
    cell.scope = "col";
  }
  const body = element("tbody");
  for (const row of rows) {
    const made = body.appendChild(element("tr"));
    for (const cell of row) made.appendChild(element("td")).append(cell);
  }
  table.replaceChildren(...(note ? [element("caption", "", note)] : []), head, body);
}

export class Panel {
  /**
   * @param {object} options
   * @param {HTMLElement} options.parent
   * @param {string} options.name of the panel, in its class
   * @param {string} options.question its title
   * @param {string[]} options.figures
   * @param {import("./types").Code} options.code
   */
  constructor({ parent, name, question, figures, code }) {
    this.name = name;
    this.question = question;
    this.root = parent.appendChild(element("section", `nbdist-panel nbdist-${name}`));
    this.root.setAttribute("aria-label", question);
    const head = this.root.appendChild(element("div", "nbdist-head"));
    head.append(element("h3", "", question));
    this.age = head.appendChild(element("span", "nbdist-age"));
    this.toggle = this.button(head, "Table", "Show the numbers as a table", () => this.flip());
    this.button(head, "Whole", "Show all again after a zoom", () => this.whole());
    this.button(head, "PNG", "Save this chart as a picture", () => this.save());
    this.said = this.root.appendChild(element("p", "nbdist-said"));
    this.tools = this.root.appendChild(element("div", "nbdist-tools"));
    this.body = this.root.appendChild(element("div", "nbdist-body"));
    this.charts = figures.map((figure) => {
      const place = this.body.appendChild(element("div", "nbdist-chart"));
      place.setAttribute("role", "img");
      return new Chart(code, figure, place);
    });
    this.empty = this.root.appendChild(element("p", "nbdist-empty"));
    this.table = element("table", "nbdist-table");
    this.scroller = this.root.appendChild(element("div", "nbdist-scroller"));
    this.scroller.append(this.table);
    this.scroller.hidden = true;
    this.isEmpty = false;
    /** @type {() => Twin} */ this.twin = () => ({ header: [], rows: [] });
    this.fitted = 0;
    /** @type {Store | undefined} */ this.store = undefined;
  }

  /** @param {HTMLElement} parent @param {string} label @param {string} title @param {() => void} act */
  button(parent, label, title, act) {
    const made = parent.appendChild(element("button", "nbdist-button", label));
    made.type = "button";
    made.title = title;
    made.addEventListener("click", act);
    return made;
  }

  get showsTable() {
    return !this.scroller.hidden;
  }

  flip() {
    this.scroller.hidden = !this.scroller.hidden;
    this.body.hidden = this.showsTable || this.isEmpty;
    this.toggle.textContent = this.showsTable ? "Chart" : "Table";
    this.toggle.setAttribute("aria-pressed", String(this.showsTable));
    this.fillTwin(true);
  }

  /** At most once a second: a table is read, not watched. @param {boolean} [now] */
  fillTwin(now = false) {
    if (!this.showsTable || (!now && performance.now() - this.fitted < 1000)) return;
    this.fitted = performance.now();
    fillTable(this.table, this.twin());
  }

  /** What the chart shows, in words; also for those who do not see it. @param {string} sentence */
  say(sentence) {
    if (this.said.textContent === sentence) return;
    this.said.textContent = sentence;
    for (const chart of this.charts) {
      chart.place.setAttribute("aria-label", `${this.question} ${sentence}`);
    }
  }

  /** @param {string} why there is nothing to draw; empty: there is */
  explain(why) {
    this.isEmpty = Boolean(why);
    this.empty.textContent = why;
    this.empty.hidden = !why;
    this.tools.hidden = this.said.hidden = this.isEmpty;
    this.body.hidden = this.isEmpty || this.showsTable;
    if (why) this.say("");
  }

  /** Redrawn with its next values, which come at once where they come no more. */
  whole() {
    for (const chart of this.charts) chart.whole();
    if (this.store) this.update(this.store);
  }

  /** Overridden by each view. @param {Store} store */
  update(store) {
    this.store = store;
  }

  /** Charts that can be filled now. Those that cannot yet are made as soon as they are seen. */
  get isReady() {
    return this.charts.every((chart) => chart.isReady);
  }

  async mount() {
    await Promise.all(this.charts.map((chart) => chart.mount()));
  }

  /** Chart and title on one canvas. @param {string} ground @param {string} ink */
  picture(ground, ink) {
    const parts = this.isEmpty || !this.isReady ? [] : this.charts.map((chart) => chart.picture());
    const canvases = parts.flatMap((part) => (part ? [part] : []));
    if (!canvases.length) return null;
    const head = 30 * devicePixelRatio;
    const made = document.createElement("canvas");
    made.width = Math.max(...canvases.map((canvas) => canvas.width));
    made.height = head + canvases.reduce((sum, canvas) => sum + canvas.height, 0);
    const pen = made.getContext("2d");
    if (!pen) return null;
    pen.fillStyle = ground;
    pen.fillRect(0, 0, made.width, made.height);
    pen.fillStyle = ink;
    pen.font = `600 ${14 * devicePixelRatio}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    const edge = 10 * devicePixelRatio;
    pen.fillText(this.question, edge, head / 2, made.width - 2 * edge); // narrower rather than cut
    let y = head;
    for (const canvas of canvases) {
      pen.drawImage(canvas, 0, y);
      y += canvas.height;
    }
    return made;
  }

  save() {
    const style = getComputedStyle(this.root);
    const ground = style.getPropertyValue("--nbdist-ground").trim() || "#ffffff";
    this.picture(ground, style.color)?.toBlob((blob) => {
      if (!blob) return;
      const link = element("a");
      link.href = URL.createObjectURL(blob);
      link.download = `nbdist-${this.name}.png`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    });
  }

  /** @param {string} text */
  setAge(text) {
    if (this.age.textContent !== text) this.age.textContent = text;
  }

  dispose() {
    for (const chart of this.charts) chart.dispose();
  }
}
